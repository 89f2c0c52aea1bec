"""What one forward takes on a GPU: weight reads, KV reads, multiplications, latencies, communication.

The law adds its terms (docs/math.md, section 11): a decode step reads every weight once, reads the KV of its
sequences, multiplies its rows, pays a latency per layer, and exchanges activations between GPUs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any, Literal

from trtspec.cost.memory import RATE_OF, Network
from trtspec.cost.trace import Ledger
from trtspec.errors import InputError
from trtspec.hardware import Gpu

Basis = Literal["measured", "calibrated", "published", "roofline", "silicon"]
WEIGHT_ONLY = ("w4a16_awq", "w4a8_awq")
GEMV_ROWS = 4
"""Rows up to which TensorRT-LLM's weight-only matrix-vector kernels run."""
BACKTESTED_SM = (90, 100, 103)


@dataclass(frozen=True)
class Coefficients:
    """The constants of the law, as data/cost_coefficients.json gives them with units and sources."""

    memory_efficiency: float
    kv_efficiency: float
    compute_efficiency: float
    attention_prefill_factor: float
    layer_ms: float
    allreduce_ms: float
    link_efficiency: float
    prefill_sync_ms: float
    weight_only_gemv_per_cycle: float
    weight_only_gemm_per_cycle: float
    weight_only_prefill_factor: float
    draft_step_ms: float
    round_ms: float
    round_sequence_ms: float
    round_sequences: float
    ngram_share: float
    spread: float
    spread_other: float
    basis: Basis = "roofline"
    source: str = "data/cost_coefficients.json"


@lru_cache(maxsize=1)
def coefficient_table() -> dict[str, Any]:
    """The file as it is: value, unit and source of each constant."""
    text = resources.files("trtspec").joinpath("data/cost_coefficients.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def _defaults() -> Coefficients:
    entries = coefficient_table()["coefficients"]
    values: dict[str, Any] = {name: float(entry["value"]) for name, entry in entries.items()}
    return Coefficients(**values)


DEFAULT = _defaults()


def rate(gpu: Gpu, kind: str) -> float:
    """Dense operations/s of the unit that multiplies format ``kind``; InputError where it is not known."""
    unit = RATE_OF[kind]
    value = gpu.flops.get(unit)
    if value is None:
        known = [name for name, other in gpu.flops.items() if other is not None]
        have = f"its known rates: {', '.join(known)}" if known else "no dense rate of it is known"
        raise InputError(f"{gpu.name}: no {unit.upper()} rate for weights in {kind!r}; {have}")
    return value


@dataclass(frozen=True)
class Step:
    """One forward, in ms: what waits for memory, what for multipliers, what for neither."""

    total_ms: float
    memory_ms: float
    compute_ms: float
    latency_ms: float

    @property
    def bound(self) -> Literal["memory", "compute"]:
        """What dominates: reading, or multiplying."""
        return "compute" if self.compute_ms > self.memory_ms else "memory"


def decode_step(
    ledger: Ledger,
    net: Network,
    gpu: Gpu,
    coef: Coefficients,
    *,
    tp: int,
    pp: int = 1,
    sequences: float,
    rows: float,
    context: float,
) -> Step:
    """A forward of ``rows`` rows (verified positions of all sequences together) over ``sequences`` sequences
    of ``context`` known tokens each."""
    if net.format in WEIGHT_ONLY:
        few = rows <= GEMV_ROWS
        weights = ledger.compute(
            "weights_ms",
            "ms",
            "1e3*max(pp*weight_bytes/(efficiency*bandwidth), layer_params/tp/(per_cycle*sm_cycles))",
            "every weight is read once a forward, and converted before it multiplies; "
            + (f"at most {GEMV_ROWS} rows" if few else f"more than {GEMV_ROWS} rows"),
            pp=pp,
            weight_bytes=net.weight_bytes,
            efficiency=coef.memory_efficiency,
            bandwidth=gpu.bandwidth_bytes_per_s,
            layer_params=net.layer_params,
            tp=tp,
            per_cycle=coef.weight_only_gemv_per_cycle if few else coef.weight_only_gemm_per_cycle,
            sm_cycles=gpu.sm_cycles_per_s,
        )
    else:
        weights = ledger.compute(
            "weights_ms",
            "ms",
            "1e3*pp*weight_bytes/(efficiency*bandwidth)",
            "every weight is read once a forward",
            pp=pp,
            weight_bytes=net.weight_bytes,
            efficiency=coef.memory_efficiency,
            bandwidth=gpu.bandwidth_bytes_per_s,
        )
    kv = ledger.compute(
        "kv_ms",
        "ms",
        "1e3*sequences*context*kv_bytes/(efficiency*bandwidth)",
        "the KV of every sequence is read once a forward, whatever the rows",
        sequences=sequences,
        context=context,
        kv_bytes=net.kv_bytes,
        efficiency=coef.kv_efficiency,
        bandwidth=gpu.bandwidth_bytes_per_s,
    )
    compute = ledger.compute(
        "compute_ms",
        "ms",
        "1e3*rows*2*params/(tp*pp)/(efficiency*rate)",
        "two operations per weight and row",
        rows=rows,
        params=net.params,
        tp=tp,
        pp=pp,
        efficiency=coef.compute_efficiency,
        rate=rate(gpu, net.format),
    )
    attend = ledger.compute(
        "attend_ms",
        "ms",
        "1e3*factor*rows*4*context*attention_size*layers/(tp*pp)/(efficiency*rate)",
        "QK and PV of every row over its context, in 16 bit",
        factor=coef.attention_prefill_factor,
        rows=rows,
        context=context,
        attention_size=net.attention_size,
        layers=net.layers,
        tp=tp,
        pp=pp,
        efficiency=coef.compute_efficiency,
        rate=gpu.flops["bf16"] or rate(gpu, net.format),
    )
    latency = ledger.compute(
        "latency_ms",
        "ms",
        "layers*(layer_ms + allreduce_ms*log2(tp))",
        "launches, tails, all-reduce latency",
        layers=net.layers,
        layer_ms=coef.layer_ms,
        allreduce_ms=coef.allreduce_ms,
        tp=tp,
    )
    exchange = ledger.compute(
        "exchange_ms",
        "ms",
        "1e3*rows*2*layers/pp*hidden*2*2*(tp - 1)/tp/(efficiency*link)",
        "two ring all-reduces a layer, 16 bit",
        rows=rows,
        layers=net.layers,
        pp=pp,
        hidden=net.hidden_size,
        tp=tp,
        efficiency=coef.link_efficiency,
        link=gpu.link_bytes_per_s,
    )
    total = ledger.compute(
        "step_ms",
        "ms",
        "weights + kv + compute + attend + latency + exchange",
        "the terms add",
        weights=weights,
        kv=kv,
        compute=compute,
        attend=attend,
        latency=latency,
        exchange=exchange,
    )
    return Step(total, weights + kv, compute + attend, latency + exchange)


@dataclass(frozen=True)
class Prefill:
    """One prompt, in ms. ``alone_ms``: from its start to its first logits on an idle engine. ``added_ms``:
    what it adds to the decode steps it rides in, whose weight reads and launches are paid already."""

    alone_ms: float
    added_ms: float


def prefill(
    ledger: Ledger, net: Network, gpu: Gpu, coef: Coefficients, *, tp: int, pp: int = 1, tokens: float
) -> Prefill:
    """The prompt of ``tokens`` tokens through the network. Attention multiplies in 16 bit in every format."""
    bf16 = gpu.flops["bf16"] or rate(gpu, net.format)
    linear = ledger.compute(
        "linear_ms",
        "ms",
        "1e3*factor*tokens*2*layer_params/(tp*pp)/(efficiency*rate)",
        "two operations per weight and token; logits of the last token only",
        tokens=tokens,
        factor=coef.weight_only_prefill_factor if net.format in WEIGHT_ONLY else 1.0,
        layer_params=net.layer_params,
        tp=tp,
        pp=pp,
        efficiency=coef.compute_efficiency,
        rate=rate(gpu, net.format),
    )
    attention = ledger.compute(
        "attention_ms",
        "ms",
        "1e3*factor*2*tokens**2*attention_size*layers/(tp*pp)/(efficiency*rate)",
        "QK and PV over half the square",
        factor=coef.attention_prefill_factor,
        tokens=tokens,
        attention_size=net.attention_size,
        layers=net.layers,
        tp=tp,
        pp=pp,
        efficiency=coef.compute_efficiency,
        rate=bf16,
    )
    exchange = ledger.compute(
        "exchange_ms",
        "ms",
        "1e3*tokens*2*layers/pp*hidden*2*2*(tp - 1)/tp/(efficiency*link) + layers*sync_ms*log2(tp)",
        "two ring all-reduces a layer, 16 bit, and their latency",
        tokens=tokens,
        layers=net.layers,
        pp=pp,
        hidden=net.hidden_size,
        tp=tp,
        efficiency=coef.link_efficiency,
        link=gpu.link_bytes_per_s,
        sync_ms=coef.prefill_sync_ms,
    )
    added = ledger.compute(
        "added_ms",
        "ms",
        "linear + attention + exchange",
        "",
        linear=linear,
        attention=attention,
        exchange=exchange,
    )
    alone = ledger.compute(
        "alone_ms",
        "ms",
        "max(added, 1e3*weight_bytes/(efficiency*bandwidth)) + layers*layer_ms",
        "a short prompt waits for the weights; launches of one forward",
        added=added,
        weight_bytes=net.weight_bytes,
        efficiency=coef.memory_efficiency,
        bandwidth=gpu.bandwidth_bytes_per_s,
        layers=net.layers,
        layer_ms=coef.layer_ms,
    )
    return Prefill(alone, added)
