"""The exported folder as an engine sees it: read from disk, dequantized, compared with the source.

Independent of the embedded engine's loader on purpose: two readings of the layout must agree.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from trtspec.modelspec import ModelSpec, linear_modules
from trtspec.quantize.report import KvLayerReport, LayerReport
from trtspec.tensor_headers import TensorHeader, read_tensor_headers

_NORM_BEFORE = {
    "self_attn.q_proj": "input_layernorm",
    "self_attn.k_proj": "input_layernorm",
    "self_attn.v_proj": "input_layernorm",
    "mlp.gate_proj": "post_attention_layernorm",
    "mlp.up_proj": "post_attention_layernorm",
}
E4M3_MAX = 448.0


class Tensors(Mapping[str, Tensor]):
    """The tensors of a folder by name, read one at a time (use :func:`open_tensors`)."""

    def __init__(self, headers: Mapping[str, TensorHeader], files: Mapping[Path, Any]) -> None:
        self.headers, self._files = headers, files

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[self.headers[name].file].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.headers)

    def __len__(self) -> int:
        return len(self.headers)


@contextlib.contextmanager
def open_tensors(folder: Path) -> Iterator[Tensors]:
    """The tensors of ``folder``; :attr:`Tensors.headers` has what can be known without reading them."""
    headers, _ = read_tensor_headers(folder)
    with contextlib.ExitStack() as stack:
        paths = {header.file for header in headers.values()}
        files = {path: stack.enter_context(safe_open(path, framework="pt")) for path in sorted(paths)}
        yield Tensors(headers, files)


def unpack_int4(packed: Tensor) -> Tensor:
    """Codes -8 to 7, [rows, columns] int8, of [rows / 2, columns] uint8: low nibble even row, high odd."""
    nibbles = torch.stack([packed & 15, packed >> 4], dim=1).reshape(-1, packed.shape[1]).to(torch.int8)
    return torch.where(nibbles > 7, nibbles - 16, nibbles)


def dequantize(tensors: Mapping[str, Tensor], module: str) -> Tensor:
    """[outputs, inputs] float32: the weight that ``module``'s codes and scales stand for.

    It multiplies the layer's input times ``pre_quant_scale``, if there is one. A weight that is not quantized
    comes as it is.
    """
    weight = tensors[f"{module}.weight"]
    if f"{module}.weight_scale" not in tensors:
        return weight.float()
    scale = tensors[f"{module}.weight_scale"].float()
    if weight.dtype == torch.uint8:
        codes = unpack_int4(weight).float()
        values = codes * scale.repeat_interleave(codes.shape[1] // scale.shape[1], dim=1)
        if f"{module}.weight_scale_2" in tensors:
            second = tensors[f"{module}.weight_scale_2"].float()
            values = (values / second).to(torch.float8_e4m3fn).float() * second
        return values
    return weight.float() * (scale[:, None] if scale.dim() == 1 else scale)


def input_factors(source: Mapping[str, Tensor], export: Mapping[str, Tensor], module: str) -> Tensor | None:
    """[inputs] float32: by how much larger than the source's the input is that meets the exported weight.

    The product of ``pre_quant_scale`` and of what was folded into the norm before the layer; None if 1.
    """
    factors = None
    if f"{module}.pre_quant_scale" in export:
        factors = export[f"{module}.pre_quant_scale"].float()
    prefix, _, tail = module.partition(".layers.")
    layer, _, part = tail.partition(".")
    norm = _NORM_BEFORE.get(part)
    if norm is not None:
        name = f"{prefix}.layers.{layer}.{norm}.weight"
        before, after = source[name].float(), export[name].float()
        if not torch.equal(before, after):
            ratio = torch.where(before == 0, torch.ones_like(before), after / before)
            factors = ratio if factors is None else factors * ratio
    return factors


def effective_weight(source: Mapping[str, Tensor], export: Mapping[str, Tensor], module: str) -> Tensor:
    """[outputs, inputs] float32: what the exported layer does to the source model's own input."""
    weight = dequantize(export, module)
    factors = input_factors(source, export, module)
    return weight if factors is None else weight * factors


def fraction_misrounded(source: Mapping[str, Tensor], export: Mapping[str, Tensor], module: str) -> float:
    """The share of weights that are farther from the source's than half a quantization step.

    Compared where the codes live: the source weight divided by :func:`input_factors`. 0 is ideal; it is the
    sharpest test that codes, scales and folded norms belong together.
    """
    original = source[f"{module}.weight"].float()
    weight = dequantize(export, module)
    factors = input_factors(source, export, module)
    slack = torch.zeros_like(original)
    if factors is not None:
        original = original / factors
        # Factors are stored in 16 bit, after the codes were computed with wider ones.
        slack = original.abs() * 2.0**-7
    scale, stored = export[f"{module}.weight_scale"].float(), export[f"{module}.weight"].dtype
    if stored == torch.float8_e4m3fn:
        half = _e4m3_step(torch.maximum(original.abs(), weight.abs()) / scale) * scale / 2
    elif stored == torch.int8:
        half = scale[:, None] / 2
    else:
        half = scale.repeat_interleave(original.shape[1] // scale.shape[1], dim=1) / 2
        if f"{module}.weight_scale_2" in export:
            second = export[f"{module}.weight_scale_2"].float()
            half = half + _e4m3_step(weight / second) * second / 2
    return float(((weight - original).abs() > half * 1.001 + slack + 1e-7).float().mean())


def _e4m3_step(values: Tensor) -> Tensor:
    """Distance of neighbouring e4m3 numbers at ``values``: 3 mantissa bits, smallest exponent -6."""
    step: Tensor = 2.0 ** (values.abs().clamp(min=2.0**-6).log2().floor() - 3)
    return step


def sqnr_db(reference: Tensor, approximation: Tensor) -> float | None:
    """10 log10(signal / noise) of ``approximation``; None when it is exact."""
    noise = float((reference.double() - approximation.double()).square().sum())
    return 10.0 * math.log10(float(reference.double().square().sum()) / noise) if noise > 0 else None


def layer_reports(spec: ModelSpec, source: Tensors, export: Tensors) -> list[LayerReport]:
    """One report for each quantized linear of ``export``, in the model's order."""
    sizes: dict[str, int] = {}
    for name in export:
        module = name.rpartition(".")[0]
        tensor = export[name]
        if not name.endswith((".k_scale", ".v_scale", ".bias")):
            sizes[module] = sizes.get(module, 0) + tensor.numel() * tensor.element_size()
    reports = []
    for module, shape in linear_modules(spec).items():
        if f"{module}.weight_scale" not in export:
            continue
        original = source[f"{module}.weight"]
        reports.append(
            LayerReport(
                module=module,
                format=_format_name(export, module),
                shape=shape,
                bytes_before=original.numel() * original.element_size(),
                bytes_after=sizes[module],
                sqnr_db=sqnr_db(original.float(), effective_weight(source, export, module)),
                misrounded=fraction_misrounded(source, export, module),
            )
        )
    return reports


def _format_name(export: Tensors, module: str) -> str:
    dtype = export.headers[f"{module}.weight"].dtype
    shape = export.headers[f"{module}.weight_scale"].shape
    name = {"U8": "int4", "I8": "int8", "F8_E4M3": "fp8"}.get(dtype, dtype.lower())
    if dtype == "U8":
        columns = export.headers[f"{module}.weight"].shape[1]
        second = ", fp8 activations" if f"{module}.weight_scale_2" in export else ""
        return f"{name} in groups of {columns // shape[1]}{second}"
    return f"{name} per {'row' if len(shape) == 1 else 'tensor'}"


def kv_reports(spec: ModelSpec, export: Tensors) -> list[KvLayerReport]:
    """KV scales of each layer that has both, in order."""
    reports = []
    for layer in range(spec.num_layers):
        module = f"model.layers.{layer}.self_attn"
        names = f"{module}.k_proj.k_scale", f"{module}.v_proj.v_scale"
        if all(name in export for name in names):
            reports.append(KvLayerReport(module, float(export[names[0]]), float(export[names[1]])))
    return reports
