"""Trees in TensorRT-LLM's forms, and trained heads as its tools look for them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from trtspec.errors import InputError
from trtspec.heads_layout import HeadsKind
from trtspec.modelspec import ModelSpec
from trtspec.recipe import Recipe
from trtspec.recipe_file import load_recipe
from trtspec.trtllm.draft_weights import (
    brace_form,
    choice_problems,
    inspect_draft_weights,
    json_form,
    parse_brace_form,
    template_problems,
    template_value,
)

RECIPES = Path(__file__).parents[2] / "recipes"
HIDDEN, VOCABULARY, DRAFTED = 8, 32, 20
TARGET = ModelSpec(
    architecture="LlamaForCausalLM",
    family="llama",
    num_layers=8,
    hidden_size=HIDDEN,
    intermediate_size=16,
    num_heads=2,
    num_kv_heads=2,
    head_dim=4,
    vocab_size=VOCABULARY,
    rope_theta=10000.0,
    rope_scaling=None,
    rms_norm_eps=1e-6,
    max_positions=128,
    tie_embeddings=False,
    qkv_bias=False,
    qk_norm=False,
    sliding_window=None,
    eos_token_ids=(2,),
    dtype="float16",
    quant=None,
)

paths = st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=6), min_size=1, max_size=20)


# --------------------------------------------------------------------------- trees


@given(paths)
def test_both_forms_read_back(choices: list[list[int]]) -> None:
    assert [list(path) for path in parse_brace_form(brace_form(choices))] == choices
    assert json.loads(json_form(choices)) == choices


def test_the_forms_are_those_of_the_documentation() -> None:
    choices = ((0,), (0, 0), (1,))
    assert brace_form(choices) == "{0}, {0, 0}, {1}"
    assert json_form(choices) == "[[0], [0, 0], [1]]"


@pytest.mark.parametrize(
    "text",
    ["", "0, 0", "[[0], [1]]", "{0}, {}", "{0} {1}", "{0}, {a}", "{0\\, 0}", "{{0}}", "{0}, {1},", "{-1}"],
)
def test_other_texts_are_no_choices(text: str) -> None:
    with pytest.raises(ValueError, match="paths in braces"):
        parse_brace_form(text)


@given(paths)
def test_commas_are_escaped_for_the_template_script(choices: list[list[int]]) -> None:
    text = brace_form(choices)
    argument = f"decoding_mode:medusa,medusa_choices:{template_value(text)}"
    assert list(template_problems(argument)) == []
    # Unescaped, every comma of the value begins another key.
    unescaped = list(template_problems(f"decoding_mode:medusa,medusa_choices:{text}"))
    assert len(unescaped) == text.count(",")


def medusa_recipe(**changes: Any) -> Recipe:
    recipe = load_recipe(RECIPES / "vicuna-7b-fp8-medusa-tensorrt.yaml")
    return recipe.model_copy(update={"speculation": recipe.speculation.model_copy(update=changes)})


@pytest.mark.parametrize(
    ("choices", "bounds", "message"),
    [
        (((0,), (0, 0)), {"num_heads": 1}, "2 deep, there are 1 heads"),
        (((0,), (0, 0)), {"max_draft_len": 1}, "2 nodes, the engine was built for max_draft_len 1"),
        (None, {"num_heads": 3}, "the default tree is 4 deep"),
        (None, {"max_draft_len": 62}, "63 nodes"),
        (((0,), (1, 0)), {}, "without its prefix"),
        (((0,), (0,)), {}, "listed twice"),
        (((),), {}, "the root is implied"),
    ],
)
def test_trees_that_do_not_fit(choices: Any, bounds: dict[str, int], message: str) -> None:
    (problem,) = choice_problems(medusa_recipe(choices=choices), **bounds)
    assert message in problem.message


def test_trees_that_fit() -> None:
    assert choice_problems(medusa_recipe(choices=((0,), (0, 0))), num_heads=2, max_draft_len=2) == []
    assert choice_problems(medusa_recipe(), num_heads=4, max_draft_len=63) == []
    plain = load_recipe(RECIPES / "smollm2-fp8.yaml")
    assert choice_problems(plain, num_heads=0, max_draft_len=0) == []


# --------------------------------------------------------------------------- heads


def medusa_tensors(heads: int = 3, layers: int = 1, *, modelopt: bool = False) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(heads):
        prefix = f"medusa_heads.{head}" if modelopt else f"{head}"
        for layer in range(layers):
            block = f"{prefix}.medusa_layers.{layer}" if modelopt else f"{prefix}.{layer}"
            shapes[f"{block}.linear.weight"] = (HIDDEN, HIDDEN)
            shapes[f"{block}.linear.bias"] = (HIDDEN,)
        output = f"{prefix}.lm_head.weight" if modelopt else f"{prefix}.{layers}.weight"
        shapes[output] = (VOCABULARY, HIDDEN)
    return shapes


def eagle_tensors(kind: str) -> dict[str, tuple[int, ...]]:
    third = kind == "eagle3"
    layer, width = ("midlayer", 2 * HIDDEN) if third else ("layers.0", HIDDEN)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, (3 if third else 2) * HIDDEN),
        f"{layer}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        f"{layer}.mlp.gate_proj.weight": (16, HIDDEN),
        f"{layer}.mlp.up_proj.weight": (16, HIDDEN),
        f"{layer}.mlp.down_proj.weight": (HIDDEN, 16),
        f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
        **{f"{layer}.self_attn.{name}_proj.weight": (HIDDEN, width) for name in "qkv"},
    }
    if third:
        shapes |= {
            f"{layer}.hidden_norm.weight": (HIDDEN,),
            f"{layer}.input_layernorm.weight": (HIDDEN,),
            "norm.weight": (HIDDEN,),
            "lm_head.weight": (DRAFTED, HIDDEN),
            "d2t": (DRAFTED,),
        }
    return shapes


CONFIGS: dict[str, dict[str, Any]] = {
    "medusa": {"medusa_num_heads": 3, "medusa_num_layers": 1},
    "eagle": {"hidden_size": HIDDEN, "num_hidden_layers": 1, "vocab_size": VOCABULARY},
    "eagle3": {
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": DRAFTED,
    },
}
TENSORS = {"medusa": medusa_tensors(), "eagle": eagle_tensors("eagle"), "eagle3": eagle_tensors("eagle3")}
FILES = {"medusa": "medusa_lm_head.safetensors", "eagle": "model.safetensors", "eagle3": "model.safetensors"}


def write(
    folder: Path,
    kind: HeadsKind,
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    config: dict[str, Any] | None = None,
    name: str | None = None,
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIGS[kind], **(config or {})}))
    file = folder / (name or FILES[kind])
    tensors = {key: np.zeros(shape, np.float16) for key, shape in (shapes or TENSORS[kind]).items()}
    if "d2t" in tensors:
        tensors["d2t"] = np.zeros(tensors["d2t"].shape, np.int64)
    if file.suffix == ".safetensors":
        save_file(tensors, file)
    else:
        import torch

        torch.save({key: torch.from_numpy(value) for key, value in tensors.items()}, file)
    return folder


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
@pytest.mark.parametrize("pickled", [False, True])
def test_good_heads(tmp_path: Path, kind: HeadsKind, pickled: bool) -> None:
    name = {"medusa": "medusa_lm_head.pt"}.get(kind, "pytorch_model.bin") if pickled else None
    found = inspect_draft_weights(write(tmp_path, kind, name=name), kind, TARGET)
    assert found.kind == kind
    assert (found.num_heads, found.num_layers) == ((3, 1) if kind == "medusa" else (1, 1))
    assert found.draft_vocab_size == (DRAFTED if kind == "eagle3" else None)


def test_modelopts_names_of_medusa_heads(tmp_path: Path) -> None:
    folder = write(tmp_path, "medusa", shapes=medusa_tensors(modelopt=True))
    assert inspect_draft_weights(folder, "medusa", TARGET).num_heads == 3


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("medusa", {"name": "model.safetensors"}, "found: model.safetensors; allowed: medusa_lm_head.pt or"),
        ("medusa", {"config": {"medusa_num_heads": 5}}, "5 heads, the weights have 3"),
        ("medusa", {"config": {"medusa_num_layers": 2}}, "2 layers, head 0 has 1"),
        ("medusa", {"config": {"medusa_num_heads": None}}, "medusa_num_heads: missing"),
        ("medusa", {"config": {"medusa_num_heads": "3"}}, "found '3'"),
        (
            "medusa",
            {"shapes": {**TENSORS["medusa"], "1.1.weight": (VOCABULARY, 4)}},
            "shape [32, 4], [32, 8]",
        ),
        ("medusa", {"shapes": {**TENSORS["medusa"], "0.0.linear.weight": (8, 9)}}, "shape [8, 9], [8, 8]"),
        ("eagle", {"shapes": TENSORS["eagle3"]}, "these are eagle3 heads"),
        ("eagle3", {"shapes": TENSORS["eagle"]}, "these are eagle heads"),
        ("eagle", {"config": {"hidden_size": 4}}, "4, the target has 8"),
        ("eagle", {"config": {"vocab_size": 33}}, "33, the target has 32"),
        ("eagle3", {"config": {"draft_vocab_size": 21}}, "shape [20, 8], [21, 8]"),
        (
            "eagle3",
            {"shapes": {key: shape for key, shape in TENSORS["eagle3"].items() if key != "d2t"}},
            "d2t: missing",
        ),
    ],
)
def test_bad_heads(tmp_path: Path, kind: HeadsKind, changes: dict[str, Any], message: str) -> None:
    folder = write(tmp_path, kind, **changes)
    with pytest.raises(InputError) as caught:
        inspect_draft_weights(folder, kind, TARGET)
    assert message in str(caught.value)


def test_without_the_target_its_sizes_are_not_checked(tmp_path: Path) -> None:
    shapes = {**TENSORS["medusa"], **{f"{head}.1.weight": (64, HIDDEN) for head in range(3)}}
    folder = write(tmp_path, "medusa", shapes=shapes)
    assert inspect_draft_weights(folder, "medusa").num_heads == 3
    with pytest.raises(InputError, match=r"shape \[64, 8\]"):
        inspect_draft_weights(folder, "medusa", TARGET)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        inspect_draft_weights(tmp_path / "none", "medusa")
    with pytest.raises(InputError, match=r"config\.json"):
        inspect_draft_weights(tmp_path, "medusa")
