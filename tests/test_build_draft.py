"""A draft model built into an engine: linked or quantized, redone only when changed, of one tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import make_tiny_model

from trtspec import artifact
from trtspec.backends import open_engine
from trtspec.build import Built, build
from trtspec.engine import Request, generate
from trtspec.errors import InputError
from trtspec.plan import make_plan
from trtspec.text import Tokenizer, same_tokenizer

RECIPE = """\
version: 1
name: tiny
model: {source: model}
backend: {kind: embedded, dtype: float32}
speculation: {kind: draft_model, num_draft_tokens: 3, model: {source: SOURCE}, quantization: {FORMAT}}
limits: {max_batch_size: 4, max_input_tokens: 128, max_seq_tokens: 256, max_num_tokens: 64}
"""
LINKED = "kind: none"
QUANTIZED = "kind: w4a16_awq, group_size: 32, kv_cache: fp8, calibration: {num_samples: 2, max_tokens: 64}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tiny_model(tmp_path / "model")
    make_tiny_model(tmp_path / "small", hidden=32, layers=1, seed=3)
    return tmp_path


def run(folder: Path, source: str, form: str) -> tuple[Built, list[str]]:
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.replace("SOURCE", source).replace("FORMAT", form))
    said: list[str] = []
    return build(path, folder / "engines", say=said.append), said


def steps(built: Built) -> list[str]:
    return [step.name for step in built.manifest.steps]


def test_a_16_bit_draft_is_linked_and_sealed(folder: Path) -> None:
    built, _ = run(folder, "small", LINKED)
    opened = artifact.open_artifact(built.folder, check_hashes=True)
    assert steps(built) == ["import", "import-draft", "check"]
    assert opened.draft_dir == built.folder / "draft"
    assert opened.heads_dir is None
    weights = opened.draft_dir / "model.safetensors"
    assert weights.stat().st_ino == (folder / "small" / "model.safetensors").stat().st_ino
    assert opened.manifest.draft_source is not None
    assert opened.manifest.draft_source.path == str(folder / "small")
    again, said = run(folder, "small", LINKED)
    assert again.up_to_date
    assert said == []
    weights.with_name("extra.json").write_text("{}")
    with pytest.raises(InputError, match="added after the engine was sealed"):
        artifact.open_artifact(built.folder)


def test_the_target_drafts_for_itself_in_four_bits_and_only_a_changed_draft_is_built_again(
    folder: Path,
) -> None:
    """One test of two laws: quantizing takes most of its time."""
    first, _ = run(folder, "model", QUANTIZED)
    opened = artifact.open_artifact(first.folder)
    assert steps(first) == ["import", "quantize-draft", "check"]
    assert opened.manifest.target == "baseline"
    assert opened.draft_dir is not None
    assert (opened.draft_dir / "hf_quant_config.json").is_file()
    assert (opened.draft_dir / "tokenizer.json").is_file()
    requests = [Request(f"r{at}", (at + 3, 4, 5), 24) for at in range(4)]
    drafting, plain = open_engine(opened), open_engine(opened, "no_speculation")
    for found, wanted in zip(generate(drafting, requests), generate(plain, requests), strict=True):
        assert found.tokens == wanted.tokens
    stats = drafting.stats()
    assert stats.drafted_tokens > stats.accepted_tokens > 10
    assert plain.stats().drafted_tokens == 0

    path = folder / "recipe.yaml"
    recorded = {step.name: step.digest for step in first.manifest.steps}
    path.write_text(path.read_text().replace("num_samples: 2", "num_samples: 3"))
    planned = {step.name: step.digest for step in make_plan(path, folder / "engines").steps}
    assert [name for name in planned if planned[name] != recorded[name]] == ["quantize-draft", "check"]
    path.write_text(path.read_text().replace("num_samples: 3", "num_samples: 2"))
    path.write_text(path.read_text() + "gates: {min_speedup: 2.0}\n")
    sealed_again = build(path, folder / "engines")
    assert sealed_again.reused == ("quantize-draft",)
    linked, _ = run(folder, "small", LINKED)
    assert not (linked.folder / "draft" / "hf_quant_config.json").exists()
    path.write_text(
        path.read_text().replace(
            "kind: draft_model, num_draft_tokens: 3, model: {source: small}, quantization: {kind: none}",
            "kind: ngram",
        )
    )
    without = build(path, folder / "engines")
    assert not (without.folder / "draft").exists()
    assert without.manifest.draft_source is None


def change_tokenizer(folder: Path, old: str, new: str) -> None:
    path = folder / "tokenizer.json"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_another_tokenizer_is_refused_before_anything_is_built(folder: Path) -> None:
    change_tokenizer(folder / "small", "<|im_end|>", "<|end|>")
    with pytest.raises(InputError) as caught:
        run(folder, "small", QUANTIZED)
    assert "<|im_end|>" in str(caught.value) or "<|end|>" in str(caught.value)
    assert "speculation.model" in str(caught.value)
    assert not (folder / "engines" / "tiny").exists()


# --------------------------------------------------------------------------- what the same tokenizer means


def differences(folder: Path) -> list[str]:
    return same_tokenizer(Tokenizer.load(folder / "model"), Tokenizer.load(folder / "small"))


def test_equal_tokenizers_have_no_differences(folder: Path) -> None:
    assert differences(folder) == []
    # Which token ends a turn is the target's business: base and instruct models share a vocabulary.
    config = json.loads((folder / "small" / "tokenizer_config.json").read_text())
    config["eos_token"] = "<|im_start|>"
    (folder / "small" / "tokenizer_config.json").write_text(json.dumps(config))
    assert differences(folder) == []


def test_every_kind_of_difference_is_named(folder: Path) -> None:
    path = folder / "small" / "tokenizer.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    vocab = raw["model"]["vocab"]
    vocab["e"], vocab["t"] = vocab["t"], vocab["e"]
    raw["added_tokens"][0]["special"] = False
    path.write_text(json.dumps(raw), encoding="utf-8")
    found = differences(folder)
    assert "vocabulary: 2 tokens have other ids, first 'e'" in found
    assert any(line.startswith("special tokens: 1 are special in only one") for line in found)
    assert any(line.startswith("round trip: ") for line in found)


def test_a_tokenizer_that_only_splits_otherwise_is_noticed(folder: Path) -> None:
    path = folder / "small" / "tokenizer.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    raw["normalizer"] = {"type": "Lowercase"}
    path.write_text(json.dumps(raw), encoding="utf-8")
    found = differences(folder)
    assert found
    assert all(line.startswith("round trip: ") for line in found)
