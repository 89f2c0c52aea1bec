"""How many drafted tokens survive: curves by position, priors from published tables, curves from reports.

A curve holds a_j, the chance that the j-th drafted token is accepted given that those before it were; of a
tree, that some node of depth j is. One alpha from the first position overstates long drafts (docs/math.md,
section 5).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from itertools import pairwise
from typing import Any

from trtspec.errors import InputError

DECAY = 0.87
"""Beyond what was measured each a_j is this times the one before: published curves (InferenceX, K to 8)
flatten faster than a geometric one. Fitted once to six of them, see docs/math.md."""
TASKS = ("chat", "code", "math", "qa", "rag", "summarization", "translation")
METHODS = ("ngram", "lookahead", "draft_model", "medusa", "eagle", "eagle3")


@dataclass(frozen=True)
class Curve:
    """``conditional`` a_1 .. a_n. ``low`` and ``high`` bound tokens per step as multiples of what the curve
    adds to 1. ``measured``: from a report, not from a table. ``tree``: a_j is of a depth, not of a token."""

    conditional: tuple[float, ...]
    source: str
    low: float = 0.8
    high: float = 1.2
    measured: bool = False
    tree: bool = False

    def __post_init__(self) -> None:
        if not self.conditional or not all(0.0 <= a <= 1.0 for a in self.conditional):
            raise InputError(f"an acceptance curve needs probabilities, found {list(self.conditional)}")


def extrapolate(curve: Curve, length: int) -> Curve:
    """The curve to ``length`` positions: cut, or continued from the geometric mean of its last two values,
    each position :data:`DECAY` times the one before."""
    a = list(curve.conditional[:length])
    if len(a) < length:
        value = a[-1] if len(a) < 2 else math.sqrt(a[-1] * a[-2])
        while len(a) < length:
            value *= DECAY
            a.append(value)
    return replace(curve, conditional=tuple(a))


def expected_tokens(curve: Curve, num_draft: int) -> float:
    """Tokens per target step, the recovered or bonus token included: 1 + sum of prod a_j over ``num_draft``
    positions (for a tree, depths). The curve is extrapolated where it is shorter."""
    total, joint = 1.0, 1.0
    for a in extrapolate(curve, num_draft).conditional if num_draft else ():
        joint *= a
        total += joint
    return total


def curve_from_lengths(lengths: Mapping[int, float], source: str, **fields: Any) -> Curve:
    """The curve behind published acceptance lengths at several draft lengths (all from 1: exact; with gaps:
    the joint probability falls geometrically inside a gap). Values that are not monotone count as zero
    gain."""
    joint: list[float] = []
    before_k, before = 0, 1.0
    for k in sorted(lengths):
        gain, steps = max(0.0, lengths[k] - before), k - before_k
        start = joint[-1] if joint else 1.0
        ratio = _gap_ratio(gain / start, steps) if start > 0 else 0.0
        joint.extend(start * ratio ** (i + 1) for i in range(steps))
        before_k, before = k, max(before, lengths[k])
    conditional = [j / i if i > 0 else 0.0 for i, j in pairwise([1.0, *joint])]
    return Curve(tuple(min(1.0, a) for a in conditional), source, **fields)


def _gap_ratio(total: float, steps: int) -> float:
    """r with r + r^2 + ... + r^steps = total, at most 1."""
    if total <= 0:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**i for i in range(1, steps + 1)) < total:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def curve_from_histogram(steps_by_tokens: Mapping[int, int], source: str) -> Curve:
    """The curve behind a count of steps by tokens emitted (``steps_by_tokens_emitted`` of a verify
    report)."""
    longest = max(steps_by_tokens, default=1)
    if longest < 2:
        return Curve((0.0,), source, measured=True, low=1.0, high=1.0)
    at_least = [sum(n for t, n in steps_by_tokens.items() if t >= k) for k in range(1, longest + 1)]
    conditional = tuple(b / a if a else 0.0 for a, b in pairwise(at_least))
    wide = 1.96 / math.sqrt(max(1, at_least[0]))
    return Curve(conditional, source, low=max(0.0, 1 - 2 * wide), high=1 + 2 * wide, measured=True)


def curve_from_report(report: Mapping[str, Any]) -> Curve | None:
    """The curve measured by ``trtspec verify``, or None where the report has no acceptance check."""
    for check in report.get("checks", ()):
        histogram = (check.get("evidence") or {}).get("steps_by_tokens_emitted")
        if check.get("name") == "acceptance" and histogram:
            counts = {int(tokens): int(steps) for tokens, steps in histogram.items()}
            return curve_from_histogram(counts, f"measured: {report.get('recipe_name', 'report')}")
    return None


# --------------------------------------------------------------------------- priors


@lru_cache(maxsize=1)
def prior_table() -> dict[str, Any]:
    """data/acceptance_priors.json: method -> task -> values with their source."""
    text = resources.files("trtspec").joinpath("data/acceptance_priors.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def prior(
    method: str,
    task: str,
    copy_fraction: float | None = None,
    temperature: float = 0.0,
    num_draft: int = 8,
) -> Curve:
    """What published tables let one expect of ``method`` on ``task``; a measurement replaces it.

    ``copy_fraction``: share of the answer's tokens that continue a run copied from the text before; only
    n-gram drafting depends on it, None means the task's own. Sampling at temperature 1 accepts less (each
    method's factor, interpolated below 1). Raises InputError for an unknown method or task.
    """
    table = prior_table()
    if method not in METHODS:
        raise InputError(f"no acceptance prior for {method!r}; known: {', '.join(METHODS)}")
    if task not in TASKS:
        raise InputError(f"no acceptance prior for task {task!r}; known: {', '.join(TASKS)}")
    entry = table["methods"][method]
    if method == "ngram":
        copied = entry["tasks"][task]["copy_fraction"] if copy_fraction is None else copy_fraction
        curve = copying(copied, num_draft, entry["run_acceptance"], entry["source"])
    else:
        values = entry["tasks"][task]
        source = values.get("source", entry["source"])
        lengths = {int(k): float(v) for k, v in values["acceptance_length"].items()}
        curve = curve_from_lengths(
            lengths, source, low=entry["low"], high=entry["high"], tree=bool(entry.get("tree", False))
        )
    cooled = 1.0 - min(1.0, max(0.0, temperature)) * (1.0 - entry["temperature_1_factor"])
    first, *rest = curve.conditional
    return replace(curve, conditional=(first * cooled, *rest))


def copying(copy_fraction: float, num_draft: int, run_acceptance: float, source: str) -> Curve:
    """N-gram drafting on a text of which ``copy_fraction`` of the tokens continue copied runs.

    A step inside a run emits E = sum of run_acceptance^j, j = 0 .. num_draft, tokens; a step outside emits
    one. With a share h of the steps inside, the share of tokens inside is h*E/(h*E + 1 - h); set to
    ``copy_fraction``, that gives h, and a_1 = h * run_acceptance, a_j = run_acceptance after it.
    """
    if not 0.0 <= copy_fraction <= 1.0:
        raise InputError(f"a copy fraction is between 0 and 1, found {copy_fraction}")
    inside = sum(run_acceptance**j for j in range(num_draft + 1))
    hit = copy_fraction / (copy_fraction + inside * (1.0 - copy_fraction))
    conditional = (hit * run_acceptance, *([run_acceptance] * (num_draft - 1)))
    return Curve(conditional, f"{source}; copy fraction {copy_fraction:.2f}", low=0.7, high=1.3)
