"""Drafts that a lossless engine must refuse and a careless one would keep: the target's second choice.

An acceptance that is too generous ("keep a draft within 0.4 nat of the best token") shows only where a
drafter happens to propose such a token, and a drafter rarely does: prompt lookup on a small model makes one
near miss in a hundred tokens. So the near misses are made. The answer without speculation is known, and so
is the second most likely token at each of its places. Each step gets a draft that follows the known answer,
proposes the second choice at the first place where the two are close, and goes on along the known answer, as
if nothing had happened; where no place ahead is close the draft is right to its end. A correct engine keeps
what is right and refuses the rest.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtspec.engine import Engine
from trtspec.prompts import Prompt
from trtspec.ruler import Answer
from trtspec.verify.records import Row

NEAR_NATS = 0.4
"""A near miss is at most this far below the best token: at least two thirds as probable."""
OFFERED_NATS = 1.0
"""A second choice further below the best token than this is not offered."""
DRAFT_TOKENS = 4
"""Where the recipe does not say how many tokens a step drafts."""

Drafts = MutableMapping[tuple[str, int], tuple[int, ...]]
"""By request id and number of known tokens, prompt included."""


@dataclass(frozen=True)
class _Miss:
    at: int
    """Index into the draft."""
    gap_nats: float


@dataclass(frozen=True)
class Plan:
    """``drafts`` for the engine; ``misses``: which of them hold a second choice, and where."""

    drafts: Drafts
    misses: dict[tuple[str, int], _Miss]


@dataclass(frozen=True)
class Refusals:
    """What became of the second choices that a target step verified."""

    offered: int
    """Second choices that a step verified, having kept all that came before them."""
    gaps_nats: tuple[float, ...]
    """Of those that were refused: how far they lay below the best token, ascending."""

    @property
    def kept(self) -> int:
        """How many became output: each is a fault."""
        return self.offered - len(self.gaps_nats)

    @property
    def near(self) -> int:
        """How many of them were near misses."""
        return sum(gap <= NEAR_NATS for gap in self.gaps_nats)


def plan_near_misses(
    engine: Engine,
    prompts: Sequence[Prompt],
    reference: Sequence[Answer],
    draft_tokens: int | None,
    on_answer: Callable[[], None] = lambda: None,
) -> Plan:
    """Score each answer of ``reference`` with ``engine`` (without speculation) and plan drafts for all its
    steps."""
    length = draft_tokens or DRAFT_TOKENS
    plan = Plan({}, {})
    for prompt, answer in zip(prompts, reference, strict=True):
        scores = engine.score((*prompt.tokens, *answer.tokens))
        first = len(prompt.tokens) - 1
        margins = scores.margins[first:]
        second = [
            two if one == token else one
            for token, one, two in zip(
                answer.tokens, scores.top_tokens[first:], scores.second_tokens[first:], strict=True
            )
        ]
        # The first token comes out of the prompt's own step, before anything can be drafted; the last
        # one is the target's own in any case.
        for known in range(1, len(answer.tokens)):
            ahead = range(known, min(known + length, len(answer.tokens)))
            draft = [answer.tokens[place] for place in ahead]
            key = (prompt.id, len(prompt.tokens) + known)
            place = next((index for index in ahead if margins[index] <= OFFERED_NATS), None)
            if place is not None:
                draft[place - known] = second[place]
                plan.misses[key] = _Miss(place - known, margins[place])
            plan.drafts[key] = tuple(draft)
        on_answer()
    return plan


def miss_rows(plan: Plan) -> list[dict[str, Any]]:
    """A row for every second choice that ``plan`` holds."""
    return [
        {"prompt_id": prompt_id, "known": known, "at": miss.at, "gap_nats": miss.gap_nats}
        for (prompt_id, known), miss in plan.misses.items()
    ]


def misses_from(rows: Sequence[Row]) -> Plan:
    """A plan, its drafts left out, which :func:`refusals` reads like that of :func:`miss_rows`."""
    return Plan({}, {(row["prompt_id"], row["known"]): _Miss(row["at"], row["gap_nats"]) for row in rows})


def refusals(plan: Plan, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> Refusals:
    """Read from the steps of ``answers``, which ran by ``plan``, what was offered and what refused."""
    offered, gaps = 0, []
    for prompt, answer in zip(prompts, answers, strict=True):
        known = len(prompt.tokens)
        for emitted, drafted in zip(answer.emitted, answer.drafted_by_step, strict=True):
            miss = plan.misses.get((prompt.id, known))
            known += emitted
            if miss is None or miss.at >= drafted or emitted - 1 < miss.at:
                continue
            offered += 1
            if emitted - 1 == miss.at:
                gaps.append(miss.gap_nats)
    return Refusals(offered, tuple(sorted(gaps)))
