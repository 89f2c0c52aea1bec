"""What TensorRT-LLM has to be told for a recipe: commands and files, rendered for one of its versions.

:func:`plan_commands` is pure. Every flag, key and value is held against the table of that version
(:mod:`trtspec.trtllm.facts`) before it is returned; what has no spelling there is refused. None of it has been run
where it was rendered: :data:`LABEL` goes with everything made from a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trtspec.recipe import Recipe

LLM_API_FILE = "llm_api.yaml"
"""The LLM API's options: ``trtllm-serve --config`` (``--extra_llm_api_options``)."""
TRITON_DIR = "triton"
"""Folder of the Triton model repository, in the work folder and in an engine folder."""


@dataclass(frozen=True)
class Paths:
    """Folders as commands and files name them; the defaults are variables that a script sets.

    ``model``: the 16-bit target checkpoint. ``draft``: the draft model's. ``heads``: the trained heads.
    ``work``: where everything is made: ``work/target``, ``work/engine``, ``work/draft``, ``work/draft_engine``,
    ``work/llm_api.yaml``, ``work/triton``. ``examples``: TensorRT-LLM's ``examples`` folder.
    """

    model: str = "${MODEL_DIR}"
    draft: str = "${DRAFT_DIR}"
    heads: str = "${HEADS_DIR}"
    work: str = "${WORK_DIR}"
    examples: str = "${EXAMPLES_DIR}"


@dataclass(frozen=True)
class Command:
    """One command. ``program``: its name in the tables (``trtllm-build``, ``quantize.py`` ...)."""

    program: str
    argv: tuple[str, ...]
    what: str


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
    notes: tuple[str, ...] = field(default=())
    """What the builder will do otherwise than the recipe asks, and what could not be checked."""


def label(version: str) -> str:
    """How everything rendered for a GPU backend is called until it has been run."""
    return f"rendered and checked against the tables of TensorRT-LLM {version}; not run here"


def plan_commands(recipe: Recipe, version: str, *, paths: Paths | None = None) -> TrtllmPlan:
    """The commands and files for ``recipe`` on TensorRT-LLM ``version``.

    Raises InputError for what that version has no flag, key or value for, all of it at once.
    """
    raise NotImplementedError
