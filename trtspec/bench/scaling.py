"""How this engine's own speed goes with batch and with context."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from trtspec.artifact import Artifact
from trtspec.bench.peers import engines_of, threads_of
from trtspec.bench.prompts import text_of
from trtspec.bench.rounds import Running, measure
from trtspec.bench.rows import decode_speed, speed, spread
from trtspec.modelspec import read_modelspec

BATCHES = (1, 2, 4, 8, 16)
CONTEXTS = (256, 2048, 4096, 6144, 8192)
"""Positions at the end of the answer; what the model does not have is cut to what it has."""
BATCH_CONTEXT = 256


@dataclass(frozen=True)
class ScalePoint:
    """Tokens per second of one engine at one batch and context, ``axis`` being what is varied.

    ``interval``: the lowest and the highest round of ``tokens_per_s``. ``decode_tokens_per_s`` leaves the
    prompt out.
    """

    engine: str
    variant: str
    axis: str
    batch: int
    context: int
    new_tokens: int
    tokens_per_s: float | None
    interval: tuple[float, float] | None
    decode_tokens_per_s: float | None
    note: str = ""


def grid(
    artifact: Artifact, batches: Sequence[int] = BATCHES, contexts: Sequence[int] = CONTEXTS
) -> list[tuple[str, int, int]]:
    """What is measured: (axis, batch, context)."""
    most = read_modelspec(artifact.target_dir).max_positions
    reached = sorted({min(context, most) for context in contexts})
    return [
        *(("batch", batch, min(BATCH_CONTEXT, most)) for batch in batches),
        *(("context", 1, context) for context in reached),
    ]


def bench_scaling(
    artifact: Artifact,
    *,
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] = CONTEXTS,
    new_tokens: int = 32,
    rounds: int = 3,
    progress: Callable[[str], None] = lambda _: None,
) -> list[ScalePoint]:
    """One point per engine (as built, without speculation) and place of :func:`grid`.

    The recipe's limits are raised to what the grid needs. Prompts are pieces of our prompt texts in a row, as
    long as it takes to end at the context.
    """
    places = grid(artifact, batches, contexts)
    longest = max(context for _, _, context in places)
    engines = engines_of(
        artifact,
        {"max_batch_size": max(batches), "max_input_tokens": longest, "max_seq_tokens": longest},
    )
    points: list[ScalePoint] = []
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trtspec-bench-")))
        running = []
        for number, peer in enumerate(engines):
            progress(f"load {peer.name}, {longest} positions")
            running.append(Running(peer, home, number, threads_of(artifact.recipe)))
            stack.callback(running[-1].close)
        for axis, batch, context in places:
            progress(f"by {axis}: batch {batch}, context {context}")
            new = min(new_tokens, context // 2)
            prompts = [text_of(artifact, context - new, start=i) for i in range(batch)]
            answers = measure(running, prompts, new, rounds, warm_tokens=BATCH_CONTEXT)
            for one in running:
                rest = answers[one.peer.name]
                failed = next((str(answer["error"]) for answer in rest if "error" in answer), "")
                middle, low, high = (None, None, None) if failed else spread([speed(a) for a in rest])
                decoding = [] if failed else [d for d in map(decode_speed, rest) if d is not None]
                points.append(
                    ScalePoint(
                        artifact.recipe.name,
                        one.peer.options["variant"],
                        axis,
                        batch,
                        context,
                        new,
                        middle,
                        None if low is None or high is None else (low, high),
                        statistics.median(decoding) if decoding else None,
                        failed,
                    )
                )
    return points
