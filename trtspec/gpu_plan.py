"""A recipe for a GPU backend on a machine without TensorRT-LLM: what is rendered, and where it goes.

:func:`render_script_plan` renders what a user runs in NVIDIA's container. A ``pytorch`` recipe can also be
*built* here: its weights are quantized on this machine, and :func:`engine_files` are sealed beside them, with
paths below :data:`ENGINE_MOUNT`, where the container sees the engine folder. What was never run says so.
Where ``trtllm-build`` is installed, a ``tensorrt`` recipe is built by the script that is printed elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from trtspec.artifact import BASELINE_DIR, BUILT_DIR, DRAFT_DIR, HEADS_DIR, TRTLLM_DIR, Artifact
from trtspec.errors import InputError, MissingError, Problem
from trtspec.hardware import Gpu
from trtspec.model_source import find_model
from trtspec.recipe import MedusaSpeculation, Recipe, TensorrtBackend
from trtspec.recipe_facts import is_quantized
from trtspec.recipe_file import lint
from trtspec.trtllm.draft_weights import inspect_draft_weights
from trtspec.trtllm.facts import load_facts
from trtspec.trtllm.lint import models_of, with_gpu_rules
from trtspec.trtllm.plan import Paths, TrtllmPlan, choose_version, label, plan_commands
from trtspec.trtllm.script import EXAMPLES_DIR, render_script
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
    """``trtllm-serve`` with its arguments, for a container that sees the engine at :data:`ENGINE_MOUNT`;
    empty for engines of ``trtllm-build``, which Triton serves."""
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def render_script_plan(path: Path, version: str | None = None, gpu: Gpu | None = None) -> TrtllmPlan:
    """The plan of the recipe in the file ``path``, with a script's variables as paths.

    The models need not be here; what is known of them is used. Raises InputError with file and line for what
    the rules refuse, and for what ``version`` (None: the newest release that the recipe admits) has no words
    for.
    """
    recipe, version = _checked(path, version, gpu)
    return _planned(recipe, path, version, Paths(), gpu)


def engine_plan(path: Path, version: str | None = None) -> TrtllmPlan:
    """The plan of the recipe in the file ``path``, with paths inside a built engine."""
    recipe, version = _checked(path, version, None)
    engine = isinstance(recipe.backend, TensorrtBackend)
    paths = Paths(
        model=f"{ENGINE_MOUNT}/{BASELINE_DIR}",
        draft=f"{ENGINE_MOUNT}/{DRAFT_DIR}",
        heads=f"{ENGINE_MOUNT}/{HEADS_DIR}",
        work=f"{ENGINE_MOUNT}/{BUILT_DIR}" if engine else ENGINE_MOUNT,
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
    engine = isinstance(plan.recipe.backend, TensorrtBackend)
    rendered = {
        "schema": "trtspec.rendered/1",
        "tensorrt_llm": plan.version,
        "label": f"engine built by TensorRT-LLM {plan.version}; not served here"
        if engine
        else label(plan.version),
        "container": plan.container,
        "mounted_at": ENGINE_MOUNT,
        "serve": list(plan.serve.argv) if plan.serve else [],
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


# --------------------------------------------------------------------------- trtllm-build on this machine


@dataclass(frozen=True)
class EngineBuild:
    """The script that makes the engine, and the values of its variables but WORK_DIR and CALIB_DATASET."""

    version: str
    script: str
    folders: Mapping[str, str]
    calibration: str | None
    """The recipe's calibration texts, ``builtin`` or a file; None where nothing is calibrated."""


def engine_build(path: Path, version: str | None, folders: Mapping[str, Path]) -> EngineBuild:
    """How ``trtllm-build`` of this machine builds the ``tensorrt`` recipe in the file ``path``.

    ``folders``: MODEL_DIR and, if the recipe needs them, DRAFT_DIR and HEADS_DIR. Raises MissingError if the
    TensorRT-LLM that is installed is none of the known versions, is another than ``version``, or has no
    examples folder (``TRTLLM_EXAMPLES_DIR``, else where NVIDIA's container has it).
    """
    installed = _installed_version()
    if version is not None and load_facts(version).version != installed:
        message = f"TensorRT-LLM {version}: this machine has {installed or 'none'}; choose that, or --dry-run"
        raise MissingError(message)
    examples = Path(os.environ.get("TRTLLM_EXAMPLES_DIR") or EXAMPLES_DIR)
    if not examples.is_dir():
        raise MissingError(
            f"{examples}: TensorRT-LLM's examples, which hold the scripts that convert and quantize, are not "
            "there; set TRTLLM_EXAMPLES_DIR"
        )
    plan = render_script_plan(path, installed)
    quantizations = [plan.recipe.quantization, getattr(plan.recipe.speculation, "quantization", None)]
    asked = {q.calibration.data for q in quantizations if not isinstance(q, str | None) and is_quantized(q)}
    if len(asked) > 1:
        message = "target and draft of an engine are calibrated on one set of texts; name the same"
        raise InputError(Problem(message, str(path), key="speculation.quantization.calibration.data"))
    texts = asked.pop() if asked else None
    return EngineBuild(
        version=plan.version,
        script=render_script(replace(plan, files={})),
        folders={"EXAMPLES_DIR": str(examples), **{name: str(folder) for name, folder in folders.items()}},
        calibration=texts if texts in (None, "builtin") else str(path.resolve().parent / texts),
    )


def _installed_version() -> str:
    for name in ("tensorrt_llm", "tensorrt-llm"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return re.split(r"\.post|\+", metadata.version(name))[0]
    raise MissingError(
        "trtllm-build is installed and Python's package tensorrt_llm is not, so its version is not known; "
        "run trtspec in TensorRT-LLM's own environment"
    )


def refuse_building(recipe: Recipe, path: Path) -> None:
    """MissingError for what this machine cannot build of a GPU recipe, with the way that it can be."""
    command = f"trtspec build {shlex.quote(str(path))} --dry-run"
    remedy = f"{command} prints the script that does it in NVIDIA's container"
    if isinstance(recipe.backend, TensorrtBackend) and shutil.which("trtllm-build") is None:
        raise MissingError(
            "backend.kind: tensorrt: an engine is made by trtllm-build (TensorRT-LLM 1.2.1 or older) on the "
            f"GPU that runs it, and that is not here; {remedy}"
        )
    formats = [recipe.quantization, getattr(recipe.speculation, "quantization", None)]
    if any("nvfp4" in (getattr(q, "kind", ""), getattr(q, "kv_cache", "")) for q in formats):
        raise MissingError(
            f"quantization: nvfp4 is exported by ModelOpt on a CUDA GPU only, not by this machine; {remedy}"
        )
