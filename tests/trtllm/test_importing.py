"""Import: engines and LLM API options come back as their recipes, and every key is accounted for."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from trtspec.cli import main
from trtspec.errors import InputError, TrtspecError
from trtspec.recipe import EagleSpeculation, Recipe
from trtspec.recipe_facts import drafted_positions
from trtspec.recipe_file import lint, load_recipe, parse_recipe
from trtspec.trtllm.account import leaves
from trtspec.trtllm.facts import load_facts, versions_for
from trtspec.trtllm.importing import Imported, import_file, imported_yaml
from trtspec.trtllm.lint import with_gpu_rules
from trtspec.trtllm.llm_api import overlap
from trtspec.trtllm.plan import plan_commands
from trtspec.versions import parse_range

ROOT = Path(__file__).parent.parent.parent
RECIPES = [(path, load_recipe(path)) for path in sorted((ROOT / "recipes").glob("*.yaml"))]
MODES = {"none": 1, "ngram": 2, "draft_model": 2, "medusa": 4, "lookahead": 8, "eagle": 32}
ALGORITHMS = {"none": None, "fp8": "FP8", "w4a16_awq": "W4A16_AWQ", "w4a8_awq": "W4A8_AWQ"}

# The keys of an engine of 0.17.0.post1, those of nested mappings shortened.
PRETRAINED: dict[str, Any] = {
    "mlp_bias": False, "attn_bias": False, "rotary_base": 10000.0, "rotary_scaling": None,
    "disable_weight_only_quant_plugin": False, "moe": {"num_experts": 0, "top_k": 0},
    "architecture": "LlamaForCausalLM", "dtype": "float16", "vocab_size": 32000, "hidden_size": 4096,
    "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_act": "silu", "logits_dtype": "float32",
    "norm_epsilon": 1e-6, "runtime_defaults": None, "position_embedding_type": "rope_gpt_neox",
    "num_key_value_heads": 32, "intermediate_size": 11008, "max_position_embeddings": 2048,
    "use_parallel_embedding": False, "embedding_sharding_dim": 0, "head_size": 128, "qk_layernorm": False,
    "mapping": {"world_size": 1, "gpus_per_node": 8, "cp_size": 1, "tp_size": 1, "pp_size": 1,
                "moe_tp_size": 1, "moe_ep_size": 1, "auto_parallel": False},
    "quantization": {"quant_algo": None, "kv_cache_quant_algo": None, "group_size": 128,
                     "smoothquant_val": 0.5, "clamp_val": None, "use_meta_recipe": False,
                     "has_zero_point": False, "pre_quant_scale": False, "exclude_modules": None},
}  # fmt: skip
BUILD: dict[str, Any] = {
    "max_input_len": 1024, "max_seq_len": 2048, "opt_batch_size": 8, "max_batch_size": 16,
    "max_beam_width": 1, "max_num_tokens": 2048, "opt_num_tokens": 16,
    "max_prompt_embedding_table_size": 0, "kv_cache_type": "PAGED", "gather_context_logits": False,
    "strongly_typed": True, "profiling_verbosity": "layer_names_only", "max_draft_len": 0,
    "speculative_decoding_mode": 1, "lora_config": {"lora_dir": [], "max_lora_rank": 64},
    "auto_parallel_config": {"world_size": 1, "cluster_key": "L4"}, "weight_streaming": False,
    "plugin_config": {
        "dtype": "float16", "gemm_plugin": "float16", "nccl_plugin": None, "paged_kv_cache": True,
        "tokens_per_block": 64, "use_paged_context_fmha": True, "use_fp8_context_fmha": False,
        "multiple_profiles": False, "manage_weights": False, "use_fused_mlp": True,
    },
    "use_strip_plan": False, "monitor_memory": False, "use_mrope": False,
}  # fmt: skip


def engine(**changes: Any) -> dict[str, Any]:
    """An engine's config.json; ``build__max_draft_len=4`` and the like change one key."""
    data = {"version": "0.17.0.post1", "pretrained_config": PRETRAINED, "build_config": BUILD}
    data = copy.deepcopy(data)
    for path, value in changes.items():
        *sections, last = path.split("__")
        place: Any = data
        for section in sections:
            place = place[{"build": "build_config", "model": "pretrained_config"}.get(section, section)]
        place[last] = value
    return data


def engine_of(recipe: Recipe, version: str) -> dict[str, Any]:
    """What trtllm-build writes for ``recipe``, by the builder's rules (facts: it grows the sequence by the
    draft length and EAGLE's levels)."""
    drafted, limits, backend = drafted_positions(recipe.speculation), recipe.limits, recipe.backend
    levels = recipe.speculation.depth if isinstance(recipe.speculation, EagleSpeculation) else 0
    data = engine(
        version=version,
        model__dtype=backend.dtype,
        model__mapping__tp_size=recipe.parallel.tp,
        model__mapping__pp_size=recipe.parallel.pp,
        model__quantization__quant_algo=ALGORITHMS[recipe.quantization.kind],
        model__quantization__kv_cache_quant_algo={"none": None, "fp8": "FP8"}[recipe.quantization.kv_cache],
        build__max_input_len=limits.max_input_tokens,
        build__max_seq_len=limits.max_seq_tokens + drafted + levels,
        build__max_batch_size=limits.max_batch_size,
        build__max_num_tokens=limits.max_num_tokens,
        build__max_draft_len=drafted,
        build__speculative_decoding_mode=MODES[recipe.speculation.kind],
    )
    if levels:
        data["pretrained_config"] |= {"num_eagle_layers": levels, "max_non_leaves_per_layer": 10}
    return data


def put(folder: Path, data: Any, name: str = "config.json") -> Path:
    file = folder / name
    file.write_text(data if isinstance(data, str) else json.dumps(data), "utf-8")
    return file


def unaccounted(data: Mapping[str, Any], imported: Imported) -> list[str]:
    """Keys of the file that the account leaves out or has twice, and uses that the recipe does not show."""
    keys = [use.key for use in imported.uses]
    wrong = [f"{key} is reported {keys.count(key)} times" for key in keys if keys.count(key) != 1]
    for path, _ in leaves(data):
        if not any(path == key or path.startswith(f"{key}.") for key in keys):
            wrong.append(f"{path} is not reported")
    plain = dict(leaves(imported.recipe.model_dump(mode="json")))
    wrong += [
        f"{use.key}: no {use.to} in the recipe" for use in imported.uses if use.to and use.to not in plain
    ]
    return wrong


ENGINES = [(path, recipe) for path, recipe in RECIPES if recipe.backend.kind == "tensorrt"]


@pytest.mark.parametrize("version", ["0.17.0", "1.2.1"])
@pytest.mark.parametrize(("path", "recipe"), ENGINES, ids=[path.stem for path, _ in ENGINES])
def test_an_engine_of_a_shipped_recipe_comes_back_as_that_recipe(
    path: Path, recipe: Recipe, version: str, tmp_path: Path
) -> None:
    data, speculation = engine_of(recipe, version), recipe.speculation
    imported = import_file(
        put(tmp_path, data),
        model=recipe.model.source,
        heads=getattr(speculation, "heads", None),
        draft_model=speculation.model.source if speculation.kind == "draft_model" else None,
    )
    found = imported.recipe
    assert found.limits == recipe.limits
    assert found.parallel == recipe.parallel
    assert found.quantization.kind == recipe.quantization.kind
    assert found.quantization.kv_cache == recipe.quantization.kv_cache
    assert found.backend == recipe.backend.model_copy(update={"version": f"=={version}"})
    if speculation.kind == "draft_model":  # no engine says how its draft engine was quantized
        speculation = speculation.model_copy(update={"quantization": found.speculation.quantization})
    assert found.speculation == speculation
    assert unaccounted(data, imported) == []
    assert [use for use in imported.uses if use.outcome == "unknown"] == []
    out = put(tmp_path, imported_yaml(imported, "config.json"), "r.yaml")
    assert with_gpu_rules(lint(out), out).errors == ()


def test_a_dropped_key_and_one_reported_twice_would_be_caught(tmp_path: Path) -> None:
    data = engine()
    imported = import_file(put(tmp_path, data), model="a/b")
    assert unaccounted(data, imported) == []
    assert unaccounted(data, replace(imported, uses=imported.uses[1:])) != []
    assert unaccounted(data, replace(imported, uses=(*imported.uses, imported.uses[0]))) != []


def test_an_engines_folder_is_enough_and_names_the_recipe(tmp_path: Path) -> None:
    folder = tmp_path / "My Engine_1"
    folder.mkdir()
    put(folder, engine())
    assert import_file(folder, model="a/b").recipe.name == "my-engine_1"
    assert import_file(folder / "config.json", model="a/b").recipe.name == "my-engine_1"
    assert import_file(folder, model="a/b", name="mine").recipe.name == "mine"


def test_what_an_engine_cannot_say_is_asked_for_at_once(tmp_path: Path) -> None:
    file = put(tmp_path, engine(build__speculative_decoding_mode=4, build__max_draft_len=63))
    with pytest.raises(InputError) as error:
        import_file(file)
    said = str(error.value)
    assert "give --model" in said
    assert "lmsys/vicuna-7b-v1.3" in said  # its sizes
    assert "give --heads" in said


def test_a_key_that_no_version_has_is_listed(tmp_path: Path) -> None:
    data = engine(build__banana=3, build__plugin_config__kiwi=True, model__plum={"a": 1}, extra=[1])
    imported = import_file(put(tmp_path, data), model="a/b")
    unknown = {use.key for use in imported.uses if use.outcome == "unknown"}
    assert unknown == {
        "build_config.banana", "build_config.plugin_config.kiwi", "pretrained_config.plum", "extra",
    }  # fmt: skip
    assert "# unknown: build_config.banana 3: no known version has it" in imported_yaml(imported, "x")


def test_a_dot_in_a_key_is_no_section(tmp_path: Path) -> None:
    data = engine()
    data["pretrained_config.dtype"] = "bfloat16"
    imported = import_file(put(tmp_path, data), model="a/b")
    assert imported.recipe.backend.dtype == "float16"
    assert any(use.key == '"pretrained_config.dtype"' and use.outcome == "unknown" for use in imported.uses)


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.17.0.post1", "==0.17.0"), ("0.17.0.dev2024121700", "==0.17.0"), ("1.2.1+cu130", "==1.2.1"),
        ("0.18.2", ">=0.17.0,<=0.21.0"), ("1.2.0rc4", ">=1.1.0,<=1.2.1"),
    ],
)  # fmt: skip
def test_the_version_is_the_engines_or_its_neighbours(version: str, expected: str, tmp_path: Path) -> None:
    imported = import_file(put(tmp_path, engine(version=version)), model="a/b")
    assert imported.recipe.backend.version == expected  # type: ignore[union-attr]
    assert versions_for("tensorrt", parse_range(expected))


def test_lookahead_is_recovered_from_its_size(tmp_path: Path) -> None:
    for length, expected in ((15, (4, 3, 4)), (83, (7, 7, 7))):
        data = engine(build__speculative_decoding_mode=8, build__max_draft_len=length)
        s = import_file(put(tmp_path, data), model="a/b").recipe.speculation
        assert drafted_positions(s) == length
        assert (s.window, s.ngram, s.verification_set) == expected  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 3}, "give --tensorrt-llm VERSION"),
        ({"version": "banana"}, "is not a version"),
        ({"version": "0.16.0"}, "engines of >=0.17,<=1.2.1"),
        ({"version": "1.3.0rc5"}, "rebuild it"),
        ({"version": "+a" * 5000 + ".post1" * 5000}, "is not a version"),
        ({"model__dtype": "float32"}, "bfloat16 and float16"),
        ({"model__quantization__quant_algo": "W8A16"}, "a recipe has NO_QUANT, FP8"),
        ({"model__quantization__quant_algo": ["FP8"]}, "text is needed"),
        ({"model__quantization__kv_cache_quant_algo": "FP4"}, "allowed: FP8, INT8, NVFP4"),
        ({"model__mapping": [1]}, "a mapping is needed"),
        ({"build__max_batch_size": "16"}, "a whole number is needed"),
        ({"build__max_batch_size": True}, "a whole number is needed"),
        ({"build__max_batch_size": 10**9}, "from 1 to 8192"),
        ({"build__max_seq_len": None}, "missing"),
        ({"build__speculative_decoding_mode": 16}, "ReDrafter"),
        ({"build__speculative_decoding_mode": 3}, "found 3"),
        ({"build__speculative_decoding_mode": {"a": 1}}, "allowed: none"),
        ({"build__speculative_decoding_mode": 8, "build__max_draft_len": 5000}, "no lookahead"),
        ({"build": []}, "a mapping is needed"),
        ({"build__plugin_config__multiple_profiles": "enable"}, "true or false is needed"),
    ],
)
def test_what_an_engine_cannot_be_is_said(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    if "build" in changes:
        data = engine()
        data["build_config"] = changes["build"]
    else:
        data = engine(**changes)
    with pytest.raises(InputError) as error:
        import_file(put(tmp_path, data), model="a/b")
    assert said in str(error.value)


def test_an_engine_folder_of_ours_names_its_recipe(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("version: 1\n")
    with pytest.raises(InputError, match=f"its recipe is {tmp_path}/recipe.yaml"):
        import_file(tmp_path, model="m")


# --------------------------------------------------------------------------- LLM API options

PYTORCH = """\
backend: {kind: pytorch, version: "%s"}
quantization: {kind: none, kv_cache: fp8}
speculation: %s
acceptance: {kind: %s}
limits: {max_batch_size: 24, max_input_tokens: 3000, max_seq_tokens: 5000, max_num_tokens: 4096}
parallel: {tp: 2}
"""
RENDERED = [
    (">=1.0,<1.5", "{kind: none}", "exact"),
    (">=1.0,<1.5", "{kind: ngram, num_draft_tokens: 6, max_ngram: 5}", "exact"),
    (">=1.0,<1.5", "{kind: eagle3, heads: org/h, num_draft_tokens: 5}", "exact"),
    (">=1.0,<1.5", "{kind: draft_model, model: {source: /draft}, num_draft_tokens: 3}", "exact"),
    (">=1.2,<1.5", "{kind: eagle3, heads: org/h, num_draft_tokens: 16, top_k: 4, depth: 4}", "exact"),
    (">=1.3,<1.5", "{kind: eagle3, heads: org/h, max_concurrency: 8}", "rejection"),
]


@pytest.mark.parametrize(("versions", "speculation", "acceptance"), RENDERED)
def test_what_is_rendered_is_read_back_in_every_versions_spelling(
    versions: str, speculation: str, acceptance: str, tmp_path: Path
) -> None:
    text = "version: 1\nname: a\nmodel: {source: org/m}\n" + PYTORCH % (versions, speculation, acceptance)
    recipe, tried = parse_recipe(text), 0
    for version in versions_for("pytorch", parse_range(versions)):
        rendered = plan_commands(recipe, version).files["llm_api.yaml"]
        imported = import_file(
            put(tmp_path, rendered, "o.yaml"),
            model="org/m",
            heads=getattr(recipe.speculation, "heads", None),
            draft_model="/draft" if recipe.speculation.kind == "draft_model" else None,
        )
        found = imported.recipe
        expected = recipe.speculation
        if expected.kind == "ngram":  # TensorRT-LLM has no shortest match
            expected = expected.model_copy(update={"min_ngram": found.speculation.min_ngram})  # type: ignore[union-attr]
        assert found.speculation == expected
        for section in ("limits", "parallel", "acceptance", "quantization"):
            assert getattr(found, section) == getattr(recipe, section), section
        assert overlap(found) == overlap(recipe)
        assert found.backend.cuda_graphs == recipe.backend.cuda_graphs  # type: ignore[union-attr]
        assert version in versions_for("pytorch", parse_range(found.backend.version))  # type: ignore[union-attr]
        assert unaccounted(yaml.safe_load(rendered), imported) == []
        assert [use for use in imported.uses if use.outcome == "unknown"] == []
        tried += 1
    assert tried


def options(tmp_path: Path, text: str, **flags: Any) -> Imported:
    return import_file(put(tmp_path, text, "options.yaml"), **{"model": "a/b", **flags})


def test_the_spelling_tells_the_version(tmp_path: Path) -> None:
    old = options(tmp_path, "speculative_config: {decoding_type: NGram, prompt_lookup_num_tokens: 3}\n")
    assert old.version == "0.21.0"
    assert old.recipe.speculation.num_draft_tokens == 3  # type: ignore[union-attr]
    assert any("older" in why for _, _, why in old.assumed)
    asked = options(tmp_path, "sampler_type: auto\n", version="1.2.1")
    assert asked.recipe.backend.version == "==1.2.1"  # type: ignore[union-attr]
    typo = options(tmp_path, "max_batchsize: 3\nmoe_config: {}\nkv_cache_config: {dtypo: fp8}\n")
    unknown = {use.key: use.why for use in typo.uses if use.outcome == "unknown"}
    assert set(unknown) == {"max_batchsize", "kv_cache_config.dtypo"}
    assert "no known version has it" in unknown["max_batchsize"]
    newer = options(tmp_path, "sampler_type: auto\n", version="1.0.0")
    assert "it exists in 1.2.1" in next(use.why for use in newer.uses if use.outcome == "unknown")


def test_old_spellings_reach_the_same_keys(tmp_path: Path) -> None:
    imported = options(
        tmp_path,
        "use_cuda_graph: false\nkv_cache_dtype: fp8\ndisable_overlap_scheduler: true\nspeculative_config:\n"
        "  decoding_type: Eagle\n  max_draft_len: 3\n  pytorch_weights_path: /h\n",
    )
    r = imported.recipe
    assert (r.backend.cuda_graphs, r.backend.overlap_scheduler) == (False, False)  # type: ignore[union-attr]
    assert r.quantization.kv_cache == "fp8"
    assert (r.speculation.kind, r.speculation.heads) == ("eagle3", "/h")  # type: ignore[union-attr]


def test_options_of_engines_are_told_apart(tmp_path: Path) -> None:
    medusa = options(
        tmp_path,
        "speculative_config: {decoding_type: Medusa, speculative_model_dir: /h, num_medusa_heads: 4,\n"
        "  medusa_choices: [[0], [0, 0]]}\n"
        "build_config: {max_batch_size: 4, plugin_config: {multiple_profiles: true}}\n",
    )
    assert medusa.recipe.backend.kind == "tensorrt"
    assert medusa.recipe.backend.multiple_profiles  # type: ignore[union-attr]
    assert medusa.recipe.limits.max_batch_size == 4
    assert medusa.recipe.speculation.choices == ((0,), (0, 0))  # type: ignore[union-attr]
    eagle = options(
        tmp_path,
        "backend: tensorrt\nspeculative_config: {decoding_type: Eagle, speculative_model_dir: /h,\n"
        "  num_eagle_layers: 4, max_draft_len: 20, greedy_sampling: false, posterior_threshold: 0.2}\n",
    )
    assert (eagle.recipe.speculation.kind, eagle.recipe.acceptance.kind) == ("eagle", "typical")
    assert eagle.recipe.gates.lossless is False


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no mapping at the top"),
        ("- a\n", "no mapping at the top"),
        ("{", "is not JSON"),
        ("a: &x [1]\nb: *x\n", "alias"),
        ("a: !!python/object:os.system x\n", "tag"),
        ("backend: _autodeploy\n", "recipes have pytorch and tensorrt"),
        ("max_batch_size: '4'\n", "a whole number is needed"),
        ("max_batch_size: .nan\n", "a whole number is needed"),
        ("attn_backend: BANANA\n", "TRTLLM, FLASHINFER, VANILLA"),
        ("dtype: float32\n", "bfloat16, float16"),
        ("kv_cache_config: 3\n", "a mapping is needed"),
        ("kv_cache_config: {dtype: int8}\n", "allowed on pytorch"),
        ("speculative_config: {decoding_type: MTP}\n", "found 'MTP'"),
        ("speculative_config: {decoding_type: AUTO}\n", "drop it or choose one"),
        ("speculative_config: {max_draft_len: 3}\n", "found None"),
        ("speculative_config: {decoding_type: [NGram]}\n", "a recipe has NGram"),
        ("speculative_config: {decoding_type: Eagle3, max_draft_len: 3}\n", "give --heads"),
        ("speculative_config: {decoding_type: Draft_Target}\n", "give --draft-model"),
        (
            "speculative_config: {decoding_type: Medusa, speculative_model: h, medusa_choices: 3}\n",
            "a list of paths",
        ),
        ('{"architectures": ["LlamaForCausalLM"]}', "trtspec init --model"),
        ('{"architecture": "LlamaForCausalLM", "dtype": "float16"}', "before trtllm-build"),
        ("model: {source: x}\nbackend: {kind: embedded}\n", "is a recipe already"),
        ("quant_config: {quant_algo: FP8_BLOCK_SCALES}\n", "a recipe has"),
        ('{"a": ' * 100_000, "is not JSON"),
    ],
)
def test_bad_options_are_bad_input(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        options(tmp_path, text)
    assert said in str(error.value)


def test_what_is_too_large_or_no_file_is_said(tmp_path: Path) -> None:
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(20_000_000)
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for path, said in (
        (huge, "at most 16 MB"),
        (tmp_path / "empty", "no config.json, so not the folder of a TensorRT-LLM engine"),
        (tmp_path / "pipe", "not a regular file"),
    ):
        with pytest.raises(InputError, match=said):
            import_file(path, model="a/b")


def test_a_version_whose_table_has_no_such_options_is_refused(tmp_path: Path) -> None:
    """0.17.0 has keys of KvCacheConfig that its table does not hold: "not in 0.17.0" would be untrue."""
    file = put(tmp_path, "backend: pytorch\nkv_cache_config: {dtype: fp8}\n", "o.yaml")
    with pytest.raises(
        InputError, match=r"the options of pytorch are known for: 0.21.0, 1.0.0, .*leave it out"
    ):
        import_file(file, model="a/b", version="0.17.0")
    file = put(tmp_path, "backend: tensorrt\nkv_cache_config: {enable_block_reuse: true}\n", "o.yaml")
    unknown = [
        use for use in import_file(file, model="a/b", version="0.17.0").uses if use.outcome == "unknown"
    ]
    assert [use.why.split(";")[0] for use in unknown] == [
        "the table of TensorRT-LLM 0.17.0 has no KvCacheConfig"
    ]


def test_a_version_without_a_table_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the nearest is 1\.2\.1"):
        options(tmp_path, "max_batch_size: 4\n", version="1.2.2")
    file = put(tmp_path, engine(version=None))
    assert import_file(file, model="a/b", version="0.21.0").recipe.backend.version == "==0.21.0"  # type: ignore[union-attr]
    with pytest.raises(InputError, match="engines of"):
        import_file(file, model="a/b", version="1.4.0rc4")


def test_flags_that_have_no_use_are_refused(tmp_path: Path) -> None:
    for flags in ({"heads": "h"}, {"draft_model": "d"}):
        with pytest.raises(InputError, match="has no use"):
            options(tmp_path, "max_batch_size: 4\n", **flags)


@pytest.mark.parametrize(
    "junk", [None, True, -1, 2.5, "", "x" * 10_000, [], [[0]], {}, {"a": {"b": 1}}, float("nan")]
)
def test_any_value_anywhere_is_an_error_of_the_file_or_accounted_for(junk: Any, tmp_path: Path) -> None:
    for path, _ in leaves(engine(build__speculative_decoding_mode=32, build__max_draft_len=20)):
        data = engine(build__speculative_decoding_mode=32, build__max_draft_len=20)
        data["pretrained_config"]["num_eagle_layers"] = 4
        *sections, last = path.split(".")
        place: Any = data
        for section in sections:
            place = place[section]
        place[last] = junk
        try:
            imported = import_file(put(tmp_path, data), model="a/b", heads="h")
        except TrtspecError:
            continue
        else:
            assert imported_yaml(imported, "config.json")
            json.dumps([use.found for use in imported.uses], allow_nan=False)


def test_any_option_with_any_value_too(tmp_path: Path) -> None:
    facts = load_facts("1.2.1")
    for key in facts.classes["TorchLlmArgs"]:
        for junk in (3, "x", [1], {"y": {"z": [None]}}, None, True):
            try:
                imported = import_file(put(tmp_path, {key: junk}, "o.json"), model="a/b")
            except TrtspecError:
                continue
            else:
                assert len(imported.uses) >= 1


@pytest.mark.parametrize("output", ["text", "json"])
def test_the_verb(output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = put(tmp_path, engine(build__banana=1)), tmp_path / "r.yaml"
    argv = ["import", str(file), "--model", "lmsys/vicuna-7b-v1.3", "-o", str(out)]
    assert main([*argv, *(["--json"] if output == "json" else [])]) == 0
    said = capsys.readouterr().out
    if output == "json":
        data = json.loads(said)
        assert data["trtspec"]["schema"] == "trtspec.import/1"
        assert {"key": "build_config.banana", "outcome": "unknown"}.items() <= next(
            use for use in data["keys"] if use["key"] == "build_config.banana"
        ).items()
    else:
        assert "unknown    build_config.banana 1" in said
        assert "build_config.max_batch_size 16 -> limits.max_batch_size" in said
    assert main(["lint", str(out)]) == 0
    assert main(["import", str(file)]) == 2
    assert main(["import", str(tmp_path / "nothing")]) == 2
