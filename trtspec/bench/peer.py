"""One peer of the benchmark in a process of its own: loads once, then runs batches on demand.

    python peer.py ADDRESS KIND JSON

Connects to the Unix socket ADDRESS and answers JSON messages: a batch ``{"prompts": [[id, ...]],
"new_tokens": n}`` with ``{"tokens": counted, "seconds": s}``. Every answer has exactly n tokens, end tokens
or not, so that all peers do the same work. Imports nothing of trtspec unless it is the peer, so that a peer
may live in another environment.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Client
from typing import Any

Batch = list[list[int]]
Answer = dict[str, Any]


def engine(options: dict[str, Any]) -> Callable[[Batch, int], Answer]:
    """trtspec's own engine; tokens as its outputs hold them, ``step_seconds`` the median of decode steps."""
    from pathlib import Path

    from trtspec.artifact import open_artifact
    from trtspec.backends import open_engine
    from trtspec.engine import Request

    # The rounds repeat their prompts: with a prefix cache, prompts would cost this engine nothing.
    artifact = open_artifact(Path(options["folder"]))
    opened = open_engine(artifact, options["variant"], prefix_cache=False)

    def run(prompts: Batch, new_tokens: int) -> Answer:
        before = opened.stats()
        began = time.perf_counter()
        for i, prompt in enumerate(prompts):
            opened.add(Request(str(i), tuple(prompt), new_tokens))
        tokens, steps = 0, []
        while opened.in_flight:
            started = time.perf_counter()
            outputs = opened.step()
            tokens += sum(len(output.new_tokens) for output in outputs)
            steps.append(time.perf_counter() - started)
        seconds = time.perf_counter() - began
        after = opened.stats()
        return {
            "tokens": tokens,
            "seconds": seconds,
            "step_seconds": statistics.median(steps[len(steps) // 4 :]),
            "decode_steps": after.decode_steps - before.decode_steps,
            "held_back_steps": after.held_back_steps - before.held_back_steps,
        }

    return run


def transformers(options: dict[str, Any]) -> Callable[[Batch, int], Answer]:
    """transformers: generate (left-padded batches), with prompt lookup, or its continuous batching."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    mode = options["mode"]
    model = AutoModelForCausalLM.from_pretrained(options["folder"], dtype=getattr(torch, options["dtype"]))
    model.eval()
    if mode == "continuous":
        model.set_attn_implementation("paged|sdpa")

    def config(new_tokens: int) -> Any:
        made = GenerationConfig(
            max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, pad_token_id=0
        )
        if mode == "prompt_lookup":
            made.prompt_lookup_num_tokens = options["num_draft_tokens"]
        return made

    model.generation_config = config(1)

    def run(prompts: Batch, new_tokens: int) -> Answer:
        began = time.perf_counter()
        if mode == "continuous":
            # Without these two every call would start and warm up a scheduler, for seconds.
            done = model.generate_batch(
                inputs=prompts,
                generation_config=config(new_tokens),
                progress_bar=False,
                persistent_manager=True,
                warmup=False,
            )
            tokens = sum(len(output.generated_tokens) for output in done.values())
            return {"tokens": tokens, "seconds": time.perf_counter() - began}
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, generation_config=config(new_tokens))
        tokens = len(prompts) * (out.shape[1] - longest)
        return {"tokens": tokens, "seconds": time.perf_counter() - began}

    return run


def streaming_read(_options: dict[str, Any]) -> Callable[[Batch, int], Answer]:
    """Bytes per second of summing 512 MB, the best of three: what memory gives this many threads."""
    import os

    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    data = torch.ones(2**27)

    def run(_prompts: Batch, _new_tokens: int) -> Answer:
        best = float("inf")
        for _ in range(3):
            began = time.perf_counter()
            data.sum()
            best = min(best, time.perf_counter() - began)
        return {"tokens": 0, "seconds": best, "bytes_per_s": data.nbytes / best}

    return run


def main() -> None:
    address, kind, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    kinds = {"engine": engine, "transformers": transformers, "streaming_read": streaming_read}
    with Client(address, "AF_UNIX") as parent:

        def send(reply: Answer) -> None:
            parent.send_bytes(json.dumps(reply).encode())

        # The parent names a peer that fails, and goes on without it.
        try:
            run = kinds[kind](options)
        except Exception as error:
            send({"error": _line(error)})
            return
        send({})
        while True:
            try:
                asked = json.loads(parent.recv_bytes())
            except EOFError:
                return
            try:
                send(run(asked["prompts"], asked["new_tokens"]))
            except Exception as error:
                send({"error": _line(error)})


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


if __name__ == "__main__":
    main()
