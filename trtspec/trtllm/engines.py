"""The commands that make TensorRT-LLM engines: convert or quantize, then ``trtllm-build``.

Which tool makes the checkpoint (TensorRT-LLM's own format, one per rank):

- Medusa on 16 bit: ``medusa/convert_checkpoint.py``; EAGLE: ``eagle/convert_checkpoint.py``;
- 16-bit Llama, Mistral, Qwen2, Qwen3: the model's own ``convert_checkpoint.py``, in ``examples/llama`` up to
  0.18 and in ``examples/models/core/llama`` from 0.19 on (the repository's history has both);
- everything else, and 16 bit of any other architecture (``full_prec``): ``quantization/quantize.py``.

Facts of quantize.py used here were read in tensorrt_llm/quantization/quantize_by_modelopt.py of the 1.0 line:
the local calibration folder, AWQ's 32 texts, lm_head for FP8 only, 16-bit Medusa heads loaded as float16.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from trtspec.errors import Problem
from trtspec.recipe import (
    DraftModelSpeculation,
    EagleSpeculation,
    LookaheadSpeculation,
    MedusaSpeculation,
    NgramSpeculation,
    Quantization,
    Recipe,
    TensorrtBackend,
    TreePaths,
    W4A8AwqQuantization,
    W4A16AwqQuantization,
)
from trtspec.recipe_facts import drafted_positions, is_quantized, paged_context_off
from trtspec.trtllm.command import Command, Paths
from trtspec.versions import parse_version

QFORMATS = {
    "none": "full_prec",
    "fp8": "fp8",
    "w4a16_awq": "int4_awq",
    "w4a8_awq": "w4a8_awq",
    "w8a8_sq": "int8_sq",
    "nvfp4": "nvfp4",
}
"""Recipe's weight format -> quantize.py's ``--qformat``."""
_CONVERTERS = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen",
    "Qwen3ForCausalLM": "qwen",
}
_FP8_COMPUTING = ("fp8", "w4a8_awq", "nvfp4")
"""Weights whose context attention runs in FP8 over an FP8 KV cache."""
_CORE_EXAMPLES = parse_version("0.19")
DEFAULT_MEDUSA_HEADS = 4
"""Of the default tree mc_sim_7b_63, whose paths are 4 deep, and of the convert script."""
_AWQ_TEXTS = 32


@dataclass(frozen=True)
class EngineCommands:
    """``target`` and ``draft`` are engine folders. ``problems`` are what the tools have no option for."""

    commands: tuple[Command, ...]
    target: str
    draft: str | None
    notes: tuple[str, ...]
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class _Part:
    """One of the recipe's models: the target or the draft."""

    key: str
    """Its mapping's path in the recipe, with a dot behind it, or empty."""
    model: str
    checkpoint: str
    engine: str
    quantization: Quantization
    architecture: str | None


def engine_commands(
    recipe: Recipe,
    version: str,
    paths: Paths,
    *,
    architecture: str | None = None,
    draft_architecture: str | None = None,
    num_heads: int | None = None,
) -> EngineCommands:
    """The commands for a ``tensorrt`` recipe, flags not yet held against the version's table.

    ``architecture``: as config.json names it, None if unknown; it chooses the script that converts 16-bit
    weights. ``num_heads``: Medusa heads that were trained."""
    work, speculation = paths.work, recipe.speculation
    target = _Part("", paths.model, f"{work}/target", f"{work}/engine", recipe.quantization, architecture)
    commands = [*_checkpoint(recipe, version, paths, target, num_heads), _build(recipe, target, draft=False)]
    problems = list(_problems(recipe, target, num_heads))
    notes = list(_notes(recipe, target))
    draft = None
    if isinstance(speculation, DraftModelSpeculation):
        draft = _Part(
            "speculation.",
            paths.draft,
            f"{work}/draft",
            f"{work}/draft_engine",
            speculation.quantization,
            draft_architecture,
        )
        commands += [*_checkpoint(recipe, version, paths, draft, None), _build(recipe, draft, draft=True)]
        problems += _problems(recipe, draft, None)
        notes += _notes(recipe, draft)
    return EngineCommands(
        tuple(commands), target.engine, draft.engine if draft else None, tuple(notes), tuple(problems)
    )


# --------------------------------------------------------------------------- checkpoint


def _checkpoint(
    recipe: Recipe, version: str, paths: Paths, part: _Part, num_heads: int | None
) -> Iterator[Command]:
    speculation = recipe.speculation if not part.key else None
    plain = not is_quantized(part.quantization)
    if isinstance(speculation, EagleSpeculation):
        yield _eagle(recipe, paths, part, speculation)
    elif isinstance(speculation, MedusaSpeculation) and plain:
        yield _medusa(recipe, paths, part, speculation, num_heads)
    elif plain and part.architecture in _CONVERTERS:
        yield _convert(recipe, version, paths, part, _CONVERTERS[part.architecture or ""])
    else:
        yield _quantize(recipe, paths, part, speculation, num_heads)


def _parallel(recipe: Recipe) -> tuple[str, ...]:
    return ("--tp_size", str(recipe.parallel.tp), "--pp_size", str(recipe.parallel.pp))


def _workers(recipe: Recipe) -> tuple[str, ...]:
    return ("--workers", str(recipe.parallel.tp * recipe.parallel.pp))


def _places(recipe: Recipe, part: _Part) -> tuple[str, ...]:
    return (
        "--model_dir", part.model, "--output_dir", part.checkpoint, "--dtype", recipe.backend.dtype
    )  # fmt: skip


def _convert(recipe: Recipe, version: str, paths: Paths, part: _Part, name: str) -> Command:
    folder = f"models/core/{name}" if parse_version(version) >= _CORE_EXAMPLES else name
    script = f"{paths.examples}/{folder}/convert_checkpoint.py"
    return Command(
        f"{name}/convert_checkpoint.py",
        ("python3", script, *_places(recipe, part), *_parallel(recipe), *_workers(recipe)),
        f"the {recipe.backend.dtype} weights as a TensorRT-LLM checkpoint",
        part.checkpoint,
    )


def medusa_heads(speculation: MedusaSpeculation, num_heads: int | None) -> int:
    """Heads that an engine is built with: those trained, else the tree's depth (4 of the default one)."""
    if num_heads is not None:
        return num_heads
    return max((len(path) for path in speculation.choices or ()), default=DEFAULT_MEDUSA_HEADS)


def _medusa(
    recipe: Recipe, paths: Paths, part: _Part, speculation: MedusaSpeculation, num_heads: int | None
) -> Command:
    script = f"{paths.examples}/medusa/convert_checkpoint.py"
    heads = (
        "--medusa_model_dir", paths.heads,
        "--num_medusa_heads", str(medusa_heads(speculation, num_heads)),
        "--max_medusa_token_len", str(drafted_positions(speculation)),
    )  # fmt: skip
    return Command(
        "medusa/convert_checkpoint.py",
        ("python3", script, *_places(recipe, part), *heads, *_parallel(recipe), *_workers(recipe)),
        "target and Medusa heads in one checkpoint; as many draft tokens as the tree has nodes",
        part.checkpoint,
    )


def _eagle(recipe: Recipe, paths: Paths, part: _Part, speculation: EagleSpeculation) -> Command:
    script = f"{paths.examples}/eagle/convert_checkpoint.py"
    head = (
        "--eagle_model_dir", paths.heads,
        "--max_draft_len", str(drafted_positions(speculation)),
        "--num_eagle_layers", str(speculation.depth),
        "--max_non_leaves_per_layer", str(_non_leaves(speculation)),
    )  # fmt: skip
    return Command(
        "eagle/convert_checkpoint.py",
        ("python3", script, *_places(recipe, part), *head, *_parallel(recipe), *_workers(recipe)),
        "target and EAGLE head in one checkpoint",
        part.checkpoint,
    )


def _non_leaves(speculation: EagleSpeculation) -> int:
    """Nodes of one level that have children, at most: top_k of a dynamic tree, counted in a static one."""
    return speculation.top_k if speculation.choices is None else non_leaves_per_level(speculation.choices)


def non_leaves_per_level(choices: TreePaths) -> int:
    """The most nodes with children on one level of a static tree; the root counts as one."""
    parents = {path[:-1] for path in choices if path}
    return max(Counter(len(path) for path in parents).values(), default=1)


def _quantize(
    recipe: Recipe,
    paths: Paths,
    part: _Part,
    speculation: object,
    num_heads: int | None,
) -> Command:
    quantization = part.quantization
    words = [*_places(recipe, part), "--qformat", QFORMATS[quantization.kind]]
    if isinstance(quantization, W4A16AwqQuantization | W4A8AwqQuantization):
        words += ["--awq_block_size", str(quantization.group_size)]
    if quantization.kv_cache != "none":
        words += ["--kv_cache_dtype", quantization.kv_cache]
    if getattr(quantization, "lm_head", False):
        words += ["--quantize_lm_head"]
    calibrated = is_quantized(quantization)
    if calibrated:
        calibration = quantization.calibration
        words += ["--calib_dataset", paths.calibration, "--calib_size", str(calibration.num_samples)]
        words += ["--calib_max_seq_length", str(calibration.max_tokens), "--seed", str(calibration.seed)]
        if calibration.max_tokens > 2048:
            words += ["--tokenizer_max_seq_length", str(calibration.max_tokens)]
    if isinstance(speculation, MedusaSpeculation):
        words += ["--medusa_model_dir", paths.heads]
        words += ["--num_medusa_heads", str(medusa_heads(speculation, num_heads))]
        words += ["--max_draft_len", str(drafted_positions(speculation))]
        if speculation.quantization == "fp8":
            words += ["--quant_medusa_head"]
    words += _parallel(recipe)
    what = f"calibrate and export {quantization.kind}" if calibrated else "export without quantizing"
    return Command(
        "quantize.py",
        ("python3", f"{paths.examples}/quantization/quantize.py", *words),
        f"{what}, KV cache {quantization.kv_cache}, as a TensorRT-LLM checkpoint",
        part.checkpoint,
    )


# --------------------------------------------------------------------------- trtllm-build


def _build(recipe: Recipe, part: _Part, *, draft: bool) -> Command:
    backend, limits, quantization = recipe.backend, recipe.limits, part.quantization
    assert isinstance(backend, TensorrtBackend)
    paged = paged_context_off(recipe.model_copy(update={"quantization": quantization})) is None
    fp8_attention = quantization.kv_cache == "fp8" and quantization.kind in _FP8_COMPUTING
    # With external draft tokens each step is a new request whose prompt is everything said so far.
    external = isinstance(recipe.speculation, DraftModelSpeculation | NgramSpeculation)
    max_input = limits.max_seq_tokens - 1 if external else limits.max_input_tokens
    words = [
        "--checkpoint_dir", part.checkpoint,
        "--output_dir", part.engine,
        "--max_batch_size", str(limits.max_batch_size),
        "--max_input_len", str(max_input),
        "--max_seq_len", str(limits.max_seq_tokens),
        "--max_num_tokens", str(limits.max_num_tokens),
        "--max_beam_width", "1",
        "--kv_cache_type", "paged",
        "--remove_input_padding", "enable",
        "--gpt_attention_plugin", "auto",
        "--gemm_plugin", "auto",
        "--context_fmha", "enable",
        "--use_paged_context_fmha", _switch(paged),
        "--use_fp8_context_fmha", _switch(fp8_attention),
        "--multiple_profiles", _switch(backend.multiple_profiles),
        *_workers(recipe),
    ]  # fmt: skip
    if not draft:
        words += _drafting(recipe)
    if external and recipe.acceptance.kind == "rejection":
        words += ["--gather_generation_logits"]
    return Command(
        "trtllm-build",
        ("trtllm-build", *words),
        "the engine of the draft model" if draft else "the engine",
        part.engine,
    )


def _switch(on: bool) -> str:
    return "enable" if on else "disable"


def _drafting(recipe: Recipe) -> list[str]:
    match recipe.speculation:
        case LookaheadSpeculation():
            mode = "lookahead_decoding"
        case MedusaSpeculation():
            mode = "medusa"
        case EagleSpeculation():
            mode = "eagle"
        case NgramSpeculation() | DraftModelSpeculation():
            mode = "draft_tokens_external"
        case _:
            return []
    length = drafted_positions(recipe.speculation)
    return ["--speculative_decoding_mode", mode, "--max_draft_len", str(length)]


# --------------------------------------------------------------------------- what the tools cannot be told


def _problems(recipe: Recipe, part: _Part, num_heads: int | None) -> Iterator[Problem]:
    """Beyond the rules, which do not know the heads: a tree that is deeper than they reach."""
    speculation = recipe.speculation
    if part.key or not isinstance(speculation, MedusaSpeculation) or num_heads is None:
        return
    deep = max((len(path) for path in speculation.choices or ()), default=DEFAULT_MEDUSA_HEADS)
    if deep > num_heads:
        tree = "the default tree" if speculation.choices is None else "the longest path"
        yield Problem(
            f"{tree} is {deep} deep and {num_heads} heads were trained; write choices of at most "
            f"{num_heads} levels",
            key="speculation.choices",
        )


def _notes(recipe: Recipe, part: _Part) -> Iterator[str]:
    """What is written otherwise than the recipe says; what TensorRT-LLM then does is said by the rules."""
    quantization = part.quantization
    calibrated = quantization.kind != "none" or quantization.kv_cache != "none"
    key = f"{part.key}quantization.calibration"
    if calibrated:
        yield (
            f"{key}.data: {quantization.calibration.data}; quantize.py reads a data set of the hub, or a "
            "folder of JSONL with text: the one that CALIB_DATASET names"
        )
    if "awq" in quantization.kind and quantization.calibration.num_samples > _AWQ_TEXTS:
        yield (
            f"{key}.num_samples: {quantization.calibration.num_samples}; quantize.py takes {_AWQ_TEXTS} "
            "for AWQ"
        )
    if part.key:
        return
    speculation = recipe.speculation
    if isinstance(speculation, MedusaSpeculation) and calibrated and recipe.backend.dtype != "float16":
        yield f"speculation.heads: quantize.py loads them as float16, the target is {recipe.backend.dtype}"
    if isinstance(speculation, DraftModelSpeculation | NgramSpeculation):
        yield (
            f"limits.max_input_tokens: {recipe.limits.max_input_tokens}; the engine admits "
            f"{recipe.limits.max_seq_tokens - 1}, because every step sends what was said so far as a prompt"
        )
