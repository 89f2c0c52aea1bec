"""Checks and their verdicts: what was measured, what the recipe demands, and whether it holds.

The rules, in one place:

* A *gate* compares an interval with a bound: all of it on the good side is PASS, all of it on the bad
  side FAIL, astride INCONCLUSIVE.
* MEASURED: a number that no gate of the recipe asks about. It decides nothing.
* ERROR means that a measurement contradicts itself. A required one fails the report; one that nobody
  asked for is shown and fails nothing: a busy machine must not turn a good engine into a bad one. (An
  engine that miscounts its own tokens is a fault whatever the gates: those checks are then required.)
* A report is ok when every required check passed and there is at least one. A required check that was
  skipped is not a pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

from trtspec.errors import EXIT_GATE_FAILED, EXIT_INCONCLUSIVE, EXIT_PASS
from trtspec.stats import Interval, blocks_needed
from trtspec.verify.records import Records


class Verdict(str, Enum):
    PASS = "PASS"
    MEASURED = "MEASURED"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"
    SKIPPED = "SKIPPED"
    ERROR = "ERROR"


_RAW_JUDGES = {"law": "sampled", "reference": "blackbox", "table": "parameters"}
"""By an argument that only this judge has."""


@dataclass(frozen=True)
class Check:
    """One question, its answer and the evidence."""

    name: str
    verdict: Verdict
    summary: str
    """One line for a reader: what was found, in words and numbers."""
    required: bool
    measured: float | None = None
    interval: Interval | None = None
    """95 %."""
    bound: float | None = None
    sense: Literal["at least", "at most"] | None = None
    unit: str = ""
    n: int = 0
    n_unit: str = ""
    how: str = ""
    """How the number was obtained, precisely enough to obtain it again."""
    warnings: tuple[str, ...] = ()
    evidence: dict[str, Any] = field(default_factory=dict)
    details: tuple[str, ...] = ()
    """Findings one by one, a line each, below the summary."""
    records: Records | None = field(default=None, repr=False, compare=False)
    """What the verdict was computed from; kept in an evidence bundle, not in the report."""


def raw_as_records(check: Check) -> Check:
    """``check`` with what its judge put under ``raw`` in the evidence (its own arguments, JSON values) as
    records instead, so that it goes into a bundle and not into the report."""
    raw = check.evidence.get("raw")
    if check.records is not None or not isinstance(raw, dict):
        return check
    judge = next((name for key, name in _RAW_JUDGES.items() if key in raw), f"raw {check.name}")
    evidence = {key: value for key, value in check.evidence.items() if key != "raw"}
    return replace(check, evidence=evidence, records=Records(judge, {}, {"raw": [raw]}))


def skipped(name: str, reason: str, required: bool = False) -> Check:
    """A check that was not made, and why."""
    return Check(name, Verdict.SKIPPED, reason, required=required)


def finite(value: object) -> float | None:
    """A number of some evidence; None for whatever is none, or not finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return None
    return number if math.isfinite(number) else None


def gate_verdict(interval: Interval, bound: float, sense: Literal["at least", "at most"]) -> Verdict:
    """Where an interval lies relative to a bound."""
    low, high = interval
    if not low <= high:  # also NaN
        return Verdict.ERROR
    if sense == "at least":
        return Verdict.PASS if low >= bound else Verdict.FAIL if high < bound else Verdict.INCONCLUSIVE
    return Verdict.PASS if high <= bound else Verdict.FAIL if low > bound else Verdict.INCONCLUSIVE


def gated(
    *,
    name: str,
    what: str,
    measured: float,
    interval: Interval,
    bound: float | None,
    sense: Literal["at least", "at most"],
    n: int,
    n_unit: str,
    unit: str = "",
    how: str,
    warnings: tuple[str, ...] = (),
    evidence: dict[str, Any] | None = None,
    records: Records | None = None,
) -> Check:
    """A check of one number against a bound of the recipe; without a bound it is reported, not required."""
    low, high = interval
    text = f"{what} {measured:.3f}" + (
        f" (95 % interval {low:.3f} to {high:.3f})"
        if math.isfinite(low) and math.isfinite(high)
        else f" (too few {n_unit} for an interval)"
    )
    if bound is None:
        verdict, summary = Verdict.MEASURED, f"{text}; no gate"
    else:
        verdict = gate_verdict(interval, bound, sense)
        summary = f"{text}; gate: {sense} {bound:g}"
        if verdict is Verdict.INCONCLUSIVE:
            needed = blocks_needed(measured, interval, bound, n)
            more = f"about {needed} {n_unit} would decide" if needed else "too close to the gate to decide"
            if not (math.isfinite(low) and math.isfinite(high)):
                more = "more are needed"
            summary += f"; {n} {n_unit} do not decide, {more}"
    return Check(
        name=name,
        verdict=verdict,
        summary=summary,
        required=bound is not None,
        measured=measured,
        interval=interval,
        bound=bound,
        sense=sense,
        unit=unit,
        n=n,
        n_unit=n_unit,
        how=how,
        warnings=warnings,
        evidence=evidence or {},
        records=records,
    )


def all_ok(checks: Sequence[Check]) -> bool:
    return exit_code(checks) == EXIT_PASS


def exit_code(checks: Sequence[Check]) -> int:
    """0: ok. 1: a required check failed or contradicts itself. 4: undecided, skipped or nothing required."""
    required = [check.verdict for check in checks if check.required]
    if Verdict.FAIL in required or Verdict.ERROR in required:
        return EXIT_GATE_FAILED
    if required and all(verdict is Verdict.PASS for verdict in required):
        return EXIT_PASS
    return EXIT_INCONCLUSIVE
