"""One line of a back-test: errors with their goals, and how a table of them is printed."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One line of the table. Errors are relative; ``goals`` bound (median, p90, worst), None: reported
    only."""

    source: str
    what: str
    n: int
    median: float
    p90: float
    worst: float
    goals: tuple[float | None, float | None, float | None] = (None, None, None)
    note: str = ""

    @property
    def ok(self) -> bool | None:
        """Whether every goal is met; None without a goal."""
        pairs = [
            (v, g)
            for v, g in zip((self.median, self.p90, self.worst), self.goals, strict=True)
            if g is not None
        ]
        return all(v <= g * (1 + 1e-9) for v, g in pairs) if pairs else None


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the neighbours, as numpy's default."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def summary(
    source: str,
    what: str,
    errors: Sequence[float],
    goals: tuple[float | None, float | None, float | None] = (None, None, None),
    note: str = "",
) -> Row:
    sizes = [abs(e) for e in errors]
    return Row(
        source, what, len(sizes), percentile(sizes, 0.5), percentile(sizes, 0.9), max(sizes), goals, note
    )


def truth(source: str, what: str, right: Sequence[bool], note: str = "") -> Row:
    """A yes-or-no test: the share of cases that are wrong must be zero."""
    wrong = sum(not r for r in right) / len(right)
    return Row(source, what, len(right), wrong, wrong, wrong, (0.0, None, None), note)


def render(rows: Sequence[Row]) -> str:
    lines = [f"{'source':42} {'what':46} {'n':>4} {'median':>8} {'p90':>8} {'worst':>8}  goal"]
    for r in rows:
        goals = "/".join("-" if g is None else f"{g:.1%}" for g in r.goals) if r.ok is not None else ""
        verdict = {None: "", True: "ok", False: "MISSED"}[r.ok]
        errors = f"{r.median:8.2%} {r.p90:8.2%} {r.worst:8.2%}"
        line = f"{r.source:42} {r.what:46} {r.n:4} {errors}  {goals} {verdict}"
        lines.append(line.rstrip() + (f"  [{r.note}]" if r.note else ""))
    return "\n".join(lines)


def rows_of(data: Path, name: str) -> list[dict[str, str]]:
    with (data / "oracles" / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))
