"""``trtspec doctor``: what this machine can run, and what it lacks."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click

from trtspec.cli.output import json_option, print_json
from trtspec.doctor import BACKENDS, KNOWN_GOOD, Backend, Report, Row, examine
from trtspec.errors import EXIT_MISSING, EXIT_PASS
from trtspec.probes import collect

_COLORS = {"ok": "green", "note": "yellow", "lacking": "red", "error": "red"}
_WIDTH = 110


@click.command()
@click.option("--backend", type=click.Choice(BACKENDS), help="Backend that must be able to run here.")
@json_option
@click.pass_context
def doctor(ctx: click.Context, backend: Backend | None, as_json: bool) -> None:
    """Look at this machine: which backends can run, and what the others lack.

    Exit code 0 when the embedded backend, or that of --backend, can run; 3 when not, and when a switch that
    forces acceptance is set. Changes nothing; of programs only nvidia-smi and mpirun are started.
    """
    report = examine(collect(Path.cwd()))
    if as_json:
        print_json("doctor", _fields(report, backend))
    else:
        for line in _lines(report, backend):
            click.echo(line)
    ctx.exit(EXIT_PASS if report.ok(backend) else EXIT_MISSING)


def _fields(report: Report, asked: Backend | None) -> dict[str, object]:
    return {
        "ok": report.ok(asked),
        "asked": asked,
        "rows": [asdict(row) for row in report.rows],
        "gpus": [asdict(gpu) for gpu in report.gpus],
        "backends": [
            {
                "backend": kind,
                "can_run": not report.lacking(kind),
                "lacking": [{"id": row.id, "remedy": row.remedy} for row in report.lacking(kind)],
            }
            for kind in BACKENDS
        ],
        "known_good": [asdict(release) for release in KNOWN_GOOD],
    }


def _lines(report: Report, asked: Backend | None) -> Iterator[str]:
    width = max(len(row.id) for row in report.rows)
    for row in report.rows:
        status = click.style(f"{row.status:<8}", fg=_COLORS[row.status])
        yield from _wrapped(f"{status}{row.id:<{width}}  ", 10 + width, row.found)
        if row.remedy:
            yield from _wrapped(" " * (10 + width), 10 + width, f"-> {_whose(row)}{row.remedy}")
    yield ""
    for kind in BACKENDS:
        lacking = report.lacking(kind)
        verdict = click.style("can run", fg="green") if not lacking else click.style("cannot run", fg="red")
        mark = " (asked for)" if kind == asked else ""
        yield f"{kind:<9} {verdict}{mark}" + (
            f": lacks {', '.join(row.id for row in lacking)}" if lacking else ""
        )
    for row in report.errors:
        yield click.style(f"error: {row.found}: {row.remedy}", fg="red")


def _whose(row: Row) -> str:
    """``for pytorch, tensorrt: ``; nothing where all backends care."""
    return "" if len(row.needed_by) in (0, len(BACKENDS)) else f"{', '.join(row.needed_by)}: "


def _wrapped(head: str, indent: int, text: str) -> Iterator[str]:
    first, *rest = textwrap.wrap(text, _WIDTH - indent, break_long_words=False, break_on_hyphens=False) or [
        ""
    ]
    yield f"{head}{first}"
    for line in rest:
        yield " " * indent + line
