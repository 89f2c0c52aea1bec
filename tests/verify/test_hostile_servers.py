"""Servers that drip, never end, break HTTP or answer nonsense: requests end, and say why on one true line."""

from __future__ import annotations

import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from trtspec.cli import main
from trtspec.errors import InputError, MissingError, TrtspecError
from trtspec.prompts import Chat
from trtspec.verify.arrivals import closed_loop
from trtspec.verify.endpoint import Endpoint, Reply, ask, connect
from trtspec.verify.endpoint_margins import margins
from trtspec.verify.http_stream import parts_of, without_secrets
from trtspec.verify.prompt_scores import why_no_scores
from trtspec.verify.server_counters import draft_counters, grown

CHAT = Chat("one", ({"role": "user", "content": "hello"},))
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
MODELS = b'{"data": [{"id": "m"}]}'
Write = Callable[[bytes], None]


def page(body: bytes, status: str = "200 OK", head: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{head}\r\n".encode() + body


@contextmanager
def server(**said: bytes | Callable[[Write], None]) -> Iterator[str]:
    """A URL whose paths (``models``, ``completions``, ``metrics``; the last part of each) answer with these
    bytes, or as a function writes them; what is not named is a 404."""
    told = {"models": page(MODELS), **said}

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            if self.rfile.peek(1)[:1] == b"\x16":  # a TLS handshake
                self.wfile.write(page(b"", "400 Bad Request"))
                return
            path = self.rfile.readline().split()[1].decode().rstrip("/").rpartition("/")[2]
            length = 0
            while (line := self.rfile.readline().strip().lower()) != b"":
                length = int(line[15:]) if line.startswith(b"content-length:") else length
            self.rfile.read(length)
            script = told.get(path, page(b"", "404 Not Found"))
            try:
                if callable(script):
                    script(self.wfile.write)
                else:
                    self.wfile.write(script)
            except OSError:
                pass  # the client has gone

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads, allow_reuse_address = True, True

    with Server(("127.0.0.1", 0), Handler) as one:
        threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield f"http://127.0.0.1:{one.server_address[1]}"
        one.shutdown()


def drip(head: bytes, unit: bytes) -> Callable[[Write], None]:
    def write(out: Write) -> None:
        out(head)
        while True:
            out(unit)
            time.sleep(0.01)

    return write


def event(content: str, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": None, **more}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def asked(said: bytes | Callable[[Write], None], timeout_s: float = 2.0, **more: Any) -> Reply:
    with server(completions=said) as url:
        return ask(there(url, timeout_s, **more), CHAT, max_tokens=8, clock=time.perf_counter)


def there(url: str, timeout_s: float = 2.0, **more: Any) -> Endpoint:
    return connect(url, timeout_s=timeout_s, **more)


def refusal(said: bytes | Callable[[Write], None], timeout_s: float = 0.3) -> str:
    with server(models=said) as url, pytest.raises(TrtspecError) as caught:
        connect(url, timeout_s=timeout_s)
    assert "\n" not in str(caught.value)
    return str(caught.value)


DRIPS = [
    (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b" "),
    (b"HTTP/1.1 200 OK\r\nX-A: ", b"a"),
    (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
]


@pytest.mark.parametrize(("head", "unit"), DRIPS)
def test_a_page_that_drips_ends_in_time(head: bytes, unit: bytes):
    began = time.monotonic()
    assert "an answer took over 0.3 s" in refusal(drip(head, unit))
    with server(metrics=drip(head, unit)) as url:
        assert draft_counters(there(url, 0.3)) is None
    assert time.monotonic() - began < 10


def test_a_line_that_drips_and_comments_without_end_end_in_time():
    began = time.monotonic()
    scripts = [drip(OK + b"data: {", b"x"), drip(OK, b": ping\n\n"), drip(OK, b"\n")]
    replies = closed_loop(lambda number, _: asked(scripts[number], timeout_s=0.1), 3, 3)
    assert [reply.timed.error for reply in replies] == ["an answer took over 2 s; gave up"] * 3
    assert time.monotonic() - began < 10


def test_an_answer_without_end_is_left():
    def flood(piece: bytes) -> Callable[[Write], None]:
        def write(out: Write) -> None:
            out(OK)
            while True:
                out(piece * 1000)

        return write

    assert "pieces has no end" in asked(flood(event(" a"))).timed.error
    assert "MB has no end" in asked(flood(event("", filler="x" * 20_000))).timed.error


def test_odd_but_honest_streams_are_read():
    text = event("he") + event("llo", finish_reason="stop") + b"data: [DONE]\n\n"
    in_lines = b"".join(
        b"".join(
            b"data:" + line + b"\r\n"
            for line in json.dumps(json.loads(one[6:]), indent=1).encode().split(b"\n")
        )
        + b"\r\n"
        for one in (event("he"), event("llo", finish_reason="stop"))
    )
    streams = [
        text,
        text.replace(b"\n", b"\r\n"),
        text.replace(b"data: ", b"data:"),
        text.replace(b"data: ", b": ping\n\nevent: message\nid: 3\ndata: "),
        text.replace(b"\n\n", b"\n"),
        text.replace(b"data: [DONE]\n\n", b""),
        text.replace(b'"index": 0', b'"index": null'),
        in_lines,
    ]
    for stream in streams:
        reply = asked(OK + stream)
        assert (reply.text, reply.timed.error) == ("hello", ""), stream
    assert asked(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + OK + text).text == "hello"


BROKEN = [
    (OK + b"data: {not json\n\n", "a piece of the stream is no JSON object: '{not json'"),
    (OK + b'data: {"a":\ndata: \xff}\n\n', "a piece of the stream is no JSON object"),
    (OK + event("a"), "the stream ended without an end mark"),
    (OK + event("a", finish_reason="abort") + b"data: [DONE]\n\n", "broke the answer off (abort)"),
    (OK + event("a", token_ids=[1, -2]), "its token_ids are no numbers of tokens"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n" + event("a"), "the server closed the connection"),
    (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffffffffff\r\ndata: {}\n\n",
        "does not speak HTTP as expected (OverflowError)",
    ),
    (page(b"<html>", head="Content-Type: text/html\r\n"), "no stream of server-sent events but text/html"),
    (
        page(b"", "307 Temporary Redirect", "Location: http://me:pw@h/?k=s3\r\n"),
        "redirects to http://***@h/?***,",
    ),
    (page(b"x", head="Content-Encoding: gzip\r\n"), "compressed (gzip)"),
    (page(b'{"error": {"message": "a\\nb \\u001b[31m"}}', "500 Oops"), "HTTP 500: a b [31m"),
    (OK + b'data: {"error": {"message": "a\\nb \\u001b[31m"}}\n\n', "a b [31m"),
]


@pytest.mark.parametrize(("said", "error"), BROKEN)
def test_what_is_broken_is_an_error_on_one_line(said: bytes, error: str):
    found = asked(said).timed.error
    assert error in found
    assert found.isprintable()


def test_pages_that_are_no_list_of_models():
    moved = page(b"", "301 Moved", "Location: https://elsewhere.example/v1/models\r\n")
    assert "it redirects to https://elsewhere.example/v1/models" in refusal(moved)
    assert "longer than 16 MB" in refusal(page(b" " * 17_000_000), 3.0)
    assert "closed the connection" in refusal(
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999999\r\n\r\n{}"
    )
    assert "neither a list of models" in refusal(page(b"[" * 100_000))
    assert "/v2/health/ready gives HTTP 404" in refusal(page(b"", "404 Not Found"))
    for names, wanted in (
        ('[{"id": "m"}, {"id": "m"}, {"id": null}, 7]', "m"),
        ('[{"id": "a/b \\u2603"}]', "a/b ☃"),
    ):
        with server(models=page(f'{{"data": {names}}}'.encode())) as url:
            assert there(url).model == wanted


def test_triton_that_lists_nonsense_has_no_models():
    with server(models=page(b"", "404 No"), ready=page(b"{}"), index=page(b"5")) as url:
        with pytest.raises(InputError, match="does not say which models"):
            connect(url)
        with pytest.raises(InputError, match="no model 'x' there"):
            connect(url, model="x", protocol="triton")
    nonsense = {"models": page(b"", "404 No"), "ready": page(b"{}"), "x": page(b'{"inputs": 5}')}
    with server(**nonsense) as url, pytest.raises(InputError, match="takes nothing"):
        connect(url, model="x")


def test_an_answer_of_triton_that_breaks_off_is_no_answer():
    inputs = ("text_input", "sampling_param_max_tokens", "return_finish_reason")
    model = page(json.dumps({"inputs": [{"name": one} for one in inputs]}).encode())
    for last, error in ((b"", "the stream ended without an end mark"), (b', "finish_reason": "length"', "")):
        stream = OK + b'data: {"text_output": "hello", "error": null' + last + b"}\n\n"
        with server(models=page(b"", "404 No"), ready=page(b"{}"), x=model, generate_stream=stream) as url:
            reply = ask(there(url, model="x"), CHAT, max_tokens=8, clock=time.perf_counter)
        assert (reply.text, reply.timed.error) == ("hello", error)


def test_a_page_of_vllm_that_hangs_costs_its_version_only():
    models = page(b'{"data": [{"id": "m", "owned_by": "vllm"}]}')
    with server(models=models, version=lambda _: time.sleep(1)) as url:
        assert there(url, 0.2).server == "vllm"


def test_the_key_is_repeated_by_nobody():
    echo = page(b'{"error": {"message": "bad key Bearer sk-secret"}}', "401 No")
    assert asked(echo, api_key="sk-secret").timed.error == "HTTP 401: bad key Bearer ***"
    for key in ("sk-a\n", "sk-ключ"):
        with pytest.raises(InputError, match="no header can carry it") as caught:
            connect("http://127.0.0.1:1", api_key=key)
        assert "sk-" not in str(caught.value)


@pytest.mark.parametrize(
    ("named", "shown"), [("NO_SUCH_KEY", True), ("sk-secret", False), ("hf_secret", False)]
)
def test_a_key_given_for_its_name_is_not_repeated(
    named: str, shown: bool, capsys: pytest.CaptureFixture[str]
):
    code = main(["verify", "--url", "http://127.0.0.1:1", "--baseline-url", "h:2", "--api-key-env", named])
    said = capsys.readouterr().err
    assert (code, named in said) == (2, shown)
    assert "is not set; put the endpoint's key there" in said


@pytest.mark.parametrize(
    "url",
    [
        "http://me:s3cret@h:1", "http://:s3cret@h:1", "h:1/v1?key=s3cret", "http://me:s3cret@[h",
        "http://a..b", f"http://{'a' * 70}.x",
    ],
)  # fmt: skip
def test_urls_that_cannot_be_asked_keep_their_secrets(url: str):
    with pytest.raises(InputError) as caught:
        parts_of(url)
    assert "s3cret" not in str(caught.value)


def test_urls_that_can():
    assert parts_of("http://[::1]:80/v1/") == ("::1", 80, "", False)
    assert parts_of("https://h/ö/a%20b") == ("h", 443, "/%C3%B6/a%20b", True)
    assert parts_of("h:0") == ("h", 0, "", False)
    assert without_secrets("see http://a@b/c?d#e") == "see http://***@b/c?***"


def test_counters_that_are_no_numbers_are_none():
    def told(value: str) -> dict[str, float] | None:
        with server(metrics=page(f"vllm:generation_tokens_total {value}\n".encode())) as url:
            return draft_counters(there(url))

    assert told("5.0") == {"generated": 5.0, "drafts": 0.0, "drafted": 0.0, "accepted": 0.0}
    assert [told(value) for value in ("NaN", "+Inf", "1e999", "-3")] == [None] * 4
    assert grown({"drafts": 9.0}, {"drafts": 4.0}) == {"drafts": -5.0}


def scored(logprob: str) -> bytes:
    echoed = (
        f'{{"tokens": ["a", "b", "c"], "token_logprobs": [null, {logprob}, {logprob}], "top_logprobs": null}}'
    )
    return page(f'{{"choices": [{{"logprobs": {echoed}}}]}}'.encode())


def test_log_probabilities_that_are_none_are_not_taken():
    """5.0 would be a perplexity of 0.007, better than any gate asks."""
    for value, told in (
        ("-1.5", ""),
        ("0.001", ""),
        ("5.0", "none: 5 is among them"),
        ("-1e999", "none: -inf is among them"),
        ("NaN", "without"),
        ("9" * 400, "without"),
    ):
        with server(completions=scored(value)) as url:
            found = why_no_scores(there(url))
        assert (told in found, bool(found)) == (True, bool(told))


def test_margins_that_are_none_are_not_taken():
    def told(first: str, second: str) -> list[tuple[str, float]] | None:
        tops = f'[{{"logprob": {first}}}, {{"logprob": {second}}}]'
        body = f'{{"choices": [{{"logprobs": {{"content": [{{"token": "a", "top_logprobs": {tops}}}]}}}}]}}'
        with server(completions=page(body.encode())) as url:
            return margins(there(url), CHAT, max_tokens=1)

    assert told("-0.5", "-1.5") == [("a", 1.0)]
    for pair in (("NaN", "-1"), ("5", "-1"), ("-1", "-1e999"), ("9" * 400, "-1")):
        assert told(*pair) is None


def test_lengths_and_counts_that_cannot_be_are_not_told():
    def told(value: str) -> float | None:
        return asked(
            OK
            + event("a", finish_reason="stop").replace(
                b'"index": 0', f'"index": 0, "avg_decoded_tokens_per_iter": {value}'.encode()
            )
        ).tokens_per_step

    assert told("2.5") == 2.5
    assert [told(value) for value in ("-2", "0.5", "0", "1e300", "9" * 400, "NaN", '"3"')] == [None] * 7


def test_a_server_without_tls_is_told_from_one_that_died():
    with server() as url, pytest.raises(MissingError, match="if it speaks plain HTTP, say http://"):
        connect(url.replace("http:", "https:"), timeout_s=2)


def test_nothing_answers_is_still_said():
    with pytest.raises(MissingError, match="nothing answers"):
        connect("http://127.0.0.1:1", timeout_s=1)
