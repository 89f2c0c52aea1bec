"""How much quality quantization costs: perplexity of the target over that of the 16-bit baseline.

Both score the same tokens of held-out texts, teacher-forced, so each token gives a pair and what the
texts themselves are like cancels out. The interval resamples whole texts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from trtspec.engine import Engine
from trtspec.stats import mean_difference_ratio
from trtspec.verify.divergence import compare_laws
from trtspec.verify.gates import Check, Verdict, gated
from trtspec.verify.noninferiority import BASELINE
from trtspec.verify.records import Records, Row


def check_quality(
    target: Engine,
    baseline: Engine,
    texts: Sequence[Sequence[int]],
    *,
    bound: float | None,
    source: str,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Check:
    """Perplexity ratio of ``target`` over ``baseline`` on ``texts`` (token ids), gated by its upper end."""
    return judge_rows(
        compare_laws(target, baseline, texts, on_progress=on_progress), bound=bound, source=source
    )


def judge_rows(rows: Sequence[Row], **arguments: Any) -> Check:
    """:func:`judge` over a row for each token, text after text (``text, target, baseline, same_top``), and
    its ``arguments``; with the records that give this verdict again."""
    sides = [
        [
            [math.nan if row[side] is None else row[side] for row in text]
            for _, text in itertools.groupby(rows, lambda row: row["text"])
        ]
        for side in ("target", "baseline")
    ]
    check = judge(*sides, agreements=sum(row["same_top"] for row in rows), **arguments)
    return replace(check, records=Records("quality", arguments, {"tokens": rows}))


def judge(
    target: Sequence[Sequence[float]],
    baseline: Sequence[Sequence[float]],
    *,
    bound: float | None,
    source: str,
    agreements: int | None = None,
    over: str = BASELINE,
    unscored: Sequence[str] = (),
) -> Check:
    """The verdict over log-probabilities ``[text][token]`` of both. A log-probability that is not a
    finite number is an ERROR: dropping it would hide the worst tokens. ``over``: the baseline's
    name; ``unscored``: a line for each text that a server failed on, with which it is no PASS."""
    how = (
        f"{source}; teacher-forced through each engine's own weights and KV cache format, the same tokens; "
        "exp(mean(baseline - target log-probability)); 95 % bootstrap over whole texts"
    )
    counts = [len(text) for text in target]
    flat_target = [value for text in target for value in text]
    flat_baseline = [value for text in baseline for value in text]
    broken = ""
    if counts != [len(text) for text in baseline]:
        broken = "the two engines scored different numbers of tokens"
    elif not flat_target:
        broken = f"no text could be scored: {unscored[0]}" if unscored else "no tokens were scored"
    elif not all(map(math.isfinite, (*flat_target, *flat_baseline))):
        broken = "a log-probability is not a finite number"
    if broken:
        return Check(
            "quality",
            Verdict.INCONCLUSIVE if unscored and not flat_target else Verdict.ERROR,
            broken,
            required=bound is not None,
            bound=bound,
            sense="at most",
            how=how,
        )
    differences = [
        [theirs - ours for ours, theirs in zip(mine, other, strict=True)]
        for mine, other in zip(target, baseline, strict=True)
    ]
    ratio, interval = mean_difference_ratio(differences)
    total = sum(counts)
    evidence = {
        "tokens": total,
        "texts": len(counts),
        "perplexity_target": math.exp(-math.fsum(flat_target) / total),
        "perplexity_baseline": math.exp(-math.fsum(flat_baseline) / total),
        "top1_agreement": None if agreements is None else agreements / total,
    }
    check = gated(
        name="quality",
        what=(
            f"perplexity {evidence['perplexity_target']:.2f} against {evidence['perplexity_baseline']:.2f} "
            f"of {over} over {total} tokens: ratio"
        ),
        measured=ratio,
        interval=interval,
        bound=bound,
        sense="at most",
        n=len(counts),
        n_unit="texts",
        how=how,
        evidence=evidence,
    )
    if unscored:
        text = f"{check.summary}; {len(unscored)} more texts could not be scored: {unscored[0]}"
        verdict = check.verdict if check.verdict is Verdict.FAIL else Verdict.INCONCLUSIVE
        return replace(check, verdict=verdict, summary=text)
    return check
