"""Latency under load: coverage of intervals by simulation, identities of goodput, runs that do not count."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from trtspec.verify.gates import Verdict
from trtspec.verify.latency import (
    judge_latency,
    late_client,
    oversaturated,
    quantile_of,
    requests_needed,
    throttled,
)
from trtspec.verify.timed import Objectives, Timed, rates, steady, timed_from, timed_rows


def made(number: int, sent: float, ttft: float, tpot: float, tokens: int = 20, **changes) -> Timed:
    arrivals = tuple(sent + ttft + tpot * i for i in range(tokens))
    return Timed(f"r{number}", **{"due_s": sent, "sent_s": sent, "arrivals_s": arrivals,
                                  "ended_s": arrivals[-1], "tokens": tokens, **changes})  # fmt: skip


def queue(rate: float, service_s: float, count: int = 400, seed: int = 0) -> list[Timed]:
    """An open loop at a single server: Poisson arrivals, constant service; TTFT is wait and service."""
    rng = np.random.default_rng(seed)
    due = np.cumsum(rng.exponential(1 / rate, count))
    free, records = 0.0, []
    for number, at in enumerate(due):
        free = max(free, at) + service_s
        records.append(made(number, float(at), free - at, 0.001))
    return records


@pytest.mark.parametrize(("share", "n"), [(0.5, 30), (0.9, 60), (0.99, 400)])
@pytest.mark.parametrize("law", ["exponential", "two values"])
def test_order_statistics_cover_the_true_quantile(share, n, law):
    rng = np.random.default_rng(7)
    inside = 0
    for _ in range(600):
        if law == "exponential":
            values, true = rng.exponential(size=n), -np.log(1 - share)
        else:  # ties: a law with atoms is covered at least as often
            values, true = (rng.random(n) > share - 0.02).astype(float), 1.0
        low, high = quantile_of(list(values), share).interval
        inside += low <= true <= high
    assert inside / 600 >= 0.95 - 0.02
    assert law != "exponential" or inside < 600  # and is not so wide that it says nothing


def test_a_normal_interval_of_a_tail_quantile_does_not_cover():
    # Deliberately broken: value +- 1.96 sd / sqrt(n), as dashboards print it.
    rng, inside = np.random.default_rng(7), 0
    for _ in range(300):
        values = rng.exponential(size=400)
        half = 1.96 * values.std() / np.sqrt(400)
        inside += abs(np.quantile(values, 0.99) + np.log(0.01)) <= half
    assert inside / 300 < 0.6


def test_too_few_requests_are_refused_with_the_number_needed():
    assert [requests_needed(share) for share in (0.5, 0.9, 0.99)] == [6, 36, 368]
    for share in (0.5, 0.9, 0.99):
        needed = requests_needed(share)
        assert quantile_of([1.0] * (needed - 1), share).value is None
        values = list(np.random.default_rng(1).random(needed))
        found = quantile_of(values, share)
        assert found.interval[0] <= found.value <= found.interval[1] <= max(values)
        # With one fewer no interval has its error on both sides: the largest value may lie below.
        assert share ** (needed - 1) > 0.025 >= share**needed


def test_goodput_identities():
    rng = np.random.default_rng(3)
    records = [
        made(i, 0.1 * i, float(rng.exponential(0.2)), float(rng.exponential(0.02)), int(rng.integers(1, 30)))
        for i in range(200)
    ]
    records[5] = dataclasses.replace(records[5], error="HTTP 503")
    everything = rates(records, Objectives())
    assert everything.goodput == pytest.approx(everything.requests_per_s)
    before = everything.goodput
    for limit in (1.0, 0.3, 0.1, 0.01, 0.0):
        found = rates(records, Objectives(ttft_s=limit, tpot_s=0.03))
        assert found.goodput <= before + 1e-12  # tighter objectives never help
        assert found.goodput == pytest.approx(found.within * found.requests / found.duration_s)
        low, high = found.within_interval
        assert low <= found.within <= high
        before = found.goodput
    both = rates(records, Objectives(ttft_s=0.2, e2e_s=0.5)).within
    assert both <= min(
        rates(records, Objectives(ttft_s=0.2)).within, rates(records, Objectives(e2e_s=0.5)).within
    )


def test_metrics_of_one_request():
    one = Timed("a", due_s=1.0, sent_s=1.1, arrivals_s=(1.5, 2.0, 2.5), ended_s=2.6, tokens=9)
    assert one.ttft_s == pytest.approx(0.5)  # from when it was due: waiting for a free client is waiting
    assert one.tpot_s == pytest.approx(1.0 / 8)
    assert one.gaps_s == pytest.approx((0.5, 0.5))
    assert sum(one.gaps_s) == pytest.approx(one.tpot_s * (one.tokens - 1))
    failed = dataclasses.replace(one, error="HTTP 500")
    assert (failed.ttft_s, failed.tpot_s, failed.e2e_s, failed.gaps_s) == (None, None, None, ())
    assert not Objectives().met(failed)


def test_the_steady_state_leaves_out_filling_and_draining():
    # Eight slots, ten rounds of one second each.
    records = [made(i, float(i // 8), 0.1, 0.9 / 19) for i in range(80)]
    kept = steady(records, concurrency=8)
    assert 0 < len(kept) < 80
    assert all(record.sent_s >= 1.0 and record.ended_s <= 9.0 for record in kept)
    assert len(kept) == 80 - 2 * 8
    assert len(steady(queue(2.0, 0.1))) < 400
    assert steady([], concurrency=2) == []


def mixed(seed: int, slots: int = 8, count: int = 48) -> list[Timed]:
    """A closed loop whose answers take one second, or, one in four, ten."""
    rng = np.random.default_rng(seed)
    free, records = [0.0] * slots, []
    for number in range(count):
        slot = int(np.argmin(free))
        tokens = 100 if rng.random() < 0.25 else 10
        records.append(made(number, free[slot], 0.1, 0.1, tokens=tokens))
        free[slot] = records[-1].ended_s
    return records


def test_the_steady_state_has_as_many_long_answers_as_the_load_and_its_rate_is_that_of_all_slots():
    runs = [mixed(seed) for seed in range(300)]

    def share_of_long(kept: list[list[Timed]]) -> float:
        return sum(one.tokens == 100 for run in kept for one in run) / sum(map(len, kept))

    assert share_of_long([steady(run, concurrency=8) for run in runs]) == pytest.approx(0.25, abs=0.03)
    whole = [
        [one for one in run if one.sent_s >= 1.0 and one.ended_s <= max(other.sent_s for other in run)]
        for run in runs
    ]
    assert share_of_long(whole) < 0.18  # what lies wholly within leaves out the long ones
    found = [rates(run, Objectives(), concurrency=8).tokens_per_s for run in runs]
    assert np.mean(found) == pytest.approx(80.0, rel=0.02)  # eight slots, a token each 0.1 s
    inner = [rates(one, Objectives()).tokens_per_s for one in whole if one]
    assert np.mean(inner) < 70  # as if slots were empty at the edges


def test_over_saturation_is_seen_and_a_busy_server_is_not_accused():
    slightly = [oversaturated(queue(11.0, 0.1, seed=seed, count=600), 11.0) for seed in range(10)]
    assert sum(map(bool, slightly)) >= 7
    assert "over-saturated" in oversaturated(queue(15.0, 0.1), 15.0)
    accused = sum(bool(oversaturated(queue(6.0, 0.1, seed=seed), 6.0)) for seed in range(60))
    assert accused <= 1


def test_throttling_is_seen_and_noise_is_not():
    rng = np.random.default_rng(4)

    def run(slow: float) -> list[Timed]:
        return [
            made(i, float(i), 0.1, 0.01 * float(rng.lognormal(0, 0.15)) * (slow if i > 40 else 1))
            for i in range(60)
        ]

    assert "throttling" in throttled(run(1.5))
    assert sum(bool(throttled(run(1.0))) for _ in range(60)) <= 1
    assert throttled(run(1.5)[:10]) == ""


def test_a_client_that_is_late_says_so():
    records = queue(2.0, 0.1, count=50)
    assert late_client(records) == ""
    late = [dataclasses.replace(record, sent_s=record.due_s + 0.5) for record in records]
    assert "the client was late" in late_client(late)


def test_the_check_refuses_a_p99_and_a_goodput_of_an_overrun_server():
    def of(records, rate, bound=0.5):
        return judge_latency(
            timed_rows(records), name="url", side="url", load="x", concurrency=None, rate_per_s=rate,
            objectives={"ttft_s": 60.0, "tpot_s": None, "e2e_s": None}, bound=bound,
        )  # fmt: skip

    few, good = of(queue(5.0, 0.05, count=100), 5.0)
    assert few.evidence["latency"]["TTFT"]["p99_ms"] is None
    assert few.evidence["latency"]["TTFT"]["p50_ms"] > 0
    assert any("p99 needs 368" in line for line in few.details)
    assert good.verdict is Verdict.PASS
    many, _ = of(queue(5.0, 0.05, count=500), 5.0)
    assert many.evidence["latency"]["TTFT"]["p99_ms"] > many.evidence["latency"]["TTFT"]["p50_ms"]
    over, good = of(queue(15.0, 0.1, count=300), 15.0)
    assert any("over-saturated" in line for line in over.warnings)
    assert good.verdict is Verdict.INCONCLUSIVE  # within the objectives only because the run ended
    assert timed_from(timed_rows(queue(5.0, 0.05, count=9))) == queue(5.0, 0.05, count=9)
