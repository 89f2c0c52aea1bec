"""Intervals: how sure a measured number is. Seeded, so one report is reproducible from its data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

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
    return float(_special().betaincinv(events + 1, trials - events, confidence))


def rate_interval(events: int, trials: int, confidence: float = CONFIDENCE) -> Interval:
    """Two-sided Clopper-Pearson interval of a rate."""
    if not 0 <= events <= trials:
        raise ValueError(f"{events} events in {trials} trials")
    tail = (1 - confidence) / 2
    special = _special()
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


def mean_difference_ratio(differences: Sequence[Sequence[float]]) -> tuple[float, Interval]:
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

    return float(np.exp(sums.sum() / counts.sum())), bootstrap(statistic, len(sums))


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


def median_of_blocks(values: Sequence[Sequence[float]]) -> tuple[float, Interval]:
    """Median over blocks (prompts) of each block's median (over repetitions), with its interval.

    The prompt is the unit that is resampled: repetitions of one prompt say how noisy the clock is, not
    how prompts differ.
    """
    blocks = np.array([float(np.median(block)) for block in values])
    if len(blocks) == 0:
        return math.nan, (-math.inf, math.inf)

    def statistic(chosen: NDArray[np.intp]) -> Array:
        medians: Array = np.median(blocks[chosen], axis=1)
        return medians

    return float(np.median(blocks)), bootstrap(statistic, len(blocks))


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


def _special() -> Any:
    try:
        from scipy import special
    except ImportError:
        raise MissingError("scipy is not installed; run: pip install 'trtspec[eval]'") from None
    return special
