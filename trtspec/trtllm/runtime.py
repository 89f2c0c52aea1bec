"""The Engine contract over TensorRT-LLM's ``LLM``: requests in flight, streaming, cancelling, statistics.

TensorRT-LLM schedules by itself: :meth:`TrtllmEngine.step` does not run a step, it waits for what steps made
final since the last call. What is known of a request, and from where (``tensorrt_llm/executor/result.py``):

* its new tokens, from the stream: a response is one step's, unless responses were merged on their way;
* ``decoding_iter``, the target steps so far, the one that ends the prompt included;
* ``request_perf_metrics.speculative_decoding``, drafted and accepted tokens of the whole request, with its
  last response. The PyTorch flow of older versions never fills it: zeros, though drafts ran. Zeros of an
  engine that drafts are therefore unknown. What was accepted then follows from tokens and steps, since a step
  emits what it accepted and one token more; what was drafted does not, and stays unknown;
* iteration statistics, ``specDecodingStats`` and ``kvCacheStats`` of every step, for the whole engine.

So counts are of requests (``Output.totals``), and drafts of single steps are None. There are no scores, no
float64 and no near misses. Nothing here was run against TensorRT-LLM by its authors: it is tested with a
stand-in of its interface, and :file:`tests/gpu` runs it where TensorRT-LLM is.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trtspec.engine import (
    EngineStats,
    FinishReason,
    LawScores,
    Output,
    Request,
    Sampling,
    Scores,
    Totals,
    add,
)
from trtspec.errors import InputError, MissingError, Problem

if TYPE_CHECKING:
    from numpy.typing import NDArray

STATS_TIMEOUT_S = 0.2
ANSWER_TIMEOUT_S = 600.0
"""How long nothing may come of any request in flight before the engine is taken for dead."""
_NO_SCORES = (
    "TensorRT-LLM gives no scores of a text here: an engine needs gather_context_logits, which "
    "drafting excludes, and the PyTorch flow has prompt_logprobs in newer versions only"
)


# --------------------------------------------------------------------------- mappings


def sampling_arguments(request: Request) -> dict[str, Any]:
    """``SamplingParams`` of ``request``.

    Every value is given: defaults differ by version and flow (``top_p`` None is 0 in C++). ``top_k`` 1 is
    greedy in all of them, temperature 0 only in newer ones. No token ends an answer but the request's: the
    tokenizer's own (``end_id``) is off, which also settles whether it is part of the output.
    """
    arguments: dict[str, Any] = {
        "max_tokens": request.max_new_tokens,
        "end_id": -1,
        "pad_id": 0,
        "stop_token_ids": sorted(request.stop_tokens) or None,
        "include_stop_str_in_output": True,
        "detokenize": False,
        "return_perf_metrics": True,
    }
    return arguments | _law(request.sampling)


def _law(sampling: Sampling) -> dict[str, Any]:
    if sampling.greedy:
        return {"top_k": 1}
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
    }


def totals_of(result: Any, num_tokens: int, *, speculates: bool) -> Totals:
    """What TensorRT-LLM tells of a finished request that got ``num_tokens`` tokens; None for the rest."""
    steps = getattr(result, "decoding_iter", None) or None
    if not speculates:
        return Totals(steps, 0, 0)
    metrics = getattr(result.outputs[0], "request_perf_metrics", None)
    drafting: Any = getattr(metrics, "speculative_decoding", None)
    drafted = getattr(drafting, "total_draft_tokens", 0)
    if drafted:
        return Totals(steps, int(drafted), int(drafting.total_accepted_draft_tokens))
    # The relation of the two counts; a last step that ends inside its draft may have accepted more.
    accepted = None if steps is None else max(0, num_tokens - steps)
    return Totals(steps, None, accepted)


@dataclass(frozen=True)
class Iterations:
    """What iteration statistics (``LLM.get_stats()``) told since the engine opened.

    ``drafted`` and ``accepted`` are None as long as no iteration had a section on drafting, and for good once
    an iteration is missing: TensorRT-LLM keeps the last ones only (``iter_stats_max_iterations``, 1000).
    """

    last: int | None = None
    """Number of the last iteration that was read."""
    whole: bool = True
    drafted: int | None = None
    accepted: int | None = None
    pages_total: int = 0
    pages_free: int = 0
    pages_held: int = 0


def with_iterations(before: Iterations, told: Sequence[Mapping[str, Any] | str]) -> Iterations:
    """``before`` and the iterations in ``told``, oldest first, each a mapping or its JSON."""
    last, whole, drafted, accepted = before.last, before.whole, before.drafted, before.accepted
    pages = (before.pages_total, before.pages_free, before.pages_held)
    for entry in told:
        values = json.loads(entry) if isinstance(entry, str) else entry
        number = values.get("iter")
        whole = whole and isinstance(number, int) and last in (None, number - 1)
        last = number if isinstance(number, int) else last
        if (drafting := values.get("specDecodingStats")) is not None:
            drafted = (drafted or 0) + int(drafting["numDraftTokens"])
            accepted = (accepted or 0) + int(drafting["numAcceptedTokens"])
        if (cache := values.get("kvCacheStats")) is not None:
            pages = (cache["maxNumBlocks"], cache["freeNumBlocks"], cache["usedNumBlocks"])
    if not whole:
        drafted = accepted = None
    return Iterations(last, whole, drafted, accepted, *pages)


def finish_of(reason: str | None) -> FinishReason:
    """Our word for TensorRT-LLM's ``finish_reason``. Raises MissingError for one that we have no word for."""
    match reason:
        case "stop" | "length" | "cancelled":
            return reason
        case _:
            raise MissingError(f"TensorRT-LLM ended a request with {reason!r}; see its log")


def until_stop(tokens: Sequence[int], stop_tokens: frozenset[int]) -> tuple[tuple[int, ...], bool]:
    """``tokens`` up to and with the first stop token, and whether there is one: a step may have verified
    tokens behind it."""
    for place, token in enumerate(tokens):
        if token in stop_tokens:
            return tuple(tokens[: place + 1]), True
    return tuple(tokens), False


# --------------------------------------------------------------------------- engine


@dataclass
class _Running:
    request: Request
    result: Any = None
    stopped: bool = False
    """A stop token came; what still comes is dropped."""
    closed: bool = False
    """Its last output was returned; only its totals are still waited for."""


@dataclass(frozen=True)
class _News:
    """One response, or what reading it raised. ``tokens``: those since the last one."""

    running: _Running
    tokens: tuple[int, ...]
    finished: bool
    finish_reason: str | None = None
    totals: Totals | None = None
    error: Exception | None = None


class TrtllmEngine:
    """Owns ``llm``, an open ``LLM``. ``new_sampling``: its class SamplingParams; ``speculates``: it drafts.

    A thread for each request reads its stream; responses meet in one queue. Not for several callers at once.
    """

    def __init__(
        self,
        llm: Any,
        new_sampling: Callable[..., Any],
        *,
        vocab_size: int,
        max_input_tokens: int,
        max_seq_tokens: int,
        speculates: bool,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_seq_tokens = max_seq_tokens
        self._max_input_tokens = max_input_tokens
        self._llm = llm
        self._new_sampling = new_sampling
        self._speculates = speculates
        self._timeout_s = timeout_s
        self._running: dict[str, _Running] = {}
        self._news: queue.SimpleQueue[_News] = queue.SimpleQueue()
        self._cancelled: list[Output] = []
        self._generated = 0
        self._totals = Totals(0, 0, 0)
        self._steps = 0
        self._iterations = Iterations()

    def add(self, request: Request) -> None:
        """Hand a request to TensorRT-LLM. Raises as :meth:`trtspec.engine.Engine.add`, InputError too for
        what TensorRT-LLM itself refuses, and MissingError where it fails."""
        if problem := self._refusal(request):
            raise InputError(Problem(problem, key=request.id))
        running = _Running(request)
        try:
            running.result = self._llm.generate_async(
                list(request.prompt_tokens),
                sampling_params=self._new_sampling(**sampling_arguments(request)),
                streaming=True,
            )
        except (ValueError, TypeError) as error:
            raise InputError(Problem(f"TensorRT-LLM refuses it: {error}", key=request.id)) from error
        except Exception as error:  # its own errors have nothing else in common
            raise MissingError(f"TensorRT-LLM failed: {type(error).__name__}: {error}") from error
        self._running[request.id] = running
        name = f"trtllm-{request.id}"
        threading.Thread(target=self._read, args=(running,), name=name, daemon=True).start()

    def _refusal(self, request: Request) -> str:
        prompt, longest = len(request.prompt_tokens), self._max_input_tokens
        if not prompt:
            return "the prompt is empty"
        if request.id in self._running:
            return "a request of this id is in flight"
        if request.max_new_tokens < 1:
            return f"max_new_tokens is {request.max_new_tokens}; at least 1"
        if wrong := [token for token in request.prompt_tokens if not 0 <= token < self.vocab_size]:
            return f"token {wrong[0]} is outside the vocabulary of {self.vocab_size}"
        if prompt > longest:
            return f"{prompt} prompt tokens; this engine takes up to {longest}"
        if prompt + request.max_new_tokens > self.max_seq_tokens:
            return (
                f"{prompt} prompt tokens and {request.max_new_tokens} new ones exceed max_seq_tokens "
                f"{self.max_seq_tokens}"
            )
        return ""

    def _read(self, running: _Running) -> None:
        """Runs in the request's thread."""
        seen = 0
        try:
            for result in running.result:
                output, finished = result.outputs[0], bool(result.finished)
                tokens = tuple(output.token_ids[seen:])
                seen += len(tokens)
                totals = totals_of(result, seen, speculates=self._speculates) if finished else None
                self._news.put(_News(running, tokens, finished, output.finish_reason, totals))
                if finished:
                    return
            raise MissingError("its stream ended before it was finished")
        except Exception as error:  # whatever it is belongs to the caller of step
            self._news.put(_News(running, (), True, error=error))

    def step(self) -> list[Output]:
        """What became final since the last call; waits until something did. [] when nothing is in flight.

        Raises MissingError when a request failed or nothing came for long: the engine is then beyond use.
        """
        outputs, self._cancelled = self._cancelled, []
        wait = bool(self._running) and not outputs
        self._steps += wait
        while True:
            try:
                news = self._news.get(block=wait, timeout=self._timeout_s if wait else None)
            except queue.Empty:
                if wait:
                    raise MissingError(
                        f"TensorRT-LLM returned nothing for {self._timeout_s:g} s with {len(self._running)} "
                        "requests in flight"
                    ) from None
                return outputs
            output = self._enter(news)
            if output is not None:
                outputs.append(output)
                wait = False
            wait = wait and bool(self._running)

    def _enter(self, news: _News) -> Output | None:
        running, request = news.running, news.running.request
        if news.totals is not None:
            self._totals = Totals(
                add(self._totals.decode_steps, news.totals.decode_steps),
                add(self._totals.drafted, news.totals.drafted),
                add(self._totals.accepted, news.totals.accepted),
            )
        if running.closed:
            return None
        if news.error is not None:
            self._close(running)
            raise MissingError(f"TensorRT-LLM failed on request {request.id}: {news.error}") from news.error
        new: tuple[int, ...] = ()
        if not running.stopped:
            new, running.stopped = until_stop(news.tokens, request.stop_tokens)
        elif news.tokens and not news.finished:
            running.result.abort()
        self._generated += len(new)
        if not news.finished:
            return Output(request.id, new, None, None) if new else None
        self._close(running)
        reason: FinishReason = "stop" if running.stopped else finish_of(news.finish_reason)
        return Output(request.id, new, None, None, reason, news.totals)

    def _close(self, running: _Running) -> None:
        running.closed = True
        del self._running[running.request.id]

    def cancel(self, request_id: str) -> None:
        """Stop a request; unknown ids are ignored. The next step returns its last Output, without totals."""
        running = self._running.get(request_id)
        if running is None:
            return
        running.result.abort()
        self._close(running)
        nothing = Totals(None, None, None)
        self._cancelled.append(Output(request_id, (), None, None, "cancelled", nothing))

    @property
    def in_flight(self) -> int:
        return len(self._running) + len(self._cancelled)

    def stats(self) -> EngineStats:
        """Totals of the requests that ended; drafts by iteration statistics where a request did not tell,
        and None where these do not either. ``steps`` counts the calls that waited; pages are KV blocks as the
        last iteration had them, 0 where iterations are not told. Waits a little for those under way."""
        try:
            told = self._llm.get_stats(timeout=STATS_TIMEOUT_S)
            self._iterations = with_iterations(self._iterations, told)
        except Exception:  # not offered, or not as known: then they tell nothing
            self._iterations = replace(self._iterations, whole=False, drafted=None, accepted=None)
        totals, iterations = self._totals, self._iterations
        told_by_requests = totals.drafted is not None
        return EngineStats(
            steps=self._steps,
            generated_tokens=self._generated,
            decode_steps=totals.decode_steps,
            drafted_tokens=totals.drafted if told_by_requests else iterations.drafted,
            accepted_tokens=totals.accepted if told_by_requests else iterations.accepted,
            running=len(self._running),
            pages_total=iterations.pages_total,
            pages_free=iterations.pages_free,
            pages_held=iterations.pages_held,
        )

    def score(self, tokens: Sequence[int], *, chunk_tokens: int | None = None) -> Scores:
        """Not offered: always raises MissingError."""
        raise MissingError(_NO_SCORES)

    def score_law(
        self, tokens: Sequence[int], sampling: Sampling, *, first: int, chunk_tokens: int | None = None
    ) -> LawScores:
        """Not offered: always raises MissingError."""
        raise MissingError(_NO_SCORES)

    def score_rows(self, tokens: Sequence[int], *, chunk_tokens: int | None = None) -> Iterator[NDArray[Any]]:
        """Not offered: always raises MissingError."""
        raise MissingError(_NO_SCORES)

    def close(self) -> None:
        """Cancel what is in flight and free the GPU."""
        for request_id in list(self._running):
            self.cancel(request_id)
        self._cancelled.clear()
        self._llm.shutdown()
