"""The Python-backend model that Triton loads: tensors in, :class:`~trtspec.serve.driver.Driver`, tensors out.

Runs in Triton's stub process, where ``triton_python_backend_utils`` exists. ``execute`` only queues; the
driver's thread answers through response senders, so any number of requests share the engine's batch.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from trtspec.artifact import BASELINE_DIR, RECIPE_FILE, Artifact, read_manifest
from trtspec.backends import open_engine
from trtspec.engine import EngineStats
from trtspec.errors import InputError, MissingError
from trtspec.recipe_file import load_recipe
from trtspec.serve.driver import Driver, FailureKind, Reply
from trtspec.serve.protocol import INPUTS, Generate, parse
from trtspec.serve.repository import ENGINE_DIR
from trtspec.text import Tokenizer

EXIT_ENGINE_FAILED = 70
_TIME_TO_DELIVER_S = 0.5
_STEP_BUCKETS_S = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0]


class TritonPythonModel:
    """See Triton's Python backend for when each method is called."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the engine. An exception here makes Triton refuse the model with its text."""
        config = json.loads(args["model_config"])
        try:
            self._open(Path(config["parameters"][ENGINE_DIR]["string_value"]))
        except Exception as error:
            if (text := _plain(str(error))) == str(error):
                raise
            # Text with a surrogate would end this process without a word.
            raise (InputError if isinstance(error, InputError) else MissingError)(text) from None

    def _open(self, folder: Path) -> None:
        artifact = _artifact(folder)
        recipe = artifact.recipe
        tokenizer = Tokenizer.load(artifact.target_dir)
        engine = open_engine(artifact)
        self._metrics: _Metrics | None = _Metrics()
        self._driver = Driver(
            engine,
            tokenizer,
            max_open=recipe.limits.max_batch_size + recipe.serving.max_queue_requests,
            max_input_tokens=recipe.limits.max_input_tokens,
            default_max_tokens=recipe.serving.default_max_tokens,
            fresh_seed=lambda: secrets.randbits(63),
            on_stats=self._metrics.update,
            on_failure=_end_process,
        )
        pb_utils.Logger.log_info(f"trtspec: {recipe.name} is loaded")

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            caller = _Caller(request)
            try:
                wanted = parse(_inputs(request), json.loads(request.parameters() or "{}"))
                if isinstance(wanted, Generate):
                    caller.wanted = wanted
                    self._driver.submit(wanted, caller, label=request.request_id())
                else:
                    self._stop(caller, request.request_id())
            except InputError as error:
                caller.fail("invalid", str(error))
            except Exception as error:  # a bug; its traceback is for the log, not for the client
                traceback.print_exc()
                caller.fail("internal", f"internal error ({type(error).__name__}); see the server's log")

    def finalize(self) -> None:
        """Called after the last response was sent."""
        self._driver.close()
        # A metric that is alive when the interpreter ends crashes the stub.
        if self._metrics is not None:
            self._metrics.drop()
        self._metrics = None

    def _stop(self, caller: _Caller, request_id: str) -> None:
        if not request_id:
            caller.fail("invalid", "stop: send the request id of the request to cancel")
            return
        self._driver.cancel(request_id)
        caller.done()


class _Caller:
    """The client behind one Triton request."""

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()
        self.wanted: Generate | None = None

    def reply(self, reply: Reply, *, final: bool) -> None:
        assert self.wanted is not None
        response = pb_utils.InferenceResponse(output_tensors=_outputs(reply, self.wanted))
        self._send(response, final=final)

    def fail(self, kind: FailureKind, message: str) -> None:
        codes: dict[FailureKind, Any] = {
            "invalid": pb_utils.TritonError.INVALID_ARG,
            "busy": pb_utils.TritonError.UNAVAILABLE,
            "cancelled": pb_utils.TritonError.CANCELLED,
            "internal": pb_utils.TritonError.INTERNAL,
        }
        error = pb_utils.TritonError(_plain(message), codes[kind])
        self._send(pb_utils.InferenceResponse(output_tensors=[], error=error), final=True)

    def done(self) -> None:
        """An empty answer that is no error."""
        self._send(pb_utils.InferenceResponse(output_tensors=[_strings("text_output", "")]), final=True)

    def is_cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())

    def _send(self, response: Any, *, final: bool) -> None:
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        try:
            self._sender.send(response, flags=flags)
        except Exception:  # the client is gone: its problem, not the batch's
            traceback.print_exc()


def _artifact(folder: Path) -> Artifact:
    """The engine that the supervisor opened, and so checked, just before. Its files are not checked again:
    the Python of this process cannot spell a file name beyond ASCII, whether or not the engine needs it."""
    manifest = read_manifest(folder)
    return Artifact(
        folder=folder,
        recipe=load_recipe(folder / RECIPE_FILE),
        manifest=manifest,
        target_dir=folder / manifest.target,
        baseline_dir=folder / BASELINE_DIR,
    )


def _plain(text: str) -> str:
    """``text`` that can be sent: file names come with their bytes beyond ASCII as surrogates."""
    return (
        text.encode("utf-8", "surrogateescape").decode("utf-8", "replace") if _has_surrogate(text) else text
    )


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _inputs(request: Any) -> dict[str, list[Any]]:
    names = {spec.name for spec in INPUTS}
    return {
        tensor.name(): tensor.as_numpy().reshape(-1).tolist()
        for tensor in request.inputs()
        if tensor.name() in names
    }


def _outputs(reply: Reply, wanted: Generate) -> list[Any]:
    """The tensors of a reply: text always, the rest when asked for (as few as possible: each costs
    25 to 50 microseconds a step)."""
    tensors = [_strings("text_output", reply.text)]
    if wanted.return_finish_reason:
        tensors.append(_strings("finish_reason", str(reply.finish_reason)))
    if wanted.return_stop_reason:
        tensors.append(_strings("stop_reason", str(reply.stop_reason)))
    if wanted.return_perf_metrics and reply.finish_reason is not None:
        for name, value, dtype in (
            ("acceptance_rate", reply.acceptance_rate, np.float32),
            ("total_accepted_draft_tokens", reply.accepted, np.int32),
            ("total_draft_tokens", reply.drafted, np.int32),
            ("arrival_time_ns", reply.arrival_ns, np.int64),
            ("first_token_time_ns", reply.first_token_ns, np.int64),
            ("last_token_time_ns", reply.last_token_ns, np.int64),
            ("num_input_tokens", reply.num_input_tokens, np.int32),
            ("num_output_tokens", reply.num_output_tokens, np.int32),
            ("acceptance_length", reply.acceptance_length, np.float32),
        ):
            if value is not None:
                tensors.append(pb_utils.Tensor(name, np.array([value], dtype=dtype)))
    return tensors


def _strings(name: str, text: str) -> Any:
    return pb_utils.Tensor(name, np.array([text.encode()], dtype=np.object_))


class _Metrics:
    """``trtspec_*`` on Triton's metrics port."""

    def __init__(self) -> None:
        self._families: list[Any] = []
        counter, gauge = pb_utils.MetricFamily.COUNTER, pb_utils.MetricFamily.GAUGE
        histogram = pb_utils.MetricFamily.HISTOGRAM
        self._set: list[tuple[Any, Callable[[EngineStats], float | None]]] = [
            (self._metric(gauge, "trtspec_requests_running", "Requests in the batch"), lambda s: s.running),
            (self._metric(gauge, "trtspec_requests_waiting", "Requests queued"), lambda s: s.waiting),
            (
                self._metric(
                    gauge,
                    "trtspec_acceptance_length",
                    "Tokens per target step of a sequence since the start, bonus token included",
                ),
                lambda s: s.generated_tokens / s.decode_steps if s.decode_steps else 0.0,
            ),
        ]
        pages = self._family(gauge, "trtspec_kv_pages", "KV cache pages by state")
        for state, read in (
            ("free", lambda s: s.pages_free),
            ("cached", lambda s: s.pages_cached),
            ("held", lambda s: s.pages_held),
        ):
            self._set.append((pages.Metric(labels={"state": state}), read))
        # Counters only go up, so they are moved by the difference to what they show.
        self._add: list[tuple[Any, Callable[[EngineStats], float | None]]] = [
            (self._metric(counter, f"trtspec_{name}_total", description), read)
            for name, description, read in (
                ("generated_tokens", "Tokens generated", lambda s: s.generated_tokens),
                ("drafted_tokens", "Draft tokens verified by the target", lambda s: s.drafted_tokens),
                ("accepted_tokens", "Draft tokens that became output", lambda s: s.accepted_tokens),
                ("prefix_hit_tokens", "Prompt tokens found in the KV cache", lambda s: s.prefix_hit_tokens),
                (
                    "held_back_steps",
                    "Steps without a draft: above max_concurrency, or none would have paid",
                    lambda s: s.held_back_steps,
                ),
                ("preemptions", "Sequences put back to make room", lambda s: s.preemptions),
            )
        ]
        family = self._family(histogram, "trtspec_step_seconds", "Duration of one engine step")
        self._steps = family.Metric(labels={}, buckets=_STEP_BUCKETS_S)

    def update(self, stats: EngineStats, step_seconds: list[float]) -> None:
        for metric, read in self._set:
            if (value := read(stats)) is not None:
                metric.set(float(value))
        for metric, read in self._add:
            if (value := read(stats)) is not None:
                metric.increment(max(0.0, float(value) - metric.value()))
        for seconds in step_seconds:
            self._steps.observe(seconds)

    def drop(self) -> None:
        self._set.clear()
        self._add.clear()
        self._steps = None
        self._families.clear()

    def _family(self, kind: Any, name: str, description: str) -> Any:
        family = pb_utils.MetricFamily(name=name, description=description, kind=kind)
        self._families.append(family)
        return family

    def _metric(self, kind: Any, name: str, description: str) -> Any:
        return self._family(kind, name, description).Metric(labels={})


def _end_process(message: str) -> None:
    """A failed engine cannot serve: end the stub, which the supervisor watches."""
    print(f"trtspec: {message}", file=sys.stderr, flush=True)
    time.sleep(_TIME_TO_DELIVER_S)  # for Triton to pass on the errors just sent
    os._exit(EXIT_ENGINE_FAILED)
