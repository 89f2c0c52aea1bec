"""The verb: tables, JSON, files that lint and build read, exit codes and messages."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from trtspec.cli import main
from trtspec.recipe_file import lint

BASIC = ["recommend", "--scenario", "interactive", "--model", "8B", "--gpu", "H100-SXM"]


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(BASIC) == 0
    said = capsys.readouterr()
    for text in (
        "chosen",
        "W4A16",
        "draft_model K=",
        "rejected",
        "TPOT ms",
        "16 bit, no drafting",
        "basis: roofline",
    ):
        assert text in said.out
    assert "every number" not in said.out
    assert said.err.startswith("warning: ") or said.err == ""


def test_explain_prints_each_number_with_its_formula(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASIC, "--explain"]) == 0
    out = capsys.readouterr().out
    assert "tpot_ms = " in out
    assert "round/acceptance_length + interference" in out
    assert "kv_bytes_per_token" in out
    assert "[TPOT without" in " ".join(out.split())


@pytest.mark.parametrize(
    "arguments",
    [
        BASIC[1:],
        ["--scenario", "high-throughput", "--model", "70B", "--gpu", "H100-SXM", "--count", "4"],
        ["--scenario", "edge-8gb", "--model", "7B", "--gpu", "RTX 4060"],
        ["--scenario", "repetitive", "--model", "135M", "--gpu", "none"],
        ["--scenario", "interactive", "--model", "8B", "--gpu", "H100-SXM", "--backend", "embedded"],
    ],
)
def test_the_file_lints_clean_and_says_why(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    assert main(["recommend", *arguments, "-o", str(path)]) == 0
    assert f"trtspec build {path}" in capsys.readouterr().out
    found = lint(path)
    assert found.recipe is not None
    assert [*found.errors, *found.warnings] == []
    comments = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert len(comments) > 10
    assert main(["recommend", *arguments, "-o", str(path)]) == 2
    assert "exists" in capsys.readouterr().err
    assert main(["recommend", *arguments, "-o", str(path), "--force"]) == 0


def test_stdout_is_the_recipe_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASIC, "-o", "-"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("# Recommended")
    assert "rejected" not in out
    assert main([*BASIC, "-o", "-", "--json"]) == 2


def test_json_carries_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASIC, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["trtspec"]["schema"] == "trtspec.recommend/1"
    assert data["recipe"]["quantization"]["kind"] == "w4a16_awq"
    trace = {line["name"]: line["value"] for line in data["trace"]}
    assert trace["tpot_ms"] == data["estimate"]["tpot_ms"]
    assert data["estimate"]["ttft_ms"] >= data["no_drafting"]["ttft_ms"]
    assert all(reason["because"] for reason in data["because"])
    assert any(rejected["tpot_ms"] for rejected in data["rejected"])


def test_a_scenario_by_options_alone_or_over_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--input-tokens", "512", "--output-tokens", "128", "--concurrency", "2", "--fidelity", "exact"]
    assert main(["recommend", *options, "--model", "8B", "--gpu", "L40S", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["scenario"]["name"], data["recipe"]["quantization"]["kind"]) == ("custom", "none")
    assert main([*BASIC, "--concurrency", "3", "--slo-tpot-ms", "1", "--json"]) == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert (data["scenario"]["concurrency"], data["scenario"]["slo"]["tpot_ms"]) == (3, 1.0)
    assert data["scenario"]["slo"]["ttft_ms"] == 500.0
    assert "misses the 1 ms" in captured.err


def test_measured_step_times_recalibrate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [
        {"input_tokens": 1024, "output_tokens": 512, "concurrency": n, "tpot_ms": 2 * ms}
        for n, ms in ((1, 6.6), (8, 7.5), (16, 8.4), (32, 9.9), (64, 13.1))
    ]
    path = tmp_path / "steps.json"
    path.write_text(json.dumps({"schema": "trtspec.steps/1", "steps": steps}))
    assert main([*BASIC, "--calibrate", str(path), "--json"]) == 0
    slow = json.loads(capsys.readouterr().out)
    assert main([*BASIC, "--json"]) == 0
    usual = json.loads(capsys.readouterr().out)
    assert slow["estimate"]["basis"] == "calibrated"
    assert slow["baseline"]["tpot_ms"] > 1.7 * usual["baseline"]["tpot_ms"]
    path.write_text("{}")
    assert main([*BASIC, "--calibrate", str(path)]) == 2


def test_a_scenario_to_copy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["recommend", "--show-scenario", "edge-8gb"]) == 0
    path = tmp_path / "mine.yaml"
    path.write_text(capsys.readouterr().out.replace("edge-8gb", "mine"))
    assert main(["recommend", "--scenario", str(path), "--model", "7B", "--gpu", "RTX-4060"]) == 0
    assert capsys.readouterr().out.startswith("mine: ")


def test_the_commands_of_the_page_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "recommend.md").read_text()
    commands = [line for line in page.splitlines() if line.startswith("trtspec recommend --")]
    assert len(commands) == 4
    for command in commands:
        words = [str(tmp_path / word) if word == "chat.yaml" else word for word in shlex.split(command)[1:]]
        words = ["8B" if word == "./checkpoint" else word for word in words]
        assert main(words) == 0, command
    assert (tmp_path / "chat.yaml").exists()


REFUSED = [
    (["--model", "9B"], 2, "the nearest is 8B"),
    (["--gpu", "V100"], 2, "Known: A100-PCIe-80G"),
    (["--gpu", "A100"], 2, "name one of them"),
    (["--model", "405B"], 2, "what would: --count"),
    (["--model", "70B", "--scenario", "zero-tolerance"], 4, "quality gate is passed"),
    (["--scenario", "interactiv"], 2, "did you mean interactive"),
    (["--concurrency", "0"], 2, "--concurrency: found 0"),
    (["--fidelity", "perfect"], 2, "--fidelity: found 'perfect'"),
    (["--count", "0"], 2, "allowed: 1 to 64"),
    (["--backend", "vllm"], 2, "vllm"),
    (["--report", "nowhere.json"], 2, "nowhere.json"),
    (["--heads", "./nowhere"], 2, "no such folder"),
    (["--gpu", "A10"], 2, "rate"),
    (["--weights", "nvfp4"], 2, "sm100"),
    (["--weights", "fp8", "--fidelity", "exact"], 4, "quality gate"),
]


@pytest.mark.parametrize(("arguments", "code", "says"), REFUSED)
def test_refusals(arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASIC, *arguments]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert says in said.err
    assert main([*BASIC, *arguments, "--json"]) == code
    assert json.loads(capsys.readouterr().out)["exit_code"] == code


def test_what_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recommend", "--scenario", "interactive"]) == 2
    assert "--model and --gpu missing" in capsys.readouterr().err
    assert main(["recommend", "--model", "8B", "--gpu", "L4"]) == 2
    assert "--input-tokens: missing" in capsys.readouterr().err


def test_neither_torch_nor_numpy_is_imported() -> None:
    code = (
        "import sys; from trtspec.cli import main; "
        f"assert main({BASIC!r}) == 0; "
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
