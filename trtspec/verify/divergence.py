"""How far the target's law over the next token is from the 16-bit baseline's, token by token.

Perplexity looks at the realised tokens only, and gains cancel losses in it. The Kullback-Leibler divergence
KL(baseline || target) = sum p_b ln(p_b / p_t), in nats, is zero only if the whole law is the same; its 99th
percentile shows the tokens at which a quantization breaks while the mean looks well. The share of tokens
whose most likely token is the same bounds how long greedy answers stay together.

Both engines score the same tokens, teacher-forced. Tokens of a text depend on each other, so intervals take
whole texts as blocks: of the mean by bootstrap, of the share Korn and Graubard's (1998), and of the
percentile the values at the ends of the interval of the share that it leaves below (Woodruff 1952).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trtspec.engine import Engine
from trtspec.stats import (
    Array,
    Interval,
    clustered_rate,
    independent_trials,
    quantile,
    rate_interval,
    ratio_of_sums,
)
from trtspec.verify.gates import Check, Verdict, gated
from trtspec.verify.records import Records, Row

TAIL = 0.99
_SHOWN = (0.5, 0.9, 0.95, 0.99, 0.999)
MIN_TEXTS = 6
"""Below this a bootstrap over texts is too narrow to judge by."""
MIN_TAIL_TOKENS = 500
"""Fewer than five tokens beyond the 99th percentile say nothing about it."""
_CHUNK_ROWS = 256
"""Rows of a forward: 256 x 49,152 float32 numbers are 50 MB a side."""
_CACHE_ROWS = 8
"""Rows that are compared at a time, so that they stay in the processor's cache."""


def compare_laws(
    target: Engine,
    baseline: Engine,
    texts: Sequence[Sequence[int]],
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Row]:
    """A row for each scored token: ``text`` and ``position``, its log-probability under ``target`` and
    ``baseline``, ``same_top``, and ``kl`` = KL(baseline || target) in nats."""
    rows: list[Row] = []
    for number, text in enumerate(texts):
        position = 0
        chunks = (engine.score_rows(text, chunk_tokens=_CHUNK_ROWS) for engine in (target, baseline))
        for ours, theirs in zip(*chunks, strict=True):
            realised = np.asarray(text[1 + position : 1 + position + len(ours)])
            at = np.arange(len(ours)), realised
            divergences = kl_rows(ours, theirs)
            same = ours.argmax(axis=1) == theirs.argmax(axis=1)
            for a, b, top, kl in zip(ours[at], theirs[at], same, divergences, strict=True):
                rows.append(
                    {
                        "text": number,
                        "position": position,
                        "target": float(a),
                        "baseline": float(b),
                        "same_top": bool(top),
                        "kl": float(kl),
                    }
                )
                position += 1
        on_progress(number + 1, len(texts))
    return rows


def kl_rows(target: NDArray[Any], baseline: NDArray[Any]) -> Array:
    """KL(baseline || target) of each row of log-probabilities ``[rows, vocab]``, in nats, float64.

    Never below 0 (rounding of nearly equal laws); NaN where a law is none.
    """
    value: Array = np.empty(len(target))
    for start in range(0, len(target), _CACHE_ROWS):
        part = slice(start, start + _CACHE_ROWS)
        ours, theirs = target[part].astype(np.float64), baseline[part].astype(np.float64)
        weights = np.exp(theirs)
        with np.errstate(invalid="ignore"):
            terms = weights * (theirs - ours)
        terms[weights == 0] = 0.0  # what the baseline never says; else -inf times 0
        broken = np.isnan(ours).any(axis=1) | np.isnan(theirs).any(axis=1)
        value[part] = np.where(broken, np.nan, np.maximum(terms.sum(axis=1), 0.0))
    return value


def judge_divergence(
    rows: Sequence[Row],
    *,
    max_mean_kl: float | None,
    max_p99_kl: float | None,
    min_same_top_token: float | None,
    source: str,
) -> list[Check]:
    """The checks ``mean_kl``, ``p99_kl`` and ``same_top_token`` over the rows of :func:`compare_laws`, each
    gated where its bound is given."""
    arguments = {
        "max_mean_kl": max_mean_kl,
        "max_p99_kl": max_p99_kl,
        "min_same_top_token": min_same_top_token,
        "source": source,
    }
    records = Records("divergence", arguments, {"tokens": rows})
    how = (
        f"{source}; every token teacher-forced through both engines, each with its own weights and KV cache "
        "format; 95 % intervals over whole texts"
    )
    bounds: list[tuple[str, float | None, Literal["at least", "at most"]]] = [
        ("mean_kl", max_mean_kl, "at most"),
        ("p99_kl", max_p99_kl, "at most"),
        ("same_top_token", min_same_top_token, "at least"),
    ]
    texts = _by_text(rows)
    broken = ""
    if not rows:
        broken = "no tokens were scored"
    elif not all(row["kl"] is not None and math.isfinite(row["kl"]) for row in rows):
        broken = "a divergence is not a finite number"
    if broken:
        return [
            Check(name, Verdict.ERROR, broken, bound is not None, bound=bound, sense=sense, how=how)
            for name, bound, sense in bounds
        ]
    nats = [[float(row["kl"]) for row in text] for text in texts]
    counts = [len(text) for text in texts]
    agreed = [sum(bool(row["same_top"]) for row in text) for text in texts]
    mean, mean_interval = ratio_of_sums([math.fsum(text) for text in nats], counts)
    tail, tail_interval = tail_of(nats)
    share, share_interval = clustered_rate(agreed, counts)
    few: Interval = (-math.inf, math.inf)
    if len(texts) < MIN_TEXTS:
        mean_interval = tail_interval = share_interval = few
    if len(rows) < MIN_TAIL_TOKENS:
        tail_interval = few
    evidence = {"tokens": len(rows), "texts": len(texts), "mean_kl": mean, "p99_kl": tail, "same_top": share}
    evidence["max_kl"] = max(map(max, nats))
    flat = [value for text in nats for value in text]
    quantiles = {"kl_quantiles": {f"{q:g}": quantile(flat, q) for q in _SHOWN if len(flat) * (1 - q) >= 1}}
    over = f"over {len(rows)} tokens"
    measured = [
        (f"mean KL(baseline || target) {over}, in nats:", mean, mean_interval, "nats"),
        (f"99th percentile of KL(baseline || target) {over}, in nats:", tail, tail_interval, "nats"),
        (f"share of tokens {over} with the baseline's most likely token:", share, share_interval, ""),
    ]
    checks = []
    for (name, bound, sense), (what, value, interval, unit) in zip(bounds, measured, strict=True):
        check = gated(
            name=name,
            what=what,
            measured=value,
            interval=interval,
            bound=bound,
            sense=sense,
            n=len(texts),
            n_unit="texts",
            unit=unit,
            how=how,
            evidence=evidence | (quantiles if name == "p99_kl" else {}),
            records=records,
        )
        if bound is not None and not math.isfinite(interval[0]):
            need = f"at least {MIN_TEXTS} texts and {MIN_TAIL_TOKENS if name == 'p99_kl' else 1} tokens"
            check = replace(check, summary=f"{check.summary}; {need} are needed (--quality-tokens)")
        checks.append(check)
    return checks


def tail_of(values: Sequence[Sequence[float]], share: float = TAIL) -> tuple[float, Interval]:
    """The quantile ``share`` of all ``values[text][token]`` (the smallest value that at least this share
    does not exceed), with its interval: the quantiles at the ends of the interval of that share, in which
    tokens of one text count as far as they differ. Its upper end is infinite where the tokens are too few for
    one."""
    flat = np.sort(np.array([value for text in values for value in text]))
    value = float(flat[_rank(share, len(flat)) - 1])
    counts = [len(text) for text in values]
    if len(values) < 2:
        return value, (-math.inf, math.inf)
    # Many may be equal to the quantile, as far as none is above it.
    below = [sum(one <= value for one in text) for text in values]
    if sum(below) == len(flat):
        below = [sum(one < value for one in text) for text in values]
    if not sum(below):
        return value, (value, value)
    trials = independent_trials(below, counts)
    low, high = (_rank(end, len(flat)) for end in rate_interval(share * trials, trials))
    return value, (float(flat[max(low, 1) - 1]), float(flat[high]) if high < len(flat) else math.inf)


def _rank(share: float, count: int) -> int:
    return math.ceil(share * count - 1e-9)


def _by_text(rows: Sequence[Row]) -> list[list[Row]]:
    texts: dict[int, list[Row]] = {}
    for row in rows:
        texts.setdefault(int(row["text"]), []).append(row)
    return list(texts.values())
