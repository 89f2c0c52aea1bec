"""The whole of quantizing one checkpoint; see the package's docstring for the steps."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import resource
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trtspec.errors import TrtspecError
from trtspec.folders import new_folder, remove_partials
from trtspec.quantize import calibration, preflight
from trtspec.quantize.report import REPORT_FILE, CalibrationReport, Report
from trtspec.recipe import Quantization
from trtspec.tensor_headers import read_tensor_headers

LOG_FILE = "quantization.log"
_TOOLS = {
    "trtspec": "trtspec",
    "torch": "torch",
    "modelopt": "nvidia-modelopt",
    "transformers": "transformers",
}

INT8_KV_NOTE = (
    "INT8 KV cache: its scales (k_scale, v_scale = max / 127) are trtspec's own addition to ModelOpt's "
    "unified export, for the embedded engine; TensorRT-LLM engines get an INT8 KV cache through ModelOpt's "
    "TensorRT-LLM checkpoint export"
)


def quantize(
    model_dir: Path,
    out_dir: Path,
    quantization: Quantization,
    *,
    progress: Callable[[str, int, int], None] | None = None,
    say: Callable[[str], None] | None = None,
    device: str = "cpu",
) -> Report:
    """Quantize the checkpoint in ``model_dir`` into the new folder ``out_dir``; return the report.

    ``progress`` gets (step, done, total) for the steps load, calibrate, search, export and check; ``say``
    gets lines for people. The result is in ``out_dir`` with quantization_report.json, all of it or none:
    what an interrupted run left is removed first. If the tools fail, their log is kept at
    ``OUT.failed.log``.

    Raises InputError (bad folder, recipe, data), MissingError (package, memory, disk, GPU), GateFailed when
    the exported files are not what was asked for.
    """
    progress = _with_own_streams(progress or (lambda step, done, total: None))
    say = say or (lambda line: None)
    model_dir, out_dir = Path(model_dir), Path(out_dir)
    remove_partials(out_dir, say=say)
    found = preflight.check(model_dir, out_dir, quantization, device)
    for line in (*found.notes, *(f"warning: {warning}" for warning in found.warnings)):
        say(line)
    with new_folder(out_dir, say=say) as partial:
        try:
            report = _work(model_dir, partial, quantization, found, progress, device)
            (partial / REPORT_FILE).write_text(report.to_json())
        except Exception as error:
            log = partial / LOG_FILE
            if log.exists() and not isinstance(error, TrtspecError):
                shutil.copyfile(log, out_dir.with_name(f"{out_dir.name}.failed.log"))
            raise
    say(report.summary())
    return report


def _work(
    model_dir: Path,
    partial: Path,
    quantization: Quantization,
    found: preflight.Preflight,
    progress: Callable[[str, int, int], None],
    device: str,
) -> Report:
    started = time.monotonic()
    progress("load", 0, 1)
    ptq = _import_ptq(partial / LOG_FILE)
    from trtspec.quantize import checks, finish, readback

    headers, _ = read_tensor_headers(model_dir)
    seconds: dict[str, float] = {}
    with ptq.quiet(partial / LOG_FILE) as warnings:
        model = ptq.load(model_dir, found.load_dtype, device)
        seconds["load"] = time.monotonic() - started
        progress("load", 1, 1)
        seconds |= ptq.calibrate(
            model,
            ptq.modelopt_config(quantization, found.excluded),
            calibration.batches(found.rows),
            calibration.batches(calibration.spread(found.rows, ptq.SEARCH_TOKENS)),
            logits="lm_head" in found.quantized,
            progress=progress,
        )
        started = time.monotonic()
        progress("export", 0, 1)
        ranges = ptq.take_int8_kv_ranges(model) if quantization.kv_cache == "int8" else {}
        ptq.export(model, partial)
        del model
        finish.finish(model_dir, partial, found.spec, headers, ranges)
        seconds["export"] = time.monotonic() - started
        progress("export", 1, 1)

    started = time.monotonic()
    progress("check", 0, 1)
    kind, kv_cache = quantization.kind, quantization.kv_cache
    with readback.open_tensors(model_dir) as source, readback.open_tensors(partial) as export:
        layers = readback.layer_reports(found.spec, source, export)
        kv_layers = readback.kv_reports(found.spec, export)
        quantized, num_layers = found.quantized, found.spec.num_layers
        passed = checks.run(
            {
                "weight_files": lambda: checks.weight_files(partial),
                "scales": lambda: checks.scales(export, quantized, kind, kv_cache, num_layers),
                "selection": lambda: checks.selection(export, quantized),
                "unquantized_weights": lambda: checks.unquantized_weights(source, export, quantized, kind),
                "fidelity": lambda: checks.fidelity(layers, found.load_dtype),
                "excluded_modules": lambda: checks.excluded_modules(partial, found.linears, quantized),
                "config": lambda: checks.config(model_dir, partial, kind, kv_cache),
                "copied_files": lambda: checks.copied_files(model_dir, partial),
            }
        )
    seconds["check"] = time.monotonic() - started
    progress("check", 1, 1)

    notes = [*found.notes, *([INT8_KV_NOTE] if kv_cache == "int8" else [])]
    quant = _exported_algos(partial)
    wanted = quantization.calibration
    return Report(
        quantization=quantization.model_dump(mode="json"),
        quant_algo=quant[0],
        kv_cache_quant_algo=quant[1],
        source=str(model_dir),
        architecture=found.spec.architecture,
        calibration=CalibrationReport(
            data=wanted.data,
            seed=wanted.seed,
            num_samples=found.rows.num_samples,
            num_tokens=found.rows.num_tokens,
            num_rows=len(found.rows.rows),
            row_tokens=len(found.rows.rows[0]),
            digest=found.rows.digest,
        ),
        load_dtype=found.load_dtype,
        weight_dtype=found.spec.dtype,
        device=device,
        versions={name: importlib.metadata.version(package) for name, package in _TOOLS.items()},
        argv=list(sys.argv),
        seconds={step: round(value, 3) for step, value in seconds.items()},
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        bytes_before=preflight.weight_bytes(model_dir),
        bytes_after=preflight.weight_bytes(partial),
        layers=layers,
        kv_layers=kv_layers,
        unquantized=list(found.excluded),
        checks=passed,
        warnings=[*found.warnings, *warnings],
        notes=notes,
    )


def _with_own_streams(progress: Callable[[str, int, int], None]) -> Callable[[str, int, int], None]:
    """``progress``, unaffected by the redirection of what the tools print."""
    out, err = sys.stdout, sys.stderr

    def report(step: str, done: int, total: int) -> None:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            progress(step, done, total)

    return report


def _import_ptq(log: Path) -> Any:
    """The module that needs torch and ModelOpt. Their imports print; a missing GPU is no news here."""
    from trtspec.quantize import ptq

    ptq.keep_freed_memory()
    with ptq.quiet(log):
        for module in ("transformers", "modelopt.torch.quantization", "modelopt.torch.export"):
            importlib.import_module(module)
    return ptq


def _exported_algos(folder: Path) -> tuple[str | None, str | None]:
    from trtspec.modelspec import read_modelspec

    quant = read_modelspec(folder).quant
    return (quant.algo, quant.kv_algo) if quant else (None, None)
