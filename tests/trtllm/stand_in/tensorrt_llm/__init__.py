"""A stand-in for TensorRT-LLM's Python interface, for tests of what calls it. No TensorRT-LLM code.

Names are those of its LLM API (``LLM``, ``SamplingParams``, ``generate_async``, ``token_ids``,
``decoding_iter``, ``request_perf_metrics.speculative_decoding``). The model behind it is a rule: the next
token follows from the last two. :data:`behaviour` makes it do what real versions and broken ones do.
"""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any

print("[TensorRT-LLM] TensorRT-LLM version: 1.2.1")

VOCAB = 320
FIRST_TEXT_TOKEN = 3
"""The special tokens of the tiny model come before; 2 ends a text."""


@dataclass
class Behaviour:
    reports_drafts: bool = True
    """False: zeros, as the PyTorch flow of older versions gives."""
    reports_steps: bool = True
    reports_iterations: bool = False
    iterations: list[dict[str, Any]] = field(default_factory=list)
    number: int = 0
    keeps_wrong_drafts: bool = False
    accepts_everything: bool = False
    merges: int = 1
    """Steps a response."""
    fails_after: int | None = None
    silent: bool = False
    step_s: float = 0.0
    opened: list[dict[str, Any]] = field(default_factory=list)
    shut: int = 0


behaviour = Behaviour()


@dataclass(kw_only=True)
class SamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    top_k: int | None = None
    top_p: float | None = None
    temperature: float | None = None
    seed: int | None = None
    detokenize: bool = True
    return_perf_metrics: bool = False
    ignore_eos: bool = False


def next_token(tokens: list[int]) -> int:
    value = (tokens[-1] * 31 + (tokens[-2] if len(tokens) > 1 else 0) * 17 + 7) % (VOCAB - FIRST_TEXT_TOKEN)
    return 2 if value % 61 == 0 else value + FIRST_TEXT_TOKEN


class SpeculativeConfig:
    """What their converter makes of the mapping of an options file."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.decoding_type = config["decoding_type"]
        self.max_draft_len = config.get("max_draft_len", 4)


def _told(drafted: int, accepted: int) -> None:
    entry: dict[str, Any] = {"iter": behaviour.number}
    entry["kvCacheStats"] = {"maxNumBlocks": 100, "freeNumBlocks": 90, "usedNumBlocks": 10}
    entry["specDecodingStats"] = {"numDraftTokens": drafted, "numAcceptedTokens": accepted}
    behaviour.number += 1
    behaviour.iterations.append(entry)


class Result:
    """Their RequestOutput, of one streamed request."""

    def __init__(self, prompt: list[int], params: SamplingParams, draft_len: int) -> None:
        self.outputs = [SimpleNamespace(token_ids=[], finish_reason=None, request_perf_metrics=None)]
        self.finished = False
        self.decoding_iter = 0
        self._prompt, self._params, self._draft_len = prompt, params, draft_len
        self._aborted = threading.Event()
        self._drafted = self._accepted = 0

    def abort(self) -> None:
        self._aborted.set()

    def __iter__(self) -> Result:
        return self

    def __next__(self) -> Result:
        if self.finished:
            raise StopIteration
        if behaviour.silent:
            self._aborted.wait()
        for _ in range(behaviour.merges):
            if not self.finished:
                self._step()
        return self

    def _step(self) -> None:
        if self._aborted.is_set():
            self._end("cancelled")
            return
        if behaviour.fails_after is not None and self.decoding_iter >= behaviour.fails_after:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if behaviour.step_s:
            time.sleep(behaviour.step_s)
        if behaviour.reports_steps:
            self.decoding_iter += 1
        drafted, accepted = self._drafted, self._accepted
        self._emit()
        _told(self._drafted - drafted, self._accepted - accepted)

    def _emit(self) -> None:
        output = self.outputs[0]
        known = self._prompt + output.token_ids
        # Every third step drafts, and of that draft the last token is wrong.
        draft = 0
        if self._draft_len and len(output.token_ids) % 3 != 1 and output.token_ids:
            draft = self._draft_len
            self._drafted += draft
            # Counted when it is judged, whatever is cut off behind a last token.
            self._accepted += draft if behaviour.accepts_everything else 0
        wrong_from = draft if behaviour.accepts_everything else max(0, draft - 1)
        for place in range(draft + 1):
            token = next_token(known)
            if place == wrong_from and place < draft:
                if not behaviour.keeps_wrong_drafts:
                    draft = place
                else:
                    token = (token + 1 - FIRST_TEXT_TOKEN) % (VOCAB - FIRST_TEXT_TOKEN) + FIRST_TEXT_TOKEN
            if place < draft and not behaviour.accepts_everything:
                self._accepted += 1
            output.token_ids.append(token)
            known.append(token)
            if token in (self._params.stop_token_ids or ()) or token == self._params.end_id:
                self._end("stop")
                return
            if len(output.token_ids) == self._params.max_tokens:
                self._end("length")
                return
            if place >= draft:
                return

    def _end(self, reason: str) -> None:
        self.finished = True
        output = self.outputs[0]
        output.finish_reason = reason
        if not self._params.return_perf_metrics:
            return
        told = behaviour.reports_drafts
        output.request_perf_metrics = SimpleNamespace(
            speculative_decoding=SimpleNamespace(
                acceptance_rate=self._accepted / self._drafted if told and self._drafted else 0.0,
                total_accepted_draft_tokens=self._accepted if told else 0,
                total_draft_tokens=self._drafted if told else 0,
            )
        )


class LLM:
    def __init__(self, **arguments: Any) -> None:
        os.write(1, b"[TensorRT-LLM][INFO] a line of its C++ part\n")
        behaviour.opened.append(arguments)
        config = arguments.get("speculative_config")
        if config is not None and not isinstance(config, SpeculativeConfig):
            raise ValueError("speculative_config\n  Input should be a valid instance of DecodingBaseConfig")
        if not os.path.isdir(arguments["model"]):
            raise RuntimeError(f"no such model: {arguments['model']}")
        self._draft_len = 0 if config is None else config.max_draft_len

    def generate_async(self, inputs: list[int], sampling_params: SamplingParams, streaming: bool) -> Result:
        unknown = {field.name for field in fields(sampling_params)} - set(vars(sampling_params))
        if unknown or not streaming:
            raise TypeError("not what is streamed here")
        if sampling_params.end_id is None:
            raise ValueError("tokenizer is required to reset end_id if it is None")
        return Result(list(inputs), sampling_params, self._draft_len)

    def get_stats(self, timeout: float | None = 2) -> list[str]:
        """Since the last call; their documentation says dicts and shows texts."""
        if not behaviour.reports_iterations:
            return []
        told, behaviour.iterations = behaviour.iterations, []
        return [json.dumps(entry) for entry in told]

    def shutdown(self) -> None:
        behaviour.shut += 1
