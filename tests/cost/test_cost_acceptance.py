"""Curves: tokens per step, extrapolation, inversion of published lengths, priors in the published order."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtspec.cost.acceptance import (
    METHODS,
    TASKS,
    Curve,
    copying,
    curve_from_histogram,
    curve_from_lengths,
    curve_from_report,
    expected_tokens,
    extrapolate,
    prior,
    prior_table,
)
from trtspec.errors import InputError

probabilities = st.lists(st.floats(0.05, 0.95), min_size=1, max_size=8)


@given(probabilities)
def test_tokens_per_step_is_the_sum_of_joint_probabilities(a: list[float]) -> None:
    curve = Curve(tuple(a), "")
    total, joint = 1.0, 1.0
    for value in a:
        joint *= value
        total += joint
    assert expected_tokens(curve, len(a)) == pytest.approx(total)
    assert expected_tokens(curve, 0) == 1.0


@given(probabilities, st.integers(0, 20))
def test_tokens_per_step_lie_between_one_and_all(a: list[float], k: int) -> None:
    curve = Curve(tuple(a), "")
    assert 1 <= expected_tokens(curve, k) <= k + 1
    assert expected_tokens(curve, k) <= expected_tokens(curve, k + 1)


@given(probabilities)
def test_lengths_give_their_curve_back(a: list[float]) -> None:
    curve = Curve(tuple(a), "")
    lengths = {k: expected_tokens(curve, k) for k in range(1, len(a) + 1)}
    assert curve_from_lengths(lengths, "").conditional == pytest.approx(tuple(a), rel=1e-6)


def test_a_gap_in_the_lengths_is_filled_without_changing_them() -> None:
    curve = curve_from_lengths({3: 2.74, 5: 3.216, 7: 3.452}, "")
    for k, length in ((3, 2.74), (5, 3.216), (7, 3.452)):
        assert expected_tokens(curve, k) == pytest.approx(length)


def test_lengths_that_fall_are_no_gain() -> None:
    curve = curve_from_lengths({1: 1.8, 2: 2.4, 3: 2.3}, "")
    assert curve.conditional[2] == 0
    assert expected_tokens(curve, 3) == pytest.approx(2.4)


def test_extrapolation_flattens() -> None:
    curve = Curve((0.9, 0.8, 0.8), "")
    longer = extrapolate(curve, 8).conditional
    assert longer[:3] == curve.conditional
    assert list(longer[2:]) == sorted(longer[2:], reverse=True)
    flat = Curve((0.9, 0.8, *[0.8] * 6), "")
    assert expected_tokens(curve, 8) < expected_tokens(flat, 8)
    assert extrapolate(curve, 2).conditional == (0.9, 0.8)


def test_a_report_gives_its_curve() -> None:
    histogram = {1: 20, 2: 30, 3: 10, 4: 40}
    curve = curve_from_histogram(histogram, "run")
    assert curve.measured
    assert curve.conditional == pytest.approx((80 / 100, 50 / 80, 40 / 50))
    tokens = sum(k * n for k, n in histogram.items()) / 100
    assert expected_tokens(curve, 3) == pytest.approx(tokens)
    report = {"recipe_name": "r", "checks": [
        {"name": "acceptance",
         "evidence": {"steps_by_tokens_emitted": {str(k): n for k, n in histogram.items()}}}
    ]}  # fmt: skip
    found = curve_from_report(json.loads(json.dumps(report)))
    assert found is not None
    assert found.conditional == curve.conditional
    assert curve_from_report({"checks": []}) is None
    assert curve_from_histogram({1: 50}, "dead").conditional == (0.0,)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("task", TASKS)
def test_every_method_has_a_prior_for_every_task(method: str, task: str) -> None:
    curve = prior(method, task, num_draft=4)
    assert curve.source
    assert curve.low <= 1 <= curve.high
    warm = prior(method, task, temperature=1.0, num_draft=4)
    assert 1 < expected_tokens(warm, 4) < expected_tokens(curve, 4)
    assert prior(method, task, temperature=0.5, num_draft=4).conditional[0] == pytest.approx(
        (warm.conditional[0] + curve.conditional[0]) / 2
    )


def test_prior_table_cites_everything() -> None:
    for method, entry in prior_table()["methods"].items():
        assert entry["source"], method
        assert set(entry["tasks"]) == set(TASKS), method


def test_prompt_lookup_wins_on_copying_and_loses_on_free_text() -> None:
    """Summarization above Medusa, translation below it: the order of all published tables."""

    def length(method: str, task: str, k: int) -> float:
        return expected_tokens(prior(method, task, num_draft=k), k)

    assert length("ngram", "summarization", 10) > length("medusa", "summarization", 4)
    assert length("ngram", "translation", 10) < length("medusa", "translation", 4)


@given(st.floats(0, 1), st.integers(1, 20))
def test_copying_emits_its_share_of_tokens_inside_runs(copied: float, k: int) -> None:
    curve = copying(copied, k, 0.9, "")
    hit = curve.conditional[0] / 0.9
    inside = sum(0.9**j for j in range(k + 1))
    assert hit * inside / (hit * inside + 1 - hit) == pytest.approx(copied, abs=1e-9)
    assert expected_tokens(curve, k) == pytest.approx(1 + hit * (inside - 1))


def test_more_copying_is_more_tokens() -> None:
    lengths = [expected_tokens(prior("ngram", "chat", c, num_draft=8), 8) for c in (0.0, 0.3, 0.6, 0.9, 1.0)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 1.0


@pytest.mark.parametrize(
    "call",
    [
        lambda: prior("magic", "chat"),
        lambda: prior("eagle3", "poetry"),
        lambda: prior("ngram", "chat", 1.5),
        lambda: Curve((1.2,), ""),
        lambda: Curve((), ""),
    ],
)
def test_nonsense_is_refused(call) -> None:
    with pytest.raises(InputError):
        call()
