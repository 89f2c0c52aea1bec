"""What travels between client and model: the tensors, and what each of them means.

Names, types and meanings are those of NVIDIA's Triton model for TensorRT-LLM's LLM API
(``triton_backend/all_models/llmapi``), so that a client written for that server works here unchanged.
Meanings that are easy to get wrong, and are the same there:

* ``text_output`` of a streaming answer is *all* text so far, not the new piece. The request parameter
  ``text_delta`` (true) asks for the new piece instead; it is this server's own, as generic SSE clients
  expect pieces.
* ``sampling_param_exclude_input_from_output`` is false unless sent: then an answer that is not streamed
  begins with the prompt. A streamed one never does.
* Without temperature, top_k and top_p decoding is greedy.
* ``text_input`` is the prompt as it is: no chat template is applied.

What this server cannot do is refused, never ignored. This module knows neither numpy nor Triton: it
works on lists of Python values.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trtspec.engine import Sampling
from trtspec.errors import InputError, Problem

QUEUE_FULL = "the queue is full"
CANCELLED = "cancelled by the client"
ENGINE_FAILED = "the engine failed"
NOT_THE_REQUEST = (QUEUE_FULL, CANCELLED, ENGINE_FAILED)
"""Words of the errors that are not the request's fault: a stream over gRPC carries no other sign of it."""

DataType = Literal["STRING", "BOOL", "INT32", "INT64", "UINT64", "FP32"]


@dataclass(frozen=True)
class TensorSpec:
    """``dims`` -1 is any length; Triton's config.pbtxt says the same with a ``TYPE_`` prefix."""

    name: str
    data_type: DataType
    dims: int = 1
    optional: bool = True


INPUTS = (
    TensorSpec("text_input", "STRING", -1, optional=False),
    TensorSpec("streaming", "BOOL"),
    TensorSpec("sampling_param_best_of", "INT32"),
    TensorSpec("sampling_param_temperature", "FP32"),
    TensorSpec("sampling_param_top_k", "INT32"),
    TensorSpec("sampling_param_top_p", "FP32"),
    TensorSpec("sampling_param_frequency_penalty", "FP32"),
    TensorSpec("sampling_param_presence_penalty", "FP32"),
    TensorSpec("sampling_param_max_tokens", "INT32"),
    TensorSpec("sampling_param_stop", "STRING", -1),
    TensorSpec("sampling_param_seed", "UINT64"),
    TensorSpec("sampling_param_exclude_input_from_output", "BOOL"),
    TensorSpec("sampling_param_return_perf_metrics", "BOOL"),
    TensorSpec("return_finish_reason", "BOOL"),
    TensorSpec("return_stop_reason", "BOOL"),
    TensorSpec("return_cumulative_logprob", "BOOL"),
    TensorSpec("stop", "BOOL"),
)

OUTPUTS = (
    TensorSpec("text_output", "STRING", -1),
    TensorSpec("finish_reason", "STRING", -1),
    TensorSpec("stop_reason", "STRING", -1),
    TensorSpec("cumulative_logprob", "FP32", -1),
    TensorSpec("kv_cache_reused_block", "INT32", -1),
    TensorSpec("kv_cache_missed_block", "INT32", -1),
    TensorSpec("kv_cache_alloc_new_blocks", "INT32", -1),
    TensorSpec("kv_cache_alloc_total_blocks", "INT32", -1),
    TensorSpec("kv_cache_hit_rate", "FP32", -1),
    TensorSpec("arrival_time_ns", "INT64"),
    TensorSpec("first_scheduled_time_ns", "INT64"),
    TensorSpec("first_token_time_ns", "INT64"),
    TensorSpec("last_token_time_ns", "INT64"),
    TensorSpec("acceptance_rate", "FP32"),
    TensorSpec("total_accepted_draft_tokens", "INT32"),
    TensorSpec("total_draft_tokens", "INT32"),
    # Beyond NVIDIA's model (the first two under the names that its C++ backend gives them):
    TensorSpec("num_input_tokens", "INT32"),
    TensorSpec("num_output_tokens", "INT32"),
    TensorSpec("acceptance_length", "FP32"),
)

NEVER_SENT = frozenset(
    {
        "cumulative_logprob",
        "kv_cache_reused_block",
        "kv_cache_missed_block",
        "kv_cache_alloc_new_blocks",
        "kv_cache_alloc_total_blocks",
        "kv_cache_hit_rate",
        "first_scheduled_time_ns",
    }
)
"""Declared, so that a client may name them, but not measured per request by the embedded engine."""

TEXT_DELTA = "text_delta"
TRITON_PARAMETERS = frozenset(
    {
        "id",
        "priority",
        "timeout",
        "sequence_id",
        "sequence_start",
        "sequence_end",
        "binary_data_output",
        "headers",
    }
)
"""Request parameters that are Triton's business, with those that begin with ``triton_``."""


@dataclass(frozen=True)
class Bounds:
    """The values that a number may have, both ends included."""

    low: float
    high: float

    def refusal(self, value: float) -> str | None:
        """What is wrong with ``value``; None if nothing is."""
        if isinstance(value, float) and not math.isfinite(value):
            return f"{value} is not a number to use"
        if value < self.low:
            return f"{_shown(value)} is too small; at least {_shown(self.low)}"
        if value > self.high:
            return f"{_shown(value)} is too large; at most {_shown(self.high)}"
        return None


_FP32_MAX = (2 - 2.0**-23) * 2.0**127
BOUNDS = {
    "max_tokens": Bounds(1, 2**31 - 1),
    "temperature": Bounds(0.0, _FP32_MAX),
    "top_k": Bounds(0, 2**31 - 1),
    "top_p": Bounds(0.0, 1.0),
    "seed": Bounds(0, 2**63 - 1),
}
"""Bounds of the numbers of :class:`Generate`, by field: what both the tensor's type and the engine hold. The
command line, :func:`tensors` and :func:`parse` all refuse what is beyond, so that nothing wraps around."""

MAX_STOPS = 128
MAX_STOP_CHARS = 1024
_MAX_UNKNOWN = 8
_NAME_CHARS = 60
_PREFIX = "sampling_param_"


@dataclass(frozen=True)
class Generate:
    """One request to generate, as a client means it."""

    prompt: str
    max_tokens: int | None = None
    """None: the server's default, cut to the room left."""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    """None: a fresh one."""
    stop: tuple[str, ...] = ()
    streaming: bool = False
    text_delta: bool = False
    exclude_input: bool = False
    return_perf_metrics: bool = False
    return_finish_reason: bool = False
    return_stop_reason: bool = False

    def sampling(self, fresh_seed: int) -> Sampling:
        """The law to sample from, with the defaults of the LLM API."""
        asked = (self.top_k is not None and self.top_k != 1) or (self.top_p is not None and self.top_p > 0)
        temperature = self.temperature
        if temperature is None:
            temperature = 1.0 if asked else 0.0
        if self.top_k == 1 or self.top_p == 0:
            temperature = 0.0
        return Sampling(
            temperature=temperature,
            top_k=self.top_k or 0,
            top_p=1.0 if self.top_p in (None, 0) else float(self.top_p or 1.0),
            seed=fresh_seed if self.seed is None else self.seed,
        )


@dataclass(frozen=True)
class Stop:
    """Cancel the requests that were sent with this one's request id."""


def parse(
    inputs: Mapping[str, Sequence[Any]], parameters: Mapping[str, Any] | None = None
) -> Generate | Stop:
    """What a client asked for.

    ``inputs`` maps the name of each tensor that was sent to its flattened values (strings as bytes),
    ``parameters`` are Triton's request parameters. Raises InputError with every problem.
    """
    reader = _Reader(inputs)
    if reader.flag("stop"):
        reader.parameters(parameters or {})
        reader.finish()
        return Stop()
    prompt = reader.prompt()
    temperature = reader.number("sampling_param_temperature", BOUNDS["temperature"])
    top_p = reader.number("sampling_param_top_p", BOUNDS["top_p"])
    top_k = reader.integer("sampling_param_top_k", BOUNDS["top_k"])
    max_tokens = reader.integer("sampling_param_max_tokens", BOUNDS["max_tokens"])
    seed = reader.integer("sampling_param_seed", BOUNDS["seed"])
    stop = reader.strings("sampling_param_stop")
    if reader.integer("sampling_param_best_of", Bounds(1, 2**31 - 1)) not in (None, 1):
        reader.refuse("sampling_param_best_of", "only 1 is supported; send the request several times")
    for name in ("sampling_param_frequency_penalty", "sampling_param_presence_penalty"):
        if reader.number(name, Bounds(-_FP32_MAX, _FP32_MAX)) not in (None, 0.0):
            reader.refuse(name, "penalties are not supported by this engine; leave it out or send 0")
    if reader.flag("return_cumulative_logprob"):
        reader.refuse("return_cumulative_logprob", "not supported by this engine; leave it out")
    reader.parameters(parameters or {})
    delta = (parameters or {}).get(TEXT_DELTA, False)
    if not isinstance(delta, bool):
        reader.refuse(TEXT_DELTA, f"{delta!r} is neither true nor false")
    request = Generate(
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=stop,
        streaming=reader.flag("streaming"),
        text_delta=delta is True,
        exclude_input=reader.flag("sampling_param_exclude_input_from_output"),
        return_perf_metrics=reader.flag("sampling_param_return_perf_metrics"),
        return_finish_reason=reader.flag("return_finish_reason"),
        return_stop_reason=reader.flag("return_stop_reason"),
    )
    reader.finish()
    return request


def tensors(request: Generate) -> dict[str, list[Any]]:
    """The inputs that ask for ``request``; what equals the default is left out (the inverse of parse).

    Raises InputError with every number out of :data:`BOUNDS` and every text that cannot be UTF-8.
    """
    problems: list[Problem] = []

    def encoded(name: str, text: str) -> bytes:
        try:
            return text.encode()
        except UnicodeEncodeError as error:
            problems.append(Problem(f"not valid UTF-8 at character {error.start}", key=name))
            return b""

    values: dict[str, list[Any]] = {"text_input": [encoded("text_input", request.prompt)]}
    for field, bounds in BOUNDS.items():
        value = getattr(request, field)
        if value is None:
            continue
        values[_PREFIX + field] = [value]
        if refusal := bounds.refusal(value):
            problems.append(Problem(refusal, key=_PREFIX + field))
    if request.stop:
        name = "sampling_param_stop"
        values[name] = [encoded(name, stop) for stop in request.stop]
    if problems:
        raise InputError(problems)
    for name, flag in (
        ("streaming", request.streaming),
        ("sampling_param_exclude_input_from_output", request.exclude_input),
        ("sampling_param_return_perf_metrics", request.return_perf_metrics),
        ("return_finish_reason", request.return_finish_reason),
        ("return_stop_reason", request.return_stop_reason),
    ):
        if flag:
            values[name] = [True]
    return values


class _Reader:
    """Reads values and collects what is wrong with them."""

    def __init__(self, inputs: Mapping[str, Sequence[Any]]) -> None:
        self._inputs = inputs
        self._problems: list[Problem] = []

    def refuse(self, name: str, message: str) -> None:
        self._problems.append(Problem(message, key=name))

    def finish(self) -> None:
        if self._problems:
            raise InputError(self._problems)

    def flag(self, name: str) -> bool:
        return bool(self._one(name))

    def integer(self, name: str, bounds: Bounds) -> int | None:
        value = self._number(name, bounds)
        return None if value is None else int(value)

    def number(self, name: str, bounds: Bounds) -> float | None:
        value = self._number(name, bounds)
        return None if value is None else float(value)

    def prompt(self) -> str:
        values = self._inputs.get("text_input")
        if values is None:
            self.refuse("text_input", "missing; send the prompt as one string")
            return ""
        if len(values) != 1:
            self.refuse("text_input", f"{len(values)} prompts; send exactly one in a request")
            return ""
        return self._text("text_input", values[0])

    def parameters(self, parameters: Mapping[str, Any]) -> None:
        """Refuse what nobody reads: Triton makes a parameter of every JSON field that is no input."""
        unknown = [
            name
            for name in parameters
            if name != TEXT_DELTA and name not in TRITON_PARAMETERS and not name.startswith("triton_")
        ]
        for name in unknown[:_MAX_UNKNOWN]:
            self.refuse(name[:_NAME_CHARS], _unknown_parameter(name[:_NAME_CHARS]))
        if len(unknown) > _MAX_UNKNOWN:
            self.refuse("parameters", f"{len(unknown) - _MAX_UNKNOWN} more unknown parameters")

    def strings(self, name: str) -> tuple[str, ...]:
        values = self._inputs.get(name, ())
        if len(values) > MAX_STOPS:
            self.refuse(name, f"{len(values):,} strings; at most {MAX_STOPS}")
            return ()
        texts = tuple(self._text(name, value) for value in values)
        longest = max(map(len, texts), default=0)
        if longest > MAX_STOP_CHARS:
            self.refuse(name, f"a string of {longest:,} characters; at most {MAX_STOP_CHARS:,}")
        if "" in texts and not self._problems:
            self.refuse(name, "an empty stop string would stop before the first character; leave it out")
        return texts

    def _number(self, name: str, bounds: Bounds) -> int | float | None:
        value: int | float | None = self._one(name)
        if value is not None and (refusal := bounds.refusal(value)):
            self.refuse(name, refusal)
            return None
        return value

    def _one(self, name: str) -> Any:
        values = self._inputs.get(name)
        if values is None:
            return None
        if len(values) != 1:
            self.refuse(name, f"{len(values)} values; send exactly one")
            return None
        return values[0]

    def _text(self, name: str, value: bytes | str) -> str:
        if isinstance(value, str):
            return value
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            self.refuse(name, f"not valid UTF-8 at byte {error.start}")
            return ""


def _shown(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _unknown_parameter(name: str) -> str:
    known = [spec.name for spec in INPUTS] + [TEXT_DELTA]
    if name in known:
        return "this is an input, not a parameter; send it beside text_input"
    # Also by the short names that other servers have: max_tokens, stop_words, random_seed.
    short = {full.removeprefix(_PREFIX): full for full in reversed(known)}
    word = name.lower().replace("-", "_")
    close = difflib.get_close_matches(word, [*short, *known], n=1, cutoff=0.6)
    parts = [short[part] for part in word.split("_") if part in short]
    if close:
        return f"unknown parameter; did you mean {short.get(close[0], close[0])}?"
    if parts:
        return f"unknown parameter; did you mean {parts[0]}?"
    return "unknown parameter; docs/serving.md lists the inputs and parameters"
