"""Triton repositories for GPU backends: read back by Triton's own schema, and broken ones caught."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.errors import InputError
from trtspec.recipe import EagleSpeculation, MedusaSpeculation, PytorchBackend, Recipe, TypicalAcceptance
from trtspec.recipe_file import load_recipe
from trtspec.triton_config import ModelConfig, quoted, to_pbtxt
from trtspec.trtllm.command import Paths
from trtspec.trtllm.facts import load_facts, versions_for
from trtspec.trtllm.plan import plan_commands
from trtspec.trtllm.triton import (
    llmapi_config,
    llmapi_problems,
    placeholder_problems,
    render_repository,
    triton_problems,
)
from trtspec.trtllm.triton_cpp import MAX_INSTANCES, cpp_models, load_table, model_problems
from trtspec.versions import parse_range

pytest.importorskip("tritonclient.grpc")
ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "trtllm-triton"
TREE = ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))
DRAFT = "llama-3.1-70b-fp8-draft-model-tensorrt"
MEDUSA = "vicuna-7b-fp8-medusa-tensorrt"
EAGLE = "vicuna-7b-fp16-eagle-tensorrt"
LOOKAHEAD = "vicuna-7b-w4a16-lookahead-tensorrt"
EAGLE3 = "llama-3.1-8b-fp8-eagle3-pytorch"
NGRAM = "llama-3.1-8b-w4a16-ngram-pytorch"


def recipe_of(name: str) -> Recipe:
    """A shipped recipe; the EAGLE one with a static tree, which Triton can serve."""
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml")
    return with_speculation(recipe, choices=TREE) if name == EAGLE else recipe


def with_speculation(recipe: Recipe, **changes: Any) -> Recipe:
    speculation = recipe.speculation.model_copy(update=changes)
    return recipe.model_copy(update={"speculation": speculation})


def with_serving(recipe: Recipe, **changes: Any) -> Recipe:
    return recipe.model_copy(update={"serving": recipe.serving.model_copy(update=changes)})


def options_of(recipe: Recipe, version: str) -> dict[str, Any]:
    """LLM()'s options, as the plan writes them."""
    plan = plan_commands(recipe, version, paths=Paths(heads="/heads", draft="/draft"))
    options: dict[str, Any] = yaml.safe_load(plan.files["llm_api.yaml"])
    return options


def rendered(recipe: Recipe, version: str, **changes: Any) -> dict[str, str]:
    options = None
    if isinstance(recipe.backend, PytorchBackend):
        options = options_of(recipe, version)
    paths = {"engine_dir": "/engine", "tokenizer_dir": "/tokenizer", "draft_engine_dir": "/draft"}
    return render_repository(recipe, version, **{**paths, "llm_options": options, **changes})  # type: ignore[arg-type]


def models_of(recipe: Recipe, version: str = "1.2.1") -> dict[str, ModelConfig]:
    return cpp_models(
        recipe,
        version,
        engine_dir="/engine",
        tokenizer_dir="/tokenizer",
        draft_engine_dir="/draft",
        max_kv_tokens=None,
        num_nodes=1,
    )


def parsed(text: str) -> Any:
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    return text_format.Parse(text, model_config_pb2.ModelConfig())


EVERY = [
    (name, version)
    for name in (DRAFT, MEDUSA, EAGLE, LOOKAHEAD, EAGLE3, NGRAM)
    for version in versions_for(recipe_of(name).backend.kind, parse_range(">=0"))
]


@pytest.mark.parametrize(("name", "version"), EVERY)
def test_triton_reads_every_model_as_it_was_meant(name: str, version: str) -> None:
    recipe = recipe_of(name)
    files = rendered(recipe, version)
    configs = {path.split("/")[0]: parsed(text) for path, text in files.items() if path.endswith(".pbtxt")}
    for folder, config in configs.items():
        assert config.name == folder
        for tensors in (config.input, config.output):
            assert len({tensor.name for tensor in tensors}) == len(tensors) > 0
    assert "${" not in "".join(files.values())
    decoupled = {
        config.model_transaction_policy.decoupled
        for folder, config in configs.items()
        if folder.startswith("tensorrt_llm")
    }
    assert decoupled == {name != DRAFT}
    if recipe.backend.kind == "pytorch":
        model = yaml.safe_load(files["tensorrt_llm/1/model.yaml"])
        triton = model.pop("triton_config")
        assert triton["decoupled"] is configs["tensorrt_llm"].model_transaction_policy.decoupled
        assert triton["max_batch_size"] == configs["tensorrt_llm"].max_batch_size == 0
        assert load_facts(version).check_keys("TorchLlmArgs", model) == []
        assert (model["model"], model["tokenizer"]) == ("/engine", "/tokenizer")
    else:
        assert {config.max_batch_size for config in configs.values()} == {recipe.limits.max_batch_size}
        assert configs["tensorrt_llm"].backend == "tensorrtllm"
        assert [step.model_name for step in configs["ensemble"].ensemble_scheduling.step] == [
            "preprocessing",
            "tensorrt_llm",
            "postprocessing",
        ]


@pytest.mark.parametrize("name", [DRAFT, MEDUSA, EAGLE, LOOKAHEAD])
def test_the_schema_reads_back_every_field(name: str) -> None:
    """Not only valid: what Triton reads is what was meant, tensor by tensor and parameter by parameter."""
    from tritonclient.grpc import model_config_pb2

    for folder, config in models_of(recipe_of(name)).items():
        read = parsed(to_pbtxt(config))
        assert {key: value.string_value for key, value in read.parameters.items()} == dict(config.parameters)
        for ours, theirs in ((config.inputs, read.input), (config.outputs, read.output)):
            assert [
                (
                    tensor.name,
                    model_config_pb2.DataType.Name(tensor.data_type),
                    tuple(tensor.dims),
                    getattr(tensor, "optional", False),
                    tensor.HasField("reshape"),
                    getattr(tensor, "allow_ragged_batch", False),
                )
                for tensor in theirs
            ] == [(t.name, t.data_type, t.dims, t.optional, t.scalar, t.ragged) for t in ours], folder
        assert [dict(step.input_map) for step in read.ensemble_scheduling.step] == [
            dict(step.input_map) for step in config.steps
        ]
        if config.queue is not None:
            policy = read.dynamic_batching.default_queue_policy
            assert policy.max_queue_size == config.queue.max_queue_size


@settings(max_examples=50)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_quoting(text: str) -> None:
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    read = text_format.Parse(f"name: {quoted(text)}", model_config_pb2.ModelConfig())
    assert read.name == text


def test_quoting_is_needed() -> None:
    from google.protobuf import text_format

    with pytest.raises(text_format.ParseError):
        parsed('name: "a"b"')


@pytest.mark.parametrize("name", [DRAFT, MEDUSA, EAGLE, LOOKAHEAD, EAGLE3])
def test_golden(name: str) -> None:
    """The models that a recipe changes, byte for byte; the others differ in sizes and paths only."""
    for path, text in rendered(recipe_of(name), "1.2.1").items():
        golden = GOLDEN / f"{name}-1.2.1" / path
        if os.environ.get("TRTSPEC_UPDATE_GOLDEN"):
            golden.parent.mkdir(parents=True, exist_ok=True)
            golden.write_text(text)
        assert golden.read_text() == text, golden


# --------------------------------------------------------------------------- what the models say


def test_each_way_of_drafting_is_configured() -> None:
    def parameters(name: str) -> Mapping[str, str]:
        return models_of(recipe_of(name))["tensorrt_llm"].parameters

    assert parameters(MEDUSA)["decoding_mode"] == "medusa"
    assert "medusa_choices" not in parameters(MEDUSA)  # the backend's default tree
    eagle = parameters(EAGLE)
    assert eagle["decoding_mode"] == "eagle"
    assert eagle["eagle_choices"] == "{0}, {1}, {0, 0}, {0, 1}, {0, 0, 0}"
    lookahead = parameters(LOOKAHEAD)
    assert (lookahead["lookahead_window_size"], lookahead["lookahead_ngram_size"]) == ("4", "3")
    medusa = models_of(with_speculation(recipe_of(MEDUSA), choices=TREE))["tensorrt_llm"].parameters
    assert medusa["medusa_choices"] == eagle["eagle_choices"]


def test_draft_target_is_two_engines_behind_the_bls() -> None:
    models = models_of(recipe_of(DRAFT))
    bls, target, draft = (models[f"tensorrt_llm{tail}"] for tail in ("_bls", "", "_draft"))
    assert bls.parameters["tensorrt_llm_model_name"] == "tensorrt_llm"
    assert bls.parameters["tensorrt_llm_draft_model_name"] == "tensorrt_llm_draft"
    assert (target.parameters["gpt_model_path"], draft.parameters["gpt_model_path"]) == ("/engine", "/draft")
    # One GPU id a rank, and room for both engines' KV caches.
    assert target.parameters["gpu_device_ids"] == "0,1,2,3"
    fractions = [float(m.parameters["kv_cache_free_gpu_mem_fraction"]) for m in (target, draft)]
    assert sum(fractions) < 0.9
    assert target.parameters["enable_kv_cache_reuse"] == "true"
    assert [model.decoupled for model in (bls, target, draft)] == [False] * 3
    asked = {tensor.name for tensor in bls.inputs}
    assert {"num_draft_tokens", "use_draft_logits"} <= asked
    taken = {tensor.name for tensor in target.inputs}
    assert {"draft_input_ids", "draft_logits"} <= taken


def test_instances_follow_the_requests_in_flight() -> None:
    recipe = recipe_of(LOOKAHEAD)
    for batch, copies in ((4, 4), (500, MAX_INSTANCES)):
        limits = recipe.limits.model_copy(update={"max_batch_size": batch})
        models = models_of(recipe.model_copy(update={"limits": limits}))
        found = {models[name].instances for name in ("preprocessing", "postprocessing", "tensorrt_llm_bls")}
        assert found == {copies}
        assert ("raise the count" in models["preprocessing"].comments[""]) == (copies < batch)


def test_kv_reuse_follows_the_attention_kernel() -> None:
    recipe = recipe_of(LOOKAHEAD)
    values = models_of(recipe)["tensorrt_llm"].parameters
    assert values["enable_kv_cache_reuse"] == "true"
    quantization = recipe.quantization.model_copy(update={"kv_cache": "int8"})
    values = models_of(recipe.model_copy(update={"quantization": quantization}))["tensorrt_llm"].parameters
    assert (values["enable_kv_cache_reuse"], values["enable_chunked_context"]) == ("false", "false")


def test_the_kv_cache_is_bounded_in_tokens_where_their_size_is_known() -> None:
    recipe = recipe_of(LOOKAHEAD)
    limits = recipe.limits.model_copy(update={"kv_cache_bytes": 10**9})
    recipe = recipe.model_copy(update={"limits": limits})
    assert (
        "max_tokens_in_paged_kv_cache"
        in rendered(recipe, "1.2.1", max_kv_tokens=5000)["tensorrt_llm/config.pbtxt"]
    )
    unknown = rendered(recipe, "1.2.1")["tensorrt_llm/config.pbtxt"]
    assert "limits.kv_cache_bytes (1000000000) is not applied" in unknown


def test_names_of_tensors_follow_the_version() -> None:
    old, new = (
        {tensor.name for tensor in load_table(version).inputs["tensorrt_llm"]}
        for version in ("0.17.0", "1.2.1")
    )
    assert {"min_length", "random_seed"} <= old - new
    assert {"min_tokens", "seed", "return_num_output_tokens"} <= new - old


# --------------------------------------------------------------------------- what Triton cannot do


@pytest.mark.parametrize(
    ("recipe", "version", "message"),
    [
        (with_speculation(recipe_of(EAGLE), choices=None), "1.2.1", "static trees only"),
        (
            recipe_of(EAGLE).model_copy(update={"acceptance": TypicalAcceptance(kind="typical")}),
            "1.2.1",
            "no parameter for the posterior threshold",
        ),
        (with_serving(recipe_of(DRAFT), grpc_port=9001), "1.2.1", "port 8001 of its own machine"),
        (with_serving(recipe_of(DRAFT), host="10.0.0.5"), "1.2.1", "draft model at localhost"),
        (with_serving(recipe_of(MEDUSA), model_name="ensemble"), "1.2.1", "name of another model"),
        (recipe_of(MEDUSA), "1.4.0rc4", "does not exist in TensorRT-LLM 1.4.0rc4"),
        (recipe_of(EAGLE3), "0.21.0", "does not exist in TensorRT-LLM 0.21.0"),
        (load_recipe(ROOT / "recipes" / "smollm2-bf16-ngram.yaml"), "1.2.1", "serves by itself"),
        (with_speculation(recipe_of(EAGLE), choices=((0,), (1, 0))), "1.2.1", "without its prefix"),
    ],
)
def test_what_triton_cannot_serve_is_refused(recipe: Recipe, version: str, message: str) -> None:
    assert any(message in str(problem) for problem in triton_problems(recipe, version))
    with pytest.raises(InputError, match=message):
        rendered(recipe, version)


def test_the_same_recipe_passes_where_nothing_speaks_against_it() -> None:
    assert triton_problems(with_serving(recipe_of(DRAFT), grpc_port=9001), "0.17.0") == []
    assert triton_problems(with_serving(recipe_of(MEDUSA), model_name="chat", host="10.0.0.5"), "1.2.1") == []
    files = rendered(with_serving(recipe_of(MEDUSA), model_name="chat"), "1.2.1")
    assert "chat/config.pbtxt" in files
    with pytest.raises(InputError, match="draft engine's folder"):
        rendered(recipe_of(DRAFT), "1.2.1", draft_engine_dir=None)


def test_the_engine_and_the_heads_bound_the_tree() -> None:
    recipe = with_speculation(recipe_of(MEDUSA), choices=TREE)
    assert rendered(recipe, "1.2.1", num_heads=3, max_draft_len=5)
    with pytest.raises(InputError, match="3 deep, there are 2 heads"):
        rendered(recipe, "1.2.1", num_heads=2)
    with pytest.raises(InputError, match="built for max_draft_len 4"):
        rendered(recipe, "1.2.1", max_draft_len=4)
    assert isinstance(recipe.speculation, MedusaSpeculation)


# --------------------------------------------------------------------------- broken repositories


def broken(**changes: Any) -> dict[str, ModelConfig]:
    models = models_of(recipe_of(EAGLE))
    return {**models, "tensorrt_llm": replace(models["tensorrt_llm"], **changes)}


def with_parameters(**changes: str | None) -> dict[str, ModelConfig]:
    values = {**models_of(recipe_of(EAGLE))["tensorrt_llm"].parameters, **changes}
    return broken(parameters={key: value for key, value in values.items() if value is not None})


def with_another_model(name: str) -> dict[str, ModelConfig]:
    models = models_of(recipe_of(EAGLE))
    return {**models, name: models["preprocessing"]}


def without_output(name: str, output: str) -> dict[str, ModelConfig]:
    models = models_of(recipe_of(EAGLE))
    kept = tuple(tensor for tensor in models[name].outputs if tensor.name != output)
    return {**models, name: replace(models[name], outputs=kept)}


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (with_parameters(max_draft_length="4"), "parameter max_draft_length is unknown"),
        (with_parameters(cross_kv_cache_fraction="0.5"), "encoder-decoder models only"),
        (with_parameters(xgrammar_tokenizer_info_path=None), "reads it without a default"),
        (with_parameters(gpt_model_path=""), "gpt_model_path is empty"),
        (with_parameters(eagle_choices="[[0], [1]]"), "paths in braces"),
        (with_parameters(eagle_choices="{0}\\, {1}"), "paths in braces"),
        (with_parameters(eagle_choices="{0}, {}"), "paths in braces"),
        (with_parameters(eagle_choices="{0},{1}"), "write {0}, {1}"),
        (broken(decoupled=False), "decoupled differs between the models"),
        (broken(max_batch_size=1), "max_batch_size differs between the models"),
        (without_output("preprocessing", "INPUT_ID"), "preprocessing has no output INPUT_ID"),
        (without_output("tensorrt_llm", "acceptance_rate"), "has no output acceptance_rate"),
        (with_another_model("extra"), "extra: no such model"),
    ],
)
def test_a_broken_repository_is_caught(models: dict[str, ModelConfig], message: str) -> None:
    problems = list(model_problems(models, "1.2.1"))
    assert not list(model_problems(models_of(recipe_of(EAGLE)), "1.2.1"))
    assert any(message in problem for problem in problems), problems


def test_every_wire_of_the_ensemble_is_needed() -> None:
    """Each tensor that the engine requires, and each step, taken away one at a time."""
    models = models_of(recipe_of(LOOKAHEAD))
    ensemble = models["ensemble"]
    for at, step in enumerate(ensemble.steps):
        fewer = (*ensemble.steps[:at], *ensemble.steps[at + 1 :])
        assert list(model_problems({**models, "ensemble": replace(ensemble, steps=fewer)}, "1.2.1")), step
    engine = ensemble.steps[1]
    rest = {key: value for key, value in engine.input_map.items() if key != "input_lengths"}
    cut = (ensemble.steps[0], replace(engine, input_map=rest), ensemble.steps[2])
    problems = list(model_problems({**models, "ensemble": replace(ensemble, steps=cut)}, "1.2.1"))
    assert problems == ["ensemble: tensorrt_llm requires input_lengths, and no tensor is mapped to it"]


def test_placeholders_are_caught_but_the_scripts_variables_kept() -> None:
    recipe = recipe_of(EAGLE3)
    files = rendered(recipe, "1.2.1", engine_dir="${WORK_DIR}/target")
    assert "${WORK_DIR}/target" in files["tensorrt_llm/1/model.yaml"]
    planted = {"m/config.pbtxt": 'backend: "${triton_backend}"', "n/config.pbtxt": 'name: "${WORK_DIR"'}
    assert list(placeholder_problems(planted)) == [
        "m/config.pbtxt: the placeholder ${triton_backend} was not filled in",
        "n/config.pbtxt: the placeholder ${WORK_DIR was not filled in",
    ]
    with pytest.raises(InputError, match=r"placeholder \$\{WORK\} was not"):
        rendered(recipe, "1.2.1", engine_dir="${WORK}/target")


def test_the_llm_api_model_agrees_in_both_places() -> None:
    recipe, facts = recipe_of(EAGLE3), load_facts("1.2.1")
    config, triton = llmapi_config(recipe), {"max_batch_size": 0, "decoupled": True}
    options = {"model": "/m"}
    assert list(llmapi_problems(config, options, triton, facts)) == []
    for key, value in (("decoupled", False), ("max_batch_size", 8)):
        (problem,) = llmapi_problems(config, options, {**triton, key: value}, facts)
        assert "both must agree" in problem
    (problem,) = llmapi_problems(replace(config, decoupled=None), options, triton, facts)
    assert problem.startswith("decoupled is None in config.pbtxt")
    (problem,) = llmapi_problems(config, {**options, "max_batchsize": 8}, triton, facts)
    assert "max_batchsize" in problem
    (problem,) = llmapi_problems(replace(config, parameters={"engine_dir": "/e"}), options, triton, facts)
    assert "engine_dir" in problem


def test_rendering_refuses_what_the_checks_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that lacks a parameter stands for a renderer that writes one too many."""
    import trtspec.trtllm.triton_cpp as cpp

    table = load_table("1.2.1")
    fewer = {**table.parameters, "tensorrt_llm": table.parameters["tensorrt_llm"] - {"decoding_mode"}}
    monkeypatch.setattr(cpp, "load_table", lambda version: replace(table, parameters=fewer))
    with pytest.raises(InputError, match="parameter decoding_mode is unknown"):
        rendered(recipe_of(LOOKAHEAD), "1.2.1")
    assert isinstance(recipe_of(EAGLE).speculation, EagleSpeculation)
