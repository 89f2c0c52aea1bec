"""The verbs that make engines and look at them: what they print, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import make_tiny_model

from trtspec.cli import main

RECIPE = """\
version: 1
name: tiny
model: {source: model}
backend: {kind: embedded, dtype: float32}
limits: {max_input_tokens: 128, max_seq_tokens: 256}
"""


@pytest.fixture
def engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    make_tiny_model(tmp_path / "model")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    folder = tmp_path / "engines"
    assert main(["build", str(tmp_path / "recipe.yaml"), "-o", str(folder)]) == 0
    assert "built in" in capsys.readouterr().out
    return folder


def test_list_shows_every_state(engines: Path, capsys: pytest.CaptureFixture[str]):
    (engines / "broken").mkdir()
    (engines / "broken" / "manifest.json").write_text("{")
    (engines / "half").mkdir()
    (engines / "half" / "recipe.yaml").write_text(RECIPE)
    (engines / ".other.building").mkdir()
    (engines / "photos").mkdir()
    assert main(["list", "-o", str(engines), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["engines"]
    states = {Path(entry["engine"]).name: entry["state"] for entry in listed}
    assert states == {"tiny": "sealed", "broken": "damaged", "half": "unfinished", "other": "unfinished"}
    assert main(["list", "-o", str(engines)]) == 0
    shown = capsys.readouterr().out
    assert "embedded float32, 16-bit weights, 16-bit KV cache, no speculation" in shown
    assert len(shown.splitlines()) == 4


def test_an_empty_list_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["list", "-o", str(tmp_path)]) == 0
    assert "trtspec build RECIPE" in capsys.readouterr().out


def test_inspect_shows_what_is_there(engines: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", str(engines / "tiny"), "--check"]) == 0
    shown = capsys.readouterr().out
    for word in ("every file read and unchanged", "baseline", "recipe digest", "torch"):
        assert word in shown
    assert main(["inspect", str(engines / "tiny"), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["state"] == "sealed"
    assert value["manifest"]["schema"] == "trtspec.manifest/1"


def test_inspect_checks_hashes(engines: Path, capsys: pytest.CaptureFixture[str]):
    config = engines / "tiny" / "baseline" / "config.json"
    content = config.read_bytes()
    config.unlink()
    config.write_bytes(content.replace(b"silu", b"gelu"))
    assert main(["inspect", str(engines / "tiny")]) == 0
    assert main(["inspect", str(engines / "tiny"), "--check"]) == 2
    assert "same size, other content" in capsys.readouterr().err
    assert main(["inspect", str(engines / "tiny"), "--check", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["state"] == "damaged"


def test_build_refuses_an_engines_dir_that_is_a_file(engines: Path, tmp_path: Path):
    assert main(["build", str(tmp_path / "recipe.yaml"), "-o", str(tmp_path / "recipe.yaml")]) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "w5"], "--format"),
        (["--format", "fp8", "--group-size", "64"], "--group-size: does not exist for this format"),
        (["--format", "w4a16_awq", "--group-size", "48"], "--group-size"),
        (["--format", "fp8", "--kv-cache", "fp4"], "--kv-cache"),
        (["--format", "fp8", "--num-samples", "0"], "--num-samples"),
    ],
)
def test_quantize_refuses_by_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
):
    make_tiny_model(tmp_path / "model")
    argv = ["quantize", "--model", str(tmp_path / "model"), "-o", str(tmp_path / "out"), *options]
    assert main(argv) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_quantize_needs_something_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    make_tiny_model(tmp_path / "model")
    argv = ["quantize", "--model", str(tmp_path / "model"), "-o", str(tmp_path / "out"), "--format", "none"]
    assert main(argv) == 2
    assert "nothing to quantize" in capsys.readouterr().err
