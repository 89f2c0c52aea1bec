"""HTTP for endpoints: one request a connection, streams of server-sent events, one-line errors."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any, Protocol

from trtspec.user_files import parse_json

_MAX_LINE = 4_000_000
_MAX_BODY = 16_000_000
_PATIENCE = 20


class Place(Protocol):
    """Where to ask."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def prefix(self) -> str: ...
    @property
    def tls(self) -> bool: ...
    @property
    def timeout_s(self) -> float: ...
    @property
    def api_key(self) -> str | None: ...


class Refused(Exception):
    """The server answered with an HTTP status that is no success."""

    def __init__(self, status: int, body: str) -> None:
        self.status = status
        super().__init__(f"HTTP {status}: {body[:200] or 'no reason given'}")


def refused(status: int, body: bytes) -> Refused:
    """The error of an answer that is no success, with the server's own reason."""
    return Refused(status, _reason(body))


class Silent(Exception):
    """Nothing came, or what came is not the protocol."""


def opened(endpoint: Place) -> http.client.HTTPConnection:
    if endpoint.tls:
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(
            endpoint.host, endpoint.port, timeout=endpoint.timeout_s, context=context
        )
    return http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=endpoint.timeout_s)


def _headers(endpoint: Place) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"}
    if endpoint.api_key:
        headers["Authorization"] = f"Bearer {endpoint.api_key}"
    return headers


def get(endpoint: Place, path: str) -> tuple[int, bytes]:
    with closing(opened(endpoint)) as connection:
        return exchange(endpoint, connection, "GET", path, None)


def exchange(
    endpoint: Place, connection: http.client.HTTPConnection, method: str, path: str, body: object
) -> tuple[int, bytes]:
    response = _response(endpoint, connection, method, path, body)
    try:
        return response.status, response.read(_MAX_BODY)
    except (OSError, http.client.HTTPException) as error:
        raise Silent(_why(endpoint, error)) from None


def _response(
    endpoint: Place, connection: http.client.HTTPConnection, method: str, path: str, body: object
) -> http.client.HTTPResponse:
    content = None if body is None else json.dumps(body).encode()
    try:
        connection.request(method, endpoint.prefix + path, content, _headers(endpoint))
        return connection.getresponse()
    except (OSError, http.client.HTTPException) as error:
        raise Silent(_why(endpoint, error)) from None


def events(endpoint: Place, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events; ``{"done": True}`` for its end mark."""
    deadline = time.monotonic() + _PATIENCE * endpoint.timeout_s
    with closing(opened(endpoint)) as connection:
        response = _response(endpoint, connection, "POST", path, body)
        try:
            if response.status != 200:
                raise Refused(response.status, _reason(response.read(65_536)))
            while line := response.readline(_MAX_LINE):
                if time.monotonic() > deadline:
                    raise Silent(f"an answer took over {_PATIENCE * endpoint.timeout_s:g} s; gave up")
                if not line.startswith(b"data:"):
                    continue
                text = line[5:].strip()
                if text == b"[DONE]":
                    yield {"done": True}
                    return
                value = json_value(text)
                if not isinstance(value, dict):
                    raise Silent("a piece of the stream is no JSON object")
                yield value
        except (OSError, http.client.HTTPException) as error:
            raise Silent(_why(endpoint, error)) from None


NO_SERVER = ("nothing answers there", "no answer for", "the server closed the connection")
"""How the errors begin that say that nobody answered."""


def _why(endpoint: Place, error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "nothing answers there; start the server, or check the URL"
    if isinstance(error, TimeoutError):
        return f"no answer for {endpoint.timeout_s:g} s; gave up (--timeout)"
    if isinstance(error, (http.client.IncompleteRead, http.client.RemoteDisconnected, ConnectionError)):
        return "the server closed the connection before its answer was complete: it stopped or died"
    if isinstance(error, http.client.HTTPException):
        return f"what answers there does not speak HTTP as expected ({type(error).__name__})"
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def _reason(body: bytes) -> str:
    """A server's reason out of its error body, on one line."""
    value = json_value(body)
    told: Any = value
    for key in ("error", "message", "detail"):
        if isinstance(told, dict) and key in told:
            told = told[key]
    text = told if isinstance(told, str) else body.decode("utf-8", "replace")
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def json_value(text: bytes) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return None
