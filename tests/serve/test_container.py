"""Serving an engine of TensorRT-LLM in NVIDIA's container: its own script, a stand-in for the server."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import pytest
from tiny import make_tiny_model

from trtspec.artifact import Artifact, open_artifact
from trtspec.build import build
from trtspec.cli import main
from trtspec.errors import MissingError
from trtspec.serve.container import lay_out, serve_here, server_here

RECIPE = """\
version: 1
name: tiny
model: {source: model}
backend: {kind: pytorch}
speculation: {kind: ngram}
limits: {max_batch_size: 4, max_input_tokens: 128, max_seq_tokens: 256, max_num_tokens: 64}
"""
SERVER = """\
import http.server, json, sys
options = dict(word[2:].split("=", 1) for word in sys.argv[1:] if "=" in word)
if FAIL:
    sys.exit("E: the engine does not fit this GPU")
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(json.dumps(options).encode())
    def log_message(self, *words): pass
http.server.HTTPServer((options["http-address"], int(options["http-port"])), Answer).serve_forever()
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("container")
    make_tiny_model(folder / "model")
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    (folder / "recipe.yaml").write_text(f"{RECIPE}serving: {{http_port: {port}}}\n")
    return open_artifact(build(folder / "recipe.yaml", folder / "engine").folder)


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the script looks for: TensorRT-LLM 1.2.1's metadata, NVIDIA's model files, a server."""
    site, templates = tmp_path / "site", tmp_path / "templates" / "tensorrt_llm"
    (site / "tensorrt_llm-1.2.1.dist-info").mkdir(parents=True)
    (site / "tensorrt_llm-1.2.1.dist-info" / "METADATA").write_text("Name: tensorrt_llm\nVersion: 1.2.1\n")
    (site / "tensorrt_llm" / "llmapi").mkdir(parents=True)
    (site / "tensorrt_llm" / "__init__.py").touch()
    (templates / "1").mkdir(parents=True)
    (templates / "1" / "model.py").write_text("NVIDIA = True\n")
    (templates / "config.pbtxt").write_text('name: "tensorrt_llm"\n')
    server = tmp_path / "tritonserver"
    server.write_text(f"#!{sys.executable}\n" + SERVER.replace("FAIL", "False"))
    server.chmod(0o755)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("TEMPLATES", str(tmp_path / "templates"))
    monkeypatch.setenv("TRITONSERVER", str(server))
    return server


def test_paths_of_the_container_become_those_of_the_engine(built: Artifact, tmp_path: Path) -> None:
    script = lay_out(built, tmp_path)
    texts = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert script.read_text().startswith("#!")
    assert any(f"{built.folder.resolve()}/baseline" in text for text in texts)
    # The engine's folder here lies below one named "engine": replaced once, not again.
    assert not any("'/engine/" in text or " /engine/" in text or '"/engine/' in text for text in texts)


def test_the_script_is_run_until_a_signal_and_nothing_is_left(
    built: Artifact, container: Path, tmp_path: Path
) -> None:
    seen: dict[str, object] = {}

    def on_ready() -> dict[str, object]:
        seen["ready"] = True
        os.kill(os.getpid(), signal.SIGTERM)
        return {"pid": os.getpid()}

    said: list[str] = []
    ready = tmp_path / "ready.json"
    serve_here(
        built,
        server_here("1.2.1"),
        on_ready=on_ready,
        say=said.append,
        ready_file=ready,
        start_timeout_s=60,
    )
    assert seen
    assert said[0].startswith("stopping")
    assert not ready.exists()
    with socket.socket() as one, pytest.raises(ConnectionRefusedError):
        one.connect(("127.0.0.1", built.recipe.serving.http_port))


def test_a_server_that_ends_is_told_in_its_own_words(built: Artifact, container: Path) -> None:
    container.write_text(f"#!{sys.executable}\n" + SERVER.replace("FAIL", "True"))
    with pytest.raises(MissingError, match=r"exit code 1 before it was ready(.|\n)*does not fit this GPU"):
        serve_here(built, str(container), on_ready=dict, say=print, start_timeout_s=60)


def test_what_lacks_is_named(
    built: Artifact, container: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(MissingError, match=r"for TensorRT-LLM 1\.1\.0, here is 1\.2\.1"):
        server_here("1.1.0")
    monkeypatch.setenv("TRITONSERVER", "/nowhere/tritonserver")
    with pytest.raises(MissingError, match="no tritonserver"):
        server_here("1.2.1")
    assert main(["serve", str(built.folder)]) == 3
    error = capsys.readouterr().err
    assert "no tritonserver" in error
    assert "docker run" in error
