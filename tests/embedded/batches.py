"""Step batches for tests of the decoder: a sequence of tokens with its slots, and rows of several of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtspec.embedded.batch import SequenceRows, StepBatch


@dataclass(frozen=True)
class Rows:
    """``count`` rows of one sequence from position ``start``; ``slots[i]`` is the place of position i.

    With a ``tree``, ``positions`` gives each row's own position (siblings share one).
    """

    tokens: Sequence[int]
    start: int
    slots: Tensor
    tree: Tensor | None = None
    positions: Sequence[int] | None = None


def batch_of(*rows: Rows) -> StepBatch:
    """One step with the rows of all of ``rows``; logits of every row."""
    sequences, first = [], 0
    for part in rows:
        count = len(part.tokens)
        sequences.append(SequenceRows(first, count, part.slots[: part.start], part.tree))
        first += count
    positions = [
        position
        for part in rows
        for position in (part.positions or range(part.start, part.start + len(part.tokens)))
    ]
    return StepBatch(
        tokens=torch.tensor([token for part in rows for token in part.tokens]),
        positions=torch.tensor(positions),
        slots=torch.cat([part.slots[part.start : part.start + len(part.tokens)] for part in rows]),
        sequences=tuple(sequences),
        logit_rows=torch.arange(first),
    )


def chain_batch(tokens: Sequence[int]) -> StepBatch:
    """One whole sequence from position 0, at slots 0, 1, ..."""
    return batch_of(Rows(tokens, 0, torch.arange(len(tokens))))
