"""Teacher-forced scores: how probable the target finds a given text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trtspec.embedded.batch import SequenceRows, StepBatch
from trtspec.embedded.kvstore import KvStore
from trtspec.embedded.model import Decoder
from trtspec.engine import Scores
from trtspec.errors import InputError, Problem


@torch.inference_mode()
def score_text(
    model: Decoder, new_store: Callable[[int], KvStore], tokens: Sequence[int], chunk_tokens: int
) -> Scores:
    """Scores of ``tokens[1:]``, ``chunk_tokens`` rows a forward, in a store of its own.

    Takes memory for the KV of the text and a few times chunk x vocab numbers, in float32 (float64 if the
    model computes in that). Of equally likely tokens the lower id ranks first, as in greedy decoding.
    Raises InputError for no tokens, ids outside the vocabulary, a text longer than the model's positions.
    """
    problems = []
    if chunk_tokens < 1:
        problems.append(f"chunk_tokens {chunk_tokens} is below 1")
    if not tokens:
        problems.append("no tokens; give at least one")
    elif min(tokens) < 0 or max(tokens) >= model.spec.vocab_size:
        problems.append(f"a token id is outside the vocabulary of {model.spec.vocab_size}")
    if len(tokens) > model.spec.max_positions:
        problems.append(
            f"{len(tokens)} tokens exceed the model's {model.spec.max_positions} positions; split the text"
        )
    if problems:
        raise InputError([Problem(f"score: {problem}") for problem in problems])
    scores = Scores()
    if len(tokens) == 1:
        return scores
    num_rows = len(tokens) - 1
    text = torch.tensor(tokens, dtype=torch.int64, device=model.device)
    slots = torch.arange(num_rows, device=model.device)
    store = new_store(num_rows)
    for start in range(0, num_rows, chunk_tokens):
        stop = min(start + chunk_tokens, num_rows)
        batch = StepBatch(
            tokens=text[start:stop],
            positions=slots[start:stop],
            slots=slots[start:stop],
            sequences=(SequenceRows(0, stop - start, context=slots[:start]),),
            logit_rows=slots[: stop - start],
        )
        logits, _ = model.forward(batch, store)
        _append_rows(scores, logits, text[start + 1 : stop + 1])
    return scores


def _append_rows(scores: Scores, logits: Tensor, targets: Tensor) -> None:
    """Append one chunk. ``logits [rows, vocab]`` is overwritten; ``targets [rows] int64``."""
    realised = logits.gather(1, targets[:, None]).squeeze(1)
    scores.logprobs.extend((realised - logits.logsumexp(-1)).tolist())
    top = logits.argmax(-1, keepdim=True)
    top_logits = logits.gather(1, top)
    logits.scatter_(1, top, -torch.inf)
    second = logits.argmax(-1, keepdim=True)
    scores.top_tokens.extend(top.squeeze(1).tolist())
    scores.second_tokens.extend(second.squeeze(1).tolist())
    scores.margins.extend((top_logits - logits.gather(1, second)).squeeze(1).tolist())
