# ruff: noqa: E501
"""A recipe against the model on disk: what lint and init say, and that build refuses the same.

Messages are written out as a user reads them, hence the long lines.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import make_tiny_model

from trtspec.cli import main
from trtspec.errors import InputError
from trtspec.modelspec import read_modelspec
from trtspec.plan import make_plan
from trtspec.process import run
from trtspec.recipe_file import lint, load_recipe
from trtspec.recipe_model import MODEL_RULES, fitting_group_size

HEAD = """\
version: 1
name: a
model:
  source: model
backend: {kind: embedded}
limits:
  max_input_tokens: 128
  max_seq_tokens: 512
"""
DRAFT = "speculation:\n  kind: draft_model\n  model:\n    source: draft\n"
TENSORRT = HEAD.replace("embedded", "tensorrt")
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_tiny_model(tmp_path / "model")
    return tmp_path


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def said(text: str, folder: Path) -> list[str]:
    (folder / "r.yaml").write_text(text)
    result = lint("r.yaml", model=True)
    return [str(problem) for problem in (*result.errors, *result.warnings)]


W4 = "quantization:\n  kind: w4a16_awq\n"
# (rule, recipe, what is changed in the model folder, the lines that lint must say)
CASES: dict[str, tuple[str, str, dict[str, Any], list[str]]] = {
    "group size": (
        "model-group-size",
        HEAD + W4,
        {},
        [
            "r.yaml:9: quantization.group_size: 128 does not divide the 64 inputs of "
            "model.layers.0.self_attn.q_proj (and 11 more); use 32 or 64 [model-group-size]"
        ],
    ),
    "group size written out": (
        "model-group-size",
        HEAD + W4 + "  kv_cache: fp8\n  group_size: 128\n",
        {},
        [
            "r.yaml:12: quantization.group_size: 128 does not divide the 64 inputs of "
            "model.layers.0.self_attn.q_proj (and 11 more); use 32 or 64 [model-group-size]"
        ],
    ),
    "positions": (
        "model-positions",
        HEAD.replace("512", "513"),
        {},
        [
            "r.yaml:8: limits.max_seq_tokens: found 513; the model has 512 positions; lower it to 512 or less "
            "[model-positions]"
        ],
    ),
    "architecture": (
        "model-checkpoint",
        HEAD,
        {"architectures": ["MambaForCausalLM"]},
        [
            "r.yaml:4: model.source: {model}/config.json: architectures: ['MambaForCausalLM'] is not supported; "
            "one of LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM [model-checkpoint]"
        ],
    ),
    "vocabulary": (
        "model-vocabulary",
        HEAD,
        {"vocab_size": 300},
        [
            "r.yaml:4: model.source: tokenizer.json has 320 tokens, the model only 300; they belong to different "
            "models, download it again [model-vocabulary]"
        ],
    ),
    "layers that are not there": (
        "model-modules",
        HEAD + "quantization:\n  kind: fp8\n  exclude: ['*.fc1']\n",
        {},
        [
            "r.yaml:11: quantization.exclude[0]: '*.fc1' matches no linear layer; names look like "
            "model.layers.0.mlp.down_proj [model-modules]"
        ],
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_lint_finds_it_at_its_line_and_build_refuses_it(name: str, folder: Path, capsys: Capture) -> None:
    rule, text, changes, expected = CASES[name]
    edit(folder / "model" / "config.json", **changes)
    expected = [line.replace("{model}", str(folder / "model")) for line in expected]
    assert said(text, folder) == expected
    assert all(f"[{rule}]" in line for line in expected)
    assert main(["lint", "r.yaml"]) == 2
    assert capsys.readouterr().out.splitlines() == expected
    assert main(["build", "r.yaml"]) == 2
    assert capsys.readouterr().err.splitlines() == [f"error: {line}" for line in expected]
    assert not (folder / "engines").exists()
    load_recipe("r.yaml")  # a sealed engine is read without its model


@pytest.mark.parametrize(
    "text", [HEAD, HEAD + W4 + "  group_size: 64\n", HEAD + "quantization: {kind: fp8, exclude: ['*.0.*']}\n"]
)
def test_what_fits_is_silent_and_plans(text: str, folder: Path) -> None:
    assert said(text, folder) == []
    assert make_plan(Path("r.yaml")).steps


def test_every_model_rule_has_a_reason() -> None:
    assert {case[0] for case in CASES.values()} | {"model-16-bit"} == set(MODEL_RULES)
    assert all(len(rule.why) > 20 and rule.id == name for name, rule in MODEL_RULES.items())


def test_a_quantized_source(folder: Path) -> None:
    quantized = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (folder / "model" / "hf_quant_config.json").write_text(json.dumps(quantized))
    assert said(HEAD, folder) == [
        f"r.yaml:4: model.source: {folder}/model is quantized already (hf_quant_config.json); name the 16-bit "
        "checkpoint, it is what quality is measured against [model-16-bit]"
    ]


def test_a_draft_model_is_checked_too(folder: Path) -> None:
    make_tiny_model(folder / "draft", hidden=32)
    text = TENSORRT + DRAFT
    assert said(text, folder) == []
    wanted = "  quantization: {kind: w4a16_awq, group_size: 64}\n"
    assert said(text + wanted, folder) == [
        "r.yaml:13: speculation.quantization.group_size: 64 does not divide the 32 inputs of "
        "model.layers.0.self_attn.q_proj (and 11 more); use 32 [model-group-size]"
    ]
    tokenizer = json.loads((folder / "draft" / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    edit(folder / "draft" / "tokenizer.json", model=tokenizer["model"])
    assert said(text, folder) == [
        "r.yaml:12: speculation.model.source: 2 of its tokens differ from the target's, first 'a'; a draft needs "
        "the target's own vocabulary, choose a smaller model of its family [model-vocabulary]"
    ]


def test_another_architecture_is_only_noted_for_a_gpu_backend(folder: Path, capsys: Capture) -> None:
    edit(folder / "model" / "config.json", architectures=["MixtralForCausalLM"])
    assert said(TENSORRT, folder) == []
    assert main(["lint", "r.yaml"]) == 0
    note = capsys.readouterr().out.splitlines()[1]
    assert note.startswith("r.yaml:4: note: model.source: ")
    assert "'MixtralForCausalLM'" in note


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("null", "model/config.json: holds null; a mapping is needed"),
        ("NaN", "model/config.json: holds a number; a mapping is needed"),
        ('{"a":', "model/config.json: is not JSON: Expecting value: line 1 column 6 (char 5)"),
        (None, "model/config.json: missing; the folder is not a Hugging Face checkpoint"),
    ],
)
def test_what_no_backend_can_read_is_an_error_for_every_one(
    content: str | None, what: str, folder: Path
) -> None:
    path = folder / "model" / "config.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    for text in (HEAD, TENSORRT):
        assert said(text, folder) == [f"r.yaml:4: model.source: {folder}/{what} [model-checkpoint]"]
    path.write_text("{}")
    assert "architectures: None is not supported" in said(TENSORRT, folder)[0]


def test_a_file_is_no_checkpoint(folder: Path) -> None:
    (folder / "file").write_text("x")
    (folder / "pipe").parent.mkdir(exist_ok=True)
    os.mkfifo(folder / "pipe")
    for name in ("file", "pipe", str(folder / "file")):
        for text in (HEAD, TENSORRT):
            line = said(text.replace("source: model", f"source: {name}"), folder)
            assert line == [
                f"r.yaml:4: model.source: {folder / name}: is a file; name the folder of the checkpoint "
                "[model-checkpoint]"
            ]
    for name in ("absent", "~nosuchuser/x", "file/x", "x" * 300):
        assert said(HEAD.replace("source: model", f"source: {name}"), folder) == []


def test_problems_of_recipe_and_model_come_together(folder: Path) -> None:
    text = HEAD.replace("max_input_tokens: 128", "max_input_tokens: 600") + W4 + "banana: 1\n"
    lines = said(text, folder)
    assert [line.split(": ")[1] for line in lines] == [
        "limits.max_seq_tokens",
        "quantization.group_size",
        "banana",
    ]
    assert lint("r.yaml").errors != lint("r.yaml", model=True).errors, "the model is not looked at unasked"


def test_a_section_with_an_error_is_not_judged_by_its_placeholder(folder: Path) -> None:
    assert [line.split(": ")[1] for line in said(HEAD + W4 + "  group_size: 7\n", folder)] == [
        "quantization.group_size"
    ]


def test_lint_imports_nothing_heavy(folder: Path) -> None:
    (folder / "r.yaml").write_text(HEAD)
    code = (
        "import sys; from trtspec.cli import main\n"
        "assert main(['lint', 'r.yaml']) == 0\n"
        "found = {'torch', 'transformers', 'tokenizers', 'huggingface_hub', 'numpy'} & set(sys.modules)\n"
        "sys.exit(str(found) if found else 0)"
    )
    run([sys.executable, "-c", code], cwd=folder)


# --------------------------------------------------------------------------- init


@pytest.mark.parametrize(("hidden", "chosen"), [(64, 64), (96, 32), (128, 128)])
def test_init_chooses_what_fits_the_model(hidden: int, chosen: int, folder: Path, capsys: Capture) -> None:
    make_tiny_model(folder / "other", hidden=hidden, heads=4, tokenizer=False)
    assert fitting_group_size(read_modelspec(folder / "other")) == chosen
    assert main(["init", "--model", "other", "--quantization", "w4a16_awq", "-o", "r.yaml"]) == 0
    assert capsys.readouterr().out == "wrote r.yaml; next: trtspec build r.yaml\n"
    recipe = load_recipe("r.yaml", model=True)
    assert recipe.quantization.group_size == chosen  # type: ignore[union-attr]
    assert (recipe.limits.max_input_tokens, recipe.limits.max_seq_tokens) == (256, 512)


def test_init_takes_a_group_size_and_refuses_one_that_does_not_fit(folder: Path, capsys: Capture) -> None:
    argv = ["init", "--model", "model", "--quantization", "w4a16_awq", "-o", "r.yaml", "--group-size"]
    assert main([*argv, "128"]) == 2
    assert capsys.readouterr().err == (
        "error: quantization.group_size: 128 does not divide the 64 inputs of model.layers.0.self_attn.q_proj "
        "(and 11 more); use 32 or 64 [model-group-size]\n"
    )
    assert not Path("r.yaml").exists()
    assert main([*argv, "32"]) == 0
    assert load_recipe("r.yaml").quantization.group_size == 32  # type: ignore[union-attr]
    assert main(["init", "--quantization", "fp8", "--group-size", "32"]) == 2
    assert "--group-size goes with --quantization w4a16_awq or w4a8_awq, not fp8" in capsys.readouterr().err


def test_init_refuses_a_sample_that_does_not_exist(folder: Path, capsys: Capture) -> None:
    assert main(["init", "--model", "sample:smollm2-135m"]) == 2
    assert capsys.readouterr().err == (
        "error: model.source: found 'sample:smollm2-135m'; allowed: sample:smollm2-135m-instruct; did you mean "
        "sample:smollm2-135m-instruct? [model-sample]\n"
    )


def test_printed_commands_can_be_pasted(folder: Path, capsys: Capture) -> None:
    assert main(["init", "--model", "model", "-o", "my recipe.yaml"]) == 0
    assert capsys.readouterr().out == "wrote my recipe.yaml; next: trtspec build 'my recipe.yaml'\n"


def test_all_problems_are_input_errors(folder: Path) -> None:
    (folder / "r.yaml").write_text(HEAD + W4)
    with pytest.raises(InputError, match="model-group-size"):
        make_plan(Path("r.yaml"))
