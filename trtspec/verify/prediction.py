"""The speedup that the cost model predicts, held against the one measured, term by term.

Predicted for the requests of the race, prompt included (``docs/math.md``, section 10)::

    plain  = P1 + n (T(1) + O)
    drafts = Pm + n / E[N] (T(m) + D + O),        n: tokens after the first of each answer

E[N] is that of the check ``acceptance``: other prompts, a batch. P (the prompt), T(1) and T(m) (the target's
forward without drafts and on the rows of a draft), D (drafting) and O (the rest of a step without drafts) are
from a pass of its own, step by step. The race then measures what the same terms came to. The differences add
up to the whole difference, so each says its part of why prediction and measurement part:

* acceptance: other tokens a step than on the prompts of ``acceptance``;
* verification, drafting: a step's forward or drafts took longer in the race than timed step by step;
* overhead: what a step with drafts adds beyond both (judging, committing), which the model leaves out;
* plain step: the side without drafts was slower or faster than its own steps say.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from trtspec.engine import Engine, Request
from trtspec.ruler import Answer
from trtspec.stats import CONFIDENCE, Interval, times_faster
from trtspec.verify.gates import Check, Verdict, skipped
from trtspec.verify.latency import quantile_of
from trtspec.verify.load import Race
from trtspec.verify.records import Records, Row

NAME = "prediction"
SIDES = ("recipe", "no_speculation")
TOLERANCE = 0.05
"""Within so much of the measured interval the two agree: step times on one machine repeat no better."""
_PLAIN = "plain step"
TERMS = ("acceptance", "verification", "drafting", "overhead", _PLAIN)
_OTHER_PACE = 0.15
"""By how much both sides' times must be off, the same way, to be the machine's pace and no term's."""


def time_steps(
    sides: Mapping[str, Engine],
    requests: Sequence[Request],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """A row for every step of every request on every side, one request at a time, sides in turn.

    ``rows`` of the target's forward; ``target_s``, ``draft_s`` and ``other_s`` add up to the step's seconds;
    ``prompt``: a step up to the first token's. Warm both sides up before.
    """
    found: list[dict[str, Any]] = []
    done, total = 0, len(requests) * len(sides)
    for number, request in enumerate(requests):
        for side in sides if number % 2 else reversed(list(sides)):
            engine = sides[side]
            engine.add(request)
            prompt = True
            while engine.in_flight:
                before, began = engine.stats(), time.perf_counter()
                outputs = engine.step()
                seconds, after = time.perf_counter() - began, engine.stats()
                target = after.target_seconds - before.target_seconds
                draft = after.draft_seconds - before.draft_seconds
                found.append(
                    {
                        "side": side,
                        "request_id": request.id,
                        "rows": after.target_rows - before.target_rows,
                        "target_s": target,
                        "draft_s": draft,
                        "other_s": seconds - target - draft,
                        "prompt": prompt,
                    }
                )
                if not outputs and not engine.in_flight:
                    break
                prompt = prompt and not any(output.new_tokens for output in outputs)
            done += 1
            on_progress(done, total)
    return found


def check_prediction(race: Race, steps: Sequence[Row], answers: Sequence[Answer]) -> Check:
    """The check on a race with and without drafts. ``steps``: :func:`time_steps` of the race's requests;
    ``answers``: those of the check ``acceptance``."""
    if race.contradictions:
        return _skipped(f"the race is void: {race.contradictions[0]}")
    runs = [
        {
            "contender": side,
            "prompt": prompt,
            "round": number,
            "seconds": one.seconds,
            "target_s": one.target_seconds,
            "draft_s": one.draft_seconds,
            "tokens": len(one.answers[0].tokens),
            "first": one.answers[0].emitted[0],
            "steps": len(one.answers[0].emitted) - 1,
        }
        for side in SIDES
        for prompt, rounds in enumerate(race.runs[side])
        for number, one in enumerate(rounds)
    ]
    counted = [
        {
            "request_id": answer.request_id,
            "tokens": len(answer.tokens),
            "first": answer.emitted[0],
            "steps": len(answer.emitted) - 1,
        }
        for answer in answers
        if answer.emitted
    ]
    return judge_prediction(runs, steps, counted)


@dataclass(frozen=True)
class _Step:
    """Mean seconds of a step's parts."""

    target: float
    draft: float
    other: float


def judge_prediction(runs: Sequence[Row], steps: Sequence[Row], answers: Sequence[Row]) -> Check:
    """Predicted against measured, from rows of the race, of timed steps and of answers."""
    after = sum(row["tokens"] - row["first"] for row in answers)
    rounds = 1 + max((row["round"] for row in runs), default=0)
    mine, plain = ([row for row in runs if row["contender"] == side] for side in SIDES)
    left = sum(row["tokens"] - row["first"] for row in plain) / rounds
    in_race = sum(row["steps"] for row in mine) / rounds
    timed = {side: [row for row in steps if row["side"] == side and not row["prompt"]] for side in SIDES}
    if not after or not left or not in_race or not all(timed.values()):
        return _skipped("answers of one step say nothing about steps; ask for longer ones")
    if not any(row["target_s"] for row in (*steps, *runs)):
        return _skipped("this engine does not tell how long its forwards take")
    expected = after / sum(row["steps"] for row in answers)
    one, many = (_typical(timed[side]) for side in SIDES[::-1])
    prompts = {side: _prompt(steps, side) for side in SIDES}
    predicted_steps = left / expected
    each = many.target + many.draft + one.other
    plain_s = sum(prompts["no_speculation"]) + left * (one.target + one.draft + one.other)
    drafts_s = sum(prompts["recipe"]) + predicted_steps * each
    predicted = plain_s / drafts_s

    seconds = {side: _seconds(rows) for side, rows in zip(SIDES, (mine, plain), strict=True)}
    measured, interval = times_faster(seconds["recipe"], seconds["no_speculation"])
    target, draft, whole = (
        sum(row[key] for row in mine) / rounds for key in ("target_s", "draft_s", "seconds")
    )
    spent = {"verification": target, "drafting": draft, "overhead": whole - target - draft}
    modelled = {
        name: before + in_race * step
        for (name, before, step) in zip(
            spent, prompts["recipe"], (many.target, many.draft, one.other), strict=True
        )
    }
    late = {"acceptance": (in_race - predicted_steps) * each}
    late |= {name: spent[name] - modelled[name] for name in spent}
    shares = {name: value / drafts_s for name, value in late.items()}
    shares[_PLAIN] = sum(row["seconds"] for row in plain) / rounds / plain_s - 1
    low, high = interval if all(map(math.isfinite, interval)) else (measured, measured)
    agree = low * (1 - TOLERANCE) <= predicted <= high * (1 + TOLERANCE)
    main = max(TERMS, key=lambda name: abs(shares[name]))

    terms = _terms(timed)
    decode = expected * (one.target + one.draft + one.other) / each
    between = f" (95 % interval {interval[0]:.3f} to {interval[1]:.3f})" if low < high else ""
    told = (
        f"predicted {predicted:.3f} ({expected:.2f} tokens a step of {each / _sum(one):.2f} times the time, "
        f"{many.draft / each:.0%} of it drafting), measured {measured:.3f}{between}"
    )
    impossible = _too_fast(one, many)
    verdict = (
        "steps with drafts were timed shorter than without, so nothing follows"
        if impossible
        else f"they agree (within {TOLERANCE:.0%} of the interval)"
        if agree
        else f"they differ by {predicted / measured - 1:+.0%}, mostly by {main}"
    )
    plain_race = sum(row["seconds"] for row in plain) / rounds
    ms = [
        *((name, modelled[name], spent[name]) for name in spent),
        (_PLAIN, plain_s, plain_race),
    ]
    details = [
        f"acceptance: {expected:.2f} tokens a step after the first predicted, from all answers, "
        f"{left / in_race:.2f} in the race",
        *(
            f"{name}: {1e3 * was:.1f} ms predicted for the race's steps, {1e3 * came:.1f} taken"
            for name, was, came in ms
        ),
    ]
    details = [
        f"{line} ({shares[name]:+.1%} of the predicted time {'without' if name == _PLAIN else 'with'} drafts)"
        for name, line in zip(TERMS, details, strict=True)
    ]
    with_drafts = sum(value for name, value in shares.items() if name != _PLAIN)
    details.append(
        f"together: {1 + shares[_PLAIN]:.3f} times the predicted time without drafts, {1 + with_drafts:.3f} "
        f"times that with them: {measured / predicted:.3f} times the predicted speedup"
    )
    for name, (value, ends) in terms.items():
        unit = "" if name == "c" else " ms"
        between = (
            " (too few steps for an interval)"
            if ends is None
            else f" ({ends[0]:.3g} to {ends[1]:.3g})"
            if name == "c"
            else f" ({ends[0]:.2f} to {ends[1]:.2f})"
        )
        size = f"{value:,.0f}" if name == "c" and value >= 100 else f"{value:.2f}"
        details.append(f"{_TERMS_TOLD[name]}: {size}{unit}{between}")
    return Check(
        NAME,
        Verdict.MEASURED,
        f"{told}: {verdict}",
        required=False,
        measured=predicted / measured,
        interval=(predicted / interval[1], predicted / interval[0]) if interval[0] > 0 else None,
        n=len(seconds["recipe"]),
        n_unit="prompts",
        how=(
            "cost model: tokens a step of the check acceptance; prompt, forwards, drafting and the rest of a "
            "step timed step by step (median by rows), one request at a time; for the requests of the race, "
            f"prompt included; measured: predicted over measured; they agree where the "
            f"prediction is within {TOLERANCE:.0%} of the measured interval"
        ),
        evidence={
            "predicted": predicted,
            "measured": measured,
            "measured_interval": list(interval),
            "agree": agree,
            "main_term": main,
            "share_of_predicted_time": shares,
            "tokens_per_step": {"predicted": expected, "race": left / in_race},
            "decode_speedup_predicted": decode,
            "step_times": {
                name: {"median": value, "interval": ends and list(ends)}
                for name, (value, ends) in terms.items()
            },
            "ms": {
                "plain_step": 1e3 * _sum(one),
                "verification": 1e3 * many.target,
                "drafting": 1e3 * many.draft,
                "rest_of_plain_step": 1e3 * one.other,
            },
        },
        warnings=(*_pace(shares[_PLAIN], with_drafts), *impossible),
        details=tuple(details),
        records=Records(
            "prediction", {}, {"runs": list(runs), "steps": list(steps), "answers": list(answers)}
        ),
    )


_TERMS_TOLD = {
    "T_p": "T_p, the target's forward without drafts",
    "T_v": "T_v, its forward on the rows of a draft",
    "T_q": "T_q, drafting one token",
    "c": "c = T_p / T_q",
}


def _pace(without: float, with_drafts: float) -> tuple[str, ...]:
    if without * with_drafts <= 0 or min(abs(without), abs(with_drafts)) <= _OTHER_PACE:
        return ()
    return (
        f"the race took {without:+.0%} (without drafts) and {with_drafts:+.0%} (with them) of the time that "
        "steps took when they were timed: the machine changed its pace, and the terms say little; "
        "ratios stand",
    )


def _too_fast(one: _Step, many: _Step) -> tuple[str, ...]:
    """A forward on the rows of a draft does all that one without drafts does."""
    if many.target >= (1 - TOLERANCE) * one.target:
        return ()
    return (
        f"forwards with drafts were timed at {1e3 * many.target:.1f} ms, shorter than those without at "
        f"{1e3 * one.target:.1f}: machine busy?",
    )


def _terms(timed: Mapping[str, Sequence[Row]]) -> dict[str, tuple[float, Interval | None]]:
    """Medians of timed steps in ms with 95 % intervals from order statistics; T_q is a step's drafting over
    the tokens it drafted. c: quotients of the ends of two 97.5 % intervals, so at least 95 % too."""
    plain = [1e3 * row["target_s"] for row in timed["no_speculation"]]
    drafted = [row for row in timed["recipe"] if row["rows"] > 1]
    each = [1e3 * row["draft_s"] / (row["rows"] - 1) for row in drafted]
    found: dict[str, tuple[float, Interval | None]] = {}
    for name, values in (("T_p", plain), ("T_v", [1e3 * row["target_s"] for row in drafted]), ("T_q", each)):
        if values:
            found[name] = median(values), quantile_of(values, 0.5).interval
    if "T_q" in found and found["T_q"][0] > 0:
        p, q = (quantile_of(values, 0.5, 1 - (1 - CONFIDENCE) / 2).interval for values in (plain, each))
        sure = p is not None and q is not None and q[0] > 0
        ends = (p[0] / q[1], p[1] / q[0]) if sure and p is not None and q is not None else None
        found["c"] = found["T_p"][0] / found["T_q"][0], ends
    return found


def _skipped(reason: str) -> Check:
    return skipped(NAME, reason)


def _sum(step: _Step) -> float:
    return step.target + step.draft + step.other


def _typical(rows: Sequence[Row]) -> _Step:
    """Of steps of one size the median counts, so that a hiccup of the machine is not one of the model; sizes
    count as often as they came."""
    groups: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["rows"]].append(row)
    target, draft, other = (
        sum(len(group) * median(row[key] for row in group) for group in groups.values()) / len(rows)
        for key in ("target_s", "draft_s", "other_s")
    )
    return _Step(target, draft, other)


def _prompt(steps: Sequence[Row], side: str) -> tuple[float, float, float]:
    """Forward, drafting and other seconds of all prompts."""
    chosen = [row for row in steps if row["side"] == side and row["prompt"]]
    target, draft, other = (sum(row[key] for row in chosen) for key in ("target_s", "draft_s", "other_s"))
    return target, draft, other


def _seconds(rows: Sequence[Row]) -> list[list[float]]:
    """``[prompt][round]``"""
    found: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        found[row["prompt"]].append(row["seconds"])
    return list(found.values())
