"""A calculation that writes itself down: each number with its formula, inputs and source.

The formula that is shown is the formula that was computed: :meth:`Ledger.compute` evaluates the text. So a
reader can recompute every line by hand, and :func:`recompute` does it for a test.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType
from typing import Any

_FUNCTIONS: dict[str, Any] = {
    "__builtins__": {},
    "min": min,
    "max": max,
    "log2": math.log2,
    "ceil": math.ceil,
    "floor": math.floor,
    "sqrt": math.sqrt,
}


@dataclass(frozen=True)
class TraceLine:
    """``value`` (in ``unit``) = ``formula`` over ``inputs``; ``source`` says where the formula or its
    constants come from. Inputs that are themselves lines carry the value of that line."""

    name: str
    value: float
    unit: str
    formula: str
    inputs: dict[str, float]
    source: str


@lru_cache(maxsize=1024)
def _compiled(formula: str) -> CodeType:
    return compile(formula, "<formula>", "eval")


def recompute(line: TraceLine) -> float:
    """The line's value, computed again from its formula and inputs alone."""
    return float(eval(_compiled(line.formula), _FUNCTIONS, line.inputs))


@dataclass
class Ledger:
    """Collects the lines of one calculation, in order. ``prefix`` goes before every name."""

    lines: list[TraceLine] = field(default_factory=list)
    prefix: str = ""

    def compute(self, name: str, unit: str, formula: str, source: str = "", /, **inputs: float) -> float:
        """Evaluate ``formula`` (our own text: arithmetic, min, max, log2, ceil, floor, sqrt) and note it."""
        value = float(eval(_compiled(formula), _FUNCTIONS, inputs))
        self.lines.append(TraceLine(self.prefix + name, value, unit, formula, inputs, source))
        return value

    def under(self, prefix: str) -> Ledger:
        """The same ledger, whose next names start with ``prefix``."""
        return Ledger(self.lines, prefix)


def find_line(lines: tuple[TraceLine, ...], name: str) -> TraceLine | None:
    """The last line called ``name``, or None."""
    return next((line for line in reversed(lines) if line.name == name), None)


def fields(line: TraceLine) -> Mapping[str, object]:
    """The line as JSON values."""
    return {
        "name": line.name,
        "value": line.value,
        "unit": line.unit,
        "formula": line.formula,
        "inputs": line.inputs,
        "source": line.source,
    }
