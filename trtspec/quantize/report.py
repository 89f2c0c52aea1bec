"""What quantization did: the datum behind ``quantization_report.json``."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtspec.errors import InputError, Problem
from trtspec.user_files import read_user_json

SCHEMA = "trtspec.quantization/1"
REPORT_FILE = "quantization_report.json"


@dataclass(frozen=True)
class LayerReport:
    """One quantized linear layer, as read back from disk.

    ``shape`` is [outputs, inputs]. ``bytes_after`` counts codes and scales. ``sqnr_db`` is
    10 log10(sum W^2 / sum (W - W')^2) with W the source weight and W' the exported one, dequantized, with
    input scales and folded norms undone; None when both are equal. ``misrounded`` is the share of weights
    whose code is not the nearest one to the (AWQ-scaled) source.
    """

    module: str
    format: str
    shape: tuple[int, int]
    bytes_before: int
    bytes_after: int
    sqnr_db: float | None
    misrounded: float


@dataclass(frozen=True)
class KvLayerReport:
    """KV cache scales of one attention layer: value = code * scale."""

    module: str
    k_scale: float
    v_scale: float


@dataclass(frozen=True)
class CalibrationReport:
    """On which tokens the scales were measured: ``num_samples`` texts were used, joined, and cut into
    ``num_rows`` rows of ``row_tokens`` tokens (the last may be shorter), ``num_tokens`` in all.

    How many texts were asked for is ``quantization.calibration.num_samples`` of the report. ``digest`` is
    the SHA-256 of the rows of token ids: other texts, another tokenizer or another seed change it.
    """

    data: str
    seed: int
    num_samples: int
    num_tokens: int
    num_rows: int
    row_tokens: int
    digest: str

    def describe(self) -> str:
        """``64 texts of builtin: 10,009 tokens in 20 rows of up to 512``"""
        texts = f"{self.num_samples} text{'s' * (self.num_samples != 1)} of {self.data}"
        rows = f"{self.num_rows} row{'s' * (self.num_rows != 1)} of up to {self.row_tokens}"
        return f"{texts}: {self.num_tokens:,} tokens in {rows}"


@dataclass(frozen=True)
class Report:
    """Sizes count weight files. ``seconds`` has one entry a step; ``warnings`` are what was not done as asked
    and those of the tools that are not known noise; ``notes`` are decisions that were taken."""

    quantization: dict[str, Any]
    quant_algo: str | None
    kv_cache_quant_algo: str | None
    source: str
    architecture: str
    calibration: CalibrationReport
    load_dtype: str
    weight_dtype: str
    device: str
    versions: dict[str, str]
    argv: list[str]
    seconds: dict[str, float]
    peak_rss_bytes: int
    bytes_before: int
    bytes_after: int
    layers: list[LayerReport]
    kv_layers: list[KvLayerReport]
    unquantized: list[str]
    checks: list[str]
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    schema: str = SCHEMA

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n"

    def summary(self) -> str:
        """A few lines for a terminal."""
        kind = self.quant_algo or "16-bit weights"
        lines = [
            f"{kind}, KV cache {self.kv_cache_quant_algo or '16 bit'}: weights "
            f"{self.bytes_before / 1e6:.1f} MB -> {self.bytes_after / 1e6:.1f} MB "
            f"({self.bytes_after / self.bytes_before:.2f}), {sum(self.seconds.values()):.1f} s, "
            f"peak memory {self.peak_rss_bytes / 1e6:.0f} MB"
        ]
        measured = sorted((layer.sqnr_db, layer.module) for layer in self.layers if layer.sqnr_db is not None)
        if measured:
            middle = measured[len(measured) // 2][0]
            worst = ", ".join(f"{module} {sqnr:.1f} dB" for sqnr, module in measured[:3])
            lines.append(f"{len(measured)} layers, median SQNR {middle:.1f} dB; lowest: {worst}")
        lines.append(f"calibrated on {self.calibration.describe()}")
        lines.extend(self.notes)
        lines.extend(f"warning: {warning}" for warning in self.warnings)
        return "\n".join(lines)


def read_report(folder: Path) -> Report:
    """The report in ``folder``; InputError if there is none or it has another schema."""
    path = folder / REPORT_FILE
    value = read_user_json(path)
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise InputError(Problem(f"not a report of schema {SCHEMA}", str(path)))
    try:
        value["calibration"] = CalibrationReport(**value["calibration"])
        value["layers"] = [LayerReport(**{**row, "shape": tuple(row["shape"])}) for row in value["layers"]]
        value["kv_layers"] = [KvLayerReport(**row) for row in value["kv_layers"]]
        return Report(**value)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise InputError(Problem(f"does not fit schema {SCHEMA}: {error}", str(path))) from error
