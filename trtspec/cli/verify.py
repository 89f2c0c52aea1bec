"""``trtspec verify``: does an engine hold what its recipe promises?"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trtspec.cli.output import FloatRange, Progress, Session, UserPath, print_json, print_warning
from trtspec.cli.report import check_outputs, form_options, rendered
from trtspec.cli.verify_help import Sectioned
from trtspec.cli.verify_modes import (
    endpoint_draws,
    json_bytes,
    json_file_option,
    mode_options,
    only_one_mode,
    print_plan,
    refuse_stray,
    run_self_test,
)
from trtspec.cli.verify_quality import QualityOptions, quality_options
from trtspec.cli.verify_scan import plan_scan, with_scan
from trtspec.cli.verify_speed import SpeedOptions, speed_options
from trtspec.errors import InputError, Problem, TrtspecError

if TYPE_CHECKING:
    from trtspec.verify.i18n import Lang
    from trtspec.verify.report import Report

_FILE = UserPath()


@click.command(cls=Sectioned)
@click.argument("engine", type=_FILE, required=False)
@click.option(
    "--prompts", type=_FILE, help="JSONL file with messages, prompt or text a line.  [default: ours]"
)
@click.option(
    "--num-prompts",
    type=click.IntRange(1),
    help="Prompts for losslessness and acceptance.  [default: 12; quick: 6]",
)
@click.option(
    "--max-new-tokens", type=click.IntRange(2), help="Longest answer, in tokens.  [default: 48; quick: 24]"
)
@click.option(
    "--exact-prompts", type=click.IntRange(1), help="Prompts of the run in float64.  [default: 8; quick: 4]"
)
@click.option(
    "--exact-tokens", type=click.IntRange(2), help="Longest answer in float64.  [default: 32; quick: 24]"
)
@click.option(
    "--sampled-prompts",
    type=click.IntRange(1),
    help="Prompts of sampled answers (approximate acceptance; --url).  [default: 40; quick: 36; --url: 2]",
)
@click.option(
    "--temperature",
    type=FloatRange(0.01, 10),
    help="Of these sampled answers.  [default: 1.0]",
)
@click.option(
    "--rounds", type=click.IntRange(1), help="How often each prompt is timed.  [default: 2; quick: 1]"
)
@click.option("--heldout", type=_FILE, help="JSONL file with text a line, for perplexity.  [default: ours]")
@click.option(
    "--quality-tokens", type=click.IntRange(2), help="Tokens for perplexity.  [default: 3000; quick: 2000]"
)
@quality_options
@speed_options
@click.option("--quick", is_flag=True, help="Measure less: wider intervals, about half the time.")
@click.option("-o", "--output", type=_FILE, help="Write the report as JSON to this file.")
@form_options
@click.option(
    "--bundle",
    type=_FILE,
    metavar="DIR",
    help="Write report and raw records to this new folder; trtspec report --recheck DIR judges them again.",
)
@click.option(
    "--against",
    type=_FILE,
    metavar="OLD",
    help="A stored report or bundle on the same model: fail where this engine is significantly worse.",
)
@click.option(
    "--baseline",
    "other",
    type=_FILE,
    metavar="OTHER",
    help="A second engine of the same model, run in turn: its drafts or its quantization against ENGINE's.",
)
@mode_options
@json_file_option
@click.pass_context
def verify(
    ctx: click.Context,
    engine: Path | None,
    prompts: Path | None,
    num_prompts: int | None,
    max_new_tokens: int | None,
    exact_prompts: int | None,
    exact_tokens: int | None,
    sampled_prompts: int | None,
    temperature: float | None,
    rounds: int | None,
    heldout: Path | None,
    quality_tokens: int | None,
    quality: QualityOptions,
    speed: SpeedOptions,
    quick: bool,
    output: Path | None,
    markdown: Path | None,
    html: Path | None,
    junit: Path | None,
    lang: Lang,
    bundle: Path | None,
    against: Path | None,
    other: Path | None,
    sampled: bool | None,
    sampled_tokens: int | None,
    plan: bool,
    bias: float | None,
    outcomes: int | None,
    power: float | None,
    self_test: bool,
    json_file: str | None,
) -> int:
    """Check an engine: is speculation lossless, is quality kept, is it faster?

    Lossless means: the same tokens as without speculation. The proof is a run in float64, where rounding
    cannot excuse a difference; in 16 bit near ties may differ. Sampled answers are scored token by token
    under the target's own law, from which strict acceptance must not depart. Approximate (typical) acceptance
    is never called lossless: what it samples is judged by its likelihood under the target and by repetition.
    With --url two endpoints are compared instead, by what a client sees of them.
    Compares the engine with the same weights without speculation and with the 16-bit baseline, by the gates
    of its recipe. With --baseline a second engine takes the baseline's place: one of the same quantization
    is compared by its drafts, one of another by quality, both by speed.
    Exit code 0: every gate holds; 1: one does not; 4: the measurements do not decide.
    """
    # Before torch is loaded: two spinning OpenMP threads on a busy machine cost a factor of 15.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if engine is None and not (plan or self_test or speed.alone) and json_file not in (None, "-"):
        engine, json_file = Path(str(json_file)), "-"  # verify --json ENGINE
        ctx.ensure_object(Session).json = True
    as_json = json_file == "-"
    planning = (bias, outcomes, power) != (None, None, None)
    # What only an engine's folder can show.
    inside = {
        "--exact-prompts": exact_prompts, "--exact-tokens": exact_tokens,
        "--against": against,
        "--baseline": other, "--plan": plan, "--self-test": self_test,
    }  # fmt: skip
    speed.check(engine=engine, others=inside)
    quality.check(endpoints=speed.url is not None)
    if other is not None and (engine is None or against is not None):
        message = (
            "needs an ENGINE" if engine is None else "and --against are two comparisons; give one of them"
        )
        raise InputError(Problem(message, key="--baseline"))
    if not speed.alone:
        only_one_mode(engine, plan=plan, self_test=self_test, planning=planning)
    elif (outcomes, power) != (None, None) or (bias is not None and speed.url is None):
        raise InputError(Problem("--outcomes and --power belong to --plan, --bias to --plan or --url"))
    refuse_stray(ctx, plan=plan, self_test=self_test, matrix=speed.matrix is not None)
    if plan:
        return print_plan(bias, outcomes, power, json_file)
    if self_test:
        return run_self_test(json_file)
    from trtspec.artifact import open_artifact
    from trtspec.folders import check_new_folder
    from trtspec.user_files import shown_path, user_path, write_user_file
    from trtspec.verify import protocol, render, report
    from trtspec.verify.against import read_old, with_regressions
    from trtspec.verify.bundle import write_bundle
    from trtspec.verify.pair import pair_of
    from trtspec.verify.settings import QUICK, Settings

    given = {
        "prompts": prompts,
        "num_prompts": num_prompts,
        "max_new_tokens": max_new_tokens,
        "exact_prompts": exact_prompts,
        "exact_tokens": exact_tokens,
        "sampled_prompts": sampled_prompts,
        "temperature": temperature,
        "sampled": sampled,
        "sampled_tokens": sampled_tokens,
        "rounds": rounds,
        "heldout": heldout,
        "quality_tokens": quality_tokens,
    }
    settings = dataclasses.replace(
        QUICK if quick else Settings(),
        **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
    )
    settings = speed.applied(quality.applied(settings), quick=quick)
    if sampled:
        settings = dataclasses.replace(settings, sampled_seconds=None)
    outputs = {
        "-o": output,
        "--markdown": markdown,
        "--html": html,
        "--junit": junit,
        "--bundle": bundle,
        "--json": None if json_file in (None, "-") else user_path(json_file),
    }
    reads = {
        "ENGINE": engine,
        "--baseline": other,
        "--against": against,
        "--prompts": prompts,
        "--heldout": heldout,
        "--matrix": speed.matrix,
        "--gates": quality.gates,
    }
    check_outputs(outputs, reads | {f"--tasks {path}": path for path in quality.tasks})
    if bundle is not None:
        check_new_folder(bundle)
    if engine is None:
        asked = quality.at_endpoints(settings) if speed.url is not None else None
        draws = endpoint_draws(
            sampled,
            quick=quick,
            prompts=sampled_prompts,
            tokens=sampled_tokens,
            bias=bias,
            temperature=temperature,
        )
        with Progress(quiet=as_json) as progress:
            result = speed.measure(
                progress,
                prompts=prompts,
                num_prompts=num_prompts,
                max_new_tokens=max_new_tokens,
                rounds=rounds,
                quick=quick,
                quality=asked,
                draws=draws,
            )
    else:
        # With hashes: a verdict is about the bytes that were sealed, and this reads them anyway.
        built = open_artifact(engine, check_hashes=True)
        old = None if against is None else read_old(against, source_digest=built.manifest.source.digest)
        pair = None if other is None else pair_of(built, open_artifact(other, check_hashes=True), settings)
        to_scan = plan_scan(built, settings) if speed.scan else None
        with Progress(quiet=as_json) as progress:
            result = protocol.verify(
                built,
                settings,
                pair=pair,
                argv=("trtspec", *sys.argv[1:]),
                say=progress.say,
                on_progress=progress,
            )
            if to_scan is not None:
                result = with_scan(result, built, to_scan, settings, progress)
        for one in (built, *(() if pair is None else (pair.other,))):
            # The run in float64 opens the weights again, minutes after they were hashed.
            if open_artifact(one.folder).manifest != one.manifest:
                message = "was built anew while it was verified; verify it again"
                raise InputError(Problem(message, file=shown_path(one.folder)))
        if old is not None:
            result = with_regressions(result, old, str(against))
    # The result is shown even where it cannot be written any more, and what can be written is.
    unwritten: list[TrtspecError] = []
    digest: dict[str, str] = {}

    def bundled() -> None:
        if bundle is not None:
            digest["bundle_sha256"] = write_bundle(bundle, result)

    def written(path: Path | None, content: Callable[[], bytes]) -> None:
        if path is not None:
            write_user_file(path, content())
            kept.append(path)

    kept: list[Path] = []
    forms = rendered(result, lang, markdown=markdown, html=html, junit=junit)
    writes: list[Callable[[], None]] = [
        partial(written, output, partial(report.to_bytes, result)),
        bundled,
        *(partial(written, path, content) for path, content in forms),
        partial(written, outputs["--json"], partial(_as_json, result)),
    ]
    for write in writes:
        try:
            write()
        except TrtspecError as error:
            unwritten.append(error)
    if as_json:
        print_json("verify", {"report": report.to_json(result), **digest})
        ctx.ensure_object(Session).json = False  # stdout has its one object
    else:
        click.echo(render.terminal(result, lang=lang))
        if digest:
            click.echo(f"bundle: {bundle} (manifest sha256 {digest['bundle_sha256']})")
        if output in kept:
            click.echo(f"report: {output}")
    for one_more in unwritten[1:]:
        print_warning(str(one_more))
    if unwritten:
        raise unwritten[0]
    return result.exit_code


def _as_json(result: Report) -> bytes:
    """The file of ``--json FILE``."""
    from trtspec.verify.report import to_json

    return json_bytes({"schema": "trtspec.verify/1", "report": to_json(result)})
