"""This engine beside others, in one interleaved run on one machine.

Each peer is a process of its own (:mod:`trtspec.bench.peer`), loaded once; then the same prompts go to one
after the other, round by round, so that whatever slows the machine slows all. A ratio is taken within a round
and its median over the rounds is reported, with the lowest and highest round as the interval. Tokens are
counted from the outputs; every answer is as long as asked, or it is not counted.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec.artifact import Artifact
from trtspec.backends import require_embedded
from trtspec.bench.peers import Peer, engines_of, others_of, threads_of
from trtspec.bench.prompts import WORKLOADS, prompts_of
from trtspec.bench.rounds import Running, measure
from trtspec.bench.rows import BANDWIDTH, BenchRow, bandwidth, compare
from trtspec.bench.scaling import bench_scaling, grid
from trtspec.errors import MissingError
from trtspec.modelspec import read_modelspec

__all__ = ["FULL", "QUICK", "BenchRow", "Size", "bench_engine", "bench_scaling", "estimated_seconds", "plan"]

_LOAD_SECONDS = {"engine": 6, "transformers": 9, "vllm": 12, "openvino": 4, "streaming_read": 3}
_OPERATIONS_PER_S, _BYTES_PER_S, _STEP_OVERHEAD_S = 1e11, 8e9, 0.01
"""Of one CPU core, of memory, and of a step: assumed, for :func:`estimated_seconds` only."""


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    batches: tuple[int, ...] = (1, 4, 16)
    workloads: tuple[str, ...] = tuple(WORKLOADS)
    new_tokens: int = 64
    rounds: int = 5
    scaling_batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    scaling_contexts: tuple[int, ...] = (256, 2048, 4096, 6144, 8192)
    scaling_rounds: int = 3


FULL = Size()
QUICK = Size((1, 4), ("copy",), 32, 3, (1, 4), (256, 1024), 2)


def plan(artifact: Artifact, size: Size, *, only_own: bool = False) -> list[Peer]:
    """This engine, its variant without speculation if it speculates, then the others. InputError for an
    engine of TensorRT-LLM."""
    require_embedded(artifact)
    return [*engines_of(artifact), *([] if only_own else others_of(artifact, size.batches))]


def bench_engine(
    artifact: Artifact,
    size: Size = FULL,
    *,
    peers: Sequence[Peer] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[BenchRow]:
    """A row per engine of ours, peer, workload and batch; None for ``peers`` is :func:`plan`.

    A peer that fails has rows without a ratio that say why, as has a batch that the recipe does not allow.
    Raises MissingError when the engine itself does not run.
    """
    limits, name = artifact.recipe.limits, artifact.recipe.name
    threads = threads_of(artifact.recipe)
    peers = plan(artifact, size) if peers is None else peers
    rows = [_not_allowed(artifact, peers[0], b) for b in size.batches if b > limits.max_batch_size]
    batches = [batch for batch in size.batches if batch <= limits.max_batch_size]
    if not batches:
        return rows
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trtspec-bench-")))
        running: list[Running] = []
        for number, peer in enumerate([*peers, Peer(BANDWIDTH, "streaming_read", {}, "")]):
            progress(f"{name}: load {peer.name}" + (f": {peer.absent}" if peer.absent else ""))
            running.append(Running(peer, home, number, threads))
            stack.callback(running[-1].close)
        reader = running.pop()
        if running[0].error is not None:
            raise MissingError(f"{peers[0].name} does not run: {running[0].error}")
        longest = min(limits.max_input_tokens, limits.max_seq_tokens - size.new_tokens)
        for batch in batches:
            for workload in size.workloads:
                progress(f"{name}: {workload}, batch {batch}")
                prompts = prompts_of(artifact, workload, batch, longest)
                taking_part = [one for one in running if one.peer.takes(batch)]
                reads: list[dict[str, Any]] = []
                answers = measure(
                    taking_part,
                    prompts,
                    size.new_tokens,
                    size.rounds,
                    lambda reads=reads: reads.append(reader.run([], 0)),  # type: ignore[misc]
                )
                rows += _rows(artifact, taking_part, workload, batch, answers)
                if batch == 1:
                    own = next((p for p in peers if p.kind == "engine" and not p.speculates), peers[0])
                    rows.append(
                        bandwidth(
                            artifact,
                            own,
                            workload,
                            answers[own.name],
                            reads,
                            len(prompts[0]),
                            size.new_tokens,
                            threads=threads,
                        )
                    )
    return rows


def _rows(
    artifact: Artifact,
    running: Sequence[Running],
    workload: str,
    batch: int,
    answers: dict[str, list[dict[str, Any]]],
) -> list[BenchRow]:
    """Our engine beside all, and without speculation beside all that do not speculate either."""
    ours = [one for one in running if one.peer.kind == "engine"]
    rows = []
    for own in ours:
        for other in running:
            first = own is ours[0]
            if other is own or (not first and (other in ours or other.peer.speculates)):
                continue
            rows.append(
                compare(
                    artifact.recipe.name,
                    own.peer,
                    other.peer,
                    workload,
                    batch,
                    answers[own.peer.name],
                    answers[other.peer.name],
                    threads=threads_of(artifact.recipe),
                    peer_version=other.version,
                )
            )
    return rows


def _not_allowed(artifact: Artifact, own: Peer, batch: int) -> BenchRow:
    most = artifact.recipe.limits.max_batch_size
    return BenchRow(
        artifact.recipe.name,
        "recipe",
        "all",
        "all",
        batch,
        own.precision,
        note=f"not run: limits.max_batch_size is {most}; raise it and build again",
    )


def estimated_seconds(artifact: Artifact, size: Size, peers: Sequence[Peer], *, scaling: bool) -> float:
    """Roughly how long it takes: every peer as slow as 16-bit weights read at 8 GB/s make it."""
    spec = read_modelspec(artifact.target_dir)
    weights = 2.0 * spec.num_parameters
    limits = artifact.recipe.limits
    flops_per_s = _OPERATIONS_PER_S * threads_of(artifact.recipe)

    def answer(prompt_tokens: float, batch: int, new_tokens: int) -> float:
        step = max(weights / _BYTES_PER_S, weights * batch / flops_per_s) + _STEP_OVERHEAD_S * (1 + batch / 8)
        prompts = batch * prompt_tokens * weights / flops_per_s * (1 + prompt_tokens / 4096)  # attention
        return prompts + new_tokens * step

    present = [peer for peer in peers if not peer.absent]
    total = float(sum(_LOAD_SECONDS.get(peer.kind, 5) for peer in present)) + _LOAD_SECONDS["streaming_read"]
    longest = min(limits.max_input_tokens, limits.max_seq_tokens - size.new_tokens)
    for batch in size.batches:
        if batch <= limits.max_batch_size:
            for workload in size.workloads:
                prompts = prompts_of(artifact, workload, batch, longest)
                mean = sum(map(len, prompts)) / batch
                once = size.rounds * answer(mean, batch, size.new_tokens) + answer(mean, batch, 8)
                total += once * sum(peer.takes(batch) for peer in present)
    if scaling:
        for _, batch, context in grid(artifact, size.scaling_batches, size.scaling_contexts):
            engines = sum(peer.kind == "engine" for peer in present)
            total += engines * size.scaling_rounds * answer(context, batch, 32)
    return total
