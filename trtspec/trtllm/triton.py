"""The Triton model repository of a GPU-backend recipe, as text: pure, so it can be shown without a GPU.

``tensorrt`` recipes get the C++ ``tensorrtllm`` backend (:mod:`trtspec.trtllm.triton_cpp`), ``pytorch``
recipes NVIDIA's Python ``llmapi`` model. The Python files of both come from NVIDIA's container; the script
that :mod:`trtspec.trtllm.launch` renders copies them. Everything is checked before it is returned:
parameters and keys against the tables, both places of max_batch_size and decoupled against each other, no
placeholder left.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from trtspec.errors import InputError, Problem
from trtspec.recipe import DraftModelSpeculation, PytorchBackend, Recipe, TensorrtBackend
from trtspec.recipe_facts import describe_acceptance
from trtspec.recipe_file import recipe_digest
from trtspec.triton_config import (
    ACCEPTANCE,
    ENGINE_NAME,
    RECIPE_DIGEST,
    ModelConfig,
    TensorConfig,
    tensor_from_line,
    to_pbtxt,
)
from trtspec.trtllm.command import VARIABLES
from trtspec.trtllm.draft_weights import choice_problems
from trtspec.trtllm.facts import Facts, load_facts
from trtspec.trtllm.llm_api import to_yaml
from trtspec.trtllm.triton_cpp import cpp_models, cpp_problems, model_problems

PYTHON_MODELS = {
    "tensorrt": ("preprocessing", "postprocessing", "tensorrt_llm_bls"),
    "pytorch": ("tensorrt_llm",),
}
"""Models whose Python files NVIDIA's container has, by backend."""
_PLACEHOLDER = re.compile(r"\$\{\w*\}?")
_CANCELLATION_CHECK_MS = 100
_LLMAPI_PARAMETERS = {"gpu_device_ids", ACCEPTANCE, ENGINE_NAME, RECIPE_DIGEST}
"""The first is the model's own; the others tell clients what they are talking to."""
_LLMAPI_INPUTS = """
text_input TYPE_STRING [-1]
streaming TYPE_BOOL [1] optional
sampling_param_best_of TYPE_INT32 [1] optional
sampling_param_temperature TYPE_FP32 [1] optional
sampling_param_top_k TYPE_INT32 [1] optional
sampling_param_top_p TYPE_FP32 [1] optional
sampling_param_frequency_penalty TYPE_FP32 [1] optional
sampling_param_presence_penalty TYPE_FP32 [1] optional
sampling_param_max_tokens TYPE_INT32 [1] optional
sampling_param_stop TYPE_STRING [-1] optional
sampling_param_seed TYPE_UINT64 [1] optional
sampling_param_exclude_input_from_output TYPE_BOOL [1] optional
sampling_param_return_perf_metrics TYPE_BOOL [1] optional
return_finish_reason TYPE_BOOL [1] optional
return_stop_reason TYPE_BOOL [1] optional
return_cumulative_logprob TYPE_BOOL [1] optional
stop TYPE_BOOL [1] optional
"""
_LLMAPI_OUTPUTS = """
text_output TYPE_STRING [-1]
finish_reason TYPE_STRING [-1]
stop_reason TYPE_STRING [-1]
cumulative_logprob TYPE_FP32 [-1]
kv_cache_reused_block TYPE_INT32 [-1]
kv_cache_missed_block TYPE_INT32 [-1]
kv_cache_alloc_new_blocks TYPE_INT32 [-1]
kv_cache_alloc_total_blocks TYPE_INT32 [-1]
kv_cache_hit_rate TYPE_FP32 [-1]
arrival_time_ns TYPE_INT64 [1]
first_scheduled_time_ns TYPE_INT64 [1]
first_token_time_ns TYPE_INT64 [1]
last_token_time_ns TYPE_INT64 [1]
acceptance_rate TYPE_FP32 [1]
total_accepted_draft_tokens TYPE_INT32 [1]
total_draft_tokens TYPE_INT32 [1]
"""


def render_repository(
    recipe: Recipe,
    version: str,
    *,
    engine_dir: str,
    tokenizer_dir: str,
    draft_engine_dir: str | None = None,
    llm_options: Mapping[str, Any] | None = None,
    num_heads: int | None = None,
    max_draft_len: int | None = None,
    max_kv_tokens: int | None = None,
    num_nodes: int = 1,
) -> dict[str, str]:
    """The files of a model repository for TensorRT-LLM ``version``, by path below its root.

    ``engine_dir``, ``tokenizer_dir``, ``draft_engine_dir`` are paths inside the container, or variables
    that the caller's script expands (``${WORK_DIR}/engine``). On ``pytorch`` ``engine_dir`` is the
    checkpoint that LLM() loads, and ``llm_options`` are LLM()'s other keyword arguments (the YAML of
    ``trtllm-serve``, as a mapping). ``num_heads``: Medusa heads that were trained; ``max_draft_len``: the
    engine's; ``max_kv_tokens``: tokens that limits.kv_cache_bytes holds; None where unknown. Deterministic.
    Raises InputError with all problems; :func:`triton_problems` gives those of the recipe without raising.
    """
    facts = load_facts(version)
    problems = triton_problems(recipe, version, num_heads=num_heads, max_draft_len=max_draft_len)
    two_engines = recipe.backend.kind == "tensorrt" and isinstance(recipe.speculation, DraftModelSpeculation)
    if two_engines and draft_engine_dir is None:
        problems.append(Problem("the draft engine's folder is not known", key="speculation.model"))
    if problems:
        raise InputError(problems)
    if isinstance(recipe.backend, TensorrtBackend):
        models = cpp_models(
            recipe,
            facts.version,
            engine_dir=engine_dir,
            tokenizer_dir=tokenizer_dir,
            draft_engine_dir=draft_engine_dir,
            max_kv_tokens=max_kv_tokens,
            num_nodes=num_nodes,
        )
        wrong = list(model_problems(models, facts.version))
        files: dict[str, str] = {}
    else:
        options = {
            "model": engine_dir,
            "tokenizer": tokenizer_dir,
            "backend": "pytorch",
            **(llm_options or {}),
        }
        if "backend" not in facts.classes["TorchLlmArgs"]:
            del options["backend"]
        config = llmapi_config(recipe)
        triton = {
            "max_batch_size": config.max_batch_size,
            "decoupled": bool(config.decoupled),
            "cancellation_check_period_ms": _CANCELLATION_CHECK_MS,
        }
        models = {config.name: config}
        wrong = list(llmapi_problems(config, options, triton, facts))
        files = {f"{config.name}/1/model.yaml": to_yaml({**options, "triton_config": triton})}
    files |= {f"{folder}/config.pbtxt": to_pbtxt(config) for folder, config in models.items()}
    wrong += placeholder_problems(files)
    if wrong:
        raise InputError([Problem(message) for message in wrong])
    return dict(sorted(files.items()))


def triton_problems(
    recipe: Recipe, version: str, *, num_heads: int | None = None, max_draft_len: int | None = None
) -> list[Problem]:
    """Why Triton cannot serve this recipe on TensorRT-LLM ``version``; empty if it can."""
    facts = load_facts(version)
    kind = recipe.backend.kind
    if kind not in facts.backends:
        having = (
            "serves by itself" if kind == "embedded" else f"does not exist in TensorRT-LLM {facts.version}"
        )
        return [Problem(f"{kind}: {having}; choose another version or backend", key="backend.kind")]
    problems = choice_problems(recipe, num_heads=num_heads, max_draft_len=max_draft_len)
    if kind == "tensorrt":
        problems += cpp_problems(recipe, facts.version)
    return problems


def placeholder_problems(files: Mapping[str, str]) -> Iterator[str]:
    """Placeholders that nothing fills: all ``${...}`` but the variables of a rendered script."""
    known = {f"${{{name}}}" for name in VARIABLES}
    for name, text in files.items():
        for found in sorted(set(_PLACEHOLDER.findall(text)) - known):
            yield f"{name}: the placeholder {found} was not filled in"


# --------------------------------------------------------------------------- the Python model of the LLM API


def llmapi_config(recipe: Recipe) -> ModelConfig:
    """NVIDIA's ``llmapi`` model: it batches by itself, in flight, so Triton's max_batch_size is 0.

    max_batch_size and decoupled also stand in model.yaml, from where auto_complete_config takes them; a
    server that was started with --disable-auto-complete-config (as NVIDIA's script does) knows only these
    here.
    """
    assert isinstance(recipe.backend, PytorchBackend)
    return ModelConfig(
        name=recipe.serving.model_name,
        backend="python",
        max_batch_size=0,
        inputs=_tensors(_LLMAPI_INPUTS),
        outputs=_tensors(_LLMAPI_OUTPUTS),
        instances=1,
        decoupled=True,
        parameters={
            ACCEPTANCE: describe_acceptance(recipe),
            ENGINE_NAME: recipe.name,
            RECIPE_DIGEST: recipe_digest(recipe),
        },
        comments={"": "decoupled and max_batch_size are written in 1/model.yaml too and must be equal"},
    )


def llmapi_problems(
    config: ModelConfig, options: Mapping[str, Any], triton: Mapping[str, Any], facts: Facts
) -> Iterator[str]:
    """Keys that LLM() does not take, and values that differ between config.pbtxt and model.yaml."""
    for wrong in facts.check_keys("TorchLlmArgs", options):
        yield f"model.yaml: {wrong}"
    for key, found in (("max_batch_size", config.max_batch_size), ("decoupled", config.decoupled)):
        if triton.get(key) != found:
            yield f"{key} is {found} in config.pbtxt and {triton.get(key)} in model.yaml; both must agree"
    for key in config.parameters.keys() - _LLMAPI_PARAMETERS:
        yield f"{config.name}: parameter {key} is unknown; allowed: {', '.join(sorted(_LLMAPI_PARAMETERS))}"


def _tensors(lines: str) -> tuple[TensorConfig, ...]:
    return tuple(tensor_from_line(line) for line in lines.strip().splitlines())
