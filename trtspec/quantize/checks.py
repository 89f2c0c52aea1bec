"""Whether an export may be used. Each check is one property; all problems are reported together.

Every one of these has happened to someone with ModelOpt or TensorRT-LLM: scales that calibration never set,
a quantized router or output projection, a config that lost its RoPE scaling, a folder without tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trtspec.errors import GateFailed, InputError, Problem
from trtspec.modelspec import CONFIG, QUANT_CONFIG, check_weight_files, read_modelspec
from trtspec.quantize.finish import COPIED_FILES, SCALES
from trtspec.quantize.readback import Tensors
from trtspec.quantize.report import LayerReport

_NEEDED = {
    "fp8": ("weight_scale", "input_scale"),
    "w4a16_awq": ("weight_scale",),
    "w4a8_awq": ("weight_scale", "weight_scale_2", "input_scale"),
    "w8a8_sq": ("weight_scale", "input_scale", "pre_quant_scale"),
    "nvfp4": ("weight_scale", "weight_scale_2", "input_scale"),
    "none": (),
}
_NEVER = re.compile(r"embed_tokens|norm|router|\.gate\.|shared_expert_gate")


def scales(
    export: Tensors, quantized: Collection[str], kind: str, kv_cache: str, num_layers: int
) -> list[str]:
    """Every scale that ``kind`` and ``kv_cache`` need is there, finite, positive, and was set.

    A kind of scale that is 1.0 throughout the model was never calibrated.
    """
    problems = []
    wanted = [f"{module}.{scale}" for module in quantized for scale in _NEEDED[kind]]
    if kv_cache != "none":
        for layer in range(num_layers):
            wanted += [f"model.layers.{layer}.self_attn.{part}_proj.{part}_scale" for part in "kv"]
    missing = [name for name in wanted if name not in export]
    if missing:
        problems.append(f"{len(missing)} scales are missing, first {missing[0]}")
    all_ones: dict[str, bool] = {}
    for name in export:
        suffix = name.rpartition(".")[2]
        if suffix not in (*SCALES, "pre_quant_scale"):
            continue
        scale = export[name].float()
        if not bool(torch.isfinite(scale).all()):
            problems.append(f"{name} is not finite")
        elif not bool((scale > 0).all()):
            problems.append(f"{name} is not positive (smallest {float(scale.min()):g})")
        all_ones[suffix] = all_ones.get(suffix, True) and bool((scale == 1).all())
    problems += [
        f"every {suffix} is exactly 1.0: never calibrated" for suffix, ones in all_ones.items() if ones
    ]
    return problems


def selection(export: Tensors, quantized: Collection[str]) -> list[str]:
    """Exactly the modules in ``quantized`` hold codes; embeddings, norms and routers never do."""
    holding = {
        name.removesuffix(".weight")
        for name, header in export.headers.items()
        if name.endswith(".weight") and header.dtype in ("U8", "I8", "F8_E4M3")
    }
    problems = [f"{module} is quantized and must not be" for module in sorted(holding - set(quantized))]
    problems += [f"{module} is not quantized" for module in sorted(set(quantized) - holding)]
    problems += [f"{module} must never be quantized" for module in sorted(holding) if _NEVER.search(module)]
    return problems


def unquantized_weights(
    source: Mapping[str, Tensor], export: Tensors, quantized: Collection[str], kind: str
) -> list[str]:
    """Tensors that are not quantized equal the source's, but for norms into which AWQ folded a scale.

    That those fit the weights behind them is :func:`fidelity`'s to see.
    """
    problems = []
    may_fold = kind.endswith("_awq")
    for name in source:
        if name.removesuffix(".weight") in quantized:
            continue
        if name not in export:
            if name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq"):
                problems.append(f"{name} is missing")
            continue
        before, after = source[name], export[name]
        if after.dtype != before.dtype:
            problems.append(f"{name} became {after.dtype}, was {before.dtype}")
        elif after.shape != before.shape or not bool(torch.isfinite(after).all()):
            problems.append(f"{name} changed its shape or is not finite")
        elif not torch.equal(after, before) and not (may_fold and name.endswith("layernorm.weight")):
            problems.append(f"{name} changed although it is not quantized")
    return problems


MAX_MISROUNDED = {"float32": 0.01, "bfloat16": 0.1, "float16": 0.1}
"""By dtype of loading. Measured: none from float32, 3 % (FP8) from bfloat16, which rounds twice."""


def fidelity(layers: Sequence[LayerReport], load_dtype: str) -> list[str]:
    """Codes, scales and folded norms belong together: the codes are the nearest to the source's weights."""
    return [
        f"{layer.module}: {100 * layer.misrounded:.1f} % of its codes are not the nearest to the source"
        for layer in layers
        if not layer.misrounded <= MAX_MISROUNDED[load_dtype]
    ]


def config(source: Path, export: Path, kind: str, kv_cache: str) -> list[str]:
    """The model that config.json describes is the source's, under the names of transformers 4 and 5."""
    before, after = read_modelspec(source), read_modelspec(export)
    problems = [
        f"config.json: {name} is {getattr(after, name)!r}, was {getattr(before, name)!r}"
        for name in before.__dataclass_fields__
        if name != "quant" and getattr(after, name) != getattr(before, name)
    ]
    raw = json.loads((export / CONFIG).read_text())
    for key, value, wanted in (
        ("rope_theta", raw.get("rope_theta"), before.rope_theta),
        (
            "rope_parameters.rope_theta",
            (raw.get("rope_parameters") or {}).get("rope_theta"),
            before.rope_theta,
        ),
        ("rope_scaling", _rope_type(raw.get("rope_scaling")), _rope_type(before.rope_scaling)),
        ("rope_parameters", _rope_type(raw.get("rope_parameters")), _rope_type(before.rope_scaling)),
        ("torch_dtype", raw.get("torch_dtype"), before.dtype),
        ("dtype", raw.get("dtype"), before.dtype),
        (
            "quantization_config.quant_method",
            (raw.get("quantization_config") or {}).get("quant_method"),
            "modelopt",
        ),
    ):
        if value != wanted:
            problems.append(f"config.json: {key} is {value!r}, must be {wanted!r}")
    quant = after.quant
    wanted_kv = None if kv_cache == "none" else kv_cache.upper()
    if quant is None:
        problems.append(f"{QUANT_CONFIG} is missing")
    elif quant.kv_algo != wanted_kv or (quant.algo is None) != (kind == "none"):
        problems.append(
            f"{QUANT_CONFIG} says {quant.algo} with KV {quant.kv_algo}, asked for {kind} with {kv_cache}"
        )
    return problems


def _rope_type(section: Mapping[str, Any] | None) -> str:
    return str((section or {}).get("rope_type", "default"))


def excluded_modules(export: Path, linears: Collection[str], quantized: Collection[str]) -> list[str]:
    """hf_quant_config.json's exclude_modules, which loaders go by, describe what the files hold."""
    quant = read_modelspec(export).quant
    if quant is None or quant.algo is None:
        return []
    return [
        f"{QUANT_CONFIG}: exclude_modules {'leaves out' if module in quantized else 'lacks'} {module}"
        for module in linears
        if quant.covers(module) != (module in quantized)
    ]


def copied_files(source: Path, export: Path) -> list[str]:
    """Tokenizer, chat template and generation settings are the source's, byte for byte."""
    problems = []
    for name in COPIED_FILES:
        before, after = source / name, export / name
        if before.is_file() != after.is_file():
            problems.append(f"{name} is {'missing' if before.is_file() else 'not from the source'}")
        elif before.is_file() and before.read_bytes() != after.read_bytes():
            problems.append(f"{name} differs from the source's")
    return problems


def weight_files(export: Path) -> list[str]:
    """Names and shapes fit what config.json and hf_quant_config.json promise."""
    return [str(problem) for problem in check_weight_files(export)]


def run(checks: Mapping[str, Callable[[], list[str]]]) -> list[str]:
    """Run every check and return their names; GateFailed with all that they found."""
    problems = []
    for name, check in checks.items():
        try:
            found = check()
        except InputError as error:
            found = [str(problem) for problem in error.problems]
        problems += [f"{name}: {problem}" for problem in found]
    if problems:
        shown = [str(Problem(problem)) for problem in problems[:20]]
        more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
        raise GateFailed("\n".join(["the exported checkpoint is not usable and was removed:", *shown, *more]))
    return list(checks)
