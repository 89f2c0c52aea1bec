"""``trtspec bench``: speed side by side with peers, in one run."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtspec.cli.output import UserPath
from trtspec.errors import MissingError

if TYPE_CHECKING:
    from trtspec.bench import BenchRow
    from trtspec.cost.views import View


@click.group()
def bench() -> None:
    """Measure speed side by side with peers, in one run."""


@bench.command("engine")
@click.argument("recipes", nargs=-1, type=UserPath())
@click.option("--quick", is_flag=True, help="One workload, batches 1 and 4, three short rounds.")
@click.option("--json", "json_file", type=UserPath(), help="Write the rows to this file.")
@click.option("--svg", "svg_file", type=UserPath(), help="Draw tokens per second by batch into this file.")
def engine(recipes: tuple[Path, ...], quick: bool, json_file: Path | None, svg_file: Path | None) -> None:
    """Compare built engines with transformers: tokens per second, medians of interleaved rounds.

    RECIPES are recipe files or folders of engines, which must be built; the default is every engine in
    engines/. A ratio above 1 means that this engine is faster; the peer "memory bandwidth" is the share of
    that limit which a decode step reaches.
    """
    from trtspec.bench import bench_engine
    from trtspec.cli.recipe import write_text
    from trtspec.cost import plot

    # For the children: spinning threads fight over busy cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    folders = [_folder(path) for path in recipes] or _built()
    size: dict[str, Any] = (
        {"batches": (1, 4), "workloads": ("copy",), "new_tokens": 32, "rounds": 3} if quick else {}
    )
    rows = [
        row
        for folder in folders
        for row in bench_engine(folder, **size, progress=lambda text: click.echo(text, err=True))
    ]
    command = shlex.join(["trtspec", *sys.argv[1:]])
    machine = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")}
    click.echo(plot.table(_view(rows, command, machine)))
    if json_file is not None:
        fields = {"command": command, **machine, "rows": [asdict(row) for row in rows]}
        write_text(json_file, json.dumps(fields, indent=2, allow_nan=False) + "\n", force=True)
    if svg_file is not None:
        write_text(svg_file, plot.svg(_view(rows, command, machine)), force=True)


def _folder(path: Path) -> Path:
    """The engine of a recipe file, or the folder itself."""
    if path.is_dir():
        return path
    from trtspec.recipe_file import load_recipe

    folder = Path("engines") / load_recipe(path).name
    if not folder.is_dir():
        raise MissingError(f"{folder}: no such engine; run: trtspec build {path}")
    return folder


def _built() -> list[Path]:
    found = sorted(path.parent for path in Path("engines").glob("*/manifest.json"))
    if not found:
        raise MissingError("engines/ holds no engine; run: trtspec build RECIPE")
    return found


def _view(rows: Sequence[BenchRow], command: str, machine: Mapping[str, str]) -> View:
    from trtspec.cost.views import Cell, Series, View

    table: list[tuple[Cell, ...]] = []
    lines: dict[str, list[tuple[float, float]]] = {}
    for r in rows:
        low, high = r.interval or (None, None)
        goal = "" if r.goal is None else f"{r.goal:g} " + ("met" if (r.ratio or 0.0) >= r.goal else "MISSED")
        shown = [None if x is None else round(x, 2) for x in (r.ratio, low, high)]
        speeds = [None if x is None else round(x, 1) for x in (r.engine_tokens_per_s, r.peer_tokens_per_s)]
        cells = (r.engine, r.peer, r.workload, r.batch, r.precision)
        table.append((*cells, *shown, goal, *speeds, r.note))
        for name, value in ((r.engine, r.engine_tokens_per_s), (r.peer, r.peer_tokens_per_s)):
            points = lines.setdefault(f"{name}, {r.workload}", [])
            if value is not None and all(at != r.batch for at, _ in points):
                points.append((float(r.batch), value))
    columns = (
        "engine",
        "peer",
        "workload",
        "batch",
        "precision",
        "ratio",
        "low",
        "high",
        "goal",
        "tok/s",
        "peer's",
    )
    return View(
        "Tokens per second beside peers",
        (*columns, "note"),
        tuple(table),
        tuple(Series(name, tuple(points)) for name, points in lines.items() if points),
        "batch",
        "tokens/s",
        log_x=True,
        notes=(f"command: {command}", ", ".join(f"{name}={value}" for name, value in machine.items())),
    )
