"""This engine beside others, in one interleaved run on one machine.

Each peer is a process of its own (:mod:`trtspec.bench.peer`), loaded once; then the same prompts go to one
after the other, round by round, so that whatever slows the machine slows all. A ratio is taken within a round
and its median over the rounds is reported, with the lowest and highest round as the interval. Tokens are
counted from the outputs; every answer is as long as asked.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from trtspec import process
from trtspec.artifact import Artifact, open_artifact
from trtspec.bench import peer as peer_script
from trtspec.errors import MissingError
from trtspec.recipe import NoSpeculation
from trtspec.text import Tokenizer

WORKLOADS = {"chat": ("chat",), "code": ("code",), "copy": ("copy", "summarization")}
"""Name -> the tasks of our prompts that it holds."""
PROMPTS_FILE = Path(__file__).parents[1] / "data" / "prompts.jsonl"
_LOAD_SECONDS = 600.0


@dataclass(frozen=True)
class Peer:
    """What is compared. ``goals``: by batch, the least ratio that this engine aims at."""

    name: str
    kind: str
    options: Mapping[str, Any]
    precision: str
    batches: tuple[int, ...] = (1, 4, 16)
    goals: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class BenchRow:
    """``ratio``: how many times as many tokens a second this engine gives as ``peer``; for the peer "memory
    bandwidth", the share of its limit that a decode step reaches. None: it did not run, see ``note``."""

    engine: str
    peer: str
    workload: str
    batch: int
    precision: str
    ratio: float | None
    interval: tuple[float, float] | None
    goal: float | None
    engine_tokens_per_s: float | None = None
    peer_tokens_per_s: float | None = None
    note: str = ""


class Running:
    """A peer's process."""

    def __init__(self, peer: Peer, folder: Path, number: int) -> None:
        self.peer = peer
        address = str(folder / f"{number}.sock")
        self._log = folder / f"{number}.log"
        with Listener(address, "AF_UNIX") as listener:
            argv = [sys.executable, peer_script.__file__, address, peer.kind, json.dumps(dict(peer.options))]
            self._child = process.start(argv, env=os.environ, log=self._log)
            try:
                self._connection = self._accept(listener)
            except BaseException:
                self._child.kill_group()
                raise
        self.error: str | None = self._answer().get("error")

    def _accept(self, listener: Listener) -> Connection:
        """The child's connection. A child that ends without one is an error of the machine."""
        listener._listener._socket.settimeout(0.5)  # type: ignore[attr-defined]
        while True:
            try:
                return listener.accept()
            except TimeoutError:
                if self._child.poll() is not None:
                    tail = self._log.read_text("utf-8", "replace").strip().splitlines()[-1:]
                    raise MissingError(f"{self.peer.name} does not start: {''.join(tail)}") from None

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> dict[str, Any]:
        """Its answer; ``{"error": ...}`` once it has failed."""
        if self.error is not None:
            return {"error": self.error}
        self._connection.send_bytes(json.dumps({"prompts": prompts, "new_tokens": new_tokens}).encode())
        reply = self._answer()
        self.error = reply.get("error")
        return reply

    def _answer(self) -> dict[str, Any]:
        wait([self._connection], _LOAD_SECONDS)
        try:
            reply: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            tail = self._log.read_text("utf-8", "replace").strip().splitlines()[-1:]
            return {"error": f"it ended: {tail[0] if tail else 'without a word'}"}
        return reply

    def close(self) -> None:
        self._connection.close()
        self._child.kill_group()


def peers_of(artifact: Artifact) -> list[Peer]:
    """The engine as built, then what it is compared with."""
    recipe = artifact.recipe
    dtype = getattr(recipe.backend, "dtype", "bfloat16")
    kind = recipe.quantization.kind
    own = dtype if kind == "none" else kind
    folder, base = str(artifact.folder), str(artifact.baseline_dir)
    drafts = not isinstance(recipe.speculation, NoSpeculation)

    def transformers(name: str, mode: str, batches: tuple[int, ...], goals: dict[int, float]) -> Peer:
        options = {"folder": base, "mode": mode, "dtype": dtype, "num_draft_tokens": 4}
        return Peer(name, "transformers", options, dtype, batches, goals)

    found = [Peer(recipe.name, "engine", {"folder": folder, "variant": "recipe"}, own)]
    if drafts:
        plain = {"folder": folder, "variant": "no_speculation"}
        found.append(Peer("same without speculation", "engine", plain, own, goals={1: 1.0}))
    found.append(transformers("transformers generate", "generate", (1, 4, 16), {1: 2.0}))
    found.append(transformers("transformers continuous batching", "continuous", (4, 16), {16: 1.5}))
    found.append(transformers("transformers prompt lookup", "prompt_lookup", (1,), {1: 1.0}))
    return found


def prompts_of(artifact: Artifact, workload: str, count: int, longest: int) -> list[list[int]]:
    """``count`` prompts as token ids, of at most ``longest``; repeated in order where there are fewer."""
    tokenizer = Tokenizer.load(artifact.target_dir)
    lines = [json.loads(line) for line in PROMPTS_FILE.read_text("utf-8").splitlines()]
    texts = [line["messages"] for line in lines if line["task"] in WORKLOADS[workload]]
    fitting = [ids for ids in (tokenizer.encode_chat(text) for text in texts) if len(ids) <= longest]
    return [fitting[i % len(fitting)] for i in range(count)]


def bench_engine(
    folder: Path,
    *,
    batches: Sequence[int] = (1, 4, 16),
    workloads: Sequence[str] = tuple(WORKLOADS),
    new_tokens: int = 64,
    rounds: int = 5,
    progress: Callable[[str], None] = lambda _: None,
) -> list[BenchRow]:
    """One row per peer, workload and batch. Raises what :func:`open_artifact` raises, and MissingError when
    the engine itself does not run."""
    artifact = open_artifact(folder)
    limits = artifact.recipe.limits
    batches = [batch for batch in batches if batch <= limits.max_batch_size]
    peers = peers_of(artifact)
    rows: list[BenchRow] = []
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trtspec-bench-")))
        running = []
        for number, peer in enumerate([*peers, Peer("memory bandwidth", "streaming_read", {}, "")]):
            progress(f"load {peer.name}")
            running.append(Running(peer, home, number))
            stack.callback(running[-1].close)
        reader = running.pop()
        if running[0].error is not None:
            raise MissingError(f"{peers[0].name} does not run: {running[0].error}")
        longest = min(limits.max_input_tokens, limits.max_seq_tokens - new_tokens)
        for workload in workloads:
            for batch in batches:
                progress(f"{workload}, batch {batch}")
                prompts = prompts_of(artifact, workload, batch, longest)
                taking_part = [one for one in running if batch in one.peer.batches]
                answers: dict[str, list[dict[str, Any]]] = {one.peer.name: [] for one in taking_part}
                reads = []
                for one in taking_part:
                    one.run(prompts, 8)  # warm up
                for _ in range(rounds):
                    for one in taking_part:
                        answers[one.peer.name].append(one.run(prompts, new_tokens))
                    reads.append(reader.run([], 0))
                rows += rows_of(artifact, taking_part, workload, batch, answers)
                if batch == 1:
                    plain = "same without speculation"
                    steps = answers[plain if plain in answers else peers[0].name]
                    rows.append(_bandwidth(artifact, workload, steps, reads, prompts, new_tokens))
    return rows


def rows_of(
    artifact: Artifact,
    running: Sequence[Running],
    workload: str,
    batch: int,
    answers: Mapping[str, Sequence[Mapping[str, Any]]],
) -> list[BenchRow]:
    own, *others = running
    ours = answers[own.peer.name]
    rows = []
    for one in others:
        theirs, peer = answers[one.peer.name], one.peer
        failed = next((a["error"] for a in (*ours, *theirs) if "error" in a), None)
        goal = peer.goals.get(batch)
        name = artifact.recipe.name
        if failed is not None:
            rows.append(
                BenchRow(name, peer.name, workload, batch, peer.precision, None, None, goal, note=failed)
            )
            continue
        fast, slow = [_speed(a) for a in ours], [_speed(a) for a in theirs]
        middle, low, high = spread([a / b for a, b in zip(fast, slow, strict=True)])
        rows.append(
            BenchRow(
                name, peer.name, workload, batch, peer.precision, middle, (low, high), goal,
                statistics.median(fast), statistics.median(slow),
            )
        )  # fmt: skip
    return rows


def _bandwidth(
    artifact: Artifact,
    workload: str,
    steps: Sequence[Mapping[str, Any]],
    reads: Sequence[Mapping[str, Any]],
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
) -> BenchRow:
    """The time to read the weights and, on average, half-grown KV once, over the time of a decode step."""
    from trtspec.modelspec import read_modelspec

    spec = read_modelspec(artifact.target_dir)
    weights = sum(path.stat().st_size for path in artifact.target_dir.glob("*.safetensors"))
    kv_format = artifact.recipe.quantization.kv_cache
    number = 1 if kv_format != "none" else 2
    kv = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * number
    count = weights + kv * (len(prompts[0]) + new_tokens // 2)
    failed = next((a["error"] for a in (*steps, *reads) if "error" in a), None)
    name, own = artifact.recipe.name, artifact.recipe.quantization.kind
    if failed is not None:
        return BenchRow(name, "memory bandwidth", workload, 1, own, None, None, 0.6, note=failed)
    shares = [
        count / read["bytes_per_s"] / step["step_seconds"] for step, read in zip(steps, reads, strict=True)
    ]
    middle, low, high = spread(shares)
    rate = statistics.median(read["bytes_per_s"] for read in reads)
    note = f"{count / 1e6:.0f} MB a step, {rate / 1e9:.1f} GB/s"
    return BenchRow(name, "memory bandwidth", workload, 1, own, middle, (low, high), 0.6, note=note)


def _speed(answer: Mapping[str, Any]) -> float:
    return float(answer["tokens"] / answer["seconds"])


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, lowest, highest)."""
    return statistics.median(values), min(values), max(values)
