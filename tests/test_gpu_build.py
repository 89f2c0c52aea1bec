"""``build`` of recipes for a GPU on a machine without one: a script, a labelled engine, or a clear no."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from tiny import make_tiny_model

from trtspec import artifact
from trtspec.backends import open_engine
from trtspec.build import build
from trtspec.cli import main
from trtspec.errors import InputError, MissingError
from trtspec.gpu_plan import ENGINE_MOUNT, engine_plan, read_rendered, render_script_plan
from trtspec.process import ChildFailed

RECIPE = """\
version: 1
name: tiny
model: {source: model}
backend: {kind: pytorch}
speculation: {kind: ngram}
limits: {max_batch_size: 4, max_input_tokens: 128, max_seq_tokens: 256, max_num_tokens: 64}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu build")
    make_tiny_model(folder / "model")
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "engine.yaml").write_text(RECIPE.replace("pytorch", "tensorrt"))
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Path:
    return build(folder / "recipe.yaml", folder / "engines").folder


def run(*words: object) -> int:
    return main([str(word) for word in words])


# --------------------------------------------------------------------------- a built pytorch engine


def test_the_engine_holds_what_the_container_needs(engine: Path) -> None:
    opened = artifact.open_artifact(engine, check_hashes=True)
    rendered = read_rendered(opened)
    assert rendered is not None
    assert rendered.version == "1.2.1"
    assert "not run here" in rendered.label
    options = yaml.safe_load((engine / "trtllm" / "llm_api.yaml").read_text())
    assert options["speculative_config"]["decoding_type"] == "NGram"
    model = yaml.safe_load(next(engine.glob("trtllm/triton/*/1/model.yaml")).read_text())
    for path in (rendered.serve[2], rendered.serve[-1], model["model"], model["tokenizer"]):
        assert path.startswith(f"{ENGINE_MOUNT}/")
        assert (engine / path.removeprefix(f"{ENGINE_MOUNT}/")).exists(), "inside the mounted engine"


def test_built_again_it_is_up_to_date_and_another_version_renders_anew(folder: Path, engine: Path) -> None:
    assert build(folder / "recipe.yaml", folder / "engines").up_to_date
    newer = build(folder / "recipe.yaml", folder / "engines", version="1.4.0rc4")
    assert not newer.up_to_date
    assert [step.name for step in newer.manifest.steps] == ["import", "render", "check"]
    rendered = read_rendered(artifact.open_artifact(engine))
    assert rendered is not None
    assert rendered.version == "1.4.0rc4"
    assert not build(folder / "recipe.yaml", folder / "engines").up_to_date


def test_inspect_and_list_say_that_it_was_not_run(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", engine, "--check") == 0
    shown = capsys.readouterr().out
    assert "rendered and checked against the tables of TensorRT-LLM 1.2.1; not run here" in shown
    assert "trtllm-serve serve /engine/baseline --backend pytorch" in shown
    assert run("inspect", engine, "--json") == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["rendered"]["version"] == "1.2.1"
    assert run("list", "--engines-dir", engine.parent) == 0
    assert "ngram, not run here" in capsys.readouterr().out


def test_changed_or_added_files_are_noticed(folder: Path, tmp_path: Path) -> None:
    built = build(folder / "recipe.yaml", tmp_path).folder
    (built / "trtllm" / "extra.yaml").write_text("x: 1\n")
    with pytest.raises(InputError, match="added after the engine was sealed"):
        artifact.open_artifact(built)


without_tensorrt_llm = pytest.mark.skipif(
    find_spec("tensorrt_llm") is not None, reason="TensorRT-LLM is here"
)


@without_tensorrt_llm
@pytest.mark.parametrize("verb", ["serve", "verify"])
def test_serve_and_verify_say_in_one_line_what_lacks(
    verb: str, engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(verb, engine) == 3
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "backend.kind: pytorch" in errors[0]
    assert "container" in errors[0]


def test_a_draft_model_is_sealed_where_the_options_look_for_it(folder: Path, tmp_path: Path) -> None:
    make_tiny_model(folder / "draft", seed=1, layers=1)
    path = folder / "drafted.yaml"
    path.write_text(RECIPE.replace("{kind: ngram}", "{kind: draft_model, model: {source: draft}}"))
    built = build(path, tmp_path, version="1.4.0rc4").folder
    options = yaml.safe_load((built / "trtllm" / "llm_api.yaml").read_text())
    draft = options["speculative_config"]["speculative_model"]
    assert draft == f"{ENGINE_MOUNT}/draft"
    assert (built / "draft" / "model.safetensors").is_file()


@without_tensorrt_llm
def test_opening_it_names_what_lacks(engine: Path) -> None:
    with pytest.raises(MissingError, match="needs TensorRT-LLM and an NVIDIA GPU"):
        open_engine(artifact.open_artifact(engine))


# --------------------------------------------------------------------------- dry runs


@pytest.mark.parametrize(("file", "version"), [("recipe.yaml", "1.2.1"), ("engine.yaml", "1.2.1")])
def test_a_dry_run_prints_a_script(
    file: str, version: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("build", folder / file, "--dry-run") == 0
    script = capsys.readouterr().out
    assert script.startswith("#!/usr/bin/env bash\n")
    assert f"TensorRT-LLM {version}; not run here." in script
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_a_dry_run_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("build", folder / "engine.yaml", "--dry-run", "--tensorrt-llm", "1.0.0", "--json") == 0
    fields = json.loads(capsys.readouterr().out)
    assert (fields["tensorrt_llm"], fields["backend"], fields["dry_run"]) == ("1.0.0", "tensorrt", True)
    assert fields["container"] == "tensorrt-llm/release:1.0.0"
    programs = [command["program"] for command in fields["commands"]]
    assert programs == ["llama/convert_checkpoint.py", "trtllm-build"], "the tiny model is a Llama"
    assert "not run here" in fields["label"]
    assert fields["script"].startswith("#!")


def test_a_dry_run_needs_no_model(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE.replace("source: model", "source: org/absent"))
    assert render_script_plan(path).version == "1.2.1"


def test_refusals_have_file_line_and_key(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "bad.yaml"
    path.write_text(RECIPE + "quantization: {kind: w4a8_awq, group_size: 64}\n")
    assert run("build", path, "--dry-run") == 2
    assert "bad.yaml:7: quantization.group_size: found 64" in capsys.readouterr().err
    assert run("build", folder / "recipe.yaml", "--dry-run", "--tensorrt-llm", "1.2.0") == 2
    assert "the nearest is 1.2.1" in capsys.readouterr().err
    assert run("build", folder / "recipe.yaml", "--tensorrt-llm", "0.21.0") == 2
    assert "backend.version: TensorRT-LLM 0.21.0 is outside >=1.0,<1.5" in capsys.readouterr().err


def test_a_dry_run_is_held_against_a_gpu(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "fp8.yaml"
    path.write_text(RECIPE + "quantization: {kind: fp8}\n")
    assert run("build", path, "--dry-run", "--gpu", "A100-SXM-80G") == 2
    message = capsys.readouterr().err
    assert "fp8.yaml:7: quantization.kind: fp8" in message
    assert "A100-SXM-80G is sm80" in message
    assert run("build", path, "--dry-run", "--gpu", "H100-SXM") == 0
    assert run("build", path, "--gpu", "H100-SXM") == 2


def test_the_embedded_backend_has_no_version(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "embedded.yaml"
    path.write_text(RECIPE.replace("pytorch", "embedded"))
    assert run("build", path, "--tensorrt-llm", "1.2.1") == 2
    assert "--tensorrt-llm: goes with the backends tensorrt and pytorch" in capsys.readouterr().err


# --------------------------------------------------------------------------- what is not built here


def test_an_engine_is_not_built_here(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("build", folder / "engine.yaml", "-o", folder / "none") == 3
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "trtllm-build" in message
    assert "--dry-run prints the script" in message
    assert not (folder / "none").exists()


def test_nvfp4_is_not_exported_here(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "nvfp4.yaml"
    path.write_text(RECIPE + "quantization: {kind: nvfp4}\n")
    assert run("build", path) == 3
    assert "nvfp4 is exported by ModelOpt on a CUDA GPU only" in capsys.readouterr().err


def test_paths_of_an_engine_lie_below_its_mount(folder: Path) -> None:
    plan = engine_plan(folder / "recipe.yaml")
    assert plan.model == f"{ENGINE_MOUNT}/baseline"
    assert not any("${" in text for name, text in plan.files.items() if name.endswith(".yaml"))


# --------------------------------------------------------------------------- where trtllm-build is installed

_BUILD = """\
#!/bin/bash
while [ $# -gt 0 ]; do
  case "$1" in
    --output_dir) mkdir -p "$2"; echo "$BUILT" > "$2/config.json"; echo engine > "$2/rank0.engine" ;;
    --calib_dataset) cp "$2/train.jsonl" "$CALIBRATED" ;;
  esac
  shift
done
"""
_PYTHON = """\
#!/bin/bash
case "$1" in
  -c) echo "$VERSION" ;;
  -) exec "$REAL_PYTHON" "$@" ;;
  *) exec trtllm-build "$@" ;;
esac
"""


@pytest.fixture
def nvidia(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for TensorRT-LLM 1.2.1's package and tools on this machine; what they calibrated on."""
    tools, examples, site = tmp_path / "bin", tmp_path / "examples", tmp_path / "site"
    for folder in (tools, examples, site / "tensorrt_llm-1.2.1.dist-info"):
        folder.mkdir(parents=True)
    (site / "tensorrt_llm-1.2.1.dist-info" / "METADATA").write_text("Name: tensorrt_llm\nVersion: 1.2.1\n")
    for name, text in (("trtllm-build", _BUILD), ("python3", _PYTHON)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    monkeypatch.syspath_prepend(site)
    variables = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "TRTLLM_EXAMPLES_DIR": str(examples),
        "VERSION": "1.2.1",
        "REAL_PYTHON": sys.executable,
        "BUILT": '{"build_config": {"max_draft_len": 4, "max_batch_size": 4}}',
        "CALIBRATED": str(tmp_path / "calibrated.jsonl"),
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("trtspec.build.CHILD_ENVIRONMENT", dict(os.environ))
    return tmp_path / "calibrated.jsonl"


def test_with_trtllm_build_an_engine_is_built_and_sealed(
    folder: Path, nvidia: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "quantized.yaml"
    calibrated = "quantization: {kind: fp8, kv_cache: fp8, calibration: {num_samples: 4}}\n"
    path.write_text(RECIPE.replace("pytorch", "tensorrt") + calibrated)
    built = build(path, tmp_path / "engines")
    opened = artifact.open_artifact(built.folder, check_hashes=True)
    assert [step.name for step in opened.manifest.steps] == ["import", "engine", "render", "check"]
    assert opened.manifest.tools["tensorrt_llm"] == "1.2.1"
    made = {name for name in opened.manifest.files if name.startswith("built/")}
    assert made == {"built/engine/config.json", "built/engine/rank0.engine"}, "no checkpoints, no texts"
    texts = [json.loads(line)["text"] for line in nvidia.read_text().splitlines()]
    assert len(texts) == 65, "the recipe's own calibration texts"
    rendered = read_rendered(opened)
    assert rendered is not None
    assert rendered.label == "engine built by TensorRT-LLM 1.2.1; not served here"
    assert run("inspect", built.folder) == 0
    assert rendered.label in capsys.readouterr().out
    again = build(path, tmp_path / "engines")
    assert again.up_to_date
    path.write_text(path.read_text().replace("kv_cache: fp8", "kv_cache: none"))
    assert not build(path, tmp_path / "engines").up_to_date


def test_an_engine_that_came_out_otherwise_is_not_sealed(
    folder: Path, nvidia: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    less = '{"build_config": {"max_draft_len": 0, "max_batch_size": 4}}'
    monkeypatch.setattr("trtspec.build.CHILD_ENVIRONMENT", {**os.environ, "BUILT": less})
    with pytest.raises(ChildFailed, match="max_draft_len is 0, wanted 4"):
        build(folder / "engine.yaml", tmp_path / "engines")
    assert not (tmp_path / "engines" / "tiny").exists()


def test_another_version_than_the_installed_one_is_not_built(
    folder: Path, nvidia: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MissingError, match=r"TensorRT-LLM 1.1.0: this machine has 1.2.1"):
        build(folder / "engine.yaml", tmp_path / "engines", version="1.1.0")
    monkeypatch.setenv("TRTLLM_EXAMPLES_DIR", str(tmp_path / "none"))
    with pytest.raises(MissingError, match="set TRTLLM_EXAMPLES_DIR"):
        build(folder / "engine.yaml", tmp_path / "engines")
