"""Draft what a plan says: chosen candidates, so that a check can put hard cases before the target."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from trtspec.embedded.acceptance import Accepted
from trtspec.embedded.drafters import DraftView
from trtspec.embedded.engine import EmbeddedEngine
from trtspec.embedded.tree import EMPTY_DRAFT, Draft, chain, truncate
from trtspec.engine import Engine


class PlannedDrafter:
    """Drafts ``plan[request id, number of known tokens]``, a chain, and nothing where nothing is planned."""

    hidden_layers: tuple[int, ...] = ()

    def __init__(self, plan: Mapping[tuple[str, int], Sequence[int]]) -> None:
        self._plan = plan

    def propose(self, sequences: Sequence[DraftView]) -> list[Draft]:
        return [self._propose(view) for view in sequences]

    def _propose(self, view: DraftView) -> Draft:
        planned = self._plan.get((view.id, len(view.tokens)))
        return EMPTY_DRAFT if planned is None else truncate(chain(planned), view.max_draft)

    def observe(
        self,
        sequences: Sequence[DraftView],
        accepted: Sequence[Accepted | None],
        hidden: Sequence[Mapping[int, Tensor]],
        logits: Sequence[Tensor | None],
    ) -> None:
        """Nothing to learn: the plan says it all."""

    def release(self, sequence_id: str) -> None:
        """The plan is the caller's."""


@contextlib.contextmanager
def drafting_by_plan(engine: Engine, plan: Mapping[tuple[str, int], Sequence[int]]) -> Iterator[None]:
    """Inside, ``engine`` drafts what ``plan`` says instead of what its own drafter would.

    Begins and ends between requests: a drafter may keep state of those in flight. Raises ValueError
    otherwise, and TypeError for an engine that is not embedded.
    """
    if not isinstance(engine, EmbeddedEngine):
        raise TypeError(f"{type(engine).__name__} takes no plan of drafts")
    if engine.in_flight:
        raise ValueError(f"{engine.in_flight} requests are in flight")
    own, engine._drafter = engine._drafter, PlannedDrafter(plan)
    try:
        yield
    finally:
        engine._drafter = own
