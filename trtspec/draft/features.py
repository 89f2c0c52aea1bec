"""From answers to batches for training: hidden states, the target's laws, the draft vocabulary.

Positions. In a sequence of tokens 0 .. n - 1 the target's state of position t (after token t) holds its law
over token t + 1. The answer begins at ``prompt_length``; positions from ``prompt_length - 1`` to n - 2 have a
state and an answered next token, and only their laws are learnt. The state of n - 1 was never computed.

Nothing here is random but the order of the batches, which is a function of the seed and the epoch: training
that goes on from a checkpoint sees what it would have seen.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from trtspec.draft.answers import Answer, Answers
from trtspec.embedded.layers import DenseLinear
from trtspec.embedded.model import Decoder
from trtspec.errors import InputError
from trtspec.modelspec import ModelSpec


@dataclass(frozen=True)
class Target:
    """What heads are trained against. ``weights`` is the folder of the 16-bit checkpoint, from which heads
    may start; ``output_rows [vocab, hidden]`` the plain weight of the output projection."""

    spec: ModelSpec
    embedding: Tensor
    output_rows: Tensor
    weights: Path


def target_of(model: Decoder, weights: Path) -> Target:
    """Raises InputError where the output projection is quantized: heads that share it cannot be trained
    through it."""
    rows = model.output_rows
    if rows is None and isinstance(model.lm_head, DenseLinear):
        rows = model.lm_head.weight
    if rows is None:
        raise InputError(
            "the target's output projection (lm_head) is quantized, and heads learn through it; quantize the "
            "target without lm_head"
        )
    return Target(model.spec, model.embedding, rows, weights)


@dataclass(frozen=True)
class Batch:
    """Sequences of one batch, padded behind their ends.

    ``tokens [sequences, length] int64``; ``hidden [sequences, length, layers * hidden_size]``;
    ``taught [sequences, length] bool``: positions whose law is learnt (see the module).
    """

    tokens: Tensor
    hidden: Tensor
    taught: Tensor


@dataclass(frozen=True)
class Examples:
    """The answers in two parts: what is learnt, and what the learning is judged by."""

    train: tuple[Answer, ...]
    validation: tuple[Answer, ...]

    @property
    def num_tokens(self) -> int:
        """Answered tokens to learn from."""
        return sum(len(answer.tokens) - answer.prompt_length for answer in self.train)


VALIDATION_SHARE = 0.04


def read_examples(answers: Answers, max_tokens: int | None = None) -> Examples:
    """The answers of ``answers``; the last ``VALIDATION_SHARE`` of the prompts (at least one) validate.

    Only the first answers with together ``max_tokens`` answered tokens are learnt: for curves against data.
    Answers too short to learn from are left out. Raises InputError if nothing is left.
    """
    found = [answer for answer in answers.read() if len(answer.tokens) - answer.prompt_length >= 4]
    num_validation = max(1, round(VALIDATION_SHARE * len(found)))
    if len(found) <= num_validation:
        raise InputError(f"{answers.folder}: {len(found)} answers of 4 tokens or more; give more prompts")
    train, room = [], float("inf") if max_tokens is None else max_tokens
    for answer in found[:-num_validation]:
        if room <= 0:
            break
        room -= len(answer.tokens) - answer.prompt_length
        train.append(answer)
    return Examples(tuple(train), tuple(found[-num_validation:]))


def frequent_tokens(examples: Examples, size: int, vocab_size: int) -> Tensor:
    """``[size] int64``, rising: the tokens that answers hold most often, the lowest ids where they hold
    fewer. EAGLE-3's draft vocabulary (arXiv 2503.01840, appendix; also FR-Spec, arXiv 2502.14856)."""
    counts: Counter[int] = Counter()
    for answer in examples.train:
        counts.update(answer.tokens[answer.prompt_length :].tolist())
    size = min(size, vocab_size)
    best = sorted(counts, key=lambda token: (-counts[token], token))[:size]
    chosen = set(best)
    missing = (token for token in range(vocab_size) if token not in chosen)
    best += [next(missing) for _ in range(size - len(best))]
    return torch.tensor(sorted(best), dtype=torch.int64)


def make_batch(answers: Sequence[Answer]) -> Batch:
    longest = max(len(answer.tokens) for answer in answers)
    width = answers[0].hidden.shape[1]
    tokens = torch.zeros(len(answers), longest, dtype=torch.int64)
    hidden = torch.zeros(len(answers), longest, width, dtype=answers[0].hidden.dtype)
    taught = torch.zeros(len(answers), longest, dtype=torch.bool)
    for row, answer in enumerate(answers):
        length = len(answer.tokens)
        tokens[row, :length] = answer.tokens
        hidden[row, :length] = answer.hidden
        taught[row, answer.prompt_length - 1 : length - 1] = True
    return Batch(tokens, hidden, taught)


def batch_plan(answers: Sequence[Answer], rows: int, seed: int, epoch: int) -> list[list[int]]:
    """Which answers make up each batch of an epoch: of similar length, of about ``rows`` padded positions."""
    chance = random.Random(f"{seed}-{epoch}")
    order = list(range(len(answers)))
    chance.shuffle(order)
    batches: list[list[int]] = []
    pool = 256
    for first in range(0, len(order), pool):
        some = sorted(order[first : first + pool], key=lambda at: len(answers[at].tokens))
        batch: list[int] = []
        for at in some:
            if batch and (len(batch) + 1) * len(answers[at].tokens) > rows:
                batches.append(batch)
                batch = []
            batch.append(at)
        batches.append(batch)
    chance.shuffle(batches)
    return batches


def places_in(vocab: Tensor, tokens: Tensor) -> Tensor:
    """Where the tokens stand in ``vocab``, which is sorted; -1 for those that it lacks."""
    at = torch.searchsorted(vocab, tokens).clamp(max=len(vocab) - 1)
    return torch.where(vocab[at] == tokens, at, -1)


def laws(states: Tensor, output_rows: Tensor) -> Tensor:
    """``[rows, tokens] float32``: the target's probabilities over the ``output_rows`` given, from its states
    after the final norm ``[rows, hidden]``; renormalised where those are not the whole vocabulary."""
    return F.linear(states, output_rows).float().softmax(-1)


def shifted(x: Tensor, by: int) -> Tensor:
    """``x [sequences, length, ...]`` with position t holding what position t + ``by`` held, else zeros."""
    out = torch.zeros_like(x)
    if by >= 0:
        out[:, : x.shape[1] - by] = x[:, by:]
    else:
        out[:, -by:] = x[:, :by]
    return out


def ranks_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """``[rows] int64``: how many candidates come before ``tokens [rows]``; of equal ones the lower first.

    A row with a value that is no finite number ranks nothing: all candidates come before its token.
    """
    mine = logits.gather(1, tokens[:, None])
    before = torch.arange(logits.shape[1], device=logits.device) < tokens[:, None]
    ranks = ((logits > mine) | ((logits == mine) & before)).sum(-1)
    return ranks.where(logits.isfinite().all(-1), logits.shape[1])


def distillation_loss(logits: Tensor, teacher: Tensor, said: Tensor, hard_share: float) -> Tensor:
    """Mean over rows of (1 - hard_share) * CE(teacher, student) + hard_share * CE(said token).

    ``logits``, ``teacher [rows, tokens]``; ``said [rows] int64`` indexes the tokens, -1: outside them, where
    only the teacher counts. Soft labels carry what the target nearly said (arXiv 2310.08461); the said token
    is what greedy acceptance asks for.
    """
    log_probs = logits.float().log_softmax(-1)
    soft = -(teacher * log_probs).sum(-1)
    if hard_share == 0.0:
        return soft.mean()
    inside = said >= 0
    hard = -log_probs.gather(1, said.clamp(min=0)[:, None]).squeeze(1)
    return torch.where(inside, (1 - hard_share) * soft + hard_share * hard, soft).mean()
