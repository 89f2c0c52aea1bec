"""What recommend writes for a GPU backend is nothing that TensorRT-LLM is known to refuse or to get wrong."""

from __future__ import annotations

import pytest
from recommend_cases import MATRIX, draft_of, outcome

from trtspec.errors import InconclusiveError, InputError
from trtspec.hardware import find_gpu
from trtspec.known_models import find_known, find_model
from trtspec.recipe import DraftModelSpeculation, PytorchBackend, TensorrtBackend
from trtspec.recommend import Recommendation, recommend, sizes
from trtspec.scenario import load_scenario
from trtspec.trtllm.facts import versions_for
from trtspec.trtllm.rules import check
from trtspec.versions import parse_range


def test_recommendations_have_no_error_and_no_warning_on_any_version_they_admit() -> None:
    checked = 0
    for scenario, model, gpu in MATRIX[::4]:  # a quarter: the whole matrix takes 10 s
        found = outcome(scenario, model, gpu)
        if not isinstance(found, Recommendation):
            continue
        recipe = found.recipe
        if not isinstance(recipe.backend, TensorrtBackend | PytorchBackend):
            continue
        target = find_known(recipe.model.source)
        drafter = recipe.speculation
        draft = find_known(drafter.model.source) if isinstance(drafter, DraftModelSpeculation) else None
        for version in versions_for(recipe.backend.kind, parse_range(recipe.backend.version)):
            told = check(
                recipe,
                version,
                gpu=find_gpu(gpu),
                checkpoint=target.spec if target else None,
                draft=draft.spec if draft else None,
            )
            assert [finding for finding in told if finding.severity != "note"] == []
            checked += 1
    assert checked > 100


def engines(scenario: str, model: str, gpu: str, count: int = 4) -> Recommendation:
    named = find_model(model)
    board = find_gpu(gpu)
    return recommend(
        load_scenario(scenario), named, board, count=count, backend="tensorrt", draft=draft_of(named)
    )


def refused_by(found: Recommendation, gpu: str) -> list[str]:
    recipe = found.recipe
    assert isinstance(recipe.backend, TensorrtBackend)
    target = find_known(recipe.model.source)
    return [
        finding.message
        for version in versions_for("tensorrt", parse_range(recipe.backend.version))
        for finding in check(recipe, version, gpu=find_gpu(gpu), checkpoint=target.spec if target else None)
        if finding.severity == "error"
    ]


def test_versions_that_refuse_engines_are_left_out() -> None:
    """0.17.0 makes no NVFP4."""
    found = engines("interactive", "8B", "B200")
    assert found.recipe.quantization.kind == "nvfp4"
    assert found.recipe.backend.version == ">=0.21,<=1.2.1"  # type: ignore[union-attr]
    assert refused_by(found, "B200") == []
    reasons = {reason.choice: reason.because for reason in found.because if reason.step == "backend"}
    assert reasons["TensorRT-LLM >=0.21,<=1.2.1"].endswith("quantize.py of 0.17.0 has no nvfp4")


def test_without_narrowing_engines_would_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken variant."""
    monkeypatch.setattr(sizes, "_for_its_versions", lambda _case, recipe, _path: recipe)
    assert refused_by(engines("interactive", "8B", "B200"), "B200") != []


def test_what_engines_are_warned_of_is_said_with_the_recipe() -> None:
    said = {
        ("interactive", "32B", "A100-SXM"): "[trtllm-bls]",
        ("repetitive", "7B", "A100-SXM"): "[trtllm-ngram-engine]",
    }
    for (scenario, model, gpu), rule in said.items():
        found = engines(scenario, model, gpu)
        assert any(warning.endswith(rule) for warning in found.warnings), (scenario, found.warnings)


def test_smooth_quant_engines_have_the_alpha_that_quantize_py_uses() -> None:
    found = engines("customer-service", "8B", "A100-SXM", 1)
    assert found.recipe.quantization.kind == "w8a8_sq"
    assert found.recipe.quantization.alpha == 1.0
    assert not any("trtllm-engine-alpha" in warning for warning in found.warnings)


def test_every_gpu_gets_engines_that_it_is_not_known_to_refuse() -> None:
    made = 0
    for scenario, model, gpu in MATRIX[::23]:
        try:
            found = engines(scenario, model, gpu, 1)
        except (InputError, InconclusiveError):  # does not fit
            continue
        made += 1
        assert refused_by(found, gpu) == [], (scenario, model, gpu)
    assert made > 5
