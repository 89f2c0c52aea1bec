"""An answer as text in which the drafted and accepted tokens are marked: green, or in brackets."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Callable, Iterator, Sequence

GREEN, PLAIN = "\x1b[32m", "\x1b[39m"
_SHOWN = {"\n": "↵", "\t": " "}


def pieces(
    tokens: Sequence[int], steps: Sequence[tuple[int, int, int]], push: Callable[[list[int]], str]
) -> Iterator[tuple[str, bool]]:
    """(text, accepted) of an answer, in order.

    ``steps`` as in :class:`trtspec.bench.drafters.Trace`: of a step's tokens the first ``accepted`` were
    drafted. ``push`` decodes the tokens that come next; bytes of a character that is not complete yet go
    with the piece that completes it."""
    at = 0
    for emitted, _, accepted in steps:
        for count, kept in ((min(accepted, emitted), True), (emitted - min(accepted, emitted), False)):
            if count:
                text = push(list(tokens[at : at + count]))
                at += count
                if text:
                    yield text, kept


def lines(found: Sequence[tuple[str, bool]], *, color: bool, width: int, most: int) -> list[str]:
    """The pieces in at most ``most`` lines of at most ``width`` columns, broken at spaces if there are any.

    Line ends are shown as ↵ and what cannot be shown as a dot. Without ``color`` accepted runs stand in
    brackets. Text that does not fit ends in an ellipsis.
    """
    cells = _cells(found, brackets=not color)
    rows: list[list[tuple[str, bool]]] = []
    while cells and len(rows) < most:
        end = _fitting(cells, width if len(rows) < most - 1 else width - 2)
        if end < len(cells):
            if len(rows) == most - 1:
                rows.append([*cells[:end], (" ", False), ("…", False)])
                break
            space = next((i for i in range(end, 0, -1) if cells[i - 1][0] == " "), end)
            end = space
        rows.append(cells[:end])
        cells = cells[end:]
    return [_styled(row) if color else "".join(char for char, _ in row).rstrip() for row in rows]


def _cells(found: Sequence[tuple[str, bool]], *, brackets: bool) -> list[tuple[str, bool]]:
    cells: list[tuple[str, bool]] = []
    for accepted, run in itertools.groupby(found, key=lambda piece: piece[1]):
        text = "".join(_visible(char) for piece, _ in run for char in piece)
        cells += [(char, accepted) for char in (f"[{text}]" if brackets and accepted else text)]
    return cells


def _visible(char: str) -> str:
    if char in _SHOWN:
        return _SHOWN[char]
    # Controls, surrogates and what turns the writing direction: a model's text must not drive the terminal.
    return "·" if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") else char


def columns(char: str) -> int:
    """Columns that a terminal gives a character."""
    if unicodedata.category(char) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _fitting(cells: Sequence[tuple[str, bool]], width: int) -> int:
    """How many cells fit; at least one, so that a narrow terminal ends too."""
    taken = 0
    for number, (char, _) in enumerate(cells):
        taken += columns(char)
        if taken > width:
            return max(number, 1)
    return len(cells)


def _styled(row: Sequence[tuple[str, bool]]) -> str:
    parts = []
    for accepted, run in itertools.groupby(row, key=lambda cell: cell[1]):
        text = "".join(char for char, _ in run)
        parts.append(f"{GREEN}{text}{PLAIN}" if accepted else text)
    return "".join(parts).rstrip()
