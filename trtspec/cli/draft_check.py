"""``trtspec draft check`` and ``convert``: heads against their target, and into another tool's layout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtspec.cli.output import (
    Progress,
    UserPath,
    human_bytes,
    json_option,
    print_json,
    print_warning,
    problem_fields,
)
from trtspec.errors import EXIT_BAD_INPUT, InputError, Problem

if TYPE_CHECKING:
    from trtspec.draft.convert import Conversion
    from trtspec.heads_check import HeadsCheck, Target

_KINDS = ("medusa", "eagle", "eagle3")
_BACKENDS = ("embedded", "tensorrt", "pytorch")
_LAYOUTS = ("tensorrt", "original", "modelopt", "speculators", "specforge")
_HASHED_AT_ONCE_BYTES = 4_000_000_000
_MODEL_HELP = "The target: a folder, sample:NAME or a hub id."


@click.command()
@click.argument("heads", type=UserPath())
@click.option("--model", metavar="DIR|ID", help=_MODEL_HELP + "  [default: check the heads alone]")
@click.option("--kind", type=click.Choice(_KINDS), help="What they are meant to be.")
@click.option(
    "--backend", type=click.Choice(_BACKENDS), help="What keeps them from this backend is an error."
)
@click.option("--hash", "hash_all", is_flag=True, help="Compare the files of a target above 4 GB too.")
@click.option("--strict", is_flag=True, help="Warnings are errors.")
@json_option
def check(
    heads: Path, model: str | None, kind: Any, backend: Any, hash_all: bool, strict: bool, as_json: bool
) -> int:
    """Hold draft heads against their target before anything runs.

    HEADS is a folder of Medusa, EAGLE or EAGLE-3 heads as ModelOpt, the authors' code, speculators or
    SpecForge write it. Reads headers, never weights; every problem comes at once, with exit code 2.
    """
    from trtspec.heads_check import check_heads

    target = None if model is None else _target(model, heads, hash_all, quiet=as_json)
    found = check_heads(heads, target, kind)
    problems = list(found.problems)
    if backend is not None:
        problems += found.obstacles.get(backend, ())
    if strict:
        problems += found.warnings
    warnings = [] if strict else list(found.warnings)
    if model is not None and target is not None and target.digest is None and _is_recorded(found):
        message = "its files are not compared with those that the heads were trained for; --hash does"
        warnings.append(Problem(message, file=str(target.folder)))
    if as_json:
        print_json("draft-check", _fields(heads, found, target, problems, warnings))
        return EXIT_BAD_INPUT if problems else 0
    for warning in warnings:
        print_warning(str(warning))
    if problems:
        raise InputError(problems)
    _print(heads, found, target)
    return 0


def _target(model: str, heads: Path, hash_all: bool, *, quiet: bool) -> Target:
    from trtspec.heads_check import read_target
    from trtspec.heads_layout import RECORD
    from trtspec.model_source import resolve_model

    folder = resolve_model(model, Path.cwd())
    digest = None
    if (heads / RECORD).is_file():
        from trtspec.artifact import hash_source
        from trtspec.plan_inputs import model_files

        files = model_files(folder)
        if hash_all or sum(path.stat().st_size for path in files) <= _HASHED_AT_ONCE_BYTES:
            with Progress(quiet=quiet) as progress:
                progress("hashing the target")
                digest = hash_source(folder, files).digest
    return read_target(folder, model, digest)


def _is_recorded(found: HeadsCheck) -> bool:
    return found.heads is not None and bool(found.heads.record)


def _fields(
    folder: Path, found: HeadsCheck, target: Target | None, problems: list[Problem], warnings: list[Problem]
) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "heads": str(folder),
        "model": None if target is None else str(target.folder),
        "ok": not problems,
        "problems": [problem_fields(problem) for problem in problems],
        "warnings": [problem_fields(warning) for warning in warnings],
    }
    if found.heads is None:
        return {**fields, "kind": None, "layout": None, "runs_on": [], "obstacles": {}}
    return {
        **fields,
        "kind": found.heads.kind,
        "layout": found.heads.layout,
        "base_model": found.heads.base_model,
        **_sizes(found),
        "runs_on": list(found.runs_on),
        "obstacles": {
            backend: [problem_fields(problem) for problem in listed]
            for backend, listed in found.obstacles.items()
            if listed
        },
    }


def _sizes(found: HeadsCheck) -> dict[str, Any]:
    from trtspec.heads_shape import MedusaShape

    heads, shape = found.heads, found.shape
    assert heads is not None
    weights = [part for name, part in heads.tensors.items() if name not in ("d2t", "t2d")]
    sizes: dict[str, Any] = {
        "dtypes": sorted({part.dtype for part in weights}),
        "num_bytes": sum(part.num_bytes for part in weights),
    }
    if isinstance(shape, MedusaShape):
        depths = [len(blocks) for blocks in shape.blocks]
        return {**sizes, "num_heads": len(depths), "num_layers": max(depths, default=0), "hydra": heads.hydra}
    if shape is None:
        return sizes
    return {
        **sizes,
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "hidden_layers": None if shape.hidden_layers is None else list(shape.hidden_layers),
    }


def _print(folder: Path, found: HeadsCheck, target: Target | None) -> None:
    heads, sizes = found.heads, _sizes(found)
    assert heads is not None
    if heads.kind == "medusa":
        kind = "Hydra" if sizes["hydra"] else "Medusa"
        what = f"{sizes['num_heads']} {kind} heads of {sizes['num_layers']} blocks"
    else:
        what = (
            f"{'EAGLE-3' if heads.kind == 'eagle3' else 'EAGLE-1/2'} head, hidden size {sizes['hidden_size']}"
        )
        if sizes["draft_vocab_size"] != sizes["vocab_size"]:
            what += f", drafts {sizes['draft_vocab_size']} of {sizes['vocab_size']} tokens"
    size = f"{' and '.join(sizes['dtypes'])}, {human_bytes(sizes['num_bytes'])}"
    click.echo(f"{folder}: {what}, layout {heads.layout}, {size}")
    if target is None:
        click.echo("sound for themselves; --model says whether they fit a target")
    else:
        click.echo(f"fit {target.names[-1]}")
    for backend, obstacles in found.obstacles.items():
        if not obstacles:
            # What was not run with TensorRT-LLM is not said to run.
            outcome = "runs them" if backend == "embedded" else "finds what it looks for"
            click.echo(f"  {backend:<9} {outcome}")
        for obstacle in obstacles:
            where = f"{obstacle.key}: " if obstacle.key else ""
            click.echo(f"  {backend:<9} not: {where}{obstacle.message}")


@click.command()
@click.argument("heads", type=UserPath())
@click.option("-o", "--output", type=UserPath(), required=True, metavar="DIR", help="The new folder.")
@click.option(
    "--to",
    "layout",
    type=click.Choice(_LAYOUTS),
    default="tensorrt",
    help="tensorrt runs on all backends here.",
)
@click.option("--model", metavar="DIR|ID", help=_MODEL_HELP + " Needed where a layout wants parts of it.")
@click.option("--force", is_flag=True, help="Replace DIR.")
@click.option("--dry-run", is_flag=True, help="Print what would be written.")
@json_option
def convert(
    heads: Path, output: Path, layout: Any, model: str | None, force: bool, dry_run: bool, as_json: bool
) -> None:
    """Write draft heads in the layout that a backend or another tool wants.

    Tensors are renamed, bit for bit; what the layout cannot say is refused by name. tensorrt: TensorRT-LLM's
    engines and LLM API, and the embedded engine. speculators: vLLM. specforge: SGLang. original: the code of
    the papers' authors.
    """
    from trtspec.draft.convert import plan_conversion, write_conversion
    from trtspec.folders import refuse_existing, refuse_replacing
    from trtspec.heads_layout import is_heads_file

    target = None if model is None else _target(model, heads, False, quiet=as_json)
    if force:
        refuse_replacing(output, is_heads_file, spare=[heads] if target is None else [heads, target.folder])
    else:
        refuse_existing(output)
    conversion = plan_conversion(heads, layout, target)
    if not dry_run:
        write_conversion(conversion, output, replace=force)
    if as_json:
        print_json("draft-convert", _conversion_fields(conversion, output, dry_run))
        return
    would = "would write " if dry_run else ""
    files = f"config.json and {conversion.weights_file}"
    count = f"{len(conversion.tensors)} tensors, {human_bytes(conversion.num_bytes)}"
    click.echo(f"{would}{output}: {files}, layout {layout} ({count})")
    renamed = conversion.renamed
    if dry_run:
        for before, after in renamed.items():
            click.echo(f"  {before} -> {after}")
    elif renamed:
        click.echo(f"  {len(renamed)} tensors renamed; --dry-run lists them")
    for name in conversion.added:
        click.echo(f"  added {name}")
    for name in conversion.left_out:
        click.echo(f"  left out {name}")
    for note in conversion.notes:
        print_warning(note)


def _conversion_fields(conversion: Conversion, output: Path, dry_run: bool) -> dict[str, Any]:
    return {
        "heads": str(conversion.heads.folder),
        "output": str(output),
        "dry_run": dry_run,
        "kind": conversion.heads.kind,
        "from": conversion.heads.layout,
        "to": conversion.layout,
        "weights_file": conversion.weights_file,
        "tensors": len(conversion.tensors),
        "num_bytes": conversion.num_bytes,
        "renamed": conversion.renamed,
        "added": list(conversion.added),
        "left_out": list(conversion.left_out),
        "notes": list(conversion.notes),
        "config": dict(conversion.config),
    }
