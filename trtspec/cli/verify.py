"""``trtspec verify``: does an engine hold what its recipe promises?"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import click

from trtspec.cli.output import Progress, json_option, print_json
from trtspec.errors import InputError, Problem

_FILE = click.Path(path_type=Path)


@click.command()
@click.argument("engine", type=_FILE)
@click.option(
    "--prompts", type=_FILE, help="JSONL file with messages, prompt or text a line, instead of ours."
)
@click.option("--num-prompts", type=click.IntRange(1), help="Prompts for identity and acceptance.")
@click.option("--max-new-tokens", type=click.IntRange(2), help="Longest answer.")
@click.option("--rounds", type=click.IntRange(1), help="How often each prompt is timed.")
@click.option("--heldout", type=_FILE, help="JSONL file with text a line, for perplexity, instead of ours.")
@click.option("--quality-tokens", type=click.IntRange(2), help="Tokens for perplexity.")
@click.option("--quick", is_flag=True, help="Measure less: wider intervals, a third of the time.")
@click.option("-o", "--output", type=_FILE, help="Write the report as JSON.")
@click.option("--markdown", type=_FILE, help="Write the report as Markdown.")
@json_option
@click.pass_context
def verify(
    ctx: click.Context,
    engine: Path,
    prompts: Path | None,
    num_prompts: int | None,
    max_new_tokens: int | None,
    rounds: int | None,
    heldout: Path | None,
    quality_tokens: int | None,
    quick: bool,
    output: Path | None,
    markdown: Path | None,
    as_json: bool,
) -> int:
    """Check an engine: is speculation lossless, is quality kept, is it faster?

    Compares the engine with the same weights without speculation and with the 16-bit baseline, by the gates
    of its recipe. Exit code 0: every gate holds; 1: one does not; 4: the measurements do not decide.
    """
    # Before torch is loaded: two spinning OpenMP threads on a busy machine cost a factor of 15.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from trtspec.artifact import open_artifact, write_atomic
    from trtspec.verify import protocol, render, report

    given = {
        "prompts": prompts,
        "num_prompts": num_prompts,
        "max_new_tokens": max_new_tokens,
        "rounds": rounds,
        "heldout": heldout,
        "quality_tokens": quality_tokens,
    }
    settings = dataclasses.replace(
        protocol.QUICK if quick else protocol.Settings(),
        **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
    )
    # Before minutes of measuring.
    problems = [
        Problem("its folder does not exist; make it, or choose another", file=str(path))
        for path in (output, markdown)
        if path is not None and not path.absolute().parent.is_dir()
    ]
    if problems:
        raise InputError(problems)
    built = open_artifact(engine)
    with Progress(quiet=as_json) as progress:
        result = protocol.verify(
            built, settings, argv=("trtspec", *sys.argv[1:]), say=progress.say, on_progress=progress
        )
    if output is not None:
        report.write(result, output)
    if markdown is not None:
        write_atomic(markdown, render.markdown(result).encode())
    if as_json:
        print_json("verify", {"report": report.to_json(result)})
    else:
        click.echo(render.terminal(result))
        if output is not None:
            click.echo(f"report: {output}")
    return result.exit_code
