"""Is it worse than last time? A report against a stored one, check by check.

Where both sides have the raw records of the same prompts or texts, each pair is one block of a paired
bootstrap, and what the prompts are like cancels out. Its confidence is 95 % for all such checks of a report
together (Bonferroni), and a regression must be larger than :data:`MARGIN`: paired so closely, a change of
rounding in another version of torch is significant too. Otherwise only the two intervals are there: two 95 %
intervals that do not overlap differ at well below 5 %, so that rule misses some regressions and invents few.
A check that passed and now fails is a regression whatever its numbers.

Refused: a report on another source checkpoint. Said, and then not compared by numbers: other prompts or
texts, and for speed another machine. Another recipe or other settings are said in the notes: comparing them
may be the purpose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtspec.errors import InputError, Problem
from trtspec.stats import CONFIDENCE, Array, Interval, bootstrap, mean_difference_ratio
from trtspec.user_files import shown_path
from trtspec.verify.bundle import MANIFEST, open_bundle
from trtspec.verify.gates import Check, Verdict
from trtspec.verify.records import Row
from trtspec.verify.report import Report
from trtspec.verify.report_file import read_report

PREFIX = "regression."
MARGIN = 0.01
"""A paired change of less than one percent fails nothing."""
_MACHINE = ("processor", "cores", "threads", "gpu")
_RANK = {Verdict.FAIL: 0, Verdict.ERROR: 0, Verdict.INCONCLUSIVE: 1, Verdict.SKIPPED: 1}


@dataclass(frozen=True)
class _Shift:
    """The new value over the old one (``over``) with its interval."""

    over: float
    interval: Interval
    blocks: int
    what: str


def read_old(path: Path, *, source_digest: str | None = None) -> Report:
    """A stored report, or that of a bundle with its records. InputError for what is none, and for one on a
    model whose digest is not ``source_digest``."""
    if (path / MANIFEST).is_file():
        bundle = open_bundle(path)
        if bundle.problems:
            raise InputError([Problem(problem, file=shown_path(path)) for problem in bundle.problems])
        known = {name: judged.records for judged in bundle.judged for name in judged.checks}
        checks = tuple(replace(check, records=known.get(check.name)) for check in bundle.report.checks)
        old = replace(bundle.report, checks=checks)
    else:
        old = read_report(path)
    if source_digest is not None and old.source_digest != source_digest:
        message = (
            f"is a report on another model (source digest {old.source_digest[:12]}, here "
            f"{source_digest[:12]}); name one on the same model"
        )
        raise InputError(Problem(message, file=shown_path(path)))
    return old


def with_regressions(new: Report, old: Report, name: str) -> Report:
    """``new`` with a check ``regression.NAME`` for every check of ``old``, and notes on what differs.
    ``name``: what the old report is called."""
    # Regressions of the old one, and what it was compared with, are not the new one's.
    apart = (PREFIX, "vs_other.", "other.")
    old = replace(old, checks=tuple(check for check in old.checks if not check.name.startswith(apart)))
    mine = {check.name: check for check in new.checks}
    pairs = sum(before.records is not None and before.name in mine for before in old.checks)
    confidence = 1 - (1 - CONFIDENCE) / max(pairs, 1)
    added = [_compared(before, mine.get(before.name), new, old, confidence) for before in old.checks]
    notes = [f"regressions against {name} of {old.created}"]
    if apart_from := [one.name.removeprefix(PREFIX) for one in added if one.verdict is Verdict.SKIPPED]:
        notes.append(f"{len(apart_from)} of {len(added)} checks are not compared: {', '.join(apart_from)}")
    if new.recipe_digest != old.recipe_digest:
        changed = ", ".join(_changed(old.recipe, new.recipe)) or "nothing that is recorded"
        notes.append(f"the recipe is another one than in {name}: {changed}")
    for kind, before, now in (
        ("settings", old.settings, new.settings),
        (
            "machine",
            {key: old.machine.get(key) for key in _MACHINE},
            {k: new.machine.get(k) for k in _MACHINE},
        ),
        ("versions", old.tools, new.tools),
    ):
        if changed := ", ".join(_changed(before, now)):
            notes.append(f"other {kind} than in {name}: {changed}")
    return replace(new, checks=(*new.checks, *added), notes=(*new.notes, *notes))


def _changed(before: Mapping[str, Any], now: Mapping[str, Any], place: str = "") -> list[str]:
    found = []
    for key in dict.fromkeys((*before, *now)):
        left, right = before.get(key), now.get(key)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            found += _changed(left, right, f"{place}{key}.")
        elif left != right:
            found.append(f"{place}{key} {left} before, {right} now")
    return found


def _compared(before: Check, now: Check | None, new: Report, old: Report, confidence: float) -> Check:
    name = PREFIX + before.name
    if now is None:
        verdict = Verdict.INCONCLUSIVE if before.required else Verdict.SKIPPED
        return Check(name, verdict, "the old report has this check, the new one has not", before.required)
    evidence: dict[str, Any] = {
        "old": {"verdict": before.verdict.value, "measured": before.measured, "interval": before.interval},
        "new": {"verdict": now.verdict.value, "measured": now.measured, "interval": now.interval},
    }
    rank = {side: _RANK.get(check.verdict, 2) for side, check in (("old", before), ("new", now))}
    words = f"{before.verdict.value} before, {now.verdict.value} now"
    if rank["new"] == 0 and rank["old"] > 0 and (now.required or before.required):
        return Check(name, Verdict.FAIL, f"{words}: {now.summary}", True, evidence=evidence)
    excuse = _not_comparable(before, now, new, old)
    try:
        shift = None if excuse else _shift(before, now, confidence)
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        message = f"its records do not fit ({type(error).__name__}: {error}); trtspec report --recheck tells"
        raise InputError(Problem(message, key=before.name)) from None
    if shift is not None:
        return _judged(name, shift, now, words, evidence, confidence)
    ends = _finite(before), _finite(now)
    if excuse is None and ends[0] and ends[1] and now.sense:
        return _overlap(name, before, now, words, evidence, ends[0], ends[1])
    if rank["new"] < rank["old"] and before.required:
        summary = f"{words}: what was shown before is not shown any more"
        return Check(name, Verdict.INCONCLUSIVE, summary, True, evidence=evidence)
    summary = f"{words}; {excuse or 'no numbers with intervals to compare'}"
    both = before.verdict is Verdict.PASS and now.verdict is Verdict.PASS
    verdict = Verdict.PASS if both else Verdict.SKIPPED
    return Check(name, verdict, summary, both and now.required, evidence=evidence)


def _finite(check: Check) -> Interval | None:
    interval = check.interval
    known = check.measured is not None and interval is not None and all(map(math.isfinite, interval))
    return interval if known else None


def _not_comparable(before: Check, now: Check, new: Report, old: Report) -> str | None:
    """Why the numbers of the two say nothing about each other; None where they do."""
    if Verdict.ERROR in (before.verdict, now.verdict):
        return "numbers not compared: a measurement that contradicts itself is no evidence"
    if before.unit != now.unit or (before.sense and now.sense and before.sense != now.sense):
        return "the two measure different things"
    texts = now.n_unit == "texts"
    key = "heldout_sha256" if texts else "prompts_sha256"
    if old.settings.get(key) != new.settings.get(key):
        return f"numbers not compared: other {'texts' if texts else 'prompts'}"
    if not texts and old.settings.get("max_new_tokens") != new.settings.get("max_new_tokens"):
        return "numbers not compared: answers of another length"
    if any(word in now.name for word in ("speed", "latency", "goodput", "throughput", "p99_t")):
        loads = [check.evidence.get("loads") for check in (before, now)]
        if loads[0] != loads[1] and None not in loads:
            return "numbers not compared: another load"
        different = [key for key in _MACHINE if old.machine.get(key) != new.machine.get(key)]
        if different:
            return f"numbers not compared: another machine ({', '.join(different)})"
    return None


def _judged(
    name: str, shift: _Shift, now: Check, words: str, evidence: dict[str, Any], confidence: float
) -> Check:
    low, high = shift.interval
    better_up = now.sense != "at most"
    worse = high < 1 - MARGIN if better_up else low > 1 + MARGIN
    verdict = Verdict.FAIL if worse else Verdict.PASS
    if math.isfinite(low) and math.isfinite(high):
        text = f"{shift.what}: {shift.over:.3f} of before ({confidence:.1%} interval {low:.3f} to {high:.3f})"
        worst = max(1 - low if better_up else high - 1, 0.0)
        text += ", a regression" if worse else f", no significant regression; one of {worst:.1%} would fit"
    else:
        verdict = Verdict.INCONCLUSIVE
        text = f"{shift.what}: {shift.over:.3f} of before, too few {now.n_unit} to tell"
    return Check(
        name,
        verdict,
        f"{text}; {words}",
        True,
        measured=shift.over,
        interval=shift.interval,
        bound=1 - MARGIN if better_up else 1 + MARGIN,
        sense="at least" if better_up else "at most",
        n=shift.blocks,
        n_unit=now.n_unit,
        how=(
            f"new over old, paired by prompt or text; {confidence:.1%} bootstrap over the pairs; fails where "
            "the whole interval is beyond the bound"
        ),
        evidence={**evidence, "paired": True, "confidence": confidence},
    )


def _overlap(
    name: str, before: Check, now: Check, words: str, evidence: dict[str, Any], old: Interval, new: Interval
) -> Check:
    worse = new[1] < old[0] if now.sense == "at least" else new[0] > old[1]
    text = (
        f"{before.measured:.4g} ({old[0]:.4g} to {old[1]:.4g}) before, {now.measured:.4g} ({new[0]:.4g} to "
        f"{new[1]:.4g}) now: "
    )
    text += "a regression, the intervals do not overlap" if worse else "no significant regression"
    return Check(
        name,
        Verdict.FAIL if worse else Verdict.PASS,
        f"{text}; {words}",
        True,
        measured=now.measured,
        interval=new,
        sense=now.sense,
        unit=now.unit,
        n=now.n,
        n_unit=now.n_unit,
        how="whether the two 95 % intervals overlap; both bundles (--bundle) would allow a paired comparison",
        evidence={**evidence, "paired": False},
    )


# --------------------------------------------------------------------------- pairs


def _shift(before: Check, now: Check, confidence: float) -> _Shift | None:
    """The paired comparison, where both have the records of the same things."""
    old, new = before.records, now.records
    if old is None or new is None or old.judge != new.judge:
        return None
    match new.judge:
        case "quality":
            return _perplexity(old.tables["tokens"], new.tables["tokens"], confidence)
        case "acceptance":
            return _acceptance(old.tables["requests"], new.tables["requests"], confidence)
        case "speed":
            names = (new.arguments["name"], new.arguments["over"])
            if names != (old.arguments["name"], old.arguments["over"]):
                return None
            return _speed(old.tables["runs"], new.tables["runs"], names, confidence)
        case _:
            return None


def _perplexity(old: Sequence[Row], new: Sequence[Row], confidence: float) -> _Shift | None:
    """Perplexity of the new target over that of the old one, on the same tokens."""
    keys = [[(row["text"], row["position"]) for row in rows] for rows in (old, new)]
    values = [row["target"] for row in (*old, *new)]
    if keys[0] != keys[1] or not old or not all(isinstance(value, (int, float)) for value in values):
        return None
    by_text: dict[Any, list[float]] = {}
    for before, now in zip(old, new, strict=True):
        by_text.setdefault(before["text"], []).append(before["target"] - now["target"])
    differences = [by_text[text] for text in sorted(by_text)]
    over, interval = mean_difference_ratio(differences, confidence=confidence)
    return _Shift(over, interval, len(differences), "perplexity")


def _acceptance(old: Sequence[Row], new: Sequence[Row], confidence: float) -> _Shift | None:
    """Tokens a step of the new over those of the old, request by request."""
    sides = [
        {row["request_id"]: (len(row["tokens"]), len(row["emitted"])) for row in rows} for rows in (old, new)
    ]
    if set(sides[0]) != set(sides[1]) or not sides[0]:
        return None
    ids = sorted(sides[0])
    counts = [np.array([side[one] for one in ids], dtype=np.float64) for side in sides]

    def over(chosen: NDArray[np.intp]) -> Array:
        sums = [count[chosen].sum(axis=-2) for count in counts]
        lengths = [total[..., 0] / np.maximum(total[..., 1], 1) for total in sums]
        ratio: Array = lengths[1] / np.maximum(lengths[0], 1e-12)
        return ratio

    value = float(over(np.arange(len(ids))))
    interval = bootstrap(value, over, len(ids), positive=True, confidence=confidence)
    return _Shift(value, interval, len(ids), "tokens a step")


def _speed(
    old: Sequence[Row], new: Sequence[Row], names: tuple[str, str], confidence: float
) -> _Shift | None:
    """The new speedup over the old one; a prompt's times on all four sides stay together."""
    sides = []
    for rows in (old, new):
        for name in names:
            seconds: dict[tuple[int, str, int], list[float]] = {}
            for row in rows:
                if row["contender"] == name:
                    key = (row["prompt"], row["request_id"], len(row["tokens"]))
                    seconds.setdefault(key, []).append(row["seconds"])
            sides.append(seconds)
    if not sides[0] or any(set(side) != set(sides[0]) for side in sides):
        return None
    keys = sorted(sides[0])
    times = np.array([[math.fsum(side[key]) / len(side[key]) for key in keys] for side in sides])

    def over(chosen: NDArray[np.intp]) -> Array:
        mine_old, plain_old, mine_new, plain_new = (side[chosen].sum(axis=-1) for side in times)
        ratio: Array = (plain_new / mine_new) / (plain_old / mine_old)
        return ratio

    value = float(over(np.arange(len(keys))))
    interval = bootstrap(value, over, len(keys), positive=True, confidence=confidence)
    return _Shift(value, interval, len(keys), "speedup")
