"""What TensorRT-LLM has to be told for a recipe: commands and files, rendered for one of its versions.

:func:`plan_commands` is pure. Every flag, key and value is held against the table of that version
(:mod:`trtspec.trtllm.facts`) before it is returned; what has no spelling there is refused, as is what the
rules (:mod:`trtspec.trtllm.rules`) know to fail. None of it has been run where it was rendered, and
:func:`label` says so on everything that is made from a plan.

The work folder that commands fill::

    work/target         the target as TensorRT-LLM loads it: its checkpoint format (tensorrt), a quantized
                        Hugging Face folder (pytorch; absent when nothing is quantized)
    work/engine         trtllm-build's engine (tensorrt)
    work/draft          the draft model, likewise; work/draft_engine its engine
    work/llm_api.yaml   LLM()'s options (pytorch)
    work/triton         the Triton model repository, work/launch_triton.sh the script that serves it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from trtspec.errors import InputError, Problem
from trtspec.hardware import Gpu
from trtspec.recipe import EmbeddedBackend, PytorchBackend, Recipe, TensorrtBackend
from trtspec.recipe_yaml import dotted
from trtspec.trtllm.checkpoint import Checkpoint
from trtspec.trtllm.command import Command, Paths
from trtspec.trtllm.engines import engine_commands
from trtspec.trtllm.facts import Facts, load_facts, versions_for
from trtspec.trtllm.launch import LAUNCH_FILE, num_nodes, placement_problems, render_launch
from trtspec.trtllm.llm_api import (
    checkpoint_commands,
    draft_folder,
    kv_bytes_per_token,
    llm_options,
    option_notes,
    option_problems,
    serve_command,
    target_folder,
    to_yaml,
)
from trtspec.trtllm.rules import check
from trtspec.trtllm.triton import render_repository, triton_problems
from trtspec.versions import parse_range

__all__ = [
    "LLM_API_FILE",
    "TRITON_DIR",
    "Command",
    "Paths",
    "TrtllmPlan",
    "choose_version",
    "label",
    "plan_commands",
]

LLM_API_FILE = "llm_api.yaml"
"""The LLM API's options: ``trtllm-serve --config`` (``--extra_llm_api_options``)."""
TRITON_DIR = "triton"
"""Folder of the Triton model repository, in the work folder and in an engine folder."""


@dataclass(frozen=True)
class TrtllmPlan:
    """Everything to be run and written for one recipe and one version.

    ``commands`` make the engine (tensorrt) or the quantized checkpoints (pytorch), in order. ``files`` are
    texts by their path in the work folder. ``model`` is what is served: the engine folder or the checkpoint.
    ``serve``: how to serve it without Triton; None for engines (Triton serves them).
    """

    recipe: Recipe
    version: str
    container: str
    """Image name without its registry, e.g. ``tensorrt-llm/release:1.2.1``."""
    commands: tuple[Command, ...]
    files: Mapping[str, str]
    model: str
    draft_model: str | None = None
    """The folder of the draft model's engine or checkpoint; None without one."""
    serve: Command | None = None
    notes: tuple[str, ...] = ()
    """What will be done otherwise than the recipe asks."""
    warnings: tuple[str, ...] = ()
    """What is reported to go wrong with such a recipe."""


def label(version: str) -> str:
    """How everything rendered for a GPU backend is called until it has been run."""
    return f"rendered and checked against the tables of TensorRT-LLM {version}; not run here"


def choose_version(recipe: Recipe, asked: str | None = None) -> str:
    """The known version to render for: ``asked``, else the newest release in the recipe's range, else the
    newest candidate. InputError if there is none, or if ``asked`` lies outside the range."""
    backend = recipe.backend
    assert isinstance(backend, TensorrtBackend | PytorchBackend)
    known = versions_for(backend.kind, parse_range(backend.version))
    if asked is not None:
        version = load_facts(asked).version
        if version not in known:
            allowed = ", ".join(known) or "none of the known versions"
            message = (
                f"TensorRT-LLM {version} is outside {backend.version} or has no {backend.kind} backend; "
                f"allowed: {allowed}; choose one of them, or change the range"
            )
            raise InputError(Problem(message, key="backend.version"))
        return version
    if not known:
        every = ", ".join(versions_for(backend.kind, parse_range(">=0")))
        message = f"no known version lies in {backend.version}; known: {every}; widen the range"
        raise InputError(Problem(message, key="backend.version"))
    return next((version for version in reversed(known) if "rc" not in version), known[-1])


def plan_commands(
    recipe: Recipe,
    version: str,
    *,
    paths: Paths | None = None,
    checkpoint: Checkpoint | None = None,
    draft: Checkpoint | None = None,
    gpu: Gpu | None = None,
    num_heads: int | None = None,
) -> TrtllmPlan:
    """The commands and files for ``recipe`` on TensorRT-LLM ``version``.

    ``checkpoint``, ``draft``: the recipe's models, ``gpu``: what will serve, ``num_heads``: Medusa heads that
    were trained; None where it is not known, and then not checked. Raises InputError, with everything at
    once, for what the rules refuse, else for what that version has no flag, key or value for.
    """
    paths, facts = paths or Paths(), load_facts(version)
    if isinstance(recipe.backend, EmbeddedBackend):
        raise InputError(
            Problem("the embedded backend needs no TensorRT-LLM; trtspec build makes its engine")
        )
    findings = check(recipe, facts.version, gpu=gpu, checkpoint=checkpoint, draft=draft)
    if errors := [finding for finding in findings if finding.severity == "error"]:
        raise InputError(
            [Problem(f"{found.message} [{found.rule}]", key=dotted(found.path)) for found in errors]
        )
    if isinstance(recipe.backend, TensorrtBackend):
        plan, problems = _engine_plan(recipe, facts, paths, checkpoint, draft, num_heads)
    else:
        plan, problems = _llm_api_plan(recipe, facts, paths)
    if problems:
        raise InputError(problems)
    files, unserved = _repository(plan, paths, checkpoint, num_heads)
    told = [f"{dotted(found.path)}: {found.message}" for found in findings if found.severity == "note"]
    warned = [f"{dotted(found.path)}: {found.message}" for found in findings if found.severity == "warning"]
    return replace(
        plan, files={**plan.files, **files}, notes=(*plan.notes, *told), warnings=(*warned, *unserved)
    )


def _repository(
    plan: TrtllmPlan, paths: Paths, checkpoint: Checkpoint | None, num_heads: int | None
) -> tuple[dict[str, str], list[str]]:
    """The Triton model repository by path in the work folder, or why Triton cannot serve the recipe."""
    recipe = plan.recipe
    problems = [*triton_problems(recipe, plan.version, num_heads=num_heads), *placement_problems(recipe)]
    if problems:
        return {}, [f"Triton cannot serve it: {problem}" for problem in problems]
    size = recipe.limits.kv_cache_bytes
    per_token = checkpoint and kv_bytes_per_token(
        checkpoint, recipe.quantization.kv_cache, recipe.parallel.tp, recipe.parallel.pp
    )
    options = None
    if isinstance(recipe.backend, PytorchBackend):
        options = llm_options(recipe, load_facts(plan.version), paths)
    files = render_repository(
        recipe,
        plan.version,
        engine_dir=plan.model,
        tokenizer_dir=paths.model,
        draft_engine_dir=plan.draft_model,
        llm_options=options,
        num_heads=num_heads,
        max_kv_tokens=int(size / per_token) if size and per_token else None,
        num_nodes=num_nodes(recipe),
    )
    launch = render_launch(recipe, plan.version, engine_dir=plan.model, draft_engine_dir=plan.draft_model)
    return {LAUNCH_FILE: launch, **{f"{TRITON_DIR}/{name}": text for name, text in files.items()}}, []


def _engine_plan(
    recipe: Recipe,
    facts: Facts,
    paths: Paths,
    checkpoint: Checkpoint | None,
    draft: Checkpoint | None,
    num_heads: int | None,
) -> tuple[TrtllmPlan, list[Problem]]:
    made = engine_commands(
        recipe,
        facts.version,
        paths,
        architecture=checkpoint.architecture if checkpoint else None,
        draft_architecture=draft.architecture if draft else None,
        num_heads=num_heads,
    )
    plan = TrtllmPlan(
        recipe=recipe,
        version=facts.version,
        container=_container(facts.version),
        commands=made.commands,
        files={},
        model=made.target,
        draft_model=made.draft,
        notes=made.notes,
    )
    return plan, [*made.problems, *_flag_problems(facts, made.commands)]


def _llm_api_plan(recipe: Recipe, facts: Facts, paths: Paths) -> tuple[TrtllmPlan, list[Problem]]:
    model = target_folder(recipe, paths)
    options = llm_options(recipe, facts, paths)
    serve = serve_command(recipe, facts, model, f"{paths.files}/{LLM_API_FILE}")
    problems = [*option_problems(facts, options, model), *_flag_problems(facts, (serve,))]
    plan = TrtllmPlan(
        recipe=recipe,
        version=facts.version,
        container=_container(facts.version),
        commands=tuple(checkpoint_commands(recipe, paths)),
        files={LLM_API_FILE: _header(recipe, facts.version) + to_yaml(options)},
        model=model,
        draft_model=draft_folder(recipe, paths),
        serve=serve,
        notes=tuple(option_notes(recipe)),
    )
    return plan, problems


def _flag_problems(facts: Facts, commands: tuple[Command, ...]) -> list[Problem]:
    """What the version's tools do not take; tools that are not TensorRT-LLM's are not in its tables."""
    return [
        Problem(wrong)
        for command in commands
        if command.program not in ("trtspec quantize", "test")
        for wrong in facts.check_argv(command.program, command.options)
    ]


def _container(version: str) -> str:
    return f"tensorrt-llm/release:{version}"


def _header(recipe: Recipe, version: str) -> str:
    return f"# {recipe.name}: {label(version)}\n"
