"""A client of any endpoint that streams: Triton's ``generate_stream`` and OpenAI-compatible servers.

Triton: models of the LLM API (``sampling_param_*`` inputs, as trtspec's own server) and of the C++ backend
(``ensemble``: ``max_tokens``); which inputs a model has is asked from its metadata. OpenAI: ``vllm serve``,
``trtllm-serve`` and others; token ids (vLLM), tokens a step (trtllm-serve) and draft counters (vLLM's
``/metrics``) are used where a server gives them. Nothing but the given URL is contacted, redirects are not
followed, and every wait ends: ``timeout_s`` between two pieces, 20 times that for one answer.
A request that fails in a load is a record with an error, not an exception.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import quote

from trtspec.errors import InputError, MissingError, Problem
from trtspec.prompts import Chat
from trtspec.user_files import shown_path
from trtspec.verify.http_stream import (
    NO_SERVER,
    Refused,
    Silent,
    events,
    get,
    its_words,
    json_value,
    named_in,
    page,
    parts_of,
    post,
    refused,
)
from trtspec.verify.timed import Timed

Protocol = Literal["triton", "openai"]
_MOST_BYTES, _MOST_PIECES = 16_000_000, 10_000
"""Of an answer, and more for each token asked for, so that one that never ends fills no memory."""
_ASKED = ("return_token_ids", "stream_options")
"""What an OpenAI-compatible server may refuse, least common first."""
_BROKEN_OFF = ("abort", "error", "cancelled", "canceled")


@dataclass(frozen=True)
class Endpoint:
    """A model behind a URL. ``inputs``: of a Triton model; ``extras``: what OpenAI servers may refuse."""

    url: str
    host: str
    port: int
    prefix: str
    tls: bool
    protocol: Protocol
    model: str
    timeout_s: float
    inputs: frozenset[str] = frozenset()
    extras: tuple[str, ...] = _ASKED
    raw: bool = False
    """Whether prompts are sent without the server's chat template (``/v1/completions``)."""
    api_key: str | None = None
    server: str = ""
    """What serves it, as far as it says: ``vllm 0.32.0``, ``triton``; "" where it does not."""

    def __repr__(self) -> str:
        return f"Endpoint({self.protocol}, {self.url}, {self.model})"


@dataclass(frozen=True)
class SamplingParams:
    """How an answer is drawn; the default is greedy. None: not sent."""

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    """Answers of one request (OpenAI only); the first is read, all are counted."""


GREEDY = SamplingParams()


@dataclass(frozen=True)
class Reply:
    """An answer. ``token_ids`` None: the server shows text only. ``drafted``, ``accepted``,
    ``tokens_per_step``, ``prompt_tokens`` and ``prompt_token_ids`` are the server's own words, None where it
    does not tell."""

    timed: Timed
    text: str
    token_ids: tuple[int, ...] | None
    finish_reason: str | None
    drafted: int | None = None
    accepted: int | None = None
    tokens_per_step: float | None = None
    answers: int = 1
    """Of ``SamplingParams.n``, those of which anything came."""
    emitted: tuple[int, ...] | None = None
    """Token ids of each event that had some: of a step, or of several where the server lagged behind."""
    prompt_tokens: int | None = None
    prompt_token_ids: tuple[int, ...] | None = None


# --------------------------------------------------------------------------- finding out what is there


def connect(
    url: str,
    *,
    protocol: Protocol | None = None,
    model: str | None = None,
    timeout_s: float = 60.0,
    api_key: str | None = None,
) -> Endpoint:
    """Find out what is behind ``url``: protocol (if not given), model, and the model's inputs.

    Raises InputError for a URL or model that cannot be, MissingError where nothing answers.
    """
    host, port, prefix, tls = parts_of(url)
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise InputError(Problem("the key holds a line break or what is not ASCII; no header can carry it"))
    named: Protocol = protocol or "openai"
    bare = Endpoint(url, host, port, prefix, tls, named, model or "", timeout_s, api_key=api_key)
    try:
        listed = None if protocol == "triton" else _models(bare)
        if listed is not None:
            names, owner = listed
            server = _openai_server(bare, owner)
            return replace(bare, protocol="openai", model=_chosen(url, model, names), server=server)
        if protocol == "openai":
            raise InputError(Problem("GET /v1/models does not list models: no OpenAI-compatible server", url))
        status, body = get(bare, "/v2/health/ready")
        if status == 400 and not body:
            raise MissingError(f"{url}: Triton is there, but not ready")
        if status != 200:
            message = (
                "neither a list of models at /v1/models (OpenAI) nor Triton's HTTP port (/v2/health/ready "
                f"gives HTTP {status}) is there"
            )
            raise InputError(Problem(message, url))
        triton = replace(bare, protocol="triton")
        name = model or _chosen(url, None, _repository(triton), prefer="ensemble")
        status, body = get(triton, f"/v2/models/{quote(name, safe='')}")
        value = json_value(body) if status == 200 else None
        if not isinstance(value, dict):
            raise InputError(Problem(f"no model {shown_path(name)!r} there; --model names it", url))
        inputs = frozenset(named_in(value.get("inputs"), "name"))
        if "text_input" not in inputs or not inputs & {"max_tokens", "sampling_param_max_tokens"}:
            found = shown_path(", ".join(sorted(inputs)) or "nothing")
            message = (
                f"model {shown_path(name)!r} takes {found}; needed are text_input and max_tokens or "
                "sampling_param_max_tokens (a text model: ensemble, llmapi)"
            )
            raise InputError(Problem(message, url))
        return replace(triton, model=name, inputs=inputs, raw=True, server=_triton_server(triton, name))
    except (Silent, Refused) as error:
        raise MissingError(f"{url}: {error}") from None


def learn(endpoint: Endpoint, chat: Chat) -> Endpoint:
    """``endpoint`` with what the server refuses left out, found by asking it once.

    Raises MissingError if it does not answer even the plainest request."""
    clock = time.perf_counter
    tries = [endpoint.extras[start:] for start in range(len(endpoint.extras) + 1)]
    for extras in tries if endpoint.protocol == "openai" else tries[:1]:
        tried = replace(endpoint, extras=extras)
        reply = ask(tried, chat, max_tokens=4, clock=clock)
        if not reply.timed.error:
            return tried
        if not is_refused(reply.timed.error):
            break
    raise MissingError(f"{endpoint.url}: {reply.timed.error}")


def _models(endpoint: Endpoint) -> tuple[list[str], str] | None:
    """The models that an OpenAI-compatible server lists, and who it says owns them; None if it is none."""
    status, body = get(endpoint, "/v1/models")
    value = json_value(body) if status == 200 else None
    if status in (401, 403):
        found = "refuses the key that was given" if endpoint.api_key else "wants a key"
        raise Refused(status, f"the server {found}; --api-key-env names the variable that holds it")
    if status in (429, *range(500, 600)):
        raise refused(endpoint, status, body)  # there, but not ready or behind a front that finds nobody
    if not isinstance(value, dict) or not isinstance(value.get("data"), list):
        return None
    names = named_in(value["data"], "id")
    owners = [
        one.get("owned_by") for one in value["data"] if isinstance(one, dict) and one.get("id") in names
    ]
    return names, owners[0] if owners and isinstance(owners[0], str) else ""


def _openai_server(endpoint: Endpoint, owner: str) -> str:
    """``owner`` with its version where it is vLLM, which tells it under ``/version``."""
    value = page(endpoint, "/version") if owner == "vllm" else None
    version = value.get("version") if isinstance(value, dict) else None
    return shown_path(f"{owner} {version}"[:60] if isinstance(version, str) else owner[:60])


def _triton_server(endpoint: Endpoint, model: str) -> str:
    """``vllm`` where Triton's backend of that name has the model, else ``triton``."""
    value = page(endpoint, f"/v2/models/{quote(model, safe='')}/config")
    return "vllm" if isinstance(value, dict) and value.get("backend") == "vllm" else "triton"


def _repository(endpoint: Endpoint) -> list[str]:
    status, body = post(endpoint, "/v2/repository/index", {"ready": True})
    names = named_in(json_value(body) if status == 200 else None, "name")
    if not names:
        raise InputError(Problem("Triton does not say which models it has; --model names one", endpoint.url))
    return names


def _chosen(url: str, wanted: str | None, names: Sequence[str], prefer: str = "") -> str:
    if wanted is not None:
        if wanted in names:
            return wanted
        found = ", ".join(map(shown_path, names[:20])) or "none"
        raise InputError(Problem(f"no model {shown_path(wanted)!r} there; it has: {found}", url))
    if len(names) == 1 or prefer in names:
        return names[0] if len(names) == 1 else prefer
    found = ", ".join(map(shown_path, names[:20])) or "none"
    raise InputError(Problem(f"{len(names)} models there ({found}); --model names one", url))


# --------------------------------------------------------------------------- one request


def ask(
    endpoint: Endpoint,
    chat: Chat,
    *,
    max_tokens: int,
    clock: Callable[[], float],
    due_s: float | None = None,
    params: SamplingParams = GREEDY,
) -> Reply:
    """Ask for an answer and read it piece by piece; a failure is in ``timed.error``. ``clock`` in seconds;
    ``due_s``: when an open loop wanted it sent."""
    sent = clock()
    arrivals: list[float] = []
    state = _State()
    error = ""
    try:
        path, body = openai_body(endpoint, chat, max_tokens, params)
        if endpoint.protocol == "triton":
            path, body = _triton_body(endpoint, chat, max_tokens, params)
        # Triton's LLM API model sends all of the answer so far with every token.
        most = min(_MOST_BYTES + max_tokens * (4096 + 8 * max_tokens), 10**9)
        for event in events(endpoint, path, body, most_bytes=most):
            piece = (_triton_piece if endpoint.protocol == "triton" else _openai_piece)(
                endpoint, event, state
            )
            if piece:
                arrivals.append(clock())
            if len(arrivals) > min(_MOST_PIECES + 4 * max_tokens, 10**6):
                raise Silent(f"an answer of over {len(arrivals) - 1} pieces has no end; gave up")
        marked = endpoint.protocol == "openai" or "return_finish_reason" in endpoint.inputs
        if marked and not state.done and state.finish_reason is None and state.claimed is None:
            error = "the stream ended without an end mark"
        elif state.finish_reason in _BROKEN_OFF:
            error = f"the server broke the answer off ({state.finish_reason})"
    except (Silent, Refused) as failure:
        error = str(failure)
    ended = clock()
    ids = tuple(state.token_ids) if state.has_ids else None
    tokens = state.claimed if state.claimed is not None else None if ids is None else len(ids)
    timed = Timed(chat.id, sent if due_s is None else due_s, sent, tuple(arrivals), ended, tokens, error)
    reply = Reply(timed, state.text, ids, state.finish_reason, state.drafted, state.accepted)
    return replace(
        reply,
        tokens_per_step=state.tokens_per_step,
        answers=max(1, len(state.seen)),
        emitted=tuple(state.emitted) if state.has_ids else None,
        prompt_tokens=state.prompt_tokens,
        prompt_token_ids=state.prompt_token_ids,
    )


def is_refused(error: str) -> bool:
    """Whether a reply's ``error`` is a server's refusal of what was asked, which may take less."""
    return error.startswith(("HTTP 400", "HTTP 422"))


def reply_fields(reply: Reply) -> dict[str, Any]:
    """Of a reply, what it said, as JSON values."""
    return {
        "seconds": reply.timed.ended_s - reply.timed.sent_s,
        "tokens": reply.timed.tokens,
        "error": reply.timed.error,
        "text": reply.text,
        "token_ids": None if reply.token_ids is None else list(reply.token_ids),
        "finish_reason": reply.finish_reason,
        "drafted": reply.drafted,
        "accepted": reply.accepted,
    }


def lost(reply: Reply) -> str:
    """Why no server answered, "" if one did, be it with an HTTP error or an error of its own."""
    return reply.timed.error if reply.timed.error.startswith(NO_SERVER) else ""


def not_asked(chat: Chat, now_s: float, due_s: float | None, why: str) -> Reply:
    """The reply to a request that was not sent, because those before it found no server."""
    error = f"not asked, as those before failed: {why}"
    return Reply(
        Timed(chat.id, now_s if due_s is None else due_s, now_s, (), now_s, None, error), "", None, None
    )


@dataclass
class _State:
    text: str = ""
    done: bool = False
    claimed: int | None = None
    finish_reason: str | None = None
    drafted: int | None = None
    accepted: int | None = None
    tokens_per_step: float | None = None
    has_ids: bool = False
    prompt_tokens: int | None = None
    prompt_token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        self.token_ids: list[int] = []
        self.emitted: list[int] = []
        self.seen: set[int] = set()


def openai_body(
    endpoint: Endpoint, chat: Chat, max_tokens: int, params: SamplingParams
) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {
        "model": endpoint.model,
        "max_tokens": max_tokens,
        "temperature": params.temperature or 0,
        "stream": True,
    }
    body |= {key: value for key, value in _asked(params).items() if value is not None}
    if "stream_options" in endpoint.extras:
        body["stream_options"] = {"include_usage": True}
    if "return_token_ids" in endpoint.extras:
        body["return_token_ids"] = True
    if endpoint.raw:
        return "/v1/completions", {**body, "prompt": chat.text}
    return "/v1/chat/completions", {**body, "messages": list(chat.messages)}


def _openai_piece(endpoint: Endpoint, event: dict[str, Any], state: _State) -> bool:
    if "done" in event and len(event) == 1:
        state.done = True
        return False
    if isinstance(event.get("error"), (dict, str)):
        told = event["error"]
        words = its_words(endpoint, str(told.get("message", told) if isinstance(told, dict) else told))
        raise Silent(words[:200])
    usage = event.get("usage")
    if isinstance(usage, dict):
        state.claimed = _count(usage.get("completion_tokens"), state.claimed)
        state.prompt_tokens = _count(usage.get("prompt_tokens"), state.prompt_tokens)
    choices = event.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return False
    choice = choices[0]
    index = choice.get("index") or 0  # some servers send null
    if isinstance(index, int):
        state.seen.add(index)
    if index != 0:
        return False  # another answer of the same request
    # vLLM: beside the choices of a chat, in the choice of a completion; once, in the first event.
    prompt = _ids(event.get("prompt_token_ids") or choice.get("prompt_token_ids"))
    state.prompt_token_ids = state.prompt_token_ids if prompt is None else tuple(prompt)
    delta = choice.get("delta")
    content = (
        choice.get("text") if endpoint.raw else delta.get("content") if isinstance(delta, dict) else None
    )
    # Servers with a reasoning parser put the first part of what the model wrote elsewhere.
    if not content and isinstance(delta, dict):
        content = delta.get("reasoning_content") or delta.get("reasoning")
    if (ids := _ids(choice.get("token_ids"))) is not None:
        state.has_ids = True
        state.token_ids += ids
        state.emitted += [len(ids)] if ids else []
    if choice.get("finish_reason"):
        state.finish_reason = str(choice["finish_reason"])
    state.tokens_per_step = _per_step(choice.get("avg_decoded_tokens_per_iter"), state.tokens_per_step)
    if not isinstance(content, str) or not content:
        return False
    state.text += content
    return True


def _asked(params: SamplingParams) -> dict[str, Any]:
    """What is sent beside the temperature, by OpenAI's names. A server's own default of top-p would be
    another law, so that is always said when something is drawn."""
    if not params.temperature:
        return {"stop": list(params.stop) or None}
    return {
        "top_p": 1.0 if params.top_p is None else params.top_p,
        "top_k": params.top_k,
        "seed": params.seed,
        "stop": list(params.stop) or None,
        "n": params.n if params.n > 1 else None,
    }


def takes(endpoint: Endpoint, parameter: str) -> bool:
    """Whether requests can carry ``parameter``, a field of :class:`SamplingParams`. OpenAI servers have no
    list of theirs: they are asked."""
    return endpoint.protocol == "openai" or any(name in endpoint.inputs for name in _TRITON[parameter])


_TRITON = {
    "temperature": ("sampling_param_temperature", "temperature"),
    "top_p": ("sampling_param_top_p", "top_p"),
    "top_k": ("sampling_param_top_k", "top_k"),
    "seed": ("sampling_param_seed", "seed", "random_seed"),
    "stop": ("sampling_param_stop", "stop_words"),
    "n": ("sampling_param_n",),
}
"""Inputs of the LLM API's model, and of the C++ backend's."""


def _triton_body(
    endpoint: Endpoint, chat: Chat, max_tokens: int, params: SamplingParams
) -> tuple[str, dict[str, Any]]:
    wanted: dict[str, Any] = {
        "text_input": chat.text,
        "sampling_param_max_tokens": max_tokens,
        "streaming": True,
        "sampling_param_exclude_input_from_output": True,
        "sampling_param_return_perf_metrics": True,
        "return_finish_reason": True,
        # The C++ backend's names for the same; without a temperature both decode greedily.
        "max_tokens": max_tokens,
        "stream": True,
        "top_k": 1,
        "exclude_input_in_output": True,
        "return_perf_metrics": True,
        "return_num_output_tokens": True,
    }
    if params.temperature:
        del wanted["top_k"]
    for key, value in {"temperature": params.temperature or None, **_asked(params)}.items():
        wanted |= dict.fromkeys(_TRITON[key], value) if value is not None else {}
    body = {key: value for key, value in wanted.items() if key in endpoint.inputs}
    return f"/v2/models/{quote(endpoint.model, safe='')}/generate_stream", body


def _triton_piece(endpoint: Endpoint, event: dict[str, Any], state: _State) -> bool:
    if event.get("error"):
        raise Silent(its_words(endpoint, str(event["error"]))[:200])
    for key, name in (
        ("num_output_tokens", "claimed"),
        ("total_draft_tokens", "drafted"),
        ("total_accepted_draft_tokens", "accepted"),
    ):
        setattr(state, name, _count(_first(event.get(key)), getattr(state, name)))
    state.tokens_per_step = _per_step(_first(event.get("acceptance_length")), state.tokens_per_step)
    reason = _first(event.get("finish_reason"))
    if isinstance(reason, str) and reason not in ("", "None"):
        state.finish_reason = reason
    text = _first(event.get("text_output"))
    if not isinstance(text, str) or not text:
        return False
    if "sampling_param_max_tokens" in endpoint.inputs:  # all text so far, by that model's protocol
        if not text.startswith(state.text):
            raise Silent("text_output does not continue what came before it")
        grew, state.text = len(text) > len(state.text), text
        return grew
    state.text += text
    return True


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else value


def _ids(value: Any) -> list[int] | None:
    """Token ids, None for what is no list. Raises Silent for a list of something else: an answer of which
    some ids are missing could be compared with nothing."""
    if not isinstance(value, list):
        return None
    if not all(type(one) is int and 0 <= one < 2**31 for one in value):
        raise Silent("its token_ids are no numbers of tokens")
    return value


def _count(value: Any, otherwise: int | None) -> int | None:
    return min(value, 2**53) if type(value) is int and value >= 0 else otherwise


def _per_step(value: Any, otherwise: float | None) -> float | None:
    """Tokens a step: at least one, and no more than anything drafts."""
    return float(value) if type(value) in (int, float) and 1 - 1e-6 <= value <= 1e6 else otherwise
