"""Plans for TensorRT-LLM: every shipped GPU recipe for every known version, byte for byte; refusals."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from trtspec.errors import InputError
from trtspec.hardware import find_gpu
from trtspec.recipe import Recipe
from trtspec.recipe_file import load_recipe, parse_recipe
from trtspec.trtllm import engines, llm_api
from trtspec.trtllm.facts import versions_for
from trtspec.trtllm.plan import LLM_API_FILE, Paths, choose_version, label, plan_commands
from trtspec.trtllm.script import render_script
from trtspec.versions import parse_range

RECIPES = Path(__file__).parents[2] / "recipes"
GOLDEN = Path(__file__).parents[1] / "golden" / "trtllm"
UPDATE = os.environ.get("TRTSPEC_UPDATE_GOLDEN") == "1"


def gpu_recipes() -> dict[str, Recipe]:
    found = {path.stem: load_recipe(path) for path in sorted(RECIPES.glob("*.yaml"))}
    return {name: recipe for name, recipe in found.items() if recipe.backend.kind != "embedded"}


SHIPPED = gpu_recipes()
CASES = [
    (name, version)
    for name, recipe in SHIPPED.items()
    for version in versions_for(recipe.backend.kind, parse_range(recipe.backend.version))
]


def of(text: str) -> Recipe:
    return parse_recipe(f"version: 1\nname: x\nmodel: {{source: m}}\n{text}")


@pytest.mark.parametrize(("name", "version"), CASES)
def test_shipped_recipes_render_to_the_golden_script(name: str, version: str) -> None:
    """Without the Triton repository, which has tests of its own."""
    plan = plan_commands(SHIPPED[name], version)
    shown = {path: text for path, text in plan.files.items() if path == LLM_API_FILE}
    script = render_script(replace(plan, files=shown))
    golden = GOLDEN / f"{name}-{version}" / "build.sh"
    if UPDATE:
        golden.parent.mkdir(parents=True, exist_ok=True)
        golden.write_text(script)
    assert script == golden.read_text(), "TRTSPEC_UPDATE_GOLDEN=1 writes the file anew"


def test_no_golden_file_is_left_over() -> None:
    assert len(CASES) == 30
    assert {path.name for path in GOLDEN.iterdir()} == {f"{name}-{version}" for name, version in CASES}


def test_rendering_twice_gives_the_same() -> None:
    name, version = CASES[0]
    assert plan_commands(SHIPPED[name], version) == plan_commands(SHIPPED[name], version)


# --------------------------------------------------------------------------- refusals


def test_a_planted_flag_that_no_version_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = engines._build

    def planted(*args: object, **options: object) -> object:
        command = honest(*args, **options)  # type: ignore[arg-type]
        return replace(command, argv=(*command.argv, "--use_more_speed", "enable"))

    monkeypatch.setattr(engines, "_build", planted)
    with pytest.raises(InputError, match=r"--use_more_speed: unknown .*; no known version has it"):
        plan_commands(SHIPPED["vicuna-7b-fp8-medusa-tensorrt"], "1.2.1")


def test_a_planted_flag_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_workers", lambda recipe: ("--auto_parallel", "1"))
    recipe = SHIPPED["vicuna-7b-w4a16-lookahead-tensorrt"]
    assert plan_commands(recipe, "0.17.0").commands
    with pytest.raises(InputError, match=r"--auto_parallel: unknown in TensorRT-LLM 1.2.1; it exists in"):
        plan_commands(recipe, "1.2.1")


@pytest.mark.parametrize("version", ["1.0.0", "1.2.1", "1.3.0rc27", "1.4.0rc4"])
def test_a_planted_key_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = llm_api.llm_options

    def planted(*args: object) -> object:
        options = honest(*args)  # type: ignore[arg-type]
        options["kv_cache_config"]["free_memory_fraction"] = 0.9
        return options

    monkeypatch.setattr("trtspec.trtllm.plan.llm_options", planted)
    with pytest.raises(InputError, match=r"kv_cache_config.free_memory_fraction: unknown in KvCacheConfig"):
        plan_commands(SHIPPED["llama-3.1-8b-fp8-eagle3-pytorch"], version)


def test_the_rules_speak_before_anything_is_rendered() -> None:
    recipe = of("backend: {kind: tensorrt, dtype: float16}\nquantization: {kind: fp8, exclude: ['*.0.*']}")
    with pytest.raises(InputError) as error:
        plan_commands(recipe, "1.2.1")
    assert [problem.key for problem in error.value.problems] == ["quantization.exclude"]


def test_a_gpu_turns_on_its_rules() -> None:
    recipe = SHIPPED["vicuna-7b-fp8-medusa-tensorrt"]
    with pytest.raises(InputError, match=r"quantization.kind: .*sm80"):
        plan_commands(recipe, "1.2.1", gpu=find_gpu("A100-SXM-80G"))
    assert plan_commands(recipe, "1.2.1", gpu=find_gpu("H100-SXM")).commands


def test_the_embedded_backend_has_nothing_to_render() -> None:
    with pytest.raises(InputError, match="needs no TensorRT-LLM"):
        plan_commands(of("backend: {kind: embedded}"), "1.2.1")


# --------------------------------------------------------------------------- versions and labels


def test_the_newest_release_that_the_recipe_admits_is_taken() -> None:
    engine, api = SHIPPED["vicuna-7b-fp8-medusa-tensorrt"], SHIPPED["llama-3.1-8b-w4a16-ngram-pytorch"]
    assert choose_version(engine) == "1.2.1"
    assert choose_version(api) == "1.2.1"
    assert choose_version(api, "1.4.0rc4") == "1.4.0rc4"
    assert choose_version(of('backend: {kind: pytorch, version: ">=1.3.0rc1,<1.5"}')) == "1.4.0rc4"
    with pytest.raises(InputError, match=r"1.3.0rc27 is outside .* allowed: 0.17.0, 0.21.0"):
        choose_version(engine, "1.3.0rc27")
    with pytest.raises(InputError, match=r"the nearest is 1.2.1"):
        choose_version(engine, "1.2.0")
    with pytest.raises(InputError, match=r"no known version lies in ==1.1.9"):
        choose_version(of('backend: {kind: pytorch, version: "==1.1.9"}'))


def test_everything_says_that_it_was_not_run_and_names_no_registry() -> None:
    for name, version in CASES:
        plan = plan_commands(SHIPPED[name], version)
        script = render_script(plan)
        assert label(version) in script
        assert plan.container == f"tensorrt-llm/release:{version}"
        assert plan.container in script
        for text in (script, *plan.files.values()):
            assert "nvcr" not in text


def test_paths_are_the_callers() -> None:
    paths = Paths(
        model="/m", draft="/d", heads="/h", work="/w", files="/w/f", examples="/e", calibration="/c"
    )
    for name, version in CASES:
        plan = plan_commands(SHIPPED[name], version, paths=paths)
        words = [word for command in plan.commands for word in command.argv]
        assert not any("${" in word for word in words)
        assert "${" not in plan.files.get(LLM_API_FILE, "")
