"""A real tritonserver with a real (tiny) engine: what clients get, and what is left when things go wrong."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tritonclient.grpc")

from servers import TRTSPEC, Server, build_tiny, free_ports, port_options, start_server, wait_until

from trtspec.artifact import Artifact, open_artifact
from trtspec.backends import open_engine
from trtspec.engine import Completion, Request, Sampling
from trtspec.engine import generate as run_engine
from trtspec.errors import InputError, MissingError
from trtspec.serve.client import Finished, generate, stream
from trtspec.serve.preflight import find_installation
from trtspec.serve.protocol import Generate
from trtspec.text import Tokenizer

pytestmark = pytest.mark.triton

try:
    find_installation()
except MissingError as missing:
    pytest.skip(str(missing), allow_module_level=True)

MODEL = "tiny_llm"
PROMPTS = ["Hello", "one two one two one two", "naïve café", "你好 🙂 世界", "a", "x = x + 1\nx = x + 1\n"]
LONG = 3000
"""Tokens of a request that is still running when a test does something to it."""


@pytest.fixture(scope="module")
def artifact(tiny_engine: Path) -> Artifact:
    return open_artifact(tiny_engine)


@pytest.fixture(scope="module")
def tokenizer(artifact: Artifact) -> Tokenizer:
    return Tokenizer.load(artifact.target_dir)


def in_process(artifact: Artifact, requests: Sequence[Request]) -> list[Completion]:
    engine = open_engine(artifact)
    try:
        return run_engine(engine, requests)
    finally:
        engine.close()


def pieces_and_end(url: str, request: Generate) -> tuple[list[str], Finished]:
    *pieces, finished = stream(url, MODEL, request)
    assert isinstance(finished, Finished)
    return pieces, finished


def run_cli(
    *arguments: str, stdin: str | None = None, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TRTSPEC, *arguments], input=stdin, capture_output=True, text=True, timeout=timeout
    )


@contextlib.contextmanager
def running_stream(url: str, prompt: str = "Hello", request_id: str = "") -> Iterator[list[Any]]:
    """A long request on another thread; yields what it received, the end or an error last."""
    received: list[Any] = []
    request = Generate(prompt, max_tokens=LONG, temperature=1.5, seed=1)

    def read() -> None:
        try:
            for item in stream(url, MODEL, request, request_id=request_id, idle_timeout_s=20):
                received.append(item)
        except Exception as error:
            received.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert wait_until(lambda: len(received) > 3), received
    yield received
    thread.join(30)
    assert not thread.is_alive()


# --------------------------------------------------------------------------- answers


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}, {"top_p": 0.9, "seed": 6}])
def test_streamed_answers_equal_whole_ones(server: Server, sampling: dict[str, Any]) -> None:
    for prompt in PROMPTS:
        request = Generate(prompt, max_tokens=40, exclude_input=True, **sampling)
        pieces, finished = pieces_and_end(server.grpc, request)
        assert "".join(pieces) == finished.text
        fields = {f"sampling_param_{name}": value for name, value in sampling.items()}
        status, body = server.generate(
            text_input=prompt,
            sampling_param_max_tokens=40,
            sampling_param_exclude_input_from_output=True,
            return_finish_reason=True,
            **fields,
        )
        assert (status, body["text_output"]) == (200, finished.text)
        assert body["finish_reason"] == finished.finish_reason


def test_sixteen_streams_in_one_batch_get_the_tokens_of_the_engine_alone(
    server: Server, artifact: Artifact, tokenizer: Tokenizer
) -> None:
    prompts = [f"{prompt} {number}" for number in range(3) for prompt in PROMPTS][:16]
    requests = [
        Request(str(index), tuple(tokenizer.encode(prompt)), 32, stop_tokens=tokenizer.eos_token_ids)
        for index, prompt in enumerate(prompts)
    ]
    expected = in_process(artifact, requests)
    with ThreadPoolExecutor(16) as pool:
        asked = [Generate(prompt, max_tokens=32, return_perf_metrics=True) for prompt in prompts]
        answers = list(pool.map(lambda request: pieces_and_end(server.grpc, request)[1], asked))
    for answer, completion in zip(answers, expected, strict=True):
        assert answer.text == tokenizer.decode(completion.tokens)
        assert answer.statistics["num_output_tokens"] == len(completion.tokens)
        assert answer.finish_reason == completion.finish_reason


def test_seeded_sampling_gives_the_tokens_of_the_engine(
    server: Server, artifact: Artifact, tokenizer: Tokenizer
) -> None:
    sampling = Sampling(temperature=0.5, top_k=20, seed=11)
    tokens = tuple(tokenizer.encode("Hello"))
    request = Request("0", tokens, 24, sampling, tokenizer.eos_token_ids)
    (expected,) = in_process(artifact, [request])
    asked = Generate("Hello", max_tokens=24, temperature=0.5, top_k=20, seed=11)
    assert generate(server.grpc, MODEL, asked).text == tokenizer.decode(expected.tokens)
    assert generate(server.grpc, MODEL, replace(asked, seed=12)).text != tokenizer.decode(expected.tokens)


def test_unseeded_sampling_differs_from_request_to_request(server: Server) -> None:
    asked = Generate("Hello", max_tokens=24, temperature=1.0)
    assert len({generate(server.grpc, MODEL, asked).text for _ in range(3)}) == 3


def test_answers_over_http_begin_with_the_prompt_unless_excluded(server: Server) -> None:
    _, with_prompt = server.generate(text_input="Hello")
    _, without = server.generate(text_input="Hello", sampling_param_exclude_input_from_output=True)
    assert with_prompt["text_output"] == "Hello" + without["text_output"]
    assert set(without) == {"model_name", "model_version", "text_output"}


def test_optional_outputs_come_only_when_asked_for(server: Server) -> None:
    asked = {
        "return_finish_reason": True,
        "return_stop_reason": True,
        "sampling_param_return_perf_metrics": True,
    }
    _, body = server.generate(text_input="one two one two one two", sampling_param_max_tokens=50, **asked)
    assert body["finish_reason"] == "length"
    assert body["stop_reason"] == "None"
    assert body["num_output_tokens"] == 50
    assert body["total_draft_tokens"] > 0
    assert 0 <= body["total_accepted_draft_tokens"] <= body["total_draft_tokens"]
    rate = body["total_accepted_draft_tokens"] / body["total_draft_tokens"]
    assert body["acceptance_rate"] == pytest.approx(rate, abs=1e-6)
    assert body["acceptance_length"] >= 1
    assert body["arrival_time_ns"] < body["first_token_time_ns"] < body["last_token_time_ns"]


def sse(body: str) -> list[dict[str, Any]]:
    return [json.loads(line[len("data: ") :]) for line in body.splitlines() if line.startswith("data: ")]


def test_server_sent_events(server: Server) -> None:
    path, fields = (
        f"/v2/models/{MODEL}/generate_stream",
        {"text_input": "Hello", "sampling_param_max_tokens": 12},
    )
    _, whole = server.generate(**fields, sampling_param_exclude_input_from_output=True)
    texts = [event["text_output"] for event in sse(server.post(path, {**fields, "streaming": True})[1])]
    assert texts[-1] == whole["text_output"]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    events = sse(server.post(path, {**fields, "streaming": True, "text_delta": True})[1])
    assert "".join(event["text_output"] for event in events) == whole["text_output"]
    assert len(events) > 1


def test_stop_strings(server: Server) -> None:
    whole = generate(server.grpc, MODEL, Generate("Hello", max_tokens=40)).text
    stop = whole[10:13]
    expected = whole[: whole.index(stop)]
    pieces, finished = pieces_and_end(server.grpc, Generate("Hello", max_tokens=40, stop=(stop, "\0never")))
    assert ("".join(pieces), finished.text) == (expected, expected)
    assert (finished.finish_reason, finished.stop_reason) == ("stop", stop)
    _, body = server.generate(
        text_input="Hello",
        sampling_param_max_tokens=40,
        sampling_param_stop=[stop, "\0never"],
        sampling_param_exclude_input_from_output=True,
    )
    assert body["text_output"] == expected
    assert wait_until(lambda: server.metric("trtspec_requests_running") == 0)


# --------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sampling_param_max_tokens": 4}, "text_input: missing; send the prompt as one string"),
        ({"text_input": ["a", "b"]}, "text_input: 2 prompts; send exactly one in a request"),
        ({"text_input": ""}, "text_input: the prompt is empty"),
        ({"text_input": "a " * 300}, "text_input: "),
        ({"text_input": "x" * 1_000_000}, "text_input: 1,000,000 characters cannot fit; this engine takes"),
        ({"text_input": "a", "sampling_param_max_tokens": 0}, "sampling_param_max_tokens: 0 is too small"),
        (
            {"text_input": "a", "sampling_param_max_tokens": 5000},
            "sampling_param_max_tokens: 5,000 is too large",
        ),
        (
            {"text_input": "a", "sampling_param_temperature": -1.0},
            "sampling_param_temperature: -1 is too small",
        ),
        ({"text_input": "a", "sampling_param_best_of": 2}, "sampling_param_best_of: only 1 is supported"),
        ({"text_input": "a", "sampling_param_frequency_penalty": 0.1}, "sampling_param_frequency_penalty: "),
        ({"text_input": "a", "return_cumulative_logprob": True}, "return_cumulative_logprob: not supported"),
        ({"text_input": "a", "sampling_param_stop": [""]}, "sampling_param_stop: an empty stop string"),
        ({"text_input": "a", "stop": True}, "stop: send the request id"),
    ],
)
def test_bad_requests_are_refused_and_hurt_nobody(
    server: Server, fields: dict[str, Any], message: str
) -> None:
    status, body = server.generate(**fields)
    assert status == 400
    assert body["error"].startswith(message)
    assert "Traceback" not in body["error"]
    assert ".py" not in body["error"]
    assert server.generate(text_input="Hello", sampling_param_max_tokens=2)[0] == 200


def test_invalid_utf8_is_refused(server: Server) -> None:
    status, body = server.post(f"/v2/models/{MODEL}/generate", b'{"text_input": "ab\xff"}')
    assert (status, json.loads(body)["error"]) == (400, "text_input: not valid UTF-8 at byte 2")


def test_errors_over_grpc_keep_their_meaning(server: Server) -> None:
    with pytest.raises(InputError, match=r"sampling_param_top_p: 1\.5 is too large"):
        generate(server.grpc, MODEL, Generate("a", top_p=1.5))
    with pytest.raises(InputError, match="unknown model: 'other'"):
        generate(server.grpc, "other", Generate("a"))
    (port,) = free_ports(1)
    with pytest.raises(MissingError, match="nothing answers there"):
        generate(f"127.0.0.1:{port}", MODEL, Generate("a"))


def test_a_full_queue_refuses_and_recovers(server: Server) -> None:
    """16 in the batch and 4 waiting are taken; more are refused at once, and only those."""
    request = Generate("Hello", max_tokens=LONG, temperature=1.5, seed=1)
    answers = [stream(server.grpc, MODEL, request) for _ in range(20)]
    try:
        with ThreadPoolExecutor(20) as pool:
            firsts = [pool.submit(next, answer) for answer in answers]
            assert wait_until(lambda: server.metric("trtspec_requests_running") == 16)
            assert wait_until(lambda: server.metric("trtspec_requests_waiting") == 4)
            for _ in range(3):
                with pytest.raises(MissingError, match=r"the queue is full \(20 requests"):
                    generate(server.grpc, MODEL, Generate("Hello"))
            for index, first in enumerate(firsts):
                assert first.result(60), index
                if index < 8:
                    answers[index].close()
    finally:
        for answer in answers:
            answer.close()
    assert wait_until(lambda: server.metric("trtspec_requests_running") == 0)
    assert generate(server.grpc, MODEL, Generate("Hello", max_tokens=2)).text


# --------------------------------------------------------------------------- cancelling


def test_a_client_that_leaves_frees_its_place(server: Server) -> None:
    answer = stream(server.grpc, MODEL, Generate("Hello", max_tokens=LONG, temperature=1.5, seed=1))
    next(answer)
    assert wait_until(lambda: server.metric("trtspec_requests_running") == 1)
    answer.close()
    assert wait_until(lambda: server.metric("trtspec_requests_running") == 0, 1.0)


def test_a_request_is_stopped_by_its_id(server: Server) -> None:
    with running_stream(server.grpc, request_id="mine") as received, running_stream(server.grpc) as other:
        stop_by_grpc(server.grpc, "mine")
        assert wait_until(lambda: isinstance(received[-1], Exception))
        assert "cancelled by the client" in str(received[-1])
        assert not isinstance(other[-1], Exception)
        assert wait_until(lambda: isinstance(other[-1], Finished), 30)


def stop_by_grpc(url: str, request_id: str) -> None:
    import numpy as np
    import tritonclient.grpc as triton

    done = threading.Event()
    tensor = triton.InferInput("stop", [1], "BOOL")
    tensor.set_data_from_numpy(np.array([True]))
    with triton.InferenceServerClient(url) as client:
        client.start_stream(callback=lambda result, error: done.set())
        client.async_stream_infer(MODEL, [tensor], request_id=request_id)
        assert done.wait(10)
        client.stop_stream()


def test_a_silent_server_is_given_up(server: Server) -> None:
    stub = server.stub()
    os.kill(stub, signal.SIGSTOP)
    try:
        with pytest.raises(MissingError, match=r"no answer for 0\.5 s"):
            generate(server.grpc, MODEL, Generate("Hello", max_tokens=LONG), idle_timeout_s=0.5)
    finally:
        os.kill(stub, signal.SIGCONT)
    assert wait_until(lambda: server.metric("trtspec_requests_running") == 0)
    assert generate(server.grpc, MODEL, Generate("Hello", max_tokens=2)).text


# --------------------------------------------------------------------------- metrics


def test_metrics_count_what_was_generated(server: Server) -> None:
    before = {name: server.metric(f"trtspec_{name}_total") for name in ("generated_tokens", "drafted_tokens")}
    finished = generate(server.grpc, MODEL, Generate(PROMPTS[1], max_tokens=40, return_perf_metrics=True))
    found = finished.statistics
    expected = before["generated_tokens"] + found["num_output_tokens"]
    assert wait_until(lambda: server.metric("trtspec_generated_tokens_total") == expected)
    assert (
        server.metric("trtspec_drafted_tokens_total")
        == before["drafted_tokens"] + found["total_draft_tokens"]
    )
    assert server.metric("trtspec_acceptance_length") >= 1
    assert server.metric("trtspec_step_seconds_count") > 0
    text = server.get("/metrics", port_of="metrics")
    for state in ("free", "cached", "held"):
        assert f'trtspec_kv_pages{{state="{state}"}}' in text


# --------------------------------------------------------------------------- the command line


def test_generate_applies_the_chat_template_of_the_engine(
    server: Server, tiny_engine: Path, tokenizer: Tokenizer
) -> None:
    options = ("--engine", str(tiny_engine), "--url", server.grpc, "--max-tokens", "16")
    chat = run_cli("generate", "Hi there", *options)
    prompt = tokenizer.render_chat([{"role": "user", "content": "Hi there"}])
    assert chat.stdout == generate(server.grpc, MODEL, Generate(prompt, max_tokens=16)).text + "\n"
    raw = run_cli("generate", "-", *options, "--raw", "--stats", stdin="Hi there")
    assert raw.stdout == generate(server.grpc, MODEL, Generate("Hi there", max_tokens=16)).text + "\n"
    assert raw.stdout != chat.stdout
    assert "acceptance length" in raw.stderr
    as_json = run_cli("generate", "Hi there", *options, "--json")
    assert json.loads(as_json.stdout)["text"] + "\n" == chat.stdout


def test_generate_reports_errors_in_one_line(server: Server) -> None:
    refused = run_cli("generate", "x", "--url", server.grpc, "--model-name", MODEL, "--max-tokens", "9000")
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    (port,) = free_ports(1)
    absent = run_cli("generate", "x", "--url", f"127.0.0.1:{port}")
    assert (absent.returncode, absent.stdout, absent.stderr.count("\n")) == (3, "", 1)
    assert "start the server with trtspec serve" in absent.stderr
    assert run_cli("generate", "x", "--url", "http://127.0.0.1:1").returncode == 2
    assert run_cli("generate", "-", stdin="").returncode == 2


def test_ctrl_c_in_generate_cancels_the_request(server: Server) -> None:
    options = ["--url", server.grpc, "--model-name", MODEL, "--max-tokens", str(LONG), "--temperature", "1.5"]
    child = subprocess.Popen([*TRTSPEC, "generate", "Hello", *options], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.read(5)
    assert server.metric("trtspec_requests_running") == 1
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=10)
    assert child.returncode == 130
    assert wait_until(lambda: server.metric("trtspec_requests_running") == 0, 1.0)


def test_dry_run_prints_repository_and_command(tiny_engine: Path) -> None:
    shown = run_cli("serve", str(tiny_engine), "--dry-run", "--http-port", "1234")
    assert shown.returncode == 0
    assert 'name: "tiny_llm"' in shown.stdout
    assert str(tiny_engine) in shown.stdout
    assert "OMP_WAIT_POLICY=PASSIVE" in shown.stdout
    assert "--http-port=1234" in shown.stdout
    assert "--http-address=127.0.0.1" in shown.stdout
    assert "warning" not in shown.stderr
    public = run_cli("serve", str(tiny_engine), "--dry-run", "--host", "0.0.0.0")
    assert "0.0.0.0 is reachable from other machines" in public.stderr
    fields = json.loads(run_cli("serve", str(tiny_engine), "--dry-run", "--json").stdout)
    assert sorted(fields["files"]) == ["models/tiny_llm/1/model.py", "models/tiny_llm/config.pbtxt"]


# --------------------------------------------------------------------------- ends, good and bad


@pytest.fixture
def own_server(tiny_engine: Path, tmp_path: Path) -> Iterator[Server]:
    running = start_server(tiny_engine, tmp_path)
    yield running
    running.end()


def test_sigterm_lets_a_live_stream_finish(own_server: Server) -> None:
    assert own_server.popen.stdout is not None
    with running_stream(own_server.grpc) as received:
        own_server.popen.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        with pytest.raises(MissingError, match="the server is stopping"):
            generate(own_server.grpc, MODEL, Generate("Hello"))
        assert wait_until(lambda: isinstance(received[-1], Finished), 30), received[-1]
    assert received[-1].text == "".join(received[:-1])
    output, _ = own_server.popen.communicate(timeout=20)
    assert own_server.popen.returncode == 0, output
    assert own_server.leftovers() == []
    assert "stopping" in output
    assert "acceptance length" in output
    assert "Segmentation" not in own_server.log.read_text()


def test_a_dead_model_process_ends_the_server_quickly(own_server: Server) -> None:
    with running_stream(own_server.grpc) as received:
        os.kill(own_server.stub(), signal.SIGKILL)
        killed = time.monotonic()
        output, _ = own_server.popen.communicate(timeout=20)
        assert time.monotonic() - killed < 2
    assert own_server.popen.returncode == 3
    assert "the model's process died" in output
    assert isinstance(received[-1], MissingError)
    assert own_server.leftovers() == []


def test_a_killed_supervisor_leaves_nothing_behind(own_server: Server) -> None:
    with running_stream(own_server.grpc) as received:
        own_server.popen.kill()
        own_server.popen.wait()
        assert wait_until(lambda: own_server.leftovers() == [], 5), own_server.leftovers()
    assert isinstance(received[-1], MissingError)


def test_a_second_signal_stops_at_once(own_server: Server) -> None:
    with running_stream(own_server.grpc) as received:
        own_server.popen.send_signal(signal.SIGINT)
        time.sleep(0.2)
        own_server.popen.send_signal(signal.SIGINT)
        output, _ = own_server.popen.communicate(timeout=5)
    assert own_server.popen.returncode == 3
    assert "requests in flight were cut off" in output
    assert isinstance(received[-1], MissingError)
    assert own_server.leftovers() == []


@pytest.mark.parametrize("taken", [0, 1, 2], ids=["http", "grpc", "metrics"])
def test_a_taken_port_is_reported_before_anything_starts(tiny_engine: Path, taken: int) -> None:
    ports = free_ports(3)
    with contextlib.closing(socket.create_server(("127.0.0.1", ports[taken]))):
        result = run_cli("serve", str(tiny_engine), *port_options(ports))
    name = ("http", "grpc", "metrics")[taken]
    assert result.returncode == 3
    assert f"{name} port 127.0.0.1:{ports[taken]} cannot be used" in result.stderr
    assert f"--{name}-port" in result.stderr


def test_a_model_that_does_not_come_up_in_time_is_stopped(tiny_engine: Path) -> None:
    # torch alone takes longer than a second to import.
    options = [*port_options(free_ports(3)), "--start-timeout", "1"]
    child = subprocess.Popen(
        [*TRTSPEC, "serve", str(tiny_engine), *options], stderr=subprocess.PIPE, text=True
    )
    _, errors = child.communicate(timeout=30)
    assert child.returncode == 3
    assert "was not ready after 1 s" in errors
    assert not list(Path("/dev/shm").glob(f"trtspec-{child.pid}-*"))


def test_a_failing_engine_answers_with_errors_and_ends_the_server(tmp_path: Path) -> None:
    """A prompt with one character of this model breaks the step it is in."""
    engine = build_tiny(tmp_path, poison="~")
    own = start_server(engine, tmp_path)
    with running_stream(own.grpc) as received:
        with pytest.raises(MissingError, match="the engine failed"):
            generate(own.grpc, MODEL, Generate("a~b"))
        output, _ = own.popen.communicate(timeout=20)
    assert own.popen.returncode == 3
    assert "the engine failed" in str(received[-1])
    assert "Traceback" not in str(received[-1])
    assert "the engine failed" in output
    assert own.leftovers() == []


def test_an_engine_that_cannot_be_loaded_is_explained(tiny_engine: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_engine, broken)
    config = next(broken.glob("*/config.json"))
    text = config.read_text()
    # Of the same size, so that only loading the weights can notice.
    changed = text.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3')
    assert changed != text
    config.unlink()
    config.write_text(changed)
    result = run_cli("serve", str(broken), *port_options(free_ports(3)))
    assert result.returncode == 2
    assert "the model could not be loaded: " in result.stderr
    assert "Traceback" not in result.stderr
    assert ".py(" not in result.stderr
