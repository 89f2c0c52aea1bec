"""Whether the recipe drafts as much as pays: lengths or trees scanned, the fastest beside the one in use.

The scan itself is ``trtspec draft measure``'s: each shape is replayed on what a large draft got accepted, and
priced with steps timed on this machine, one sequence at a time. Its speeds are predicted, no shape but the
recipe's own is run; the gain is paired by prompt and, where the prompts allow, cross-fitted, because the best
of many looks better than it is. Derived in ``docs/math.md`` (round time, best chain, best tree).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from trtspec.stats import ratio_of_sums
from trtspec.verify.gates import Check, Verdict, skipped
from trtspec.verify.records import Records, Row

NAME = "draft_scan"
WORTH = 1.02
"""A shape must promise so much more than the recipe's own to replace it: below that it is noise."""


def judge_scan(
    rows: Sequence[Row],
    *,
    options: Sequence[Mapping[str, Any]],
    current: Mapping[str, Any],
    none: Mapping[str, Any],
    priced: int,
    cross_fitted: bool,
    load: str,
) -> Check:
    """The check of a finished scan.

    ``rows``: of each prompt its ``tokens`` after the first step, and the seconds of its steps as the recipe
    drafts (``current_s``) and as the scan chose (``best_s``). ``options``: the fastest few shapes, the best
    first, ``current`` the recipe's own and ``none`` no drafts, each with label, length (tokens a step), nodes
    and tokens_per_s; ``priced``: how many shapes were. ``load``: on what, in words. Raises ValueError without
    rows or options.
    """
    if not rows or not options:
        raise ValueError("a scan without a prompt or a shape")
    best = options[0]
    tokens, mine, chosen = ([float(row[key]) for row in rows] for key in ("tokens", "current_s", "best_s"))
    gain, interval = ratio_of_sums(mine, chosen)
    kept = best["label"] == current["label"] or gain < WORTH
    rate, best_rate = sum(tokens) / sum(mine), sum(tokens) / sum(mine if kept else chosen)
    how = (
        "accepted tokens replayed from one large draft behind every token; steps timed by rows and drafts by "
        "levels on this machine, one sequence at a time; tokens/s after the first token, predicted; the gain "
        + ("cross-fitted over two halves of the prompts, " if cross_fitted else "of the same prompts, ")
        + "95 % bootstrap over prompts"
    )
    own = (
        f"{current['label']}: {current['length']:.2f} tokens a step, {rate:.1f} tokens/s after the prompt, "
        "predicted"
    )
    if kept:
        summary = f"{priced} shapes scanned on {load}; in use, and as good as any (within 2 %): {own}"
    else:
        between = f", 95 % interval {interval[0]:.3f} to {interval[1]:.3f}" if _finite(interval) else ""
        summary = (
            f"{priced} shapes scanned on {load}; in use: {own}; best: {best['label']}: {best['length']:.2f} "
            f"tokens a step, {best_rate:.1f} tokens/s, {gain:.3f} times as fast{between}"
        )
    warnings: tuple[str, ...] = ()
    if not kept:
        warnings += (
            "another shape pays more: trtspec draft measure ENGINE -o NEW_RECIPE writes it"
            if interval[0] > 1
            else "another shape may pay more, which these prompts do not decide: --num-prompts asks more",
        )
    if none["tokens_per_s"] >= max(rate, best_rate):
        warnings += ("drafting nothing is faster than all of them on this machine, one sequence at a time",)
    return Check(
        NAME,
        Verdict.MEASURED,
        summary,
        required=False,
        measured=gain,
        interval=interval,
        n=len(rows),
        n_unit="prompts",
        how=how,
        warnings=warnings,
        evidence={
            "scan": list(options),
            "in_use": current,
            "best": current if kept else best,
            "no_drafts": none,
            "tokens_per_s": {"in_use": rate, "best": best_rate},
            "kept": kept,
            "priced": priced,
            "cross_fitted": cross_fitted,
            "load": load,
        },
        records=Records(
            "scan",
            {
                "options": list(options),
                "current": current,
                "none": none,
                "priced": priced,
                "cross_fitted": cross_fitted,
                "load": load,
            },
            {"prompts": list(rows)},
        ),
    )


def no_scan(reason: str) -> Check:
    """The check where nothing could be scanned."""
    return skipped(NAME, reason)


def _finite(interval: Sequence[float]) -> bool:
    return all(map(math.isfinite, interval))
