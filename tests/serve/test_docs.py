"""docs/serving.md: its examples run, its tables are those of the server."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tritonclient.grpc")

from servers import MODEL, Server, sse

from trtspec.errors import MissingError
from trtspec.serve.client import generate
from trtspec.serve.preflight import find_installation
from trtspec.serve.protocol import Generate

pytestmark = pytest.mark.triton

try:
    find_installation()
except MissingError as missing:
    pytest.skip(str(missing), allow_module_level=True)

SERVING = Path(__file__).parents[2] / "docs" / "serving.md"


def examples(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", SERVING.read_text(encoding="utf-8"), re.DOTALL)


def run_example(server: Server, language: str, text: str) -> str:
    """What an example prints, with this server's addresses and name for those in the text."""
    for written, actual in (
        ("localhost:8000", server.ready["http"].removeprefix("http://")),
        ("localhost:8001", server.grpc),
        ("localhost:8002", server.ready["metrics"].removeprefix("http://").removesuffix("/metrics")),
        ("tensorrt_llm", MODEL),
    ):
        text = text.replace(written, actual)
    program = (
        [sys.executable, "-c", text] if language == "python" else ["bash", "-euo", "pipefail", "-c", text]
    )
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    result = subprocess.run(program, capture_output=True, encoding="utf-8", timeout=120, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_documented_examples_work(server: Server) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    answer = generate(server.grpc, MODEL, Generate("Hello", max_tokens=16)).text
    whole, so_far, pieces, stopped, metrics = [run_example(server, "bash", text) for text in examples("bash")]
    assert json.loads(whole)["text_output"] == "Hello" + answer
    assert sse(so_far)[-1]["text_output"] == answer
    assert "".join(event["text_output"] for event in sse(pieces)) == answer
    assert json.loads(stopped)["text_output"] == ""
    assert len(metrics.splitlines()) > 10
    (program,) = examples("python")
    assert run_example(server, "python", program) == answer


def test_documented_metrics_are_those_of_the_server(server: Server) -> None:
    found = re.findall(
        r"^# TYPE (trtspec_\w+) (\w+)$", server.get("/metrics", port_of="metrics"), re.MULTILINE
    )
    documented = re.findall(r"^\| `(trtspec_\w+)` \| (\w+) \|", SERVING.read_text(), re.MULTILINE)
    assert sorted(documented) == sorted(found)


def test_documented_traps_are_still_there(server: Server) -> None:
    fine = {"text_input": "hi", "sampling_param_max_tokens": 2}
    status, body = server.generate(**fine, streaming=True)
    assert status == 200
    assert body["error"].startswith("generate expects model to produce exactly 1 response")
    status, body = server.generate(
        text_input="hi",
        sampling_param_max_tokens=4294967301,
        sampling_param_return_perf_metrics=True,
    )
    assert body["num_output_tokens"] == 5
    for wrong in ("5", 5.5, None):
        assert server.generate(**{**fine, "sampling_param_max_tokens": wrong})[0] == 500
    assert "has invalid type" in server.generate(**fine, x=[1])[1]["error"]
