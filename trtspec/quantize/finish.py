"""From ModelOpt's export to the folder that is published.

* Unquantized tensors get the source's dtype back (they are exported in the dtype of loading).
* INT8 KV scales are added; the unified export has no INT8 KV cache. This layout is trtspec's own:
  ``k_proj.k_scale`` / ``v_proj.v_scale`` = max / 127 and ``"kv_cache_quant_algo": "INT8"``.
* config.json is the source's own plus the quantization, readable by transformers 4 and 5: transformers 5
  writes RoPE parameters that transformers 4 ignores, which gives another model without an error.
* Tokenizer, chat template and generation settings are the source's, byte for byte.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from trtspec.folders import write_json
from trtspec.modelspec import CONFIG, GENERATION_CONFIG, QUANT_CONFIG, ModelSpec
from trtspec.tensor_headers import INDEX_FILE, TensorHeader

SCALES = ("weight_scale", "weight_scale_2", "input_scale", "k_scale", "v_scale")
INT8_MAX = 127.0

COPIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    GENERATION_CONFIG,
)
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def finish(
    source: Path,
    export: Path,
    spec: ModelSpec,
    headers: Mapping[str, TensorHeader],
    int8_kv_ranges: Mapping[str, tuple[float, float]],
) -> None:
    """Turn the export in the folder ``export`` into its final form, in place.

    ``spec`` and ``headers`` describe ``source``; ``int8_kv_ranges`` are largest |K| and |V| by attention
    module, empty unless the KV cache is INT8.
    """
    _rewrite_weights(export, spec, headers, int8_kv_ranges)
    exported = json.loads((export / CONFIG).read_text())
    quantization_config = exported.get("quantization_config")
    if int8_kv_ranges:
        quantization_config = _add_int8_kv(export, quantization_config)
    config = portable_config(json.loads((source / CONFIG).read_text()), spec)
    config["quantization_config"] = quantization_config
    write_json(export / CONFIG, config)
    for name in COPIED_FILES:
        (export / name).unlink(missing_ok=True)
        if (source / name).is_file():
            shutil.copyfile(source / name, export / name)
    for path in source.iterdir():
        if path.is_file() and path.name.upper().startswith(("LICENSE", "LICENCE", "NOTICE")):
            shutil.copyfile(path, export / path.name)


def portable_config(source: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """``source`` (a config.json) with RoPE and dtype under the names of transformers 4 and of 5."""
    config = dict(source)
    config["rope_theta"] = spec.rope_theta
    config.pop("rope_scaling", None)
    if spec.rope_scaling is None:
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": spec.rope_theta}
    else:
        given = source.get("rope_scaling") or source["rope_parameters"]
        scaling = {key: value for key, value in given.items() if key not in ("rope_theta", "type")}
        scaling["rope_type"] = spec.rope_scaling["rope_type"]
        config["rope_scaling"] = scaling
        config["rope_parameters"] = {**scaling, "rope_theta": spec.rope_theta}
    config["torch_dtype"] = config["dtype"] = spec.dtype
    return config


def _rewrite_weights(
    export: Path,
    spec: ModelSpec,
    headers: Mapping[str, TensorHeader],
    int8_kv_ranges: Mapping[str, tuple[float, float]],
) -> None:
    narrow = getattr(torch, spec.dtype)
    scales: dict[str, torch.Tensor] = {}
    for module, (key, value) in int8_kv_ranges.items():
        scales[f"{module}.k_proj.k_scale"] = torch.tensor(key / INT8_MAX, dtype=torch.float32)
        scales[f"{module}.v_proj.v_scale"] = torch.tensor(value / INT8_MAX, dtype=torch.float32)
    paths = sorted(export.glob("*.safetensors"))
    for number, path in enumerate(paths):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if name.rpartition(".")[2] in SCALES or tensor.dtype not in (
                torch.float32,
                torch.float16,
                torch.bfloat16,
            ):
                continue
            wanted = _DTYPES[headers[name].dtype] if name in headers else narrow
            tensors[name] = tensor.to(wanted)
        if number == len(paths) - 1:
            tensors |= scales
        temporary = path.with_name(path.name + ".new")
        save_file(tensors, temporary, metadata={"format": "pt"})
        temporary.chmod(0o644)
        temporary.replace(path)
    index_path = export / INDEX_FILE
    if index_path.exists():
        _write_index(export, paths)


def _write_index(export: Path, paths: list[Path]) -> None:
    weight_map: dict[str, str] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            weight_map |= dict.fromkeys(file.keys(), path.name)
    total = sum(path.stat().st_size for path in paths)
    write_json(export / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _add_int8_kv(export: Path, quantization_config: dict[str, Any] | None) -> dict[str, Any]:
    import modelopt

    path = export / QUANT_CONFIG
    producer = {"name": "modelopt", "version": modelopt.__version__}
    if path.exists():
        value = json.loads(path.read_text())
    else:  # nothing but the KV cache is quantized, so the exporter saw a plain model
        value = {"producer": producer, "quantization": {"quant_algo": None, "exclude_modules": []}}
    value["quantization"]["kv_cache_quant_algo"] = "INT8"
    write_json(path, value)
    config = dict(quantization_config or {"producer": producer, "quant_method": "modelopt"})
    config["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "int"}
    return config
