"""What rounds say: ratios with their intervals, held against goals."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtspec.artifact import Artifact
from trtspec.bench.peers import PAYS_FROM, Peer
from trtspec.modelspec import read_modelspec

Rounds = Sequence[Mapping[str, Any]]
"""The answer of one peer in each round."""
BANDWIDTH = "memory bandwidth"
_BANDWIDTH_GOAL = 0.6


@dataclass(frozen=True)
class BenchRow:
    """``ratio``: how many times as many tokens a second this engine gives as ``peer``, prompts included; for
    the peer "memory bandwidth", the share of its limit that a decode step reaches. None: it did not run, see
    ``note``.

    ``interval``: the lowest and the highest round. ``variant``: which of our engines, "recipe" or
    "no_speculation". ``same_precision``: both read weights of as many bits. ``decode`` speeds leave the
    prompt out: tokens after the first ones. ``acceptance_length``: our tokens a step. ``same_tokens``: the
    share of the peer's tokens before its answer parts from ours.
    """

    engine: str
    variant: str
    peer: str
    workload: str
    batch: int
    precision: str
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    goal: float | None = None
    met: bool | None = None
    same_precision: bool | None = None
    engine_tokens_per_s: float | None = None
    peer_tokens_per_s: float | None = None
    engine_decode_tokens_per_s: float | None = None
    peer_decode_tokens_per_s: float | None = None
    acceptance_length: float | None = None
    same_tokens: float | None = None
    threads: int | None = None
    peer_version: str = ""
    note: str = ""


def compare(
    engine: str, own: Peer, other: Peer, workload: str, batch: int, ours: Rounds, theirs: Rounds, **more: Any
) -> BenchRow:
    """One row from the rounds of both; the ratio is taken within each round. ``more`` are fields of it."""
    same = None if None in (own.bits, other.bits) else own.bits == other.bits
    precision = own.precision if own.precision == other.precision else f"{own.precision} vs {other.precision}"
    goal, notes = other.goals.get(batch), [other.note]
    if own.bits and other.bits and own.bits > other.bits and goal is not None:
        goal = None
        notes.append(f"no goal: it reads {other.bits}-bit weights, this engine {own.bits}-bit ones")
    accepted = _acceptance_length(ours)
    if own.speculates and other.kind == "engine" and goal is not None and accepted and accepted < PAYS_FROM:
        goal = None
        notes.append(f"no goal: drafting brings {accepted:.2f} tokens a step, and pays from {PAYS_FROM}")
    row: dict[str, Any] = {
        "engine": engine,
        "variant": own.options.get("variant", "recipe"),
        "peer": other.name,
        "workload": workload,
        "batch": batch,
        "precision": precision,
        "goal": goal,
        "same_precision": same,
        **more,
    }
    failed = next((str(answer["error"]) for answer in (*ours, *theirs) if "error" in answer), None)
    if failed is not None:
        return BenchRow(**row, note=failed)
    fast, slow = [speed(answer) for answer in ours], [speed(answer) for answer in theirs]
    ratio, low, high = spread([a / b for a, b in zip(fast, slow, strict=True)])
    return BenchRow(
        **row,
        ratio=ratio,
        interval=(low, high),
        met=None if goal is None else ratio >= goal,
        engine_tokens_per_s=statistics.median(fast),
        peer_tokens_per_s=statistics.median(slow),
        engine_decode_tokens_per_s=_median(map(decode_speed, ours)),
        peer_decode_tokens_per_s=_median(map(decode_speed, theirs)),
        acceptance_length=accepted,
        same_tokens=_agreement(ours[-1]["outputs"], theirs[-1]["outputs"]),
        note="; ".join(note for note in notes if note),
    )


def bandwidth(
    artifact: Artifact,
    own: Peer,
    workload: str,
    steps: Rounds,
    reads: Rounds,
    prompt_tokens: int,
    new_tokens: int,
    **more: Any,
) -> BenchRow:
    """The time to read the weights and, on average, half-grown KV once, over the time of a decode step."""
    spec = read_modelspec(artifact.target_dir)
    weights = sum(path.stat().st_size for path in artifact.target_dir.glob("*.safetensors"))
    number = 1 if artifact.recipe.quantization.kv_cache != "none" else 2
    kv = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * number
    count = weights + kv * (prompt_tokens + new_tokens // 2)
    row: dict[str, Any] = {
        "engine": artifact.recipe.name,
        "variant": own.options.get("variant", "recipe"),
        "peer": BANDWIDTH,
        "workload": workload,
        "batch": 1,
        "precision": own.precision,
        "goal": _BANDWIDTH_GOAL,
        **more,
    }
    failed = next((str(answer["error"]) for answer in (*steps, *reads) if "error" in answer), None)
    if failed is not None:
        return BenchRow(**row, note=failed)
    share, low, high = spread(
        [count / read["bytes_per_s"] / step["step_seconds"] for step, read in zip(steps, reads, strict=True)]
    )
    rate = statistics.median(read["bytes_per_s"] for read in reads)
    return BenchRow(
        **row,
        ratio=share,
        interval=(low, high),
        met=share >= _BANDWIDTH_GOAL,
        note=f"{count / 1e6:.0f} MB a step, {rate / 1e9:.1f} GB/s",
    )


def summary(rows: Sequence[BenchRow]) -> str:
    """How many goals are met, in one line."""
    judged = [row for row in rows if row.met is not None]
    alike = [row for row in judged if row.same_precision or row.peer == BANDWIDTH]
    open_goals = [row for row in rows if row.goal is not None and row.met is None]
    line = f"goals: {_met(judged)}; of those at the same weight precision {_met(alike)}"
    return line + (
        f"; {len(open_goals)} could not be judged (no ratio, see their notes)" if open_goals else ""
    )


def _met(rows: Sequence[BenchRow]) -> str:
    missed = sum(not row.met for row in rows)
    return f"{len(rows) - missed} of {len(rows)} met" + (f", {missed} MISSED" if missed else "")


def count_tokens(answer: Mapping[str, Any]) -> int:
    """The tokens of an answer, counted from its outputs."""
    return sum(len(tokens) for tokens in answer["outputs"])


def speed(answer: Mapping[str, Any]) -> float:
    """Tokens per second from the request to the last token."""
    return float(count_tokens(answer) / answer["seconds"])


def decode_speed(answer: Mapping[str, Any]) -> float | None:
    """Tokens per second after every prompt had its first token; None where the peer does not tell."""
    tokens, seconds = answer.get("decode") or (0, 0.0)
    return tokens / seconds if tokens and seconds > 0 else None


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _acceptance_length(rounds: Rounds) -> float | None:
    steps = sum(answer.get("decode_steps", 0) for answer in rounds)
    return sum(count_tokens(answer) for answer in rounds) / steps if steps else None


def _agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    shares = []
    for mine, its in zip(ours, theirs, strict=True):
        pairs = zip(mine, its, strict=True)
        parted = next((i for i, (a, b) in enumerate(pairs) if a != b), len(mine))
        shares.append(parted / len(mine))
    return statistics.mean(shares)


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, lowest, highest). Of n rounds these two enclose the true median with probability
    1 - 2^(1 - n): 75 % for three, 94 % for five."""
    return statistics.median(values), min(values), max(values)
