"""Nine scenarios x models x GPUs: a recipe that keeps every law, or a refusal that says what would fit."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from recommend_cases import MATRIX, PRESETS, broken_laws, chosen, draft_of, one_line, outcome

from trtspec.cost.trace import recompute
from trtspec.errors import InconclusiveError
from trtspec.hardware import find_gpu
from trtspec.known_models import find_model
from trtspec.recommend import Recommendation, recommend
from trtspec.scenario import load_scenario

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
UPDATE = os.environ.get("TRTSPEC_UPDATE_GOLDEN") == "1"


def test_the_size_of_the_matrix() -> None:
    assert len(MATRIX) == 9 * (3 * 6 + 7)
    recommended = sum(isinstance(outcome(*case), Recommendation) for case in MATRIX)
    assert recommended > 180, "refusing is no way to be right"


@pytest.mark.parametrize("scenario", PRESETS)
def test_a_recipe_that_keeps_every_law_or_a_clear_refusal(scenario: str) -> None:
    for case in MATRIX:
        if case[0] != scenario:
            continue
        found = outcome(*case)
        if isinstance(found, Recommendation):
            assert list(broken_laws(found)) == [], case
            continue
        text = str(found)
        assert found.exit_code in (2, 4), case
        assert "what would: " in text, case
        assert "GiB" in text, case
        if isinstance(found, InconclusiveError):
            assert "quality gate" in text


def _compare(name: str, text: str) -> None:
    path = GOLDEN / name
    if UPDATE:
        path.write_text(text)
    assert path.read_text() == text, "a decision changed; TRTSPEC_UPDATE_GOLDEN=1 writes the file anew"


def test_decisions_of_the_whole_matrix() -> None:
    lines = [f"{s:<16} {m:<3} {g:<8} {one_line(outcome(s, m, g))}" for s, m, g in MATRIX]
    _compare("recommend_matrix.txt", "\n".join(lines) + "\n")


def test_the_path_of_each_scenario() -> None:
    """Every leaf that was taken with its reason, for each scenario on one GPU, and what was rejected."""
    parts = []
    for scenario in PRESETS:
        model, gpu = ("7B", "RTX-4060") if scenario == "edge-8gb" else ("8B", "H100-SXM")
        found = chosen(scenario, model, gpu)
        parts.append(f"== {scenario}: {model} on {gpu}")
        parts += [f"+ {reason.step}: {reason.choice}" for reason in found.because if reason.step != "slo"]
        parts += [f"- {rejected.step}: {rejected.what}" for rejected in found.rejected]
        parts.append("")
    _compare("recommend_paths.txt", "\n".join(parts))


def test_every_number_of_the_trace_can_be_recomputed() -> None:
    estimate = chosen("interactive", "8B", "H100-SXM").estimate
    assert estimate is not None
    assert len(estimate.trace) > 30
    for line in estimate.trace:
        assert recompute(line) == pytest.approx(line.value, rel=1e-12), line.name
    values = {line.name: line.value for line in estimate.trace}
    assert values["tpot_ms"] == estimate.tpot_ms
    assert values["ttft_ms"] == estimate.ttft_ms


def test_an_answer_takes_less_than_two_seconds() -> None:
    named, started = find_model("70B"), time.process_time()
    recommend(load_scenario("high-throughput"), named, find_gpu("H100-SXM"), count=8, draft=draft_of(named))
    assert time.process_time() - started < 2.0
