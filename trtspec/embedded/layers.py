"""Linear layers in the forms that weights come in, and RMSNorm.

In bfloat16 on a CPU quantized weights are executed from their codes where a kernel exists; in every other
dtype and on other devices they are dequantized when loaded (in float64, then rounded to the dtype) and
multiplied with F.linear, the form that tests compare with. Activation quantization is emulated in both. Which
kernel runs is decided by the number of rows, with constants measured by ``benchmarks/kernels.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from trtspec.embedded.kvstore import E4M3_MAX, decode_e4m3, encode_e4m3
from trtspec.modelspec import FP8_ALGOS


class Linear(Protocol):
    """``x [rows, in]`` -> ``[rows, out]``, both in the compute dtype."""

    def __call__(self, x: Tensor) -> Tensor: ...


# --------------------------------------------------------------------------- unquantized


class DenseLinear:
    """A plain weight ``[out, in]`` in the compute dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """A bfloat16 weight in oneDNN's blocked layout, which replaces the plain one (same size).

    F.linear reorders a plain bfloat16 weight on every call; doing it once halves the time of few rows (one
    row of 576 x 3072: 107 instead of 222 us on Zen 5, one thread) and is never slower. The layout does not
    depend on the number of rows there; where it does, the operator reorders, no worse than F.linear.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out


def dense(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The fastest form of an unquantized weight: packed for bfloat16 on a CPU with oneDNN, else plain."""
    packable = weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
    if packable and torch.backends.mkldnn.enabled and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return PackedLinear(weight, bias)
    return DenseLinear(weight, bias)


class SideBySide:
    """Several linears on one input, their outputs concatenated."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = tuple(parts)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], -1)


# --------------------------------------------------------------------------- quantized weights


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight as a ModelOpt unified export stores it.

    ``codes``: FP8 [out, in] float8_e4m3fn; 8-bit [out, in] int8; 4-bit [out / 2, in] uint8, the low nibble
    the even output row, two's complement. ``scale`` [out, groups] float64: the weight is code * scale, a
    group being in / groups neighbouring inputs. ``scale_2``: the 4-bit weight is rounded to E4M3 multiples of
    it (W4A8). ``input_scale``: static scale of the quantized activations. ``pre_quant_scale`` [in] multiplies
    the input first (AWQ, SmoothQuant).
    """

    algo: str
    codes: Tensor
    scale: Tensor
    scale_2: float | None = None
    input_scale: float | None = None
    pre_quant_scale: Tensor | None = None


def join(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """One weight with the outputs of ``parts`` side by side; None if they treat their input differently."""
    first = parts[0]
    for part in parts[1:]:
        same_smoothing = (part.pre_quant_scale is None) == (first.pre_quant_scale is None) and (
            part.pre_quant_scale is None
            or first.pre_quant_scale is None
            or torch.equal(part.pre_quant_scale, first.pre_quant_scale)
        )
        if not same_smoothing or part.input_scale != first.input_scale or part.scale_2 != first.scale_2:
            return None
    # float8 tensors cannot be concatenated; their bytes can.
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts]).view(first.codes.dtype)
    return replace(first, codes=codes, scale=torch.cat([part.scale for part in parts]))


def unpack_int4(packed: Tensor) -> Tensor:
    """[out / 2, in] uint8 -> [out, in] int8 in -8..7: low nibble even row, high nibble odd row."""
    signed = packed.view(torch.int8)
    low = signed.bitwise_left_shift(4).bitwise_right_shift_(4)
    high = signed.bitwise_right_shift(4)
    return torch.stack((low, high), 1).view(2 * packed.shape[0], packed.shape[1])


def dequantize(weight: QuantizedWeight) -> Tensor:
    """The weight [out, in] in float64, exactly (up to one float64 rounding of code * scale)."""
    if weight.algo in FP8_ALGOS:
        return decode_e4m3(weight.codes.view(torch.int8), torch.float64) * (weight.scale * 256.0)
    codes = unpack_int4(weight.codes) if weight.codes.dtype == torch.uint8 else weight.codes
    grouped = codes.double().view(codes.shape[0], weight.scale.shape[1], -1) * weight.scale[:, :, None]
    values = grouped.view(codes.shape)
    return values if weight.scale_2 is None else e4m3_round(values / weight.scale_2) * weight.scale_2


def e4m3_round(values: Tensor) -> Tensor:
    """``values`` rounded to E4M3 numbers (saturating), in their own dtype."""
    return decode_e4m3(encode_e4m3(values), values.dtype).mul_(256.0)


def _scaled(x: Tensor, pre_quant_scale: Tensor | None) -> Tensor:
    return x if pre_quant_scale is None else x * pre_quant_scale


class DequantizedLinear:
    """A quantized weight in the compute dtype, the activations rounded as the format rounds them."""

    def __init__(
        self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.weight = dequantize(weight).to(device, dtype)
        self.bias = bias
        self.algo = weight.algo
        self.input_scale = weight.input_scale
        pre = weight.pre_quant_scale
        self.pre_quant_scale = None if pre is None else pre.to(device, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        x = self._quantize_input(_scaled(x, self.pre_quant_scale))
        return F.linear(x, self.weight, self.bias)

    def _quantize_input(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        if self.algo == "FP8_PER_CHANNEL_PER_TOKEN":
            scale = per_token_scale(wide)
            return (e4m3_round(wide / scale) * scale).to(x.dtype)
        if self.input_scale is None:
            return x
        if self.algo == "W8A8_SQ_PER_CHANNEL":
            return ((wide / self.input_scale).round_().clamp_(-128, 127) * self.input_scale).to(x.dtype)
        return (e4m3_round(wide / self.input_scale) * self.input_scale).to(x.dtype)


def per_token_scale(x: Tensor) -> Tensor:
    """[rows, 1]: amax / 448 of each row; 1 for a row of zeros."""
    amax = x.abs().amax(-1, keepdim=True)
    return torch.where(amax > 0, amax / E4M3_MAX, 1.0)


class Fp8Linear:
    """E4M3 weights and activations in bfloat16 arithmetic, which holds every E4M3 number exactly.

    The weight stays as codes in bfloat16 (2 bytes each): decoding on every call would cost more than the
    matrix product for few rows, and CPUs have no E4M3 product. Codes multiply codes with float32 sums and the
    scales act on the result, as in a GPU's FP8 kernel. Also runs W4A8, whose weights ModelOpt defines as
    E4M3.
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        if weight.scale_2 is not None:
            codes = dequantize(replace(weight, scale_2=None)) / weight.scale_2
            self._matrix = dense(e4m3_round(codes).to(torch.bfloat16))
            scale = torch.full((1, codes.shape[0]), weight.scale_2, dtype=torch.float64)
        else:
            codes = decode_e4m3(weight.codes.view(torch.int8), torch.bfloat16)
            self._matrix = dense(codes.mul_(256.0))
            scale = weight.scale.reshape(1, -1)
        self.bias = bias
        self.input_scale = weight.input_scale
        self.pre_quant_scale = _to_bfloat16(weight.pre_quant_scale)
        self.scale = (scale * (weight.input_scale or 1.0)).float()

    def __call__(self, x: Tensor) -> Tensor:
        wide = _scaled(x, self.pre_quant_scale).float()
        scale = self.scale
        if self.input_scale is None:
            token_scale = per_token_scale(wide)
            wide, scale = wide / token_scale, scale * token_scale
        else:
            wide = wide / self.input_scale
        codes = decode_e4m3(encode_e4m3(wide), torch.bfloat16).mul_(256.0)
        out = self._matrix(codes) * scale
        return (out if self.bias is None else out + self.bias).to(x.dtype)


# Up to these many rows the packed kernels beat decoding the weight for a bfloat16 product: they cost the
# same for every row, decoding costs as much as about 30 (int4) or 10 (int8) rows (benchmarks/kernels.py).
INT4_FEW_ROWS = 44
INT8_FEW_ROWS = 18
# The same where the decoded weight is kept, so that only the bfloat16 product has to be beaten.
INT4_FEW_ROWS_BESIDE_COPY = 10
INT8_FEW_ROWS_BESIDE_COPY = 4
# Outputs packed at a time: the packing operator wants 4 bytes a weight, eight times what it returns.
PACKED_OUTPUTS = 4096
# About this much of a weight is decoded at a time, so that it is still in the cache when it is multiplied
# (2048 x 8192, 64 rows: 9.9 ms in blocks of 2 MB, 12.6 of 0.25 MB, 10.4 of 4 MB).
DECODED_BYTES = 2 * 2**20


def _block_outputs(outputs: int, inputs: int) -> int:
    """Outputs of one decoded block: equal blocks of about ``DECODED_BYTES``, multiples of 64."""
    blocks = -(-2 * inputs * outputs // DECODED_BYTES)
    return -(-outputs // (64 * blocks)) * 64


class Int4Linear:
    """4-bit weights in groups, bfloat16 activations (W4A16).

    Few rows run torch's packed kernel; many (prefill, verification of a batch) decode the weight for a
    bfloat16 product. The kernel's layout depends on the CPU and has no inverse, so beside it are kept
    either the export's own nibbles (1 byte a weight in all, against 2 in bfloat16) or, with
    ``dequantized_copy``, the decoded weight itself (2.5 bytes): the same numbers, decoded once.
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, dequantized_copy: bool = False) -> None:
        self.group = weight.codes.shape[1] // weight.scale.shape[1]
        self._packed = torch.cat(
            [_pack_int4(part) for part in torch.split(weight.codes, PACKED_OUTPUTS // 2)]
        )
        scale = weight.scale.to(torch.bfloat16)
        # The kernel computes (code - 8) * scale + zero per group: [groups, out, (scale, zero)].
        self._scales_zeros = torch.stack((scale.t(), torch.zeros_like(scale.t())), -1).contiguous()
        self.bias = bias
        self.pre_quant_scale = _to_bfloat16(weight.pre_quant_scale)
        self.few_rows = INT4_FEW_ROWS_BESIDE_COPY if dequantized_copy else INT4_FEW_ROWS
        outputs, inputs = scale.shape[0], weight.codes.shape[1]
        # Input by input, so that scales lie along the outputs: long loops instead of one for each group.
        codes, scale = weight.codes.t(), scale.t()
        self._copy = dense(decode_int4(codes, scale).t()) if dequantized_copy else None
        size = _block_outputs(outputs, inputs)
        self._blocks: list[tuple[Tensor, Tensor]] = []
        if not dequantized_copy:
            split = zip(torch.split(codes, size // 2, 1), torch.split(scale, size, 1), strict=True)
            self._blocks = [(part.contiguous(), by_group.contiguous()) for part, by_group in split]

    def __call__(self, x: Tensor) -> Tensor:
        x = _scaled(x, self.pre_quant_scale)
        if x.shape[0] <= self.few_rows:
            out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
                x.contiguous(), self._packed, self.group, self._scales_zeros
            )
        elif self._copy is not None:
            out = self._copy(x)
        else:
            out = x.new_empty(x.shape[0], self._packed.shape[0])
            first = 0
            for codes, scale in self._blocks:
                last = first + scale.shape[1]
                torch.mm(x, decode_int4(codes, scale), out=out[:, first:last])
                first = last
        return out if self.bias is None else out + self.bias


def _pack_int4(codes: Tensor) -> Tensor:
    """The kernel's layout, ``[out, in / 2]``: runs of 64 outputs, so that it can be made in parts."""
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu((unpack_int4(codes) + 8).int(), 1)
    return packed


@functools.cache
def _int4_table() -> Tensor:
    """``[65536] int64``: of each 16-bit number its four nibbles, lowest first, as bfloat16 numbers."""
    nibbles = (torch.arange(2**16)[:, None] >> torch.arange(0, 16, 4)) & 15
    return ((nibbles ^ 8) - 8).to(torch.bfloat16).view(torch.int64).squeeze(1)


def decode_int4(codes: Tensor, scale: Tensor) -> Tensor:
    """``codes [in, out / 2] uint8`` (low nibble the even output), ``scale [groups, out] bfloat16`` ->
    ``[in, out]`` in bfloat16; ``out`` a multiple of 4.

    Looks four nibbles up at once in a table of 512 KB: 0.13 ns a weight on Zen 5, the scales as much again;
    shifting, casting and scaling [out, in] took 0.39.
    """
    numbers = codes.contiguous().view(-1).view(torch.uint16).int()
    values = _int4_table().index_select(0, numbers).view(torch.bfloat16)
    grouped = values.view(len(scale), -1, scale.shape[1])
    return grouped.mul_(scale[:, None]).view(len(codes), -1)


class Int8WeightLinear:
    """8-bit weights with a scale per output, bfloat16 activations (W8A16); ``dequantized_copy`` as in
    :class:`Int4Linear`, 3 bytes a weight instead of 1."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, dequantized_copy: bool = False) -> None:
        self.codes = weight.codes
        self.scale = weight.scale.reshape(1, -1).float()
        self.bias = bias
        self.pre_quant_scale = _to_bfloat16(weight.pre_quant_scale)
        # The kernel's own scales would be rounded to bfloat16; ones keep the codes exact.
        self._ones = torch.ones(weight.codes.shape[0], dtype=torch.bfloat16)
        self._copy = dense(weight.codes.to(torch.bfloat16)) if dequantized_copy else None
        self.few_rows = INT8_FEW_ROWS_BESIDE_COPY if dequantized_copy else INT8_FEW_ROWS

    def __call__(self, x: Tensor) -> Tensor:
        x = _scaled(x, self.pre_quant_scale)
        if x.shape[0] <= self.few_rows:
            out = torch._weight_int8pack_mm(x.contiguous(), self.codes, self._ones)
        elif self._copy is not None:
            out = self._copy(x)
        else:
            parts = torch.split(self.codes, _block_outputs(*self.codes.shape))
            out = torch.cat([F.linear(x, codes.to(torch.bfloat16)) for codes in parts], -1)
        out = out * self.scale
        return (out if self.bias is None else out + self.bias).to(x.dtype)


class Int8Linear:
    """8-bit weights and activations with exact integer sums (W8A8 SmoothQuant, static input scale)."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        # onednn.qlinear_pointwise is a reference loop (100 times slower) for int8 inputs on CPUs without AMX.
        self._transposed = weight.codes.t()
        self.input_scale = weight.input_scale or 1.0
        self.scale = (weight.scale.reshape(1, -1) * self.input_scale).float()
        self.bias = bias
        self.pre_quant_scale = _to_bfloat16(weight.pre_quant_scale)

    def __call__(self, x: Tensor) -> Tensor:
        wide = _scaled(x, self.pre_quant_scale).float() / self.input_scale
        codes = wide.round_().clamp_(-128, 127).to(torch.int8)
        out = torch._int_mm(codes, self._transposed) * self.scale
        return (out if self.bias is None else out + self.bias).to(x.dtype)


def quantized(
    weight: QuantizedWeight,
    bias: Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    dequantized_copy: bool = False,
) -> Linear:
    """The form that runs ``weight``: packed for bfloat16 on a CPU, else dequantized.

    ``dequantized_copy``: packed weight-only forms keep a bfloat16 copy for many rows; nothing else does.
    """
    if dtype != torch.bfloat16 or device.type != "cpu":
        return DequantizedLinear(weight, bias, dtype, device)
    match weight.algo:
        case "W4A16_AWQ":
            return Int4Linear(weight, bias, dequantized_copy)
        case "W8A16":
            return Int8WeightLinear(weight, bias, dequantized_copy)
        case "W8A8_SQ_PER_CHANNEL":
            return Int8Linear(weight, bias)
        case _:
            return Fp8Linear(weight, bias)


def _to_bfloat16(scale: Tensor | None) -> Tensor | None:
    return None if scale is None else scale.to(torch.bfloat16)


# --------------------------------------------------------------------------- normalisation


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square normalisation over the last dimension (arXiv 1910.07467), accumulated in float32."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


# Up to these many rows layer norm of doubled rows beats F.rms_norm, which is eight kernels on a CPU (one row
# of 576 numbers: 3.3 instead of 8.5 us; 16 rows: 9 and 12).
DOUBLED_ROWS = 16


class RmsNorm:
    """:func:`rms_norm` with one weight ``[hidden]``; few 16-bit rows on a CPU in two kernels.

    The mean of (x, -x) is 0 and its variance the mean square of x, so half of its layer norm is x's RMS norm,
    summed in float32 and rounded once.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps
        short = weight.device.type == "cpu" and weight.dtype.itemsize == 2
        self._doubled = torch.cat((weight, weight)) if short else None

    def __call__(self, x: Tensor) -> Tensor:
        size = x.shape[-1]
        if self._doubled is None or x.shape[0] > DOUBLED_ROWS or x.dtype != self.weight.dtype:
            return F.rms_norm(x, (size,), self.weight, self.eps)
        both = torch.cat((x, -x), -1)
        return torch.layer_norm(both, (2 * size,), self._doubled, None, self.eps)[..., :size].contiguous()
