"""The gate of tasks: Tango's interval, McNemar, and what whole suites decide, by seeded simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trtspec.verify.divergence import judge_divergence
from trtspec.verify.gates import Check, Verdict, exit_code
from trtspec.verify.noninferiority import (
    difference,
    items_needed,
    judge_pairs,
    mcnemar,
    paired_interval,
)
from trtspec.verify.retrieval import judge_retrieval

Z2 = 1.959963984540054**2


def pairs(rng: np.random.Generator, items: int, loss: float, flips: float) -> tuple[list, list]:
    """Scores of 0 and 1: both sides differ on ``flips`` of the items by chance, and on ``loss`` more one
    side is worse."""
    draw = rng.random(items)
    lost, gained = draw < loss + flips / 2, draw >= 1 - flips / 2
    both = rng.random(items) < 0.7
    target = np.where(lost, 0.0, np.where(gained, 1.0, both))
    baseline = np.where(lost, 1.0, np.where(gained, 0.0, both))
    return target.tolist(), baseline.tolist()


def judge(target: list, baseline: list, margin: float | None) -> Check:
    return judge_pairs("task:x", "x", target, baseline, margin=margin, how="simulated")


def contains_zero_passes(target: list, baseline: list, margin: float) -> bool:
    """The broken gate: no significant loss is taken for no loss."""
    low, high = difference(target, baseline).interval
    return low <= 0 <= high or low > 0


@pytest.mark.parametrize("items", [1, 10, 60, 1000])
def test_no_difference_seen_is_not_no_difference(items: int):
    low, high = paired_interval(0, 0, items)
    assert high == pytest.approx(Z2 / (items + Z2), abs=1e-9)
    assert low == pytest.approx(-high)


def test_the_interval_inverts_mcnemars_test():
    """0 is inside exactly where (gained - lost)^2 / (gained + lost) does not exceed the critical value."""
    for gained in range(15):
        for lost in range(15):
            low, high = paired_interval(gained, lost, 40)
            assert low <= (gained - lost) / 40 <= high
            mirrored = paired_interval(lost, gained, 40)
            assert mirrored == pytest.approx((-high, -low))
            if gained + lost:
                statistic = (gained - lost) ** 2 / (gained + lost)
                if abs(statistic - Z2) > 1e-6:
                    assert (low <= 0 <= high) == (statistic <= Z2)


def test_all_or_nothing():
    assert paired_interval(0, 10, 10)[0] == -1.0
    assert paired_interval(10, 0, 10)[1] == 1.0
    with pytest.raises(ValueError):
        paired_interval(6, 5, 10)


def test_mcnemar_is_the_binomial_test():
    stats = pytest.importorskip("scipy.stats")
    for gained, lost in [(0, 0), (0, 7), (3, 9), (5, 5), (40, 60)]:
        total = gained + lost
        expected = stats.binomtest(gained, total, 0.5).pvalue if total else 1.0
        assert mcnemar(gained, lost) == pytest.approx(expected)


def test_a_model_at_the_margin_passes_in_one_of_forty_at_most():
    """Coverage where it matters, at few items and at many; two standard errors of 2000 runs allowed."""
    rng = np.random.default_rng(1)
    for items, flips in ((30, 0.02), (30, 0.2), (200, 0.05)):
        passed = 0
        for _ in range(2000):
            draw = rng.random(items)
            lost, gained = int((draw < 0.1 + flips / 2).sum()), int((draw >= 1 - flips / 2).sum())
            passed += paired_interval(gained, lost, items)[0] >= -0.1
        assert passed / 2000 <= 0.025 + 2 * math.sqrt(0.025 * 0.975 / 2000), (items, flips)


def test_too_few_items_are_inconclusive_and_say_how_many_would_do():
    target, baseline = [1.0] * 12, [1.0] * 12
    check = judge(target, baseline, 0.05)
    assert check.verdict is Verdict.INCONCLUSIVE
    assert "12 items do not decide, about" in check.summary
    needed = check.evidence["items_to_pass_an_equal_model"]
    rng = np.random.default_rng(2)
    flips = check.evidence and (1 / 14)
    passed = sum(judge(*pairs(rng, needed, 0.0, flips), 0.05).verdict is Verdict.PASS for _ in range(200))
    assert passed >= 0.9 * 200
    assert contains_zero_passes(target, baseline, 0.05)  # what this gate is there to refuse


def test_a_small_bad_sample_passes_the_broken_gate_only():
    """20 points lost, 15 items: the loss is not significant, which the broken gate takes for none."""
    rng = np.random.default_rng(3)
    broken = ours = 0
    for _ in range(300):
        target, baseline = pairs(rng, 15, 0.2, 0.1)
        broken += contains_zero_passes(target, baseline, 0.1)
        ours += judge(target, baseline, 0.1).verdict is Verdict.PASS
    assert broken > 150
    assert ours <= 8


def test_scores_between_0_and_1_and_broken_ones():
    rng = np.random.default_rng(4)
    scores = rng.random(200)
    check = judge(scores.tolist(), (scores * 0.999).tolist(), 0.05)
    assert check.verdict is Verdict.PASS
    assert check.interval[1] - check.interval[0] >= Z2 / (200 + Z2)
    assert judge([math.nan, 1.0], [1.0, 1.0], 0.05).verdict is Verdict.ERROR
    assert judge([1.0], [1.0, 1.0], 0.05).verdict is Verdict.ERROR
    assert judge([], [], 0.05).verdict is Verdict.ERROR
    assert judge([2.0], [1.0], 0.05).verdict is Verdict.ERROR
    assert not judge([1.0], [1.0], None).required


MARGIN = 0.1
FLIPS = 0.06
SIZES = (items_needed(FLIPS, MARGIN, 2 * MARGIN), 400, 600, 800)


def suite(rng: np.random.Generator, losses: tuple[float, ...], kl: float | None = None) -> list[Check]:
    """A whole suite of an engine: tasks, retrieval and divergences, with the noise of a real one."""
    checks = []
    for size, loss in zip(SIZES, losses, strict=True):
        checks.append(judge(*pairs(rng, size, loss, FLIPS), MARGIN))
    target, baseline = pairs(rng, 300, 0.0, FLIPS)
    rows = [
        {"id": "", "length": 1, "depth": 0.5, "target": a == 1, "baseline": b == 1}
        | {"target_logprob": 0.0, "baseline_logprob": 0.0}
        for a, b in zip(target, baseline, strict=True)
    ]
    checks.append(judge_retrieval(rows, margin=MARGIN))
    if kl is None:
        return checks
    tokens = []
    for text in range(24):
        level = rng.gamma(4.0, kl / 4)
        for position in range(125):
            value = rng.gamma(0.5, 2 * level)
            same = bool(rng.random() > 0.05)
            tokens.append({"text": text, "position": position, "kl": value, "same_top": same})
    gates = {"max_mean_kl": 0.1, "max_p99_kl": 1.0, "min_same_top_token": 0.85}
    return checks + judge_divergence(tokens, source="simulated", **gates)


def test_an_equal_model_fails_one_suite_of_twenty_at_most():
    """And it does not merely stay undecided: nine of ten suites pass whole."""
    rng = np.random.default_rng(5)
    codes = [exit_code(suite(rng, (0.0,) * 4, 0.02)) for _ in range(100)]
    assert codes.count(1) <= 5
    assert codes.count(0) >= 90


@pytest.mark.parametrize("where", range(4))
def test_twice_the_margin_in_one_task_is_caught(where: int):
    rng = np.random.default_rng(6 + where)
    losses = tuple(2 * MARGIN if number == where else 0.0 for number in range(4))
    codes = [exit_code(suite(rng, losses)) for _ in range(200)]
    assert codes.count(1) >= 190
    assert codes.count(0) == 0


def test_a_divergence_of_twice_the_gate_is_caught():
    rng = np.random.default_rng(20)
    codes = [exit_code(suite(rng, (0.0,) * 4, 0.3)) for _ in range(20)]
    assert codes.count(1) >= 19


def test_a_baseline_that_solves_nothing_is_no_ruler():
    nothing = judge_pairs("task:x", "x", [0.0] * 400, [0.0] * 400, margin=0.05, how="")
    assert nothing.verdict is Verdict.INCONCLUSIVE
    assert "solves too few" in nothing.summary
    some = [1.0] * 40 + [0.0] * 360
    assert judge_pairs("task:x", "x", some, some, margin=0.05, how="").verdict is Verdict.PASS
