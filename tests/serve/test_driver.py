"""The driver over the real engine, without Triton: batching, text, cancelling, and an engine that fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from trtspec.artifact import Artifact, open_artifact
from trtspec.backends import open_engine
from trtspec.engine import Engine, EngineStats, Output, Request
from trtspec.engine import generate as run_engine
from trtspec.serve.driver import Driver, FailureKind, Reply
from trtspec.serve.protocol import Generate
from trtspec.text import Tokenizer

PROMPTS = ["Hello", "one two one two one two", "naïve café", "你好 🙂"]


@pytest.fixture(scope="module")
def artifact(tiny_engine: Path) -> Artifact:
    return open_artifact(tiny_engine)


@pytest.fixture(scope="module")
def tokenizer(artifact: Artifact) -> Tokenizer:
    return Tokenizer.load(artifact.target_dir)


class Listener:
    """Collects the answers to one request. ``leave_after`` replies it is gone."""

    def __init__(self, leave_after: int | None = None) -> None:
        self.replies: list[Reply] = []
        self.failures: list[tuple[FailureKind, str]] = []
        self.done = threading.Event()
        self._leave_after = leave_after

    def reply(self, reply: Reply, *, final: bool) -> None:
        assert not self.done.is_set(), "an answer after the last one"
        self.replies.append(reply)
        if final:
            self.done.set()

    def fail(self, kind: FailureKind, message: str) -> None:
        assert not self.done.is_set(), "an error after the last answer"
        self.failures.append((kind, message))
        self.done.set()

    def is_cancelled(self) -> bool:
        return self._leave_after is not None and len(self.replies) >= self._leave_after

    def text(self) -> str:
        assert self.done.wait(120)
        assert not self.failures, self.failures
        return self.replies[-1].text


class Breaking:
    """The real engine, whose step fails once ``failing`` is set."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.failing = threading.Event()
        self.closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> list[Output]:
        if self.failing.is_set():
            raise RuntimeError("/secret/path is broken")
        return self._engine.step()

    def close(self) -> None:
        self.closed = True
        self._engine.close()


@pytest.fixture
def make_driver(artifact: Artifact, tokenizer: Tokenizer) -> Iterator[Callable[..., Driver]]:
    made: list[Driver] = []

    def make(engine: Any = None, tokenizer: Tokenizer = tokenizer, **changes: Any) -> Driver:
        options: dict[str, Any] = {
            "max_open": 20,
            "max_input_tokens": 256,
            "default_max_tokens": 24,
            "fresh_seed": lambda: 1,
            "on_stats": lambda stats, seconds: None,
            "on_failure": lambda message: None,
        }
        driver = Driver(engine or open_engine(artifact), tokenizer, **{**options, **changes})
        made.append(driver)
        return driver

    yield make
    for driver in made:
        driver.close()


def ask(driver: Driver, wanted: Generate, **options: Any) -> Listener:
    listener = Listener(**options)
    driver.submit(wanted, listener)
    return listener


def test_text_is_that_of_the_engines_tokens(
    make_driver: Callable[..., Driver], artifact: Artifact, tokenizer: Tokenizer
) -> None:
    stats: list[EngineStats] = []
    driver = make_driver(on_stats=lambda now, seconds: stats.append(now))
    requests = [
        Request(prompt, tuple(tokenizer.encode(prompt)), 24, stop_tokens=tokenizer.eos_token_ids)
        for prompt in PROMPTS
    ]
    expected = run_engine(open_engine(artifact), requests)
    listeners = [ask(driver, Generate(prompt, exclude_input=True)) for prompt in PROMPTS]
    for listener, completion in zip(listeners, expected, strict=True):
        assert listener.text() == tokenizer.decode(completion.tokens)
        (reply,) = listener.replies
        assert (reply.num_output_tokens, reply.finish_reason) == (
            len(completion.tokens),
            completion.finish_reason,
        )
        assert reply.num_output_tokens == pytest.approx(reply.acceptance_length * reply.steps)
    driver.close()
    assert stats[-1].generated_tokens == sum(len(completion.tokens) for completion in expected)


def test_every_way_to_ask_gives_the_same_text(make_driver: Callable[..., Driver]) -> None:
    driver = make_driver()
    for prompt in PROMPTS:
        whole = ask(driver, Generate(prompt, exclude_input=True))
        with_prompt = ask(driver, Generate(prompt))
        so_far = ask(driver, Generate(prompt, streaming=True))
        pieces = ask(driver, Generate(prompt, streaming=True, text_delta=True))
        assert with_prompt.text() == prompt + whole.text()
        assert so_far.text() == whole.text()
        assert pieces.done.wait(120)
        assert "".join(reply.text for reply in pieces.replies) == whole.text()
        assert len(pieces.replies) > 1


def test_a_stop_string_ends_the_request_early(make_driver: Callable[..., Driver]) -> None:
    driver = make_driver()
    whole = ask(driver, Generate("Hello", max_tokens=200, exclude_input=True)).text()
    stop = whole[20:24]
    listener = ask(driver, Generate("Hello", max_tokens=200, exclude_input=True, stop=(stop,)))
    assert listener.text() == whole[: whole.index(stop)]
    (reply,) = listener.replies
    assert (reply.finish_reason, reply.stop_reason) == ("stop", stop)
    assert reply.num_output_tokens < 200


def test_a_stop_token_ends_the_text_and_is_not_part_of_it(
    make_driver: Callable[..., Driver], artifact: Artifact
) -> None:
    own = Tokenizer.load(artifact.target_dir)
    request = Request("0", tuple(own.encode("Hello")), 24)
    tokens = run_engine(open_engine(artifact), [request])[0].tokens
    stop = tokens[9]
    own.eos_token_ids = frozenset({stop})
    listener = ask(make_driver(tokenizer=own), Generate("Hello", exclude_input=True))
    assert listener.text() == own.decode(tokens[: tokens.index(stop)])
    (reply,) = listener.replies
    assert (reply.finish_reason, reply.stop_reason) == ("stop", str(stop))
    assert reply.num_output_tokens == tokens.index(stop) + 1


def test_a_caller_that_leaves_is_cancelled_and_the_others_go_on(make_driver: Callable[..., Driver]) -> None:
    driver = make_driver()
    staying = ask(driver, Generate("Hello", max_tokens=400, exclude_input=True))
    leaving = ask(driver, Generate("Hello", max_tokens=8000, streaming=True), leave_after=2)
    assert leaving.done.wait(120)
    assert leaving.failures == [("cancelled", "cancelled by the client")]
    assert len(leaving.replies) < 400
    assert staying.text()


def test_a_caller_that_left_before_its_turn_never_starts(make_driver: Callable[..., Driver]) -> None:
    listener = ask(make_driver(), Generate("Hello", streaming=True), leave_after=0)
    assert listener.done.wait(120)
    assert (listener.replies, listener.failures[0][0]) == ([], "cancelled")


def test_cancelling_by_label_ends_all_of_it_and_nothing_else(make_driver: Callable[..., Driver]) -> None:
    driver = make_driver()
    listeners = [Listener() for _ in range(3)]
    for listener, label in zip(listeners, ("a", "b", "a"), strict=True):
        driver.submit(Generate("Hello", max_tokens=1000, exclude_input=True), listener, label)
    driver.cancel("a")
    assert all(listener.done.wait(120) for listener in listeners)
    assert [bool(listener.failures) for listener in listeners] == [True, False, True]


def test_open_requests_are_bounded(make_driver: Callable[..., Driver]) -> None:
    driver = make_driver(max_open=2)
    listeners = [ask(driver, Generate("Hello", max_tokens=500)) for _ in range(3)]
    assert listeners[2].failures[0][0] == "busy"
    assert all(listener.text() for listener in listeners[:2])
    assert ask(driver, Generate("Hello")).text()


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (Generate(""), "text_input: the prompt is empty"),
        (Generate("ab " * 200), "tokens are too many; this engine takes prompts up to 256 tokens"),
        (Generate("a" * 100_000), "text_input: 100,000 characters cannot fit"),
        (Generate("a", max_tokens=8192), "leave room for 8,191"),
    ],
)
def test_requests_that_cannot_run_are_refused(
    make_driver: Callable[..., Driver], wanted: Generate, message: str
) -> None:
    listener = ask(make_driver(), wanted)
    ((kind, found),) = listener.failures
    assert kind == "invalid"
    assert message in found


def test_the_default_length_fits_into_the_room_left(make_driver: Callable[..., Driver]) -> None:
    driver = make_driver(default_max_tokens=100_000)
    listener = ask(driver, Generate("Hello", exclude_input=True))
    assert listener.done.wait(120)
    (reply,) = listener.replies
    assert reply.finish_reason == "length"
    assert reply.num_input_tokens + reply.num_output_tokens == 8192


def test_a_failing_engine_answers_everyone_and_takes_no_more(
    make_driver: Callable[..., Driver], artifact: Artifact, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Breaking(open_engine(artifact))
    told: list[str] = []
    driver = make_driver(engine, on_failure=told.append)
    listeners = [ask(driver, Generate("Hello", max_tokens=8000)) for _ in range(3)]
    engine.failing.set()
    assert all(listener.done.wait(120) for listener in listeners)
    late = ask(driver, Generate("Hello"))
    assert late.done.wait(120)
    for listener in (*listeners, late):
        ((kind, message),) = listener.failures
        assert kind == "internal"
        assert "/secret" not in message
    driver.close()
    assert len(told) == 1
    assert engine.closed
    assert "/secret/path is broken" in capsys.readouterr().err


def test_closing_answers_what_is_open(make_driver: Callable[..., Driver]) -> None:
    driver = make_driver()
    listeners = [ask(driver, Generate("Hello", max_tokens=100)) for _ in range(3)]
    driver.close()
    assert all(listener.done.is_set() and not listener.failures for listener in listeners)
