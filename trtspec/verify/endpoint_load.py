"""A closed loop on two endpoints in turn: tokens a second under load, and how many times more of them.

A server cannot be stopped between two steps, as an engine in this process can. So the load is cut into
stretches, and the endpoints have them in turn (ABBA): what slows machine or network for a while hits
neighbours alike. Every stretch fills and drains; what arrives in its window counts. Intervals are Student's
t over stretches, which are as independent as anything here is; requests of one stretch share their steps and
are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from trtspec.stats import Interval, mean_interval
from trtspec.verify.arrivals import closed_loop
from trtspec.verify.gates import Check, Verdict, gated, skipped
from trtspec.verify.records import Row
from trtspec.verify.sanity import impossible_speedup
from trtspec.verify.timed import Timed, timed_from, window_of

MOST_STRETCHES, FEWEST_STRETCHES = 6, 3
"""With fewer there is no interval; more would spend the load on filling and draining."""
_LEAST_ROUNDS = 4
"""Times the concurrency: the requests of a stretch. About two of them fall into its window."""
_NAMES = ("throughput", "speedup_under_load")

_Reply = TypeVar("_Reply")


def stretches_of(requests: int, concurrency: int) -> int:
    """Into how many stretches a closed loop of so many requests is cut."""
    return max(1, min(MOST_STRETCHES, requests // (_LEAST_ROUNDS * concurrency)))


def lost_to_stretches(concurrency: int) -> int:
    """Requests that cutting takes out of the steady state: each stretch fills and drains for itself."""
    return 3 * concurrency * (MOST_STRETCHES - 1)


def in_turn(
    send: Mapping[str, Callable[[int, float | None], _Reply]],
    requests: int,
    concurrency: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, list[tuple[int, _Reply]]]:
    """``requests`` on each side, ``concurrency`` in flight, in stretches: (stretch, reply) of each side.

    Request k is the same on every side. The order of two sides turns from stretch to stretch.
    """
    count, sides = stretches_of(requests, concurrency), list(send)
    edges = [requests * number // count for number in range(count + 1)]
    found: dict[str, list[tuple[int, _Reply]]] = {side: [] for side in send}
    asked, total = 0, requests * len(send)
    for number in range(count):
        first, size = edges[number], edges[number + 1] - edges[number]
        for side in sides if number % 2 else sides[::-1]:
            replies = closed_loop(
                lambda place, due, side=side, first=first: send[side](first + place, due),  # type: ignore[misc]
                size,
                concurrency,
                lambda done, _, asked=asked: on_progress(asked + done, total),  # type: ignore[misc]
            )
            found[side] += [(number, reply) for reply in replies]
            asked += size
    return found


def _pace(stretch: Sequence[Timed], concurrency: int) -> float:
    """Tokens a second in the window of a stretch; 0 without one."""
    window = window_of(stretch, concurrency)
    return 0.0 if window is None else (window.tokens(stretch) or 0.0) / (window.end_s - window.start_s)


def judge_throughput(
    rows: Mapping[str, Sequence[Row]],
    *,
    load: str,
    concurrency: int | None,
    length: float | None,
    min_tokens_per_s: float | None = None,
    min_speedup_under_load: float | None = None,
) -> list[Check]:
    """Tokens a second of url and what they are of the baseline's. ``rows``: :func:`~.latency.timed_rows` of
    each side; ``length``: tokens a step, where they bound the speedup."""
    bounds = dict(zip(_NAMES, (min_tokens_per_s, min_speedup_under_load), strict=True))

    def left_out(reason: str) -> list[Check]:
        return [skipped(name, reason, bound is not None) for name, bound in bounds.items()]

    if concurrency is None:
        return left_out("with arrivals at a rate both sides give what was asked for: --concurrency tells")
    paces: dict[str, dict[int, float]] = {}
    for side, found in rows.items():
        timed = timed_from(found)
        if any(one.tokens is None and not one.error for one in timed):
            return left_out(f"{side} does not say how many tokens an answer has")
        of = {
            number: _pace([one for one in timed if one.stretch == number], concurrency)
            for number in {one.stretch for one in timed}
        }
        paces[side] = {number: value for number, value in of.items() if value}
    at_once = max(map(len, rows.values()))
    if stretches_of(at_once, concurrency) > 1 and all(
        row["stretch"] == 0 for of in rows.values() for row in of
    ):
        return left_out(
            "each side had its whole load at once (AIPerf): without --driver they have it in turn"
        )
    both = sorted(set(paces["url"]) & set(paces["baseline"]))
    if not both:
        least = _LEAST_ROUNDS * concurrency
        return left_out(f"no steady state on both sides: --requests {least} at least, at {load}")
    pace = {side: [of[number] for number in both] for side, of in paces.items()}
    rates = {side: mean_interval(values) for side, values in pace.items()}
    logs = [math.log(mine / theirs) for mine, theirs in zip(pace["url"], pace["baseline"], strict=True)]
    mean, (low, high) = mean_interval(logs)
    ratio = math.exp(mean)
    interval = (math.exp(low), math.exp(min(high, 700.0))) if math.isfinite(low) else (low, high)
    failed = sum(bool(row["error"]) for found in rows.values() for row in found)
    warnings = (f"{failed} requests failed; they take their time and bring no tokens",) if failed else ()
    how = (
        f"{load}; client's clock; tokens that arrived between filling and draining, in {len(both)} stretches "
        "a side, the sides in turn; 95 % Student's t over stretches"
    )
    evidence = {
        "tokens_per_s": {side: value for side, (value, _) in rates.items()},
        "tokens_per_s_intervals": {side: found for side, (_, found) in rates.items()},
        "stretches": pace,
        "acceptance_length": length,
        "loads": [load],
        "interleaved": len(both) > 1,
    }

    def check(name: str, what: str, measured: float, interval: Interval, unit: str) -> Check:
        one = gated(
            name=name,
            what=what,
            measured=measured,
            interval=interval,
            bound=bounds[name],
            sense="at least",
            unit=unit,
            n=len(rows["url"]),
            n_unit="requests",
            how=how,
            warnings=warnings,
            evidence=evidence,
        )
        if math.isfinite(interval[0]) or bounds[name] is None:
            return one
        least = FEWEST_STRETCHES * _LEAST_ROUNDS * concurrency
        text = (
            f"{what} {measured:.3f}, without an interval: {len(both)} stretches a side of "
            f"{FEWEST_STRETCHES} needed, --requests {least} at least; gate: at least {bounds[name]:g}"
        )
        return replace(one, summary=text)

    told = f"tokens/s at {load} (baseline {rates['baseline'][0]:.1f}):"
    throughput = check("throughput", told, *rates["url"], "tokens/s")
    if length is not None and (problem := impossible_speedup(interval[0], length)):
        text = f"{problem}; the baseline is slowed down, or weights or hardware differ"
        required = min_speedup_under_load is not None
        wrong = Check("speedup_under_load", Verdict.ERROR, text, required, how=how, evidence=evidence)
        return [throughput, replace(wrong, bound=min_speedup_under_load)]
    return [
        throughput,
        check("speedup_under_load", f"throughput at {load} over the baseline's:", ratio, interval, ""),
    ]
