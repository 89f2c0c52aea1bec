"""Attention of a step's rows over their sequences' paged keys and values, and rotary embeddings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trtspec.embedded.batch import SequenceRows, StepBatch
from trtspec.embedded.kvstore import KvStore
from trtspec.modelspec import ModelSpec

# Sequences with at most this many rows share one padded call per layer; longer prefill chunks fill a call
# alone. 16 covers decode and usual drafts; above it padding costs more than the ~50 us a call saves.
FEW_ROWS = 16
# On a CPU a call gathers at most about this much of the keys and values (one sequence may be longer): what
# has left the second-level cache before it is used is read twice, and memory stays bounded (16 sequences of
# 1000 tokens of SmolLM2: 2.0 ms a layer in parts, 3.3 in one call).
GATHERED_BYTES = 4 * 2**20
# A 16-bit chunk of at least this many rows on a CPU attends block by block (see _causal_blocks); fewer do not
# make up for its calls.
BLOCKED_FROM = 96
# Rows of a block, at most: the triangle's upper half is computed too. And scores of one KV head in a block,
# at most about: 1 MB in float32, what the second-level cache holds.
BLOCK_ROWS, BLOCK_SCORES = 128, 2**18


# --------------------------------------------------------------------------- rotary embeddings


def rope_frequencies(spec: ModelSpec) -> tuple[Tensor, float]:
    """(inverse frequencies [head_dim / 2] float32, factor on cos and sin) of plain or scaled RoPE.

    RoPE: arXiv 2104.09864. "linear" divides positions by ``factor``; "llama3" does so only for wavelengths
    beyond the original context, with a linear blend between (Llama 3.1 model card); "yarn" blends by the
    number of rotations over the original context and scales attention (arXiv 2309.00071, section 3.2).
    """
    dim = spec.head_dim
    # float32 on purpose: models were trained with float32 frequencies, and every engine computes them so.
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    periods = spec.rope_theta**exponents
    inv_freq = 1.0 / periods
    scaling = spec.rope_scaling or {}
    match scaling.get("rope_type", "default"):
        case "linear":
            return inv_freq / scaling["factor"], 1.0
        case "llama3":
            return _llama3(inv_freq, scaling), 1.0
        case "yarn":
            return _yarn(periods, scaling, spec)
        case _:
            return inv_freq, 1.0


def _llama3(inv_freq: Tensor, scaling: dict[str, Any]) -> Tensor:
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inv_freq
    slowed = torch.where(wavelength > original / low, inv_freq / factor, inv_freq)
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * slowed / factor + blend * slowed
    between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(between, blended, slowed)


def _yarn(periods: Tensor, scaling: dict[str, Any], spec: ModelSpec) -> tuple[Tensor, float]:
    dim, factor = spec.head_dim, scaling["factor"]
    original = scaling["original_max_position_embeddings"]

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention_factor = magnitude(1.0)
        if mscale and mscale_all:
            attention_factor = magnitude(mscale) / magnitude(mscale_all)

    def dimension_turning(rotations: float) -> float:
        """The dimension that turns ``rotations`` times over the original context."""
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(spec.rope_theta))

    low = dimension_turning(scaling.get("beta_fast") or 32)
    high = dimension_turning(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return (1.0 / (factor * periods)) * (1 - keep) + (1.0 / periods) * keep, float(attention_factor)


@dataclass(frozen=True)
class Rope:
    """cos and signed sin for every position, ``[positions, head_dim]`` in float32 (float64 rows are rotated
    with the float32 values, as trained)."""

    cos: Tensor
    sin: Tensor
    """The first half negated: rotate(x) = x * cos + swap_halves(x) * sin."""

    @staticmethod
    def of(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Rope:
        inv_freq, factor = rope_frequencies(spec)
        angles = torch.arange(spec.max_positions, dtype=torch.float32)[:, None] * inv_freq
        cos, sin = angles.cos() * factor, angles.sin() * factor
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return Rope(torch.cat((cos, cos), -1).to(device, wide), torch.cat((-sin, sin), -1).to(device, wide))

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) ``[rows, 1, head_dim]``."""
        return self.cos.index_select(0, positions)[:, None], self.sin.index_select(0, positions)[:, None]


def rotate(heads: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
    """``heads [rows, heads, head_dim]`` rotated; computed in float32 or better, returned in its own dtype or
    written to ``out``, which may be ``heads`` itself."""
    wide = heads.to(cos.dtype)
    rotated = torch.addcmul(wide * cos, wide.roll(heads.shape[-1] // 2, -1), sin)
    return rotated.to(heads.dtype) if out is None else out.copy_(rotated)


# --------------------------------------------------------------------------- attention


@dataclass(frozen=True)
class _Group:
    """Sequences whose rows attend in one call: padded to ``rows`` queries and ``keys`` keys each."""

    sequences: int
    rows: int
    keys: int
    query_rows: Tensor | slice | None
    """[sequences * rows]: batch row of each query; None: the batch's rows in order."""
    place: Tensor | slice
    """[real rows]: the batch rows that the group answers for."""
    outputs: Tensor | None
    """[real rows]: which padded outputs are real; None: all."""
    slots: Tensor | slice
    """[sequences * keys]; a slice where one sequence's slots follow each other, which need no gathering."""
    mask: Tensor | None
    """Added to the scores: ``[sequences, 1, rows * queries per KV head, keys]`` for few rows,
    ``[rows, keys]`` for a long chunk; None: nothing masked."""
    long: bool
    causal: bool
    """A long chunk whose rows see the context and those before them, and the kernel can be told so."""
    blocks: bool
    """A causal long chunk that attends block by block."""
    dtype: torch.dtype
    """Of the computation."""


@dataclass(frozen=True)
class AttentionPlan:
    """Who attends to what in one step; made once and used by every layer."""

    groups: tuple[_Group, ...]


def plan_attention(
    batch: StepBatch, spec: ModelSpec, dtype: torch.dtype, few_dtype: torch.dtype | None = None
) -> AttentionPlan:
    """Group the sequences of ``batch``. Raises nothing; masks are finite so that no row can become NaN.

    ``dtype`` of the computation, whose result is rounded to that of the queries; ``few_dtype``: that of
    sequences with at most ``FEW_ROWS`` rows, where it is another.
    """
    few: dict[int, list[SequenceRows]] = {}
    long: list[SequenceRows] = []
    for sequence in batch.sequences:
        if sequence.count > FEW_ROWS:
            long.append(sequence)
        else:
            # Equal bit lengths keep the padding of keys below a factor of two.
            length = (len(sequence.context) + sequence.count) | 255
            few.setdefault(length.bit_length(), []).append(sequence)
    few_dtype = dtype if few_dtype is None else few_dtype
    slot_bytes = 2 * spec.num_kv_heads * spec.head_dim * few_dtype.itemsize
    calls = [part for alike in few.values() for part in _parts(alike, slot_bytes, batch.tokens.device)]
    groups = [_few_rows(batch, sequences, spec, few_dtype) for sequences in calls]
    groups += [_long_chunk(batch, sequence, spec, dtype) for sequence in long]
    return AttentionPlan(tuple(groups))


def _parts(sequences: list[SequenceRows], slot_bytes: int, device: torch.device) -> list[list[SequenceRows]]:
    """``sequences``, which pad to similar lengths, in runs for one call each."""
    if device.type != "cpu":
        return [sequences]
    longest = max(len(sequence.context) + sequence.count for sequence in sequences)
    together = max(1, GATHERED_BYTES // (longest * slot_bytes))
    if len(sequences) > together:  # of equal size
        together = -(-len(sequences) // -(-len(sequences) // together))
    return [sequences[i : i + together] for i in range(0, len(sequences), together)]


def _few_rows(
    batch: StepBatch, sequences: Sequence[SequenceRows], spec: ModelSpec, dtype: torch.dtype
) -> _Group:
    device = batch.tokens.device
    counts = [s.count for s in sequences]
    contexts = [len(s.context) for s in sequences]
    rows = max(counts)
    lengths = [context + count for context, count in zip(contexts, counts, strict=True)]
    keys = max(lengths)
    own = [batch.slots[s.first : s.first + s.count] for s in sequences]
    pieces: list[Tensor] = []
    for sequence, slots, length in zip(sequences, own, lengths, strict=True):
        pieces += [sequence.context, slots]
        if length < keys:
            # Padding reads the sequence's own slot: even a neighbour's NaN cannot reach it.
            pieces.append(slots[:1].expand(keys - length))
    all_rows = len(sequences) == len(batch.sequences)
    padded = min(counts) < rows
    query_rows = outputs = None
    if not all_rows or padded:
        query_rows = torch.tensor(
            [s.first + min(i, s.count - 1) for s in sequences for i in range(rows)], device=device
        )
    if padded:
        outputs = torch.tensor(
            [b * rows + i for b, count in enumerate(counts) for i in range(count)], device=device
        )
    mask = None
    window = _window(batch, spec)
    if rows > 1 or min(lengths) < keys or window is not None:
        # Row i (padded rows repeat the last) sees keys 0 .. context + i.
        last = torch.tensor(
            [[c + min(i, n - 1) for i in range(rows)] for c, n in zip(contexts, counts, strict=True)],
            device=device,
        )
        visible = torch.arange(keys, device=device) <= last[:, :, None]
        for b, sequence in enumerate(sequences):
            if sequence.tree is not None:
                n, end = counts[b], lengths[b]
                own_keys = slice(end - sequence.tree.shape[1], end)
                visible[b, :n, own_keys] = sequence.tree
                visible[b, n:, own_keys] = sequence.tree[-1]
            if window is not None:
                n = counts[b]
                near = _within_window(batch, sequence, window)
                visible[b, :n, : lengths[b]] &= near
                visible[b, n:, : lengths[b]] &= near[-1]
        queries = spec.num_heads // spec.num_kv_heads
        bias = _bias(visible, dtype)[:, :, None, :].expand(-1, -1, queries, -1)
        mask = bias.reshape(len(sequences), 1, rows * queries, keys)
    return _Group(
        len(sequences),
        rows,
        keys,
        query_rows,
        torch.cat([torch.arange(s.first, s.first + s.count) for s in sequences]).to(device),
        outputs,
        _slots(pieces),
        mask,
        long=False,
        causal=False,
        blocks=False,
        dtype=dtype,
    )


def _slots(pieces: list[Tensor]) -> Tensor | slice:
    slots = torch.cat(pieces)
    if slots.device.type == "cpu" and len(pieces) == 2:  # one sequence; a GPU would have to be waited for
        first, last = int(slots[0]), int(slots[-1])
        if last - first == len(slots) - 1 and torch.equal(slots, torch.arange(first, last + 1)):
            return slice(first, last + 1)
    return slots


def _long_chunk(batch: StepBatch, sequence: SequenceRows, spec: ModelSpec, dtype: torch.dtype) -> _Group:
    device = batch.tokens.device
    first, rows, context = sequence.first, sequence.count, len(sequence.context)
    keys = context + rows
    window = _window(batch, spec)
    plain = sequence.tree is None and window is None
    blocks = plain and device.type == "cpu" and dtype.itemsize == 2 and rows >= BLOCKED_FROM
    causal = blocks or (plain and context == 0)
    mask = None
    if not causal:
        visible = torch.arange(keys, device=device) <= torch.arange(context, keys, device=device)[:, None]
        if sequence.tree is not None:
            visible[:, keys - sequence.tree.shape[1] :] = sequence.tree
        if window is not None:
            visible &= _within_window(batch, sequence, window)
        mask = _bias(visible, dtype)
    place = slice(first, first + rows)
    return _Group(
        1,
        rows,
        keys,
        place if len(batch.sequences) > 1 else None,
        place,
        None,
        _slots([sequence.context, batch.slots[place]]),
        mask,
        long=True,
        causal=causal,
        blocks=blocks,
        dtype=torch.float32 if blocks else dtype,
    )


def _window(batch: StepBatch, spec: ModelSpec) -> int | None:
    """The sliding window when some row of the batch reaches beyond it."""
    window = spec.sliding_window
    return window if window is not None and int(batch.positions.max()) >= window else None


def _within_window(batch: StepBatch, sequence: SequenceRows, window: int) -> Tensor:
    """[count, context + count] bool: the key is less than ``window`` positions before the row."""
    own = batch.positions[sequence.first : sequence.first + sequence.count]
    start = own[0] - len(sequence.context)
    keys = torch.cat((torch.arange(len(sequence.context), device=own.device) + start, own))
    return keys > own[:, None] - window


def _bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where visible, else so low that its weight is exactly 0. Finite: -inf minus -inf, which a kernel
    meets when a whole block of keys is masked, would be NaN."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, torch.finfo(dtype).min / 2
    )


def attend(q: Tensor, layer: int, store: KvStore, plan: AttentionPlan) -> Tensor:
    """``q [rows, heads, head_dim]`` -> ``[rows, heads * head_dim]``; needs the rows' own KV in ``store``."""
    if len(plan.groups) == 1:
        return _attend_group(q, layer, store, plan.groups[0]).to(q.dtype)
    out = q.new_empty(len(q), q.shape[1] * q.shape[2])
    for group in plan.groups:
        out[group.place] = _attend_group(q, layer, store, group).to(q.dtype)
    return out


def _attend_group(q: Tensor, layer: int, store: KvStore, group: _Group) -> Tensor:
    k, v = store.read_unscaled(layer, group.slots, group.dtype)
    k_factor, v_factor = store.read_factors[layer]
    if isinstance(group.query_rows, slice):
        q = q[group.query_rows]
    elif group.query_rows is not None:
        q = q.index_select(0, group.query_rows)
    _, heads, dim = q.shape
    kv_heads = k.shape[1]
    queries = heads // kv_heads
    scale = k_factor / math.sqrt(dim)
    if group.blocks:
        return _causal_blocks(q, k, v, scale, v_factor)
    q = q.to(group.dtype)
    if group.long:
        # KV heads as the batch and their queries as the heads: keys are shared by stride, not by copy.
        out = F.scaled_dot_product_attention(
            q.view(-1, kv_heads, queries, dim).permute(1, 2, 0, 3),
            k.transpose(0, 1)[:, None].expand(-1, queries, -1, -1),
            v.transpose(0, 1)[:, None].expand(-1, queries, -1, -1),
            attn_mask=group.mask,
            is_causal=group.causal,
            scale=scale,
        )
        out = out.permute(2, 0, 1, 3).reshape(-1, heads * dim)
        return out if v_factor == 1.0 else out * v_factor
    # The queries of one KV head become rows, so that the kernel multiplies matrices instead of vectors.
    batch, rows = group.sequences, group.rows
    folded = q.view(batch, rows, kv_heads, queries, dim).transpose(1, 2)
    out = F.scaled_dot_product_attention(
        folded.reshape(batch, kv_heads, rows * queries, dim),
        k.view(batch, group.keys, kv_heads, dim).transpose(1, 2),
        v.view(batch, group.keys, kv_heads, dim).transpose(1, 2),
        attn_mask=group.mask,
        scale=scale,
    )
    out = out.view(batch, kv_heads, rows, queries, dim).transpose(1, 2).reshape(batch * rows, heads * dim)
    if group.outputs is not None:
        out = out.index_select(0, group.outputs)
    return out if v_factor == 1.0 else out * v_factor


def _causal_blocks(q: Tensor, k: Tensor, v: Tensor, scale: float, v_factor: float) -> Tensor:
    """The last rows of a sequence over all of it: ``q [rows, heads, head_dim]``, ``k, v [keys, kv_heads,
    head_dim] float32`` -> ``[rows, heads * head_dim]`` in q's dtype; computed in float32.

    For torch's kernel a CPU without 16-bit matrix units multiplies 16-bit blocks at a seventh of oneDNN's
    float32 speed (512 rows of 9 heads of 64 on Zen 5: 7.4 ms, so 3.3), and masks every score of a chunk
    behind a context. Here the queries of a KV head are the rows of one product, and keys behind a block's
    last row are left out.
    """
    rows, heads, dim = q.shape
    keys, kv_heads = k.shape[:2]
    queries, context = heads // kv_heads, keys - rows
    by_head = (q.float() * scale).view(rows, kv_heads, queries, dim).transpose(0, 1).contiguous()
    k = k.transpose(0, 1).contiguous()
    v = v.permute(1, 2, 0).contiguous()
    block = min(rows, BLOCK_ROWS, max(32, BLOCK_SCORES // (queries * keys) // 32 * 32))
    later = torch.full((block, block), torch.finfo(torch.float32).min / 2).triu_(1)[:, None]
    out = q.new_empty(rows, kv_heads, queries * dim)
    for head in range(kv_heads):
        for first in range(0, rows, block):
            count = min(block, rows - first)
            seen = context + first + count
            scores = _product(by_head[head, first : first + count].view(-1, dim), k[head, :seen])
            own = scores.view(count, queries, seen)[..., seen - count :]
            own += later[:count, :, :count]
            mixed = _product(torch.softmax(scores, -1), v[head, :, :seen].contiguous())
            out[first : first + count, head] = (mixed if v_factor == 1.0 else mixed * v_factor).view(
                count, -1
            )
    return out.view(rows, -1)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """``x [n, m]`` times ``weight [k, m]`` transposed, in float32, by oneDNN where it is there: F.linear asks
    MKL, which has half its speed on AMD's CPUs."""
    found = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not (found and torch.backends.mkldnn.enabled):
        return F.linear(x, weight)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return out
