"""Tiny checkpoints in the layout of ModelOpt's unified export, quantized by rounding to nearest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny import make_tiny_model
from torch import Tensor

E4M3_MAX = 448.0
GROUP = 32
ALGOS = (
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "W4A16_AWQ",
    "W4A8_AWQ",
    "W8A8_SQ_PER_CHANNEL",
    "W8A16",
)


def round_to_e4m3(x: Tensor) -> Tensor:
    """The nearest of all finite E4M3 values, ties to the even code, saturating; without bit tricks."""
    codes = torch.arange(127, dtype=torch.uint8)
    grid = codes.view(torch.float8_e4m3fn).double()
    magnitude = x.double().abs().clamp(max=E4M3_MAX)
    high = torch.searchsorted(grid, magnitude).clamp(max=126)
    low = (high - 1).clamp(min=0)
    to_low, to_high = magnitude - grid[low], grid[high] - magnitude
    pick_low = (to_low < to_high) | ((to_low == to_high) & (low % 2 == 0))
    return torch.where(pick_low, grid[low], grid[high]) * x.double().sign()


def pack_int4(codes: Tensor) -> Tensor:
    """[out, in] in -8..7 -> [out / 2, in] uint8, even rows in the low nibble (as ModelOpt packs)."""
    even, odd = codes[0::2].int() & 15, codes[1::2].int() & 15
    return (even | odd << 4).to(torch.uint8)


def quantize_weight(weight: Tensor, algo: str) -> tuple[dict[str, Tensor], Tensor]:
    """(stored tensors by suffix, the weight they stand for in float64)."""
    w = weight.double()
    if algo == "FP8":
        scale = (w.abs().max() / E4M3_MAX).float()
        codes = round_to_e4m3(w / scale.double())
        return {"weight": codes.to(torch.float8_e4m3fn), "weight_scale": scale}, codes * scale.double()
    if algo == "FP8_PER_CHANNEL_PER_TOKEN":
        scale = (w.abs().amax(1) / E4M3_MAX).float()
        codes = round_to_e4m3(w / scale.double()[:, None])
        value = codes * scale.double()[:, None]
        return {"weight": codes.to(torch.float8_e4m3fn), "weight_scale": scale}, value
    if algo in ("W8A16", "W8A8_SQ_PER_CHANNEL"):
        scale = (w.abs().amax(1) / 127).float()
        codes = (w / scale.double()[:, None]).round().clamp(-128, 127)
        return {"weight": codes.to(torch.int8), "weight_scale": scale}, codes * scale.double()[:, None]
    rows, columns = w.shape
    grouped = w.view(rows, columns // GROUP, GROUP)
    scale = (grouped.abs().amax(-1) / 7).float()
    codes = (grouped / scale.double()[:, :, None]).round().clamp(-8, 7)
    value = (codes * scale.double()[:, :, None]).view(rows, columns)
    tensors = {"weight": pack_int4(codes.view(rows, columns)), "weight_scale": scale}
    if algo == "W4A8_AWQ":
        scale_2 = (w.abs().max() / E4M3_MAX).float()
        tensors["weight_scale_2"] = scale_2
        value = round_to_e4m3(value / scale_2.double()) * scale_2.double()
    return tensors, value


def make_quantized_model(
    folder: Path,
    algo: str,
    *,
    family: Any = "llama",
    kv_algo: str | None = None,
    pre_quant: tuple[str, ...] = ("o_proj", "down_proj"),
    exclude: tuple[str, ...] = ("lm_head", "model.embed_tokens"),
    write_group_size: bool = True,
    edit: Any = None,
) -> tuple[Path, Path]:
    """(export, the plain float64 checkpoint with the very weights that the export stands for).

    ``pre_quant``: projections that get a ``pre_quant_scale``, multiplied into the plain twin's columns.
    ``edit`` is called with the export's tensors before they are written.
    """
    export, plain = folder / "export", folder / "plain"
    make_tiny_model(plain, family, dtype="float64", tokenizer=False)
    make_tiny_model(export, family, tokenizer=False)
    source = load_file(plain / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    stored: dict[str, Tensor] = {}
    twin: dict[str, Tensor] = {}
    for name, weight in source.items():
        module = name.removesuffix(".weight")
        if not name.endswith("_proj.weight") or module in exclude:
            stored[name] = twin[name] = weight
            continue
        tensors, value = quantize_weight(weight, algo)
        kind = module.rsplit(".", 1)[1]
        if algo in ("FP8", "W4A8_AWQ"):
            tensors["input_scale"] = torch.tensor(0.02, dtype=torch.float32)
        if algo == "W8A8_SQ_PER_CHANNEL":
            tensors["input_scale"] = torch.tensor(0.04, dtype=torch.float32)
        if kind in pre_quant and algo in ("W4A16_AWQ", "W4A8_AWQ", "W8A8_SQ_PER_CHANNEL"):
            smooth = (torch.rand(weight.shape[1], generator=generator) + 0.5).to(torch.bfloat16)
            tensors["pre_quant_scale"] = smooth
            value = value * smooth.double()
        stored |= {f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}
        twin[name] = value
    if kv_algo:
        for i in range(2):
            stored[f"model.layers.{i}.self_attn.k_proj.k_scale"] = torch.tensor(0.03 + 0.01 * i)
            stored[f"model.layers.{i}.self_attn.v_proj.v_scale"] = torch.tensor(0.02 + 0.01 * i)
    if edit:
        edit(stored)
    stored = {name: tensor.contiguous() for name, tensor in stored.items()}
    save_file(stored, export / "model.safetensors", metadata={"format": "pt"})
    save_file(twin, plain / "model.safetensors", metadata={"format": "pt"})
    quantization: dict[str, Any] = {
        "quant_algo": algo,
        "kv_cache_quant_algo": kv_algo,
        "exclude_modules": list(exclude),
    }
    if algo.startswith("W4") and write_group_size:
        quantization |= {"group_size": GROUP, "has_zero_point": False, "pre_quant_scale": True}
    (export / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": quantization})
    )
    config = json.loads((export / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": algo}
    (export / "config.json").write_text(json.dumps(config))
    return export, plain
