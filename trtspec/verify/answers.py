"""What a report answers, a line a question: lossless? good enough? faster? at which load?

A reader's first lines. They follow from the checks alone and decide nothing: that is the gates' part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from trtspec.verify.gates import Check, Verdict, finite
from trtspec.verify.i18n import Say
from trtspec.verify.report import Report

_LOSSLESS = ("lossless", "lossless_float64", "sampled", "sampling_parameters", "identity")
_APPROXIMATE = ("greedy", "greedy_float64", "approximate_likelihood", "approximate_repetition")
_QUALITY = ("quality", "mean_kl", "p99_kl", "same_top_token", "retrieval", "degenerate_text")
_FASTER = (
    *("speedup", "speedup_over_baseline", "speedup_under_load", "speedup_over_baseline_under_load"),
    "speedup_by_load",
)
_WRONG = (Verdict.FAIL, Verdict.ERROR)


def answers(report: Report, say: Say) -> list[tuple[str, str]]:
    """(question, answer) in words; none of what the report has no checks for, as that of a matrix."""
    checks = report.checks
    faster = [one for one in checks if _base(one) in _FASTER]
    found = (
        ("acceptance" if report.fidelity == "approximate" else "lossless", _lossless(report, say)),
        ("quality", _quality([one for one in checks if _is_quality(one)], say)),
        ("faster", _faster(faster, say)),
        ("load", _loads(faster, say)),
    )
    return [(say(f"ask.{key}"), text) for key, text in found if text]


def _base(check: Check) -> str:
    return check.name.removeprefix("vs_other.").removeprefix("other.")


def _is_quality(check: Check) -> bool:
    return _base(check) in _QUALITY or _base(check).startswith("task:")


def _lossless(report: Report, say: Say) -> str:
    approximate = report.fidelity == "approximate"
    names = _APPROXIMATE if approximate else _LOSSLESS
    found = [one for one in report.checks if _base(one) in names]
    if not found or all(one.verdict is Verdict.SKIPPED for one in found):
        return ""
    wrong = [one.name for one in found if one.verdict in _WRONG]
    kept = [one.name for one in found if one.verdict is Verdict.PASS]
    owed = [one.name for one in found if one.required and one.verdict not in (*_WRONG, Verdict.PASS)]
    rest = [one for one in found if one.name not in owed]
    sure = "approximate-by-design" if approximate else "yes"
    unsure = ("undecided", [*owed, *(one.name for one in rest if one.verdict is Verdict.INCONCLUSIVE)])
    passed = ("passed-only" if wrong or owed else sure, kept)
    groups = (
        ("no", wrong),
        *((unsure, passed) if owed else (passed, unsure)),
        ("not-run", [one.name for one in rest if one.verdict is Verdict.SKIPPED]),
    )
    return _joined([(say(f"answer.{key}"), listed) for key, listed in groups], say)


def _quality(found: Sequence[Check], say: Say) -> str:
    ran = [one for one in found if one.verdict is not Verdict.SKIPPED]
    gated = [one for one in found if one.required or one.verdict in _WRONG]
    if not ran and not gated:
        return ""
    if not gated:
        return _joined([(say("answer.no-gate"), [_figure(one, say) for one in ran])], say)
    wrong = [_figure(one, say) for one in gated if one.verdict in _WRONG]
    kept = [_figure(one, say) for one in gated if one.verdict is Verdict.PASS]
    rest = [_figure(one, say) for one in gated if one.verdict in (Verdict.INCONCLUSIVE, Verdict.SKIPPED)]
    first = [("no", wrong), ("undecided", rest)]
    word = "passed-only" if wrong or rest else "yes"
    return _joined([(say(f"answer.{key}"), names) for key, names in (*first, (word, kept))], say)


def _faster(found: Sequence[Check], say: Say) -> str:
    kinds = ("yes", "not-shown", "slower", "contradiction", "not-run")
    groups: dict[str, list[str]] = {kind: [] for kind in kinds}
    for one in found:
        groups[_pace(one)].append(_figure(one, say))
    if not any(groups[key] for key in groups if key != "not-run"):
        return ""
    return _joined([(say(f"answer.{key}"), names) for key, names in groups.items()], say)


def _pace(check: Check) -> str:
    if check.verdict is Verdict.SKIPPED:
        return "not-run"
    if check.verdict is Verdict.ERROR or check.measured is None or not math.isfinite(check.measured):
        return "contradiction"
    low, high = check.interval or (-math.inf, math.inf)
    return "yes" if low > 1 else "slower" if high < 1 else "not-shown"


def _loads(checks: Sequence[Check], say: Say) -> str:
    """Load by load what was found there; of many, from where to where it goes."""
    told: dict[str, list[str]] = {}
    many = []
    for one in checks:
        listed = one.evidence.get("loads")
        pace = _pace(one)
        if pace in ("not-run", "contradiction") or not isinstance(listed, (list, tuple)) or not listed:
            continue
        if len(listed) > 1:
            many += _span(one, say)
        else:
            told.setdefault(str(listed[0]), []).append(f"{say(f'answer.{pace}')} ({one.name})")
    found = [say("item", name=load, text=say("listed").join(names)) for load, names in told.items()]
    return say("joined").join([*found, *many])


def _span(check: Check, say: Say) -> list[str]:
    """``36 loads: from 0.43 (short copy en, batch 1) to 3.47 (long chat zh, batch 4)``"""
    listed = check.evidence.get("by_load")
    rows = [one for one in (listed if isinstance(listed, (list, tuple)) else ()) if isinstance(one, Mapping)]
    cells = [
        (value, str(one.get("load"))) for one in rows if (value := finite(one.get("speedup"))) is not None
    ]
    if not cells:
        return []
    (low, worst), (high, best) = min(cells), max(cells)
    known = any(finite(one.get("low")) is not None for one in rows)
    key = "answer.loads" if known else "answer.loads.bare"
    return [say(key, n=len(cells), low=f"{low:.2f}", worst=worst, high=f"{high:.2f}", best=best)]


def _figure(check: Check, say: Say) -> str:
    """``quality 1.356 (at most 1.5)``, ``speedup 1.09 (0.98 to 1.18)``"""
    if check.measured is None or not math.isfinite(check.measured):
        return check.name
    inside = []
    if check.interval is not None and all(map(math.isfinite, check.interval)):
        inside.append(say("answer.between", low=f"{check.interval[0]:.3g}", high=f"{check.interval[1]:.3g}"))
    if check.required and check.bound is not None and check.sense:
        inside.append(say(check.sense, bound=f"{check.bound:g}"))
    value = f"{check.name} {check.measured:.3g}"
    return say("in-brackets", word=value, text=say("joined").join(inside)) if inside else value


def _joined(groups: Sequence[tuple[str, Sequence[str]]], say: Say) -> str:
    told = [say("item", name=word, text=say("listed").join(names)) for word, names in groups if names]
    return say("joined").join(told)
