"""The five models of Triton's C++ ``tensorrtllm`` backend (TensorRT-LLM up to 1.2.1).

``ensemble`` (text in, text out), ``preprocessing`` and ``postprocessing`` (the tokenizer), the engine
itself, and ``tensorrt_llm_bls``, which calls the others from Python and drafts with a second engine.
Tensors, parameters and the ensemble's wiring come from ``data/triton-VERSION.json``; the parameters'
meaning from the backend's model_instance_state.cc. Whether a parameter may be missing was read there: most
fall back with a warning, those of guided decoding do not, so they are written empty.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from trtspec.errors import Problem
from trtspec.recipe import (
    DraftModelSpeculation,
    EagleSpeculation,
    LookaheadSpeculation,
    MedusaSpeculation,
    NgramSpeculation,
    NoSpeculation,
    Quantization,
    Recipe,
    TypicalAcceptance,
)
from trtspec.recipe_facts import paged_context_off
from trtspec.triton_config import ModelConfig, Queue, Step, TensorConfig, tensor_from_line
from trtspec.trtllm.draft_weights import brace_form, parse_brace_form
from trtspec.trtllm.facts import DATA_DIR
from trtspec.versions import parse_version

ENSEMBLE, PREPROCESSING, POSTPROCESSING = "ensemble", "preprocessing", "postprocessing"
BLS, ENGINE = "tensorrt_llm_bls", "tensorrt_llm"
"""Kinds of models, and all their names but the engine's, which the recipe chooses."""
MAX_INSTANCES = 32
"""Copies of a Python model at most: each is a process with its own tokenizer."""
BLS_GRPC_PORT = 8001
"""Where tensorrt_llm_bls asks for the draft model's configuration (its own comment: "assuming")."""
_BLS_ASKS = parse_version("0.20")
_LOCAL_HOSTS = ("127.0.0.1", "0.0.0.0", "localhost", "::1", "::")
_NEW_TABLE = parse_version("0.20")
_WORKER = "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker"
_KV_FRACTION = 0.9
_TWO_MODELS_KV_FRACTIONS = (0.5, 0.2)
"""Target, draft: of the memory that is free when the model loads, in whatever order. Assumed: NVIDIA's
example for two models has 0.5 each, which leaves the second model's weights to luck."""


@dataclass(frozen=True)
class Table:
    """What one release of the backend's models declares, by kind."""

    inputs: Mapping[str, tuple[TensorConfig, ...]]
    outputs: Mapping[str, tuple[TensorConfig, ...]]
    parameters: Mapping[str, frozenset[str]]
    steps: tuple[Step, ...]


def load_table(version: str) -> Table:
    """The table for TensorRT-LLM ``version``: 0.19.0's up to 0.19, that of 2025 from 0.20 on."""
    return _read_table("0.21.0" if parse_version(version) >= _NEW_TABLE else "0.19.0")


@cache
def _read_table(name: str) -> Table:
    models = json.loads((DATA_DIR / f"triton-{name}.json").read_text())["models"]
    return Table(
        {kind: tuple(map(tensor_from_line, model["inputs"])) for kind, model in models.items()},
        {kind: tuple(map(tensor_from_line, model["outputs"])) for kind, model in models.items()},
        {kind: frozenset(model["parameters"]) for kind, model in models.items()},
        tuple(Step(step["model"], step["inputs"], step["outputs"]) for step in models[ENSEMBLE]["steps"]),
    )


# --------------------------------------------------------------------------- what Triton cannot do


def cpp_problems(recipe: Recipe, version: str) -> Iterator[Problem]:
    """What the C++ backend cannot serve although an engine can be built for it."""
    speculation = recipe.speculation
    if isinstance(speculation, EagleSpeculation):
        if speculation.choices is None:
            yield Problem(
                "null (EAGLE-2's dynamic tree): Triton's tensorrtllm backend takes static trees only (its "
                "configuration has no key for others, and NVIDIA's tutorial says so); write choices, or run "
                "the engine without Triton",
                key="speculation.choices",
            )
        if isinstance(recipe.acceptance, TypicalAcceptance):
            yield Problem(
                "typical: Triton's tensorrtllm backend has no parameter for the posterior threshold and "
                "accepts greedily; write kind: exact, or run the engine without Triton",
                key="acceptance.kind",
            )
    draft = isinstance(speculation, DraftModelSpeculation)
    if draft and parse_version(version) >= _BLS_ASKS and recipe.serving.grpc_port != BLS_GRPC_PORT:
        yield Problem(
            f"found {recipe.serving.grpc_port}; tensorrt_llm_bls, which drafts, asks for the draft model at "
            f"port {BLS_GRPC_PORT} of its own machine; write {BLS_GRPC_PORT}",
            key="serving.grpc_port",
        )
    if draft and parse_version(version) >= _BLS_ASKS and recipe.serving.host not in _LOCAL_HOSTS:
        yield Problem(
            f"found {recipe.serving.host}; tensorrt_llm_bls, which drafts, asks for the draft model at "
            f"localhost; allowed: {', '.join(_LOCAL_HOSTS)}",
            key="serving.host",
        )
    taken = {ENSEMBLE, PREPROCESSING, POSTPROCESSING, BLS}
    if recipe.serving.model_name in taken:
        yield Problem(
            f"found {recipe.serving.model_name}, which is the name of another model of the repository; "
            f"allowed: anything but {', '.join(sorted(taken))}",
            key="serving.model_name",
        )


def streams(recipe: Recipe) -> bool:
    """Whether a request may be answered piece by piece: not where tensorrt_llm_bls drafts (issue 676)."""
    return not isinstance(recipe.speculation, DraftModelSpeculation)


def draft_name(recipe: Recipe) -> str:
    """The draft engine's model."""
    return f"{recipe.serving.model_name}_draft"


def front_model(recipe: Recipe) -> str:
    """The model that clients ask: the BLS where it drafts, else the ensemble."""
    return BLS if isinstance(recipe.speculation, DraftModelSpeculation) else ENSEMBLE


# --------------------------------------------------------------------------- the models


def cpp_models(
    recipe: Recipe,
    version: str,
    *,
    engine_dir: str,
    tokenizer_dir: str,
    draft_engine_dir: str | None,
    max_kv_tokens: int | None,
    num_nodes: int,
) -> dict[str, ModelConfig]:
    """The repository's models by folder. ``max_kv_tokens``: bound of the KV cache, None for a fraction."""
    table, batch = load_table(version), recipe.limits.max_batch_size
    name, drafting = recipe.serving.model_name, isinstance(recipe.speculation, DraftModelSpeculation)
    queue = Queue(batch, recipe.serving.max_queue_requests)
    copies = min(batch, MAX_INSTANCES)
    why_copies = {
        "": f"{copies} copies: as many requests as are to be in flight, or in-flight batching looks serial"
        + (f"\n(max_batch_size is {batch}; raise the count by hand)" if copies < batch else "")
    }

    def model(kind: str, folder: str, **fields: Any) -> ModelConfig:
        backend = {ENSEMBLE: None, ENGINE: "tensorrtllm"}.get(kind, "python")
        return ModelConfig(folder, backend, batch, table.inputs[kind], table.outputs[kind], **fields)

    steps = tuple(
        Step(name if step.model_name == ENGINE else step.model_name, step.input_map, step.output_map)
        for step in table.steps
    )
    bls = {"accumulate_tokens": "false", "tensorrt_llm_model_name": name}
    if drafting:
        bls["tensorrt_llm_draft_model_name"] = draft_name(recipe)
    tokenizer = {"tokenizer_dir": tokenizer_dir, "add_special_tokens": "true"}
    before = {**tokenizer, "gpt_model_path": engine_dir, "multimodal_model_path": ""}
    after = {"tokenizer_dir": tokenizer_dir, "skip_special_tokens": "true"}
    kv = _TWO_MODELS_KV_FRACTIONS if drafting else (_KV_FRACTION, 0.0)

    def engine(folder: str, path: str, quantization: Quantization, *, draft: bool) -> ModelConfig:
        parameters, comments = _engine_parameters(
            recipe,
            path,
            quantization,
            draft=draft,
            kv=kv[draft],
            max_kv_tokens=max_kv_tokens,
            num_nodes=num_nodes,
        )
        return model(
            ENGINE,
            folder,
            instances=1,
            decoupled=streams(recipe),
            queue=queue,
            parameters=parameters,
            comments=comments,
        )

    models = [
        model(ENSEMBLE, ENSEMBLE, steps=steps),
        model(
            PREPROCESSING,
            PREPROCESSING,
            instances=copies,
            queue=queue,
            parameters=before,
            comments=why_copies,
        ),
        engine(name, engine_dir, recipe.quantization, draft=False),
        model(POSTPROCESSING, POSTPROCESSING, instances=copies, parameters=after, comments=why_copies),
        model(
            BLS,
            BLS,
            instances=copies,
            decoupled=streams(recipe),
            parameters=bls,
            comments=_bls_comments(recipe, copies),
        ),
    ]
    if isinstance(recipe.speculation, DraftModelSpeculation):
        draft_format = recipe.speculation.quantization
        models.append(engine(draft_name(recipe), draft_engine_dir or "", draft_format, draft=True))
    return {config.name: config for config in models}


def _bls_comments(recipe: Recipe, copies: int) -> dict[str, str]:
    speculation = recipe.speculation
    if not isinstance(speculation, DraftModelSpeculation):
        return {"": f"{copies} copies: each works on one request at a time"}
    logits = recipe.acceptance.kind == "rejection"
    return {
        "": f"{copies} copies: each works on one request at a time\n"
        f"Requests ask for drafts: num_draft_tokens {speculation.num_draft_tokens}, use_draft_logits "
        f"{str(logits).lower()}, stream false; one prompt a request. No num_draft_tokens: no drafts."
    }


def _engine_parameters(
    recipe: Recipe,
    path: str,
    quantization: Quantization,
    *,
    draft: bool,
    kv: float,
    max_kv_tokens: int | None,
    num_nodes: int,
) -> tuple[dict[str, str], dict[str, str]]:
    """Parameters of the engine's model, and why they are what they are."""
    off = paged_context_off(recipe.model_copy(update={"quantization": quantization}))
    paged = off is None
    values = {
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": path,
        "max_beam_width": "1",
        "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
        "executor_worker_path": _WORKER,
        "batch_scheduler_policy": "guaranteed_no_evict",
        "exclude_input_in_output": "true",
        "cancellation_check_period_ms": "100",
        "stats_check_period_ms": "100",
        "enable_kv_cache_reuse": _text(paged),
        "enable_chunked_context": _text(paged and _chunks(recipe)),
        "kv_cache_free_gpu_mem_fraction": f"{kv:g}",
        # Read without a default: missing, the model does not load.
        "tokenizer_dir": "",
        "xgrammar_tokenizer_info_path": "",
        "guided_decoding_backend": "",
    }
    comments = {
        "gpt_model_path": "the draft engine" if draft else "the engine",
        "enable_kv_cache_reuse": "needs paged context attention" if paged else f"off: {off}",
        "kv_cache_free_gpu_mem_fraction": "of what is free once the engine is loaded: the GPU will look full",
        "tokenizer_dir": "the next three: guided decoding, which is off; the backend reads them anyway",
    }
    if isinstance(recipe.speculation, DraftModelSpeculation):
        ids = ",".join(map(str, range(recipe.parallel.tp * recipe.parallel.pp)))
        values["gpu_device_ids"] = ids
        comments["gpu_device_ids"] = "one for each rank of the engine; both engines share the GPUs"
        comments["kv_cache_free_gpu_mem_fraction"] = (
            "two engines share the GPUs, and each takes its part of what is free when it loads; assumed"
        )
    elif num_nodes > 1:
        values["num_nodes"] = str(num_nodes)
    if max_kv_tokens is not None and not draft:
        values["max_tokens_in_paged_kv_cache"] = str(max_kv_tokens)
        comments["max_tokens_in_paged_kv_cache"] = "limits.kv_cache_bytes over the bytes of a token"
    elif recipe.limits.kv_cache_bytes is not None and not draft:
        comments["kv_cache_free_gpu_mem_fraction"] = (
            f"limits.kv_cache_bytes ({recipe.limits.kv_cache_bytes}) is not applied: the bytes of a token "
            "were not known when this was rendered; write max_tokens_in_paged_kv_cache"
        )
    if not draft:
        values.update(_drafting_parameters(recipe))
        comments.update(_drafting_comments(recipe))
    return values, comments


def _text(flag: bool) -> str:
    return "true" if flag else "false"


def _chunks(recipe: Recipe) -> bool:
    """Chunked context, where a prompt needs it or nothing speaks against it. With drafted trees it is
    untried."""
    plain = isinstance(recipe.speculation, NoSpeculation | NgramSpeculation | DraftModelSpeculation)
    return plain or recipe.limits.max_input_tokens > recipe.limits.max_num_tokens


def _drafting_parameters(recipe: Recipe) -> dict[str, str]:
    match recipe.speculation:
        case MedusaSpeculation(choices=choices):
            values = {"decoding_mode": "medusa"}
            return values if choices is None else {**values, "medusa_choices": brace_form(choices)}
        case EagleSpeculation(choices=choices):
            return {"decoding_mode": "eagle", "eagle_choices": brace_form(choices or ())}
        case LookaheadSpeculation(window=window, ngram=ngram, verification_set=guesses):
            return {
                "decoding_mode": "lookahead",
                "lookahead_window_size": str(window),
                "lookahead_ngram_size": str(ngram),
                "lookahead_verification_set_size": str(guesses),
            }
        case _:
            return {"decoding_mode": "top_k_top_p"}


def _drafting_comments(recipe: Recipe) -> dict[str, str]:
    match recipe.speculation:
        case MedusaSpeculation(choices=None):
            return {
                "decoding_mode": "no medusa_choices: the backend takes its tree of 63 nodes (mc_sim_7b_63)"
            }
        case MedusaSpeculation() | EagleSpeculation():
            return {"decoding_mode": "must be the engine's speculative_decoding_mode"}
        case LookaheadSpeculation():
            return {"decoding_mode": "window, n-gram and verification set must not exceed the engine's"}
        case NgramSpeculation(num_draft_tokens=tokens):
            return {
                "decoding_mode": "nothing here looks drafts up: clients send draft_input_ids "
                f"({tokens} at most) to this model"
            }
        case _:
            return {}


# --------------------------------------------------------------------------- checks


def model_problems(models: Mapping[str, ModelConfig], version: str) -> Iterator[str]:
    """What is wrong with a repository of the C++ backend: parameters, names and values that do not fit."""
    table = load_table(version)
    for folder, config in models.items():
        kind = ENGINE if config.backend == "tensorrtllm" else folder
        known = table.parameters.get(kind)
        if known is None:
            allowed = ", ".join(sorted(table.parameters))
            yield f"{folder}: no such model in the backend's repository; allowed: {allowed}"
            continue
        for key in config.parameters.keys() - known:
            yield f"{folder}: parameter {key} is unknown; allowed: {', '.join(sorted(known))}"
        if kind == ENGINE:
            yield from _engine_problems(folder, config)
    for what, found in (
        ("max_batch_size", {config.max_batch_size for config in models.values()}),
        ("decoupled", {config.decoupled for config in models.values() if config.decoupled is not None}),
    ):
        if len(found) > 1:
            yield f"{what} differs between the models: {', '.join(map(str, sorted(found)))}; all must agree"
    if ENSEMBLE in models:
        yield from _wiring_problems(models[ENSEMBLE], models)


def _engine_problems(folder: str, config: ModelConfig) -> Iterator[str]:
    values = config.parameters
    for key in ("gpt_model_type", "gpt_model_path", "tokenizer_dir", "xgrammar_tokenizer_info_path"):
        if key not in values:
            yield f"{folder}: parameter {key} is missing; the backend reads it without a default"
    if not values.get("gpt_model_path"):
        yield f"{folder}: gpt_model_path is empty; name the engine's folder"
    if "cross_kv_cache_fraction" in values:
        yield f"{folder}: cross_kv_cache_fraction is for encoder-decoder models only; remove it"
    for key in ("medusa_choices", "eagle_choices"):
        if key in values:
            try:
                choices = parse_brace_form(values[key])
            except ValueError as error:
                yield f"{folder}: {key}: {error}"
            else:
                if brace_form(choices) != values[key]:
                    yield f"{folder}: {key}: found {values[key]}; write {brace_form(choices)}"


def _wiring_problems(ensemble: ModelConfig, models: Mapping[str, ModelConfig]) -> Iterator[str]:
    """Every tensor that a step takes or gives must be declared, and made before it is taken."""
    made = {tensor.name for tensor in ensemble.inputs}
    for step in ensemble.steps:
        model = models.get(step.model_name)
        if model is None:
            yield f"ensemble: a step names {step.model_name}, which is no model of the repository"
            continue
        declared = {tensor.name for tensor in model.inputs}
        for key, value in step.input_map.items():
            if key not in declared:
                yield f"ensemble: {step.model_name} has no input {key}"
            if value not in made:
                yield f"ensemble: nothing gives {value}, which {step.model_name} takes as {key}"
        required = {tensor.name for tensor in model.inputs if not tensor.optional}
        for name in sorted(required - step.input_map.keys()):
            yield f"ensemble: {step.model_name} requires {name}, and no tensor is mapped to it"
        given = {tensor.name for tensor in model.outputs}
        for key in step.output_map.keys() - given:
            yield f"ensemble: {step.model_name} has no output {key}"
        made |= set(step.output_map.values())
    for tensor in ensemble.outputs:
        if tensor.name not in made:
            yield f"ensemble: nothing gives the output {tensor.name}"
