"""Milliseconds of one forward: ``python -m benchmarks.steps MODEL [MODEL ...] [--threads N] [--prompts]``.

Rows of one sequence behind a context, as in verification; with ``--prompts`` whole prompts. The models
(checkpoint folders, 4-bit ones also with a dequantized copy) take turns in one process; the figure is the
lower third of the rounds: the calling thread's own CPU time with one thread, wall time otherwise.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch

from trtspec.embedded.batch import SequenceRows, StepBatch
from trtspec.embedded.kvstore import KvStore
from trtspec.embedded.machine import keep_freed_memory
from trtspec.embedded.model import Decoder
from trtspec.embedded.weights import load_model
from trtspec.modelspec import INT4_ALGOS, read_modelspec

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXT = 200
PROMPTS = ((1, 250), (1, 512), (2, 256), (4, 250))
"""(prompts of one forward, tokens of each)."""


def load(folder: Path, dequantized_copy: bool) -> tuple[Decoder, KvStore]:
    spec = read_modelspec(folder)
    cpu = torch.device("cpu")
    model = load_model(folder, spec, dtype=torch.bfloat16, device=cpu, dequantized_copy=dequantized_copy)
    return model, KvStore(spec, 1024, dtype=torch.bfloat16)


def rows_behind_context(rows: int) -> StepBatch:
    places = torch.arange(CONTEXT + rows)
    own = places[CONTEXT:]
    tokens = torch.randint(0, 1000, (rows,), generator=torch.Generator().manual_seed(1))
    sequence = SequenceRows(0, rows, context=places[:CONTEXT])
    return StepBatch(tokens, own, own, (sequence,), torch.arange(rows))


def whole_prompts(prompts: int, length: int) -> StepBatch:
    rows = torch.arange(prompts * length)
    sequences = tuple(SequenceRows(i * length, length, context=rows[:0]) for i in range(prompts))
    tokens = torch.randint(0, 1000, (len(rows),), generator=torch.Generator().manual_seed(1))
    return StepBatch(tokens, rows % length, rows, sequences, rows[length - 1 :: length])


def streaming_read_gb_per_s() -> float:
    numbers = torch.ones(64 * 2**20, dtype=torch.int32)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        numbers.max()
        times.append(time.perf_counter() - start)
    return numbers.numel() * 4 / sorted(times)[3] / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--prompts", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    clock = time.thread_time if asked.threads == 1 else time.perf_counter
    forms = {}
    for folder in asked.models:
        forms[folder.name] = load(folder, False)
        quant = forms[folder.name][0].spec.quant
        if quant is not None and quant.algo in INT4_ALGOS:
            forms[f"{folder.name} with copy"] = load(folder, True)
    keep_freed_memory()  # as an engine does
    batches = {str(rows): rows_behind_context(rows) for rows in ROWS}
    if asked.prompts:
        batches = {f"{prompts}x{length}": whole_prompts(prompts, length) for prompts, length in PROMPTS}
    policy = os.environ.get("OMP_WAIT_POLICY", "unset")
    print(f"torch {torch.__version__}, {asked.threads} threads, OMP_WAIT_POLICY {policy}; ", end="")
    print(f"streaming read {streaming_read_gb_per_s():.1f} GB/s; ms by rows {', '.join(batches)}")
    times: dict[str, list[float]] = {name: [] for name in forms}
    for batch in batches.values():
        rounds: dict[str, list[float]] = {name: [] for name in forms}
        for _ in range(asked.rounds + 2):
            for name, (model, store) in forms.items():
                start = clock()
                model.forward(batch, store)
                rounds[name].append(1e3 * (clock() - start))
        for name, found in rounds.items():
            times[name].append(sorted(found[2:])[asked.rounds // 3])
    for name, row in times.items():
        print(f"{name:40}" + "".join(f"{value:9.2f}" for value in row))


if __name__ == "__main__":
    main()
