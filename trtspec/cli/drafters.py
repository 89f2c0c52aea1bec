"""``trtspec bench drafters``: ways of drafting side by side on one screen."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtspec import __version__
from trtspec.cli.output import Progress, Session, UserPath, json_file_option

if TYPE_CHECKING:
    from trtspec.bench.drafters import Comparison, DrafterRow
    from trtspec.cost.views import View
    from trtspec.text import Tokenizer

SCHEMA = "trtspec.bench-drafters/1"
_WIDTH = 100
_TEXT_LINES = 4


@click.command("drafters")
@click.argument("engine", type=UserPath())
@click.option(
    "--kinds",
    help="Comma-separated: ngram, lookahead, draft_model, medusa, eagle, eagle3.  [default: all here]",
)
@click.option("--heads", type=UserPath(), help="Folder of trained Medusa or EAGLE heads for this target.")
@click.option("--prompts", type=click.IntRange(1, 60), default=2, show_default=True, help="Of each workload.")
@click.option("--tokens", type=click.IntRange(8, 1024), default=48, show_default=True, help="Of each answer.")
@click.option("--rounds", type=click.IntRange(1, 50), default=3, show_default=True, help="Of every prompt.")
@click.option("--quick", is_flag=True, help="One prompt of each workload, 40 tokens, two rounds.")
@json_file_option("Write rows and answers to this file.")
@click.option("--svg", "svg_file", type=UserPath(), help="Draw acceptance by depth into this file.")
@click.option("--dry-run", is_flag=True, help="List what would be compared; run nothing.")
@click.pass_context
def drafters(
    ctx: click.Context,
    engine: Path,
    kinds: str | None,
    heads: Path | None,
    prompts: int,
    tokens: int,
    rounds: int,
    quick: bool,
    json_file: Path | None,
    svg_file: Path | None,
    dry_run: bool,
) -> None:
    """Compare ways of drafting on one built ENGINE: the same weights, the same prompts, in turn.

    The table has one row for each workload and drafter; below it stands one answer by each drafter, with the
    tokens that were drafted and accepted in green (in brackets without colour). Greedy, one request at a
    time, timed from the first token on.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from trtspec.artifact import open_artifact
    from trtspec.bench.drafters import compare_drafters, contenders
    from trtspec.bench.prompts import WORKLOADS
    from trtspec.cli.recipe import write_text
    from trtspec.cost import plot
    from trtspec.text import Tokenizer
    from trtspec.user_files import check_writable

    artifact = open_artifact(engine)
    if quick:
        prompts, tokens, rounds = 1, 40, 2
    named = None if kinds is None else [name.strip() for name in kinds.split(",") if name.strip()]
    compared = contenders(artifact, named, heads)
    if dry_run:
        for one in compared:
            click.echo(f"{one.name}: {one.note or 'runs'}")
        click.echo(
            f"{prompts} prompts of each of {', '.join(WORKLOADS)}, {tokens} tokens, {rounds} rounds, in turn"
        )
        return
    for path in (json_file, svg_file):
        if path is not None:
            check_writable(path)
    with Progress() as progress:
        result = compare_drafters(
            artifact,
            compared,
            workloads=tuple(WORKLOADS),
            num_prompts=prompts,
            new_tokens=tokens,
            rounds=rounds,
            shown="code",
            on_progress=progress,
        )
    command = shlex.join(["trtspec", *sys.argv[1:]])
    view = view_of(result, artifact.recipe.name)
    session = ctx.find_object(Session) or Session()
    color = session.color is not False and sys.stdout.isatty()
    click.echo(plot.table(view))
    click.echo("\n".join(answers_of(result, Tokenizer.load(artifact.target_dir), color=color)))
    if json_file is not None:
        fields = {
            "trtspec": {"schema": SCHEMA, "version": __version__},
            "command": command,
            "engine": str(engine),
            "recipe_digest": artifact.manifest.recipe_digest,
            "prompts": prompts,
            "tokens": tokens,
            "rounds": rounds,
            "omp_num_threads": os.environ.get("OMP_NUM_THREADS", "unset"),
            "rows": [asdict(row) for row in result.rows],
            "answers": {
                name: {"tokens": list(one.tokens), "steps": [list(step) for step in one.steps]}
                for name, one in result.answers.items()
            },
        }
        write_text(json_file, json.dumps(fields, indent=2, allow_nan=False) + "\n", force=True)
    if svg_file is not None:
        write_text(svg_file, plot.svg(view), force=True)


def view_of(result: Comparison, name: str) -> View:
    """The table, and acceptance by depth over all workloads as its plot."""
    from trtspec.cost.views import Series, View

    drawn = {
        drafter: [row for row in result.rows if row.drafter == drafter and row.by_depth]
        for drafter in dict.fromkeys(row.drafter for row in result.rows)
    }
    series = []
    for drafter, rows in drawn.items():
        depths = max((len(row.by_depth) for row in rows), default=0)
        points = [
            (
                float(i + 1),
                100 * sum(row.by_depth[i] if i < len(row.by_depth) else 0.0 for row in rows) / len(rows),
            )
            for i in range(depths)
        ]
        if points:
            series.append(Series(drafter, tuple(points)))
    columns = (
        "workload", "drafter", "tok/step", "accepted", "by depth %", "cost", "tok/s", "ratio to none", "same"
    )  # fmt: skip
    return View(
        f"Drafters on {name}",
        columns,
        tuple(_cells(row) for row in result.rows),
        tuple(series),
        "drafted tokens accepted, at least",
        "% of the steps with drafts",
        notes=(
            "by depth: of the steps with drafts, those that kept at least 1, 2, ... drafted tokens",
            "cost: time of a step over one without drafts; ratio: tok/s likewise (lowest to highest round)",
            "same: greedy answers equal to those without drafts (near ties may differ at 16 bit)",
            *(f"{row.drafter}: {row.note}; --heads DIR names some" for row in result.rows if row.note),
        ),
    )


def _cells(row: DrafterRow) -> tuple[Any, ...]:
    if row.tokens_per_step is None:
        return (row.workload, row.drafter, row.note, "", "", "", "", "", "")
    ratio = "1"
    if row.drafter != "none":
        ratio = f"{row.ratio:.2f} ({row.ratio_low:.2f} to {row.ratio_high:.2f})"
    return (
        row.workload,
        row.drafter,
        f"{row.tokens_per_step:.2f}",
        f"{row.accepted}/{row.drafted}" if row.drafted else "-",
        " ".join(f"{100 * share:.0f}" for share in row.by_depth[:5]) or "-",
        f"{row.step_cost:.2f}",
        f"{row.tokens_per_s:.1f}",
        ratio,
        "-" if row.drafter == "none" else f"{row.identical}/{row.prompts}",
    )


def answers_of(result: Comparison, tokenizer: Tokenizer, *, color: bool) -> list[str]:
    """One answer by each drafter, stacked, its accepted tokens marked."""
    from trtspec.bench import marked

    mark = f"{marked.GREEN}green{marked.PLAIN}" if color else "[in brackets]"
    told = ["", f"The first {result.shown} prompt's answer; drafted and accepted tokens {mark}:"]
    for name, one in result.answers.items():
        tokens, steps = one.decoded
        detokenizer = tokenizer.detokenizer()
        found = list(marked.pieces(one.tokens, one.steps, detokenizer.push))
        if rest := detokenizer.flush():
            found.append((rest, False))
        told.append(f"{name}: {steps} steps for {tokens} tokens")
        told += [f"  {line}" for line in marked.lines(found, color=color, width=_WIDTH - 2, most=_TEXT_LINES)]
    return told
