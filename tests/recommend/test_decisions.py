"""The rules of the tree, one by one: fidelity, one user, many users, copying, long context, memory, heads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recommend_cases import broken_laws, draft_of

from trtspec.cost.acceptance import prior_table
from trtspec.errors import InconclusiveError, InputError
from trtspec.hardware import find_gpu
from trtspec.known_models import NamedModel, find_model
from trtspec.recipe import NoQuantization
from trtspec.recipe_facts import drafted_positions
from trtspec.recommend import Recommendation, recommend
from trtspec.recommend.drafting import MIN_GAIN
from trtspec.recommend.evidence import read_evidence
from trtspec.recommend.formats import kv8, why_not
from trtspec.recommend.heads import read_heads
from trtspec.recommend.methods import methods
from trtspec.recommend.pricing import Case, Plan, price
from trtspec.scenario import load_scenario

VICUNA = "lmsys/vicuna-7b-v1.3"


def _recommend(
    scenario: str, model: str, gpu: str | None, changes: Any = None, **given: Any
) -> Recommendation:
    named = find_model(model)
    given.setdefault("draft", draft_of(named))
    return recommend(load_scenario(scenario, changes), named, find_gpu(gpu) if gpu else None, **given)


def _rejected(found: Recommendation, what: str) -> str:
    return next(r.because for r in found.rejected if r.what.startswith(what))


def _reason(found: Recommendation, step: str, word: str = "") -> str:
    return next(f"{r.choice}: {r.because}" for r in found.because if r.step == step and word in r.choice)


# --------------------------------------------------------------------------- fidelity


def _report(
    folder: Path, model: str, quantization: dict[str, Any], verdict: str, bound: float | None
) -> Path:
    checks = [
        {"name": "quality", "verdict": verdict, "bound": bound, "summary": "ratio 1.002"},
        {
            "name": "acceptance",
            "verdict": "PASS",
            "evidence": {"steps_by_tokens_emitted": {"1": 20, "2": 20, "3": 20, "4": 20, "5": 120}},
        },
    ]
    recipe = {"model": {"source": model}, "quantization": quantization, "speculation": {"kind": "ngram"}}
    path = folder / "report.json"
    path.write_text(json.dumps({"schema": "trtspec.report/1", "recipe": recipe, "checks": checks}))
    return path


@pytest.mark.parametrize("scenario", ["zero-tolerance", "medical-consult"])
def test_exact_keeps_16_bit_until_a_gate_passed(scenario: str, tmp_path: Path) -> None:
    plain = _recommend(scenario, "8B", "H100-SXM")
    assert plain.recipe.quantization.kind == "none"
    assert "passed quality gate" in _rejected(plain, "FP8 weights")
    source = find_model("8B").source
    passed = _report(tmp_path, source, {"kind": "fp8", "kv_cache": "fp8"}, "PASS", 1.01)
    found = _recommend(scenario, "8B", "H100-SXM", evidence=read_evidence(passed, source))
    assert found.recipe.quantization.kind == "fp8"
    assert "gate passed" in _reason(found, "fidelity")
    assert list(broken_laws(found, passed="fp8")) == []


@pytest.mark.parametrize(("verdict", "bound"), [("FAIL", 1.01), ("INCONCLUSIVE", 1.01), ("PASS", None)])
def test_what_is_no_pass(verdict: str, bound: float | None, tmp_path: Path) -> None:
    source = find_model("8B").source
    report = _report(tmp_path, source, {"kind": "fp8", "kv_cache": "none"}, verdict, bound)
    found = _recommend("zero-tolerance", "8B", "H100-SXM", evidence=read_evidence(report, source))
    assert found.recipe.quantization.kind == "none"


def test_a_report_about_another_model_is_no_evidence(tmp_path: Path) -> None:
    report = _report(tmp_path, "org/other", {"kind": "fp8", "kv_cache": "none"}, "PASS", 1.01)
    with pytest.raises(InputError, match="not about"):
        read_evidence(report, find_model("8B").source)


def test_exact_says_when_only_a_gated_format_fits() -> None:
    with pytest.raises(InconclusiveError, match=r"FP8 weights.*quality gate.*--count 2"):
        _recommend("zero-tolerance", "70B", "H100-SXM")
    two = _recommend("zero-tolerance", "70B", "H100-SXM", count=2)
    assert (two.recipe.quantization.kind, two.recipe.parallel.tp) == ("none", 2)


def test_an_8_bit_cache_under_exact_is_optional_and_flagged() -> None:
    found = _recommend("medical-consult", "70B", "H200", {"concurrency": 8, "input_tokens": 6000})
    assert found.recipe.quantization.kind == "none"
    assert found.recipe.quantization.kv_cache == "fp8"
    assert any("optional" in warning and "quality gate" in warning for warning in found.warnings)


def test_measured_acceptance_replaces_the_prior(tmp_path: Path) -> None:
    source = find_model("7B").source
    changes = {"copy_fraction": 0.05}
    guessed = _recommend("interactive", "7B", "L4", changes, weights="fp8")
    assert guessed.recipe.speculation.kind == "none"
    report = _report(tmp_path, source, {"kind": "none", "kv_cache": "none"}, "PASS", 1.01)
    measured = _recommend(
        "interactive", "7B", "L4", changes, weights="fp8", evidence=read_evidence(report, source)
    )
    assert measured.recipe.speculation.kind == "ngram"
    assert measured.estimate is not None
    assert measured.estimate.acceptance_length > 3


# --------------------------------------------------------------------------- one user


@pytest.mark.parametrize("gpu", ["L4", "L40S", "A100-SXM", "H100-SXM", "H200"])
def test_one_user_gets_4_bit_weights_and_a_quantized_draft(gpu: str) -> None:
    found = _recommend("interactive", "8B", gpu)
    recipe = found.recipe
    assert recipe.quantization.kind == "w4a16_awq"
    assert recipe.quantization.kv_cache == "none"
    assert recipe.speculation.kind == "draft_model"
    assert recipe.speculation.quantization.kind != "none"
    said = _reason(found, "speculation", "draft in")
    assert "would cost" in said
    slower = next(r for r in found.rejected if r.what == "draft_model with a 16-bit draft")
    assert found.estimate is not None
    assert slower.tpot_ms is not None
    loss = 1 - found.estimate.tpot_ms / slower.tpot_ms
    assert 0 < loss < 0.5
    assert f"{loss:.1%}" in said


def test_where_fp8_looks_faster_for_one_user_it_is_said() -> None:
    found = _recommend("interactive", "8B", "H100-SXM")
    other = next(r for r in found.rejected if r.what.startswith("FP8 weights with"))
    forced = _recommend("interactive", "8B", "H100-SXM", weights="fp8")
    assert forced.recipe.quantization.kind == "fp8"
    assert forced.estimate is not None
    assert forced.estimate.tpot_ms == pytest.approx(other.tpot_ms)


def test_a_bound_on_ttft_that_only_fp8_meets_decides() -> None:
    plain = _recommend("interactive", "32B", "L40S")
    assert plain.recipe.quantization.kind == "w4a16_awq"
    assert plain.plain is not None
    changes = {"slo": {"ttft_ms": round(plain.plain.ttft_ms * 0.8)}}
    assert _recommend("interactive", "32B", "L40S", changes).recipe.quantization.kind == "fp8"


# --------------------------------------------------------------------------- many users


@pytest.mark.parametrize("gpu", ["L4", "L40S", "H100-SXM", "H200", "B200"])
@pytest.mark.parametrize("scenario", ["high-throughput", "customer-service"])
def test_many_users_get_fp8_not_4_bit_weights(scenario: str, gpu: str) -> None:
    found = _recommend(scenario, "8B", gpu)
    assert (found.recipe.quantization.kind, found.recipe.quantization.kv_cache) == ("fp8", "fp8")
    if gpu != "B200":
        assert "weight-only 4-bit loses" in _rejected(found, "W4A16")
    first = [reason.step for reason in found.because]
    assert first.index("serving") < first.index("weights") < first.index("speculation")
    assert "prefix cache, in-flight batching, chunked prefill" in _reason(found, "serving")


def test_many_users_without_fp8_arithmetic() -> None:
    assert _recommend("high-throughput", "8B", "A100-SXM").recipe.quantization.kind == "none"
    engine = _recommend("high-throughput", "8B", "A100-SXM", backend="tensorrt")
    assert engine.recipe.quantization.kind == "w8a8_sq"
    assert "engines only" in _rejected(_recommend("high-throughput", "8B", "A100-SXM"), "W8A8")


@pytest.mark.parametrize("concurrency", [2, 4, 8, 16, 32, 64, 128, 256])
def test_drafting_only_below_the_break_even(concurrency: int) -> None:
    """What is recommended for all gains at full concurrency; what is limited, up to its limit."""
    found = _recommend("high-throughput", "8B", "H100-SXM", {"concurrency": concurrency})
    recipe = found.recipe
    speculation = recipe.speculation
    assert found.estimate is not None
    assert found.plain is not None
    if speculation.kind == "none":
        assert concurrency > 1
        return
    limit = speculation.max_concurrency
    if limit is None:
        assert found.plain.tpot_ms / found.estimate.tpot_ms >= MIN_GAIN
        return
    assert limit < concurrency
    assert found.estimate.tpot_ms == found.plain.tpot_ms
    named = find_model("8B")
    case = Case(found.scenario, named, find_gpu("H100-SXM"), 1, "pytorch", draft=draft_of(named))

    def gain(batch: int) -> float:
        free = speculation.model_copy(update={"max_concurrency": None})
        plan = Plan(recipe.quantization, free, recipe.acceptance, concurrency=batch)
        plain = Plan(recipe.quantization, concurrency=batch)
        return price(case, plain).tpot_ms / price(case, plan).tpot_ms

    assert gain(limit) >= MIN_GAIN
    assert gain(limit + 1) < MIN_GAIN
    assert gain(1) > gain(limit)


def test_engines_cannot_stop_drafting_so_they_do_not_start() -> None:
    found = _recommend("high-throughput", "8B", "H100-SXM", backend="tensorrt")
    assert found.recipe.speculation.kind == "none"
    assert "every batch size" in _rejected(found, "lookahead")


# --------------------------------------------------------------------------- copying


def test_n_grams_win_on_copying_and_lose_on_free_text() -> None:
    assert _recommend("repetitive", "7B", "H100-SXM").recipe.speculation.kind == "ngram"
    free = _recommend("repetitive", "7B", "H100-SXM", {"copy_fraction": 0.02})
    assert free.recipe.speculation.kind == "none"
    assert "ngram" in [r.what.split()[0] for r in free.rejected]


@pytest.mark.parametrize("gpu", ["L4", "L40S", "A100-SXM", "H100-SXM", "H200", "B200"])
@pytest.mark.parametrize("model", ["8B", "32B", "70B"])
def test_repetitive_work_drafts_by_n_grams(model: str, gpu: str) -> None:
    try:
        found = _recommend("repetitive", model, gpu)
    except InputError:
        return
    assert found.recipe.speculation.kind == "ngram"


def _tpot(task: str, kind: str) -> float:
    """The best time per token of ``kind`` for Vicuna-7B in 16 bit on an A100, one user, greedy: as Spec-Bench
    measured."""
    copies = prior_table()["methods"]["ngram"]["tasks"][task]["copy_fraction"]
    scenario = load_scenario("interactive", {"task": task, "copy_fraction": copies, "input_tokens": 512})
    model = find_model(VICUNA)
    heads = _Heads.medusa(model)
    case = Case(scenario, model, find_gpu("A100-SXM"), 1, "tensorrt", heads=heads)
    from trtspec.recommend.decision import Path as Decisions
    from trtspec.recommend.formats import Format

    plain = NoQuantization(kind="none")
    found = methods(case, Decisions(), Format(plain, 1, 1, 1, 1, None))
    method = next(method for method in found if method.kind == kind)
    return min(price(case, Plan(plain, option)).tpot_ms for option in method.options)


class _Heads:
    @staticmethod
    def medusa(model: NamedModel) -> Any:
        from trtspec.recommend.heads import Heads

        return Heads("medusa-heads", "medusa", None, 4, 1)


def test_the_order_of_spec_bench() -> None:
    """Prompt lookup beats Medusa on summarization and loses to it on translation, in all four tables."""
    assert _tpot("summarization", "ngram") < _tpot("summarization", "medusa")
    assert _tpot("translation", "ngram") > _tpot("translation", "medusa")


# --------------------------------------------------------------------------- context and memory


@pytest.mark.parametrize(
    ("model", "gpu"), [("8B", "H100-SXM"), ("32B", "H200"), ("70B", "B200"), ("8B", "L4")]
)
@pytest.mark.parametrize("scenario", ["interactive", "repetitive", "zero-tolerance"])
def test_a_longer_context_never_drafts_longer(scenario: str, model: str, gpu: str) -> None:
    lengths = []
    for tokens in (1024, 2048, 8192, 16384, 32768):
        try:
            found = _recommend(
                scenario, model, gpu, {"input_tokens": tokens, "concurrency": 1}, weights="none"
            )
        except (InputError, InconclusiveError):
            continue
        if found.recipe.speculation.kind != "none":
            lengths.append(drafted_positions(found.recipe.speculation))
            if tokens > 4096:
                assert "context" in _reason(found, "length")
    assert lengths[2:] == [] or max(lengths[2:]) <= lengths[1]


@pytest.mark.parametrize("gpu", ["L40S", "H100-SXM", "H200", "B200"])
def test_long_context_quantizes_the_cache_first(gpu: str) -> None:
    found = _recommend("memory-bound", "8B", gpu)
    assert found.recipe.quantization.kv_cache == "fp8"
    assert "KV cache first" in _reason(found, "weights")


def test_a_small_card_quantizes_the_weights_because_the_cache_is_small() -> None:
    found = _recommend("edge-8gb", "7B", "RTX-4060")
    assert found.recipe.quantization.kind == "w4a16_awq"
    assert "KV cache is only" in _reason(found, "weights")
    assert "paged context attention" in _reason(found, "kv_cache")
    assert found.estimate is not None
    assert found.estimate.memory.total_bytes < 8 * 2**30


def test_speculation_costs_memory() -> None:
    """A draft that leaves too little room for the sequences is rejected by its bytes."""
    tight = {"concurrency": 2, "memory": "normal"}
    found = None
    for tokens in range(4096, 30000, 512):
        try:
            found = _recommend("memory-bound", "32B", "L40S", {**tight, "input_tokens": tokens})
        except InputError:
            break
        if any("speculation costs memory" in r.because for r in found.rejected):
            assert found.recipe.speculation.kind != "draft_model"
            return
    pytest.fail("no context at which only the draft does not fit")


# --------------------------------------------------------------------------- heads


def _folder(tmp_path: Path, **config: Any) -> str:
    folder = tmp_path / "heads"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


MEDUSA = {"medusa_num_heads": 4, "medusa_num_layers": 1, "hidden_size": 4096, "vocab_size": 32000}
EAGLE = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "hidden_size": 4096,
         "num_attention_heads": 32, "vocab_size": 32000}  # fmt: skip
EAGLE3 = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "hidden_size": 4096,
          "num_attention_heads": 32, "vocab_size": 128256, "draft_vocab_size": 32000}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "model", "method", "backend", "weights"),
    [
        (MEDUSA, VICUNA, "medusa", "tensorrt", ("none", "fp8")),
        (EAGLE, VICUNA, "eagle", "tensorrt", ("none",)),
        (EAGLE3, "8B", "eagle3", "pytorch", ("w4a16_awq",)),
    ],
)
def test_named_heads_choose_the_backend_that_has_them(
    config: dict[str, Any], model: str, method: str, backend: str, weights: tuple[str, ...], tmp_path: Path
) -> None:
    source = _folder(tmp_path, **config)
    heads = read_heads(source, find_model(model).spec)
    found = _recommend("interactive", model, "H100-SXM", heads=heads)
    recipe = found.recipe
    assert (recipe.speculation.kind, recipe.backend.kind) == (method, backend)
    assert recipe.quantization.kind in weights
    assert getattr(recipe.speculation, "quantization", "none") == "none", "no step quantizes heads"
    assert list(broken_laws(found, heads=source)) == []


@pytest.mark.parametrize(
    ("config", "model", "backend", "nearest"),
    [
        (MEDUSA, VICUNA, "pytorch", "eagle3"),
        (EAGLE3, "8B", "tensorrt", "eagle"),
    ],
)
def test_heads_that_the_backend_lacks_are_named_with_the_nearest(
    config: dict[str, Any], model: str, backend: Any, nearest: str, tmp_path: Path
) -> None:
    heads = read_heads(_folder(tmp_path, **config), find_model(model).spec)
    found = _recommend("interactive", model, "H100-SXM", heads=heads, backend=backend)
    assert found.recipe.backend.kind == backend
    assert f"the nearest on {backend} is {nearest}" in _rejected(found, heads.method)
    assert list(broken_laws(found)) == []


@pytest.mark.parametrize(("config", "model"), [(MEDUSA, VICUNA), (EAGLE, VICUNA), (EAGLE3, "8B")])
def test_the_embedded_engine_runs_every_kind_of_heads(
    config: dict[str, Any], model: str, tmp_path: Path
) -> None:
    source = _folder(tmp_path, **config)
    heads = read_heads(source, find_model(model).spec)
    found = _recommend("interactive", model, "H100-SXM", heads=heads, backend="embedded")
    assert found.recipe.backend.kind == "embedded"
    assert found.recipe.speculation.kind == heads.method
    assert list(broken_laws(found, heads=source)) == []


def test_medusa_engines_would_silently_be_greedy(tmp_path: Path) -> None:
    heads = read_heads(_folder(tmp_path, **MEDUSA), find_model(VICUNA).spec)
    found = _recommend("interactive", VICUNA, "H100-SXM", {"temperature": 0.7}, heads=heads)
    assert found.recipe.speculation.kind != "medusa"


def test_eagle_engines_sample_approximately_only(tmp_path: Path) -> None:
    heads = read_heads(_folder(tmp_path, **EAGLE), find_model(VICUNA).spec)
    warm = {"temperature": 0.7}
    strict = _recommend("interactive", VICUNA, "H100-SXM", warm, heads=heads)
    assert strict.recipe.speculation.kind != "eagle"
    loose = _recommend("interactive", VICUNA, "H100-SXM", {**warm, "fidelity": "approximate"}, heads=heads)
    assert (loose.recipe.speculation.kind, loose.recipe.acceptance.kind) == ("eagle", "typical")
    assert loose.recipe.gates.lossless is False


def test_heads_of_another_model_are_refused(tmp_path: Path) -> None:
    source = _folder(tmp_path, **MEDUSA)
    with pytest.raises(InputError, match="vocab_size"):
        read_heads(source, find_model("8B").spec)
    (Path(source) / "config.json").write_text(json.dumps({**EAGLE, "num_hidden_layers": 32}))
    with pytest.raises(InputError, match="trained heads"):
        read_heads(source, find_model("8B").spec)


def test_without_a_head_none_is_invented_and_training_is_priced() -> None:
    found = _recommend("interactive", "70B", "H100-SXM", draft=None)
    assert found.recipe.speculation.kind in ("ngram", "none")
    text = _rejected(found, "eagle3 (untrained)")
    assert "none is invented" in text
    assert "would bring" in text


# --------------------------------------------------------------------------- backends, hardware, counts


def test_a_machine_without_a_gpu() -> None:
    named = find_model("135M")
    found = recommend(load_scenario("repetitive"), named, None)
    assert found.recipe.backend.kind == "embedded"
    assert found.recipe.speculation.kind == "ngram"
    assert found.estimate is None
    assert any("verify" in warning for warning in found.warnings)
    assert list(broken_laws(found)) == []
    with pytest.raises(InputError, match="needs an NVIDIA GPU"):
        recommend(load_scenario("repetitive"), named, None, backend="pytorch")


def test_formats_by_hardware() -> None:
    case = Case(load_scenario("interactive"), find_model("8B"), find_gpu("B200"), 1, "tensorrt")
    assert "no W4A16 (AWQ) engines" in (why_not("w4a16_awq", case) or "")
    assert why_not("nvfp4", case) is None
    ampere = replace(case, gpu=find_gpu("A100-SXM"))
    assert "sm89" in (why_not("fp8", ampere) or "")
    assert why_not("w4a16_awq", ampere) is None
    assert not kv8("w4a16_awq", ampere)
    assert kv8("fp8", case)


def test_several_gpus_share_the_work() -> None:
    found = _recommend("high-throughput", "70B", "H100-SXM", count=8)
    assert found.recipe.parallel.tp * found.replicas == 8
    assert found.recipe.parallel.pp == 1
    assert found.recipe.limits.max_batch_size * found.replicas >= 64
    one = _recommend("interactive", "70B", "H100-SXM", count=8)
    assert one.recipe.parallel.tp > 1, "one user waits for one engine: more GPUs make it faster"


@pytest.mark.parametrize(
    ("changes", "model", "match"),
    [
        ({"input_tokens": 40000}, "7B", r"what fits: --input-tokens 32256"),
        ({}, "405B", r"what would: --count"),
    ],
)
def test_what_cannot_be_met_says_what_would(changes: Any, model: str, match: str) -> None:
    with pytest.raises(InputError, match=match):
        _recommend("interactive", model, "H100-SXM", changes)


def test_a_missed_bound_is_a_warning_with_a_number() -> None:
    found = _recommend("high-throughput", "32B", "L40S", {"slo": {"tpot_ms": 10.0}})
    assert any("TPOT" in warning and "misses the 10 ms" in warning for warning in found.warnings)
