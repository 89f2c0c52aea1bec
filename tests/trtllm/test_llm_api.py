"""LLM API options: each version's spelling, and a file that reads back as what was meant."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import yaml

from trtspec.errors import InputError
from trtspec.recipe import Recipe
from trtspec.recipe_file import parse_recipe
from trtspec.trtllm.checkpoint import known_checkpoint
from trtspec.trtllm.facts import load_facts
from trtspec.trtllm.llm_api import kv_bytes_per_token, to_yaml
from trtspec.trtllm.plan import LLM_API_FILE, TrtllmPlan, plan_commands

API_VERSIONS = ("1.0.0", "1.1.0", "1.2.1", "1.3.0rc27", "1.4.0rc4")
SPECULATIONS = (
    "{kind: none}",
    "{kind: ngram, num_draft_tokens: 6, max_ngram: 3}",
    "{kind: ngram, max_concurrency: 4}",
    "{kind: draft_model, model: {source: d}}",
    "{kind: eagle3, heads: h}",
    "{kind: eagle3, heads: h, num_draft_tokens: 12, top_k: 4, depth: 3}",
)
QUANTIZATIONS = (
    "{kind: none}",
    "{kind: fp8, kv_cache: fp8}",
    "{kind: w4a16_awq}",
    "{kind: none, kv_cache: fp8}",
)


def recipe(speculation: str = "{kind: none}", quantization: str = "{kind: none}", more: str = "") -> Recipe:
    backend = "" if "backend:" in more else "backend: {kind: pytorch}\n"
    return parse_recipe(
        f"version: 1\nname: x\nmodel: {{source: m}}\n{backend}quantization: {quantization}\n"
        f"speculation: {speculation}\nlimits: {{max_num_tokens: 1024, max_batch_size: 8}}\n{more}"
    )


def planned(*args: str, version: str = "1.2.1", **more: str) -> TrtllmPlan:
    return plan_commands(recipe(*args, **more), version)


def options(plan: TrtllmPlan) -> dict[str, Any]:
    read = yaml.safe_load(plan.files[LLM_API_FILE])
    assert isinstance(read, dict)
    return read


@pytest.mark.parametrize("version", API_VERSIONS)
def test_every_combination_has_known_keys_or_is_refused(version: str) -> None:
    facts, told = load_facts(version), 0
    for speculation, quantization in itertools.product(SPECULATIONS, QUANTIZATIONS):
        try:
            read = options(planned(speculation, quantization, version=version))
        except InputError:
            continue
        told += 1
        assert facts.check_keys("TorchLlmArgs", {"model": "m", **read}) == []
        # and the table would have noticed a key it does not know
        assert facts.check_keys("TorchLlmArgs", {"model": "m", **read, "use_cuda_graph": True})
    assert told >= 12, "refusing is no way to be right"


@pytest.mark.parametrize(
    ("version", "eagle", "draft", "key"),
    [
        ("1.0.0", "Eagle", "DraftTarget", "speculative_model_dir"),
        ("1.1.0", "Eagle", "DraftTarget", "speculative_model_dir"),
        ("1.2.1", "Eagle", "DraftTarget", "speculative_model"),
        ("1.3.0rc27", "Eagle3", "Draft_Target", "speculative_model"),
        ("1.4.0rc4", "Eagle3", "Draft_Target", "speculative_model"),
    ],
)
def test_each_version_has_its_own_spelling(version: str, eagle: str, draft: str, key: str) -> None:
    head = options(planned("{kind: eagle3, heads: h}", version=version))["speculative_config"]
    assert (head["decoding_type"], head[key], head["max_draft_len"]) == (eagle, "${HEADS_DIR}", 4)
    assert head.get("eagle3_one_model") is (True if eagle == "Eagle" else None)
    model = options(planned("{kind: draft_model, model: {source: d}}", version=version))["speculative_config"]
    assert (model["decoding_type"], model[key]) == (draft, "${DRAFT_DIR}")
    ngram = options(planned("{kind: ngram, max_ngram: 3}", version=version))["speculative_config"]
    assert (ngram["decoding_type"], ngram["max_matching_ngram_size"]) == ("NGram", 3)
    assert (ngram["is_use_oldest"], ngram["is_public_pool"]) == (False, False)


def test_the_spelling_of_one_version_fails_in_the_other() -> None:
    old = options(planned("{kind: draft_model, model: {source: d}}", version="1.2.1"))
    new = options(planned("{kind: draft_model, model: {source: d}}", version="1.4.0rc4"))
    assert load_facts("1.4.0rc4").check_keys("TorchLlmArgs", {"model": "m", **old})
    assert load_facts("1.2.1").check_keys("TorchLlmArgs", {"model": "m", **new})


@pytest.mark.parametrize(
    ("speculation", "more", "disabled"),
    [
        ("{kind: none}", "", False),
        ("{kind: eagle3, heads: h}", "", False),
        ("{kind: ngram}", "", True),
        ("{kind: draft_model, model: {source: d}}", "", True),
        ("{kind: none}", "backend: {kind: pytorch, overlap_scheduler: false}\n", True),
        ("{kind: eagle3, heads: h}", "backend: {kind: pytorch, overlap_scheduler: true}\n", False),
    ],
)
def test_overlap_is_off_where_drafts_come_between_steps(speculation: str, more: str, disabled: bool) -> None:
    assert options(planned(speculation, more=more))["disable_overlap_scheduler"] is disabled


def test_what_the_recipe_says_is_written() -> None:
    read = options(
        planned(
            "{kind: none}",
            "{kind: fp8, kv_cache: fp8}",
            more="backend: {kind: pytorch, cuda_graphs: false, attention: FLASHINFER, dtype: float16}\n"
            "parallel: {tp: 4, pp: 2}\n",
        )
    )
    assert read["cuda_graph_config"] is None
    assert (read["attn_backend"], read["dtype"]) == ("FLASHINFER", "float16")
    assert (read["tensor_parallel_size"], read["pipeline_parallel_size"]) == (4, 2)
    assert (read["max_batch_size"], read["max_seq_len"], read["max_num_tokens"]) == (8, 2048, 1024)
    assert read["kv_cache_config"] == {"enable_block_reuse": True, "dtype": "fp8"}
    plain = options(planned())
    assert plain["kv_cache_config"]["dtype"] == "auto"
    assert plain["cuda_graph_config"] == {"enable_padding": True, "max_batch_size": 8}
    assert "speculative_config" not in plain


def test_no_reuse_without_a_kernel_for_it() -> None:
    plan = planned(more="backend: {kind: pytorch, attention: VANILLA}\n")
    read = options(plan)
    assert (read["enable_chunked_prefill"], read["kv_cache_config"]["enable_block_reuse"]) == (False, False)
    assert any("VANILLA" in note for note in plan.notes)


@pytest.mark.parametrize(("version", "reuse"), [("1.0.0", False), ("1.1.0", True), ("1.4.0rc4", True)])
def test_blocks_are_not_reused_with_a_draft_model_where_that_failed(version: str, reuse: bool) -> None:
    read = options(planned("{kind: draft_model, model: {source: d}}", version=version))
    assert read["kv_cache_config"]["enable_block_reuse"] is reuse
    assert options(planned(version=version))["kv_cache_config"]["enable_block_reuse"] is True


def test_keys_that_a_version_lacks_are_refused_not_dropped() -> None:
    with pytest.raises(InputError, match=r"speculation.top_k: .*no max_total_draft_tokens"):
        planned("{kind: eagle3, heads: h, num_draft_tokens: 12, top_k: 4, depth: 3}", version="1.0.0")
    tree = options(planned("{kind: eagle3, heads: h, num_draft_tokens: 12, top_k: 4, depth: 3}"))
    config = tree["speculative_config"]
    assert (config["max_draft_len"], config["dynamic_tree_max_topK"]) == (3, 4)
    assert config["max_total_draft_tokens"] == 12


def test_rejection_where_it_exists() -> None:
    more = 'backend: {kind: pytorch, version: ">=1.3,<1.5"}\nacceptance: {kind: rejection}\n'
    read = options(planned("{kind: eagle3, heads: h}", version="1.4.0rc4", more=more))
    assert read["speculative_config"]["use_rejection_sampling"] is True


# --------------------------------------------------------------------------- size of the KV cache


def test_the_size_of_the_kv_cache_in_bytes() -> None:
    sized = parse_recipe(
        "version: 1\nname: x\nmodel: {source: meta-llama/Llama-3.1-8B-Instruct}\nbackend: {kind: pytorch}\n"
        "limits: {kv_cache_bytes: 1073741824}\n"
    )
    assert options(plan_commands(sized, "1.2.1"))["kv_cache_config"]["max_gpu_total_bytes"] == 1 << 30
    with pytest.raises(InputError, match=r"limits.kv_cache_bytes: 1.0.0 has no key for bytes"):
        plan_commands(sized, "1.0.0")


@pytest.mark.parametrize(
    ("kv", "tp", "pp", "expected"),
    [
        ("none", 1, 1, 131072),  # 2 x 32 layers x 8 heads x 128 x 2 bytes
        ("fp8", 1, 1, 65536),
        ("none", 4, 1, 32768),
        ("none", 16, 1, 16384),  # 8 KV heads on 16 GPUs: one each, repeated
        ("none", 1, 2, 65536),
        ("nvfp4", 1, 1, 36864),
    ],
)
def test_bytes_of_a_token(kv: str, tp: int, pp: int, expected: float) -> None:
    llama = known_checkpoint("8B")
    assert llama is not None
    assert kv_bytes_per_token(llama, kv, tp, pp) == expected


# --------------------------------------------------------------------------- commands


def test_checkpoints_are_quantized_by_trtspec_and_served_by_name() -> None:
    plan = planned(
        "{kind: draft_model, model: {source: d}, quantization: {kind: w4a16_awq, group_size: 64}}",
        "{kind: fp8, kv_cache: fp8, exclude: ['*.layers.0.*'], lm_head: true}",
    )
    target, draft = plan.commands
    assert target.argv[:4] == ("trtspec", "quantize", "--model", "${MODEL_DIR}")
    assert "*.layers.0.*" in target.argv
    assert "--lm-head" in target.argv
    assert "64" in draft.argv
    assert draft.output == plan.draft_model == "${WORK_DIR}/draft"
    assert plan.model == "${WORK_DIR}/target"
    assert plan.serve is not None
    assert plan.serve.argv[:3] == ("trtllm-serve", "serve", plan.model)
    unquantized = planned("{kind: draft_model, model: {source: d}}")
    assert (unquantized.commands, unquantized.model, unquantized.draft_model) == (
        (),
        "${MODEL_DIR}",
        "${DRAFT_DIR}",
    )


def test_trtspec_quantize_takes_these_words() -> None:
    """The command is ours: click parses it."""
    from trtspec.cli.build import quantize

    for quantization in ("{kind: w8a8_sq, alpha: 0.7}", *QUANTIZATIONS[1:]):
        try:
            plan = planned("{kind: none}", quantization)
        except InputError:
            continue
        (command,) = plan.commands
        parsed = quantize.make_context("quantize", list(command.argv[2:]), resilient_parsing=False)
        assert parsed.params["kind"] == plan.recipe.quantization.kind


def test_an_nvfp4_export_must_be_there() -> None:
    (command,) = planned("{kind: none}", "{kind: nvfp4, kv_cache: fp8}").commands
    assert command.argv == ("test", "-f", "${WORK_DIR}/target/hf_quant_config.json")


@pytest.mark.parametrize("version", API_VERSIONS)
def test_the_serving_flag_of_each_version(version: str) -> None:
    serve = planned(version=version).serve
    assert serve is not None
    flag = "--config" if version not in ("1.0.0", "1.1.0") else "--extra_llm_api_options"
    assert serve.argv[-2:] == (flag, "${WORK_DIR}/llm_api.yaml")


# --------------------------------------------------------------------------- YAML


@pytest.mark.parametrize(
    "value",
    [
        {"a": "null", "b": "true", "c": "1", "d": "x: y", "e": "#", "f": "", "g": "no", "h": "é \n \\"},
        {"a": None, "b": True, "c": 1, "d": 0.5, "e": [1, "2", None], "f": {"g": {"h": 1}}},
        {"path": "${HEADS_DIR}", "plain": "speculative_model", "empty": {}, "date": "2026-01-01", "y": "y"},
        {"octal": "0x10", "float": "1e3", "infinity": ".inf", "tilde": "~", "dash": "-", "list": "- a"},
        {"path": "/m/😀 'é' \"b\"", "list": ["😀"]},
    ],
)
def test_yaml_reads_back_as_what_was_written(value: dict[str, Any]) -> None:
    assert yaml.safe_load(to_yaml(value)) == value
