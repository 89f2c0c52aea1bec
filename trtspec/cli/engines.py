"""``trtspec list`` and ``inspect``: looking at built engines."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtspec.cli.output import (
    Progress,
    UserPath,
    human_bytes,
    human_seconds,
    json_option,
    print_json,
    problem_fields,
)
from trtspec.errors import EXIT_BAD_INPUT, InputError, Problem

if TYPE_CHECKING:
    from trtspec.artifact import Artifact
    from trtspec.gpu_plan import Rendered

_FOLDER = UserPath()
_ENGINES = Path("engines")


def rendered_fields(folder: Path) -> dict[str, Any] | None:
    """What a built engine says of its TensorRT-LLM files; None for the embedded backend."""
    from trtspec.artifact import open_artifact

    rendered = _rendered(open_artifact(folder))
    return None if rendered is None else asdict(rendered)


def _rendered(artifact: Artifact) -> Rendered | None:
    from trtspec.recipe_facts import is_for_gpu

    if not is_for_gpu(artifact.recipe):
        return None
    from trtspec.gpu_plan import read_rendered  # TensorRT-LLM's tables cost time that others need not

    return read_rendered(artifact)


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
    from trtspec.recipe_facts import describe_acceptance, fidelity, is_for_gpu

    recipe = artifact.recipe
    not_run = ", not run here" if is_for_gpu(recipe) else ""
    drafting: str = "no speculation" if recipe.speculation.kind == "none" else recipe.speculation.kind
    if fidelity(recipe) == "approximate":
        drafting += f", {describe_acceptance(recipe)}"
    backend = f"{recipe.backend.kind} {recipe.backend.dtype}"
    return ", ".join([backend, describe_quantization(recipe.quantization), drafting]) + not_run


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
            "rendered": rendered_fields(engine),
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
    rendered = _rendered(artifact)
    if rendered is not None:
        from trtspec.gpu_plan import how_to_serve

        rows.append(("TensorRT-LLM", rendered.label))
        if rendered.serve:
            rows.append(("container", f"{rendered.container} of NVIDIA's registry, TENSORRT_LLM_IMAGE below"))
            rows.append(("serve it with", how_to_serve(rendered, artifact.folder)))
        rows.append(("with Triton", f"trtspec serve {artifact.folder} --dry-run"))
        rows += [("warning", text) for text in rendered.warnings]
        rows += [("note", text) for text in rendered.notes]
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
