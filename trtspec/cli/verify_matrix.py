"""``trtspec verify --matrix RECIPE``: build each format, measure each drafter on it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec.cli.output import Progress
from trtspec.errors import InputError, Problem

if TYPE_CHECKING:
    from trtspec.artifact import Artifact
    from trtspec.recipe import Recipe, Speculation
    from trtspec.verify.report import Report


def measure_matrix(
    recipe_path: Path,
    folder: Path | None,
    *,
    draft: str | None,
    heads: tuple[Path, ...],
    quick: bool,
    progress: Progress,
) -> Report:
    """The report of the matrix of the recipe at ``recipe_path``. ``folder`` (default
    ``engines/.matrix-NAME``) keeps engines and measured parts, so that a run that was stopped goes on there.

    Raises what lint and build raise; InputError for a recipe of a GPU backend.
    """
    from trtspec.artifact import machine_summary, tool_versions, utc_now
    from trtspec.plan import ENGINES_DIR
    from trtspec.recipe_facts import fidelity, is_for_gpu
    from trtspec.recipe_file import load_recipe, recipe_digest
    from trtspec.verify.gates import raw_as_records
    from trtspec.verify.matrix import QUICK, MatrixSettings, run_matrix
    from trtspec.verify.matrix_verdict import check_matrix
    from trtspec.verify.report import Report

    began, created = time.monotonic(), utc_now()
    base = absolute(load_recipe(recipe_path), recipe_path.resolve().parent)
    if is_for_gpu(base):
        found = base.backend.kind
        message = f"found {found}; the matrix runs on embedded engines: trtspec migrate --to embedded"
        raise InputError(Problem(message, file=str(recipe_path), key="backend.kind"))
    place = folder or ENGINES_DIR / f".matrix-{base.name}"
    own = getattr(base.speculation, "heads", None)
    places = tuple(dict.fromkeys([*heads, *([Path(own)] if own and Path(own).is_dir() else [])]))
    for one in places:
        if not one.is_dir():
            raise InputError(Problem("no such folder of heads", file=str(one)))
    settings = QUICK if quick else MatrixSettings()
    matrix, plain = run_matrix(
        base,
        place,
        settings,
        lambda recipe: _built(recipe, place, progress),
        draft=_draft(base, draft),
        heads=places,
        on_progress=progress,
    )
    return Report(
        engine=str(place),
        recipe_name=base.name,
        recipe_digest=recipe_digest(base),
        recipe=base.model_dump(mode="json"),
        source_digest=plain.manifest.source.digest,
        created=created,
        argv=("trtspec", *sys.argv[1:]),
        tools=tool_versions(),
        built_with=plain.manifest.tools,
        machine=machine_summary(),
        settings={"matrix": vars(settings), "heads": [str(one) for one in places], "draft": draft},
        seconds=round(time.monotonic() - began, 1),
        checks=tuple(map(raw_as_records, check_matrix(matrix, base))),
        notes=(
            "losslessness here: drafts as they come; verify ENGINE offers near misses too and proves more",
        ),
        fidelity=fidelity(base),
    )


def _draft(base: Recipe, named: str | None) -> Speculation | None:
    from trtspec.recipe import DraftModelSpeculation

    if named is not None:
        return DraftModelSpeculation.model_validate({"kind": "draft_model", "model": {"source": named}})
    return base.speculation if base.speculation.kind == "draft_model" else None


def _built(recipe: Recipe, place: Path, progress: Progress) -> Artifact:
    """Build ``recipe`` below ``place``, or take what is there."""
    from trtspec.artifact import open_artifact
    from trtspec.build import build
    from trtspec.user_files import write_user_file

    place.mkdir(parents=True, exist_ok=True)
    file = place / f"{recipe.name}.yaml"
    # JSON is YAML; written only if it changed, so that a build that is up to date stays so.
    content = (json.dumps(recipe.model_dump(mode="json"), indent=1) + "\n").encode()
    if not file.is_file() or file.read_bytes() != content:
        write_user_file(file, content)
    built = build(file, place / "engines", say=lambda line: None)
    # A build that is up to date looks at sizes only; a verdict is about the bytes that were sealed.
    return open_artifact(built.folder, check_hashes=True)


def absolute(recipe: Recipe, folder: Path) -> Recipe:
    """``recipe`` with what it names beside its file spelled in full, so that it means the same elsewhere."""

    def full(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: full(item) for key, item in value.items()}
        if isinstance(value, str) and value and "\n" not in value and len(value) < 1024:
            path = folder / value
            return str(path) if not Path(value).is_absolute() and path.exists() else value
        return value

    fields = recipe.model_dump(mode="json")
    for key in ("model", "quantization", "speculation"):
        fields[key] = full(fields[key])
    return type(recipe).model_validate(fields)
