"""A streaming client of the served model, over gRPC. Works with NVIDIA's server of the same tensors too.

The stream is always read to its end, also after the final answer: a client that leaves there can leak
the server's stream state, and its shutdown then hangs.
"""

from __future__ import annotations

import contextlib
import http.client
import queue
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

from trtspec.errors import InputError, MissingError, Problem, TrtspecError
from trtspec.serve.protocol import INPUTS, NOT_THE_REQUEST, Generate, tensors
from trtspec.triton_config import ACCEPTANCE, ENGINE_NAME, RECIPE_DIGEST

IDLE_TIMEOUT_S = 120.0
_STATISTICS = {
    "acceptance_rate": float,
    "acceptance_length": float,
    "total_accepted_draft_tokens": int,
    "total_draft_tokens": int,
    "num_input_tokens": int,
    "num_output_tokens": int,
    "arrival_time_ns": int,
    "first_token_time_ns": int,
    "last_token_time_ns": int,
}
_OF_TRITON = ("Server is stopping", "is not healthy", "exceeds maximum queue size", "Request timeout expired")
"""Words of Triton's own errors that are not the request's fault."""


@dataclass(frozen=True)
class Finished:
    """The end of an answer. ``statistics`` holds what the server measured, by its tensor names."""

    text: str
    finish_reason: str | None
    stop_reason: str | None
    statistics: dict[str, float | int]

    @property
    def ttft_ms(self) -> float | None:
        """Arrival at the model to the first token."""
        return self._between_ms("arrival_time_ns", "first_token_time_ns")

    @property
    def tpot_ms(self) -> float | None:
        """Mean time per token after the first one."""
        total, tokens = self._between_ms("first_token_time_ns", "last_token_time_ns"), self._num_tokens
        return total / (tokens - 1) if total is not None and tokens is not None and tokens > 1 else None

    @property
    def _num_tokens(self) -> int | None:
        value = self.statistics.get("num_output_tokens")
        return None if value is None else int(value)

    def _between_ms(self, first: str, last: str) -> float | None:
        if first not in self.statistics or last not in self.statistics:
            return None
        return (self.statistics[last] - self.statistics[first]) / 1e6


def stream(
    url: str,
    model_name: str,
    request: Generate,
    *,
    request_id: str = "",
    idle_timeout_s: float = IDLE_TIMEOUT_S,
) -> Generator[str | Finished, None, None]:
    """Yield the answer to ``request`` piece by piece as text, then one Finished.

    ``url`` is ``host:port`` of the server's gRPC. Closing the generator early (or an exception in the
    loop over it, Ctrl-C included) cancels the request. Raises InputError when the server refuses the
    request, MissingError when it is not there, full, stopping, or silent for ``idle_timeout_s``.
    """
    import tritonclient.grpc as triton

    request = replace(request, streaming=True, return_finish_reason=True, return_stop_reason=True)
    inputs = _inputs(request)
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client = triton.InferenceServerClient(url)
    ended = False
    try:
        # Not with the header triton_grpc_error, which would give errors their status codes: the server may
        # then end the stream twice when it refuses a request, on which gRPC aborts it, with all its requests.
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        try:
            client.async_stream_infer(
                model_name, inputs, request_id=request_id, enable_empty_final_response=True
            )
        except triton.InferenceServerException as failure:
            # The stream broke before the request was sent; why is in the queue, or about to be.
            ended = True
            reason = None
            with contextlib.suppress(queue.Empty):
                reason = answers.get(timeout=5.0)[1]
            raise _error(url, reason or failure) from None
        text, last = "", None
        while True:
            try:
                result, error = answers.get(timeout=idle_timeout_s)
            except queue.Empty:
                raise MissingError(f"{url}: no answer for {idle_timeout_s:g} s; gave up") from None
            if error is not None:
                ended = True
                raise _error(url, error)
            response = result.get_response()
            value = result.as_numpy("text_output")
            if value is not None:
                last = result
                whole = value.reshape(-1)[0].decode("utf-8")
                if not whole.startswith(text):
                    raise MissingError(f"{url}: text_output does not continue what came before it")
                if len(whole) > len(text):
                    yield whole[len(text) :]
                text = whole
            if response.parameters["triton_final_response"].bool_param:
                ended = True
                break
        yield _finished(text, last)
    finally:
        client.stop_stream(cancel_requests=not ended)
        client.close()


def generate(
    url: str, model_name: str, request: Generate, *, idle_timeout_s: float = IDLE_TIMEOUT_S
) -> Finished:
    """The whole answer to ``request``; raises as :func:`stream`."""
    for piece in stream(url, model_name, request, idle_timeout_s=idle_timeout_s):
        if isinstance(piece, Finished):
            return piece
    raise MissingError(f"{url}: the answer ended early")


def check_engine(url: str, model_name: str, engine_name: str, recipe_digest: str, timeout_s: float) -> None:
    """Return if the server at ``url`` serves an engine of this recipe.

    Ports are easily those of another engine's server, whose answers look right. Raises InputError then, and
    when the server does not say what it serves; MissingError when it is not there.
    """
    found = _parameters(url, model_name, timeout_s)
    if RECIPE_DIGEST not in found:
        message = (
            f"model {model_name} there does not say which engine it serves; leave --engine out to ask it"
        )
        raise InputError(Problem(message, file=url))
    if found[RECIPE_DIGEST] != recipe_digest:
        served = found.get(ENGINE_NAME, "another engine")
        what = f"serves {served}" if served != engine_name else f"serves {served} of another recipe"
        message = f"{what}, not the engine given; start its server, or give the --url of it"
        raise InputError(Problem(message, file=url))


def served_acceptance(url: str, model_name: str, timeout_s: float) -> str | None:
    """How the server at ``url`` accepts drafts, ``typical acceptance (approximate)``; None if it does not
    say. Raises MissingError when it is not there."""
    return _parameters(url, model_name, timeout_s).get(ACCEPTANCE)


def _parameters(url: str, model_name: str, timeout_s: float) -> dict[str, str]:
    """The parameters of the served model's configuration."""
    import tritonclient.grpc as triton

    with contextlib.closing(triton.InferenceServerClient(url)) as client:
        try:
            config = client.get_model_config(model_name, client_timeout=timeout_s).config
        except triton.InferenceServerException as error:
            raise _error(url, error) from None
    return {key: parameter.string_value for key, parameter in config.parameters.items()}


def _inputs(request: Generate) -> list[Any]:
    import numpy as np
    import tritonclient.grpc as triton

    types = {spec.name: spec.data_type for spec in INPUTS}
    numpy_types = {
        "BOOL": bool,
        "INT32": np.int32,
        "UINT64": np.uint64,
        "FP32": np.float32,
        "STRING": np.object_,
    }
    inputs = []
    for name, values in tensors(request).items():
        data_type = types[name]
        wire_type = "BYTES" if data_type == "STRING" else data_type
        tensor = triton.InferInput(name, [len(values)], wire_type)
        tensor.set_data_from_numpy(np.array(values, dtype=numpy_types[data_type]))
        inputs.append(tensor)
    return inputs


def _finished(text: str, result: Any) -> Finished:
    statistics: dict[str, float | int] = {}
    for name, kind in _STATISTICS.items():
        value = result.as_numpy(name) if result is not None else None
        if value is not None:
            statistics[name] = kind(value.reshape(-1)[0])
    return Finished(text, _text(result, "finish_reason"), _text(result, "stop_reason"), statistics)


def _text(result: Any, name: str) -> str | None:
    value = result.as_numpy(name) if result is not None else None
    if value is None:
        return None
    text: str = value.reshape(-1)[0].decode("utf-8")
    return None if text == "None" else text


def _error(url: str, error: Any) -> TrtspecError:
    """A server's error as ours. Its status code says whose fault it is; in a stream there is none, and the
    request is at fault unless the message is one of those that say otherwise."""
    status = (error.status() or "").removeprefix("StatusCode.")
    message = error.message() or str(error)
    if status == "UNAVAILABLE" and "connect" in message:
        if (found := _listener(url)) is not None:
            remedy = "give the gRPC port of a Triton server (8001 unless the recipe says another)"
            return InputError(Problem(f"{found}; {remedy}", url))
        return MissingError(
            f"{url}: nothing answers there; start the server with trtspec serve, or check --url"
        )
    if status == "UNAVAILABLE" and ("Socket closed" in message or "GOAWAY" in message):
        return MissingError(f"{url}: the server went away before the answer was complete")
    if status == "DEADLINE_EXCEEDED":
        return MissingError(f"{url}: no answer in time; gave up")
    if "no available versions" in message:
        return MissingError(f"{url}: the server is stopping, or its model is not loaded")
    is_request = status == "" and not any(words in message for words in (*NOT_THE_REQUEST, *_OF_TRITON))
    if is_request or status in ("INVALID_ARGUMENT", "NOT_FOUND", "OUT_OF_RANGE"):
        return InputError(Problem(message, file=url))
    return MissingError(f"{url}: {message}")


def _listener(url: str) -> str | None:
    """What answers at ``url`` where gRPC got no connection; None if nothing does."""
    connection = http.client.HTTPConnection(url, timeout=2.0)
    try:
        connection.connect()
    except OSError:
        return None
    try:
        connection.request("GET", "/v2/health/live")
        connection.getresponse()
        return "that is an HTTP port"
    except (OSError, http.client.HTTPException):
        return "what listens there does not speak gRPC"
    finally:
        connection.close()
