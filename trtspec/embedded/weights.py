"""Load a checkpoint folder into a :class:`Decoder`: 16/32/64-bit weights or a ModelOpt unified export.

transformers loads ModelOpt exports without an error and ignores their scales; this loader reads them as they
are meant and refuses what it cannot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from trtspec.embedded import layers
from trtspec.embedded.layers import Linear, QuantizedWeight, RmsNorm
from trtspec.embedded.model import Decoder, DecoderLayer
from trtspec.errors import InputError, Problem
from trtspec.modelspec import INT4_ALGOS, ModelSpec, check_weight_files
from trtspec.tensor_headers import TensorHeader, read_tensor_headers


def load_model(
    folder: Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool = False,
    dequantized_copy: bool = False,
) -> Decoder:
    """The model of ``folder``, computing in ``dtype`` on ``device``; ``batch_invariant``: see Decoder;
    ``dequantized_copy``: see :func:`layers.quantized`.

    One tensor is read at a time from the mapped files, so memory peaks near the size of the loaded weights.
    Raises InputError with all problems: missing or malformed files and tensors, NaN or infinite weights,
    missing or implausible scales.
    """
    folder = Path(folder)
    problems = check_weight_files(folder)
    if problems:
        raise InputError(problems)
    headers, _ = read_tensor_headers(folder)
    checkpoint = _Checkpoint(headers, spec, dtype, device, dequantized_copy)
    embedding = checkpoint.plain("model.embed_tokens.weight")
    blocks = [_load_layer(checkpoint, f"model.layers.{i}.") for i in range(spec.num_layers)]
    final_norm = checkpoint.plain("model.norm.weight")
    lm_head: Linear
    output_rows: Tensor | None = None
    if spec.tie_embeddings:
        # Packed, the head is a copy of the embedding; on a small model it saves a tenth of a decode step.
        lm_head, output_rows = layers.dense(embedding), embedding
    else:
        lm_head = checkpoint.linear(["lm_head"])
        if dtype.itemsize == 2 and (spec.quant is None or not spec.quant.covers("lm_head")):
            # The plain form beside the packed one: logits of the best tokens are computed from it in float32.
            if isinstance(lm_head, layers.DenseLinear):
                output_rows = lm_head.weight
            else:
                output_rows = checkpoint.plain("lm_head.weight")
    kv_scales = _load_kv_scales(checkpoint)
    checkpoint.check_scales()
    if checkpoint.problems:
        raise InputError(checkpoint.problems)
    return Decoder(
        spec,
        embedding=embedding,
        layers=blocks,
        final_norm=final_norm,
        lm_head=lm_head,
        output_rows=output_rows,
        kv_scales=kv_scales,
        batch_invariant=batch_invariant,
    )


def _load_layer(checkpoint: _Checkpoint, prefix: str) -> DecoderLayer:
    attention, mlp, qk_norm = prefix + "self_attn.", prefix + "mlp.", checkpoint.spec.qk_norm

    def norm(name: str) -> RmsNorm:
        return RmsNorm(checkpoint.plain(name + ".weight"), checkpoint.spec.rms_norm_eps)

    return DecoderLayer(
        input_norm=norm(prefix + "input_layernorm"),
        qkv=checkpoint.linear([f"{attention}{name}_proj" for name in "qkv"]),
        q_norm=norm(attention + "q_norm") if qk_norm else None,
        k_norm=norm(attention + "k_norm") if qk_norm else None,
        o=checkpoint.linear([attention + "o_proj"]),
        post_norm=norm(prefix + "post_attention_layernorm"),
        gate_up=checkpoint.linear([mlp + "gate_proj", mlp + "up_proj"]),
        down=checkpoint.linear([mlp + "down_proj"]),
    )


def _load_kv_scales(checkpoint: _Checkpoint) -> tuple[tuple[float, float], ...] | None:
    """(k, v) scales per layer; None when the checkpoint has none at all (FP8 then uses 1.0)."""
    names = [
        (f"model.layers.{i}.self_attn.k_proj.k_scale", f"model.layers.{i}.self_attn.v_proj.v_scale")
        for i in range(checkpoint.spec.num_layers)
    ]
    present = [name for pair in names for name in pair if name in checkpoint.headers]
    if not present:
        return None
    for name in (name for pair in names for name in pair):
        if name not in checkpoint.headers:
            checkpoint.problems.append(Problem(f"missing, though {present[0]} is there", key=name))
    if checkpoint.problems:
        return None
    return tuple((checkpoint.scalar(k), checkpoint.scalar(v)) for k, v in names)


class _Checkpoint:
    """Reads tensors and collects what is wrong with them."""

    def __init__(
        self,
        headers: Mapping[str, TensorHeader],
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        dequantized_copy: bool,
    ) -> None:
        self.headers, self.spec, self.dtype, self.device = headers, spec, dtype, device
        self._dequantized_copy = dequantized_copy
        self.problems: list[Problem] = []
        self._files = {path: safe_open(path, "pt") for path in {h.file for h in headers.values()}}
        self._all_ones: dict[str, bool] = {}

    def _read(self, name: str) -> Tensor:
        header = self.headers[name]
        tensor: Tensor = self._files[header.file].get_tensor(name)  # type: ignore[no-untyped-call]
        if tensor.is_floating_point() and not _is_finite(tensor):
            self._bad(name, "holds NaN or infinite values; the checkpoint is damaged")
        return tensor

    def _bad(self, name: str, message: str) -> None:
        self.problems.append(Problem(message, file=str(self.headers[name].file), key=name))

    def plain(self, name: str) -> Tensor:
        """An unquantized tensor, a copy that no longer depends on the file."""
        return self._read(name).to(self.device, self.dtype, copy=True)

    def scalar(self, name: str) -> float:
        return float(self._scale(name).reshape(-1)[0])

    def _scale(self, name: str) -> Tensor:
        """A scale in float64: positive, not NaN. Remembers whether all scales of its kind are exactly 1."""
        scale = self._read(name).double()
        if not bool((scale > 0).all()):
            self._bad(name, "holds a scale that is not positive; the export is damaged")
        kind = name.rsplit(".", 1)[1]
        self._all_ones[kind] = self._all_ones.get(kind, True) and bool((scale == 1).all())
        return scale

    def check_scales(self) -> None:
        """Add a problem where every scale of one kind is exactly 1: an exporter's placeholder.

        KV scales of 1 are a choice that ModelOpt offers, so they pass.
        """
        for kind in ("weight_scale", "input_scale"):
            if self._all_ones.get(kind):
                self.problems.append(
                    Problem(f"every {kind} is exactly 1.0; the export has lost its scales, export it again")
                )

    def linear(self, modules: Sequence[str]) -> Linear:
        """The linears ``modules``, which share their input, as one with their outputs side by side."""
        quant = self.spec.quant
        if quant is None or not any(quant.covers(module) for module in modules):
            weight = torch.cat([self._read(f"{m}.weight").to(self.dtype) for m in modules])
            return layers.dense(weight.to(self.device), self._bias(modules))
        if len(modules) > 1 and not all(quant.covers(module) for module in modules):
            return layers.SideBySide([self.linear([module]) for module in modules])
        parts = [self._quantized(module) for module in modules]
        bias = self._bias(modules)
        joined = layers.join(parts)
        if joined is not None:
            return self._quantized_linear(joined, bias)
        rows = [part.scale.shape[0] for part in parts]
        biases = [None] * len(parts) if bias is None else list(torch.split(bias, rows))
        return layers.SideBySide(
            [self._quantized_linear(part, b) for part, b in zip(parts, biases, strict=True)]
        )

    def _quantized_linear(self, weight: QuantizedWeight, bias: Tensor | None) -> Linear:
        return layers.quantized(
            weight, bias, self.dtype, self.device, dequantized_copy=self._dequantized_copy
        )

    def _bias(self, modules: Sequence[str]) -> Tensor | None:
        if f"{modules[0]}.bias" not in self.headers:
            return None
        return torch.cat([self.plain(f"{module}.bias") for module in modules])

    def _quantized(self, module: str) -> QuantizedWeight:
        """One quantized weight; scales as [out, groups] with one group where the format has none."""
        quant = self.spec.quant
        algo = quant.algo if quant is not None else None
        codes = self._read(f"{module}.weight").clone()
        rows = codes.shape[0] * (2 if algo in INT4_ALGOS else 1)
        scale = self._scale(f"{module}.weight_scale")
        scale = scale.reshape(rows, -1) if scale.numel() > 1 else scale.reshape(1, 1).expand(rows, 1)

        def has(name: str) -> bool:
            return f"{module}.{name}" in self.headers

        return QuantizedWeight(
            algo=str(algo),
            codes=codes,
            scale=scale,
            scale_2=self.scalar(f"{module}.weight_scale_2") if has("weight_scale_2") else None,
            input_scale=self.scalar(f"{module}.input_scale") if has("input_scale") else None,
            pre_quant_scale=self._scale(f"{module}.pre_quant_scale") if has("pre_quant_scale") else None,
        )


def _is_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite: one sum, in which either survives."""
    if tensor.dtype == torch.float8_e4m3fn:
        return not bool(((tensor.view(torch.uint8) & 0x7F) == 0x7F).any())
    wide = torch.float64 if tensor.dtype in (torch.float64, torch.float32) else torch.float32
    return bool(torch.isfinite(tensor.sum(dtype=wide)))
