"""What the engine must reproduce: one request, one full forward per token, no cache, no batch, no drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trtspec.embedded.batch import SequenceRows, StepBatch
from trtspec.embedded.kvstore import KvStore
from trtspec.embedded.model import Decoder
from trtspec.embedded.sampling import TargetLaw, generator_draw
from trtspec.engine import Request

NewStore = Callable[[int], KvStore]


def full_forward(model: Decoder, new_store: NewStore, tokens: Sequence[int], num_logits: int = 1) -> Tensor:
    """[num_logits, vocab]: logits after each of the last ``num_logits`` tokens, all computed anew."""
    rows = torch.arange(len(tokens))
    batch = StepBatch(
        tokens=torch.tensor(tokens),
        positions=rows,
        slots=rows,
        sequences=(SequenceRows(0, len(tokens), context=rows[:0]),),
        logit_rows=rows[len(tokens) - num_logits :],
    )
    return model.forward(batch, new_store(len(tokens)))[0]


def generate_plainly(model: Decoder, new_store: NewStore, request: Request) -> tuple[int, ...]:
    draw = generator_draw(request.sampling.seed)
    tokens = list(request.prompt_tokens)
    for _ in range(request.max_new_tokens):
        logits = full_forward(model, new_store, tokens)
        tokens.append(TargetLaw(logits, request.sampling).sample(0, draw))
        if tokens[-1] in request.stop_tokens:
            break
    return tuple(tokens[len(request.prompt_tokens) :])
