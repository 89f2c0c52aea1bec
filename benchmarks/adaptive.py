"""What adaptive drafting brings: no drafts, as many as configured, and as many as pay, in interleaved rounds.

    python -m benchmarks.adaptive ENGINE ... [--batches 1 4 16] [--tokens 64] [--rounds 5] [--set KEY=VALUE]

ENGINE is a built engine (engines/NAME) whose recipe drafts. Two workloads: *chat*, the shipped prompts, of
which little is found again, and *copy*, a text and its beginning, which goes on as it did before. Every round
runs each way once, in turning order, on the same requests, greedily and without end tokens, so all write as
many tokens; the first round warms up and is not counted. At least 4 requests are answered, twice a small
batch, a batch at a time. Prompts come from the prefix cache, so what is measured is decoding. Printed are
medians of tokens per second of wall time and of the process's own CPU time, which a busy machine disturbs
less, and of the ratios of both to "none" within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from trtspec.artifact import open_artifact
from trtspec.embedded.engine import EmbeddedEngine
from trtspec.embedded.opening import open_embedded
from trtspec.engine import Request, generate
from trtspec.prompts import HELDOUT_FILE, PROMPTS_FILE
from trtspec.recipe import Recipe
from trtspec.text import Tokenizer

Run = dict[str, float]
WAYS = ("none", "fixed", "adaptive")
COPIED_TOKENS, GIVEN_TOKENS = 160, 16
KV_BYTES = 256 * 2**20


def chat_prompts(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    chats = [json.loads(line)["messages"] for line in PROMPTS_FILE.read_text("utf-8").splitlines()]
    return [list(tokenizer.encode(tokenizer.render_chat(chat))) for chat in chats[:count]]


def copy_prompts(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    prompts = []
    for line in HELDOUT_FILE.read_text("utf-8").splitlines():
        tokens = list(tokenizer.encode(json.loads(line)["text"]))[:COPIED_TOKENS]
        if len(tokens) == COPIED_TOKENS and len(prompts) < count:
            prompts.append([*tokens, *tokenizer.encode("\n\n"), *tokens[:GIVEN_TOKENS]])
    return prompts


WORKLOADS: dict[str, Callable[[Tokenizer, int], list[list[int]]]] = {
    "chat": chat_prompts,
    "copy": copy_prompts,
}


def run(engine: EmbeddedEngine, prompts: Sequence[Sequence[int]], batch: int, tokens: int) -> Run:
    """Seconds and counts of all prompts, ``batch`` at a time."""
    requests = [Request(str(at), tuple(prompt), tokens) for at, prompt in enumerate(prompts)]
    before, wall, cpu = engine.stats(), time.perf_counter(), time.process_time()
    done = []
    for first in range(0, len(requests), batch):
        done += generate(engine, requests[first : first + batch])
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    after = engine.stats()
    found = {
        name: getattr(after, name) - getattr(before, name)
        for name in (
            "generated_tokens",
            "decode_steps",
            "drafted_tokens",
            "accepted_tokens",
            "held_back_steps",
        )
    }
    assert found["generated_tokens"] == sum(len(one.tokens) for one in done) == tokens * len(prompts)
    return {"wall": wall, "cpu": cpu, **found}


def engines_of(folder: Path, changes: dict[str, Any]) -> tuple[dict[str, EmbeddedEngine], Tokenizer]:
    artifact = open_artifact(folder)
    engines = {}
    for way in WAYS:
        plain = artifact.recipe.model_dump(mode="json")
        plain["speculation"] |= {**changes, "adaptive": way == "adaptive"}
        plain["limits"] |= {"kv_cache_bytes": KV_BYTES}  # three engines are open at once
        engines[way] = open_embedded(
            Recipe.model_validate(plain),
            artifact.target_dir,
            speculation=way != "none",
            draft_dir=artifact.draft_dir,
            heads_dir=artifact.heads_dir,
            corpus_dir=artifact.corpus_dir,
        )
    return engines, Tokenizer.load(artifact.target_dir)


def measure(
    engines: dict[str, EmbeddedEngine], prompts: list[list[int]], batch: int, tokens: int, rounds: int
) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = {way: [] for way in WAYS}
    for at in range(rounds + 1):
        for way in WAYS[at % 3 :] + WAYS[: at % 3]:
            found = run(engines[way], prompts, batch, tokens)
            if at:
                runs[way].append(found)
    return runs


def report(name: str, workload: str, batch: int, runs: dict[str, list[Run]]) -> None:
    for way in WAYS:
        speed = [one["generated_tokens"] / one["wall"] for one in runs[way]]
        own = [one["generated_tokens"] / one["cpu"] for one in runs[way]]
        ratios = [plain["wall"] / one["wall"] for plain, one in zip(runs["none"], runs[way], strict=True)]
        cpu_ratios = [plain["cpu"] / one["cpu"] for plain, one in zip(runs["none"], runs[way], strict=True)]
        total = {key: sum(one[key] for one in runs[way]) for key in runs[way][0]}
        print(
            f"{name:26} {workload:5} {batch:3} {way:9} {statistics.median(speed):7.1f} "
            f"{statistics.median(own):7.1f} {statistics.median(ratios):6.2f} "
            f"{statistics.median(cpu_ratios):6.2f} ({min(cpu_ratios):.2f}-{max(cpu_ratios):.2f}) "
            f"{total['generated_tokens'] / total['decode_steps']:5.2f} "
            f"{total['drafted_tokens'] / total['decode_steps']:5.2f} {int(total['held_back_steps']):5}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("engine", type=Path, nargs="+")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="speculation's other values"
    )
    options = parser.parse_args()
    changes = {key: json.loads(value) for key, _, value in (one.partition("=") for one in options.set)}
    names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")
    print(
        " ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ), "python -m", end=" "
    )
    print(
        "benchmarks.adaptive",
        *options.engine,
        "--tokens",
        options.tokens,
        "--rounds",
        options.rounds,
        end=" ",
    )
    print("--set", *options.set, f"  # torch {torch.__version__}, load average {os.getloadavg()[0]:.1f}")
    print(f"{'engine':26} work  batch way      tok/s  /cpu s  wall x   cpu x (range)  tau  drafted held back")
    for folder in options.engine:
        engines, tokenizer = engines_of(folder, changes)
        print(f"# {folder.name}: {torch.get_num_threads()} threads", flush=True)
        for workload in options.workloads:
            prompts = WORKLOADS[workload](tokenizer, 2 * max(options.batches))
            for batch in options.batches:
                some = prompts[: max(4, 2 * batch if batch < 16 else batch)]
                runs = measure(engines, some, batch, options.tokens, options.rounds)
                report(folder.name, workload, batch, runs)


if __name__ == "__main__":
    main()
