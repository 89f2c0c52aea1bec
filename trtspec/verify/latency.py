"""What a client sees of a server under load: TTFT, TPOT, ITL, throughput, goodput; whether the run counts.

All of it pure functions of request records (:mod:`trtspec.verify.timed`), so that a stored run can be judged
again.

* TTFT: sent (in an open loop: due) to the first piece with text. TPOT: first to last piece, over the tokens
  after the first. ITL: gaps between pieces; a speculative step sends several tokens in one piece, so ITL is
  longer than TPOT there and shorter than a step never.
* Goodput: requests a second that meet every objective. A request that failed meets none.
* Quantiles have distribution-free intervals from order statistics (binomial; David & Nagaraja, Order
  Statistics, 7.1) over requests, refused below the n for which such an interval exists: p99 needs 368.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from trtspec.stats import CONFIDENCE, Interval, scipy
from trtspec.verify.gates import Check, Verdict, gate_verdict
from trtspec.verify.records import Records, Row
from trtspec.verify.timed import Objectives, Timed, rates, steady, timed_from

QUANTILES = (0.5, 0.9, 0.99)
_TREND_P = 0.001
"""Of a one-sided test; several tests look at one run."""
_MIN_TREND = 20
"""Requests below which no trend is looked for."""


@dataclass(frozen=True)
class Quantile:
    """A quantile with its interval. ``value`` None: refused, ``n`` is below ``needed``."""

    share: float
    n: int
    needed: int
    value: float | None
    interval: Interval | None


def requests_needed(share: float, confidence: float = CONFIDENCE) -> int:
    """The least n for which order statistics give a two-sided interval of a quantile with equal tails."""
    tail = (1 - confidence) / 2
    return math.ceil(math.log(tail) / math.log(max(share, 1 - share)) - 1e-9)


def quantile_of(values: Sequence[float], share: float, confidence: float = CONFIDENCE) -> Quantile:
    """A quantile of independent ``values`` with its order-statistic interval.

    The number of values below the true quantile is binomial (n, share), so (x_(l), x_(u)) covers it with
    probability P(l <= B < u), whatever the law of the values; l is the largest and u the smallest rank that
    leave at most half of the error on each side.
    """
    n, needed = len(values), requests_needed(share, confidence)
    if n < needed:
        return Quantile(share, n, needed, None, None)
    tail = (1 - confidence) / 2
    binom = scipy("stats").binom
    low = int(binom.ppf(tail, n, share))  # the smallest l with F(l) >= tail, so F(l - 1) < tail
    high = int(binom.ppf(1 - tail, n, share)) + 1  # the smallest u with F(u - 1) >= 1 - tail
    ordered = sorted(values)
    rank = max(1, math.ceil(share * n - 1e-9))
    return Quantile(share, n, needed, ordered[rank - 1], (ordered[low - 1], ordered[min(high, n) - 1]))


# --------------------------------------------------------------------------- does the run count?


def oversaturated(records: Sequence[Timed], offered_per_s: float) -> str:
    """Why an open loop asked more than the server can do, "" if it did not.

    Then the queue grows as long as the run goes on, and every percentile says how long that was. Seen by
    TTFT, or the number of requests in flight, that rises with the time of arrival (Kendall's tau, one-sided)
    to at least twice what it was.
    """
    ordered = sorted(records, key=lambda record: record.due_s)
    rose = _doubled([(record.due_s, record.ttft_s) for record in ordered if record.ttft_s is not None])
    at = f"over-saturated: at {offered_per_s:.3g} requests/s"
    if rose is not None:
        early, late = rose
        return (
            f"{at} the queue grows, TTFT rose from {early * 1e3:.0f} to {late * 1e3:.0f} ms within the run; "
            "lower the rate"
        )
    # A server that takes everyone into its batch has no queue: it is each answer that takes ever longer.
    flying = [
        (one.due_s, float(sum(other.due_s <= one.due_s < other.ended_s for other in records)))
        for one in ordered
    ]
    rose = _doubled(flying)
    if rose is None or rose[1] - rose[0] <= max(2.0, 0.1 * len(records)):
        return ""
    return (
        f"{at} it falls behind, from {rose[0]:.0f} to {rose[1]:.0f} requests in flight within the run; "
        "lower the rate"
    )


def _doubled(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Median of the first and of the last third of a series (time, value) that rises (Kendall's tau) to at
    least twice its early value; None for one that does not, or is short."""
    if len(points) < _MIN_TREND:
        return None
    times, values = zip(*points, strict=True)
    test = scipy("stats").kendalltau(times, values, alternative="greater")
    third = len(values) // 3
    early, late = float(np.median(values[:third])), float(np.median(values[-third:]))
    return None if not test.pvalue <= _TREND_P or late < 2 * early else (early, late)


def late_client(records: Sequence[Timed]) -> str:
    """Why the client itself could not keep the open loop, "" if it could: more than a tenth of the requests
    were sent over 50 ms, and over a tenth of the median latency, after they were due."""
    latencies = [value for record in records if (value := record.e2e_s) is not None]
    if not latencies:
        return ""
    most = max(0.05, 0.1 * float(np.median(latencies)))
    late = sum(record.sent_s - record.due_s > most for record in records)
    if late <= 0.1 * len(records):
        return ""
    return (
        f"the client was late: {late} of {len(records)} requests were sent over {most * 1e3:.0f} ms after due"
    )


def throttled(records: Sequence[Timed]) -> str:
    """Why the machine seems to have slowed down under a constant load, "" if it does not.

    Seconds a token of the last third of the requests against the first third, one-sided Mann-Whitney test,
    and by more than 15 % in the median: heat, a power limit or a neighbour.
    """
    pace = [
        record.tpot_s or (record.e2e_s or 0.0) / record.tokens
        for record in sorted(records, key=lambda record: record.sent_s)
        if not record.error and record.tokens
    ]
    if len(pace) < _MIN_TREND:
        return ""
    third = len(pace) // 3
    early, late = pace[:third], pace[-third:]
    ratio = float(np.median(late) / np.median(early)) if np.median(early) else 1.0
    if ratio <= 1.15 or scipy("stats").mannwhitneyu(late, early, alternative="greater").pvalue > _TREND_P * 5:
        return ""
    return (
        f"throttling? a token took {ratio:.2f} times as long at the end as at the beginning of the same load"
    )


# --------------------------------------------------------------------------- checks


def judge_latency(
    rows: Sequence[Row],
    *,
    name: str,
    side: str,
    load: str,
    concurrency: int | None,
    rate_per_s: float | None,
    objectives: dict[str, float | None],
    bound: float | None,
    clock: str = "client's clock",
) -> list[Check]:
    """Latency and goodput of one run of one side. ``rows``: :class:`Timed` as JSON values; exactly one of
    ``concurrency`` (closed loop) and ``rate_per_s`` (open loop) is set. ``bound``: the least share of
    requests within ``objectives``; ``clock``: whose times they are."""
    arguments = {
        "name": name,
        "side": side,
        "load": load,
        "concurrency": concurrency,
        "rate_per_s": rate_per_s,
        "objectives": objectives,
        "bound": bound,
        "clock": clock,
    }
    found = timed_from(rows)
    slo = Objectives(**objectives)
    kept = steady(found, concurrency=concurrency) or found
    doubts = [late_client(kept)] if rate_per_s else []
    flooded = oversaturated(kept, rate_per_s) if rate_per_s else ""
    # Over-saturated, the load itself grows: slower tokens are no sign of the machine then.
    doubts = [flooded or throttled(kept), *doubts]
    if failures := [record for record in kept if record.error]:
        doubts.append(f"{len(failures)} of {len(kept)} requests failed, the first: {failures[0].error}")
    if len(kept) == len(found) and len(found) > 1:
        doubts.append("no steady state: the run is too short to leave filling and draining out")
    warnings = tuple(doubt for doubt in doubts if doubt)
    total = rates(found, slo, concurrency=concurrency)
    values = {
        "TTFT": [v for record in kept if (v := record.ttft_s) is not None],
        "TPOT": [v for record in kept if (v := record.tpot_s) is not None],
        "E2E": [v for record in kept if (v := record.e2e_s) is not None],
        # Gaps of one request are not independent of each other; its longest one stands for it.
        "max ITL": [max(record.gaps_s) for record in kept if record.gaps_s],
    }
    table: dict[str, dict[str, Any]] = {}
    details: list[str] = []
    refused: dict[tuple[int, str], list[str]] = {}
    for metric, numbers in values.items():
        table[metric] = {}
        told, needs = [], []
        for share in QUANTILES:
            one = quantile_of(numbers, share)
            name_of = f"p{share * 100:g}"
            if one.value is None or one.interval is None:
                table[metric][f"{name_of}_ms"] = None
                needs.append(f"{name_of} needs {one.needed}")
                continue
            low, high = one.interval
            table[metric][f"{name_of}_ms"] = one.value * 1e3
            table[metric][f"{name_of}_interval_ms"] = [low * 1e3, high * 1e3]
            told.append(f"{name_of} {one.value * 1e3:.1f} ms ({low * 1e3:.1f} to {high * 1e3:.1f})")
        details.append(f"{metric}: {', '.join(told) if told else 'no quantile'}")
        if needs:
            refused.setdefault((len(numbers), ", ".join(needs)), []).append(metric)
    for (count, needed), metrics in refused.items():
        details.append(f"refused for {', '.join(metrics)}, too few requests ({count}): {needed}")
    gaps = [gap for record in kept for gap in record.gaps_s]
    tokens = "" if total.tokens_per_s is None else f", {total.tokens_per_s:.1f} tokens/s"
    summary = (
        f"{side} at {load}: {total.requests_per_s:.3g} requests/s{tokens}"
        + (f", {total.failed} of {total.requests} failed" if total.failed else "")
        + f"; {details[0]}"
    )
    how = (
        f"{load}; {clock}; steady state: {len(kept)} of {len(found)} requests; 95 % order-statistic "
        "intervals over requests; ITL: the longest gap of each request"
    )
    evidence = {
        "side": side,
        "loads": [load],
        "latency": table,
        "rates": asdict(total),
        "mean_itl_ms": 1e3 * float(np.mean(gaps)) if gaps else None,
        "samples_ms": {
            metric: {side: [1e3 * value for value in numbers]}
            for metric, numbers in values.items()
            if numbers
        },
        "objectives": objectives,
    }
    records = Records("latency", arguments, {"requests": list(rows)})
    verdict = Verdict.MEASURED if total.requests > total.failed else Verdict.ERROR
    checks = [
        Check(
            f"latency_{name}",
            verdict,
            summary,
            required=False,
            measured=table["TTFT"]["p50_ms"],
            interval=tuple(between) if (between := table["TTFT"].get("p50_interval_ms")) else None,
            unit="ms TTFT p50",
            n=len(kept),
            n_unit="requests",
            how=how,
            warnings=warnings,
            evidence=evidence,
            details=tuple(details[1:]),  # TTFT is in the summary
            records=records,
        )
    ]
    if not slo.any:
        return checks
    told_slo = ", ".join(
        f"{key[:-2].upper()} <= {limit * 1e3:g} ms" for key, limit in objectives.items() if limit is not None
    )
    verdict = Verdict.MEASURED if bound is None else gate_verdict(total.within_interval, bound, "at least")
    low, high = total.within_interval
    text = (
        f"{side} at {load}: goodput {total.goodput:.3g} of {total.ended_per_s:.3g} "
        f"requests/s within {told_slo}: {total.within:.1%} ({low:.1%} to {high:.1%})"
    )
    if any(doubt.startswith("over-saturated") for doubt in doubts) and verdict is Verdict.PASS:
        verdict = Verdict.INCONCLUSIVE
    checks.append(
        Check(
            f"goodput_{name}",
            verdict,
            text if bound is None else f"{text}; gate: at least {bound:.1%}",
            required=bound is not None,
            measured=total.within,
            interval=total.within_interval,
            bound=bound,
            sense="at least",
            n=total.requests,
            n_unit="requests",
            how=how,
            warnings=warnings,
            evidence={"side": side, "loads": [load], "rates": asdict(total), "objectives": objectives},
            records=records,
        )
    )
    return checks
