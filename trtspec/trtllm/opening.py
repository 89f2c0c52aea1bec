"""How a built engine is opened by TensorRT-LLM's ``LLM`` on this machine: which class, with what arguments.

The arguments are the ones that the engine's files were rendered from, in the spelling of the installed
version, with this machine's folders. :func:`installed` is the only place that asks whether TensorRT-LLM is
here; :func:`open_llm` imports it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from trtspec.artifact import BUILT_DIR, Artifact
from trtspec.engine import Engine
from trtspec.errors import InputError, MissingError, Problem
from trtspec.modelspec import read_modelspec
from trtspec.recipe import (
    DraftModelSpeculation,
    EagleSpeculation,
    LookaheadSpeculation,
    MedusaSpeculation,
    NgramSpeculation,
    NoSpeculation,
    PytorchBackend,
    Recipe,
    TensorrtBackend,
)
from trtspec.recipe_facts import drafted_positions, paged_context_off
from trtspec.trtllm.command import Paths
from trtspec.trtllm.facts import Facts, load_facts
from trtspec.trtllm.launch import FORCED_ACCEPTANCE
from trtspec.trtllm.llm_api import llm_options, target_folder
from trtspec.trtllm.runtime import TrtllmEngine
from trtspec.versions import parse_range

ENGINE_VERSIONS = parse_range(">=0.21,<=1.2.1")
"""Whose ``LLM`` opens an engine here. The classes of 0.17's arguments differ and were not transcribed."""
_SEPARATE_LLM = parse_range(">=1.0")
"""From here on ``tensorrt_llm.LLM`` is the PyTorch flow, and engines have a class of their own."""


@dataclass(frozen=True)
class LlmCall:
    """``from MODULE import LLM; LLM(**arguments)``."""

    module: str
    arguments: dict[str, Any]


def installed() -> str:
    """Version of the TensorRT-LLM of this machine, without build suffixes.

    Raises MissingError when there is none, and when the package is PyPI's stub, which has no code. Imports
    nothing.
    """
    version = None
    for name in ("tensorrt_llm", "tensorrt-llm"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            version = metadata.version(name)
            break
    folders: list[str] = []
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec("tensorrt_llm")
        folders = list(spec.submodule_search_locations or ()) if spec else []
    if version is None or not folders:
        raise MissingError("TensorRT-LLM is not installed")
    if not any((Path(folder) / "llmapi").is_dir() for folder in folders):
        raise MissingError(
            f"tensorrt_llm {version} has no code: it is the stub that the package index has, or broken; "
            "install TensorRT-LLM as NVIDIA's container has it"
        )
    return re.split(r"\.post|\+", version)[0]


def llm_call(artifact: Artifact, recipe: Recipe, version: str) -> LlmCall:
    """What opens ``artifact`` on TensorRT-LLM ``version``; ``recipe``: the variant that is to run.

    Raises InputError for what that version has no words for, MissingError for what ``LLM`` cannot run of it.
    """
    facts = load_facts(version)
    paths = Paths(
        model=str(artifact.baseline_dir),
        draft=str(artifact.draft_dir),
        heads=str(artifact.heads_dir),
        work=str(artifact.folder),
    )
    if isinstance(recipe.backend, PytorchBackend):
        if "pytorch" not in facts.backends:
            raise MissingError(
                f"backend.kind: pytorch: TensorRT-LLM {version} has no PyTorch flow to rely on"
            )
        options = {**llm_options(recipe, facts, paths), "model": target_folder(recipe, paths)}
        return _checked("tensorrt_llm", "TorchLlmArgs", options, facts)
    assert isinstance(recipe.backend, TensorrtBackend)
    if not ENGINE_VERSIONS.admits(facts.version):
        raise MissingError(
            f"backend.kind: tensorrt: trtspec opens engines with TensorRT-LLM {ENGINE_VERSIONS}, here is "
            f"{version}; Triton serves them: trtspec serve ENGINE --dry-run"
        )
    if recipe != artifact.recipe:
        raise MissingError(
            "an engine of trtllm-build has its weights and its way of drafting built in; build a recipe "
            "without them to compare it with"
        )
    options = {"model": str(artifact.folder / BUILT_DIR / "engine"), **engine_options(recipe)}
    module = "tensorrt_llm._tensorrt_engine" if _SEPARATE_LLM.admits(facts.version) else "tensorrt_llm"
    return _checked(module, "TrtLlmArgs", options, facts)


def engine_options(recipe: Recipe) -> dict[str, Any]:
    """LLM()'s arguments for an engine, but ``model``. MissingError for drafts that ``LLM`` does not make."""
    limits, speculation = recipe.limits, recipe.speculation
    options: dict[str, Any] = {
        "max_batch_size": limits.max_batch_size,
        "max_num_tokens": limits.max_num_tokens,
        "tensor_parallel_size": recipe.parallel.tp,
        "pipeline_parallel_size": recipe.parallel.pp,
        # As Triton's model of the engine has it: blocks are reused through the paged context kernel.
        "kv_cache_config": {"enable_block_reuse": paged_context_off(recipe) is None},
    }
    nodes = drafted_positions(speculation)
    match speculation:
        case NoSpeculation():
            pass
        case LookaheadSpeculation(window=window, ngram=ngram, verification_set=guesses):
            options["speculative_config"] = {
                "decoding_type": "Lookahead",
                "max_window_size": window,
                "max_ngram_size": ngram,
                "max_verification_set_size": guesses,
            }
        case MedusaSpeculation(choices=choices):
            config = {"decoding_type": "Medusa", "max_draft_len": nodes}
            if choices is not None:
                heads = max(map(len, choices))
                config |= {"medusa_choices": [list(path) for path in choices], "num_medusa_heads": heads}
            options["speculative_config"] = config
        case EagleSpeculation(choices=choices):
            config = {"decoding_type": "Eagle", "max_draft_len": nodes, "num_eagle_layers": speculation.depth}
            if choices is not None:
                config["eagle_choices"] = [list(path) for path in choices]
            else:
                config |= {"use_dynamic_tree": True, "dynamic_tree_max_topK": speculation.top_k}
            options["speculative_config"] = config
        case NgramSpeculation() | DraftModelSpeculation():
            raise MissingError(
                f"speculation.kind: {speculation.kind}: an engine takes such drafts from outside (Triton's "
                "tensorrt_llm_bls, NVIDIA's run.py); LLM() makes none; backend.kind: pytorch drafts by itself"
            )
        case _:
            raise MissingError(f"speculation.kind: {speculation.kind}: no engine drafts so")
    return options


def _checked(module: str, class_name: str, options: dict[str, Any], facts: Facts) -> LlmCall:
    # trtspec has its own tokenizer; with TensorRT-LLM's, end tokens would be taken from its files.
    options["skip_tokenizer_init"] = True
    problems = facts.check_keys(class_name, options)
    if problems:
        raise InputError([Problem(message) for message in problems])
    return LlmCall(module, options)


def open_llm(artifact: Artifact, recipe: Recipe) -> Engine:
    """Load ``artifact`` with the TensorRT-LLM of this machine. ``recipe``: the variant that is to run.

    Raises MissingError without TensorRT-LLM, with another version than the recipe admits, where ``LLM``
    cannot run it or does not start, and where the environment accepts drafts unseen.
    """
    backend = recipe.backend
    assert isinstance(backend, TensorrtBackend | PytorchBackend)
    version = installed()
    if forced := sorted(name for name in os.environ if re.match(FORCED_ACCEPTANCE, name)):
        raise MissingError(f"{', '.join(forced)} is set: drafts would be accepted unseen; unset it")
    try:
        known = load_facts(version).version
    except InputError as error:
        raise MissingError(f"{error}; it is what this machine has") from None
    if not parse_range(backend.version).admits(known):
        message = f"backend.version: the recipe wants TensorRT-LLM {backend.version}, here is {version}"
        raise MissingError(f"{message}; run it in a container of such a version, or change the recipe")
    call = llm_call(artifact, recipe, version)
    # Its chatter is not part of what a verb prints.
    os.environ.setdefault("TLLM_LOG_LEVEL", "ERROR")
    try:
        with _stdout_as_stderr():
            llm = importlib.import_module(call.module).LLM(**_converted(call.arguments))
    except (ImportError, OSError) as error:
        raise MissingError(f"TensorRT-LLM {version} cannot be imported: {_line(error)}") from error
    except (ValueError, TypeError) as error:  # pydantic's errors are ValueErrors
        raise InputError(f"TensorRT-LLM {version} refuses the engine's options: {_line(error)}") from error
    except RuntimeError as error:  # CUDA, memory, MPI: TensorRT-LLM has no finer classes
        raise MissingError(f"TensorRT-LLM {version} could not load the engine: {_line(error)}") from error
    return TrtllmEngine(
        llm,
        importlib.import_module("tensorrt_llm").SamplingParams,
        vocab_size=read_modelspec(artifact.baseline_dir).vocab_size,
        max_input_tokens=recipe.limits.max_input_tokens,
        max_seq_tokens=recipe.limits.max_seq_tokens,
        speculates=not isinstance(recipe.speculation, NoSpeculation),
    )


@contextlib.contextmanager
def _stdout_as_stderr() -> Iterator[None]:
    """What is written to stdout goes to stderr, also by C++ and by processes that start meanwhile:
    TensorRT-LLM prints its version when it is imported, and its loggers keep the stream that they find."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _converted(arguments: dict[str, Any]) -> dict[str, Any]:
    """``arguments`` with TensorRT-LLM's own classes where it wants them, by its own converter, as for an
    options file of ``trtllm-serve``. Versions without that converter take mappings."""
    convert = None
    with contextlib.suppress(ImportError):
        module = importlib.import_module("tensorrt_llm.llmapi.llm_args")
        convert = getattr(module, "update_llm_args_with_extra_dict", None)
    # It turns values of the mapping that it is given into objects.
    return dict(arguments) if convert is None else convert({}, dict(arguments))


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]
