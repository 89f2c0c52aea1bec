"""A real tritonserver with a real (tiny) engine: what clients get, and what is left when things go wrong."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tritonclient.grpc")

from servers import LONG, MODEL, RECIPE, TRTSPEC, Server, free_ports, run_cli, running_stream, sse, wait_until

from trtspec.artifact import Artifact, open_artifact, seal
from trtspec.backends import open_engine
from trtspec.engine import Completion, Request, Sampling
from trtspec.engine import generate as run_engine
from trtspec.errors import InputError, MissingError
from trtspec.recipe_file import load_recipe, recipe_digest
from trtspec.serve.client import Finished, generate, stream
from trtspec.serve.preflight import find_installation
from trtspec.serve.protocol import Generate
from trtspec.text import Tokenizer

pytestmark = pytest.mark.triton

try:
    find_installation()
except MissingError as missing:
    pytest.skip(str(missing), allow_module_level=True)

PROMPTS = ["Hello", "one two one two one two", "naïve café", "你好 🙂 世界", "a", "x = x + 1\nx = x + 1\n"]


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
            {"text_input": "a", "sampling_param_max_tokens": 9000},
            "sampling_param_max_tokens: 9,000 is too large",
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


def test_odd_values_are_answered_or_refused_but_hurt_nobody(server: Server) -> None:
    fine = {"text_input": "hi", "sampling_param_max_tokens": 3}
    for changes, expected in (
        ({"max_tokens": 5}, "max_tokens: unknown parameter; did you mean sampling_param_max_tokens?"),
        ({"parameters": {"max_tokens": 5}}, "max_tokens: unknown parameter; did you mean sampling_param_"),
        ({"温度 🙂": 1.5}, "温度 🙂: unknown parameter; "),
        ({"text_delta": "你好"}, "text_delta: '你好' is neither true nor false"),
        ({"sampling_param_stop": ["x"] * 5000}, "sampling_param_stop: 5,000 strings; at most 128"),
        ({"text_input": "x " * 10_000_000}, "text_input: 20,000,000 characters cannot fit"),
        ({"sampling_param_temperature": float("nan")}, "sampling_param_temperature: nan is not a number"),
        ({"priority": 1, "timeout": 100, "id": "a"}, None),
        ({"text_input": "a\0b"}, None),
        ({"sampling_param_temperature": 1e-45}, None),
        ({"sampling_param_temperature": 3e38}, None),
        ({"sampling_param_top_p": 1e-30}, None),
        ({"sampling_param_top_k": 2**31 - 1}, None),
        ({"sampling_param_stop": [f"{number}" for number in range(128)]}, None),
    ):
        status, body = server.generate(**{**fine, **changes})
        assert status == (200 if expected is None else 400), (changes, body)
        if expected is not None:
            assert body["error"].startswith(expected)


def test_invalid_utf8_is_refused(server: Server) -> None:
    status, body = server.post(f"/v2/models/{MODEL}/generate", b'{"text_input": "ab\xff"}')
    assert (status, json.loads(body)["error"]) == (400, "text_input: not valid UTF-8 at byte 2")


def test_errors_over_grpc_keep_their_meaning(server: Server) -> None:
    with pytest.raises(InputError, match=r"sampling_param_max_tokens: 9,000 is too large"):
        generate(server.grpc, MODEL, Generate("a", max_tokens=9000))
    with pytest.raises(InputError, match="unknown model: 'other'"):
        generate(server.grpc, "other", Generate("a"))
    (port,) = free_ports(1)
    with pytest.raises(MissingError, match="nothing answers there"):
        generate(f"127.0.0.1:{port}", MODEL, Generate("a"))


def test_many_streams_refused_at_once_leave_the_server_up(server: Server) -> None:
    """With the header that brings status codes it died within thousands of them on busy cores."""

    def refused(number: int) -> bool:
        asked = (MODEL, Generate("a", max_tokens=9000)) if number % 2 else ("other", Generate("a"))
        with pytest.raises(InputError, match=r"is too large|unknown model"):
            generate(server.grpc, *asked)
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(refused, range(600)))
    assert generate(server.grpc, MODEL, Generate("Hello", max_tokens=2)).text


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
            # Those in the batch come first; which ones they are is chance. Their places are for the others.
            for first in itertools.islice(as_completed(firsts, timeout=240), 8):
                answers[firsts.index(first)].close()
            assert all(first.result(240) for first in firsts)
    finally:
        for answer in answers:
            answer.close()
    assert wait_until(lambda: server.metric("trtspec_requests_running") == 0)
    assert generate(server.grpc, MODEL, Generate("Hello", max_tokens=2)).text


# --------------------------------------------------------------------------- cancelling


def test_a_client_that_leaves_frees_its_place(server: Server) -> None:
    server.settle()
    before = server.metric("trtspec_generated_tokens_total")
    answer = stream(server.grpc, MODEL, Generate("Hello", max_tokens=LONG, temperature=1.5, seed=1))
    next(answer)
    answer.close()
    server.settle()
    assert 0 < server.metric("trtspec_generated_tokens_total") - before < LONG


def test_a_request_is_stopped_by_its_id(server: Server) -> None:
    with (
        running_stream(server.grpc, request_id="mine 🙂") as received,
        running_stream(server.grpc, max_tokens=1000) as other,
    ):
        stop_by_grpc(server.grpc, "mine 🙂")
        assert wait_until(lambda: isinstance(received[-1], Exception))
        assert "cancelled by the client" in str(received[-1])
        assert wait_until(lambda: isinstance(other[-1], Finished))


def test_a_request_is_stopped_by_its_id_over_http(server: Server) -> None:
    with running_stream(server.grpc, request_id="mine") as received:
        assert server.generate(text_input="", stop=True, id="mine")[0] == 200
        assert wait_until(lambda: isinstance(received[-1], Exception))


def stop_by_grpc(url: str, request_id: str) -> None:
    import numpy as np
    import tritonclient.grpc as triton

    done = threading.Event()
    tensor = triton.InferInput("stop", [1], "BOOL")
    tensor.set_data_from_numpy(np.array([True]))
    with triton.InferenceServerClient(url) as client:
        client.start_stream(callback=lambda result, error: done.set())
        client.async_stream_infer(MODEL, [tensor], request_id=request_id)
        assert done.wait(120)
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
    server.settle()
    before = {name: server.metric(f"trtspec_{name}_total") for name in ("generated_tokens", "drafted_tokens")}
    finished = generate(server.grpc, MODEL, Generate(PROMPTS[1], max_tokens=40, return_perf_metrics=True))
    found = finished.statistics
    server.settle()
    expected = before["generated_tokens"] + found["num_output_tokens"]
    assert server.metric("trtspec_generated_tokens_total") == expected
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
    assert raw.stderr.rstrip().endswith("exact acceptance (strict)")
    as_json = run_cli("generate", "Hi there", *options, "--json")
    assert json.loads(as_json.stdout)["acceptance"] == "exact acceptance (strict)"
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


def test_generate_asks_only_the_server_of_its_engine(
    server: Server, tiny_engine: Path, tmp_path: Path
) -> None:
    """Two engines on the same ports: the one that is served must not answer for the other."""
    other = tmp_path / "other"
    shutil.copytree(tiny_engine, other)
    opened = open_artifact(other)
    (other / "manifest.json").unlink()
    (other / "recipe.yaml").unlink()
    recipe = RECIPE.replace("\nname: tiny\n", "\nname: other\n").replace(
        "num_draft_tokens: 4", "num_draft_tokens: 3"
    )
    (other / "recipe.yaml").write_text(recipe)
    digest = recipe_digest(load_recipe(other / "recipe.yaml"))
    seal(other, opened.manifest.model_copy(update={"recipe_digest": digest, "name": "other"}), {})
    options = ("--url", server.grpc, "--max-tokens", "2")
    refused = run_cli("generate", "Hello", "--engine", str(other), *options)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "serves tiny, not the engine given" in refused.stderr
    assert run_cli("generate", "Hello", "--engine", str(tiny_engine), *options).returncode == 0


def test_an_http_port_is_told_from_no_server(server: Server) -> None:
    http = str(server.ready["http"]).removeprefix("http://")
    result = run_cli("generate", "x", "--url", http, "--model-name", MODEL)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "that is an HTTP port; give the gRPC port" in result.stderr


def test_ctrl_c_in_generate_cancels_the_request(server: Server) -> None:
    server.settle()
    before = server.metric("trtspec_generated_tokens_total")
    options = ["--url", server.grpc, "--model-name", MODEL, "--max-tokens", str(LONG), "--temperature", "1.5"]
    child = subprocess.Popen([*TRTSPEC, "generate", "Hello", *options], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.read(5)
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=120)
    assert child.returncode == 130
    server.settle()
    assert 0 < server.metric("trtspec_generated_tokens_total") - before < LONG


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
    repository = {"models/tiny_llm/1/model.py", "models/tiny_llm/config.pbtxt"}
    assert repository <= set(fields["files"]) <= {*repository, "python/pyvenv.cfg"}
    assert fields["links"]["engine"] == str(tiny_engine)
