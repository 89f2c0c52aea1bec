"""The script for NVIDIA's container, run here with stand-ins for its tools that write down their words."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from trtspec.recipe import Recipe
from trtspec.recipe_file import load_recipe, parse_recipe
from trtspec.trtllm.facts import versions_for
from trtspec.trtllm.plan import LLM_API_FILE, TRITON_DIR, TrtllmPlan, plan_commands
from trtspec.trtllm.script import _inside_quotes, _quoted, render_script
from trtspec.versions import parse_range

RECIPES = Path(__file__).parents[2] / "recipes"
MEDUSA, EAGLE3, NGRAM = (
    load_recipe(RECIPES / f"{name}.yaml")
    for name in (
        "vicuna-7b-fp8-medusa-tensorrt",
        "llama-3.1-8b-fp8-eagle3-pytorch",
        "llama-3.1-8b-w4a16-ngram-pytorch",
    )
)
ALL = [load_recipe(path) for path in sorted(RECIPES.glob("*.yaml"))]

_TOOL = """\
#!/bin/bash
printf '%s' "$(basename "$0")" >> "$CALLS"
printf ' <%s>' "$@" >> "$CALLS"
printf '\\n' >> "$CALLS"
[ "$(basename "$0")" = "$FAIL" ] && exit 1
while [ $# -gt 0 ]; do
  case "$1" in -o | --output_dir) mkdir -p "$2"; printf '%s' "$BUILT" > "$2/config.json" ;; esac
  shift
done
exit 0
"""
_PYTHON = """\
#!/bin/bash
case "$1" in
  -c) [ -n "$VERSION" ] || { echo "No module named tensorrt_llm" >&2; exit 1; }
      echo "a line of logging"; echo "$VERSION" ;;
  -) exec "$REAL_PYTHON" "$@" ;;
  *) exec "$(dirname "$0")/convert" "$@" ;;
esac
"""
BUILT = (
    '{"build_config": {"max_draft_len": 63, "max_batch_size": 8, '
    '"plugin_config": {"use_paged_context_fmha": true}}}'
)

Done = subprocess.CompletedProcess[str]
Run = Callable[..., Done]


def bash(script: str, *options: str, **more: Any) -> Done:
    return subprocess.run(
        ["bash", *options], input=script, capture_output=True, text=True, check=False, **more
    )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a plan's script in a folder whose name is awkward."""
    tools, work = tmp_path / "tools", tmp_path / "a $HOME `x` b: #{c} 'd' 😀"
    for folder in (tools, work / "model", work / "heads", work / "draft"):
        folder.mkdir(parents=True)
    for name, text in (
        ("python3", _PYTHON),
        ("convert", _TOOL),
        ("trtllm-build", _TOOL),
        ("trtspec", _TOOL),
        ("trtllm-serve", _TOOL),
    ):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)

    def go(plan: TrtllmPlan, **changes: str) -> Done:
        environment = {
            "PATH": f"{tools}:/usr/bin:/bin",
            "CALLS": str(tmp_path / "calls"),
            "REAL_PYTHON": sys.executable,
            "VERSION": plan.version,
            "BUILT": BUILT,
            "FAIL": "",
            "MODEL_DIR": str(work / "model"),
            "HEADS_DIR": str(work / "heads"),
            "DRAFT_DIR": str(work / "draft"),
            "WORK_DIR": str(work / "out"),
            **changes,
        }
        return bash(render_script(plan), "-s", env=environment, cwd=work)

    return go


def calls(tmp_path: Path) -> list[str]:
    path = tmp_path / "calls"
    return path.read_text().splitlines() if path.exists() else []


def out(tmp_path: Path) -> Path:
    return next(tmp_path.glob("a *")) / "out"


@pytest.mark.parametrize("recipe", [r for r in ALL if r.backend.kind != "embedded"], ids=lambda r: r.name)
def test_every_script_is_bash(recipe: Recipe) -> None:
    for version in versions_for(recipe.backend.kind, parse_range(recipe.backend.version)):  # type: ignore[union-attr]
        script = render_script(plan_commands(recipe, version))
        checked = bash(script, "-n")
        assert (checked.returncode, checked.stderr) == (0, "")
    assert bash(script.replace("set -euo", "if\nset -euo", 1), "-n").returncode == 2


def test_the_tools_hear_the_plans_words(run: Run, tmp_path: Path) -> None:
    plan = plan_commands(MEDUSA, "1.2.1")
    done = run(plan)
    assert (done.returncode, done.stderr) == (0, "")
    assert "engine: built as asked" in done.stdout
    quantize, build = calls(tmp_path)
    folder = out(tmp_path).parent
    assert quantize.startswith("convert </app/tensorrt_llm/examples/quantization/quantize.py>")
    assert f"<--model_dir> <{folder}/model>" in quantize
    assert "<--calib_dataset> <cnn_dailymail>" in quantize
    words = [word.replace("${WORK_DIR}", str(out(tmp_path))) for word in plan.commands[1].argv[1:]]
    assert build == "trtllm-build" + "".join(f" <{word}>" for word in words)


def test_run_again_it_does_nothing_and_after_a_failure_it_goes_on(run: Run, tmp_path: Path) -> None:
    plan = plan_commands(MEDUSA, "1.2.1")
    failed = run(plan, FAIL="trtllm-build")
    assert failed.returncode == 1
    assert [call.split()[0] for call in calls(tmp_path)] == ["convert", "trtllm-build"]
    assert run(plan).returncode == 0
    assert [call.split()[0] for call in calls(tmp_path)][2:] == ["trtllm-build"]
    again = run(plan)
    assert again.stdout.count("done before") == 2
    assert len(calls(tmp_path)) == 3
    other = MEDUSA.model_copy(update={"limits": MEDUSA.limits.model_copy(update={"max_batch_size": 4})})
    assert run(plan_commands(other, "1.2.1")).returncode == 0
    assert [call.split()[0] for call in calls(tmp_path)][3:] == ["trtllm-build"], "only what changed"


def test_a_folder_of_somebody_else_is_not_removed(run: Run, tmp_path: Path) -> None:
    plan = plan_commands(EAGLE3, "1.2.1")
    thesis = out(tmp_path) / "target" / "thesis.txt"
    thesis.parent.mkdir(parents=True)
    thesis.write_text("years of work")
    done = run(plan)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "target is there and not made by this script; move it away" in done.stderr
    assert thesis.read_text() == "years of work"
    assert calls(tmp_path) == []
    thesis.unlink()
    thesis.parent.rmdir()
    assert run(plan, FAIL="trtspec").returncode == 1
    thesis.parent.mkdir(exist_ok=True)
    assert run(plan).returncode == 0, "what an unfinished run left is the script's own"


def test_a_change_of_the_first_step_does_all_of_them_again(run: Run, tmp_path: Path) -> None:
    assert run(plan_commands(MEDUSA, "1.2.1")).returncode == 0
    kept = MEDUSA.quantization.model_copy(update={"kv_cache": "none"})
    assert run(plan_commands(MEDUSA.model_copy(update={"quantization": kept}), "1.2.1")).returncode == 0
    assert [call.split()[0] for call in calls(tmp_path)] == ["convert", "trtllm-build"] * 2


@pytest.mark.parametrize(
    "built",
    [
        '{"build_config": {"max_draft_len": 0, "max_batch_size": 8}}',
        '{"build_config": {"max_draft_len": 63, "max_batch_size": 4}}',
        BUILT.replace("true", "false"),
    ],
)
def test_an_engine_that_is_not_what_was_asked_for_fails(built: str, run: Run) -> None:
    done = run(plan_commands(MEDUSA, "1.2.1"), BUILT=built)
    assert done.returncode == 1
    assert "built as asked" not in done.stdout


@pytest.mark.parametrize("version", ["1.2.1.post1", "1.2.1+cu130"])
def test_builds_of_the_same_version_pass(version: str, run: Run) -> None:
    assert run(plan_commands(MEDUSA, "1.2.1"), VERSION=version).returncode == 0


def test_what_lacks_is_said_in_one_line(run: Run, tmp_path: Path) -> None:
    plan = plan_commands(MEDUSA, "1.2.1")
    wrong = run(plan, VERSION="1.2.10")
    assert wrong.returncode == 3
    assert "is for TensorRT-LLM 1.2.1, found 1.2.10" in wrong.stderr
    absent = run(plan, VERSION="")
    assert absent.returncode == 3
    assert "TensorRT-LLM is not installed here" in absent.stderr
    lacking = run(plan, HEADS_DIR="/nonexistent")
    assert lacking.returncode == 2
    assert lacking.stderr.count("\n") == 1
    assert "FasterDecoding/medusa-vicuna-7b-v1.3" in lacking.stderr
    assert calls(tmp_path) == []
    nvfp4 = parse_recipe(
        "version: 1\nname: x\nmodel: {source: m}\nbackend: {kind: pytorch}\nquantization: {kind: nvfp4}\n"
    )
    lacking = run(plan_commands(nvfp4, "1.2.1"))
    assert lacking.returncode == 3
    assert "NVFP4, which trtspec does not make" in lacking.stderr


@pytest.mark.parametrize("recipe", [EAGLE3, NGRAM, MEDUSA], ids=lambda recipe: recipe.name)
def test_files_arrive_as_they_were_rendered(recipe: Recipe, run: Run, tmp_path: Path) -> None:
    plan = plan_commands(recipe, "1.2.1")
    assert f"{TRITON_DIR}/" in "".join(plan.files)
    assert run(plan).returncode == 0
    folder = out(tmp_path)
    for name, text in plan.files.items():
        for variable, place in (("WORK_DIR", "out"), ("MODEL_DIR", "model"), ("HEADS_DIR", "heads")):
            text = text.replace(f"${{{variable}}}", str(folder.parent / place))
        assert (folder / name).read_text() == text, name
    made = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert plan.files.keys() <= made


@pytest.mark.parametrize("mark", ['"', "\\", "\n", "\x1b", "\x7f"])
def test_folders_that_the_files_cannot_hold_are_refused(mark: str, run: Run, tmp_path: Path) -> None:
    plan = plan_commands(EAGLE3, "1.2.1")
    for variable in ("MODEL_DIR", "HEADS_DIR", "WORK_DIR"):
        folder = tmp_path / f"{variable}{mark}"
        folder.mkdir()
        done = run(plan, **{variable: str(folder)})
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert done.stderr.startswith(f"error: {variable}: a quote, ")
    assert calls(tmp_path) == []
    # The broken variant: without the refusal the file says something else, or nothing.
    text = plan.files[LLM_API_FILE]
    good, bad = text.replace("${HEADS_DIR}", "/h"), text.replace("${HEADS_DIR}", f"/h{mark}t: 1")
    assert yaml.safe_load(good)["speculative_config"]["speculative_model"] == "/h"
    with contextlib.suppress(yaml.YAMLError):
        assert yaml.safe_load(bad)["speculative_config"]["speculative_model"] != f"/h{mark}t: 1"


def test_a_quote_is_no_matter_where_no_file_holds_it(run: Run, tmp_path: Path) -> None:
    plan = plan_commands(load_recipe(RECIPES / "vicuna-7b-fp16-eagle-tensorrt.yaml"), "1.2.1")
    assert not plan.files
    (tmp_path / 'a "b" \\').mkdir()
    built = BUILT.replace("63", "99").replace("8", "16")
    assert run(plan, HEADS_DIR=str(tmp_path / 'a "b" \\'), BUILT=built).returncode == 0


def test_relative_folders_become_absolute(run: Run, tmp_path: Path) -> None:
    """Triton and trtllm-serve start elsewhere."""
    plan = plan_commands(EAGLE3, "1.2.1")
    done = run(plan, MODEL_DIR="model", HEADS_DIR="heads", WORK_DIR="out")
    assert (done.returncode, done.stderr) == (0, "")
    here = out(tmp_path).parent
    options = yaml.safe_load((here / "out" / LLM_API_FILE).read_text())
    assert options["speculative_config"]["speculative_model"] == str(here / "heads")
    assert f"<{here}/model>" in calls(tmp_path)[0]


def test_text_that_is_bash_stays_text(run: Run, tmp_path: Path) -> None:
    text = "a $HOME ${HOME} `date` $(date) \\ \\n 'x' \"y\" !\nTRTSPEC_END\n${WORK_DIR}\n"
    plan = replace(plan_commands(NGRAM, "1.2.1"), files={LLM_API_FILE: text})
    assert run(plan).returncode == 0
    found = (out(tmp_path) / LLM_API_FILE).read_text()
    assert found == text.replace("${WORK_DIR}", str(out(tmp_path)))


@pytest.mark.parametrize(
    "word", ["plain", "a b", "it's", '"', "$HOME", "`x`", "\\", "a\\$b", "*", "", "!", "é"]
)
@pytest.mark.parametrize("variable", ["", "${MODEL_DIR}/"])
def test_words_reach_the_tool_as_they_are(variable: str, word: str) -> None:
    printed = subprocess.run(
        ["bash", "-c", f"MODEL_DIR=/m; printf %s {_quoted(variable + word)}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert printed == variable.replace("${MODEL_DIR}", "/m") + word


def test_without_escaping_the_shell_would_speak() -> None:
    """The broken variant of the quoting above: what it protects from happens without it."""
    word = "${MODEL_DIR}/$(echo spoken)"
    for quoted, expected in ((f'"{word}"', "/m/spoken"), (f'"{_inside_quotes(word)}"', "/m/$(echo spoken)")):
        printed = subprocess.run(
            ["bash", "-c", f"MODEL_DIR=/m; printf %s {quoted}"], capture_output=True, text=True, check=True
        )
        assert printed.stdout == expected
