"""A recipe for a GPU backend on a machine without TensorRT-LLM: what is rendered, and where it goes.

:func:`render_script_plan` renders what a user runs in NVIDIA's container. A ``pytorch`` recipe can also be
*built* here: its weights are quantized on this machine, and :func:`engine_files` are sealed beside them, with
paths below :data:`ENGINE_MOUNT`, where the container sees the engine folder. What was never run says so.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from trtspec.artifact import BASELINE_DIR, DRAFT_DIR, HEADS_DIR, TRTLLM_DIR, Artifact
from trtspec.errors import InputError, MissingError, Problem
from trtspec.hardware import Gpu
from trtspec.model_source import find_model
from trtspec.recipe import MedusaSpeculation, PytorchBackend, Recipe, TensorrtBackend
from trtspec.recipe_file import lint
from trtspec.trtllm.draft_weights import inspect_draft_weights
from trtspec.trtllm.lint import models_of, with_gpu_rules
from trtspec.trtllm.plan import Paths, TrtllmPlan, choose_version, label, plan_commands
from trtspec.user_files import read_user_json

ENGINE_MOUNT = "/engine"
"""Where the container sees the engine folder: the paths in a built engine's files begin with it."""
RENDERED_FILE = "rendered.json"
"""What was rendered, in the engine's folder ``trtllm``."""


@dataclass(frozen=True)
class Rendered:
    """What a built engine says of its TensorRT-LLM files."""

    version: str
    label: str
    container: str
    serve: tuple[str, ...]
    """``trtllm-serve`` with its arguments, for a container that sees the engine at :data:`ENGINE_MOUNT`."""
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def is_for_gpu(recipe: Recipe) -> bool:
    return isinstance(recipe.backend, TensorrtBackend | PytorchBackend)


def render_script_plan(path: Path, version: str | None = None, gpu: Gpu | None = None) -> TrtllmPlan:
    """The plan of the recipe in the file ``path``, with a script's variables as paths.

    The models need not be here; what is known of them is used. Raises InputError with file and line for what
    the rules refuse, and for what ``version`` (None: the newest release that the recipe admits) has no words
    for.
    """
    recipe, version = _checked(path, version, gpu)
    return _planned(recipe, path, version, Paths(), gpu)


def engine_plan(path: Path, version: str | None = None) -> TrtllmPlan:
    """The plan of the ``pytorch`` recipe in the file ``path``, with paths inside a built engine."""
    recipe, version = _checked(path, version, None)
    paths = Paths(
        model=f"{ENGINE_MOUNT}/{BASELINE_DIR}",
        draft=f"{ENGINE_MOUNT}/{DRAFT_DIR}",
        heads=f"{ENGINE_MOUNT}/{HEADS_DIR}",
        work=ENGINE_MOUNT,
        files=f"{ENGINE_MOUNT}/{TRTLLM_DIR}",
    )
    return _planned(recipe, path, version, paths, None)


def _checked(path: Path, asked: str | None, gpu: Gpu | None) -> tuple[Recipe, str]:
    found = lint(path, model=True)
    if found.recipe is None:
        raise InputError(found.errors)
    try:
        version = choose_version(found.recipe, asked)
    except InputError as error:
        raise InputError([_in_file(problem, path) for problem in error.problems]) from None
    found = with_gpu_rules(found, path, version=version, gpu=gpu)
    if found.recipe is None:
        raise InputError(found.errors)
    return found.recipe, version


def _planned(recipe: Recipe, path: Path, version: str, paths: Paths, gpu: Gpu | None) -> TrtllmPlan:
    base = path.resolve().parent
    checkpoint, draft = models_of(recipe, base)
    num_heads = None
    if isinstance(recipe.speculation, MedusaSpeculation):
        folder = find_model(recipe.speculation.heads, base)
        if folder is not None:
            spec = None if checkpoint is None else checkpoint.spec
            num_heads = inspect_draft_weights(folder, "medusa", spec).num_heads
    try:
        return plan_commands(
            recipe, version, paths=paths, checkpoint=checkpoint, draft=draft, gpu=gpu, num_heads=num_heads
        )
    except InputError as error:
        raise InputError([_in_file(problem, path) for problem in error.problems]) from None


def _in_file(problem: Problem, path: Path) -> Problem:
    return Problem(problem.message, problem.file or str(path), problem.line, problem.key)


# --------------------------------------------------------------------------- files of a built engine


def engine_files(plan: TrtllmPlan) -> dict[str, str]:
    """The texts of the engine's folder ``trtllm`` by their paths in it."""
    assert plan.serve is not None
    rendered = {
        "schema": "trtspec.rendered/1",
        "tensorrt_llm": plan.version,
        "label": label(plan.version),
        "container": plan.container,
        "mounted_at": ENGINE_MOUNT,
        "serve": list(plan.serve.argv),
        "notes": list(plan.notes),
        "warnings": list(plan.warnings),
    }
    return {**plan.files, RENDERED_FILE: json.dumps(rendered, indent=1) + "\n"}


def read_rendered(artifact: Artifact) -> Rendered | None:
    """What the engine's ``trtllm`` folder says; None for an engine without one. Raises InputError."""
    path = artifact.folder / TRTLLM_DIR / RENDERED_FILE
    if f"{TRTLLM_DIR}/{RENDERED_FILE}" not in artifact.manifest.files:
        return None
    value = read_user_json(path)
    try:
        return Rendered(
            version=str(value["tensorrt_llm"]),
            label=str(value["label"]),
            container=str(value["container"]),
            serve=tuple(map(str, value["serve"])),
            notes=tuple(map(str, value["notes"])),
            warnings=tuple(map(str, value["warnings"])),
        )
    except (KeyError, TypeError):
        message = "not what trtspec build writes; run trtspec build --force"
        raise InputError(Problem(message, file=str(path))) from None


def how_to_serve(rendered: Rendered, folder: Path) -> str:
    """The commands, as one line, that serve a built engine in NVIDIA's container."""
    mount = shlex.quote(f"{folder.resolve()}:{ENGINE_MOUNT}:ro")
    command = shlex.join(rendered.serve)
    return f"docker run --rm --gpus all --ipc host --network host -v {mount} TENSORRT_LLM_IMAGE {command}"


def refuse_building(recipe: Recipe, path: Path) -> None:
    """MissingError for what this machine cannot build of a GPU recipe, with the way that it can be."""
    command = f"trtspec build {shlex.quote(str(path))} --dry-run"
    remedy = f"{command} prints the script that does it in NVIDIA's container"
    if isinstance(recipe.backend, TensorrtBackend):
        raise MissingError(
            "backend.kind: tensorrt: an engine is made by trtllm-build (TensorRT-LLM 1.2.1 or older) on the "
            f"GPU that runs it, and that is not here; {remedy}"
        )
    formats = [recipe.quantization, getattr(recipe.speculation, "quantization", None)]
    if any("nvfp4" in (getattr(q, "kind", ""), getattr(q, "kv_cache", "")) for q in formats):
        raise MissingError(
            f"quantization: nvfp4 is exported by ModelOpt on a CUDA GPU only, not by this machine; {remedy}"
        )
