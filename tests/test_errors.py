"""A problem as people read it: its place first, in one line, with nothing that steers a terminal."""

from __future__ import annotations

import pytest

from trtspec.errors import InputError, Problem

HOSTILE = "Foo\nerror: all is well\x1b[2J\r\u202e\ud800 日本 é"


@pytest.mark.parametrize(
    "problem",
    [
        Problem(HOSTILE, "a.yaml", 3, "model.source"),
        Problem("bad", HOSTILE),
        Problem("bad", "a.yaml", key=HOSTILE),
        Problem(HOSTILE, key="model"),
    ],
)
def test_a_problem_at_a_place_is_one_printable_line(problem: Problem) -> None:
    assert str(problem).isprintable()
    assert "日本 é" in str(problem)
    assert "\\n" in str(problem)
    assert "\\x1b[2J" in str(problem)


def test_a_message_without_a_place_keeps_its_lines_only() -> None:
    assert str(Problem("two\nlines\x1b[31m\tof text")) == "two\nlines\\x1b[31m\tof text"
    assert str(InputError([Problem("a", "f", 1), Problem("b", "f", 2)])) == "f:1: a\nf:2: b"


def test_the_parts_stay_as_they_were() -> None:
    """JSON has them unescaped: it has escapes of its own."""
    assert Problem(HOSTILE, HOSTILE).message == HOSTILE
    assert str(Problem("", "a.yaml", 2)) == "a.yaml:2"
