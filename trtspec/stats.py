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


def rate_interval(events: int, trials: int, confidence: float = CONFIDENCE) -> Interval:
    """Two-sided Clopper-Pearson interval of a rate."""
    if not 0 <= events <= trials:
        raise ValueError(f"{events} events in {trials} trials")
    tail = (1 - confidence) / 2
    special = scipy("special")
    low = 0.0 if events == 0 else float(special.betaincinv(events, trials - events + 1, tail))
    high = 1.0 if events == trials else float(special.betaincinv(events + 1, trials - events, 1 - tail))
    return low, high


def bootstrap(
    statistic: Callable[[NDArray[np.intp]], Array],
    num_blocks: int,
    *,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
) -> Interval:
    """Percentile bootstrap interval over independent blocks (Efron 1979).

    ``statistic`` maps block numbers ``[resamples, num_blocks] int`` to one value a row, ``[resamples]``.
    One block says nothing about spread: the interval is then (-inf, inf).
    """
    if num_blocks < 2:
        return -math.inf, math.inf
    chosen = np.random.default_rng(SEED).integers(0, num_blocks, size=(resamples, num_blocks))
    values = statistic(chosen)
    tail = (1 - confidence) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)


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

    return float(np.exp(sums.sum() / counts.sum())), bootstrap(statistic, len(sums), confidence=confidence)


def ratio_of_sums(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float, Interval]:
    """sum / sum over blocks (requests) with its interval, for tokens per step and accepted per drafted."""
    top = np.asarray(numerators, dtype=np.float64)
    bottom = np.asarray(denominators, dtype=np.float64)
    if bottom.sum() == 0:
        return math.nan, (-math.inf, math.inf)

    def statistic(chosen: NDArray[np.intp]) -> Array:
        below = bottom[chosen].sum(axis=1)
        ratio: Array = top[chosen].sum(axis=1) / np.where(below == 0, np.nan, below)
        return np.nan_to_num(ratio, nan=float(top.sum() / bottom.sum()))

    return float(top.sum() / bottom.sum()), bootstrap(statistic, len(top))


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
    so what slows both of them cancels out. One prompt says nothing about spread.
    """
    mine, theirs = np.asarray(seconds, dtype=np.float64), np.asarray(seconds_over, dtype=np.float64)
    if mine.shape != theirs.shape or not mine.size:
        raise ValueError("not the same prompts and rounds on both sides")
    value = float(theirs.sum() / mine.sum())
    rng = np.random.default_rng(SEED)

    def statistic(chosen: NDArray[np.intp]) -> Array:
        rounds = rng.integers(0, mine.shape[1], size=(*chosen.shape, mine.shape[1]))
        picked = chosen[:, :, None], rounds
        ratio: Array = theirs[picked].sum(axis=(1, 2)) / mine[picked].sum(axis=(1, 2))
        return ratio

    return value, bootstrap(statistic, len(mine), confidence=confidence)


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
    """Blocks after which an interval that shrinks with 1/sqrt(n) should clear ``bound``.

    None when no number would (the measured value is the bound itself, or nothing is known).
    """
    low, high = interval
    distance = abs(measured - bound)
    if not all(map(math.isfinite, (measured, low, high))) or distance == 0 or num_blocks < 2:
        return None
    half = (high - measured) if bound > measured else (measured - low)
    needed = math.ceil(num_blocks * (half / distance) ** 2)
    return max(needed, num_blocks + 1) if needed < 1_000_000 else None


def scipy(part: Literal["special", "stats"]) -> Any:
    """``scipy.special`` or ``scipy.stats``. Raises MissingError without scipy."""
    try:
        return importlib.import_module(f"scipy.{part}")
    except ImportError:
        raise MissingError("scipy is not installed; run: pip install 'trtspec[eval]'") from None
