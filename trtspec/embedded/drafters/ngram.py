"""Prompt lookup: draft by copying what followed the current suffix the last time it occurred.

LLMA (arXiv 2304.04487) copies spans from reference documents; prompt lookup decoding is its form for the
sequence's own prompt and answer. It needs no model: the candidates are point masses, and they are good
where the answer repeats its input (summaries, edits, code) and absent elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from trtspec.embedded.acceptance import Accepted
from trtspec.embedded.drafters import DraftView
from trtspec.embedded.tree import EMPTY_DRAFT, Draft, chain
from trtspec.errors import InputError, Problem


@dataclass
class _Index:
    """Where each n-gram of one sequence ended last: ``ends[n-gram]`` is the position after it."""

    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    indexed: int = 0
    """n-grams that end at or before this position are in ``ends``."""


class NgramDrafter:
    """Drafts up to ``num_draft_tokens`` by the longest suffix, of ``max_ngram`` down to ``min_ngram``
    tokens, that occurred before; of several places the most recent.

    The place may overlap the suffix but is never the suffix itself. When the copied span reaches the end
    of the known text it goes on into the tokens just drafted, so text of period p (a list, a table, a
    loop) drafts full length from its second period on instead of at most p tokens.

    Nothing is drafted in a step where more than ``max_concurrency`` sequences have room for a draft.

    A call costs time in proportion to the tokens that are new since the sequence's last call, and
    memory is one dictionary entry per token and n-gram length. Raises InputError when the sizes do not
    fit each other.
    """

    hidden_layers: tuple[int, ...] = ()

    def __init__(
        self, num_draft_tokens: int, min_ngram: int, max_ngram: int, max_concurrency: int | None = None
    ) -> None:
        problems = []
        if num_draft_tokens < 1:
            problems.append(Problem(f"{num_draft_tokens} is below 1", key="speculation.num_draft_tokens"))
        if min_ngram < 1:
            problems.append(Problem(f"{min_ngram} is below 1", key="speculation.min_ngram"))
        if max_ngram < min_ngram:
            problems.append(
                Problem(
                    f"{max_ngram} is below min_ngram {min_ngram}; raise it or lower min_ngram",
                    key="speculation.max_ngram",
                )
            )
        if max_concurrency is not None and max_concurrency < 1:
            problems.append(Problem(f"{max_concurrency} is below 1", key="speculation.max_concurrency"))
        if problems:
            raise InputError(problems)
        self.max_concurrency = max_concurrency
        self.num_draft_tokens = num_draft_tokens
        self.min_ngram = min_ngram
        self.max_ngram = max_ngram
        self._indexes: dict[str, _Index] = {}

    def propose(self, sequences: Sequence[DraftView]) -> list[Draft]:
        if self.max_concurrency is not None and len(sequences) > self.max_concurrency:
            return [EMPTY_DRAFT] * len(sequences)
        return [self._propose(view) for view in sequences]

    def _propose(self, view: DraftView) -> Draft:
        tokens = view.tokens
        index = self._indexes.setdefault(view.id, _Index())
        self._extend(index, tokens)
        room = min(self.num_draft_tokens, view.max_draft)
        if room < 1:
            return EMPTY_DRAFT
        length = len(tokens)
        for n in range(min(self.max_ngram, length - 1), self.min_ngram - 1, -1):
            end = index.ends.get(tuple(tokens[length - n :]))
            if end is not None:
                drafted = list(tokens[end : end + room])
                while len(drafted) < room:
                    # The source runs `length - end` tokens behind: past the known text it is the draft.
                    drafted.append(drafted[len(drafted) - (length - end)])
                return chain(drafted)
        return EMPTY_DRAFT

    def _extend(self, index: _Index, tokens: Sequence[int]) -> None:
        """Add the n-grams that ended since the last call, the suffix of ``tokens`` itself left out: it
        would be its own latest occurrence. It enters when the next token is known."""
        last = len(tokens) - 1
        for end in range(index.indexed + 1, last + 1):
            for n in range(self.min_ngram, min(self.max_ngram, end) + 1):
                index.ends[tuple(tokens[end - n : end])] = end
        index.indexed = max(index.indexed, last)

    def observe(
        self,
        sequences: Sequence[DraftView],
        accepted: Sequence[Accepted | None],
        hidden: Sequence[Mapping[int, Tensor]],
        logits: Sequence[Tensor | None],
    ) -> None:
        """Nothing to learn: the tokens say it all."""

    def release(self, sequence_id: str) -> None:
        self._indexes.pop(sequence_id, None)
