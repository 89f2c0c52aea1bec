"""HTTP for endpoints: one request a connection, streams of server-sent events, one-line errors.

Whatever a server does, a request ends: ``timeout_s`` without a byte, a deadline for the whole exchange (a
time-out of the socket alone starts again with every byte), and a bound on what is read.
"""

from __future__ import annotations

import errno
import http.client
import io
import json
import re
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import quote, urlsplit

from trtspec.errors import InputError, Problem
from trtspec.user_files import parse_json, shown_path

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

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


def refused(endpoint: Place, status: int, body: bytes) -> Refused:
    """The error of an answer that is no success, with the server's own reason."""
    return Refused(status, _reason(endpoint, body))


class Silent(Exception):
    """Nothing came, or what came is not the protocol."""


class _Limits(NamedTuple):
    """Of an exchange: seconds without a byte, seconds in all, and when they are over."""

    timeout_s: float
    seconds: float
    deadline: float


class _Late(OSError):
    """Something came all the time, and no end."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"an answer took over {seconds:g} s; gave up")


class _Reader(io.RawIOBase):
    """What ``raw`` reads from ``sock``, within limits."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, limits: _Limits) -> None:
        self._raw, self._sock, self._limits = raw, sock, limits

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int | None:
        limits = self._limits
        left = limits.deadline - time.monotonic()
        if left <= 0:
            raise _Late(limits.seconds)
        self._sock.settimeout(min(limits.timeout_s, left))
        try:
            return self._raw.readinto(buffer)  # type: ignore[attr-defined,no-any-return]
        except TimeoutError:
            if left < limits.timeout_s:
                raise _Late(limits.seconds) from None
            raise

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """A response that keeps to ``limits``, and may come after any number of 1xx ones."""

    def __init__(self, sock: socket.socket, *args: Any, limits: _Limits, **named: Any) -> None:
        super().__init__(sock, *args, **named)
        self.fp = io.BufferedReader(_Reader(self.fp.detach(), sock, limits))  # type: ignore[attr-defined]

    def _read_status(self) -> tuple[str, int, str]:
        version, status, reason = super()._read_status()  # type: ignore[misc]
        # http.client passes over 100 alone and takes others, as 103 "early hints", for the answer.
        return version, 100 if 102 <= status < 200 else status, reason


def parts_of(url: str) -> tuple[str, int, str, bool]:
    """Host, port, path without a last ``/v1``, and whether TLS is spoken. Raises InputError for a URL that
    cannot be asked; secrets in it are not repeated."""
    shown = shown_path(without_secrets(url))
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
        (host or "").encode("idna")
    except ValueError as error:  # UnicodeError among them
        why = (
            "a name in it is empty or too long"
            if isinstance(error, UnicodeError)
            else without_secrets(str(error))
        )
        raise InputError(Problem(f"not a URL: {why}", shown)) from None
    if (
        parts.scheme not in ("http", "https")
        or not host
        or parts.query
        or parts.fragment
        or "@" in parts.netloc
    ):
        message = "give http://HOST:PORT or https://HOST:PORT, maybe with a path; no user, query or fragment"
        raise InputError(Problem(message, shown))
    if any(not c.isprintable() or c.isspace() for c in url):
        raise InputError(Problem("a URL holds no spaces or control characters", shown))
    path = quote(parts.path.rstrip("/"), safe="/%:;=,@!$&'()*+~")
    tls = parts.scheme == "https"
    return host, port if port is not None else 443 if tls else 80, path.removesuffix("/v1"), tls


def _opened(endpoint: Place, seconds: float) -> http.client.HTTPConnection:
    """A connection whose exchange ends ``seconds`` from now."""
    if endpoint.tls:
        context = ssl.create_default_context()
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            endpoint.host, endpoint.port, timeout=endpoint.timeout_s, context=context
        )
    else:
        connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=endpoint.timeout_s)
    limits = _Limits(endpoint.timeout_s, seconds, time.monotonic() + seconds)
    connection.response_class = partial(_Response, limits=limits)  # type: ignore[assignment]
    return connection


def _headers(endpoint: Place) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"}
    if endpoint.api_key:
        headers["Authorization"] = f"Bearer {endpoint.api_key}"
    return headers


def get(endpoint: Place, path: str) -> tuple[int, bytes]:
    """Status and body of a page that is there at once, so that it has ``timeout_s`` in all. Raises Silent,
    Refused for a redirect."""
    return _exchange(endpoint, "GET", path, None, endpoint.timeout_s)


def page(endpoint: Place, path: str) -> Any:
    """The JSON value of a page that some servers have, and fronts before them do not; None without it."""
    try:
        status, body = get(endpoint, path)
    except (Silent, Refused):
        return None
    return json_value(body) if status == 200 else None


def post(endpoint: Place, path: str, body: object) -> tuple[int, bytes]:
    """Status and body of an answer that may take 20 times ``timeout_s``. Raises Silent, Refused for a
    redirect."""
    return _exchange(endpoint, "POST", path, body, _PATIENCE * endpoint.timeout_s)


def _exchange(endpoint: Place, method: str, path: str, body: object, seconds: float) -> tuple[int, bytes]:
    with closing(_opened(endpoint, seconds)) as connection:
        response = _response(endpoint, connection, method, path, body)
        try:
            content = response.read(_MAX_BODY + 1)
            if response.length and len(content) <= _MAX_BODY:
                raise http.client.IncompleteRead(content)
        except _FAILURES as error:
            raise Silent(_why(endpoint, error)) from None
    if len(content) > _MAX_BODY:
        raise Silent(f"its answer to {path} is longer than {_MAX_BODY / 1e6:g} MB")
    return response.status, content


def _response(
    endpoint: Place, connection: http.client.HTTPConnection, method: str, path: str, body: object
) -> http.client.HTTPResponse:
    content = None if body is None else json.dumps(body).encode()
    try:
        connection.request(method, endpoint.prefix + path, content, _headers(endpoint))
        response = connection.getresponse()
    except _FAILURES as error:
        raise Silent(_why(endpoint, error)) from None
    if 300 <= response.status < 400:
        place = without_secrets(its_words(endpoint, response.getheader("Location") or "nowhere"))
        raise Refused(response.status, f"it redirects to {place[:150]}, which is not followed; give that URL")
    coding = response.getheader("Content-Encoding") or "identity"
    if coding.lower() != "identity":
        raise Silent(
            f"its answers are compressed ({its_words(endpoint, coding)[:40]}), which was not asked for"
        )
    return response


def events(
    endpoint: Place, path: str, body: Mapping[str, Any], *, most_bytes: int = _MAX_BODY
) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events; ``{"done": True}`` for its end mark.

    Raises Silent, also for a stream of more than ``most_bytes``, and Refused."""
    with closing(_opened(endpoint, _PATIENCE * endpoint.timeout_s)) as connection:
        response = _response(endpoint, connection, "POST", path, body)
        try:
            if response.status != 200:
                raise refused(endpoint, response.status, response.read(65_536))
            came, seen, lines = 0, False, list[bytes]()
            while line := response.readline(_MAX_LINE):
                came += len(line)
                if came > most_bytes:
                    raise Silent(f"an answer of over {most_bytes / 1e6:.0f} MB has no end; gave up")
                if len(line) == _MAX_LINE:
                    raise Silent(f"a piece of the stream is longer than {_MAX_LINE / 1e6:g} MB")
                if line.startswith(b"data:"):
                    lines.append(line[5:].strip())
                    seen = True
                elif line.strip():
                    continue
                # An event ends with an empty line. Most have one line of data, and some servers send no
                # empty ones, so a first line that is an object is all of it.
                ended = not line.strip()
                if not lines or (len(lines) > 1 and not ended):
                    continue
                text = b"\n".join(lines)
                if text == b"[DONE]":
                    yield {"done": True}
                    return
                value = json_value(text)
                if isinstance(value, dict):
                    lines = []
                    yield value
                elif ended:
                    raise Silent(f"a piece of the stream is no JSON object: {_shown(endpoint, text)}")
            if lines:
                raise Silent(f"a piece of the stream is no JSON object: {_shown(endpoint, lines[0])}")
            if response.length:
                raise http.client.IncompleteRead(b"")
            kind = response.getheader("Content-Type") or "of no type"
            if not seen and not kind.startswith("text/event-stream"):
                raise Silent(
                    f"its answer is no stream of server-sent events but {its_words(endpoint, kind)[:60]}"
                )
        except _FAILURES as error:
            raise Silent(_why(endpoint, error)) from None


NO_SERVER = (
    "nothing answers there", "no answer for", "the server closed the connection", "an answer of over",
    "an answer took over",
)  # fmt: skip
"""How the errors begin that say that nobody answered, or without end."""

_FAILURES = (OSError, http.client.HTTPException, ValueError, OverflowError)
"""What http.client raises: the last two where lengths or chunk sizes are no sizes."""


_CLOSED = (
    http.client.IncompleteRead, http.client.RemoteDisconnected, ConnectionError, ssl.SSLEOFError,
    ssl.SSLZeroReturnError,
)  # fmt: skip


def _why(endpoint: Place, error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "nothing answers there; start the server, or check the URL"
    if isinstance(error, _Late):
        return str(error)
    if isinstance(error, TimeoutError):
        return f"no answer for {endpoint.timeout_s:g} s; gave up (--timeout)"
    if isinstance(error, _CLOSED):
        return "the server closed the connection before its answer was complete: it stopped or died"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted here: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"no TLS connection ({error.reason or 'broken off'}); if it speaks plain HTTP, say http://"
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return "this machine has no more file handles for connections; lower --concurrency or raise ulimit -n"
    if isinstance(error, (http.client.HTTPException, ValueError, OverflowError)):
        return f"what answers there does not speak HTTP as expected ({type(error).__name__})"
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def _reason(endpoint: Place, body: bytes) -> str:
    """A server's reason out of its error body."""
    told: Any = json_value(body)
    for key in ("error", "message", "detail"):
        if isinstance(told, dict) and key in told:
            told = told[key]
    return its_words(endpoint, told if isinstance(told, str) else body.decode("utf-8", "replace"))


def its_words(endpoint: Place, text: str) -> str:
    """What a server says of itself, on one line, without the key: some repeat it in their refusal."""
    return one_line(text.replace(endpoint.api_key, "***") if endpoint.api_key else text)


def one_line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def without_secrets(url: str) -> str:
    """``url`` for a message: what stands before an @ or after a ? may be nobody's business."""
    return re.sub(r"\?.*", "?***", re.sub(r"(^|//)[^/?#]*@", r"\1***@", url), flags=re.DOTALL)


def _shown(endpoint: Place, piece: bytes) -> str:
    return repr(its_words(endpoint, piece[:200].decode("utf-8", "replace"))[:60])


def json_value(text: bytes) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return None


def named_in(values: object, key: str) -> list[str]:
    """The names in a server's list of objects, each once; what is no such list has none."""
    found = [one.get(key) for one in values if isinstance(one, dict)] if isinstance(values, list) else []
    return list(dict.fromkeys(one for one in found if isinstance(one, str)))
