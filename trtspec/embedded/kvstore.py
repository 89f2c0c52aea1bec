"""The tensors of the KV cache: one place (slot) per token, in the compute dtype or in 8 bits.

Which slot belongs to whom is :mod:`trtspec.embedded.kvcache`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from trtspec.errors import InputError
from trtspec.modelspec import ModelSpec

KvFormat = Literal["none", "fp8", "int8"]

E4M3_MAX = 448.0
INT8_MAX = 127


def kv_bytes_per_slot(spec: ModelSpec, dtype: torch.dtype, kv_format: KvFormat) -> int:
    """Bytes that one token's keys and values take over all layers."""
    item = dtype.itemsize if kv_format == "none" else 1
    return spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim * item


def encode_e4m3(values: Tensor) -> Tensor:
    """``values`` rounded to E4M3 (nearest, ties to even; saturating at 448), as int8 codes.

    NaN stays NaN's code. Torch's own cast makes NaN of what exceeds 448, hence the clamp.
    """
    return values.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.int8)


def decode_e4m3(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of E4M3 ``codes`` (int8) divided by 256, exactly, in ``dtype``.

    E4M3 (bias 7) and float16 (bias 15) lay out sign, exponent and mantissa alike, so shifting the seven
    magnitude bits into place gives the value times 2^(7 - 15), subnormals included; the factor 256 goes into
    the caller's scale. Ten times faster than torch's cast from float8 on CPUs. The two NaN codes decode to
    480 / 256.
    """
    # int16 sign extension leaves a second sign bit in float16's top exponent bit, which no E4M3 value uses.
    bits = codes.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    # Through float32: torch vectorises float16 -> float32 -> bfloat16, but not float16 -> bfloat16.
    return bits.view(torch.float16).to(torch.float32).to(dtype)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32: where numbers of ``dtype`` are scaled and rounded."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class KvStore:
    """Keys and values of ``num_slots`` tokens, ``[layers, num_slots, 2 * kv_heads, head_dim]``, keys first.

    ``kv_format`` "none" keeps the compute ``dtype``; "fp8" and "int8" keep 8-bit codes of value / scale with
    one static scale per layer for keys and one for values (``scales``; fp8 without scales: 1.0). What is
    written is what is read: a row attends to its own keys and values through the format too, so that chunked
    prefill, decode and verification see the same numbers. Starts as zeros: masked slots hold finite numbers.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_slots: int,
        *,
        dtype: torch.dtype,
        kv_format: KvFormat = "none",
        scales: Sequence[tuple[float, float]] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Raises InputError when int8 has no scales, or there are not ``num_layers`` of them."""
        if kv_format == "int8" and scales is None:
            raise InputError(
                "the INT8 KV cache needs the scales of a calibrated checkpoint (k_scale, v_scale), and this "
                "one has none; quantize with kv_cache: int8, or use kv_cache: fp8 or none"
            )
        if scales is not None and len(scales) != spec.num_layers:
            raise InputError(f"{len(scales)} pairs of KV scales for {spec.num_layers} layers")
        self.num_slots = num_slots
        self.dtype = dtype
        self.kv_format = kv_format
        self.bytes_per_slot = kv_bytes_per_slot(spec, dtype, kv_format)
        heads = spec.num_kv_heads
        shape = (spec.num_layers, num_slots, 2 * heads, spec.head_dim)
        stored = dtype if kv_format == "none" else torch.int8
        self._all = torch.zeros(shape, dtype=stored, device=device)
        self._both = tuple(self._all)
        self._keys = tuple(kv[:, :heads] for kv in self._both)
        self._values = tuple(kv[:, heads:] for kv in self._both)
        self._num_kv_heads = heads
        pairs = list(scales) if scales is not None else [(1.0, 1.0)] * spec.num_layers
        self._scales = pairs if kv_format != "none" else []
        # [2 * kv_heads, 1] each: the scales of keys and values as write_both divides by them.
        self._scale_rows = tuple(
            torch.tensor(pair, dtype=wide_dtype(dtype), device=device).repeat_interleave(heads)[:, None]
            for pair in self._scales
        )
        # decode_e4m3 returns 1/256 of the value; a power of two changes no digit of the scale.
        factor = 256.0 if kv_format == "fp8" else 1.0
        self.read_factors = tuple((k * factor, v * factor) for k, v in self._scales) or (
            ((1.0, 1.0),) * spec.num_layers
        )

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store ``k`` and ``v`` ``[n, kv_heads, head_dim]`` at ``slots`` ``[n]``."""
        if self.kv_format != "none":
            k_scale, v_scale = self._scales[layer]
            k, v = self._encode(k, k_scale), self._encode(v, v_scale)
        self._keys[layer].index_copy_(0, slots, k)
        self._values[layer].index_copy_(0, slots, v)

    def write_both(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        """As :meth:`write`, keys and values side by side: ``kv [n, 2 * kv_heads, head_dim]``, keys first."""
        if self.kv_format != "none":
            kv = self._encode(kv, self._scale_rows[layer])
        self._both[layer].index_copy_(0, slots, kv)

    def read(self, layer: int, slots: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Keys and values ``[n, kv_heads, head_dim]`` at ``slots`` ``[n]`` in the compute dtype; of a slice
        they may be views."""
        k, v = self.read_unscaled(layer, slots)
        if self.kv_format == "none":
            return k, v
        k_factor, v_factor = self.read_factors[layer]
        return k * k_factor, v * v_factor

    def read_unscaled(
        self, layer: int, slots: Tensor | slice, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`read` in ``dtype``, still to be multiplied with the two ``read_factors[layer]``.

        Attention multiplies scores and outputs instead of every key and value: exact codes, less work.
        """
        both = self._both[layer]
        kv = both[slots] if isinstance(slots, slice) else both.index_select(0, slots)
        dtype = self.dtype if dtype is None else dtype
        kv = decode_e4m3(kv, dtype) if self.kv_format == "fp8" else kv.to(dtype)
        return kv[:, : self._num_kv_heads], kv[:, self._num_kv_heads :]

    def copy(self, src_slots: Tensor, dst_slots: Tensor) -> None:
        """Copy ``src_slots`` to ``dst_slots`` in all layers, bit for bit; the sets may overlap."""
        self._all.index_copy_(1, dst_slots, self._all.index_select(1, src_slots))

    def _encode(self, values: Tensor, scale: float | Tensor) -> Tensor:
        scaled = values.to(wide_dtype(values.dtype)) / scale
        if self.kv_format == "fp8":
            return encode_e4m3(scaled)
        return scaled.round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)
