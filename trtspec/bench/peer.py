"""One peer of the benchmark in a process of its own: loads once, then runs batches on demand.

    python peer.py ADDRESS KIND JSON

Connects to the Unix socket ADDRESS, says ``{"version": ...}`` when loaded and answers JSON messages: a batch
``{"prompts": [[id, ...]], "new_tokens": n}`` with ``{"outputs": [[id, ...]], "seconds": s, "decode": [tokens,
seconds] or null}``: the new tokens of each prompt in order, and what came after every prompt had its first.
Every answer has n tokens per prompt, end tokens or not, so that all peers do the same work; the parent
counts. Imports nothing of trtspec unless that is the peer: a peer may live in another environment.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Client
from typing import Any

Batch = list[list[int]]
Answer = dict[str, Any]
Loaded = tuple[str, Callable[[Batch, int], Answer]]
"""Its version, and what answers a batch."""


def engine(options: dict[str, Any]) -> Loaded:
    """trtspec's own engine; ``step_seconds`` is the median of decode steps.

    ``limits`` replace those of the recipe.
    """
    from dataclasses import replace
    from pathlib import Path

    from trtspec import __version__
    from trtspec.artifact import open_artifact
    from trtspec.backends import open_engine
    from trtspec.engine import Request

    artifact = open_artifact(Path(options["folder"]))
    limits = artifact.recipe.limits.model_copy(update=options.get("limits", {}))
    artifact = replace(artifact, recipe=artifact.recipe.model_copy(update={"limits": limits}))
    # The rounds repeat their prompts: with a prefix cache, prompts would cost this engine nothing.
    opened = open_engine(
        artifact, options["variant"], prefix_cache=False, threads=int(os.environ["OMP_NUM_THREADS"])
    )

    def run(prompts: Batch, new_tokens: int) -> Answer:
        before = opened.stats()
        outputs: Batch = [[] for _ in prompts]
        decode_tokens, decode_began, steps = 0, 0.0, []
        began = time.perf_counter()
        for i, prompt in enumerate(prompts):
            opened.add(Request(str(i), tuple(prompt), new_tokens))
        while opened.in_flight:
            started = time.perf_counter()
            counted = 0
            for output in opened.step():
                outputs[int(output.request_id)] += output.new_tokens
                counted += len(output.new_tokens)
            now = time.perf_counter()
            steps.append(now - started)
            if decode_began:
                decode_tokens += counted
            elif all(outputs):
                decode_began = now
        ended = time.perf_counter()
        after = opened.stats()
        return {
            "outputs": outputs,
            "seconds": ended - began,
            "decode": [decode_tokens, ended - decode_began] if decode_tokens else None,
            "step_seconds": statistics.median(steps[len(steps) // 4 :]),
            # This engine always tells them.
            "decode_steps": (after.decode_steps or 0) - (before.decode_steps or 0),
            "held_back_steps": after.held_back_steps - before.held_back_steps,
        }

    return __version__, run


def transformers(options: dict[str, Any]) -> Loaded:
    """transformers: ``generate`` (left-padded batches), that with prompt lookup or an assistant model, or its
    continuous batching."""
    import torch
    import transformers as library
    from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList

    mode = options["mode"]
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dtype = getattr(torch, options["dtype"])

    def load(folder: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def config(new_tokens: int) -> Any:
        # No end token in it: nothing ends early and no token is forbidden.
        made = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
        if mode == "prompt_lookup":
            made.prompt_lookup_num_tokens = options["num_draft_tokens"]
        return made

    model = load(options["folder"])
    model.generation_config = config(1)
    more: dict[str, Any] = {}
    if mode == "continuous":
        from transformers import ContinuousBatchingConfig

        model.set_attn_implementation("paged|sdpa")
        # By itself it takes most of the machine's free memory for KV, and keeps prefixes. (The length of
        # blocks makes no difference to its speed here.)
        block, most = 16, options["max_batch"]
        batching = ContinuousBatchingConfig(
            block_size=block,
            num_blocks=most * -(-options["max_tokens"] // block),
            max_batch_tokens=options["max_num_tokens"],
            max_requests_per_batch=most,
            allow_block_sharing=False,
        )
    if mode == "assisted":
        assistant = load(options["assistant"])
        assistant.generation_config = config(1)
        assistant.generation_config.num_assistant_tokens = options["num_draft_tokens"]
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0
        more["assistant_model"] = assistant

    class Begun(StoppingCriteria):  # type: ignore[misc]
        """Notes when the first tokens are there and how many; stops nothing."""

        length, at = 0, 0.0

        def __call__(self, input_ids: Any, *_: Any, **__: Any) -> Any:
            if not self.at:
                self.length, self.at = input_ids.shape[1], time.perf_counter()
            return torch.zeros(len(input_ids), dtype=torch.bool)

    def run(prompts: Batch, new_tokens: int) -> Answer:
        began = time.perf_counter()
        if mode == "continuous":
            # Without these two every call would start and warm up a scheduler, for seconds.
            done = model.generate_batch(
                inputs=prompts,
                generation_config=config(new_tokens),
                continuous_batching_config=batching,
                progress_bar=False,
                persistent_manager=True,
                warmup=False,
            )
            seconds = time.perf_counter() - began
            return {"outputs": [list(each.generated_tokens) for each in done.values()], "seconds": seconds}
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        begun = Begun()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=mask,
                generation_config=config(new_tokens),
                stopping_criteria=StoppingCriteriaList([begun]),
                **more,
            )
        ended = time.perf_counter()
        after = len(prompts) * (out.shape[1] - begun.length)
        return {
            "outputs": out[:, longest:].tolist(),
            "seconds": ended - began,
            "decode": [after, ended - begun.at] if begun.at and after else None,
        }

    return library.__version__, run


def vllm(options: dict[str, Any]) -> Loaded:
    """vLLM on the CPU, eager, without prefix cache; token ids in and out."""
    import vllm as library
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    loaded = LLM(
        options["folder"],
        dtype=options["dtype"],
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=options["max_tokens"],
        max_num_seqs=options["max_batch"],
        speculative_config=options.get("speculative"),
        disable_log_stats=False,
    )

    def run(prompts: Batch, new_tokens: int) -> Answer:
        sampling = SamplingParams(
            max_tokens=new_tokens, min_tokens=new_tokens, ignore_eos=True, temperature=0.0, detokenize=False
        )
        asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        began = time.perf_counter()
        done = loaded.generate(asked, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        outputs = [list(each.outputs[0].token_ids) for each in done]
        times, decode = done[0].metrics, None
        if len(prompts) == 1 and times is not None and new_tokens > 1:
            decode = [new_tokens - 1, times.last_token_ts - times.first_token_ts]
        return {"outputs": outputs, "seconds": seconds, "decode": decode}

    return library.__version__, run


def openvino(options: dict[str, Any]) -> Loaded:
    """OpenVINO GenAI on a GGUF file, without prefix cache; token ids in and out."""
    import numpy as np
    import openvino as ov
    import openvino_genai as library

    scheduler = library.SchedulerConfig()
    scheduler.cache_size = options["kv_gib"]
    scheduler.enable_prefix_caching = False
    scheduler.max_num_seqs = options["max_batch"]
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": int(os.environ["OMP_NUM_THREADS"])}
    drafts = options.get("num_draft_tokens")
    if drafts:
        properties["prompt_lookup"] = True
    pipeline = library.ContinuousBatchingPipeline(options["gguf"], scheduler, "CPU", properties)

    def run(prompts: Batch, new_tokens: int) -> Answer:
        config = library.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.ignore_eos = True
        config.do_sample = False
        if drafts:
            config.num_assistant_tokens = drafts
            config.max_ngram_size = options["max_ngram"]
        asked = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        began = time.perf_counter()
        done = pipeline.generate(asked, [config] * len(asked))
        seconds = time.perf_counter() - began
        decode = None
        if len(prompts) == 1 and new_tokens > 1:
            decode = [new_tokens - 1, seconds - done[0].perf_metrics.get_ttft().mean / 1000]
        return {
            "outputs": [list(each.m_generation_ids[0]) for each in done],
            "seconds": seconds,
            "decode": decode,
        }

    return library.__version__, run


def streaming_read(_options: dict[str, Any]) -> Loaded:
    """Bytes per second of summing 512 MB, the best of three: what memory gives this many threads."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    data = torch.ones(2**27)

    def run(_prompts: Batch, _new_tokens: int) -> Answer:
        best = float("inf")
        for _ in range(3):
            began = time.perf_counter()
            data.sum()
            best = min(best, time.perf_counter() - began)
        return {"outputs": [], "seconds": best, "bytes_per_s": data.nbytes / best}

    return torch.__version__, run


KINDS = {
    "engine": engine,
    "transformers": transformers,
    "vllm": vllm,
    "openvino": openvino,
    "streaming_read": streaming_read,
}


def serve(address: str, load: Callable[[], Loaded]) -> None:
    """Load, then answer until the parent hangs up."""
    with Client(address, "AF_UNIX") as parent:

        def send(reply: Answer) -> None:
            parent.send_bytes(json.dumps(reply).encode())

        # The parent names a peer that fails, and goes on without it.
        try:
            version, run = load()
        except Exception as error:
            send({"error": _line(error)})
            return
        send({"version": str(version)})
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
    # Beside this file lie modules whose names must not hide a peer's own.
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))
    serve(sys.argv[1], lambda: KINDS[sys.argv[2]](json.loads(sys.argv[3])))
