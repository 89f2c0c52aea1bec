"""How many draws a test needs, and that a sequence of looks keeps its error rate."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy import stats

from trtspec.cli import main
from trtspec.errors import InputError
from trtspec.verify import power


def test_the_draws_for_the_bias_of_2026(capsys):
    """10/60/30 made 10.16/63.04/26.80: w^2 = 0.005 rounded, 5,506 draws for power 0.99 at 0.01."""
    bias = power.bias_size(power.INTENDED, power.PRODUCED)
    assert round(bias, 3) == 0.005
    assert power.draws_needed(bias, 3) == 5506
    assert power.power_of(5506, bias, 3) >= 0.99 > power.power_of(5505, bias, 3)
    assert main(["verify", "--plan"]) == 0
    assert "5,506 draws against a known law" in capsys.readouterr().out
    assert main(["verify", "--plan", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["draws"] == 5506


@pytest.mark.parametrize("outcomes", [2, 3, 10])
@pytest.mark.parametrize("bias", [0.5, 0.02])
def test_planned_draws_and_found_bias_are_inverse(outcomes, bias):
    draws = power.draws_needed(bias, outcomes)
    assert power.least_bias(draws, outcomes) <= bias < power.least_bias(draws - 1, outcomes)


def test_two_outcomes_are_the_textbook_test_of_a_share():
    """Chi-square with two cells is the two-sided z test of a proportion."""
    n, p0, p1 = 400, 0.5, 0.58
    shift = (p1 - p0) * np.sqrt(n / (p0 * (1 - p0)))
    z = stats.norm.isf(0.005)
    assert power.power_of(n, power.bias_size((p0, 1 - p0), (p1, 1 - p1)), 2) == pytest.approx(
        stats.norm.sf(z - shift) + stats.norm.cdf(-z - shift)
    )


@pytest.mark.parametrize(
    "options", [["--bias", "-1"], ["--outcomes", "1"], ["--power", "1"], ["--bias", "1e-12"]]
)
def test_a_plan_that_makes_no_sense_exits_2(options, capsys):
    assert main(["verify", "--plan", *options]) == 2
    assert capsys.readouterr().err.startswith("error: plan: ")


def test_modes_exclude_each_other():
    for given in ([], ["--plan", "--self-test"], ["--bias", "0.1", "--self-test"]):
        assert main(["verify", *given]) == 2
    with pytest.raises(InputError):
        power.draws_needed(0.1, 3, alpha=0.5, power=0.4)


def test_holm_keeps_the_rate_of_any_false_alarm():
    rng = np.random.default_rng(4)
    families = rng.random((4000, 12))
    alarms = sum(any(power.holm(row.tolist(), 0.05)) for row in families)
    assert stats.binomtest(alarms, 4000, 0.05, alternative="greater").pvalue > 0.01
    naive = sum(bool((row <= 0.05).any()) for row in families)
    assert naive > 4 * alarms, "testing each at the whole level is what Holm is for"
    assert power.holm([0.001, 0.9, 0.02], 0.05) == [True, False, True]
    assert power.holm([float("nan"), 0.9], 0.05) == [False, False]


def test_levels_of_looks_add_up():
    levels = power.look_levels(power.LOOKS)
    assert sum(levels) == pytest.approx(power.SUITE_ALPHA)
    assert all(level > 0 for level in levels)
    assert levels[-1] > 0.85 * power.SUITE_ALPHA


def test_looks_that_spend_nothing_raise_false_alarms():
    """The same four looks, each at the whole level: the rate is well above alpha, with spending it is not."""
    rng = np.random.default_rng(6)
    law, planned = (0.5, 0.3, 0.2), 800
    spending = naive = 0
    for _ in range(600):
        draws = rng.choice(3, planned, p=law)
        spending += power.sequential_fit(draws.tolist(), law, planned=planned, alpha=0.05).rejected
        counts = [np.bincount(draws[: round(share * planned)], minlength=3) for share in power.LOOKS]
        naive += any(power.goodness_of_fit(one.tolist(), law) <= 0.05 for one in counts)
    assert stats.binomtest(spending, 600, 0.05, alternative="greater").pvalue > 0.01
    assert stats.binomtest(naive, 600, 0.05, alternative="greater").pvalue < 1e-4


def test_the_bias_of_2026_is_found_and_nothing_else():
    found = power.simulate(runs=100, null_runs=300)
    assert found.detected >= 99
    assert found.false_alarms <= 3
    assert found.mean_draws < found.draws == 6000
    assert found.passed
    blind = power.simulate(runs=50, null_runs=0, produced=power.INTENDED)
    assert blind.detected <= 3
    assert not blind.passed


def test_small_cells_are_pooled():
    law = np.array([0.5, 0.49, 0.004, 0.003, 0.003])
    rng = np.random.default_rng(8)
    p_values = [power.goodness_of_fit(rng.multinomial(100, law).tolist(), law) for _ in range(1000)]
    assert stats.binomtest(sum(p <= 0.01 for p in p_values), 1000, 0.01, alternative="greater").pvalue > 0.01
    assert power.goodness_of_fit([5, 5, 1], [0.5, 0.5, 0.0]) == 0.0
    assert power.goodness_of_fit([3], [1.0]) == 1.0
