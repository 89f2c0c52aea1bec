"""The tables of TensorRT-LLM versions, and the checks that stand on them."""

from __future__ import annotations

import pytest

from trtspec.errors import InputError
from trtspec.trtllm.facts import VERSIONS, load_facts, nearest_version, versions_for, versions_with
from trtspec.versions import parse_range

MEDUSA = ["--checkpoint_dir", "in", "--output_dir", "out", "--speculative_decoding_mode", "medusa"]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_says_how_it_was_read(version: str) -> None:
    facts = load_facts(version)
    assert facts.version == version
    assert facts.read
    assert facts.backends


def test_engines_end_with_1_2_1_and_the_llm_api_begins_with_1_0() -> None:
    everything = parse_range(">=0.1")
    assert versions_for("tensorrt", everything) == ("0.17.0", "0.21.0", "1.0.0", "1.1.0", "1.2.1")
    assert versions_for("pytorch", everything) == ("1.0.0", "1.1.0", "1.2.1", "1.3.0rc27", "1.4.0rc4")
    assert versions_for("tensorrt", parse_range(">=1.0,<1.2")) == ("1.0.0", "1.1.0")


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [
        ("0.18.0", "0.17.0"),
        ("1.2.0", "1.2.1"),
        ("1.3.0", "1.3.0rc27"),
        ("2.0", "1.4.0rc4"),  # nearest by its numbers alone would be 1.0.0
        ("9", "1.4.0rc4"),
        ("0.1", "0.17.0"),
        ("0.99", "0.21.0"),
    ],
)
def test_an_unknown_version_is_refused_with_the_nearest(asked: str, nearest: str) -> None:
    assert nearest_version(asked) == nearest
    with pytest.raises(InputError, match=f"the nearest is {nearest}"):
        load_facts(asked)


@pytest.mark.parametrize("version", ["0.17.0", "1.0.0", "1.2.1"])
def test_a_right_command_passes_and_each_wrong_word_is_named(version: str) -> None:
    facts = load_facts(version)
    assert facts.check_argv("trtllm-build", MEDUSA) == []
    (unknown,) = facts.check_argv("trtllm-build", [*MEDUSA, "--no_such_flag", "1"])
    assert "--no_such_flag: unknown" in unknown
    assert "no known version has it" in unknown
    (choice,) = facts.check_argv("trtllm-build", [*MEDUSA, "--use_paged_context_fmha", "on"])
    assert "allowed: enable, disable" in choice
    (number,) = facts.check_argv("trtllm-build", [*MEDUSA, "--max_batch_size", "many"])
    assert "allowed: int" in number
    (missing,) = facts.check_argv("trtllm-build", [*MEDUSA, "--max_batch_size"])
    assert "a value is missing" in missing


def test_a_flag_of_another_version_names_it() -> None:
    (wrong,) = load_facts("0.17.0").check_argv("trtllm-build", ["--gemm_allreduce_plugin", "float16"])
    assert "it exists in" in wrong
    assert "1.2.1" in wrong
    assert "trtllm-build does not exist" in load_facts("1.4.0rc4").check_argv("trtllm-build", MEDUSA)[0]
    assert versions_with("NGramDecodingConfig", "prompt_lookup_num_tokens") == ("0.21.0",)


def test_drafting_is_spelled_as_the_version_spells_it() -> None:
    old, new = load_facts("1.2.1"), load_facts("1.3.0rc27")
    drafting = {"decoding_type": "DraftTarget", "max_draft_len": 4, "speculative_model": "d"}
    assert old.check_keys("TorchLlmArgs", {"model": "m", "speculative_config": drafting}) == []
    (wrong,) = new.check_keys("TorchLlmArgs", {"model": "m", "speculative_config": drafting})
    assert "Draft_Target" in wrong
    renamed = drafting | {"decoding_type": "Draft_Target"}
    assert new.check_keys("TorchLlmArgs", {"model": "m", "speculative_config": renamed}) == []
    oldest = load_facts("1.0.0")
    (wrong,) = oldest.check_keys("TorchLlmArgs", {"model": "m", "speculative_config": drafting})
    assert "speculative_config.speculative_model: unknown" in wrong
    assert "speculative_model_dir" in wrong


def test_nested_keys_types_and_missing_keys_are_found() -> None:
    facts = load_facts("1.2.1")
    good = {"model": "m", "kv_cache_config": {"enable_block_reuse": True, "free_gpu_memory_fraction": 0.9}}
    assert facts.check_keys("TorchLlmArgs", good) == []
    bad = {
        "kv_cache_config": {"enable_block_reuse": 1, "free_memory": 0.9},
        "max_batch_size": True,
        "scheduler_config": {"capacity_scheduler_policy": "GREEDY"},
        "cuda_graph_config": 3,
    }
    wrong = facts.check_keys("TorchLlmArgs", bad)
    assert [line.split(":")[0] for line in wrong] == [
        "kv_cache_config.enable_block_reuse",
        "kv_cache_config.free_memory",
        "max_batch_size",
        "scheduler_config.capacity_scheduler_policy",
        "cuda_graph_config",
        "model",
    ]
