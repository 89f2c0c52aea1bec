"""Post-training quantization with NVIDIA ModelOpt 0.47: load, calibrate, export.

What is known about it and steers this module:

* The exporter divides weights by scales in the dtype they are loaded in; float32 keeps codes faithful.
* Matrix products of the calibration may run in bfloat16 (``set_float32_matmul_precision``): activations
  are measured as a 16-bit engine computes them, several times faster on CPUs with bfloat16 units.
* The unified export knows no INT8 KV cache and fails on it: its ranges are taken out beforehand, see
  :func:`take_int8_kv_ranges`.
* The exporter repeats rules that only show up after a long calibration; :mod:`.preflight` has them.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import io
import logging
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from trtspec.errors import InputError, MissingError, Problem
from trtspec.quantize.preflight import NVFP4_MESSAGE
from trtspec.recipe import (
    Fp8Quantization,
    NoQuantization,
    Nvfp4Quantization,
    Quantization,
    W4A8AwqQuantization,
    W4A16AwqQuantization,
    W8A8SqQuantization,
)

Progress = Callable[[str, int, int], None]
TokenBatches = Sequence[Sequence[Sequence[int]]]
"""Batches of rows of token ids; the rows of a batch are equally long."""

SEARCH_TOKENS = 2048
"""AWQ tries 11 scales for each layer on this many of the calibration tokens; the statistics come from all
of them. On SmolLM2-135M, groups of 64, searching on 10,000 took 169 s of CPU instead of 56 and gave a
perplexity of 26.8 instead of 27.0."""


_NOISE = re.compile(
    r"torch_dtype|lm_head is not calibrated|original dtype|Using `export_dir`|is deprecated|"
    r"Unable to find (a )?valid CUDA|CUDA(_HOME)? (is )?not (available|found)|No CUDA|triton|"
    r"torch\.cuda|lm_eval|not installed|Failed to import|generation flags are not valid|"
    r"To copy construct from a tensor|Tied weight \(declared\)"
)


class _Redirected(io.TextIOBase):
    """A stream whose target can change: libraries keep the stderr they saw when they were imported."""

    target: TextIO | None = None

    def write(self, text: str) -> int:
        if self.target is not None:
            self.target.write(text)
        return len(text)

    def flush(self) -> None:
        if self.target is not None:
            self.target.flush()


_STREAM = _Redirected()


@contextlib.contextmanager
def quiet(log: Path) -> Iterator[list[str]]:
    """Send what the tools print and log to the file ``log``; yield the list of warnings worth a user's eye.

    The list fills while the block runs: warnings and log records from WARNING up, each once, without what
    is known to be noise.
    """
    found: list[str] = []

    def keep(message: str) -> None:
        line = " ".join(message.split())
        if line and line not in found and not _NOISE.search(line):
            found.append(line)

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            with contextlib.suppress(Exception):
                _STREAM.write(f"{record.levelname} {record.name}: {record.getMessage()}\n")
                if record.levelno >= logging.WARNING:
                    keep(record.getMessage())

    def show(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        _STREAM.write(f"warning: {message}\n")
        keep(str(message))

    handler = Collector()
    with log.open("a", encoding="utf-8") as file, warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = show
        _STREAM.target = file
        loggers = [logging.getLogger(), logging.getLogger("transformers"), logging.getLogger("modelopt")]
        for logger in loggers:
            logger.addHandler(handler)
        try:
            with contextlib.redirect_stdout(_STREAM), contextlib.redirect_stderr(_STREAM):
                yield found
        finally:
            for logger in loggers:
                logger.removeHandler(handler)
            _STREAM.target = None


def keep_freed_memory() -> None:
    """Tell glibc to keep large freed blocks: giving each activation back to the kernel and faulting it in
    again took a fifth of the time of an AWQ search. A no-op with another libc."""
    m_trim_threshold, m_top_pad, m_mmap_threshold = -1, -2, -3
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(m_mmap_threshold, 2**31 - 1)
        libc.mallopt(m_trim_threshold, 2**31 - 1)
        libc.mallopt(m_top_pad, 1 << 26)


def load(model_dir: Path, dtype: str, device: str) -> Any:
    """The transformers model in ``dtype`` on ``device``, in eval mode.

    Raises InputError for weights that do not load or are not finite, MissingError without the GPU.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise MissingError("--device cuda: torch sees no CUDA GPU; use --device cpu or install a CUDA torch")
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(model_dir), dtype=getattr(torch, dtype), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise InputError(Problem(f"transformers cannot load it: {error}", str(model_dir))) from error
    bad = [name for name, value in model.named_parameters() if not bool(torch.isfinite(value).all())]
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise InputError(
            Problem(f"weights hold NaN or infinity ({bad[0]}{more}); download it again", str(model_dir))
        )
    return model.to(device).eval()


# --------------------------------------------------------------------------- configuration


def modelopt_config(quantization: Quantization, excluded: Sequence[str]) -> dict[str, Any]:
    """ModelOpt's configuration for ``quantization``: its own preset with our changes appended.

    Later entries win, so the preset's exclusions (lm_head, routers, embeddings) hold unless asked.
    """
    import modelopt.torch.quantization as mtq

    match quantization:
        case NoQuantization():
            config: dict[str, Any] = {
                "quant_cfg": [{"quantizer_name": "*", "enable": False}],
                "algorithm": "max",
            }
        case Fp8Quantization():
            config = copy.deepcopy(mtq.FP8_DEFAULT_CFG)
        case W4A16AwqQuantization():
            config = copy.deepcopy(mtq.INT4_AWQ_CFG)
        case W4A8AwqQuantization():
            config = copy.deepcopy(mtq.W4A8_AWQ_BETA_CFG)
        case W8A8SqQuantization():
            config = copy.deepcopy(mtq.INT8_SMOOTHQUANT_CFG)
            config["algorithm"] = {"method": "smoothquant", "alpha": quantization.alpha}
        case Nvfp4Quantization():
            raise InputError(NVFP4_MESSAGE)
    entries: list[dict[str, Any]] = config["quant_cfg"]
    if isinstance(quantization, W4A16AwqQuantization | W4A8AwqQuantization):
        _set_group_size(entries, quantization.group_size)
    if not isinstance(quantization, NoQuantization):
        if quantization.lm_head:
            entries += [
                {**copy.deepcopy(entry), "quantizer_name": f"*lm_head{entry['quantizer_name']}"}
                for entry in entries
                if entry["quantizer_name"] in ("*weight_quantizer", "*input_quantizer")
            ]
        # "*lm_head*" is in the presets; module names are exact, the pattern adds the quantizer's.
        entries += [
            {"quantizer_name": f"{module}.*", "enable": False} for module in excluded if module != "lm_head"
        ]
    match quantization.kv_cache:
        case "fp8":
            entries += copy.deepcopy(mtq.FP8_KV_CFG["quant_cfg"])
        case "nvfp4":
            raise InputError(NVFP4_MESSAGE)
        case "int8":
            cfg = {"num_bits": 8, "axis": None}
            entries.append({"quantizer_name": "*[kv]_bmm_quantizer", "cfg": cfg, "enable": True})
        case "none":
            pass
    return config


def _set_group_size(entries: list[dict[str, Any]], group_size: int) -> None:
    for entry in entries:
        parts = entry.get("cfg") or []
        for part in parts if isinstance(parts, list) else [parts]:
            if part.get("block_sizes"):
                part["block_sizes"] = {**part["block_sizes"], -1: group_size}


# --------------------------------------------------------------------------- calibration


def calibrate(
    model: Any,
    config: Mapping[str, Any],
    token_batches: TokenBatches,
    search_batches: TokenBatches,
    *,
    logits: bool,
    progress: Progress,
) -> dict[str, float]:
    """Insert quantizers into ``model`` (in place) and set their scales.

    Ranges are measured on ``token_batches``; AWQ then searches its scales on ``search_batches``. ``logits``
    computes all logits (only needed when lm_head is calibrated). ``progress`` gets steps "calibrate" and
    "search", counted in decoder layers. Returns seconds by step; "scales" is what is between the passes.
    """
    import modelopt.torch.quantization as mtq

    layers = model.model.layers
    passes: list[str] = []
    done = total = 0

    def tick(*_: Any) -> None:
        nonlocal done
        done += 1
        progress(passes[-1], done, total)

    seconds: dict[str, float] = {}

    def forward_loop(model: Any) -> None:
        # ModelOpt calls this once for ranges, and awq_lite a second time to search.
        nonlocal done, total
        passes.append("search" if passes else "calibrate")
        data = search_batches if passes[-1] == "search" else token_batches
        done, total, started = 0, len(data) * len(layers), time.monotonic()
        progress(passes[-1], 0, total)
        keep = {} if logits else {"logits_to_keep": 1}
        for batch in data:
            tokens = torch.tensor(batch, dtype=torch.long, device=model.device)
            model(tokens, use_cache=False, **keep)
        seconds[passes[-1]] = seconds.get(passes[-1], 0.0) + time.monotonic() - started

    handles = [layer.register_forward_hook(tick) for layer in layers]
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    started = time.monotonic()
    try:
        with torch.no_grad():
            mtq.quantize(model, dict(config), forward_loop)
    finally:
        torch.set_float32_matmul_precision(precision)
        for handle in handles:
            handle.remove()
    seconds["scales"] = time.monotonic() - started - sum(seconds.values())
    return seconds


def take_int8_kv_ranges(model: Any) -> dict[str, tuple[float, float]]:
    """Largest |K| and |V| by attention module; their quantizers are removed from ``model``.

    ModelOpt's unified export accepts FP8 and NVFP4 KV caches only, and would stop on these.
    """
    ranges: dict[str, tuple[float, float]] = {}
    for name, module in model.named_modules():
        if not (hasattr(module, "k_bmm_quantizer") and module.k_bmm_quantizer.is_enabled):
            continue
        quantizers = module.k_bmm_quantizer, module.v_bmm_quantizer
        key, value = (float(quantizer.amax) for quantizer in quantizers)
        ranges[name] = (key, value)
        for quantizer in quantizers:
            quantizer.reset_amax()
            quantizer.disable()
    return ranges


def export(model: Any, folder: Path) -> None:
    """Write ModelOpt's unified Hugging Face export of the calibrated ``model``; ``model`` is used up."""
    from modelopt.torch.export import export_hf_checkpoint

    with torch.no_grad():
        export_hf_checkpoint(model, export_dir=str(folder), max_shard_size="4GB")
