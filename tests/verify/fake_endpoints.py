"""Real HTTP servers that speak the two protocols, with a model that is a hash, and faults to plant."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import fake_sampling

_CHUNK = {"object": "chat.completion.chunk"}
WORDS = ("ash", "bay", "cove", "dune", "elm", "fen", "glen", "holt")


@dataclass(frozen=True)
class Fake:
    """``protocol``: openai, llmapi or ensemble. ``per_step``: tokens that a step emits. Faults: ``lossy``
    answers otherwise, ``short`` drops the last token, ``inflate`` claims so many tokens more, ``noise`` makes
    answers under load differ, ``refuse`` names request keys that are a 400, ``silent`` does not answer."""

    protocol: str = "openai"
    per_step: int = 1
    step_s: float = 0.001
    ids: bool = True
    usage: bool = True
    counters: bool = False
    lossy: bool = False
    short: bool = False
    inflate: int = 0
    noise: bool = False
    refuse: tuple[str, ...] = ()
    silent: bool = False
    failing: bool = False
    serial: bool = False
    """One request at a time, so that an open loop can be too much."""
    garbage: bool = False
    key: str = ""
    margin: float | None = None
    """Of every token, in nats; None: a server without logprobs."""
    alone_too: bool = False
    """Whether ``noise`` strikes every answer."""
    scores: bool = False
    """Whether completions with ``echo`` tell log-probabilities."""
    wrong: float = 0.0
    """Share of questions ("say WORD", a choice of "good", a secret number) that are answered wrongly."""
    blur: float = 1.0
    """Factor of every log-probability of a text."""
    stuck: float = 0.0
    """Share of prompts to which the same word comes for ever."""
    sampler: str = "plain"
    """How :mod:`fake_sampling` draws."""
    ignores: tuple[str, ...] = ()
    """Sampling parameters, by OpenAI's names, that change nothing."""
    drafts_on: str = ""
    """Only prompts that hold it are drafted for; elsewhere it is a plain server."""
    dies_after: int | None = None
    """Requests after which it closes every connection."""


answer = fake_sampling.greedy


def spell(tokens: list[int]) -> str:
    """Tokens beyond the words are numbers."""
    return "".join(f" {WORDS[token] if token < len(WORDS) else token}" for token in tokens)


def _share(*parts: str) -> float:
    """A number in [0, 1) that follows from ``parts``."""
    return int.from_bytes(hashlib.sha256("|".join(parts).encode()).digest()[:4], "big") / 2**32


def _told(fake: Fake, prompt: str, tokens: list[int]) -> list[int]:
    """The answer of a server that was asked something, or is stuck."""
    if _share("stuck", prompt) < fake.stuck:
        return tokens[:1] * len(tokens)
    wrong = _share("wrong", prompt) < fake.wrong
    if found := re.search(rf"say ({'|'.join(WORDS)})\b", prompt):
        return [(WORDS.index(found[1]) + wrong) % len(WORDS), *tokens[1:]]
    if found := re.search(r"secret number of the (\w+).*secret number of the \1", prompt, re.DOTALL):
        hidden = re.search(rf"secret number of the {found[1]} is (\d+)\.", prompt)
        return [int(hidden[1] if hidden else 0) + wrong, *tokens[1:]]
    return tokens


def _echo(fake: Fake, prompt: str) -> dict[str, Any]:
    """A completion that repeats its prompt, as vLLM does, and one token more."""
    spelled = [*re.findall(r"\s*\S+|\s+", prompt), " ash"]
    logprobs: list[float | None] = [None]
    for number, token in enumerate(spelled[1:], start=1):
        value = -0.2 - 3 * _share("".join(spelled[:number]), token)
        if token.endswith("good"):
            value = -9.0 if _share("wrong", prompt) < fake.wrong else -0.1
        logprobs.append(value * fake.blur)
    tops = [None if one is None else {token: one} for token, one in zip(spelled, logprobs, strict=True)]
    told = {"tokens": spelled, "token_logprobs": logprobs, "top_logprobs": tops}
    usage = {"prompt_tokens": len(spelled) - 1, "completion_tokens": 1}
    return {"choices": [{"index": 0, "text": "".join(spelled), "logprobs": told}], "usage": usage}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, fake: Fake) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.fake, self.lock, self.busy, self.active = fake, threading.Lock(), threading.Lock(), 0
        self.asked = self.drafts = self.drafted = self.accepted = self.generated = 0


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def log_message(self, *_: Any) -> None:
        pass

    def _send(self, status: int, value: Any, kind: str = "application/json") -> None:
        body = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        fake, path = self.server.fake, self.path
        if fake.key and self.headers.get("Authorization") != f"Bearer {fake.key}":
            return self._send(401, {"error": "no key"})
        if fake.protocol == "openai" and path == "/v1/models":
            return self._send(200, {"data": [{"id": "hash"}]})
        if fake.protocol == "openai" and path == "/metrics" and fake.counters:
            server = self.server
            lines = [
                f'vllm:spec_decode_num_drafts_total{{model_name="hash"}} {float(server.drafts)}',
                f'vllm:spec_decode_num_draft_tokens_total{{model_name="hash"}} {float(server.drafted)}',
                f'vllm:spec_decode_num_accepted_tokens_total{{model_name="hash"}} {float(server.accepted)}',
                f'vllm:generation_tokens_total{{model_name="hash"}} {float(server.generated)}',
            ]
            return self._send(200, "\n".join(lines) + "\n", "text/plain")
        if fake.protocol != "openai" and path == "/v2/health/ready":
            return self._send(200, {})
        if fake.protocol != "openai" and path == "/v2/models/hash":
            names = ["text_input", "max_tokens", "stream", "top_k", "return_num_output_tokens"]
            if fake.protocol == "llmapi":
                names = ["text_input", "sampling_param_max_tokens", "streaming", "return_finish_reason"]
                names += [
                    f"sampling_param_{name}" for name in ("temperature", "top_k", "top_p", "seed", "stop")
                ]
            return self._send(200, {"inputs": [{"name": name} for name in names]})
        return self._send(404, {"error": "no such path"})

    def do_POST(self) -> None:
        fake = self.server.fake
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v2/repository/index":
            return self._send(200, [{"name": "hash", "state": "READY"}])
        self.server.asked += 1
        if fake.dies_after is not None and self.server.asked > fake.dies_after:
            self.close_connection = True
            return None
        if any(key in body for key in fake.refuse):
            return self._send(400, {"error": {"message": f"unknown field {fake.refuse[0]}"}})
        if body.get("echo"):
            if not fake.scores:
                return self._send(400, {"error": {"message": "echo is not supported"}})
            return self._send(200, _echo(fake, body["prompt"]))
        if "prompt" in body and not body.get("stream"):
            tokens = _told(fake, str(body["prompt"]), answer(str(body["prompt"]), body["max_tokens"]))
            return self._send(200, {"choices": [{"index": 0, "text": spell(tokens)}]})
        if "top_logprobs" in body:
            return self._send(*self._with_margins(body))
        if fake.silent:
            time.sleep(2)
        if fake.failing and self.server.generated > 40:
            return self._send(503, {"error": "too busy"})
        with self.server.lock:
            self.server.active += 1
        with self.server.busy if fake.serial else nullcontext():
            return self._stream(body)

    def _with_margins(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self.server.fake.margin is None:
            return 400, {"error": "no logprobs here"}
        tops = [{"logprob": -0.1}, {"logprob": -0.1 - self.server.fake.margin}]
        tokens = answer(json.dumps(body["messages"]), body["max_tokens"])
        content = [{"token": spell([token]), "top_logprobs": tops} for token in tokens]
        return 200, {"choices": [{"logprobs": {"content": content}}]}

    def _stream(self, body: dict[str, Any]) -> None:
        fake, openai = self.server.fake, self.server.fake.protocol == "openai"
        count = body.get("max_tokens") or body.get("sampling_param_max_tokens")
        prompt = body.get("prompt") or body.get("text_input") or json.dumps(body.get("messages"))
        if fake.drafts_on not in prompt:
            fake = replace(fake, per_step=1, sampler="plain")
        if "max_tokens" in fake.ignores:
            count = 16
        tokens = _told(fake, prompt, fake_sampling.answer(fake.sampler, fake.ignores, prompt, count, body))
        stops = body.get("stop") or body.get("sampling_param_stop")
        if stops and "stop" not in fake.ignores:
            tokens = tokens[: next((at for at, one in enumerate(tokens) if WORDS[one] in stops), count)]
        if fake.lossy:
            at = count // 2
            tokens = [*tokens[:at], *((token + 1) % len(WORDS) for token in tokens[at:])]
        if fake.noise and (fake.alone_too or self.server.active > 1):
            tokens[-1] = (tokens[-1] + 1) % len(WORDS)
        if fake.short:
            tokens = tokens[:-1]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if fake.garbage:
            self.wfile.write(b"data: {not json\n\n")
            return
        so_far = ""
        for start in range(0, len(tokens), fake.per_step):
            time.sleep(fake.step_s)
            piece = tokens[start : start + fake.per_step]
            so_far += spell(piece)
            last = start + fake.per_step >= len(tokens)
            if last:  # before the client can send another
                with self.server.lock:
                    self.server.active -= 1
            self._event(self._piece(fake, body, piece, so_far, last, len(tokens)))
            with self.server.lock:
                self.server.drafts += fake.per_step > 1
                self.server.drafted += fake.per_step if fake.per_step > 1 else 0
                self.server.accepted += len(piece) - 1
                self.server.generated += len(piece)
        if openai:
            if body.get("n", 1) > 1 and "n" not in fake.ignores:
                self._event({**_CHUNK, "choices": [{"index": 1, "delta": {"content": " ash"}}]})
            if fake.usage and body.get("stream_options"):
                usage = {"completion_tokens": len(tokens) + fake.inflate}
                self._event({**_CHUNK, "choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")

    def _piece(
        self, fake: Fake, body: dict[str, Any], piece: list[int], so_far: str, last: bool, count: int
    ) -> dict[str, Any]:
        if fake.protocol == "openai":
            choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if last else None}
            choice |= {"text": spell(piece)} if "prompt" in body else {"delta": {"content": spell(piece)}}
            if fake.ids and body.get("return_token_ids"):
                choice["token_ids"] = piece
            return {**_CHUNK, "choices": [choice]}
        if fake.protocol == "llmapi":
            found: dict[str, Any] = {"model_name": "hash", "text_output": so_far}
            if last:
                found |= {"num_output_tokens": count + fake.inflate, "finish_reason": "length"}
                found |= {"acceptance_length": count / -(-count // fake.per_step)}
                steps = -(-count // fake.per_step)
                found |= {"total_draft_tokens": steps * (fake.per_step - 1)}
                found |= {"total_accepted_draft_tokens": count - steps}
            return found
        return {"text_output": spell(piece), "num_output_tokens": count + fake.inflate}

    def _event(self, value: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
        self.wfile.flush()


@contextmanager
def serving(*fakes: Fake) -> Iterator[list[str]]:
    """The URLs of servers of ``fakes`` while the block runs."""
    servers = [_Server(fake) for fake in fakes]
    for server in servers:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield [f"http://127.0.0.1:{server.server_address[1]}" for server in servers]
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
