"""What verbs print: JSON under one convention, colour where it is wanted, sizes for people, progress.

``--json`` prints one object on stdout: ``{"trtspec": {"schema": "trtspec.VERB/1", "version": ...}, ...}``; an
error prints ``{"trtspec": {"schema": "trtspec.error/1", ...}, "exit_code": 2, "problems": [{"file", "line",
"key", "message"}]}`` there instead; a result that is there and cannot be written to the file that was asked
for stands on stdout, its error on stderr. Progress and warnings go to stderr, results to stdout.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import click

from trtspec import __version__
from trtspec.errors import InputError, Problem
from trtspec.user_files import user_path, visible

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass
class Session:
    """What the global flags asked for; ``ctx.obj`` of every verb."""

    debug: bool = False
    json: bool = False

    @property
    def color(self) -> bool | None:
        """False when NO_COLOR is set or the terminal is dumb; None: colour if the stream is a terminal."""
        if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
            return False
        return None


class UserPath(click.Path):
    """A path as :func:`~trtspec.user_files.user_path` reads it."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        try:
            super().convert(value, param, ctx)
            return user_path(value)
        except InputError as error:
            self.fail(str(error), param, ctx)


class FloatRange(click.FloatRange):
    """Finite numbers only: no comparison with a bound refuses a NaN, and nothing here takes an infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a number to use", param, ctx)
        return number


def json_option(function: _Function) -> _Function:
    """Give a verb ``--json`` (parameter ``as_json``); its errors become JSON too."""

    def note(ctx: click.Context, _parameter: click.Parameter, value: bool) -> bool:
        ctx.ensure_object(Session).json = value
        return value

    return click.option(
        "--json", "as_json", is_flag=True, is_eager=True, callback=note, help="Print JSON for programs."
    )(function)


def json_file_option(what: str) -> Callable[[_Function], _Function]:
    """The option ``--json FILE``: stdout has no JSON then, so errors are lines on stderr."""

    def into_a_file(ctx: click.Context, _parameter: click.Parameter, value: Path | None) -> Path | None:
        ctx.ensure_object(Session).json = False
        return value

    return click.option(
        "--json", "json_file", type=UserPath(), is_eager=True, callback=into_a_file, help=what
    )


def completing(names: Iterable[str]) -> Callable[..., list[str]]:
    """What an option's ``shell_complete`` wants, for one whose bad values get messages of their own."""

    def complete(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


def print_json(verb: str, fields: Mapping[str, Any]) -> None:
    """Print one JSON object of schema ``trtspec.VERB/1`` on stdout. ``fields`` must be JSON values; a NaN or
    infinity raises ValueError, since JSON has none."""
    click.echo(json.dumps({**_header(verb), **fields}, indent=2, allow_nan=False))


def print_error_json(exit_code: int, problems: Sequence[Problem]) -> None:
    """Print the JSON form of an error on stdout."""
    listed = [problem_fields(problem) for problem in problems]
    click.echo(json.dumps({**_header("error"), "exit_code": exit_code, "problems": listed}, indent=2))


def problem_fields(problem: Problem) -> dict[str, Any]:
    """A problem as JSON: file, line, key, message."""
    fields = asdict(problem)
    return {name: fields[name] for name in ("file", "line", "key", "message")}


def _header(verb: str) -> dict[str, Any]:
    return {"trtspec": {"schema": f"trtspec.{verb}/1", "version": __version__}}


def print_error(session: Session, message: str) -> None:
    """One line on stderr, marked as an error; nowhere if that cannot be written."""
    with contextlib.suppress(OSError):
        start = click.style("error: ", fg="red", bold=True)
        click.echo(start + visible(message), err=True, color=session.color)


def print_warning(message: str) -> None:
    """One line on stderr, marked as a warning; nowhere if that cannot be written."""
    with contextlib.suppress(OSError):
        text = "\n".join(map(visible, message.split("\n")))
        click.echo(click.style("warning: ", fg="yellow", bold=True) + text, err=True)


def human_bytes(count: float) -> str:
    """``1536`` as ``1.5 KiB``."""
    if abs(count) < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        count /= 1024
        if abs(count) < 1023.95 or unit == "TiB":
            break
    return f"{count:.1f} {unit}"


def human_seconds(seconds: float) -> str:
    """``75.2`` as ``1 min 15 s``; below a minute with one decimal, below a second in ms."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


class Progress:
    """Reports steps on stderr: one redrawn line on a terminal, one plain line per step elsewhere.

    Use as a context manager and call with (step, done, total); ``total`` 0 means unknown. :meth:`say` prints
    a line between redraws.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._step: str | None = None
        self._started = 0.0
        self._drawn = 0.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish(failed=kind is not None)

    def __call__(self, step: str, done: int = 0, total: int = 0) -> None:
        """Note that ``step`` has done ``done`` of ``total``."""
        now = time.monotonic()
        if step != self._step:
            self._finish(failed=False)
            self._step, self._started, self._drawn = step, now, 0.0
            if not self._terminal:
                self._echo(f"{step} ...")
        if self._terminal and (now - self._drawn > 0.1 or done == total):
            self._drawn = now
            share = f" {done}/{total}" if total else ""
            bar = f" [{'#' * (20 * done // total):<20}]" if total and 0 <= done <= total else ""
            self._echo(f"\r\x1b[K{step}{bar}{share}", newline=False)

    def say(self, line: str) -> None:
        """Print one line."""
        self._echo(("\r\x1b[K" if self._terminal and self._step else "") + line)

    def _finish(self, *, failed: bool) -> None:
        if self._step is None:
            return
        took = human_seconds(time.monotonic() - self._started)
        outcome = f"{self._step}: {'stopped after' if failed else 'done in'} {took}"
        self._echo(("\r\x1b[K" if self._terminal else "") + outcome)
        self._step = None

    def _echo(self, text: str, *, newline: bool = True) -> None:
        if not self._quiet:
            # Work is not given up because nobody can be told about it.
            with contextlib.suppress(OSError):
                click.echo(text, err=True, nl=newline)
                if not newline:
                    sys.stderr.flush()
