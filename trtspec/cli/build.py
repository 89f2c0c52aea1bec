"""``trtspec build`` and ``quantize``: making engines."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from pydantic import BaseModel

from trtspec.cli.engines import rendered_fields
from trtspec.cli.output import (
    Progress,
    UserPath,
    completing,
    human_bytes,
    human_seconds,
    json_option,
    print_json,
    print_warning,
)
from trtspec.errors import InputError, Problem, TrtspecError
from trtspec.recipe import Calibration, W4A16AwqQuantization, W8A8SqQuantization
from trtspec.recipe_file import json_schema, parse_section, variants
from trtspec.user_files import user_path

if TYPE_CHECKING:
    from trtspec.plan import Plan
    from trtspec.process import Progress as ChildProgress

_FOLDER = UserPath()

_ENGINES = Path("engines")
_FORMATS = variants(json_schema()["properties"]["quantization"])
_KV_FORMATS = ("none", "fp8", "int8", "nvfp4")


# --------------------------------------------------------------------------- build


@click.command()
@click.argument("recipe", type=_FOLDER)
@click.option("-o", "--engines-dir", type=_FOLDER, default=_ENGINES, help="Folder in which to make NAME.")
@click.option("--dry-run", is_flag=True, help="Print the steps with their commands; do nothing.")
@click.option(
    "--tensorrt-llm",
    "version",
    metavar="VERSION",
    help="For GPU backends: TensorRT-LLM version to render for.",
    show_default="newest release that the recipe admits",
)
@click.option("--gpu", metavar="NAME", help="For GPU backends: check in a dry run what this GPU can run.")
@click.option("--force", is_flag=True, help="Do every step again.")
@click.option(
    "--check", is_flag=True, help="Read an existing engine's files instead of trusting their sizes."
)
@json_option
def build(
    recipe: Path,
    engines_dir: Path,
    dry_run: bool,
    version: str | None,
    gpu: str | None,
    force: bool,
    check: bool,
    as_json: bool,
) -> None:
    """Build a recipe's engine into engines/NAME.

    Only what changed is done again. A build that was interrupted goes on where it stopped; an engine that is
    there is replaced only when the new one is complete. For a GPU backend --dry-run prints the script that
    builds it in NVIDIA's container; a pytorch recipe is also built here, as far as that needs no GPU.
    """
    from trtspec import build as building
    from trtspec.plan import make_plan
    from trtspec.recipe_facts import is_for_gpu
    from trtspec.recipe_file import lint

    readable = lint(recipe).recipe  # what is wrong with it, the plan says with all the rest
    for_gpu = readable is not None and is_for_gpu(readable)
    if not for_gpu and (version is not None or gpu is not None):
        option = "--gpu" if version is None else "--tensorrt-llm"
        raise InputError(f"{option}: goes with the backends tensorrt and pytorch; remove it")
    if dry_run and for_gpu:
        _print_script(recipe, version, gpu, as_json)
        return
    if gpu is not None:
        raise InputError("--gpu: goes with --dry-run; remove it, or check with trtspec lint --gpu")
    if dry_run:
        plan = make_plan(recipe, engines_dir)
        reused = () if force else building.foresee(plan)
        print_json("build", _plan_fields(plan, reused)) if as_json else _print_plan(plan, reused)
        return
    with Progress(quiet=as_json) as progress:
        built = building.build(
            recipe,
            engines_dir,
            force=force,
            check=check,
            version=version,
            say=progress.say,
            on_progress=lambda child: progress(child.step, child.done, child.total),
        )
    for warning in built.warnings:
        print_warning(warning)
    if as_json:
        fields = {
            "engine": str(built.folder),
            "fidelity": built.fidelity,
            "up_to_date": built.up_to_date,
            "reused": list(built.reused),
            "seconds": round(built.seconds, 3),
            "warnings": list(built.warnings),
            "rendered": rendered_fields(built.folder),
            "manifest": built.manifest.model_dump(mode="json", by_alias=True),
        }
        print_json("build", fields)
    elif built.up_to_date:
        click.echo(f"{built.folder} is up to date")
    else:
        size = sum(record.size for record in built.manifest.files.values())
        note = f", {', '.join(built.reused)} re-used" if built.reused else ""
        note += "; acceptance is approximate" if built.fidelity == "approximate" else ""
        click.echo(f"{built.folder}: {human_bytes(size)}, built in {human_seconds(built.seconds)}{note}")
        if (rendered := rendered_fields(built.folder)) is not None:
            click.echo(f"{rendered['label']}; trtspec inspect says how to serve it")


def _print_script(path: Path, version: str | None, gpu: str | None, as_json: bool) -> None:
    """What builds a GPU recipe in NVIDIA's container: a bash script, or its parts as JSON."""
    from trtspec.gpu_plan import render_script_plan
    from trtspec.hardware import find_gpu
    from trtspec.recipe_facts import fidelity
    from trtspec.trtllm.plan import label
    from trtspec.trtllm.script import render_script

    plan = render_script_plan(path, version, None if gpu is None else find_gpu(gpu))
    script = render_script(plan)
    if not as_json:
        click.echo(script, nl=False)
        return
    commands = [
        {"program": command.program, "what": command.what, "argv": list(command.argv)}
        for command in plan.commands
    ]
    fields = {
        "dry_run": True,
        "backend": plan.recipe.backend.kind,
        "tensorrt_llm": plan.version,
        "label": label(plan.version),
        "container": plan.container,
        "fidelity": fidelity(plan.recipe),
        "commands": commands,
        "files": dict(plan.files),
        "serve": list(plan.serve.argv) if plan.serve else None,
        "warnings": list(plan.warnings),
        "notes": list(plan.notes),
        "script": script,
    }
    print_json("build", fields)


def _plan_fields(plan: Plan, reused: tuple[str, ...]) -> dict[str, Any]:
    from trtspec.recipe_facts import fidelity

    steps = [
        {
            "name": step.name,
            "what": step.what,
            "argv": list(step.argv),
            "digest": step.digest,
            "reused": step.name in reused,
            "output": None if step.output is None else str(step.output),
        }
        for step in plan.steps
    ]
    return {
        "dry_run": True,
        "engine": str(plan.folder),
        "work": str(plan.work),
        "fidelity": fidelity(plan.recipe),
        "steps": steps,
    }


def _print_plan(plan: Plan, reused: tuple[str, ...]) -> None:
    from trtspec.recipe_facts import describe_acceptance

    if plan.recipe.speculation.kind != "none":
        click.echo(f"drafting: {plan.recipe.speculation.kind}, {describe_acceptance(plan.recipe)}")
    if len(reused) == len(plan.steps):
        click.echo(f"{plan.folder} is up to date: nothing would be done; --force does all of this again")
    for step in plan.steps:
        click.echo(f"{step.name}: {step.what}")
        if step.name in reused:
            click.echo("    (output of the engine that is there, same inputs)")
        click.echo(f"    $ {shlex.join(step.argv)}" if step.argv else "    (done by trtspec build itself)")
    if len(reused) < len(plan.steps):
        click.echo(f"then seal {plan.work} and rename it to {plan.folder}")


# --------------------------------------------------------------------------- quantize


def _default(mapping: type[BaseModel], key: str) -> Any:
    return mapping.model_fields[key].default


@click.command()
@click.option("--model", "source", required=True, help="Checkpoint folder, sample:NAME or hub id.")
@click.option(
    "--format",
    "kind",
    required=True,
    metavar="FORMAT",
    shell_complete=completing(_FORMATS),
    help=f"Of the weights: one of {', '.join(_FORMATS)}.",
)
@click.option("-o", "--output", required=True, type=_FOLDER, help="Folder to write; must not exist.")
@click.option(
    "--group-size",
    type=int,
    shell_complete=completing(("32", "64", "128")),
    show_default=str(_default(W4A16AwqQuantization, "group_size")),
    help="Weights that share a scale: 32, 64 or 128, for w4a16_awq and w4a8_awq.",
)
@click.option(
    "--alpha",
    type=float,
    show_default=str(_default(W8A8SqQuantization, "alpha")),
    help="SmoothQuant's share of the range that moves into the weights, for w8a8_sq.",
)
@click.option(
    "--kv-cache",
    default="none",
    metavar="FORMAT",
    shell_complete=completing(_KV_FORMATS),
    help=f"Of the KV cache: one of {', '.join(_KV_FORMATS)}.",
)
@click.option("--lm-head", is_flag=True, help="Quantize the output projection too.")
@click.option("--exclude", multiple=True, help="Modules to leave in 16 bit (glob pattern; may be repeated).")
@click.option(
    "--calibration",
    metavar="FILE",
    show_default="texts that ship with trtspec",
    help="JSONL file with text or messages on each line.",
)
@click.option(
    "--num-samples",
    type=int,
    show_default=str(_default(Calibration, "num_samples")),
    help="Texts to calibrate on, drawn from the data; a warning says so when it has fewer.",
)
@click.option(
    "--max-tokens",
    type=int,
    show_default=str(_default(Calibration, "max_tokens")),
    help="Tokens of one row: the texts are joined and cut into rows of this length.",
)
@click.option(
    "--seed",
    type=int,
    show_default=str(_default(Calibration, "seed")),
    help="Decides which texts are drawn.",
)
@json_option
def quantize(source: str, output: Path, as_json: bool, **options: Any) -> None:
    """Quantize a checkpoint with ModelOpt, without a recipe.

    The output is a Hugging Face folder (ModelOpt unified export) with the tokenizer and a
    quantization_report.json.
    """
    from trtspec import process
    from trtspec.build import CHILD_ENVIRONMENT
    from trtspec.folders import refuse_existing, remove_partials
    from trtspec.model_source import resolve_model

    refuse_existing(output)
    quantization = _quantization_json(options)
    folder = resolve_model(source, Path.cwd(), None)
    argv = [sys.executable, "-m", "trtspec.quantize", "--model", str(folder), "--out", str(output)]
    lines: list[str] = []
    with Progress(quiet=as_json) as progress:

        def on_line(line: str) -> None:
            child: ChildProgress | None = process.parse_progress(line)
            if child is not None:
                progress(child.step, child.done, child.total)
            else:
                lines.append(line)

        try:
            process.run([*argv, "--quantization", quantization], env=CHILD_ENVIRONMENT, on_line=on_line)
        except BaseException:
            # The child removes it itself, unless a long step kept it from doing so in time.
            with contextlib.suppress(TrtspecError, OSError):
                remove_partials(output, say=lambda line: None)
            raise
    from trtspec.quantize.report import read_report

    report = read_report(output)
    if as_json:
        print_json("quantize", {"output": str(output), "report": json.loads(report.to_json())})
    else:
        click.echo(report.summary())
        click.echo(output)


def _quantization_json(options: dict[str, Any]) -> str:
    """The options as a recipe's ``quantization`` mapping; InputError names the option."""
    names = {"calibration": "data", "num_samples": "num_samples", "max_tokens": "max_tokens", "seed": "seed"}
    # By identity: 0 equals False, and --alpha 0 is an answer.
    given: dict[str, Any] = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in options.items()
        if value is not None and value is not False and value != ()
    }
    kind, problems = given["kind"], []
    for name in list(given) if kind in _FORMATS else ():
        if name not in _FORMATS[kind]["properties"] and name not in names:
            having = [other for other, schema in _FORMATS.items() if name in schema["properties"]]
            option = "--" + name.replace("_", "-")
            problems.append(
                Problem(f"{option}: goes with --format {' or '.join(having)}, not {kind}; remove it")
            )
            del given[name]
    calibration = {key: given.pop(option) for option, key in names.items() if option in given}
    if "data" in calibration:
        calibration["data"] = str(user_path(calibration["data"]).resolve())
    value = {**given, **({"calibration": calibration} if calibration else {})}
    quantization: Any = None
    try:
        quantization = parse_section("quantization", value)
    except InputError as error:
        options_of = {"kind": "--format", "data": "--calibration"}
        for problem in error.problems:
            key = (problem.key or "").split("[")[0].rpartition(".")[2]
            problems.append(
                Problem(f"{options_of.get(key, '--' + key.replace('_', '-'))}: {problem.message}")
            )
    if problems:
        raise InputError(problems)
    return json.dumps(quantization.model_dump(mode="json"))
