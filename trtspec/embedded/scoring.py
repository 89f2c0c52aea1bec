"""Teacher-forced scores: how probable the target finds a given text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from trtspec.embedded.batch import SequenceRows, StepBatch
from trtspec.embedded.kvstore import KvStore
from trtspec.embedded.model import Decoder
from trtspec.engine import LawScores, Sampling, Scores
from trtspec.errors import InputError, Problem

NewStore = Callable[[int], KvStore]


@torch.inference_mode()
def score_text(model: Decoder, new_store: NewStore, tokens: Sequence[int], chunk_tokens: int) -> Scores:
    """Scores of ``tokens[1:]``, ``chunk_tokens`` rows a forward, in a store of its own.

    Takes memory for the KV of the text and a few times chunk x vocab numbers, in float32 (float64 if the
    model computes in that). Of equally likely tokens the lower id ranks first, as in greedy decoding.
    Raises InputError for no tokens, ids outside the vocabulary, a text longer than the model's positions.
    """
    scores = Scores()
    for logits, targets in _forced(model, new_store, tokens, chunk_tokens, 1):
        _append_rows(scores, logits, targets)
    return scores


@torch.inference_mode()
def score_rows(
    model: Decoder, new_store: NewStore, tokens: Sequence[int], chunk_tokens: int
) -> Iterator[NDArray[Any]]:
    """The log-probabilities of the whole vocabulary, ``[chunk, vocab]``; as :func:`score_text` otherwise."""
    for logits, _ in _forced(model, new_store, tokens, chunk_tokens, 1):
        yield logits.log_softmax(-1).cpu().numpy()


@torch.inference_mode()
def score_laws(
    model: Decoder,
    new_store: NewStore,
    tokens: Sequence[int],
    chunk_tokens: int,
    sampling: Sampling,
    first: int,
) -> LawScores:
    """What the law under ``sampling`` makes of ``tokens[first:]``; as :func:`score_text` otherwise.

    The law is written out here a second time, by a full sort, and shares nothing with
    :class:`trtspec.embedded.sampling.TargetLaw`: it is what drawn tokens are held to. Raises ValueError for a
    greedy ``sampling`` and for ``first`` below 1.
    """
    if sampling.greedy or first < 1:
        raise ValueError(f"no law to score: temperature {sampling.temperature}, first {first}")
    scores = LawScores()
    for logits, targets in _forced(model, new_store, tokens, chunk_tokens, first):
        _append_laws(scores, logits, targets, sampling)
    return scores


def _forced(
    model: Decoder, new_store: NewStore, tokens: Sequence[int], chunk_tokens: int, first: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """By chunks: logits ``[rows, vocab]`` before the tokens from ``first`` on, those tokens ``[rows]``."""
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
    num_rows = len(tokens) - 1
    if not num_rows:
        return
    text = torch.tensor(tokens, dtype=torch.int64, device=model.device)
    slots = torch.arange(num_rows, device=model.device)
    store = new_store(num_rows)
    for start in range(0, num_rows, chunk_tokens):
        stop = min(start + chunk_tokens, num_rows)
        wanted = max(start, first - 1)
        batch = StepBatch(
            tokens=text[start:stop],
            positions=slots[start:stop],
            slots=slots[start:stop],
            sequences=(SequenceRows(0, stop - start, context=slots[:start]),),
            logit_rows=torch.arange(wanted - start, max(stop, wanted) - start, device=model.device),
        )
        logits, _ = model.forward(batch, store)
        if wanted < stop:
            yield logits, text[wanted + 1 : stop + 1]


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


def _append_laws(scores: LawScores, logits: Tensor, targets: Tensor, sampling: Sampling) -> None:
    """Append one chunk: temperature, then top-k, then top-p of what is left, each a prefix of the ranking."""
    scaled = logits.to(torch.float64)
    scaled = (scaled - scaled.amax(-1, keepdim=True)) / sampling.temperature
    # A stable sort ranks equally likely tokens by id, lowest first.
    ranked, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    if 0 < sampling.top_k < ranked.shape[-1]:
        ranked[:, sampling.top_k :] = -torch.inf
    law = ranked.softmax(-1)
    if sampling.top_p < 1.0:
        reached = law.cumsum(-1)
        law = torch.cat((law[:, :1], law[:, 1:].masked_fill(reached[:, :-1] >= sampling.top_p, 0.0)), -1)
        law = law / law.sum(-1, keepdim=True)
    rank = (order == targets[:, None]).to(torch.uint8).argmax(-1, keepdim=True)
    surprisal = torch.where(law > 0, -law.log(), 0.0)
    entropy = (law * surprisal).sum(-1)
    spread = (law * (surprisal - entropy[:, None]) ** 2).sum(-1)
    above = law.masked_fill(torch.arange(law.shape[-1], device=law.device) >= rank, 0.0).sum(-1)
    scores.logprobs.extend(law.gather(1, rank).squeeze(1).log().tolist())
    scores.entropies.extend(entropy.tolist())
    scores.variances.extend(spread.tolist())
    scores.above.extend(above.tolist())
