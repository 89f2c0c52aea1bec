"""``trtspec build``, ``quantize``, ``list`` and ``inspect``: making engines and looking at them."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from pydantic import BaseModel

from trtspec.cli.output import (
    Progress,
    UserPath,
    completing,
    human_bytes,
    human_seconds,
    json_option,
    print_json,
    print_warning,
    problem_fields,
)
from trtspec.errors import EXIT_BAD_INPUT, InputError, Problem, TrtspecError
from trtspec.recipe import Calibration, W4A16AwqQuantization, W8A8SqQuantization
from trtspec.recipe_file import json_schema, parse_section, variants
from trtspec.user_files import user_path

if TYPE_CHECKING:
    from trtspec.artifact import Artifact
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
@click.option("--force", is_flag=True, help="Do every step again.")
@click.option(
    "--check", is_flag=True, help="Read an existing engine's files instead of trusting their sizes."
)
@json_option
def build(recipe: Path, engines_dir: Path, dry_run: bool, force: bool, check: bool, as_json: bool) -> None:
    """Build a recipe's engine into engines/NAME.

    Only what changed is done again. A build that was interrupted goes on where it stopped; an engine that is
    there is replaced only when the new one is complete.
    """
    from trtspec import build as building
    from trtspec.plan import make_plan

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


# --------------------------------------------------------------------------- list, inspect


@click.command("list")
@click.option("--engines-dir", type=_FOLDER, default=_ENGINES, help="Folder to look in.")
@json_option
def list_engines(engines_dir: Path, as_json: bool) -> None:
    """List built engines: state, size, age and what their recipes say."""
    from trtspec.artifact import list_artifacts

    entries = list_artifacts(engines_dir)
    if as_json:
        listed = [
            {
                "engine": str(entry.folder),
                "state": entry.state,
                "size_bytes": entry.artifact.size_bytes if entry.artifact else None,
                "created": entry.artifact.manifest.created if entry.artifact else None,
                "recipe": _summary(entry.artifact) if entry.artifact else None,
                "problem": entry.problem or None,
            }
            for entry in entries
        ]
        print_json("list", {"engines_dir": str(engines_dir), "engines": listed})
        return
    if not entries:
        click.echo(f"no engines in {engines_dir}; make one with: trtspec build RECIPE")
        return
    rows = [
        (
            entry.folder.name,
            entry.state,
            human_bytes(entry.artifact.size_bytes) if entry.artifact else "",
            _age(entry.artifact.manifest.created) if entry.artifact else "",
            _summary(entry.artifact) if entry.artifact else entry.problem,
        )
        for entry in entries
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        click.echo("  ".join([*cells, row[4]]).rstrip())


def _summary(artifact: Artifact) -> str:
    """``embedded bfloat16, w4a16_awq (groups of 64), KV cache fp8, ngram``; how drafts are accepted is said
    where that changes the output law."""
    from trtspec.plan import describe_quantization
    from trtspec.recipe_facts import describe_acceptance, fidelity

    recipe = artifact.recipe
    drafting = "no speculation" if recipe.speculation.kind == "none" else recipe.speculation.kind
    if fidelity(recipe) == "approximate":
        drafting += f", {describe_acceptance(recipe)}"
    backend = f"{recipe.backend.kind} {recipe.backend.dtype}"
    return ", ".join([backend, describe_quantization(recipe.quantization), drafting])


def _age(created: str) -> str:
    seconds = (datetime.now(timezone.utc) - datetime.fromisoformat(created)).total_seconds()
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit} ago"
    return "just now"


@click.command()
@click.argument("engine", type=_FOLDER)
@click.option("--check", is_flag=True, help="Read every file and compare it with its sealed hash.")
@json_option
def inspect(engine: Path, check: bool, as_json: bool) -> int:
    """Show what an engine holds: recipe, sizes, quantization error by layer, digests, versions."""
    from trtspec.artifact import file_problems, open_artifact, read_manifest
    from trtspec.recipe_facts import fidelity

    problems: list[Problem] = []
    if check:
        manifest = read_manifest(engine)
        with Progress(quiet=as_json) as progress:
            problems = file_problems(
                engine,
                manifest,
                check_hashes=True,
                progress=lambda done, total: progress("reading", done, total),
            )
        if problems and not as_json:
            raise InputError(problems)
    if problems:
        fields = [problem_fields(problem) for problem in problems]
        print_json("inspect", {"engine": str(engine), "state": "damaged", "problems": fields})
        return EXIT_BAD_INPUT
    artifact = open_artifact(engine)
    quantization = _quantization_fields(artifact)
    if as_json:
        fields_ = {
            "engine": str(engine),
            "state": "sealed",
            "hashes_checked": check,
            "size_bytes": artifact.size_bytes,
            "recipe": artifact.recipe.model_dump(mode="json"),
            "fidelity": fidelity(artifact.recipe),
            "quantization": quantization,
            "manifest": artifact.manifest.model_dump(mode="json", by_alias=True),
        }
        print_json("inspect", fields_)
        return 0
    _print_inspection(artifact, quantization, check)
    return 0


def _quantization_fields(artifact: Artifact) -> dict[str, Any] | None:
    """Sizes and per-layer error from the quantization report; None when nothing is quantized."""
    from trtspec.artifact import REPORT_FILE

    if not (artifact.target_dir / REPORT_FILE).is_file():
        return None
    from trtspec.quantize.report import read_report

    report = read_report(artifact.target_dir)
    measured = sorted((layer.sqnr_db, layer.module) for layer in report.layers if layer.sqnr_db is not None)
    return {
        "quant_algo": report.quant_algo,
        "kv_cache_quant_algo": report.kv_cache_quant_algo,
        "weight_bytes_before": report.bytes_before,
        "weight_bytes_after": report.bytes_after,
        "layers": len(report.layers),
        "sqnr_db_median": measured[len(measured) // 2][0] if measured else None,
        "sqnr_db_worst": [{"module": module, "sqnr_db": sqnr} for sqnr, module in measured[:3]],
        "calibration": asdict(report.calibration),
        "calibrated_on": report.calibration.describe(),
        "warnings": report.warnings,
    }


def _print_inspection(artifact: Artifact, quantization: dict[str, Any] | None, checked: bool) -> None:
    manifest, recipe = artifact.manifest, artifact.recipe
    files = manifest.files
    sizes = {
        part: sum(record.size for name, record in files.items() if name.startswith(f"{part}/"))
        for part in ("target", "baseline")
    }
    rows = [
        ("engine", f"{artifact.folder} (sealed{', every file read and unchanged' if checked else ''})"),
        ("recipe", f"{recipe.name}: {_summary(artifact)}"),
        ("model", f"{recipe.model.source} (built from {manifest.source.path})"),
        (
            "built",
            f"{manifest.created} ({_age(manifest.created)}) on {manifest.machine.get('processor', '?')}",
        ),
        ("steps", ", ".join(f"{step.name} {human_seconds(step.seconds)}" for step in manifest.steps)),
    ]
    if sizes["target"]:
        rows.append(("target", human_bytes(sizes["target"])))
    rows.append(
        ("baseline", human_bytes(sizes["baseline"]) + ("" if sizes["target"] else ", also the target"))
    )
    if quantization:
        before, after = quantization["weight_bytes_before"], quantization["weight_bytes_after"]
        rows.append(("weights", f"{human_bytes(before)} -> {human_bytes(after)} ({after / before:.0%})"))
        if quantization["sqnr_db_worst"]:
            worst = ", ".join(
                f"{layer['module']} {layer['sqnr_db']:.1f}" for layer in quantization["sqnr_db_worst"]
            )
            median = f"median {quantization['sqnr_db_median']:.1f} over {quantization['layers']} layers"
            rows.append(("SQNR dB", f"{median}, worst {worst}"))
        rows.append(("calibrated on", quantization["calibrated_on"]))
        rows += [("warning", warning) for warning in quantization["warnings"]]
    rows += [
        ("recipe digest", manifest.recipe_digest),
        ("source digest", manifest.source.digest),
    ]
    if manifest.calibration_digest:
        rows.append(("texts digest", f"{manifest.calibration_digest} (of the file of calibration texts)"))
    if quantization:
        digest = quantization["calibration"]["digest"]
        rows.append(("rows digest", f"{digest} (of the token ids made from them, as in the report)"))
    rows += [
        ("versions", ", ".join(f"{name} {version}" for name, version in manifest.tools.items())),
    ]
    for name, value in rows:
        click.echo(f"{name:<14}{value}")
