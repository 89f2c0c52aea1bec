"""A recipe from what TensorRT-LLM left behind: an engine's ``config.json`` or a file of LLM API options.

:func:`import_file` accounts for every key of the file exactly once: *used* (for which key of the recipe), *no
counterpart* (TensorRT-LLM's own business, or lost with the reason) or *unknown* (in no table of
:mod:`trtspec.trtllm.facts`). What the file cannot say is asked for, all of it at once: no engine names its
checkpoint or its heads. What is assumed instead is listed with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trtspec.errors import InputError, Problem
from trtspec.recipe import Recipe
from trtspec.recipe_yaml import read_document, visible
from trtspec.trtllm.account import headed_yaml
from trtspec.trtllm.import_engine import import_engine
from trtspec.trtllm.import_options import import_options
from trtspec.trtllm.imported import Flags, ImportWork, Use, describe_use, shown
from trtspec.user_files import parse_json, read_user_bytes, shown_path

MAX_BYTES = 16_000_000
"""An engine's config.json has ten thousand bytes."""


@dataclass(frozen=True)
class Imported:
    """``version``: of TensorRT-LLM, or those that know every key. ``assumed``: (recipe's key, value, why)."""

    kind: Literal["engine", "LLM API options"]
    version: str
    recipe: Recipe
    uses: tuple[Use, ...]
    assumed: tuple[tuple[str, Any, str], ...]


def import_file(
    path: Path,
    *,
    model: str | None = None,
    heads: str | None = None,
    draft_model: str | None = None,
    version: str | None = None,
    name: str | None = None,
) -> Imported:
    """The recipe of an engine (its folder or ``config.json``) or of an options file.

    ``model``, ``heads``, ``draft_model``: checkpoints that the file does not name (or other ones than it
    names). ``version``: of TensorRT-LLM, one with a table, where the file does not say or is mistaken. Raises
    InputError with everything that is wrong or lacking, MissingError without permission.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.exists() and path.is_dir():
        ours = path / "recipe.yaml"
        remedy = f"its recipe is {shown_path(ours)}" if ours.is_file() else "name its folder or file"
        message = f"no config.json, so not the folder of a TensorRT-LLM engine; {remedy}"
        raise InputError(Problem(message, file=shown_path(path)))
    data = _read(file)
    work = ImportWork(shown_path(file), Flags(model, heads, draft_model))
    work.set("name", name if name is not None else _name_of(path))
    kind: Literal["engine", "LLM API options"]
    if "pretrained_config" in data and "build_config" in data:
        kind, known = "engine", import_engine(work, data, version, path.parent)
    else:
        _refuse_other_files(data, work.file)
        kind, known = "LLM API options", import_options(work, data, version)
    recipe = work.recipe()
    return Imported(kind, known, recipe, tuple(work.uses.values()), tuple(work.assumed))


def _read(file: Path) -> dict[str, Any]:
    raw = read_user_bytes(file, max_bytes=MAX_BYTES)
    if raw.lstrip()[:1] == b"{":
        try:
            data = parse_json(raw)
        except ValueError as error:
            raise InputError(Problem(f"is not JSON: {error}", file=shown_path(file))) from None
    else:
        document = read_document(raw, shown_path(file))
        if document.problems:
            raise InputError(document.problems)
        data = document.data
    if not isinstance(data, dict):
        message = "found no mapping at the top; an engine's config.json or LLM API options are needed"
        raise InputError(Problem(message, file=shown_path(file)))
    return data


def _refuse_other_files(data: Mapping[str, Any], file: str) -> None:
    if "architectures" in data:
        message = (
            "is a Hugging Face model's config.json, not an engine's; start with: trtspec init --model FOLDER"
        )
    elif "architecture" in data and "dtype" in data:
        message = (
            "is a TensorRT-LLM checkpoint (before trtllm-build): it has neither limits nor a way of "
            "drafting; name the engine built from it, or start with: trtspec init --backend tensorrt"
        )
    elif isinstance(data.get("backend"), dict):
        message = "is a recipe already; trtspec migrate moves it to another backend"
    else:
        return
    raise InputError(Problem(message, file=file))


def _name_of(path: Path) -> str:
    """A recipe's name from that of the engine's folder or the file."""
    place = path.parent if path.name == "config.json" else path
    stem = place.resolve().name if place.is_dir() else place.stem
    return re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-._")[:63].rstrip("-._") or "imported"


def imported_yaml(imported: Imported, file: str) -> str:
    """The recipe as YAML, headed by what was assumed, left out and not known."""
    origin = f"{imported.kind}, TensorRT-LLM {imported.version}"
    head = [f"Made from {visible(file, limit=200)} ({origin}) by trtspec import."]
    head += [f"assumed: {key} {shown(value)}: {why}" for key, value, why in imported.assumed]
    for use in imported.uses:
        if use.outcome == "unknown":
            head.append(f"unknown: {describe_use(use)}")
        elif use.outcome == "no counterpart" and use.why:
            head.append(f"left out: {describe_use(use)}")
    return headed_yaml(head, imported.recipe)
