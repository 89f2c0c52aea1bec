"""The whole chain on a machine with TensorRT-LLM: build, verify, serve, ask. ``make test-gpu``.

Each test skips with what this machine lacks, in doctor's words. None has been run yet: the first run is the
first time that what trtspec renders meets TensorRT-LLM. ``TRTSPEC_GPU_MODEL``: another checkpoint than
SmolLM2-135M-Instruct, a folder.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trtspec import doctor
from trtspec.artifact import Artifact, open_artifact
from trtspec.backends import open_engine
from trtspec.engine import Request, Sampling, generate
from trtspec.errors import TrtspecError
from trtspec.model_source import find_model
from trtspec.probes import collect
from trtspec.serve.container import server_here
from trtspec.trtllm.opening import ENGINE_VERSIONS, installed

pytestmark = pytest.mark.gpu

SAMPLE = "sample:smollm2-135m-instruct"
SPECULATION = {"pytorch": "{kind: ngram, num_draft_tokens: 4}", "tensorrt": "{kind: lookahead}"}
"""A way of drafting that ``LLM`` runs without trained heads, by backend."""
PROMPT = "one two three, one two three, one two"


def reason(kind: str) -> str:
    """Why the chain of backend ``kind`` cannot run here; empty if it can."""
    lacking = doctor.examine(collect()).lacking(kind)  # type: ignore[arg-type]
    told = [f"{row.id}: {row.found}; {row.remedy}" for row in lacking]
    if not told and kind == "tensorrt" and not ENGINE_VERSIONS.admits(installed()):
        told.append(f"TensorRT-LLM {installed()}: engines are opened with {ENGINE_VERSIONS}")
    source = os.environ.get("TRTSPEC_GPU_MODEL", SAMPLE)
    if not told and find_model(source, Path.cwd()) is None:
        told.append(f"{source} is not here; trtspec fetch smollm2-135m-instruct")
    return "; ".join(told)


def trtspec(*words: object, timeout_s: float = 1800) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "trtspec", *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.fixture(scope="module", params=["pytorch", "tensorrt"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A sealed engine of the sample model, built as a user would, for the TensorRT-LLM of this machine."""
    kind = request.param
    if lacks := reason(kind):
        pytest.skip(lacks)
    version = installed()
    folder = tmp_path_factory.mktemp(kind)
    (folder / "recipe.yaml").write_text(
        f"version: 1\nname: chain\nmodel: {{source: '{os.environ.get('TRTSPEC_GPU_MODEL', SAMPLE)}'}}\n"
        f"backend: {{kind: {kind}, version: '=={version}'}}\nspeculation: {SPECULATION[kind]}\n"
        "limits: {max_batch_size: 4, max_input_tokens: 512, max_seq_tokens: 1024, max_num_tokens: 1024}\n"
    )
    done = trtspec("build", folder / "recipe.yaml", "-o", folder / "engines", "--tensorrt-llm", version)
    assert done.returncode == 0, done.stdout + done.stderr
    return open_artifact(folder / "engines" / "chain", check_hashes=True)


def test_requests_share_a_batch_and_are_counted(built: Artifact) -> None:
    engine = open_engine(built)
    try:
        prompts = [tuple(range(100 + i, 140 + i)) for i in range(6)]
        answers = generate(engine, [Request(str(i), prompt, 32) for i, prompt in enumerate(prompts)])
        assert [len(one.tokens) for one in answers] == [32] * 6
        assert all(one.finish_reason == "length" for one in answers)
        for one in answers:
            assert one.steps is not None, "decoding_iter is told by every version with a table"
            assert 1 <= one.steps <= 32
            assert one.accepted is None or one.drafted is None or one.accepted <= one.drafted
        # A stop token ends the answer, and is its last token.
        stop = answers[0].tokens[5]
        ended = generate(engine, [Request("s", prompts[0], 32, stop_tokens=frozenset({stop}))])[0]
        assert ended.finish_reason == "stop"
        assert ended.tokens[-1] == stop
        assert stop not in ended.tokens[:-1]
        # Cancelled at once; the engine goes on.
        engine.add(Request("gone", prompts[1], 400))
        engine.cancel("gone")
        assert [one.finish_reason for one in engine.step()] == ["cancelled"]
        assert len(generate(engine, [Request("after", prompts[2], 8)])[0].tokens) == 8
    finally:
        engine.close()


def test_sampling_without_speculation_takes_its_values(built: Artifact) -> None:
    if built.recipe.backend.kind == "tensorrt":
        pytest.skip("an engine has its way of drafting built in, and lookahead is greedy here")
    engine = open_engine(built, "no_speculation")
    try:
        law = Sampling(temperature=1.0, top_k=50, top_p=0.9, seed=7)
        answer = generate(engine, [Request("a", tuple(range(100, 120)), 32, sampling=law)])[0]
        assert len(answer.tokens) == 32
    finally:
        engine.close()


def test_verify_judges_it(built: Artifact, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = trtspec("verify", built.folder, "--quick", "-o", path)
    # 16 bit: near ties may differ, which TensorRT-LLM gives no scores to excuse.
    assert done.returncode in (0, 4), done.stdout + done.stderr
    verdicts = {check["name"]: check for check in json.loads(path.read_text())["checks"]}
    assert verdicts["acceptance"]["verdict"] == "MEASURED", verdicts["acceptance"]["summary"]
    assert verdicts["lossless"]["verdict"] in ("PASS", "INCONCLUSIVE", "SKIPPED")


@pytest.fixture(scope="module")
def served(built: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Its server, by ``trtspec serve``; what the ready file says."""
    try:
        server_here(installed())
    except TrtspecError as error:
        pytest.skip(f"serving: {error}")
    folder = tmp_path_factory.mktemp("served")
    ready, log = folder / "ready.json", folder / "server.log"
    argv = [sys.executable, "-m", "trtspec", "serve", str(built.folder)]
    argv += ["--ready-file", str(ready), "--log", str(log), "--start-timeout", "900"]
    with subprocess.Popen(argv) as server:
        try:
            deadline = time.monotonic() + 900
            while not ready.exists():
                assert server.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() < deadline, log.read_text()[-4000:]
                time.sleep(0.5)
            yield json.loads(ready.read_text())
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(120)


def test_it_is_served_and_answers(built: Artifact, served: dict[str, Any]) -> None:
    if built.recipe.backend.kind == "pytorch":
        done = trtspec("generate", "--engine", built.folder, "--max-tokens", "16", "--json", PROMPT)
        assert done.returncode == 0, done.stdout + done.stderr
        answer = json.loads(done.stdout)
        assert answer["text"]
        assert answer["finish_reason"] in ("length", "stop")
        return
    host, port = served["http"].removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=120)
    body = json.dumps({"text_input": PROMPT, "max_tokens": 16})
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v2/models/ensemble/generate", body, headers)
    response = connection.getresponse()
    answer = json.loads(response.read())
    assert response.status == 200, answer
    assert answer["text_output"]
