"""Adaptive drafting: as much as pays by the measured cost, off where it does not, answers untouched."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tiny_engine import VOCAB, TestDrafter, expected, oracle, tiny_decoder, tiny_engine, workload

from trtspec.embedded.drafters import DraftView, adaptive
from trtspec.embedded.drafters.adaptive import AdaptiveDrafter, StepCost, best_levels
from trtspec.embedded.tree import Draft, chain
from trtspec.engine import EngineStats, generate

Cost = Callable[[int], float]


def memory_bound(rows: int) -> float:
    return 1.0 + 0.001 * rows


def compute_bound(rows: int) -> float:
    return 0.1 + 0.1 * rows


def roofline(rows: int) -> float:
    return max(1.0, rows / 16)


# ---------------------------------------------------------------- the choice


def speed(rates: Sequence[float], levels: Sequence[int], cost: Cost, draft_seconds: float) -> float:
    tokens = sum(sum(rate**j for j in range(k + 1)) for rate, k in zip(rates, levels, strict=True))
    return tokens / (cost(len(rates) + sum(levels)) + draft_seconds * max(levels))


@pytest.mark.parametrize("cost", [memory_bound, compute_bound, roofline])
@pytest.mark.parametrize("draft_seconds", [0.0, 0.2])
def test_no_other_choice_is_faster(cost: Cost, draft_seconds: float) -> None:
    chance = random.Random(1)
    beaten = 0
    for _ in range(60):
        rates = [chance.choice([0.0, 0.2, 0.6, 0.9, 1.0]) for _ in range(chance.randint(1, 4))]
        most = [chance.randint(0, 3) for _ in rates]
        found = best_levels(rates, most, 1.0, cost, draft_seconds)
        assert all(0 <= k <= m for k, m in zip(found, most, strict=True))
        every = itertools.product(*(range(m + 1) for m in most))
        best = max(speed(rates, levels, cost, draft_seconds) for levels in every)
        chosen = speed(rates, found, cost, draft_seconds)
        # With a drafter's time in it the order of levels is a heuristic; without, the choice is the best.
        assert chosen >= best * (1 - 1e-12 if draft_seconds == 0 else 0.9)
        assert chosen >= speed(rates, [0] * len(rates), cost, draft_seconds) * (1 - 1e-12)
        beaten += speed(rates, most, cost, draft_seconds) < 0.99 * best
    assert beaten > 0 or cost is not compute_bound, "drafting all that is allowed must lose somewhere"


def test_the_break_even_batch_is_where_the_roof_is() -> None:
    on = [any(best_levels([0.5] * batch, [4] * batch, 1.0, roofline)) for batch in (1, 4, 15, 16, 32)]
    assert on == [True, True, True, False, False]


def test_costs_are_medians_that_never_fall() -> None:
    cost = StepCost()
    with pytest.raises(ValueError, match="no step"):
        cost.at(1)
    for rows, seconds in [(1, 1.0), (1, 1.0), (1, 90.0), (4, 0.5), (8, 3.0)]:
        cost.observe(rows, seconds)
    assert [cost.at(rows) for rows in (1, 4, 6, 8, 10)] == [1.0, 1.0, 2.0, 3.0, 4.0]
    assert cost.knows(8)
    assert not cost.knows(2)


# ---------------------------------------------------------------- the engine


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Wrong(TestDrafter):
    """Drafts four random tokens: nearly all are turned down."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(2)
        self.asked = 0

    def draft(self, view: DraftView) -> Draft:
        self.asked += 1
        return chain([self.random.randrange(VOCAB) for _ in range(min(4, view.max_draft))])


def run(
    monkeypatch: pytest.MonkeyPatch, inner: Any, cost: Cost, *, costly: bool = False, adaptive: bool = True
) -> tuple[float, EngineStats, AdaptiveDrafter]:
    """(synthetic seconds, counters, drafter) of the workload; answers are checked against the reference."""
    clock, model = Clock(), tiny_decoder()
    forward = type(model).forward

    def timed(self: Any, batch: Any, *rest: Any) -> Any:
        clock.now += cost(len(batch.tokens))
        return forward(self, batch, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "forward", timed)
        drafter = AdaptiveDrafter(inner, costly=costly, clock=clock)
        requests = workload(new_tokens=90)
        engine = tiny_engine(rows=256, kv_tokens=2048, drafter=drafter if adaptive else inner)
        done = generate(engine, requests)
    for completion, request in zip(done, requests, strict=True):
        assert completion.tokens == expected("llama", request)
    engine.check_integrity()
    return clock.now, engine.stats(), drafter


@pytest.mark.parametrize("costly", [False, True])
def test_drafts_that_pay_are_made(monkeypatch: pytest.MonkeyPatch, costly: bool) -> None:
    requests = workload(new_tokens=90)
    plain, _, _ = run(monkeypatch, TestDrafter(), memory_bound, adaptive=False)
    always, _, _ = run(monkeypatch, oracle(requests), memory_bound, adaptive=False)
    seconds, stats, _ = run(monkeypatch, oracle(requests), memory_bound, costly=costly)
    assert stats.accepted_tokens > 200
    assert stats.held_back_steps == 0
    assert always < seconds < 1.3 * always < 0.5 * plain


@pytest.mark.parametrize("costly", [False, True])
def test_drafts_that_do_not_pay_are_not(monkeypatch: pytest.MonkeyPatch, costly: bool) -> None:
    plain, _, _ = run(monkeypatch, TestDrafter(), compute_bound, adaptive=False)
    always, _, _ = run(monkeypatch, Wrong(), compute_bound, adaptive=False)
    inner = Wrong()
    seconds, stats, _ = run(monkeypatch, inner, compute_bound, costly=costly)
    assert stats.held_back_steps > 40
    assert stats.drafted_tokens < 300
    assert seconds < 1.3 * plain < 0.5 * always
    if costly:
        assert inner.asked < 300, "a drafter that costs time is not even asked"


def test_a_variant_that_never_switches_off_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _, _ = run(monkeypatch, TestDrafter(), compute_bound, adaptive=False)
    monkeypatch.setattr(adaptive, "best_levels", lambda rates, most, *rest: list(most))
    seconds, stats, _ = run(monkeypatch, Wrong(), compute_bound)
    assert stats.held_back_steps == 0
    assert seconds > 2 * plain


def test_state_ends_with_the_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Wrong()
    _, _, drafter = run(monkeypatch, inner, roofline)
    assert sorted(inner.released) == [f"r{i}" for i in range(8)]
    assert not drafter._rates
    assert 0.0 < drafter.rate("unknown") < 1.0


def test_what_was_turned_off_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Wrong()
    monkeypatch.setattr(adaptive, "PROBE_ROUNDS", 16)
    _, often, _ = run(monkeypatch, inner, compute_bound)
    monkeypatch.setattr(adaptive, "PROBE_ROUNDS", 10**9)
    _, never, _ = run(monkeypatch, Wrong(), compute_bound)
    assert often.drafted_tokens > never.drafted_tokens
