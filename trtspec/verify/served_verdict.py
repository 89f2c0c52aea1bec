"""What an engine showed under load, judged from rows: latency and goodput of each side, tails, throughput.

Requests are judged by :mod:`trtspec.verify.latency`, like those of endpoints. Throughput is tokens over
seconds of steps in the steady state; its interval is by batch means (consecutive slices in at most 20
blocks, resampled), because steps next to each other share the same requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtspec.recipe import Gates
from trtspec.recipe_facts import LOAD_GATES
from trtspec.stats import Array, Interval, bootstrap, ratio_of_sums
from trtspec.verify.endpoint_load import lost_to_stretches
from trtspec.verify.gates import Check, Verdict, gated, skipped
from trtspec.verify.latency import judge_latency, oversaturated, quantile_of
from trtspec.verify.records import Records, Row
from trtspec.verify.report import Report
from trtspec.verify.sanity import impossible_speedup
from trtspec.verify.timed import steady, timed_from

_PLAIN_STEPS = 8
"""Steps without drafts that a slice is as long as, by its tokens."""


_MOST_BLOCKS, _FEWEST_BLOCKS = 10, 6
_NONE: Interval = (-math.inf, math.inf)
CLOCK = "in process, sides in turn, each on a clock of its own that stands while others run"
_CLOCK = f"{CLOCK}; HTTP, tokenizing and text are not in it"


def slice_tokens(concurrency: int | None) -> int:
    """Tokens that a side emits before the others have their turn."""
    return _PLAIN_STEPS * (concurrency or 4)


def judge_served(
    requests: Sequence[Row],
    slices: Sequence[Row],
    *,
    load: str,
    concurrency: int | None,
    rate_per_s: float | None,
    slo: Mapping[str, float | None],
    gates: Mapping[str, float | None],
    counters: Mapping[str, Mapping[str, Any]],
    problems: Sequence[str],
    speculates: bool,
) -> list[Check]:
    """Latency and goodput of each side, throughput, and the gates on the recipe's, from the rows of
    :func:`trtspec.verify.served_load.drive`. ``problems``: why nothing of it counts."""
    arguments = {
        "load": load,
        "concurrency": concurrency,
        "rate_per_s": rate_per_s,
        "slo": dict(slo),
        "gates": dict(gates),
        "counters": {side: dict(found) for side, found in counters.items()},
        "problems": list(problems),
        "speculates": speculates,
    }
    records = Records("served", arguments, {"requests": list(requests), "slices": list(slices)})
    if problems:
        required = any(value is not None for value in gates.values())
        text = f"the load is void: {problems[0]}"
        return [Check("latency_recipe", Verdict.ERROR, text, required, how=CLOCK, records=records)]
    objectives = {f"{key[:-3]}_s": None if value is None else value / 1e3 for key, value in slo.items()}
    rows: dict[str, list[Row]] = {}
    for row in requests:
        rows.setdefault(row["side"], []).append(row)
    checks: list[Check] = []
    for side, found in rows.items():
        judged = judge_latency(
            found,
            name=side,
            side=side,
            load=load,
            concurrency=concurrency,
            rate_per_s=rate_per_s,
            objectives=objectives,
            bound=gates["min_goodput"] if side == "recipe" else None,
            clock=_CLOCK,
        )
        checks += [
            replace(one, details=(*one.details, *_counted(found, counters[side]))) for one in judged[:1]
        ]
        checks += judged[1:]
    checks += judge_tails(
        rows["recipe"],
        load=load,
        concurrency=concurrency,
        rate_per_s=rate_per_s,
        gates=gates,
        clock=_CLOCK,
    )
    checks += _throughput(rows, slices, load, concurrency, gates, speculates)
    return [replace(check, records=records) for check in checks]


def _counted(rows: Sequence[Row], counters: Mapping[str, Any]) -> list[str]:
    """What the engine did meanwhile that a reader of times should know."""
    asked = sum(row["prompt_tokens"] for row in rows)
    sizes = sorted(row["prompt_tokens"] for row in rows)
    answers = sorted(row["tokens"] for row in rows)
    told = [
        f"prompts of {sizes[0]} to {sizes[-1]} tokens (median {sizes[len(sizes) // 2]}), answers of "
        f"{answers[0]} to {answers[-1]} (median {answers[len(answers) // 2]})"
    ]
    if hits := counters["prefix_hit_tokens"]:
        told.append(f"{hits / asked:.0%} of the prompts' tokens came from the prefix cache")
    if counters["preemptions"]:
        told.append(f"{counters['preemptions']} sequences lost their place to others for lack of KV cache")
    if counters["held_back_steps"]:
        told.append(f"drafting held back in {counters['held_back_steps']} of {counters['steps']} steps")
    return told


def judge_tails(
    rows: Sequence[Row],
    *,
    load: str,
    concurrency: int | None,
    rate_per_s: float | None,
    gates: Mapping[str, float | None],
    clock: str,
    besides: int = 0,
) -> list[Check]:
    """The gates ``max_p99_ttft_ms`` and ``max_p99_tpot_ms`` on the requests of one side. A quantile of too
    few decides nothing; ``besides``: how many more a longer load takes out of the steady state."""
    bounds = {f"max_p99_{metric}_ms": gates[f"max_p99_{metric}_ms"] for metric in ("ttft", "tpot")}
    arguments = {
        "load": load,
        "concurrency": concurrency,
        "rate_per_s": rate_per_s,
        "gates": bounds,
        "clock": clock,
        "besides": besides,
    }
    records = Records("tails", arguments, {"requests": list(rows)})
    found = timed_from(rows)
    kept = steady(found, concurrency=concurrency) or found
    doubt = oversaturated(kept, rate_per_s) if rate_per_s else ""
    checks = []
    for metric in ("ttft", "tpot"):
        bound = gates[f"max_p99_{metric}_ms"]
        if bound is None:
            continue
        values = [1e3 * value for one in kept if (value := getattr(one, f"{metric}_s")) is not None]
        one, what = quantile_of(values, 0.99), f"p99 of {metric.upper()} at {load}, ms:"
        how = f"{load}; {clock}; steady state: {len(kept)} of {len(found)} requests"
        evidence = {"p99_ms": one.value, "loads": [load]}
        name = f"p99_{metric}"
        if one.value is None or one.interval is None:
            more = len(found) + one.needed - one.n + besides
            text = (
                f"{what} refused, {one.n} requests in the steady state and {one.needed} needed; "
                f"--requests {more} would do; gate: at most {bound:g}"
            )
            checks.append(
                Check(
                    name,
                    Verdict.INCONCLUSIVE,
                    text,
                    True,
                    bound=bound,
                    sense="at most",
                    unit="ms",
                    n=one.n,
                    n_unit="requests",
                    how=how,
                    evidence=evidence,
                    records=records,
                )
            )
            continue
        check = gated(
            name=name, what=what, measured=one.value, interval=one.interval, bound=bound, sense="at most",
            n=one.n, n_unit="requests", unit="ms", how=how, warnings=(doubt,) if doubt else (),
            evidence=evidence,
            records=records,
        )  # fmt: skip
        if doubt and check.verdict is Verdict.PASS:
            check = replace(check, verdict=Verdict.INCONCLUSIVE)
        checks.append(check)
    return checks


def with_load_gates(report: Report, gates: Gates) -> Report:
    """A report on two endpoints with the recipe's gates on the tails of url's load."""
    found = next((check for check in report.checks if check.name == "latency_url"), None)
    bounds = {key: getattr(gates, key) for key in LOAD_GATES}
    checks: list[Check] = []
    if found is not None and found.records is not None:
        arguments = found.records.arguments
        given = {key: arguments[key] for key in ("load", "concurrency", "rate_per_s")}
        cut = lost_to_stretches(arguments["concurrency"] or 0)
        requests = found.records.tables["requests"]
        checks += judge_tails(requests, **given, gates=bounds, clock="client's clock", besides=cut)
    return replace(report, checks=(*report.checks, *checks))


def _throughput(
    rows: Mapping[str, Sequence[Row]],
    slices: Sequence[Row],
    load: str,
    concurrency: int | None,
    gates: Mapping[str, float | None],
    speculates: bool,
) -> list[Check]:
    """Tokens a second of the recipe, and what they are of those without speculation."""
    of = _side_by_side(
        {side: _steady_slices(found, slices, side, concurrency) for side, found in rows.items()}
    )
    rates: dict[str, float] = {}
    intervals: dict[str, Interval] = {}
    for side, found in of.items():
        blocks = _blocks([(row["tokens"], row["ended_s"] - row["began_s"]) for row in found])
        rates[side], intervals[side] = (
            ratio_of_sums(*zip(*blocks, strict=True)) if blocks else (math.nan, _NONE)
        )
        if len(blocks) < _FEWEST_BLOCKS:
            intervals[side] = _NONE
    mine = rows["recipe"]
    length = sum(row["tokens"] for row in mine) / max(1, sum(len(row["emitted"]) for row in mine))
    how = (
        f"{load}; {_CLOCK}; tokens over seconds of steps in the steady state, 95 % bootstrap "
        f"over at most {_MOST_BLOCKS} blocks of consecutive slices of {slice_tokens(concurrency)} tokens"
    )
    told = ", ".join(f"{side} {rates[side]:.1f}" for side in rates if side != "recipe")
    evidence = {
        "tokens_per_s": rates,
        "tokens_per_s_intervals": intervals,
        "acceptance_length": length,
        "loads": [load],
        "interleaved": True,
    }
    checks = [
        gated(
            name="throughput",
            what=f"tokens/s at {load}" + (f" ({told})" if told else "") + ":",
            measured=rates["recipe"],
            interval=intervals["recipe"],
            bound=gates["min_tokens_per_s"],
            sense="at least",
            unit="tokens/s",
            n=len(mine),
            n_unit="requests",
            how=how,
            evidence=evidence,
        )
    ]
    if concurrency is None:
        return checks  # in an open loop throughput is what was asked for, on either side

    def over(name: str, side: str, what: str, bound: float | None, most: float | None) -> Check:
        """The recipe's throughput over ``side``'s; ``most``: tokens a step, where they bound it."""
        if side not in of:
            return skipped(name, f"there is no run of {what}", bound is not None)
        ratio, interval = _over(of["recipe"], of[side])
        surely = interval[0] if math.isfinite(interval[0]) else ratio
        problem = "" if most is None else impossible_speedup(surely, most)
        if problem or not math.isfinite(ratio):
            text = f"{problem}; machine busy?" if problem else "no step in the steady state of both sides"
            verdict = Verdict.ERROR if problem else Verdict.INCONCLUSIVE
            return Check(name, verdict, text, bound is not None, bound=bound, how=how, evidence=evidence)
        return gated(
            name=name,
            what=f"throughput at {load} over {what}:",
            measured=ratio,
            interval=interval,
            bound=bound,
            sense="at least",
            n=len(mine),
            n_unit="requests",
            how=f"{how}; slices next to each other in pairs",
            evidence=evidence,
        )

    if speculates:
        what, bound = "the same weights without speculation", gates["min_speedup_under_load"]
        checks.append(over("speedup_under_load", "no_speculation", what, bound, length))
    if "baseline" in of:
        what = "the 16-bit baseline"
        checks.append(over("speedup_over_baseline_under_load", "baseline", what, None, None))
    return checks


def _steady_slices(
    rows: Sequence[Row], slices: Sequence[Row], side: str, concurrency: int | None
) -> list[Row]:
    """The side's slices from when the load was there to when it began to end."""
    mine = [row for row in slices if row["side"] == side]
    kept = steady(timed_from(rows), concurrency=concurrency)
    if not kept:
        return mine
    first = min(one.sent_s for one in kept)
    last = max(row["due_s"] for row in rows)
    return [row for row in mine if row["began_s"] >= first and row["ended_s"] <= last] or mine


def _side_by_side(of: Mapping[str, list[Row]]) -> Mapping[str, list[Row]]:
    """Only slices that every side has in its steady state, where there are enough: then a ratio is the
    quotient of the rates beside it."""
    common = set.intersection(*({row["number"] for row in found} for found in of.values()))
    if len(common) < _FEWEST_BLOCKS:
        return of
    return {side: [row for row in found if row["number"] in common] for side, found in of.items()}


def _blocks(values: Sequence[tuple[float, ...]]) -> list[list[float]]:
    """Sums over consecutive ``values``, two or more of them, at most :data:`_MOST_BLOCKS` and as equal as can
    be: neighbours are alike, so that few long blocks are surer than many short ones."""
    count = min(_MOST_BLOCKS, max(len(values) // 2, min(len(values), 1)))
    parts = np.array_split(np.asarray(values, dtype=np.float64), count) if count else []
    return [[float(total) for total in part.sum(axis=0)] for part in parts]


def _over(mine: Sequence[Row], other: Sequence[Row]) -> tuple[float, Interval]:
    """Throughput of the one over the other's with its interval, over the slices that ran side by side."""
    there = {row["number"]: row for row in other}
    pairs = [(row, there[row["number"]]) for row in mine if row["number"] in there]
    blocks = np.asarray(
        _blocks(
            [
                (a["tokens"], a["ended_s"] - a["began_s"], b["tokens"], b["ended_s"] - b["began_s"])
                for a, b in pairs
            ]
        )
    )
    if not len(blocks):
        return math.nan, _NONE

    def ratio(sums: NDArray[np.float64]) -> Any:
        return sums[..., 0] / sums[..., 1] / (sums[..., 2] / sums[..., 3])

    def statistic(chosen: NDArray[np.intp]) -> Array:
        found: Array = ratio(blocks[chosen].sum(axis=1))
        return found

    value = float(ratio(blocks.sum(axis=0)))
    enough = len(blocks) >= _FEWEST_BLOCKS
    interval = bootstrap(value, statistic, len(blocks), positive=True) if enough else _NONE
    return value, interval
