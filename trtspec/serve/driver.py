"""One thread that drives an engine for many callers: requests come in at any time and join the batch.

A request's way: :meth:`Driver.submit` (any thread) checks it and queues it; the driver's thread adds it to
the engine, steps the engine while anything is in flight, and turns each step's tokens into text for the
caller (:class:`Reply`). Callers are reached through :class:`Caller`, so nothing here knows of Triton.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from trtspec.engine import Engine, EngineStats, Output, Request, add
from trtspec.errors import InputError, Problem
from trtspec.serve.protocol import CANCELLED, ENGINE_FAILED, QUEUE_FULL, Generate
from trtspec.text import Detokenizer, StopStrings, Tokenizer

CANCEL_POLL_S = 0.005
"""How often callers are asked whether they are gone: asking costs 13 microseconds, so not every token."""
REPORT_S = 0.05
"""How often statistics are reported while the engine works."""

FailureKind = Literal["invalid", "busy", "cancelled", "internal"]


@dataclass(frozen=True)
class Reply:
    """One answer, or one piece of a streamed one.

    ``text`` is what ``text_output`` holds. ``finish_reason`` is None while the request goes on;
    ``stop_reason`` is the stop string, or the stop token's id in decimal. Times are ``time.monotonic_ns``;
    the counts cover the request so far.
    """

    text: str
    finish_reason: str | None
    stop_reason: str | None
    num_input_tokens: int
    num_output_tokens: int
    steps: int | None
    drafted: int | None
    accepted: int | None
    arrival_ns: int
    first_token_ns: int
    last_token_ns: int

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted; 0 when nothing was drafted, None when the engine does not tell."""
        if self.accepted is None or self.drafted is None:
            return None
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_length(self) -> float | None:
        """Tokens emitted per target step, the bonus token included; None when the engine does not tell."""
        if self.steps is None:
            return None
        return self.num_output_tokens / self.steps if self.steps else 0.0


class Caller(Protocol):
    """Where the answers to one request go."""

    def reply(self, reply: Reply, *, final: bool) -> None: ...

    def fail(self, kind: FailureKind, message: str) -> None:
        """The request ended with an error; nothing follows."""
        ...

    def is_cancelled(self) -> bool: ...


@dataclass
class _Job:
    caller: Caller
    wanted: Generate
    request: Request
    label: str
    detokenizer: Detokenizer
    stops: StopStrings
    arrival_ns: int
    text: str = ""
    tokens: int = 0
    steps: int | None = 0
    drafted: int | None = 0
    accepted: int | None = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    closed: bool = False
    """Answered to the end; the engine may not know yet."""


@dataclass
class _Inbox:
    jobs: queue.SimpleQueue[_Job | None] = field(default_factory=queue.SimpleQueue)
    """None wakes the thread without bringing a job."""
    labels_to_cancel: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)


class Driver:
    """Owns ``engine`` from construction to :meth:`close`.

    ``max_open`` bounds the requests that are queued or running. ``on_stats`` gets the engine's counters
    and the seconds of the steps since the last call. ``on_failure`` is called once, after every open
    request was answered with an error, when a step raised: the engine is then beyond use.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        max_open: int,
        max_input_tokens: int,
        default_max_tokens: int,
        fresh_seed: Callable[[], int],
        on_stats: Callable[[EngineStats, list[float]], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._max_open = max_open
        self._max_input_tokens = max_input_tokens
        self._default_max_tokens = default_max_tokens
        self._fresh_seed = fresh_seed
        self._on_stats = on_stats
        self._on_failure = on_failure
        self._inbox = _Inbox()
        self._jobs: dict[str, _Job] = {}
        self._lock = threading.Lock()
        self._num_open = 0
        self._num_submitted = 0
        self._broken: str | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine")
        self._thread.start()

    # ----------------------------------------------------------------------- any thread

    def submit(self, wanted: Generate, caller: Caller, label: str = "") -> None:
        """Queue a request. Whatever is wrong with it goes to ``caller``; ``label`` is for :meth:`cancel`."""
        try:
            prompt = self._prompt_tokens(wanted.prompt)
            stops = StopStrings(wanted.stop)
            max_new_tokens = self._max_new_tokens(wanted.max_tokens, len(prompt))
        except InputError as error:
            caller.fail("invalid", str(error))
            return
        sampling = wanted.sampling(self._fresh_seed() if wanted.seed is None else wanted.seed)
        detokenizer = self._tokenizer.detokenizer()
        refusal: tuple[FailureKind, str] | None = None
        # Also the put: after _break_down emptied the inbox, nothing may come in that nobody answers.
        with self._lock:
            if self._broken is not None:
                refusal = ("internal", self._broken)
            elif self._num_open >= self._max_open:
                full = f"{QUEUE_FULL} ({self._max_open} requests are running or waiting); try again later"
                refusal = ("busy", full)
            else:
                self._num_open += 1
                self._num_submitted += 1
                request = Request(
                    id=str(self._num_submitted),
                    prompt_tokens=tuple(prompt),
                    max_new_tokens=max_new_tokens,
                    sampling=sampling,
                    stop_tokens=self._tokenizer.eos_token_ids,
                )
                self._inbox.jobs.put(
                    _Job(caller, wanted, request, label, detokenizer, stops, time.monotonic_ns())
                )
        if refusal is not None:
            caller.fail(*refusal)

    def cancel(self, label: str) -> None:
        """Cancel every request that was submitted with ``label``; each gets its own error."""
        self._inbox.labels_to_cancel.put(label)
        self._inbox.jobs.put(None)

    def close(self) -> None:
        """Answer what is open, then close the engine."""
        self._closing = True
        self._inbox.jobs.put(None)
        self._thread.join()

    def _prompt_tokens(self, prompt: str) -> list[int]:
        limit = self._max_input_tokens * self._tokenizer.longest_token_bytes
        # Cheap and first: nobody should wait while megabytes are tokenized only to be refused.
        if len(prompt) > limit:
            self._refuse_prompt(f"{len(prompt):,} characters cannot fit")
        tokens = self._tokenizer.encode(prompt)
        if not tokens:
            raise InputError(Problem("the prompt is empty; send some text", key="text_input"))
        if len(tokens) > self._max_input_tokens:
            self._refuse_prompt(f"{len(tokens):,} tokens are too many")
        return tokens

    def _refuse_prompt(self, found: str) -> None:
        message = f"{found}; this engine takes prompts up to {self._max_input_tokens:,} tokens"
        raise InputError(Problem(message, key="text_input"))

    def _max_new_tokens(self, wanted: int | None, num_prompt_tokens: int) -> int:
        room = self._engine.max_seq_tokens - num_prompt_tokens
        if room < 1:
            message = (
                f"{num_prompt_tokens:,} tokens leave no room for an answer; prompt and answer together are "
                f"limited to {self._engine.max_seq_tokens:,} tokens"
            )
            raise InputError(Problem(message, key="text_input"))
        if wanted is None:
            return min(self._default_max_tokens, room)
        if wanted > room:
            message = (
                f"{wanted:,} is too large; the prompt's {num_prompt_tokens:,} tokens leave room for {room:,} "
                f"(prompt and answer together: {self._engine.max_seq_tokens:,})"
            )
            raise InputError(Problem(message, key="sampling_param_max_tokens"))
        return wanted

    # ----------------------------------------------------------------------- the engine's thread

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:  # any failure of the engine, whatever it is
            traceback.print_exc()
            message = f"{ENGINE_FAILED} ({type(error).__name__}); the server's log has the details"
            self._break_down(message)
            self._on_failure(message)
        finally:
            self._engine.close()

    def _loop(self) -> None:
        next_poll = next_report = 0.0
        step_seconds: list[float] = []
        while True:
            self._take_in(wait=not self._engine.in_flight)
            if self._closing and not self._engine.in_flight and not self._jobs:
                return
            now = time.monotonic()
            if now >= next_poll:
                self._drop_cancelled()
                next_poll = now + CANCEL_POLL_S
            if self._engine.in_flight:
                outputs = self._engine.step()
                step_seconds.append(time.monotonic() - now)
                for output in outputs:
                    self._advance(output)
            if now >= next_report or not self._engine.in_flight:
                self._on_stats(self._engine.stats(), step_seconds)
                step_seconds = []
                next_report = now + REPORT_S

    def _take_in(self, *, wait: bool) -> None:
        """Add what was submitted to the engine; with ``wait``, until something was."""
        wait = wait and not self._closing
        while True:
            try:
                job = self._inbox.jobs.get(block=wait)
            except queue.Empty:
                break
            wait = False
            if job is None:
                continue
            if job.caller.is_cancelled():
                self._close_job(job)
                job.caller.fail("cancelled", CANCELLED)
                continue
            try:
                self._engine.add(job.request)
            except InputError as error:
                self._close_job(job)
                job.caller.fail("invalid", str(error))
                continue
            self._jobs[job.request.id] = job
        while True:
            try:
                label = self._inbox.labels_to_cancel.get_nowait()
            except queue.Empty:
                break
            for job in list(self._jobs.values()):
                if job.label == label:
                    self._cancel_job(job)

    def _drop_cancelled(self) -> None:
        for job in list(self._jobs.values()):
            if not job.closed and job.caller.is_cancelled():
                self._cancel_job(job)

    def _cancel_job(self, job: _Job) -> None:
        if job.closed:
            return
        self._engine.cancel(job.request.id)
        self._close_job(job)
        job.caller.fail("cancelled", CANCELLED)

    def _close_job(self, job: _Job) -> None:
        if not job.closed:
            job.closed = True
            with self._lock:
                self._num_open -= 1

    def _advance(self, output: Output) -> None:
        job = self._jobs.get(output.request_id)
        if job is None:
            return
        if output.finish_reason is not None:
            del self._jobs[output.request_id]
        if job.closed:
            return
        job.drafted = add(job.drafted, output.drafted)
        job.accepted = add(job.accepted, output.accepted)
        if output.new_tokens:
            job.tokens += len(output.new_tokens)
            job.steps = add(job.steps, 1)
            job.last_token_ns = time.monotonic_ns()
            job.first_token_ns = job.first_token_ns or job.last_token_ns
        if output.totals is not None:
            job.steps, job.drafted = output.totals.decode_steps, output.totals.drafted
            job.accepted = output.totals.accepted
        tokens = output.new_tokens
        finish_reason: str | None = output.finish_reason
        stop_reason: str | None = None
        if finish_reason == "stop":
            # The stop token ends the text; it is not part of it.
            stop_reason, tokens = str(tokens[-1]), tokens[:-1]
        piece = job.stops.push(job.detokenizer.push(tokens))
        if finish_reason is not None:
            piece += job.stops.push(job.detokenizer.flush())
            piece += job.stops.flush()
        if job.stops.matched is not None:
            if finish_reason is None:
                self._engine.cancel(job.request.id)
            finish_reason, stop_reason = "stop", job.stops.matched
        job.text += piece
        if finish_reason is not None:
            self._close_job(job)
        if job.wanted.streaming:
            text = piece if job.wanted.text_delta else job.text
        elif finish_reason is None:
            return
        else:
            text = job.text if job.wanted.exclude_input else job.wanted.prompt + job.text
        reply = Reply(
            text,
            finish_reason,
            stop_reason,
            len(job.request.prompt_tokens),
            job.tokens,
            job.steps,
            job.drafted,
            job.accepted,
            job.arrival_ns,
            job.first_token_ns,
            job.last_token_ns,
        )
        job.caller.reply(reply, final=finish_reason is not None)

    def _break_down(self, message: str) -> None:
        with self._lock:
            self._broken = message
        for job in self._jobs.values():
            if not job.closed:
                job.caller.fail("internal", message)
        self._jobs.clear()
        while True:
            try:
                job_or_wake = self._inbox.jobs.get_nowait()
            except queue.Empty:
                return
            if job_or_wake is not None:
                job_or_wake.caller.fail("internal", message)
