"""What recommend writes for a GPU backend is nothing that TensorRT-LLM is known to refuse or to get wrong."""

from __future__ import annotations

from recommend_cases import MATRIX, outcome

from trtspec.hardware import find_gpu
from trtspec.known_models import find_known
from trtspec.recipe import DraftModelSpeculation, PytorchBackend, TensorrtBackend
from trtspec.recommend import Recommendation
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
