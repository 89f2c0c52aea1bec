"""Draft what a plan says: chosen candidates, so that a check can put hard cases before the target."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from trtspec.embedded.drafters import DraftView, Stateless
from trtspec.embedded.drafters.recorder import drafting_through
from trtspec.embedded.engine import EmbeddedEngine
from trtspec.embedded.tree import EMPTY_DRAFT, Draft, chain, truncate
from trtspec.engine import Engine


class PlannedDrafter(Stateless):
    """Drafts ``plan[request id, number of known tokens]``, a chain, and nothing where nothing is planned."""

    def __init__(self, plan: Mapping[tuple[str, int], Sequence[int]]) -> None:
        self._plan = plan

    def propose(self, sequences: Sequence[DraftView]) -> list[Draft]:
        return [self._propose(view) for view in sequences]

    def _propose(self, view: DraftView) -> Draft:
        planned = self._plan.get((view.id, len(view.tokens)))
        return EMPTY_DRAFT if planned is None else truncate(chain(planned), view.max_draft)


@contextlib.contextmanager
def drafting_by_plan(engine: Engine, plan: Mapping[tuple[str, int], Sequence[int]]) -> Iterator[None]:
    """Inside, ``engine`` drafts what ``plan`` says instead of what its own drafter would.

    Begins and ends between requests: a drafter may keep state of those in flight. Raises ValueError
    otherwise, and TypeError for an engine that is not embedded.
    """
    if not isinstance(engine, EmbeddedEngine):
        raise TypeError(f"{type(engine).__name__} takes no plan of drafts")
    with drafting_through(engine, lambda _: PlannedDrafter(plan)):
        yield
