"""What a verdict was computed from, kept so that it can be computed again without the engine.

A check that was measured carries its :class:`Records`: the judge that made the verdict, the judge's
arguments, and tables of raw rows, one a token or one a request. An evidence bundle
(:mod:`trtspec.verify.bundle`) stores them; :mod:`trtspec.verify.recheck` hands them to the judge again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from trtspec.ruler import Answer

Row = Mapping[str, Any]
"""JSON values by name."""


@dataclass(frozen=True)
class Records:
    """``arguments`` and the rows of ``tables`` are JSON values. ``judge`` names a case of
    :func:`trtspec.verify.recheck.rejudge`."""

    judge: str
    arguments: Mapping[str, Any]
    tables: Mapping[str, Sequence[Row]]

    def also(self, *, arguments: Mapping[str, Any], tables: Mapping[str, Sequence[Row]]) -> Records:
        """With more of both: what a later step of the same verdict rested on."""
        return replace(self, arguments={**self.arguments, **arguments}, tables={**self.tables, **tables})


def answers_from(rows: Sequence[Row]) -> tuple[Answer, ...]:
    """The answers whose :func:`rows_of` these are."""
    return tuple(
        Answer(
            str(row["request_id"]),
            tuple(row["tokens"]),
            row["finish_reason"],
            tuple(row["emitted"]),
            int(row["drafted"]),
            int(row["accepted"]),
            tuple(row["drafted_by_step"]),
        )
        for row in rows
    )


def rows_of(values: Sequence[Any]) -> list[dict[str, Any]]:
    """A row for each of a sequence of dataclass instances."""
    return [asdict(value) for value in values]
