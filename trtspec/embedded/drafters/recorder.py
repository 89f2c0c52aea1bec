"""Write down what a drafter drafts, and what the target kept of it, so that drafting can be measured."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from trtspec.embedded.acceptance import Accepted
from trtspec.embedded.drafters import Drafter, DraftView, Stateless
from trtspec.embedded.engine import EmbeddedEngine
from trtspec.embedded.tree import EMPTY_DRAFT, Draft, no_deeper, seen_part, truncate

_ANY_NODES = 4096
"""More than any drafter has: drafts that nobody verifies need no room in a step."""


@dataclass(frozen=True)
class Recorded:
    """A draft behind ``known`` tokens, as far as the step had room for it, and how many nodes were kept."""

    known: int
    draft: Draft
    accepted: int


class RecordingDrafter:
    """Hands on what ``inner`` drafts and keeps it in ``rounds``, by request id and number of known tokens.

    ``verified`` False: the target is shown nothing, so that every token of an answer has a draft behind it
    and drafts may be larger than a step has room for. ``levels``: how deep to draft in one call after the
    other, over and over; None: as deep as ``inner`` wants.
    """

    def __init__(self, inner: Drafter, *, verified: bool = True, levels: Sequence[int] | None = None) -> None:
        self.inner = inner
        self.hidden_layers = inner.hidden_layers
        self.rounds: dict[str, dict[int, Recorded]] = {}
        self._verified = verified
        self._levels = None if levels is None else itertools.cycle(levels)
        self._drafts: dict[str, tuple[int, Draft]] = {}

    def propose(self, sequences: Sequence[DraftView]) -> list[Draft]:
        views = list(sequences)
        if not self._verified:
            views = [replace(view, max_nodes=_ANY_NODES) for view in views]
        if self._levels is not None:
            level = next(self._levels)
            views = [replace(view, max_draft=min(level, view.max_draft)) for view in views]
        drafts = [
            truncate(no_deeper(draft, view.max_draft), view.room)
            for view, draft in zip(views, self.inner.propose(views), strict=True)
        ]
        self._drafts = {view.id: (len(view.tokens), draft) for view, draft in zip(views, drafts, strict=True)}
        return drafts if self._verified else [EMPTY_DRAFT] * len(drafts)

    def observe(
        self,
        sequences: Sequence[DraftView],
        accepted: Sequence[Accepted | None],
        hidden: Sequence[Mapping[int, Tensor]],
        logits: Sequence[Tensor | None],
    ) -> None:
        for view, outcome, rows in zip(sequences, accepted, logits, strict=True):
            known, draft = self._drafts.get(view.id, (0, EMPTY_DRAFT))
            if outcome is None or rows is None or not known:
                continue
            if self._verified and draft.num_read != len(rows) - 1:
                draft = seen_part(draft, len(rows) - 1)
            self.rounds.setdefault(view.id, {})[known] = Recorded(known, draft, len(outcome.path))
        self._drafts = {}
        self.inner.observe(sequences, accepted, hidden, logits)

    def release(self, sequence_id: str) -> None:
        """What was recorded is the caller's."""
        self.inner.release(sequence_id)


class PaddingDrafter(Stateless):
    """Drafts that are there for their rows alone: of ``sizes`` nodes in one call after the other, over and
    over, as a chain or (``branching``) as a tree, of tokens that the target hardly chooses."""

    def __init__(self, sizes: Sequence[int], *, branching: bool, vocab_size: int) -> None:
        self._sizes = itertools.cycle(sizes)
        self._branching, self._vocab_size = branching, vocab_size

    def propose(self, sequences: Sequence[DraftView]) -> list[Draft]:
        size = next(self._sizes)
        return [self._draft(view, min(size, view.room)) for view in sequences]

    def _draft(self, view: DraftView, size: int) -> Draft:
        tokens = tuple((view.tokens[-1] + 7919 * (node + 1)) % self._vocab_size for node in range(size))
        parents = tuple((node - 1) // 2 if self._branching else node - 1 for node in range(size))
        return Draft(tokens, parents)


@contextlib.contextmanager
def drafting_through(
    engine: EmbeddedEngine, change: Callable[[Drafter | None], Drafter | None]
) -> Iterator[Drafter | None]:
    """Inside, ``engine`` drafts with what ``change`` makes of its own drafter, which is yielded.

    Begins and ends between requests: a drafter may keep state of those in flight. Raises ValueError
    otherwise.
    """
    if engine.in_flight:
        raise ValueError(f"{engine.in_flight} requests are in flight")
    own = engine._drafter
    engine._drafter = drafter = change(own)
    try:
        yield drafter
    finally:
        engine._drafter = own
