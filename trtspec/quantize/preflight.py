"""Everything that can be refused before a model is loaded: a minute of calibration is not spent first.

No torch here. Facts about the model come from config.json and from the headers of the weight files.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec.available_memory import available_memory_bytes
from trtspec.errors import InputError, MissingError, Problem
from trtspec.folders import refuse_existing
from trtspec.model_check import check_model_folder
from trtspec.modelspec import ModelSpec, linear_modules
from trtspec.quantize import calibration
from trtspec.recipe import Quantization
from trtspec.recipe_facts import is_quantized
from trtspec.recipe_model import excluded_modules, group_findings, module_findings
from trtspec.recipe_yaml import dotted
from trtspec.tensor_headers import TensorHeader, read_tensor_headers
from trtspec.text import Tokenizer
from trtspec.user_files import read_user_json

NVFP4_MESSAGE = (
    "nvfp4: this version cannot read the exported layout back and check it, so it does not make one; "
    "use w4a16_awq (weights) or fp8 (KV cache)"
)

_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_PROCESS_BYTES = 1_000_000_000
"""Python with torch, transformers and ModelOpt imported, and what their allocators keep."""


@dataclass(frozen=True)
class Preflight:
    """What is known before work starts. ``linears`` maps each linear layer (lm_head among them when it is
    not tied) to [outputs, inputs]; ``quantized`` are those to quantize, ``excluded`` the others."""

    spec: ModelSpec
    linears: Mapping[str, tuple[int, int]]
    quantized: tuple[str, ...]
    excluded: tuple[str, ...]
    tokenizer: Tokenizer
    rows: calibration.Rows
    load_dtype: str
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def check(model_dir: Path, out_dir: Path, quantization: Quantization, device: str) -> Preflight:
    """Refuse what cannot work, all problems at once; nothing is written.

    Raises InputError for a wrong model folder, recipe or output folder, MissingError for a lack of
    packages, memory, disk or GPU.
    """
    refuse_existing(out_dir)
    if not is_quantized(quantization):
        raise InputError("quantization: kind none with kv_cache none leaves nothing to quantize")
    _require_tools()
    _refuse_nvfp4(quantization, device)

    if not model_dir.is_dir():
        raise InputError(Problem("no such folder; give a Hugging Face model folder", str(model_dir)))
    problems: list[Problem] = []
    found = check_model_folder(model_dir)
    spec, tokenizer = found.spec, found.tokenizer
    problems += found.problems
    samples = _collect(problems, lambda: calibration.read_samples(quantization.calibration.data))
    if spec is None:
        raise InputError(_unique(problems))
    if spec.quant is not None or "quantization_config" in read_user_json(model_dir / "config.json"):
        problems.append(
            Problem("already quantized; start from the 16-bit checkpoint", str(model_dir / "config.json"))
        )
        raise InputError(_unique(problems))
    linears = linear_modules(spec)
    excluded = excluded_modules(linears, quantization)
    quantized = tuple(module for module in linears if module not in excluded)
    for path, message in (*module_findings(spec, quantization), *group_findings(spec, quantization)):
        problems.append(Problem(message, key=dotted(("quantization", *path))))
    headers, _ = read_tensor_headers(model_dir)  # its problems are among check_weight_files'
    problems += _dtype_problems(headers)
    rows = None
    if tokenizer is not None and samples is not None:
        rows = _collect(
            problems,
            lambda: calibration.pack(
                samples, tokenizer, quantization.calibration, max_row_tokens=spec.max_positions
            ),
        )
    if problems or tokenizer is None or samples is None or rows is None:
        raise InputError(_unique(problems))

    warnings = []
    asked = quantization.calibration
    if rows.num_samples < asked.num_samples:
        warnings.append(
            f"calibration: {asked.num_samples} texts asked for (num_samples), {asked.data} has "
            f"{rows.num_samples}; all are used"
        )
    _require_room(out_dir, weight_bytes(model_dir))
    available = available_memory_bytes() if device == "cpu" else None
    load_dtype, notes = choose_load_dtype(spec, quantization, rows, available)
    return Preflight(
        spec,
        linears,
        quantized,
        tuple(excluded),
        tokenizer,
        rows,
        load_dtype,
        notes=tuple(notes),
        warnings=tuple(warnings),
    )


# --------------------------------------------------------------------------- single checks


def _unique(problems: list[Problem]) -> list[Problem]:
    return list(dict.fromkeys(problems))


def _collect(problems: list[Problem], action: Any) -> Any:
    try:
        return action()
    except InputError as error:
        problems.extend(error.problems)
        return None


def _require_tools() -> None:
    missing = [
        package
        for module, package in (
            ("torch", "torch"),
            ("modelopt", "nvidia-modelopt"),
            ("transformers", "transformers"),
            ("accelerate", "accelerate"),
        )
        if importlib.util.find_spec(module) is None
    ]
    if missing:
        raise MissingError(f"not installed: {', '.join(missing)}; pip install 'trtspec[quantize]'")
    version = importlib.metadata.version("nvidia-modelopt")
    if not version.startswith("0.47."):
        raise MissingError(
            f"nvidia-modelopt {version}: trtspec reads the layouts of 0.47; pip install 'trtspec[quantize]'"
        )


def _refuse_nvfp4(quantization: Quantization, device: str) -> None:
    asked = [
        key
        for key, value in (("kind", quantization.kind), ("kv_cache", quantization.kv_cache))
        if value == "nvfp4"
    ]
    if asked and device != "cuda":
        raise MissingError(
            f"quantization.{asked[0]}: nvfp4 is calibrated on a CUDA GPU only, this run is for {device}; "
            "use w4a16_awq (weights) or fp8 (KV cache)"
        )
    if asked:
        raise InputError(Problem(NVFP4_MESSAGE, key=f"quantization.{asked[0]}"))


def _dtype_problems(headers: Mapping[str, TensorHeader]) -> list[Problem]:
    odd = {
        header.dtype: (name, header) for name, header in headers.items() if header.dtype not in _DTYPE_BYTES
    }
    return [
        Problem(
            f"stored as {dtype}; a checkpoint in {', '.join(_DTYPE_BYTES)} is needed",
            str(header.file),
            key=name,
        )
        for dtype, (name, header) in odd.items()
    ]


def weight_bytes(folder: Path) -> int:
    """Size of the weight files of ``folder``."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _require_room(out_dir: Path, source_bytes: int) -> None:
    # Up to twice the source (16-bit weights as exported from float32), and one file of it written again.
    need = 3 * source_bytes + 50_000_000
    place = out_dir.absolute().parent
    while not place.is_dir():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < need:
        raise MissingError(
            f"{out_dir}: up to {need / 1e9:.2f} GB of disk are needed while exporting, "
            f"{free / 1e9:.2f} GB are free on {place}; make room or choose another --out"
        )


def estimate_memory_bytes(
    spec: ModelSpec, quantization: Quantization, rows: calibration.Rows, value_bytes: int
) -> int:
    """Peak resident size of quantizing on the CPU with weights loaded in ``value_bytes`` a value.

    Fitted to runs on SmolLM2-135M (fp8 2.0 GB, w8a8_sq 2.4, w4a16_awq 2.3, KV cache only 1.9): the weights,
    part of a second copy while exporting (all of it when weights are rescaled, as AWQ and SmoothQuant do),
    and the widest activations of one calibration batch.
    """
    batch_tokens = max((sum(map(len, batch)) for batch in calibration.batches(rows)), default=0)
    rescaled = quantization.kind in ("w4a16_awq", "w4a8_awq", "w8a8_sq")
    weights = spec.num_parameters * value_bytes * (2.0 if rescaled else 1.5)
    return int(_PROCESS_BYTES + weights + 8 * batch_tokens * spec.intermediate_size * value_bytes)


def choose_load_dtype(
    spec: ModelSpec, quantization: Quantization, rows: calibration.Rows, available: int | None
) -> tuple[str, list[str]]:
    """Float32 where it fits. The exporter divides by scales in the dtype that the weights are loaded in: in
    bfloat16 that rounds twice, and 3 % of FP8 codes come out one step off. Returns the dtype and notes;
    MissingError when ``available`` bytes do not suffice even for 16 bit."""
    narrow = "float16" if spec.dtype == "float16" else "bfloat16"
    wide_need = estimate_memory_bytes(spec, quantization, rows, 4)
    if available is None or wide_need <= available:
        return "float32", []
    need = estimate_memory_bytes(spec, quantization, rows, 2)
    if need > available:
        raise MissingError(
            f"about {need / 1e9:.1f} GB of memory are needed, {available / 1e9:.1f} GB are available; "
            "free memory, or quantize on a larger machine"
        )
    return narrow, [
        f"memory: loaded in {narrow}, float32 would need about {wide_need / 1e9:.1f} GB of the "
        f"{available / 1e9:.1f} GB available; some codes round twice (at most one step off)"
    ]
