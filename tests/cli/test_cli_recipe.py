"""init, lint and schema, as a user calls them."""

from __future__ import annotations

import itertools
import json
import os
import stat
from pathlib import Path

import pytest
from bad_recipes import BAD_RECIPES, HEAD

from trtspec.cli import main
from trtspec.recipe_docs import markdown
from trtspec.recipe_file import json_schema, lint_content, load_recipe
from trtspec.recipe_model import MODEL_RULES
from trtspec.recipe_rules import RULES

TYPICAL = HEAD + "acceptance: {kind: typical}\nspeculation: {kind: ngram}\ngates: {lossless: false}\n"
"""Valid, with a note: approximate."""
WARNED = HEAD + "speculation: {kind: ngram, corpus_min_count: 2}\n"
"""Valid, with a warning."""

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _inside_an_empty_folder(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any model: neither samples nor a hub cache."""
    monkeypatch.chdir(tmp_path)
    elsewhere = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("TRTSPEC_CACHE", str(elsewhere))
    monkeypatch.setenv("HF_HUB_CACHE", str(elsewhere / "hub"))


# --------------------------------------------------------------------------- lint


def test_lint_of_a_good_recipe(capsys: Capture) -> None:
    Path("r.yaml").write_text(HEAD)
    assert main(["lint", "r.yaml"]) == 0
    note = "r.yaml:3: note: model.source: x is not on this machine; its group sizes, positions and vocabulary"
    assert capsys.readouterr() == (f"r.yaml: ok\n{note} were not checked\n", "")


@pytest.mark.parametrize(
    ("content", "expected"), [case[1:] for case in BAD_RECIPES], ids=[case[0] for case in BAD_RECIPES]
)
def test_lint_of_a_bad_recipe(content: str | bytes, expected: list[str], capsys: Capture) -> None:
    raw = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    Path("r.yaml").write_bytes(raw)
    assert main(["lint", "r.yaml"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if ": warning: " not in line] == [f"r.yaml:{line}" for line in expected]
    assert os.listdir() == ["r.yaml"]
    assert Path("r.yaml").read_bytes() == raw


def test_warnings_do_not_fail(capsys: Capture) -> None:
    Path("r.yaml").write_text(WARNED)
    assert main(["lint", "r.yaml"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("r.yaml:5: warning: speculation.corpus_min_count: ")
    assert out.splitlines()[0].endswith("[speculation-corpus-count]")
    assert len(out.splitlines()) == 2


def test_approximate_acceptance_is_no_mistake_and_not_passed_over(capsys: Capture) -> None:
    Path("r.yaml").write_text(TYPICAL)
    assert main(["lint", "r.yaml"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "r.yaml: ok"
    [line] = [line for line in rest if "acceptance" in line]
    assert line.startswith("r.yaml:5: note: acceptance.kind: typical is approximate: sampled output is not")
    assert line.endswith("[acceptance-approximate]")


def test_lint_of_several_files_reports_all(capsys: Capture) -> None:
    Path("a.yaml").write_text(HEAD)
    Path("b.yaml").write_text(HEAD + "banana: 1\n")
    assert main(["lint", "a.yaml", "b.yaml", "none.yaml", "."]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a.yaml: ok"
    assert lines[1].startswith("a.yaml:3: note: model.source: x is not on this machine; ")
    assert lines[2].startswith("b.yaml:5: banana: unknown key")
    assert lines[3].startswith("none.yaml: no such file")
    assert lines[4].startswith(".: is a folder")
    assert lines[5] == "4 recipes: 1 valid, 3 not (3 errors, 0 warnings)"


def test_lint_as_json(capsys: Capture) -> None:
    Path("a.yaml").write_text(WARNED)
    Path("b.yaml").write_text(HEAD + "banana: 1\n")
    assert main(["lint", "a.yaml", "b.yaml", "--json"]) == 2
    result = json.loads(capsys.readouterr().out)
    assert result["trtspec"]["schema"] == "trtspec.lint/1"
    good, bad = result["files"]
    assert (good["file"], good["ok"], good["name"], good["errors"]) == ("a.yaml", True, "a", [])
    assert len(good["digest"]) == 64
    assert good["warnings"][0]["key"] == "speculation.corpus_min_count"
    assert good["notes"][0]["key"] == "model.source"
    assert bad["notes"] == []
    assert (bad["ok"], bad["name"], bad["digest"]) == (False, None, None)
    assert {key: bad["errors"][0][key] for key in ("file", "line", "key")} == {
        "file": "b.yaml", "line": 5, "key": "banana"
    }  # fmt: skip


@pytest.mark.parametrize("rule", [*RULES, *MODEL_RULES])
def test_every_rule_explains_itself(rule: str, capsys: Capture) -> None:
    assert main(["lint", "--explain", rule]) == 0
    assert {**RULES, **MODEL_RULES}[rule].why in capsys.readouterr().out
    assert main(["lint", "--explain", rule, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rule"] == rule


def test_an_unknown_rule(capsys: Capture) -> None:
    assert main(["lint", "--explain", "serving-port"]) == 2
    assert "no rule 'serving-port'; did you mean serving-ports" in capsys.readouterr().err


def test_lint_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a socket")

    monkeypatch.setattr("socket.socket.connect", refuse)
    recipes = sorted((Path(__file__).resolve().parents[2] / "recipes").rglob("*.yaml"))
    assert len(recipes) > 5
    assert main(["lint", *map(str, recipes)]) == 0


# --------------------------------------------------------------------------- init


def test_init_writes_what_lint_accepts(capsys: Capture) -> None:
    assert main(["init"]) == 0
    name = "smollm2-135m-instruct-fp8-ngram"
    note, wrote = capsys.readouterr().out.splitlines()
    assert "sample:smollm2-135m-instruct is not on this machine (run: trtspec fetch" in note
    assert wrote == f"wrote {name}.yaml; next: trtspec build {name}.yaml"
    assert os.listdir() == [f"{name}.yaml"]
    assert load_recipe(f"{name}.yaml").name == name
    assert main(["lint", f"{name}.yaml"]) == 0
    assert stat.S_IMODE(os.stat(f"{name}.yaml").st_mode) & 0o444 == 0o444


def test_init_takes_every_choice(capsys: Capture) -> None:
    arguments = [
        "init",
        "--name",
        "x",
        "--model",
        "org/m",
        "--backend",
        "pytorch",
        "--quantization",
        "w4a16_awq",
    ]
    arguments += [
        "--kv-cache",
        "none",
        "--speculation",
        "draft_model",
        "--draft-model",
        "org/d",
        "-o",
        "y.yaml",
    ]
    assert main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["file"], result["name"], result["warnings"]) == ("y.yaml", "x", [])
    recipe = load_recipe("y.yaml")
    assert recipe.model.source == "org/m"
    assert recipe.backend.kind == "pytorch"
    assert (recipe.quantization.kind, recipe.quantization.kv_cache) == ("w4a16_awq", "none")
    assert recipe.speculation.kind == "draft_model"
    assert recipe.speculation.model.source == "org/d"


def test_every_combination_of_kinds_is_written_or_refused_with_a_reason(capsys: Capture) -> None:
    properties = json_schema()["$defs"]
    speculations = ["none", "ngram", "lookahead", "draft_model", "medusa", "eagle", "eagle3"]
    quantizations = ["none", "fp8", "w4a16_awq", "w4a8_awq", "w8a8_sq", "nvfp4"]
    assert "Eagle3Speculation" in properties
    outcomes = set()
    for backend, quantization, speculation in itertools.product(
        ["embedded", "tensorrt", "pytorch"], quantizations, speculations
    ):
        arguments = [
            "init",
            "--backend",
            backend,
            "--quantization",
            quantization,
            "--speculation",
            speculation,
        ]
        arguments += ["--draft-model", "org/d"] if speculation == "draft_model" else []
        arguments += ["--heads", "./h"] if speculation in ("medusa", "eagle", "eagle3") else []
        code = main([*arguments, "-o", "-"])
        out, err = capsys.readouterr()
        outcomes.add(code)
        if code == 0:
            assert lint_content(out).recipe is not None
            assert err == ""
        else:
            assert code == 2
            assert out == ""
            assert all(line.startswith("error: ") and line.endswith("]") for line in err.splitlines())
    assert outcomes == {0, 2}
    assert os.listdir() == []


def test_init_does_not_overwrite(capsys: Capture) -> None:
    Path("r.yaml").write_text("mine")
    assert main(["init", "-o", "r.yaml"]) == 2
    assert capsys.readouterr().err == "error: r.yaml: exists; choose another name, or --force to overwrite\n"
    assert Path("r.yaml").read_text() == "mine"
    assert os.listdir() == ["r.yaml"]
    assert main(["init", "-o", "r.yaml", "--force"]) == 0
    assert load_recipe("r.yaml")
    assert os.listdir() == ["r.yaml"]


def test_init_does_not_follow_a_dangling_link(capsys: Capture) -> None:
    Path("r.yaml").symlink_to("elsewhere.yaml")
    assert main(["init", "-o", "r.yaml"]) == 2
    assert not Path("elsewhere.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--name", "Bad Name"], "name: found 'Bad Name'"),
        (["--name", ""], "name: found ''"),
        (["--model", ""], "model.source: found ''"),
        (["--speculation", "medusa"], "--speculation medusa needs --heads"),
        (["--speculation", "draft_model"], "--speculation draft_model needs --draft-model"),
        (["--heads", "h"], "--heads goes with"),
        (["--draft-model", "h"], "--draft-model goes with"),
        (["--backend", "vllm"], "'vllm' is not one of"),
        (["-o", "nowhere/r.yaml"], "nowhere/r.yaml: no such file or directory; check the path"),
        (
            ["--backend", "tensorrt", "--speculation", "eagle3", "--heads", "h"],
            "speculation.kind: found eagle3; allowed on tensorrt",
        ),
    ],
)
def test_what_init_refuses(arguments: list[str], message: str, capsys: Capture) -> None:
    assert main(["init", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b-instruct-fp8-ngram"),
        ("./My Model/", "my-model-fp8-ngram"),
        ("модель", "model-fp8-ngram"),
        ("x" * 100, "x" * 63),
    ],
)
def test_names_made_from_models(model: str, name: str) -> None:
    assert main(["init", "--model", model]) == 0
    assert os.listdir() == [f"{name}.yaml"]


# --------------------------------------------------------------------------- schema


def test_schema_is_json_schema(capsys: Capture) -> None:
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema == json.loads(json.dumps(json_schema()))


def test_schema_into_a_file_overwrites_it(capsys: Capture) -> None:
    for _ in range(2):
        assert main(["schema", "--markdown", "-o", "recipes.md"]) == 0
    assert Path("recipes.md").read_text() == markdown()
    assert capsys.readouterr() == ("", "")
    assert os.listdir() == ["recipes.md"]


def test_a_folder_without_permission(capsys: Capture) -> None:
    Path("out").mkdir()
    Path("out").chmod(0o555)
    user = os.geteuid()
    os.seteuid(user or 65534)  # root writes everywhere
    try:
        code = main(["schema", "-o", "out/x.json"])
    finally:
        os.seteuid(user)
    assert code == 3
    assert "out/x.json: permission denied; give permission or name another place" in capsys.readouterr().err
