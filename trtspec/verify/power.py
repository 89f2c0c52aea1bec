"""How many draws a test needs: planned before anything is measured, so that a pass means something.

A bias of a law p0 that makes it p1 has the size w^2 = sum (p1 - p0)^2 / p0 (Cohen 1988, chapter 7). After n
draws the chi-square statistic has, in the limit, the noncentral law with noncentrality n w^2.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from trtspec.errors import InputError, Problem
from trtspec.stats import rate_interval, scipy

SUITE_ALPHA = 0.01
"""Of all tests of sampled output together: a lossless engine fails one verification in a hundred, at most."""
POWER = 0.99
_SPENDING = 8
_MOST_DRAWS = 10**9


def bias_size(law: Sequence[float], biased: Sequence[float]) -> float:
    """w^2 of ``biased`` against ``law``; both are normalised first."""
    p0, p1 = (np.asarray(values, dtype=np.float64) for values in (law, biased))
    p0, p1 = p0 / p0.sum(), p1 / p1.sum()
    return float(((p1 - p0) ** 2 / p0).sum())


def told_bias(bias: float) -> tuple[str, ...]:
    """w^2 in words: what a fair coin of that bias does (1/2 +- sqrt(w^2) / 2); nothing where no coin can."""
    if not 0 < bias < 1:
        return ()
    return (f"w^2 = {bias:.3g} is a fair coin that falls {50 + 50 * bias**0.5:.0f}% to one side",)


def power_of(draws: float, bias: float, outcomes: int, alpha: float = SUITE_ALPHA) -> float:
    """The chance that a chi-square test of ``outcomes`` cells at ``alpha`` finds a bias of size w^2
    ``bias``."""
    stats = scipy("stats")
    critical = stats.chi2.isf(alpha, outcomes - 1)
    return float(stats.ncx2.sf(critical, outcomes - 1, draws * bias))


@functools.lru_cache(maxsize=256)
def draws_needed(bias: float, outcomes: int, *, alpha: float = SUITE_ALPHA, power: float = POWER) -> int:
    """The least number of draws with that power: 5,506 for w^2 = 0.005 on three outcomes, 0.99 at 0.01.

    Raises InputError for values outside their ranges or a bias that a thousand million draws do not show.
    """
    problems = []
    if not bias > 0:
        problems.append(f"bias {bias:g} is not above 0")
    if outcomes < 2:
        problems.append(f"{outcomes} outcomes; a law to test has at least 2")
    if not 0 < alpha < power < 1:
        problems.append(f"alpha {alpha:g} and power {power:g}: 0 < alpha < power < 1")
    if not problems and power_of(_MOST_DRAWS, bias, outcomes, alpha) < power:
        problems.append(f"bias {bias:g} would take more than {_MOST_DRAWS:,} draws; ask for a larger one")
    if problems:
        raise InputError([Problem(f"plan: {problem}") for problem in problems])
    low, high = 0, 1
    while power_of(high, bias, outcomes, alpha) < power:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if power_of(middle, bias, outcomes, alpha) < power:
            low = middle
        else:
            high = middle
    return high


@functools.lru_cache(maxsize=256)
def least_bias(draws: int, outcomes: int, *, alpha: float = SUITE_ALPHA, power: float = POWER) -> float:
    """The smallest bias w^2 that ``draws`` draws show with that power; infinite without draws."""
    if draws < 1:
        return float("inf")
    low, high = 0.0, 1.0
    while power_of(draws, high, outcomes, alpha) < power:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if power_of(draws, middle, outcomes, alpha) < power else (low, middle)
    return high


def surprisal_draws(shift_nats: float, deviation: float, *, alpha: float, power: float = POWER) -> int:
    """Tokens after which the mean of surprisal less entropy shows a shift of ``shift_nats``, where the
    surprisal of one token has that standard deviation: ((z(alpha / 2) + z(1 - power)) deviation /
    shift)^2."""
    normal = scipy("stats").norm
    needed = ((normal.isf(alpha / 2) + normal.isf(1 - power)) * deviation / shift_nats) ** 2
    return int(np.ceil(needed))


def holm(p_values: Sequence[float], alpha: float = SUITE_ALPHA) -> list[bool]:
    """Which hypotheses are rejected with a chance of at most ``alpha`` that any of them is true (Holm
    1979)."""
    rejected = [False] * len(p_values)
    ordered = sorted(range(len(p_values)), key=lambda at: p_values[at])
    for rank, at in enumerate(ordered):
        if not p_values[at] <= alpha / (len(p_values) - rank):
            break
        rejected[at] = True
    return rejected


def spent(share: float, alpha: float = SUITE_ALPHA) -> float:
    """The chance of a false alarm that looks up to ``share`` of the planned draws may have used: alpha t^8.

    A power-family spending function (Kim and DeMets 1987). By Boole's inequality looks at t_1 < ... < t_k =
    1, each at the level spent(t_i) - spent(t_{i-1}), raise a false alarm with a chance of at most alpha,
    whatever the test. So steep a function leaves the last of four looks 0.9 alpha, and the earlier ones still
    see an engine that is badly wrong.
    """
    return alpha * min(max(share, 0.0), 1.0) ** _SPENDING


def look_levels(shares: Sequence[float], alpha: float = SUITE_ALPHA) -> list[float]:
    """The level of each look, at ascending ``shares`` of the planned draws."""
    totals = [0.0, *(spent(share, alpha) for share in shares)]
    return [after - before for before, after in itertools.pairwise(totals)]


LOOKS = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Sequential:
    """A sequence of looks at growing counts. ``draws``: when it ended; ``p_value`` and ``level`` of that
    look."""

    rejected: bool
    draws: int
    p_value: float
    level: float


def goodness_of_fit(counts: Sequence[int], law: Sequence[float]) -> float:
    """p-value of the chi-square test of ``counts`` against ``law``; cells that expect less than 5 are pooled.

    1.0 where fewer than two cells are left. A draw where ``law`` has no mass: 0.0.
    """
    found, p0 = np.asarray(counts, dtype=np.float64), np.asarray(law, dtype=np.float64)
    p0 = p0 / p0.sum()
    if found[p0 == 0].sum() > 0:
        return 0.0
    found, expected = pool(found, p0 * found.sum())
    if len(found) < 2:
        return 1.0
    return float(scipy("stats").chisquare(found, expected).pvalue)


def pool(found: Any, expected: Any, least: float = 5.0) -> tuple[Any, Any]:
    """The cells with ``expected`` >= ``least``, and one of all the others (joined with the smallest cell if
    they do not come to ``least`` together): the chi-square law is a limit that small cells spoil."""
    order = np.argsort(-expected, kind="stable")
    found, expected = found[order], expected[order]
    kept = int((expected >= least).sum())
    if kept == len(expected):
        return found, expected
    rest_found, rest = found[kept:].sum(), expected[kept:].sum()
    if rest < least and kept:
        kept -= 1
        rest_found, rest = rest_found + found[kept], rest + expected[kept]
    return np.append(found[:kept], rest_found), np.append(expected[:kept], rest)


def sequential_fit(
    draws: Sequence[int], law: Sequence[float], *, planned: int, alpha: float = SUITE_ALPHA
) -> Sequential:
    """Test ``draws`` (outcome numbers) against ``law`` at each of :data:`LOOKS` of ``planned`` draws; stops
    at the first rejection. ``draws`` must hold at least ``planned``."""
    p_value, level, taken = 1.0, 0.0, 0
    outcomes = np.asarray(draws[:planned])
    for share, level in zip(LOOKS, look_levels(LOOKS, alpha), strict=True):
        taken = round(share * planned)
        p_value = goodness_of_fit(np.bincount(outcomes[:taken], minlength=len(law)).tolist(), law)
        if p_value <= level:
            return Sequential(True, taken, p_value, level)
    return Sequential(False, taken, p_value, level)


# --------------------------------------------------------------------------- the bias of 2026

INTENDED = (0.10, 0.60, 0.30)
PRODUCED = (0.1016, 0.6304, 0.2680)
"""What vLLM's rejection sampler made of ``INTENDED`` in a published bug of 2026."""
SIMULATED_DRAWS = 6000
SIMULATION_SEED = 1


@dataclass(frozen=True)
class Simulation:
    """How often the sequential test rejects, with the biased law and with the intended one."""

    bias: float
    draws: int
    power: float
    """Computed: of a single look at all draws, at the level of the last look."""
    runs: int
    detected: int
    mean_draws: float
    """Of the biased runs: a rejection ends them early."""
    null_runs: int
    false_alarms: int
    false_alarm_interval: tuple[float, float]
    alpha: float

    @property
    def passed(self) -> bool:
        return self.detected >= 0.99 * self.runs and self.false_alarms <= self.alpha * self.null_runs


def simulate(
    *,
    runs: int = 100,
    null_runs: int = 1000,
    draws: int = SIMULATED_DRAWS,
    seed: int = SIMULATION_SEED,
    alpha: float = SUITE_ALPHA,
    intended: Sequence[float] = INTENDED,
    produced: Sequence[float] = PRODUCED,
) -> Simulation:
    """Seeded runs of :func:`sequential_fit`. Counts of a finite number of runs scatter around the true rates:
    ``power`` and ``alpha`` are those."""
    rng = np.random.default_rng(seed)

    def run(law: Sequence[float]) -> Sequential:
        drawn = rng.choice(len(law), size=draws, p=np.asarray(law) / np.sum(law))
        return sequential_fit(drawn.tolist(), intended, planned=draws, alpha=alpha)

    biased = [run(produced) for _ in range(runs)]
    alarms = sum(run(intended).rejected for _ in range(null_runs))
    bias = bias_size(intended, produced)
    return Simulation(
        bias,
        draws,
        power_of(draws, bias, len(intended), look_levels(LOOKS, alpha)[-1]),
        runs,
        sum(one.rejected for one in biased),
        float(np.mean([one.draws for one in biased])) if biased else 0.0,
        null_runs,
        alarms,
        rate_interval(alarms, null_runs) if null_runs else (0.0, 1.0),
        alpha,
    )


def simulation_json(simulation: Simulation) -> dict[str, Any]:
    return {**asdict(simulation), "passed": simulation.passed}
