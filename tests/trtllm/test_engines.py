"""The commands that make engines: what each key becomes, and that no version is told an unknown word."""

from __future__ import annotations

import itertools

import pytest

from trtspec.errors import InputError
from trtspec.recipe import Recipe
from trtspec.recipe_facts import drafted_positions, paged_context_off
from trtspec.recipe_file import parse_recipe
from trtspec.trtllm.command import Command
from trtspec.trtllm.engines import non_leaves_per_level
from trtspec.trtllm.facts import load_facts
from trtspec.trtllm.plan import TrtllmPlan, plan_commands

ENGINE_VERSIONS = ("0.17.0", "0.21.0", "1.0.0", "1.1.0", "1.2.1")
SPECULATIONS = {
    "none": "{kind: none}",
    "ngram": "{kind: ngram, num_draft_tokens: 6}",
    "draft_model": "{kind: draft_model, model: {source: d}, num_draft_tokens: 5}",
    "medusa": "{kind: medusa, heads: h, choices: [[0], [0, 0], [1]]}",
    "medusa default": "{kind: medusa, heads: h}",
    "eagle": "{kind: eagle, heads: h, depth: 2, choices: [[0], [1], [0, 0], [0, 1], [1, 0]]}",
    "eagle dynamic": "{kind: eagle, heads: h, depth: 4, top_k: 6, num_draft_tokens: 40}",
    "lookahead": "{kind: lookahead, window: 7, ngram: 7, verification_set: 7}",
}
QUANTIZATIONS = {
    "none": "{kind: none}",
    "none fp8 kv": "{kind: none, kv_cache: fp8}",
    "none int8 kv": "{kind: none, kv_cache: int8}",
    "fp8": "{kind: fp8}",
    "fp8 fp8 kv": "{kind: fp8, kv_cache: fp8}",
    "w4a16": "{kind: w4a16_awq, group_size: 64}",
    "w4a8": "{kind: w4a8_awq}",
    "w8a8": "{kind: w8a8_sq, alpha: 1.0}",
}
_CORE = "models/core/llama"
LIMITS = "{max_batch_size: 4, max_input_tokens: 512, max_seq_tokens: 1024, max_num_tokens: 2048}"


def recipe(
    speculation: str = "none", quantization: str = "none", backend: str = "", more: str = ""
) -> Recipe:
    return parse_recipe(
        "version: 1\nname: x\nmodel: {source: m}\n"
        f"backend: {{kind: tensorrt, dtype: float16{backend}}}\n"
        f"quantization: {QUANTIZATIONS.get(quantization, quantization)}\n"
        f"speculation: {SPECULATIONS.get(speculation, speculation)}\n"
        f"limits: {LIMITS}\n{more}"
    )


def planned(*args: str, version: str = "1.2.1", num_heads: int | None = None, **more: str) -> TrtllmPlan:
    return plan_commands(recipe(*args, **more), version, num_heads=num_heads)


def options(command: Command) -> dict[str, str]:
    """Option -> value, "" for a switch."""
    words, found = command.options, {}
    for word, follower in itertools.zip_longest(words, words[1:], fillvalue="--"):
        if word.startswith("--"):
            found[word] = "" if follower.startswith("--") else follower
    return found


def build(plan: TrtllmPlan, index: int = 0) -> dict[str, str]:
    return options([command for command in plan.commands if command.program == "trtllm-build"][index])


# --------------------------------------------------------------------------- no unknown word, for anything


@pytest.mark.parametrize("version", ENGINE_VERSIONS)
def test_every_combination_is_told_in_known_words_or_refused_with_a_key(version: str) -> None:
    facts, told = load_facts(version), 0
    keyless: list[str] = []
    for speculation, quantization, pp in itertools.product(SPECULATIONS, QUANTIZATIONS, (1, 2)):
        try:
            plan = planned(
                speculation, quantization, version=version, more=f"parallel: {{tp: 2, pp: {pp}}}\n"
            )
        except InputError as error:
            keyless += [str(problem) for problem in error.problems if problem.key is None]
            continue
        told += 1
        for command in plan.commands:
            assert facts.check_argv(command.program, command.options) == []
            # and the table would have noticed a word it does not know
            assert facts.check_argv(command.program, [*command.options, "--nonsense", "1"])
    assert keyless == []
    assert told > 30, "refusing is no way to be right"


# --------------------------------------------------------------------------- lengths


@pytest.mark.parametrize(
    ("speculation", "mode", "length"),
    [
        ("lookahead", "lookahead_decoding", 83),  # (7, 7, 7), the value of TensorRT-LLM's documentation
        ("{kind: lookahead, window: 4, ngram: 3, verification_set: 4}", "lookahead_decoding", 15),
        ("medusa", "medusa", 3),
        ("medusa default", "medusa", 63),
        ("eagle", "eagle", 5),
        ("eagle dynamic", "eagle", 40),
        ("ngram", "draft_tokens_external", 6),
        ("draft_model", "draft_tokens_external", 5),
    ],
)
@pytest.mark.parametrize("version", ENGINE_VERSIONS)
def test_the_engine_is_built_for_what_a_step_drafts(
    version: str, speculation: str, mode: str, length: int
) -> None:
    plan = planned(speculation, version=version)
    assert drafted_positions(plan.recipe.speculation) == length
    found = build(plan)
    assert found["--speculative_decoding_mode"] == mode
    assert found["--max_draft_len"] == str(length)


def test_without_drafting_the_engine_has_no_mode() -> None:
    assert not {"--speculative_decoding_mode", "--max_draft_len"} & build(planned()).keys()


@pytest.mark.parametrize(("speculation", "longest"), [("none", "512"), ("ngram", "1023"), ("medusa", "512")])
def test_external_drafts_resend_everything_as_a_prompt(speculation: str, longest: str) -> None:
    plan = planned(speculation)
    assert build(plan)["--max_input_len"] == longest
    assert any("limits.max_input_tokens" in note for note in plan.notes) == (longest == "1023")


def test_checkpoint_and_engine_agree_on_the_tree() -> None:
    medusa = options(planned("medusa").commands[0])
    assert medusa["--max_medusa_token_len"] == "3"
    assert medusa["--num_medusa_heads"] == "2"
    quantized = options(planned("medusa", "fp8").commands[0])
    assert (quantized["--max_draft_len"], quantized["--num_medusa_heads"]) == ("3", "2")
    assert "--quant_medusa_head" not in quantized
    assert options(planned("medusa", num_heads=5).commands[0])["--num_medusa_heads"] == "5"
    eagle = options(planned("eagle").commands[0])
    assert eagle["--num_eagle_layers"] == "2"
    assert eagle["--max_draft_len"] == "5"
    assert eagle["--max_non_leaves_per_layer"] == "2"
    dynamic = options(planned("eagle dynamic").commands[0])
    assert (dynamic["--max_non_leaves_per_layer"], dynamic["--num_eagle_layers"]) == ("6", "4")


def test_more_levels_than_heads_are_refused() -> None:
    with pytest.raises(InputError, match=r"speculation.choices: .*1 heads were trained"):
        planned("medusa", num_heads=1)


@pytest.mark.parametrize(
    ("choices", "most"),
    [(((0,),), 1), (((0,), (1,), (0, 0), (1, 0)), 2), (((0,), (0, 0), (0, 0, 0)), 1), ((), 1)],
)
def test_non_leaves_of_the_widest_level(choices: tuple[tuple[int, ...], ...], most: int) -> None:
    assert non_leaves_per_level(choices) == most


# --------------------------------------------------------------------------- attention and formats


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_attention_follows_weights_and_kv_cache(quantization: str) -> None:
    version = "1.2.1"
    plan = planned("none", quantization, version=version, more="")
    found, kind = build(plan), plan.recipe.quantization.kind
    kv = plan.recipe.quantization.kv_cache
    assert (found["--use_paged_context_fmha"] == "enable") == (paged_context_off(plan.recipe) is None)
    assert (found["--use_fp8_context_fmha"] == "enable") == (kv == "fp8" and kind in ("fp8", "w4a8_awq"))
    assert found["--kv_cache_type"] == "paged"


def test_paged_context_can_be_switched_off() -> None:
    assert (
        build(planned(backend=", paged_context_fmha: false", more=""))["--use_paged_context_fmha"]
        == "disable"
    )
    assert build(planned(backend=", multiple_profiles: true"))["--multiple_profiles"] == "enable"


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ("none fp8 kv", {"--qformat": "full_prec", "--kv_cache_dtype": "fp8"}),
        ("fp8", {"--qformat": "fp8"}),
        ("w4a16", {"--qformat": "int4_awq", "--awq_block_size": "64"}),
        ("w4a8", {"--qformat": "w4a8_awq", "--awq_block_size": "128"}),
        ("w8a8", {"--qformat": "int8_sq"}),
    ],
)
def test_formats_in_quantize_py_words(quantization: str, expected: dict[str, str]) -> None:
    command = planned("none", quantization).commands[0]
    found = options(command)
    assert command.program == "quantize.py"
    assert expected.items() <= found.items()
    assert ("--kv_cache_dtype" in found) == ("--kv_cache_dtype" in expected)
    assert found["--calib_dataset"] == "${CALIB_DATASET}"
    assert (found["--calib_size"], found["--calib_max_seq_length"], found["--seed"]) == ("64", "512", "0")


def test_unquantized_weights_are_converted_by_the_models_own_script() -> None:
    from trtspec.trtllm.checkpoint import known_checkpoint

    llama = known_checkpoint("8B")
    assert llama is not None
    for version, folder in (
        ("0.17.0", "llama"),
        ("0.21.0", _CORE),
        ("1.2.1", _CORE),
    ):
        command = plan_commands(recipe(), version, checkpoint=llama).commands[0]
        assert command.argv[1] == f"${{EXAMPLES_DIR}}/{folder}/convert_checkpoint.py"
    unknown = options(planned().commands[0])
    assert unknown["--qformat"] == "full_prec"
    assert "--calib_size" not in unknown


def test_two_engines_for_a_draft_model() -> None:
    plan = planned(
        "{kind: draft_model, model: {source: d}, quantization: {kind: fp8, kv_cache: fp8}}",
        more="acceptance: {kind: rejection}\nparallel: {tp: 2}\n",
    )
    target, draft = build(plan), build(plan, 1)
    assert (plan.model, plan.draft_model) == (target["--output_dir"], draft["--output_dir"])
    assert plan.model != plan.draft_model
    assert "--speculative_decoding_mode" not in draft
    assert draft["--use_fp8_context_fmha"] == "enable"
    assert target["--use_fp8_context_fmha"] == "disable"
    for engine in (target, draft):
        assert engine["--gather_generation_logits"] == ""
        assert engine["--max_input_len"] == "1023"
        assert engine["--workers"] == "2"


def test_what_quantize_py_has_no_words_for_is_refused() -> None:
    with pytest.raises(InputError, match=r"quantization.lm_head: .*16 bit with w4a16_awq"):
        planned("none", "{kind: w4a16_awq, lm_head: true}")
    assert "--quantize_lm_head" in options(planned("none", "{kind: fp8, lm_head: true}").commands[0])


def test_what_is_done_otherwise_is_said() -> None:
    notes = "\n".join(planned("medusa", "w4a16").notes)
    assert "num_samples: 64; quantize.py takes 32 for AWQ" in notes
    assert "CALIB_DATASET" in notes
