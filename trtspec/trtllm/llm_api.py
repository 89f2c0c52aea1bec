"""The options of TensorRT-LLM's LLM API (PyTorch flow), as ``trtllm-serve`` and ``LLM()`` take them.

:func:`llm_options` gives the mapping in one version's spelling; :func:`to_yaml` its file. The weights that it
loads are a Hugging Face folder: the source, or what ``trtspec quantize`` exports with ModelOpt.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from trtspec.errors import Problem
from trtspec.recipe import (
    DraftModelSpeculation,
    Eagle3Speculation,
    NgramSpeculation,
    PytorchBackend,
    Quantization,
    Recipe,
    W4A8AwqQuantization,
    W4A16AwqQuantization,
    W8A8SqQuantization,
)
from trtspec.recipe_facts import is_quantized, paged_context_off
from trtspec.trtllm.checkpoint import Checkpoint
from trtspec.trtllm.command import Command, Paths
from trtspec.trtllm.facts import Facts
from trtspec.versions import parse_version

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_RESERVED = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")


def target_folder(recipe: Recipe, paths: Paths) -> str:
    """The checkpoint that is served: the quantized export in the work folder, else the source itself."""
    return f"{paths.work}/target" if is_quantized(recipe.quantization) else paths.model


def draft_folder(recipe: Recipe, paths: Paths) -> str | None:
    """The draft model's checkpoint, or None."""
    if not isinstance(recipe.speculation, DraftModelSpeculation):
        return None
    return f"{paths.work}/draft" if is_quantized(recipe.speculation.quantization) else paths.draft


# --------------------------------------------------------------------------- options


def llm_options(recipe: Recipe, facts: Facts, paths: Paths) -> dict[str, Any]:
    """LLM()'s keyword arguments but ``model``, for a ``pytorch`` recipe, not yet held against the table.

    Every size that the recipe states is written even where it equals a default: those differ by version."""
    backend, limits = recipe.backend, recipe.limits
    assert isinstance(backend, PytorchBackend)
    chunked = _chunked(recipe)
    kv_cache: dict[str, Any] = {"enable_block_reuse": _reuse(recipe, facts), "dtype": _kv_dtype(recipe)}
    if limits.kv_cache_bytes is not None:
        kv_cache["max_gpu_total_bytes"] = limits.kv_cache_bytes
    options: dict[str, Any] = {
        "dtype": backend.dtype,
        "tensor_parallel_size": recipe.parallel.tp,
        "pipeline_parallel_size": recipe.parallel.pp,
        "max_batch_size": limits.max_batch_size,
        "max_input_len": limits.max_input_tokens,
        "max_seq_len": limits.max_seq_tokens,
        "max_num_tokens": limits.max_num_tokens,
        "max_beam_width": 1,
        "enable_chunked_prefill": chunked,
        "attn_backend": backend.attention,
        "disable_overlap_scheduler": not overlap(recipe),
        "cuda_graph_config": (
            {"enable_padding": True, "max_batch_size": limits.max_batch_size} if backend.cuda_graphs else None
        ),
        "kv_cache_config": kv_cache,
        "scheduler_config": {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"},
        # Counts of drafted and accepted tokens, which a served engine is judged by.
        "enable_iter_perf_stats": True,
    }
    if "return_perf_metrics" in facts.classes["TorchLlmArgs"]:
        options["return_perf_metrics"] = True
    drafting = _speculative(recipe, facts, paths)
    if drafting is not None:
        options["speculative_config"] = drafting
    return options


def overlap(recipe: Recipe) -> bool:
    """Whether the next step is scheduled while this one runs: not for methods that draft between steps."""
    assert isinstance(recipe.backend, PytorchBackend)
    if isinstance(recipe.speculation, NgramSpeculation | DraftModelSpeculation):
        return False
    return recipe.backend.overlap_scheduler is not False


def _chunked(recipe: Recipe) -> bool:
    """Chunked prefill and KV reuse read a paged cache in the context kernel, which VANILLA has not."""
    assert isinstance(recipe.backend, PytorchBackend)
    return paged_context_off(recipe) is None and recipe.backend.attention != "VANILLA"


def _reuse(recipe: Recipe, facts: Facts) -> bool:
    """Until mid 2025 (pull request 5448, before 1.1) blocks could not be reused with a draft model."""
    drafts = isinstance(recipe.speculation, DraftModelSpeculation)
    return _chunked(recipe) and not (drafts and parse_version(facts.version) < parse_version("1.1"))


def _kv_dtype(recipe: Recipe) -> str:
    """auto: the checkpoint's, which then says nothing but 16 bit."""
    return "auto" if recipe.quantization.kv_cache == "none" else recipe.quantization.kv_cache


def kv_bytes_per_token(checkpoint: Checkpoint, kv_cache: str, tp: int = 1, pp: int = 1) -> float | None:
    """Bytes that one token's keys and values take on the fullest GPU; None if a size is not known.

    A GPU has at least one KV head: with fewer heads than GPUs that share a layer they are repeated."""
    heads, layers = checkpoint.num_kv_heads, checkpoint.num_layers
    dim = checkpoint.head_dim
    if dim is None and checkpoint.hidden_size and checkpoint.num_heads:
        dim = checkpoint.hidden_size // checkpoint.num_heads
    if not heads or not layers or not dim:
        return None
    element = {"none": 2.0, "fp8": 1.0, "int8": 1.0, "nvfp4": 0.5625}[kv_cache]  # nvfp4: a scale for 16
    return 2 * math.ceil(layers / pp) * max(1, heads // tp) * dim * element


def _speculative(recipe: Recipe, facts: Facts, paths: Paths) -> dict[str, Any] | None:
    speculation = recipe.speculation
    config: dict[str, Any]
    match speculation:
        case NgramSpeculation():
            config = {
                "decoding_type": "NGram",
                "max_draft_len": speculation.num_draft_tokens,
                "max_matching_ngram_size": speculation.max_ngram,
                "is_keep_all": True,
                # The latest place of this very sequence, as the recipe says; TensorRT-LLM's own defaults are
                # the oldest place, looked up across all requests.
                "is_use_oldest": False,
                "is_public_pool": False,
            }
        case DraftModelSpeculation():
            config = {
                "decoding_type": _spelling(facts, "Draft_Target", "DraftTarget"),
                "max_draft_len": speculation.num_draft_tokens,
                _model_key(facts): draft_folder(recipe, paths),
            }
        case Eagle3Speculation():
            config = {
                "decoding_type": _spelling(facts, "Eagle3", "Eagle"),
                "max_draft_len": speculation.depth or speculation.num_draft_tokens,
                _model_key(facts): paths.heads,
            }
            if "Eagle3" not in facts.decoding_types:
                config["eagle3_one_model"] = True
            if speculation.top_k > 1:
                config["use_dynamic_tree"] = True
                config["dynamic_tree_max_topK"] = speculation.top_k
                config["max_total_draft_tokens"] = speculation.num_draft_tokens
        case _:
            return None
    if speculation.max_concurrency is not None:
        config["max_concurrency"] = speculation.max_concurrency
    if recipe.acceptance.kind == "rejection":
        config["use_rejection_sampling"] = True
    return config


def _spelling(facts: Facts, new: str, old: str) -> str:
    return new if new in facts.decoding_types else old


def _model_key(facts: Facts) -> str:
    fields = facts.classes["DecodingBaseConfig"]
    return "speculative_model" if "speculative_model" in fields else "speculative_model_dir"


def option_problems(facts: Facts, options: Mapping[str, Any], model: str) -> list[Problem]:
    """What the version's classes do not take."""
    wrong = facts.check_keys("TorchLlmArgs", {"model": model, **options})
    # From 1.3 on the key's type is a union that the table does not hold; its members' common keys it does.
    if isinstance(graphs := options.get("cuda_graph_config"), Mapping):
        wrong += facts.check_keys("CudaGraphConfig", graphs, "cuda_graph_config")
    return [Problem(f"llm_api.yaml: {message}") for message in dict.fromkeys(wrong)]


def option_notes(recipe: Recipe) -> Iterator[str]:
    """What is written otherwise than the recipe says; what TensorRT-LLM then does is said by the rules."""
    if isinstance(recipe.backend, PytorchBackend) and recipe.backend.attention == "VANILLA":
        yield "backend.attention: VANILLA has no kernel for chunked prefill and KV reuse, which are off"


# --------------------------------------------------------------------------- commands


def checkpoint_commands(recipe: Recipe, paths: Paths) -> Iterator[Command]:
    """The commands that make the quantized checkpoints, if any."""
    if is_quantized(recipe.quantization):
        yield _quantize(recipe.quantization, paths.model, f"{paths.work}/target", "the target")
    if isinstance(recipe.speculation, DraftModelSpeculation) and is_quantized(
        recipe.speculation.quantization
    ):
        yield _quantize(recipe.speculation.quantization, paths.draft, f"{paths.work}/draft", "the draft")


def _quantize(quantization: Quantization, model: str, output: str, whose: str) -> Command:
    if "nvfp4" in (quantization.kind, quantization.kv_cache):
        return Command(
            "test",
            ("test", "-f", f"{output}/hf_quant_config.json"),
            f"{output} must hold {whose} as ModelOpt's own Hugging Face export in NVFP4, which trtspec does "
            "not make",
        )
    words = ["--model", model, "--format", quantization.kind, "--kv-cache", quantization.kv_cache]
    if isinstance(quantization, W4A16AwqQuantization | W4A8AwqQuantization):
        words += ["--group-size", str(quantization.group_size)]
    if isinstance(quantization, W8A8SqQuantization):
        words += ["--alpha", f"{quantization.alpha:g}"]
    if getattr(quantization, "lm_head", False):
        words += ["--lm-head"]
    for pattern in getattr(quantization, "exclude", ()):
        words += ["--exclude", pattern]
    calibration = quantization.calibration
    if calibration.data != "builtin":
        words += ["--calibration", calibration.data]
    words += ["--num-samples", str(calibration.num_samples), "--max-tokens", str(calibration.max_tokens)]
    words += ["--seed", str(calibration.seed), "-o", output]
    return Command(
        "trtspec quantize",
        ("trtspec", "quantize", *words),
        f"{whose} in {quantization.kind}, KV cache {quantization.kv_cache}, as a Hugging Face folder",
        output,
    )


def serve_command(recipe: Recipe, facts: Facts, model: str, options_file: str) -> Command:
    """``trtllm-serve``: an OpenAI endpoint, without Triton."""
    flags = facts.commands["trtllm-serve"]
    option = "--config" if "--config" in flags else "--extra_llm_api_options"
    serving = recipe.serving
    words = ("--backend", "pytorch", "--host", serving.host, "--port", str(serving.http_port))
    return Command(
        "trtllm-serve",
        ("trtllm-serve", "serve", model, *words, option, options_file),
        "an OpenAI endpoint without Triton",
    )


# --------------------------------------------------------------------------- YAML


def to_yaml(mapping: Mapping[str, Any], indent: int = 0) -> str:
    """Block YAML of mappings, lists, text, numbers, booleans and null; text that could read as something
    else is quoted as JSON, which YAML contains."""
    lines = []
    for key, value in mapping.items():
        where = "  " * indent + f"{key}:"
        if isinstance(value, Mapping) and value:
            lines += [where, to_yaml(value, indent + 1).rstrip("\n")]
        else:
            lines.append(f"{where} {_scalar(value)}")
    return "\n".join(lines) + "\n"


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _RESERVED:
        return value
    # Not ASCII only: JSON escapes characters beyond 16 bits as two, which YAML reads as two.
    return json.dumps(value, ensure_ascii=False)
