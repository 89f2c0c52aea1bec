"""Version numbers and ranges as recipes write them: ``>=1.0,<1.5``, ``==1.2.1``, ``>=1.3.0rc4``.

A small part of PEP 440: up to three numbers, an optional ``rcN`` that sorts before its release, and the six
comparisons joined by commas. A version that is missing numbers is padded with zeros (1.2 is 1.2.0).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

Version = tuple[int, int, int, int]
_RELEASE = 10**6  # sorts a release after all of its candidates
_LOWEST: Version = (0, 0, 0, 0)
_HIGHEST: Version = (10**6, 0, 0, 0)

_VERSION = re.compile(r"(\d{1,4})(?:\.(\d{1,4}))?(?:\.(\d{1,4}))?(?:\.?rc(\d{1,4}))?", re.ASCII)


def parse_version(text: str) -> Version:
    """``"1.2.0rc4"`` as (1, 2, 0, 4); raises ValueError. Local and post suffixes are not versions here."""
    match = _VERSION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"found {text.strip()!r}, which is not a version such as 1.2.1 or 1.3.0rc4")
    major, minor, patch, candidate = match.groups()
    return int(major), int(minor or 0), int(patch or 0), _RELEASE if candidate is None else int(candidate)


def version_text(version: Version) -> str:
    """The shortest text that :func:`parse_version` reads back: (1, 2, 0, 4) as ``1.2.0rc4``."""
    major, minor, patch, candidate = version
    if candidate != _RELEASE:
        return f"{major}.{minor}.{patch}rc{candidate}"
    return f"{major}.{minor}" + (f".{patch}" if patch else "")


@dataclass(frozen=True)
class VersionRange:
    """An interval of versions without the excluded ones."""

    text: str
    low: Version = _LOWEST
    low_included: bool = True
    high: Version = _HIGHEST
    high_included: bool = False
    excluded: frozenset[Version] = frozenset()

    def __str__(self) -> str:
        return self.text

    def admits(self, version: str) -> bool:
        """Whether ``version`` lies in the range; raises ValueError if it is not a version."""
        parsed = parse_version(version)
        above = self.low < parsed or (self.low == parsed and self.low_included)
        below = parsed < self.high or (self.high == parsed and self.high_included)
        return above and below and parsed not in self.excluded

    def is_empty(self) -> bool:
        if self.low == self.high:
            return not (self.low_included and self.high_included) or self.low in self.excluded
        return self.low > self.high

    def within(self, other: VersionRange) -> bool:
        """Whether the interval lies inside ``other``'s (exclusions aside)."""
        low = self.low > other.low or (
            self.low == other.low and (other.low_included or not self.low_included)
        )
        high = self.high < other.high or (
            self.high == other.high and (other.high_included or not self.high_included)
        )
        return low and high


def parse_range(text: str) -> VersionRange:
    """A comma-separated list of comparisons as a range; raises ValueError with what was found."""
    low, low_included, high, high_included = _LOWEST, True, _HIGHEST, False
    excluded = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(>=|<=|==|!=|>|<)\s*(\S+)\s*", part)
        if match is None:
            raise ValueError(f"found {part.strip()!r}, which is not a comparison such as >=1.0")
        operator, version = match.group(1), parse_version(match.group(2))
        included = operator in (">=", "<=", "==")
        if operator == "!=":
            excluded.add(version)
        if operator in (">", ">=", "==") and (version, not included) > (low, not low_included):
            low, low_included = version, included
        if operator in ("<", "<=", "==") and (version, included) < (high, high_included):
            high, high_included = version, included
    return VersionRange(text, low, low_included, high, high_included, frozenset(excluded))


def range_text(versions: VersionRange) -> str:
    """A bounded range in as few comparisons as it takes: ``>=1.0,<=1.2.1``, ``==1.2.1``."""
    low, high = version_text(versions.low), version_text(versions.high)
    if versions.low == versions.high:
        return f"=={low}"
    parts = [f"{'>=' if versions.low_included else '>'}{low}"]
    parts.append(f"{'<=' if versions.high_included else '<'}{high}")
    parts += [f"!={version_text(version)}" for version in sorted(versions.excluded)]
    return ",".join(parts)
