"""What must fit on one GPU: weights with their scales, KV cache, draft, activations, runtime.

All sizes are bytes on one GPU of ``tp x pp``. A checkpoint that is already quantized counts in the format it
is stored in when the recipe quantizes nothing.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import Any

from trtspec.cost.trace import Ledger
from trtspec.errors import InputError
from trtspec.hardware import Gpu
from trtspec.modelspec import ModelSpec, linear_modules
from trtspec.recipe import NoQuantization

WEIGHT_BITS = {"none": 16, "fp8": 8, "w4a16_awq": 4, "w4a8_awq": 4, "w8a8_sq": 8, "nvfp4": 4}
SCALE_BITS = {"none": 0.0, "fp8": 0.0, "w8a8_sq": 0.0, "nvfp4": 8 / 16}
"""Bits of scale per weight; the 4-bit integer formats add 16 bits per group. NVFP4: 8 bits per 16 weights."""
KV_BYTES = {"none": 2.0, "fp8": 1.0, "int8": 1.0, "nvfp4": 0.5625}
RATE_OF = {
    "none": "bf16",
    "fp8": "fp8",
    "w4a16_awq": "bf16",
    "w4a8_awq": "fp8",
    "w8a8_sq": "int8",
    "nvfp4": "fp4",
}
"""Which unit multiplies: weight-only formats convert to 16 bit (or FP8) first."""
_STORED = {
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
    "W4A16_AWQ": "w4a16_awq",
    "W4A8_AWQ": "w4a8_awq",
    "W8A8_SQ_PER_CHANNEL": "w8a8_sq",
    "W8A16": "w8a8_sq",
}
DRAFT_VOCAB = 32_000
"""Output tokens of an EAGLE-3 head, which drafts from the frequent part of the vocabulary (SpecForge's
default)."""


@dataclass(frozen=True)
class Network:
    """One network as the cost formulas see it. ``weight_bytes`` is what a step reads on one GPU (layers and
    output projection), ``stored_bytes`` what it occupies there (embedding included); ``params`` are the
    multiplied weights of all GPUs together; ``kv_bytes`` one token's KV on one GPU."""

    format: str
    layers: int
    hidden_size: int
    attention_size: int
    layer_params: float
    params: float
    weight_bytes: float
    stored_bytes: float
    kv_bytes: float


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU. ``kv_bytes`` is what the admitted sequences need at full length, ``max_sequences``
    how many full-length sequences the KV budget holds."""

    weights_bytes: float
    draft_weights_bytes: float
    activations_bytes: float
    reserve_bytes: float
    kv_bytes_per_token: float
    draft_kv_bytes_per_token: float
    kv_budget_bytes: float
    kv_bytes: float
    capacity_bytes: float
    max_sequences: int

    @property
    def total_bytes(self) -> float:
        """Weights, draft, activations, runtime and the KV of the admitted sequences."""
        fixed = self.weights_bytes + self.draft_weights_bytes + self.activations_bytes + self.reserve_bytes
        return fixed + self.kv_bytes


def weight_format(spec: ModelSpec, quantization: Any) -> str:
    """The format the weights run in: the recipe's, else the one the checkpoint is stored in."""
    kind = str(quantization.kind)
    if kind == "none" and spec.quant is not None and spec.quant.algo is not None:
        return _STORED[spec.quant.algo]
    return kind


def kv_format(spec: ModelSpec, quantization: Any) -> str:
    """The format of the KV cache: the recipe's, else the one the checkpoint brings scales for."""
    kind = str(quantization.kv_cache)
    if kind == "none" and quantization.kind == "none" and spec.quant is not None and spec.quant.kv_algo:
        return {"FP8": "fp8", "INT8": "int8"}[spec.quant.kv_algo]
    return kind


def kv_bytes_per_token(spec: ModelSpec, kind: str, tp: int = 1, pp: int = 1) -> float:
    """Bytes of K and V of one token on one GPU; a KV head is copied where ``tp`` exceeds the heads."""
    return 2 * spec.num_layers / pp * max(1.0, spec.num_kv_heads / tp) * spec.head_dim * KV_BYTES[kind]


def weight_bytes(spec: ModelSpec, quantization: Any, tp: int = 1, pp: int = 1) -> float:
    """Bytes that the weights occupy on one GPU, scales and embedding included."""
    return network(Ledger(), spec, quantization, tp, pp).stored_bytes


def _kept_in_16_bit(spec: ModelSpec, patterns: tuple[str, ...]) -> float:
    """Weights of the layers that the patterns leave unquantized."""
    return float(
        sum(
            rows * columns
            for name, (rows, columns) in linear_modules(spec).items()
            if name != "lm_head" and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        )
    )


def network(ledger: Ledger, spec: ModelSpec, quantization: Any, tp: int, pp: int) -> Network:
    """The target (or a draft model) in its format, on ``tp x pp`` GPUs."""
    kind = weight_format(spec, quantization)
    group = (
        getattr(quantization, "group_size", None) or (spec.quant.group_size if spec.quant else None) or 128
    )
    bits = WEIGHT_BITS[kind] + (16 / group if kind in ("w4a16_awq", "w4a8_awq") else SCALE_BITS[kind])
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    excluded = tuple(getattr(quantization, "exclude", ()))
    kept = _kept_in_16_bit(spec, excluded) if excluded and kind != "none" else 0.0
    layer_params = ledger.compute(
        "layer_params",
        "weights",
        "layers*(hidden*(q + 2*kv) + q*hidden + 3*hidden*inner)",
        "linear weights of config.json",
        layers=spec.num_layers,
        hidden=spec.hidden_size,
        q=q,
        kv=kv,
        inner=spec.intermediate_size,
    )
    head_params = ledger.compute(
        "head_params",
        "weights",
        "vocab*hidden",
        "output projection",
        vocab=spec.vocab_size,
        hidden=spec.hidden_size,
    )
    head_bits = bits if getattr(quantization, "lm_head", False) else 16
    read = ledger.compute(
        "weight_bytes",
        "bytes",
        "((layer_params - kept)*bits/8 + kept*2)/(tp*pp) + head_params*head_bits/8/tp",
        "stored format with its scales; one GPU",
        layer_params=layer_params,
        kept=kept,
        bits=bits,
        head_params=head_params,
        head_bits=head_bits,
        tp=tp,
        pp=pp,
    )
    stored = ledger.compute(
        "stored_bytes",
        "bytes",
        "weight_bytes + embedding_params*2",
        "the input embedding stays in 16 bit and is copied to every GPU",
        weight_bytes=read,
        embedding_params=0.0 if spec.tie_embeddings and tp == 1 else head_params,
    )
    kv_kind = kv_format(spec, quantization)
    kv_bytes = ledger.compute(
        "kv_bytes_per_token",
        "bytes",
        "2*layers/pp*max(1, kv_heads/tp)*head_dim*kv_bytes",
        "K and V of every layer; one GPU",
        layers=spec.num_layers,
        pp=pp,
        kv_heads=spec.num_kv_heads,
        tp=tp,
        head_dim=spec.head_dim,
        kv_bytes=KV_BYTES[kv_kind],
    )
    return Network(
        kind,
        spec.num_layers,
        spec.hidden_size,
        q,
        layer_params,
        layer_params + head_params,
        read,
        stored,
        kv_bytes,
    )


def head_network(ledger: Ledger, spec: ModelSpec, kind: str, head_format: str, tp: int) -> Network | None:
    """The draft head of ``medusa``, ``eagle`` or ``eagle3`` for this target; ``params`` are those of one
    draft step (Medusa: of one head). EAGLE: one decoder layer over twice the hidden size and the target's
    output projection; EAGLE-3: the same with its own output projection over :data:`DRAFT_VOCAB` tokens."""
    hidden, q, kv = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    size = 1 if head_format == "fp8" else 2
    vocab = float(min(spec.vocab_size, DRAFT_VOCAB) if kind == "eagle3" else spec.vocab_size)
    if kind == "medusa":
        formula, source = (
            "hidden*hidden + vocab*hidden",
            "a residual block and its output projection, one head",
        )
        inputs: dict[str, float] = {"hidden": hidden, "vocab": vocab}
        layers, kv_bytes = 0, 0.0
    else:
        formula = "2*hidden*(q + 2*kv) + q*hidden + 3*hidden*inner + vocab*hidden"
        source = "one decoder layer over [embedding, hidden state] and the output projection"
        inputs = {"hidden": hidden, "q": q, "kv": kv, "inner": spec.intermediate_size, "vocab": vocab}
        layers, kv_bytes = 1, 2 * max(1.0, spec.num_kv_heads / tp) * spec.head_dim * 2
    params = ledger.compute("params", "weights", formula, source, **inputs)
    read = ledger.compute(
        "weight_bytes", "bytes", "params*size/tp", "one GPU", params=params, size=size, tp=tp
    )
    shared = (
        vocab * hidden * size / tp if kind == "eagle" else 0.0
    )  # the target's projection is not stored twice
    return Network(
        "fp8" if head_format == "fp8" else "none",
        layers,
        hidden,
        q,
        params,
        params,
        read,
        read - shared,
        kv_bytes,
    )


def plan_memory(
    ledger: Ledger,
    spec: ModelSpec,
    gpu: Gpu,
    target: Network,
    draft: Network | None,
    *,
    draft_copies: int,
    tp: int,
    rows: int,
    logit_rows: int,
    tokens_per_sequence: int,
    sequences: int,
) -> Memory:
    """Whether it fits, and how many sequences of ``tokens_per_sequence`` the KV budget holds.

    ``rows`` is the largest forward (prefill chunk or verified rows), ``logit_rows`` the rows whose logits are
    wanted, ``draft_copies`` the number of Medusa heads (else 1).
    """
    if tokens_per_sequence < 1 or sequences < 1:
        raise InputError("a workload needs at least one token and one sequence")
    activations = ledger.compute(
        "activations_bytes",
        "bytes",
        "rows*(6*hidden + 2*inner/tp)*2 + logit_rows*vocab*4/tp",
        "residual, norm, QKV and attention output in 16 bit, gate and up of the MLP, logits in 32 bit",
        rows=rows,
        hidden=spec.hidden_size,
        inner=spec.intermediate_size,
        logit_rows=logit_rows,
        vocab=spec.vocab_size,
        tp=tp,
    )
    reserve = ledger.compute(
        "reserve_bytes",
        "bytes",
        "min(3.5e9, 0.5e9 + 0.035*memory)",
        "CUDA context, workspaces and NCCL buffers: 3.5 GB on an 80 GiB board (AIConfigurator's other "
        "memory); smaller boards in proportion (assumption)",
        memory=gpu.memory_bytes,
    )
    draft_bytes = ledger.compute(
        "draft_weights_bytes",
        "bytes",
        "copies*stored",
        "",
        copies=draft_copies,
        stored=draft.stored_bytes if draft else 0.0,
    )
    per_token = ledger.compute(
        "kv_bytes_per_token_all",
        "bytes",
        "target + draft",
        "target and draft KV of one token",
        target=target.kv_bytes,
        draft=draft.kv_bytes if draft else 0.0,
    )
    budget = ledger.compute(
        "kv_budget_bytes",
        "bytes",
        "0.9*max(0, memory - weights - draft - activations - reserve)",
        "TensorRT-LLM gives 0.9 of the free memory to the KV cache (free_gpu_memory_fraction)",
        memory=gpu.memory_bytes,
        weights=target.stored_bytes,
        draft=draft_bytes,
        activations=activations,
        reserve=reserve,
    )
    held = ledger.compute(
        "max_sequences",
        "sequences",
        "floor(kv_budget_bytes/(tokens*per_token))",
        "admission without eviction: a sequence is admitted when its full length fits",
        kv_budget_bytes=budget,
        tokens=tokens_per_sequence,
        per_token=per_token,
    )
    used = min(sequences, int(held)) * tokens_per_sequence * per_token
    return Memory(
        weights_bytes=target.stored_bytes,
        draft_weights_bytes=draft_bytes,
        activations_bytes=activations,
        reserve_bytes=reserve,
        kv_bytes_per_token=target.kv_bytes,
        draft_kv_bytes_per_token=draft.kv_bytes if draft else 0.0,
        kv_budget_bytes=budget,
        kv_bytes=used,
        capacity_bytes=gpu.memory_bytes,
        max_sequences=int(held),
    )


__all__ = [
    "KV_BYTES",
    "RATE_OF",
    "WEIGHT_BITS",
    "Memory",
    "Network",
    "NoQuantization",
    "head_network",
    "kv_bytes_per_token",
    "kv_format",
    "network",
    "plan_memory",
    "weight_bytes",
    "weight_format",
]
