"""A folder that could be built must be servable: the broken ones are each one line."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import make_tiny_model, write_tokenizer

from trtspec.model_check import check_model_folder, check_weight_values


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def poke(path: Path, name: str, value: float) -> None:
    tensors = load_file(path)
    tensors[name].view(-1)[-1] = value
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_good_folder_has_no_problems(tmp_path: Path) -> None:
    found = check_model_folder(make_tiny_model(tmp_path))
    assert found.problems == ()
    assert found.spec is not None
    assert found.tokenizer is not None
    assert found.spec.vocab_size == found.tokenizer.vocab_size


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no tokenizer": (lambda m: (m / "tokenizer.json").unlink(), "tokenizer.json: not found"),
    "empty tokenizer": (lambda m: (m / "tokenizer.json").write_text(""), "tokenizer.json: not a tokenizer"),
    "more tokens": (lambda m: write_tokenizer(m, 400), "has 400 tokens, the model only 320"),
    "few tokens": (lambda m: edit(m / "tokenizer.json", **few_tokens(4)), "has only 7 tokens"),
    "far ids": (lambda m: edit(m / "tokenizer.json", **few_tokens(250, last=9000)), "token ids up to 9000"),
    "broken template": (
        lambda m: edit(m / "tokenizer_config.json", chat_template="{% if %}"),
        "chat template: ",
    ),
    "endless template": (
        lambda m: edit(
            m / "tokenizer_config.json", chat_template="{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"
        ),
        "chat template: ",
    ),
    "unknown eos": (
        lambda m: edit(m / "tokenizer_config.json", eos_token="<nope>"),
        "'<nope>' is not in the vocabulary",
    ),
    "eos of another model": (
        lambda m: edit(m / "config.json", eos_token_id=999999),
        "999999 is not a token of this model",
    ),
    "no weights": (lambda m: (m / "model.safetensors").unlink(), "no weights"),
    "no config": (lambda m: (m / "config.json").unlink(), "config.json: missing"),
}


def few_tokens(count: int, last: int | None = None) -> dict[str, Any]:
    vocabulary = {f"w{index}": index + 3 for index in range(count)}
    if last is not None:
        vocabulary["far"] = last
    return {"model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_folders(tmp_path: Path, name: str) -> None:
    folder = make_tiny_model(tmp_path)
    damage, says = BAD[name]
    damage(folder)
    text = "\n".join(map(str, check_model_folder(folder).problems))
    assert says in text
    assert str(folder) in text


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_no_numbers(tmp_path: Path, dtype: str, value: float) -> None:
    folder = make_tiny_model(tmp_path, dtype=dtype, tokenizer=False)
    assert check_weight_values(folder) == []
    poke(folder / "model.safetensors", "model.layers.1.mlp.down_proj.weight", value)
    (problem,) = check_weight_values(folder)
    assert problem.key == "model.layers.1.mlp.down_proj.weight"
    poke(folder / "model.safetensors", "model.norm.weight", value)
    (problem,) = check_weight_values(folder)
    assert "1 more tensor" in problem.message


def test_the_largest_numbers_are_numbers(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, dtype="bfloat16", tokenizer=False, shards=2)
    path = sorted(folder.glob("*.safetensors"))[0]
    poke(path, next(iter(load_file(path))), torch.finfo(torch.bfloat16).max)
    assert check_weight_values(folder) == []


def test_integers_are_not_looked_at(tmp_path: Path) -> None:
    header = {"x": {"dtype": "I16", "shape": [2], "data_offsets": [0, 4]}}
    encoded = json.dumps(header).encode()
    raw = struct.pack("<Q", len(encoded)) + encoded + b"\xff\x7f\xff\xff"
    (tmp_path / "model.safetensors").write_bytes(raw)
    assert check_weight_values(tmp_path) == []
