"""What a step costs on this machine: the target's by rows, the drafter's by levels; measured, one sequence.

Both go through the running engine, so that scheduling, the KV cache and bookkeeping are in them. Sizes take
turns, so that a slow moment of the machine hits all of them, and of several steps of one size the lower
quartile counts (:class:`~trtspec.embedded.drafters.choice.StepCost`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trtspec.draft.acceptance import Answered
from trtspec.draft.replay import Chain, Dynamic, First, Shape, Static
from trtspec.embedded.drafters.choice import StepCost
from trtspec.embedded.drafters.recorder import PaddingDrafter, RecordingDrafter, drafting_through
from trtspec.embedded.engine import EmbeddedEngine
from trtspec.embedded.tree import depths
from trtspec.engine import Request
from trtspec.prompts import Prompt

ROUNDS = 6
"""Steps of each size."""
ROW_SIZES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 63)
_REQUEST = "step-cost"


def family(shape: Shape) -> str:
    """Shapes of one family cost the drafter the same, level by level."""
    match shape:
        case Chain() | First():
            return "chain"
        case Static():
            return "static"
        case Dynamic(top_k=top_k):
            return f"top_k {top_k}"


@dataclass
class Costs:
    """``target``: seconds of a step by its rows, all but drafting; ``drafter``: of drafting by levels, for
    each family of shapes. ``flat``: of drafting where that was not measured."""

    target: StepCost
    drafter: dict[str, StepCost] = field(default_factory=dict)
    flat: float = 0.0

    def draft_s(self, of: str, levels: int) -> float:
        """Seconds of drafting so many levels; 0 for none."""
        if not levels:
            return 0.0
        found = self.drafter.get(of)
        return self.flat if found is None or not found.most else found.at(levels)

    def seconds(self, answered: Answered, of: str) -> float:
        """Of the steps of an answer."""
        return sum(self.target.at(1 + step.rows) + self.draft_s(of, step.offered) for step in answered.steps)


def time_rows(
    engine: EmbeddedEngine, prompt: Prompt, sizes: Sequence[int], *, branching: bool, rounds: int = ROUNDS
) -> StepCost:
    """Seconds of a step of ``engine`` by rows, the current token's included, drafting nothing of its own."""
    cost = StepCost()

    def padding(_: Any) -> PaddingDrafter:
        return PaddingDrafter(sizes, branching=branching, vocab_size=engine.vocab_size)

    with drafting_through(engine, padding):
        for rows, seconds, _ in _steps(engine, prompt, rounds * len(sizes), max(sizes)):
            cost.observe(rows, seconds)
    return cost


def time_levels(
    engine: EmbeddedEngine, prompt: Prompt, levels: Sequence[int], *, rounds: int = ROUNDS
) -> StepCost:
    """Seconds that the drafter of ``engine`` takes a step, by the levels that it drafts."""
    cost = StepCost()

    def recording(inner: Any) -> RecordingDrafter:
        return RecordingDrafter(inner, verified=False, levels=levels)

    with drafting_through(engine, recording) as recorder:
        assert isinstance(recorder, RecordingDrafter)
        steps = _steps(engine, prompt, rounds * len(levels), max(levels))
        drafted = [one.draft for one in recorder.rounds.get(_REQUEST, {}).values()]
        # The first also catches up with the prompt.
        for (_, _, seconds), draft in list(zip(steps, drafted, strict=False))[1:]:
            if deep := max(depths(draft), default=0):
                cost.observe(deep, seconds)
    return cost


def _steps(
    engine: EmbeddedEngine, prompt: Prompt, count: int, deepest: int
) -> list[tuple[int, float, float]]:
    """(rows, seconds without drafting, seconds of drafting) of ``count`` decode steps; the request is then
    cancelled. Fewer where the limits leave no room."""
    room = engine.max_seq_tokens - len(prompt.tokens)
    engine.add(Request(_REQUEST, prompt.tokens, min(room, 2 * count + deepest + 2)))
    found: list[tuple[int, float, float]] = []
    started = False
    while engine.in_flight and len(found) < count:
        before, began = engine.stats(), time.perf_counter()
        outputs = engine.step()
        seconds, after = time.perf_counter() - began, engine.stats()
        drafting = after.draft_seconds - before.draft_seconds
        if started:
            found.append((after.target_rows - before.target_rows, seconds - drafting, drafting))
        started = started or any(output.new_tokens for output in outputs)
    engine.cancel(_REQUEST)
    while engine.in_flight:
        engine.step()
    return found
