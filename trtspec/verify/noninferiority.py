"""Is one side no worse than the other by more than a margin? Paired, item by item.

A gate of "the interval of the difference contains 0" is passed by every sample that is small enough. So the
gate is non-inferiority: with d = mean score of the target minus that of the baseline over the same items,

* PASS: the whole 95 % interval of d lies above -margin (it may well exclude 0: significantly worse, and by
  little);
* FAIL: the whole interval lies below -margin;
* INCONCLUSIVE otherwise, with the number of items that would decide.

A model at the margin itself passes in about 2.5 % of cases, whatever the number of items (Tango's interval is
an approximation: enumerated for 15 to 60 items and margins of 2 to 20 points, in at most 3.3 %), an equal one
fails in practically none. Several tasks are judged one by one: all must pass, which needs no correction for
their number (intersection-union test, Berger 1982); a model exactly at the margin in k tasks fails by chance
in about 2.5 k % at most.

Scores of 0 and 1 get Tango's score interval for paired proportions (Stat. Med. 17, 1998, 891-908):
unlike a bootstrap it does not shrink to a point when no item differs. Other scores in [0, 1] get a paired
bootstrap over items, never narrower than Tango's interval for no item that differs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from trtspec.stats import CONFIDENCE, Interval, blocks_needed, bootstrap
from trtspec.verify.gates import Check, Verdict, gate_verdict
from trtspec.verify.records import Records

BASELINE = "the 16-bit baseline"
"""What an engine is held against, unless it is something else."""
POWER = 0.975
"""Planned: a little more than the 0.95 that is wanted, which the normal approximation falls short of."""


@dataclass(frozen=True)
class Difference:
    """Mean score of the target minus that of the baseline, paired by item."""

    value: float
    interval: Interval
    """95 %, two-sided."""
    target: float
    baseline: float
    items: int
    gained: int
    """Items on which the target scores higher."""
    lost: int
    p_mcnemar: float
    """Exact two-sided McNemar test (binomial sign test) of gained against lost."""

    @property
    def disagreement(self) -> float:
        """Share of items that differ, pulled a little towards one half (Laplace): 0 of 10 is not never."""
        return (self.gained + self.lost + 1) / (self.items + 2)


def paired_interval(gained: int, lost: int, items: int, confidence: float = CONFIDENCE) -> Interval:
    """Tango's score interval of (gained - lost) / items, the difference of two paired proportions.

    The differences that the score test does not reject; 0 is inside exactly if McNemar's test without
    continuity correction does not reject. Raises ValueError for counts that cannot be.
    """
    if min(gained, lost) < 0 or gained + lost > items or items < 1:
        raise ValueError(f"{gained} gained and {lost} lost of {items} items")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    found = (gained - lost) / items

    def distance(delta: float) -> float:
        # The maximum-likelihood rate of lost items under this difference (Tango 1998, equation 6).
        b = -gained - lost + (2 * items - gained + lost) * delta
        c = -lost * delta * (1 - delta)
        rate = (math.sqrt(max(b * b - 8 * items * c, 0.0)) - b) / (4 * items)
        variance = items * (2 * rate + delta * (1 - delta))
        off = gained - lost - items * delta
        if variance <= 0:
            return 0.0 if off == 0 else math.copysign(math.inf, off)
        return off / math.sqrt(variance)

    def root(inside: float, outside: float) -> float:
        for _ in range(60):
            middle = (inside + outside) / 2
            if abs(distance(middle)) <= z:
                inside = middle
            else:
                outside = middle
        return inside

    low = -1.0 if found <= -1 or abs(distance(-1 + 1e-12)) <= z else root(found, -1.0)
    high = 1.0 if found >= 1 or abs(distance(1 - 1e-12)) <= z else root(found, 1.0)
    return low, high


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided exact p-value of McNemar's test (1947): are gained and lost equally likely?"""
    total = gained + lost
    tail = sum(math.comb(total, k) for k in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**total) if total else 1.0


def difference(target: Sequence[float], baseline: Sequence[float]) -> Difference:
    """The paired difference of scores in [0, 1]; item i of both is the same item.

    Raises ValueError for no items, other numbers of them, or scores outside [0, 1].
    """
    mine, theirs = np.asarray(target, dtype=np.float64), np.asarray(baseline, dtype=np.float64)
    if mine.shape != theirs.shape or not mine.size:
        raise ValueError(f"{mine.size} scores against {theirs.size}")
    if not ((mine >= 0) & (mine <= 1) & (theirs >= 0) & (theirs <= 1)).all():
        raise ValueError("a score is not in [0, 1]")
    apart = mine - theirs
    items, gained, lost = mine.size, int((apart > 0).sum()), int((apart < 0).sum())
    value = float(apart.mean())
    if np.isin(apart, (-1.0, 0.0, 1.0)).all():
        interval = paired_interval(gained, lost, items)
    else:
        low, high = bootstrap(value, lambda chosen: apart[chosen].mean(axis=1), items)
        least = paired_interval(0, 0, items)[1]
        interval = max(-1.0, min(low, value - least)), min(1.0, max(high, value + least))
    return Difference(
        value,
        interval,
        float(mine.mean()),
        float(theirs.mean()),
        items,
        gained,
        lost,
        mcnemar(gained, lost),
    )


def items_needed(disagreement: float, margin: float, loss: float = 0.0, power: float = POWER) -> int:
    """Items after which a true ``loss`` is decided (PASS if it is below ``margin``, FAIL if above) with
    probability ``power``.

    ``disagreement``: the share of items that differ between two equal sides; a loss adds to it. From the
    normal approximation, ((z_confidence + z_power) / (margin - loss))^2 times the variance of a pair; at
    least what the interval needs if no item differs. Raises ValueError for a loss of the margin itself.
    """
    if loss == margin or margin <= 0:
        raise ValueError("nothing decides a loss of the margin itself")
    z, z_power = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2), NormalDist().inv_cdf(power)
    variance = max(disagreement + loss - loss * loss, 0.0)
    normal = ((z + z_power) / (margin - loss)) ** 2 * variance
    return math.ceil(max(normal, z * z * (1 - margin) / margin))


def judge_pairs(
    name: str,
    what: str,
    target: Sequence[float],
    baseline: Sequence[float],
    *,
    margin: float | None,
    how: str,
    over: str = BASELINE,
    unscored: Sequence[str] = (),
    evidence: dict[str, Any] | None = None,
    records: Records | None = None,
    warnings: tuple[str, ...] = (),
    details: tuple[str, ...] = (),
) -> Check:
    """The verdict on paired scores. ``margin``: the largest loss allowed, as a share of 1; None: measured
    only; ``over``: what the baseline is called. Scores that are no numbers are an ERROR, because leaving
    them out would hide the worst items. ``unscored``: a line for each further item that could not be scored
    (a judge or a server that failed); with any the verdict is FAIL or INCONCLUSIVE, never PASS."""
    check = Check(
        name,
        Verdict.ERROR,
        "",
        required=margin is not None,
        bound=None if margin is None else -margin,
        sense="at least",
        n=len(target),
        n_unit="items",
        how=f"{how}; paired by item; 95 % interval: Tango's for scores of 0 and 1, else a bootstrap",
        evidence=evidence or {},
        records=records,
        warnings=warnings,
        details=details,
    )
    if unscored:
        check = replace(check, evidence={**check.evidence, "unscored": len(unscored)})
        if not target:
            text = f"{what}: none of {len(unscored)} items could be scored: {unscored[0]}"
            return replace(check, verdict=Verdict.INCONCLUSIVE, summary=text)
    try:
        found = difference(target, baseline)
    except ValueError as error:
        return replace(check, summary=f"{what}: {error}")
    low, high = found.interval
    summary = (
        f"{what}: {found.target:.1%} against {found.baseline:.1%} of {over} over {found.items} "
        f"items: difference {found.value:+.1%} (95 % interval {low:+.1%} to {high:+.1%})"
    )
    facts = {
        "score_target": found.target,
        "score_baseline": found.baseline,
        "items": found.items,
        "gained": found.gained,
        "lost": found.lost,
        "p_mcnemar": found.p_mcnemar,
    }
    if margin is None:
        verdict, summary = Verdict.MEASURED, f"{summary}; no gate"
    else:
        verdict = gate_verdict(found.interval, -margin, "at least")
        summary += f"; gate: a loss of at most {margin:g}"
        facts |= {
            "items_to_pass_an_equal_model": items_needed(found.disagreement, margin),
            "items_to_catch_twice_the_margin": items_needed(found.disagreement, margin, 2 * margin),
        }
        if verdict is Verdict.PASS and found.baseline <= margin:
            verdict = Verdict.INCONCLUSIVE
            summary += f"; {over} solves too few for a loss of {margin:g} to show: ask easier items"
        elif verdict is Verdict.INCONCLUSIVE:
            where = "; more of --tasks, or a wider gate" if name.startswith("task:") else ""
            summary += f"; {found.items} items do not decide, {_more(found, margin)}{where}"
    if unscored:
        summary += f"; {len(unscored)} more could not be scored: {unscored[0]}"
        verdict = verdict if verdict is Verdict.FAIL else Verdict.INCONCLUSIVE
    return replace(
        check,
        verdict=verdict,
        summary=summary,
        measured=found.value,
        interval=found.interval,
        evidence={**check.evidence, **facts},
    )


def _more(found: Difference, margin: float) -> str:
    loss = 2 * margin if found.value < -margin else 0.0
    needed = items_needed(found.disagreement, margin, loss)
    if needed <= found.items:
        # Enough for an equal model or one twice as bad as allowed: this one is between.
        between = blocks_needed(found.value, found.interval, -margin, found.items)
        return f"about {between} would decide" if between else "too close to the margin to decide"
    return f"about {needed} are needed"
