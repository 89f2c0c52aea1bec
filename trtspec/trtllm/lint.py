"""``trtspec lint`` for GPU backends: the rules of each TensorRT-LLM version that a recipe means."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trtspec.errors import InputError, Problem
from trtspec.hardware import Gpu
from trtspec.model_source import find_model
from trtspec.recipe import DraftModelSpeculation, Model, PytorchBackend, Recipe, TensorrtBackend
from trtspec.recipe_file import Lint
from trtspec.recipe_model import UNCHECKED
from trtspec.recipe_yaml import dotted, read_bytes, read_document
from trtspec.trtllm.checkpoint import Checkpoint, known_checkpoint, read_checkpoint
from trtspec.trtllm.export import check_export
from trtspec.trtllm.facts import load_facts, versions_for
from trtspec.trtllm.rules import Finding, check
from trtspec.versions import parse_range


def models_of(recipe: Recipe, base: Path) -> tuple[Checkpoint | None, Checkpoint | None]:
    """(target, draft) as they are on this machine, else as the table of known models has them, else None.

    Relative folders start at ``base``. A folder whose JSON cannot be read counts as not known; ``lint`` and
    ``build`` report it elsewhere.
    """
    speculation = recipe.speculation
    draft = speculation.model if isinstance(speculation, DraftModelSpeculation) else None
    return _checkpoint(recipe.model, base), None if draft is None else _checkpoint(draft, base)


def _checkpoint(model: Model, base: Path) -> Checkpoint | None:
    folder = find_model(model.source, base, model.revision)
    if folder is None:
        return known_checkpoint(model.source)
    try:
        return read_checkpoint(folder)
    except InputError:
        return None


def with_gpu_rules(
    result: Lint,
    path: str | Path,
    *,
    version: str | None = None,
    gpu: Gpu | None = None,
    export: Path | None = None,
) -> Lint:
    """``result`` with what TensorRT-LLM's rules say of the recipe in the file ``path``.

    Checked for ``version``, else for every known version in the recipe's range; a finding that does not hold
    for all of them names those it holds for. Recipes of the embedded backend, and those with errors, come
    back as they are. ``export``: a quantized checkpoint made elsewhere, to be held against recipe and source.
    Raises InputError for a version without a table and for an export whose JSON files cannot be read.
    """
    recipe = result.recipe
    if recipe is None:
        return result
    if not isinstance(recipe.backend, TensorrtBackend | PytorchBackend):
        if export is not None:
            raise InputError(f"an export is held against recipes for TensorRT-LLM; {result.file} is embedded")
        return result
    lines = read_document(_content(path), result.file)

    def problem(key: tuple[str | int, ...], message: str) -> Problem:
        return Problem(message, result.file, lines.line_of(key), dotted(key) or None)

    asked = parse_range(recipe.backend.version)
    versions = (
        (load_facts(version).version,) if version is not None else versions_for(recipe.backend.kind, asked)
    )
    if not versions:
        known = ", ".join(versions_for(recipe.backend.kind, parse_range(">=0")))
        message = (
            f"no version with a table lies in {asked}; known with {recipe.backend.kind}: {known}; widen it "
            f"[trtllm-version]"
        )
        return replace(
            result, recipe=None, errors=(problem(("backend", "version"), message),), warnings=(), notes=()
        )
    target, draft = models_of(recipe, Path(path).resolve().parent)
    found = {v: check(recipe, v, gpu=gpu, checkpoint=target, draft=draft) for v in versions}
    told: dict[str, list[Problem]] = {"error": list(result.errors), "warning": list(result.warnings)}
    told["note"] = [_with_known_sizes(note, target, draft) for note in result.notes]
    for finding, where in _joined(found):
        holds = "" if where == versions else f"; TensorRT-LLM {', '.join(where)}"
        told[finding.severity].append(problem(finding.path, f"{finding.message} [{finding.rule}{holds}]"))
    if export is not None:
        source = find_model(recipe.model.source, Path(path).resolve().parent, recipe.model.revision)
        for shown in check_export(
            export,
            source=source,
            kind=recipe.backend.kind,
            version=versions[-1],
            asked=recipe.quantization,
        ):
            tagged = replace(shown.problem, message=f"{shown.problem.message} [{shown.rule}]")
            told[shown.severity].append(tagged)
    told["note"].append(
        problem(
            ("backend", "version"),
            f"checked against the tables of TensorRT-LLM {', '.join(versions)}"
            f"{'' if gpu is None else f' on {gpu.name} (sm{gpu.sm})'}; nothing was run",
        )
    )
    errors, warnings, notes = (
        tuple(sorted(told[severity], key=lambda item: item.line or 0))
        for severity in ("error", "warning", "note")
    )
    return replace(result, recipe=None if errors else recipe, errors=errors, warnings=warnings, notes=notes)


def _with_known_sizes(note: Problem, target: Checkpoint | None, draft: Checkpoint | None) -> Problem:
    """A model that is not here has been checked all the same where the table of known models has it."""
    known = {"model.source": target, "speculation.model.source": draft}.get(note.key or "")
    if known is None or known.folder is not None:
        return note
    sizes = "its sizes are those of the table of known models; its vocabulary was not checked"
    return replace(note, message=note.message.replace(UNCHECKED, sizes))


def _content(path: str | Path) -> bytes:
    raw = read_bytes(path)
    return raw if isinstance(raw, bytes) else b""  # gone since it was read: line 1 for everything


def _joined(found: dict[str, list[Finding]]) -> list[tuple[Finding, tuple[str, ...]]]:
    """Each finding once, as its first version says it, with the versions that say it."""
    joined: dict[tuple[object, ...], tuple[Finding, list[str]]] = {}
    for version, findings in found.items():
        for finding in findings:
            same = (finding.rule, finding.path, finding.message.replace(version, "VERSION"))
            joined.setdefault(same, (finding, []))[1].append(version)
    return [(finding, tuple(versions)) for finding, versions in joined.values()]
