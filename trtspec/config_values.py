"""Typed reads from a JSON mapping that somebody else wrote, such as a model's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtspec.errors import Problem


class ConfigValues:
    """Typed reads from one JSON mapping that collect problems instead of raising."""

    def __init__(self, values: Mapping[str, Any], file: Path, problems: list[Problem]) -> None:
        self.values, self.file, self.problems = values, str(file), problems

    def bad(self, key: str, message: str) -> None:
        self.problems.append(Problem(message, file=self.file, key=key))

    def integer(
        self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = 1 << 24
    ) -> int:
        """``maximum`` keeps a wrong number from costing memory: names are made for every layer of it."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                self.bad(key, f"missing; an integer of at least {minimum} is needed")
                return minimum
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            self.bad(key, f"{shown_value(value)} is not an integer of at least {minimum}")
            return minimum
        if value > maximum:
            self.bad(key, f"{shown_value(value)} exceeds {maximum}")
            return minimum
        return value

    def number(self, key: str, default: float, low: float, high: float) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            self.bad(key, f"{shown_value(value)} is not a number from {low:g} to {high:g}")
            return default
        return float(value)

    def flag(self, key: str) -> bool:
        """A missing one is false. Text is refused: "false" would count as true."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            self.bad(key, f"{shown_value(value)} is not true or false")
        return value is True

    def refuse_if(self, key: str, why: str) -> None:
        if self.values.get(key):
            self.bad(key, f"{shown_value(self.values[key])} is not supported: {why}")


def shown_value(value: object) -> str:
    """A value of any size as a message shows it."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**40 else "an enormous number"
    return text if len(text) <= 100 else f"{text[:97]}..."
