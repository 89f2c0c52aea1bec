"""The rows of one target forward.

Prefill chunk, decode and verification are the same kind of row: a token at a position, the KV slot it
is written to, and what it may attend to. A *slot* is the physical place of one token's KV in the
store: ``page * page_tokens + offset``.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class SequenceRows:
    """The rows of one sequence: ``first <= row < first + count`` of the batch.

    Each row attends to all of ``context`` and, among the sequence's own rows, to itself and

    * ``tree`` None: every earlier row (a chain: prefill, decode and one-branch drafts), or
    * ``tree`` ``[count, count] bool``: row i to row j where ``tree[i, j]`` (the diagonal is True). With more
      columns, ``[count, n + count]``, the first n of them say the same of the last n tokens of ``context``.
    """

    first: int
    count: int
    context: Tensor
    """[context_tokens] int64: slots of the tokens before the first row, in position order."""
    tree: Tensor | None = None


@dataclass(frozen=True)
class StepBatch:
    """Everything the model needs for one forward over ``rows`` rows of several sequences."""

    tokens: Tensor
    """[rows] int64"""
    positions: Tensor
    """[rows] int64: position of each row in its sequence (tree siblings share one)."""
    slots: Tensor
    """[rows] int64: where each row's KV is written."""
    sequences: tuple[SequenceRows, ...]
    """In row order; together they cover every row exactly once."""
    logit_rows: Tensor
    """[wanted] int64: the rows whose logits are wanted, ascending."""
