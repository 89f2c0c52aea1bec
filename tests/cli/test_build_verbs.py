"""The verbs that make engines and look at them: what they print, and what they refuse."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from tiny import make_tiny_model

from trtspec.cli import cli, main

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
    assert main(["list", "--engines-dir", str(engines), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["engines"]
    states = {Path(entry["engine"]).name: entry["state"] for entry in listed}
    assert states == {"tiny": "sealed", "broken": "damaged", "half": "unfinished", "other": "unfinished"}
    assert main(["list", "--engines-dir", str(engines)]) == 0
    shown = capsys.readouterr().out
    assert "embedded float32, 16-bit weights, 16-bit KV cache, no speculation" in shown
    assert len(shown.splitlines()) == 4


def test_an_empty_list_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["list", "--engines-dir", str(tmp_path)]) == 0
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
        (
            ["--format", "int8"],
            "error: --format: found 'int8'; allowed: one of none, fp8, w4a16_awq, w4a8_awq, w8a8_sq, nvfp4; "
            "choose one of them\n",
        ),
        (["--format", "w4a16"], "; did you mean w4a16_awq?\n"),
        (
            ["--format", "fp8", "--group-size", "64"],
            "error: --group-size: goes with --format w4a16_awq or w4a8_awq, not fp8; remove it\n",
        ),
        (
            ["--format", "w4a16_awq", "--group-size", "48"],
            "error: --group-size: found 48; allowed: one of 32, 64, 128; choose one of them\n",
        ),
        (
            ["--format", "fp8", "--kv-cache", "fp4"],
            "error: --kv-cache: found 'fp4'; allowed: one of none, fp8,",
        ),
        (
            ["--format", "fp8", "--num-samples", "0"],
            "error: --num-samples: found 0; allowed: a whole number from 1 to 100000; raise it to 1",
        ),
        (
            ["--format", "w8a8_sq", "--alpha", "7"],
            "error: --alpha: found 7.0; allowed: a number from 0 to 1; lower it to 1 or less\n",
        ),
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


@pytest.mark.slow
def test_too_few_calibration_texts_are_told_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    make_tiny_model(tmp_path / "model")
    texts = "".join(json.dumps({"text": f"Text number {n} about the weather."}) + "\n" for n in range(3))
    (tmp_path / "texts.jsonl").write_text(texts)
    wanted = "quantization: {kind: none, kv_cache: fp8, calibration: {data: texts.jsonl, num_samples: 8}}\n"
    (tmp_path / "recipe.yaml").write_text(RECIPE + wanted)
    engines = tmp_path / "engines"
    data = tmp_path / "texts.jsonl"
    warning = f"calibration: 8 texts asked for (num_samples), {data} has 3; all are used"
    assert main(["build", str(tmp_path / "recipe.yaml"), "-o", str(engines)]) == 0
    assert f"warning: {warning}\n" in capsys.readouterr().err
    assert main(["build", str(tmp_path / "recipe.yaml"), "-o", str(engines), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == [warning]
    assert main(["inspect", str(engines / "tiny")]) == 0
    shown = capsys.readouterr().out
    assert f"warning       {warning}\n" in shown
    assert f"calibrated on 3 texts of {data}: " in shown
    report = json.loads((engines / "tiny" / "target" / "quantization_report.json").read_text())
    assert report["warnings"] == [warning]
    assert f"rows digest   {report['calibration']['digest']} (of the token ids made from them" in shown
    file_digest = hashlib.sha256(texts.encode()).hexdigest()
    assert f"texts digest  {file_digest} (of the file of calibration texts)\n" in shown


@pytest.mark.parametrize(
    ("verb", "shown"),
    [
        ("quantize", ["128", "0.5", "64", "512", "(0)", "texts that ship with"]),
        ("init", ["NAME.yaml", "from the model", "the largest that divides", "embedded", "ngram"]),
        ("build", ["engines"]),
        ("list", ["engines"]),
    ],
)
def test_help_shows_defaults(verb: str, shown: list[str], capsys: pytest.CaptureFixture[str]):
    assert main([verb, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    defaults = [part.split("]")[0] for part in text.split("[default: ")[1:]]
    for word in shown:
        assert any(word in default for default in defaults), (word, defaults)


@pytest.mark.parametrize(
    ("words", "incomplete", "offered"),
    [
        (["quantize", "--format"], "w4", {"w4a16_awq", "w4a8_awq"}),
        (["quantize", "--kv-cache"], "", {"none", "fp8", "int8", "nvfp4"}),
        (["quantize", "--group-size"], "", {"32", "64", "128"}),
        (["lint", "--explain"], "model-g", {"model-group-size"}),
        (["lint", "--explain"], "serving-p", {"serving-ports"}),
        (["init", "--group-size"], "3", {"32"}),
        (["fetch"], "", {"smollm2-135m-instruct"}),
    ],
)
def test_completion_offers_the_choices(words: list[str], incomplete: str, offered: set[str]):
    found = ShellComplete(cli, {}, "trtspec", "_TRTSPEC_COMPLETE").get_completions(words, incomplete)
    assert {item.value for item in found} == offered


def test_quantize_needs_something_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    make_tiny_model(tmp_path / "model")
    argv = ["quantize", "--model", str(tmp_path / "model"), "-o", str(tmp_path / "out"), "--format", "none"]
    assert main(argv) == 2
    assert "nothing to quantize" in capsys.readouterr().err
