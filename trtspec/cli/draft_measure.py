"""``trtspec draft measure``: acceptance by position, and the chain or tree that pays."""

from __future__ import annotations

import os
from pathlib import Path

import click

from trtspec.cli.output import Progress, UserPath, json_option, print_json


@click.command()
@click.argument("recipe_or_engine", type=UserPath())
@click.option("--data", default="builtin", metavar="FILE", help="Prompts: JSONL.", show_default=True)
@click.option("--tasks", help="Only prompts of these tasks, comma-separated.")
@click.option(
    "--num-prompts", type=click.IntRange(2), default=24, show_default=True, help="Spread over the data."
)
@click.option(
    "--max-new-tokens", type=click.IntRange(4), default=64, show_default=True, help="Of each answer."
)
@click.option("--no-choose", is_flag=True, help="Measure acceptance; time nothing, choose nothing.")
@click.option("-o", "--output", type=UserPath(), metavar="NEW_RECIPE", help="Write the recipe with the best.")
@click.option("--svg", "svg_file", type=UserPath(), help="Draw acceptance by position into this file.")
@click.option("--engines-dir", type=UserPath(), default="engines", help="Where a RECIPE's engine stands.")
@click.option("--force", is_flag=True, help="Replace NEW_RECIPE.")
@click.option("--dry-run", is_flag=True, help="List what would be measured; run nothing.")
@json_option
def measure(
    recipe_or_engine: Path,
    data: str,
    tasks: str | None,
    num_prompts: int,
    max_new_tokens: int,
    no_choose: bool,
    output: Path | None,
    svg_file: Path | None,
    engines_dir: Path,
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Measure what a built recipe's drafter gets accepted, and choose how much to draft.

    Greedy, every draft verified whole. Acceptance by position (conditional and joint), rate and length, by
    task, with intervals over prompts; beside it the same target or draft in 16 bit where the recipe quantizes
    them, with differences paired by prompt. Then every chain length or tree is replayed on the answers and
    priced with steps timed on this machine, one sequence at a time; -o writes the recipe with the fastest.

    Exit code 1: a dead drafter. Its acceptance length, upper end of the interval, is below 1.1 or, for draft
    models and heads, below what offering frequent tokens would reach; or they draft the current token again.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from trtspec.draft.measure import cells, checked, engine_of, prompts_of
    from trtspec.errors import EXIT_GATE_FAILED, InputError, Problem, TrtspecError
    from trtspec.user_files import check_writable, user_path

    artifact, text, folder = engine_of(recipe_or_engine, engines_dir)
    checked(artifact)
    if output is not None and no_choose:
        raise InputError("-o writes what is chosen; leave --no-choose out")
    if output is not None and output.exists() and not force:
        raise InputError(Problem("exists; name another file, or give --force", file=str(output)))
    for path in (output, svg_file):
        if path is not None:
            check_writable(path)
    file = None if data == "builtin" else user_path(data)
    names = [name.strip() for name in tasks.split(",") if name.strip()] if tasks else []
    prompts = prompts_of(artifact, file, names, num_prompts, max_new_tokens)
    compared = cells(artifact)
    if dry_run:
        steps = [one.name + (f": not measured: {one.why_not}" if one.why_not else "") for one in compared]
        if not no_choose:
            steps.append(
                "large drafts behind every token, steps by rows, drafts by levels; the fastest shape"
            )
        if as_json:
            print_json("draft_measure_plan", {"prompts": len(prompts), "steps": steps})
        else:
            click.echo("\n".join([f"{len(prompts)} prompts, up to {max_new_tokens} tokens each", *steps]))
        return 0

    from trtspec.cost.plot import svg
    from trtspec.draft.choose import choose
    from trtspec.draft.measure import measure_cell
    from trtspec.draft.measure_view import Measurement, fields_of, positions_view, text_of
    from trtspec.draft.rewrite import has_relative_paths, rewrite
    from trtspec.user_files import write_user_file

    with Progress(quiet=as_json) as progress:
        measured = tuple(
            measure_cell(one, prompts, max_new_tokens=max_new_tokens, on_progress=progress)
            for one in compared
            if one.why_not is None
        )
        wrong = measured[-1].dead or any(one.contradictions for one in measured)
        choice = None
        if not no_choose and not wrong:
            choice = choose(compared[-1], prompts, max_new_tokens=max_new_tokens, on_progress=progress)
    found = Measurement(
        recipe_name=artifact.recipe.name,
        recipe_digest=artifact.manifest.recipe_digest,
        kind=artifact.recipe.speculation.kind,
        data=data,
        max_new_tokens=max_new_tokens,
        cells=measured,
        skipped=tuple((one.name, one.why_not) for one in compared if one.why_not is not None),
        choice=choice,
    )
    # What took minutes to measure is shown even where it cannot be written.
    written, unwritten = None, None
    view = positions_view(found)
    try:
        if output is not None and choice is not None and choice.best.changes is not None:
            changes = {} if choice.keep else choice.best.changes
            changed = rewrite(text, changes, folder, output.resolve().parent)
            write_user_file(output, changed.text.encode(), overwrite=force)
            written = changed
        if svg_file is not None and view.series:
            write_user_file(svg_file, svg(view).encode())
        elif svg_file is not None:
            click.echo(f"{svg_file}: not written; no position was drafted", err=True)
    except TrtspecError as error:
        unwritten = error
    if as_json and unwritten is None:
        told = {"recipe": str(output), "comments_kept": written.comments_kept} if written else None
        print_json("draft_measure", {**fields_of(found), "written": told})
    elif not as_json:
        click.echo(text_of(found))
        if written is not None:
            drafts = "the recipe as it was" if choice is None or choice.keep else choice.best.label
            anew = "" if written.comments_kept else "; comments were not kept, every key is written out"
            click.echo(f"{output}: {drafts}{anew}")
            if folder is None and has_relative_paths(written.recipe):
                click.echo("relative paths in it are those of the engine's recipe; check where they start")
        elif output is not None and unwritten is None:
            click.echo(f"{output}: not written; nothing was chosen")
    if unwritten is not None:
        raise unwritten
    return EXIT_GATE_FAILED if found.failed else 0
