"""Intervals: how sure a measured number is. Seeded, so one report is reproducible from its data."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trtspec.errors import MissingError

CONFIDENCE = 0.95
RESAMPLES = 4000
SEED = 20240607

Interval = tuple[float, float]
Array = NDArray[np.float64]


def rate_upper_bound(events: int, trials: int, confidence: float = CONFIDENCE) -> float:
    """One-sided upper confidence bound of a rate after ``events`` in ``trials`` (Clopper-Pearson 1934).

    With no event it is 1 - (1 - confidence)^(1/trials), about 3/trials ("rule of three"). 1.0 without
    trials: nothing is known.
    """
    if not 0 <= events <= trials:
        raise ValueError(f"{events} events in {trials} trials")
    if events == trials:
        return 1.0
    return float(scipy("special").betaincinv(events + 1, trials - events, confidence))


def rate_interval(events: float, trials: float, confidence: float = CONFIDENCE) -> Interval:
    """Two-sided Clopper-Pearson interval of a rate; the numbers need not be whole."""
    if not 0 <= events <= trials:
        raise ValueError(f"{events} events in {trials} trials")
    tail, special = (1 - confidence) / 2, scipy("special")
    low = 0.0 if events == 0 else float(special.betaincinv(events, trials - events + 1, tail))
    high = 1.0 if events == trials else float(special.betaincinv(events + 1, trials - events, 1 - tail))
    return low, high


def independent_trials(
    events: Sequence[float], trials: Sequence[float], confidence: float = CONFIDENCE
) -> float:
    """How many independent trials would scatter as the ``events`` of blocks of ``trials`` do, which depend on
    each other: rate (1 - rate) / variance of the rate between blocks, times (t of all trials / t of the
    blocks)^2, at most all trials (Korn and Graubard 1998).

    Where every trial came out the same nothing says how alike they are: then a block counts as one trial.
    """
    top, bottom = (np.asarray(values, dtype=np.float64) for values in (events, trials))
    blocks, total = int((bottom > 0).sum()), float(bottom.sum())
    rate = float(top.sum() / total)
    if blocks < 2 or rate in (0.0, 1.0):
        return float(blocks)
    variance = blocks / (blocks - 1) * float(((top - rate * bottom) ** 2).sum()) / total**2
    spread = (student(total - 1, confidence) / student(blocks - 1, confidence)) ** 2
    return min(total, rate * (1 - rate) / variance * spread if variance > 0 else total)


def clustered_rate(events: Sequence[float], trials: Sequence[float]) -> tuple[float, Interval]:
    """Events / trials over blocks (answers) whose trials (steps) are alike, with its interval: that of
    Clopper and Pearson for :func:`independent_trials`. NaN without trials; (-inf, inf) for fewer than two
    blocks that have any."""
    total = sum(trials)
    if not total:
        return math.nan, (-math.inf, math.inf)
    rate = sum(events) / total
    if sum(one > 0 for one in trials) < 2:
        return rate, (-math.inf, math.inf)
    count = independent_trials(events, trials)
    return rate, rate_interval(min(rate * count, count), count)


def student(freedom: float, confidence: float = CONFIDENCE) -> float:
    """Student's t that a two-sided interval of so many degrees of freedom takes."""
    return float(scipy("special").stdtrit(freedom, 0.5 + confidence / 2))


def bootstrap(
    value: float,
    statistic: Callable[[NDArray[np.intp]], Array],
    num_blocks: int,
    *,
    positive: bool = False,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
) -> Interval:
    """Interval of ``value`` over independent blocks: Student's t times the bootstrap's standard error (Efron
    1979), on the logarithms of a ``positive`` quantity.

    ``statistic`` maps block numbers ``[resamples, num_blocks] int`` to one value a row, ``[resamples]``. The
    quantiles of so few blocks as are measured here are too near: of four blocks "95 %" would hold the truth
    in 80 %. With the factor sqrt(n / (n - 1)) and t of n - 1 a mean gets its t interval. One block says
    nothing about spread: the interval is then (-inf, inf). Blocks that all give the same value make it a
    point, which is right for one computation done twice; for counts see :func:`clustered_rate` and
    :func:`all_alike`.
    """
    if num_blocks < 2:
        return -math.inf, math.inf
    chosen = np.random.default_rng(SEED).integers(0, num_blocks, size=(resamples, num_blocks))
    values = statistic(chosen)
    logs = positive and value > 0 and bool((values > 0).all())
    error = float(np.std(np.log(values) if logs else values)) * math.sqrt(num_blocks / (num_blocks - 1))
    half = student(num_blocks - 1, confidence) * error
    if half <= 1e-12 * max(1.0, abs(value)):
        return value, value
    return (value * math.exp(-half), value * math.exp(half)) if logs else (value - half, value + half)


def all_alike(value: float, num_blocks: int, limits: Interval, confidence: float = CONFIDENCE) -> Interval:
    """Interval of a mean of which all blocks show the same ``value``, where a block could be anything within
    ``limits``: no more than 1 - ((1 - confidence) / 2)^(1/n) of all blocks are otherwise, at worst by as much
    as can be."""
    share = 1 - ((1 - confidence) / 2) ** (1 / num_blocks)
    low, high = limits
    return value - share * max(value - low, 0.0), value + share * max(high - value, 0.0)


def mean_interval(values: Sequence[float], *, confidence: float = CONFIDENCE) -> tuple[float, Interval]:
    """The mean of a few independent values with Student's t interval; (-inf, inf) for fewer than three."""
    mean = float(np.mean(values))
    if len(values) < 3:
        return mean, (-math.inf, math.inf)
    half = student(len(values) - 1, confidence) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean, (mean - half, mean + half)


def mean_difference_ratio(
    differences: Sequence[Sequence[float]], *, confidence: float = CONFIDENCE
) -> tuple[float, Interval]:
    """exp of the token mean of paired differences, with its interval; blocks are the inner sequences.

    ``differences[text][token]`` = log-probability under the baseline minus under the target, so the
    value is the perplexity of the target over that of the baseline. Texts are resampled whole because
    tokens of one text are dependent; each keeps its own number of tokens.
    """
    sums = np.array([math.fsum(block) for block in differences])
    counts = np.array([len(block) for block in differences], dtype=np.float64)
    if counts.sum() == 0:
        raise ValueError("no tokens")

    def statistic(chosen: NDArray[np.intp]) -> Array:
        ratio: Array = np.exp(sums[chosen].sum(axis=1) / counts[chosen].sum(axis=1))
        return ratio

    value = float(np.exp(sums.sum() / counts.sum()))
    return value, bootstrap(value, statistic, len(sums), positive=True, confidence=confidence)


def ratio_of_sums(
    numerators: Sequence[float], denominators: Sequence[float], *, limits: Interval | None = None
) -> tuple[float, Interval]:
    """sum / sum over blocks (requests), neither negative, with its interval, as for tokens per step.

    ``limits``: what the ratio of a block can be at all, which the interval keeps to; then blocks that are all
    alike do not make it a point (:func:`all_alike`).
    """
    top = np.asarray(numerators, dtype=np.float64)
    bottom = np.asarray(denominators, dtype=np.float64)
    if bottom.sum() == 0:
        return math.nan, (-math.inf, math.inf)
    value = float(top.sum() / bottom.sum())

    def statistic(chosen: NDArray[np.intp]) -> Array:
        below = bottom[chosen].sum(axis=1)
        ratio: Array = top[chosen].sum(axis=1) / np.where(below == 0, np.nan, below)
        return np.nan_to_num(ratio, nan=value)

    low, high = bootstrap(value, statistic, len(top), positive=True)
    if limits is None or len(top) < 2:
        return value, (low, high)
    if low == high:
        low, high = all_alike(value, int((bottom > 0).sum()), limits)
    # A value beyond the limits is a contradiction that others report: the interval then holds it alone.
    return value, (min(max(low, limits[0]), value), max(min(high, limits[1]), value))


def gap_of_ratios(
    mine: tuple[Sequence[float], Sequence[float]],
    other: tuple[Sequence[float], Sequence[float]],
    *,
    limits: Interval,
) -> tuple[float, Interval]:
    """sum / sum of ``mine`` (numerators, denominators) less that of ``other`` over the same blocks, with its
    interval: paired, blocks are resampled with both sides.

    A side whose blocks are all alike adds no spread to that, as if it were known exactly; then each side's
    own interval counts (``limits``: see :func:`ratio_of_sums`), put together by squares (Newcombe 1998).
    """
    sides = [[np.asarray(column, dtype=np.float64) for column in side] for side in (mine, other)]
    if any(bottom.sum() == 0 for _, bottom in sides):
        return math.nan, (-math.inf, math.inf)
    own = [ratio_of_sums(top, bottom, limits=limits) for top, bottom in sides]  # type: ignore[arg-type]
    value = own[0][0] - own[1][0]

    def statistic(chosen: NDArray[np.intp]) -> Array:
        ratios = [
            top[chosen].sum(axis=1) / np.maximum(bottom[chosen].sum(axis=1), 1e-9) for top, bottom in sides
        ]
        gap: Array = ratios[0] - ratios[1]
        return gap

    num_blocks = len(sides[0][0])
    alike = any(
        np.allclose(top, ratio * bottom, rtol=1e-12, atol=1e-12)
        for (top, bottom), (ratio, _) in zip(sides, own, strict=True)
    )
    low, high = bootstrap(value, statistic, num_blocks)
    if alike and num_blocks > 1:
        (a, (a_low, a_high)), (b, (b_low, b_high)) = own
        low, high = value - math.hypot(a - a_low, b_high - b), value + math.hypot(a_high - a, b - b_low)
    if num_blocks < 2:
        return value, (low, high)
    most = limits[1] - limits[0]
    return value, (min(max(low, -most), value), max(min(high, most), value))


def times_faster(
    seconds: Sequence[Sequence[float]],
    seconds_over: Sequence[Sequence[float]],
    *,
    confidence: float = CONFIDENCE,
) -> tuple[float, Interval]:
    """How many times faster one contender does the same work than another, with its interval.

    ``seconds[prompt][round]`` of the one and ``seconds_over[prompt][round]`` of the other, each pair for the
    same work and next to each other in time. The value is total time over total time, which is the
    quotient of the two rates (total work over total time). The bootstrap is paired and has two levels:
    prompts are resampled, and of each prompt its rounds; both contenders' times of a round stay together,
    so what slows both of them cancels out. One prompt says nothing about spread, and the interval of two
    reaches from a hundredth to a hundredfold: below three there is none.
    """
    mine, theirs = np.asarray(seconds, dtype=np.float64), np.asarray(seconds_over, dtype=np.float64)
    if mine.shape != theirs.shape or not mine.size:
        raise ValueError("not the same prompts and rounds on both sides")
    value = float(theirs.sum() / mine.sum())
    if len(mine) < 3:
        return value, (-math.inf, math.inf)
    rng = np.random.default_rng(SEED)

    def statistic(chosen: NDArray[np.intp]) -> Array:
        rounds = rng.integers(0, mine.shape[1], size=(*chosen.shape, mine.shape[1]))
        picked = chosen[:, :, None], rounds
        ratio: Array = theirs[picked].sum(axis=(1, 2)) / mine[picked].sum(axis=(1, 2))
        return ratio

    return value, bootstrap(value, statistic, len(mine), positive=True, confidence=confidence)


def least_of_pairs(seconds: Sequence[Sequence[float]], seconds_over: Sequence[Sequence[float]]) -> float:
    """The smallest quotient of two times next to each other, of those of :func:`times_faster`: a speedup that
    even this exceeds shows in every single pair."""
    mine, theirs = np.asarray(seconds, dtype=np.float64), np.asarray(seconds_over, dtype=np.float64)
    return float((theirs / mine).min())


def quantile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` of ``values`` do not exceed; 0 without any."""
    return float(np.quantile(np.asarray(values, dtype=np.float64), share, method="higher")) if values else 0.0


def larger_by_chance(differences: Sequence[float]) -> float:
    """One-sided p-value of paired differences being positive: sign-flip permutation test (Fisher 1935).

    The share of all choices of signs whose sum is at least that observed. Exact up to 14 pairs, beyond that
    over a seeded sample of signs. With n pairs it cannot be below 2^-n.
    """
    values = np.asarray([value for value in differences if value != 0], dtype=np.float64)
    if not len(values):
        return 1.0
    if len(values) <= 14:
        signs = 1.0 - 2.0 * ((np.arange(2 ** len(values))[:, None] >> np.arange(len(values))) & 1)
    else:
        signs = np.random.default_rng(SEED).choice([-1.0, 1.0], size=(20_000, len(values)))
        signs[0] = 1.0  # what was observed is one of the possible choices
    return float(np.mean(signs @ np.abs(values) >= values.sum() - 1e-12))


def blocks_needed(measured: float, interval: Interval, bound: float, num_blocks: int) -> int | None:
    """Blocks after which an interval should clear ``bound`` that shrinks with t / sqrt(n).

    None when no number would (the measured value is the bound itself, or nothing is known).
    """
    low, high = interval
    distance = abs(measured - bound)
    if not all(map(math.isfinite, (measured, low, high))) or distance == 0 or num_blocks < 2:
        return None
    half = (high - measured) if bound > measured else (measured - low)
    errors = num_blocks * (half / distance / student(num_blocks - 1)) ** 2
    if errors >= 1_000_000:
        return None
    needed = math.ceil(errors * student(max(4.0 * errors, 2.0)) ** 2)
    return max(needed, num_blocks + 1) if needed < 1_000_000 else None


def scipy(part: Literal["special", "stats"]) -> Any:
    """``scipy.special`` or ``scipy.stats``. Raises MissingError without scipy."""
    try:
        return importlib.import_module(f"scipy.{part}")
    except ImportError:
        raise MissingError("scipy is not installed; run: pip install 'trtspec[eval]'") from None
