"""Throughput of two endpoints under load: stretches in turn, what drift does to them, coverage, gates."""

from __future__ import annotations

import dataclasses
import heapq
import threading
from itertools import pairwise

import numpy as np
import pytest

from trtspec.stats import mean_interval
from trtspec.verify.endpoint_load import (
    FEWEST_STRETCHES,
    MOST_STRETCHES,
    in_turn,
    judge_throughput,
    stretches_of,
)
from trtspec.verify.gates import Verdict
from trtspec.verify.timed import Objectives, Timed, rates, steady, timed_rows, window_of

SLOTS, TOKENS = 4, 10


def loop(began: float, count: int, pace, stretch: int = 0) -> list[Timed]:
    """A closed loop of ``SLOTS`` slots; ``pace(now)``: seconds a token of one slot."""
    free = [(began, slot) for slot in range(SLOTS)]
    found = []
    for number in range(count):
        sent, slot = heapq.heappop(free)
        at, arrivals = sent, []
        for _ in range(TOKENS):
            at += pace(at)
            arrivals.append(at)
        found.append(Timed(f"r{number}", sent, sent, tuple(arrivals), at, TOKENS, stretch=stretch))
        heapq.heappush(free, (at, slot))
    return found


def alternating(requests: int, stretches: int, pace: dict, noise=lambda: 1.0) -> dict[str, list[Timed]]:
    found, now = {"url": [], "baseline": []}, 0.0
    for number in range(stretches):
        for side in ("url", "baseline") if number % 2 else ("baseline", "url"):
            factor = noise()
            records = loop(now, requests // stretches, lambda t, s=side, f=factor: pace[s](t) * f, number)
            found[side] += records
            now = max(one.ended_s for one in records)
    return found


def judged(found, concurrency=SLOTS, length=None, **gates):
    rows = {side: timed_rows(records) for side, records in found.items()}
    checks = judge_throughput(rows, load="x", concurrency=concurrency, length=length, **gates)
    return {check.name: check for check in checks}


STEADY = {"url": lambda t: 0.01, "baseline": lambda t: 0.02}


def test_both_sides_get_every_request_once_in_turn_and_never_more_in_flight():
    order, flying, most, lock = [], 0, 0, threading.Lock()

    def sender(side):
        def send(number, due):
            nonlocal flying, most
            with lock:
                order.append((side, number))
                flying += 1
                most = max(most, flying)
            with lock:
                flying -= 1
            return number

        return send

    told = []
    found = in_turn(
        {"url": sender("url"), "baseline": sender("baseline")},
        50,
        3,
        lambda done, total: told.append((done, total)),
    )
    for replies in found.values():
        assert [number for _, number in replies] == list(range(50))
        assert {stretch for stretch, _ in replies} == set(range(stretches_of(50, 3)))
    assert most <= 3
    assert sorted(told) == [(done, 100) for done in range(1, 101)]
    sides = [side for side, _ in order]
    turns = [sides[0], *(b for a, b in pairwise(sides) if a != b)]
    assert turns == ["baseline", "url", "baseline", "url", "baseline"]  # ABBA ABBA: neighbours join


@pytest.mark.parametrize(("requests", "concurrency"), [(1, 8), (31, 8), (192, 8), (10_000, 1), (48, 4)])
def test_stretches_are_long_enough_to_have_a_window(requests, concurrency):
    count = stretches_of(requests, concurrency)
    assert 1 <= count <= MOST_STRETCHES
    assert count == 1 or requests // count >= 4 * concurrency


def test_a_window_holds_the_pace_of_full_slots():
    records = loop(0.0, 40, lambda t: 0.01)
    window = window_of(records, SLOTS)
    assert window.tokens(records) / (window.end_s - window.start_s) == pytest.approx(SLOTS / 0.01, rel=0.03)
    whole = sum(one.tokens for one in records) / max(one.ended_s for one in records)
    last = records[-1]
    hangs = dataclasses.replace(last, arrivals_s=(*last.arrivals_s[:-1], 9.0), ended_s=9.0)
    late = [*records[:-1], hangs]
    assert window_of(late, SLOTS) == window  # a last answer that hangs is draining
    assert (
        sum(one.tokens for one in late) / 9.0 < whole / 5
    )  # the plain quotient takes it for the server's pace
    assert window_of(records[:SLOTS], SLOTS) is None
    assert window.tokens([dataclasses.replace(one, tokens=None) for one in records]) is None


def test_drift_of_the_machine_cancels_where_sides_take_turns_and_only_there():
    def slower(t):
        return 1 + t / 8  # five times as slow in the end

    pace = {side: lambda t, of=of: of(t) * slower(t) for side, of in STEADY.items()}
    turns = judged(alternating(192, 6, pace))["speedup_under_load"]
    assert turns.interval[0] < 2.0 < turns.interval[1]
    assert turns.measured == pytest.approx(2.0, rel=0.05)
    after = alternating(192, 1, pace)
    first, second = (
        rates(after[side], Objectives(), concurrency=SLOTS).tokens_per_s for side in ("url", "baseline")
    )
    assert abs(first / second / 2.0 - 1) > 0.2  # one after the other: drift is taken for speed
    assert judged(after)["speedup_under_load"].verdict is Verdict.SKIPPED


def test_steady_state_and_duration_are_those_of_each_stretch():
    found = alternating(192, 6, STEADY)["url"]
    kept = steady(found, concurrency=SLOTS)
    joined = [dataclasses.replace(one, stretch=0) for one in found]
    assert len(kept) < len(steady(joined, concurrency=SLOTS))  # which has filling and draining in the middle

    def told(records):
        return rates(records, Objectives(), concurrency=SLOTS).tokens_per_s

    assert told(found) == pytest.approx(SLOTS / 0.01, rel=0.02)
    assert told(joined) < 0.5 * SLOTS / 0.01  # the other side's turns are not its own


@pytest.mark.parametrize("n", [3, 6])
def test_t_intervals_of_few_stretches_cover_and_normal_ones_do_not(n):
    rng = np.random.default_rng(3)
    inside = normal = 0
    for values in rng.normal(0.3, 0.1, size=(1000, n)):
        low, high = mean_interval(values)[1]
        inside += low <= 0.3 <= high
        normal += abs(values.mean() - 0.3) <= 1.96 * values.std(ddof=1) / n**0.5
    assert 0.93 <= inside / 1000 <= 0.97
    assert normal / 1000 < 0.91
    assert mean_interval([1.0, 2.0])[1] == (-np.inf, np.inf)


def noisy(stretches: int = 6):
    rng = np.random.default_rng(5)
    return alternating(48 * stretches, stretches, STEADY, noise=lambda: float(rng.lognormal(0, 0.05)))


def test_gates_on_throughput_and_speedup():
    checks = judged(noisy(), min_speedup_under_load=1.5, min_tokens_per_s=300.0)
    assert {check.verdict for check in checks.values()} == {Verdict.PASS}
    assert all(check.required for check in checks.values())
    checks = judged(noisy(), min_speedup_under_load=2.5, min_tokens_per_s=800.0)
    assert {check.verdict for check in checks.values()} == {Verdict.FAIL}
    close = judged(noisy(), min_speedup_under_load=2.0)["speedup_under_load"]
    assert close.verdict is Verdict.INCONCLUSIVE
    assert "requests do not decide" in close.summary


def test_too_few_stretches_decide_nothing_and_say_how_many_requests_would():
    few = judged(noisy(FEWEST_STRETCHES - 1), min_speedup_under_load=0.5)["speedup_under_load"]
    assert few.verdict is Verdict.INCONCLUSIVE
    assert f"--requests {FEWEST_STRETCHES * 4 * SLOTS} at least" in few.summary
    enough = alternating(FEWEST_STRETCHES * 4 * SLOTS, FEWEST_STRETCHES, STEADY)
    assert judged(enough, min_speedup_under_load=0.5)["speedup_under_load"].verdict is Verdict.PASS


def test_more_than_tokens_a_step_can_give_is_no_speedup():
    assert judged(noisy(), length=2.5)["speedup_under_load"].verdict is Verdict.MEASURED
    wrong = judged(noisy(), length=1.5)["speedup_under_load"]
    assert wrong.verdict is Verdict.ERROR
    assert "can give" in wrong.summary
    assert not wrong.required


def test_what_cannot_be_told_is_skipped_and_a_gate_on_it_is_not_passed():
    uncounted = {
        side: [dataclasses.replace(one, tokens=None) for one in records] for side, records in noisy().items()
    }
    for checks in (
        judged(uncounted, min_tokens_per_s=1.0),
        judged(noisy(), concurrency=None, min_tokens_per_s=1.0),
        judged(alternating(192, 1, STEADY), min_tokens_per_s=1.0),  # one after the other: drift is not seen
        judged({side: records[:3] for side, records in noisy().items()}, min_tokens_per_s=1.0),
    ):
        assert {check.verdict for check in checks.values()} == {Verdict.SKIPPED}
        assert [check.name for check in checks.values() if check.required] == ["throughput"]


def test_requests_that_fail_take_time_and_bring_no_tokens():
    found = noisy()
    whole = judged(found)["throughput"]
    found["url"] = [
        dataclasses.replace(one, error="reset", tokens=None, arrivals_s=()) if number % 2 else one
        for number, one in enumerate(found["url"])
    ]
    half = judged(found)["throughput"]
    assert half.measured == pytest.approx(whole.measured / 2, rel=0.15)
    assert "failed" in half.warnings[0]
