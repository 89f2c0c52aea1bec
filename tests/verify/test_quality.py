"""Quality: equal models give exactly 1, a planted loss is caught, broken scores are refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from built_tiny import build_tiny, repetitive_prompts

from trtspec.backends import open_engine
from trtspec.verify.gates import Verdict
from trtspec.verify.quality import check_quality, judge


def logprobs(rng: np.random.Generator, texts: int = 30) -> list[list[float]]:
    return [list(-rng.gamma(2.0, 1.5, size=int(rng.integers(40, 120)))) for _ in range(texts)]


def shifted(rng: np.random.Generator, values: list[list[float]], loss: float) -> list[list[float]]:
    return [[v - loss + rng.normal(0, 0.2) for v in text] for text in values]


@pytest.mark.parametrize(
    ("loss", "verdict"),
    [(0.0, Verdict.PASS), (math.log(1.1), Verdict.PASS), (math.log(1.4), Verdict.FAIL)],
)
def test_a_planted_loss_is_measured(loss: float, verdict: Verdict):
    rng = np.random.default_rng(5)
    baseline = logprobs(rng)
    check = judge(shifted(rng, baseline, loss), baseline, bound=1.25, source="simulated")
    assert check.verdict is verdict
    assert check.measured == pytest.approx(math.exp(loss), rel=0.03)
    assert check.interval[0] <= check.measured <= check.interval[1]


def test_unpaired_scores_would_see_nothing():
    """Why pairs: the spread between texts drowns a 3 % loss that the paired interval shows clearly."""
    rng = np.random.default_rng(6)
    baseline = [[v * level for v in text] for text in logprobs(rng) for level in [rng.uniform(0.5, 1.5)]]
    check = judge(shifted(rng, baseline, 0.03), baseline, bound=1.25, source="simulated")
    assert check.interval[0] > 1.0
    means = [np.mean(text) for text in baseline]
    assert np.std(means) / math.sqrt(len(means)) > 0.03


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_no_number_is_an_error(value: float):
    assert judge([[-1.0, value]], [[-1.0, -1.0]], bound=1.25, source="x").verdict is Verdict.ERROR


def test_scores_of_different_texts_are_an_error():
    assert judge([[-1.0]], [[-1.0, -1.0]], bound=1.25, source="x").verdict is Verdict.ERROR
    assert judge([], [], bound=1.25, source="x").verdict is Verdict.ERROR


def test_no_gate_no_requirement():
    check = judge([[-1.0], [-2.0]], [[-1.0], [-2.0]], bound=None, source="x")
    assert not check.required
    assert check.measured == 1.0


def test_real_engines(tmp_path):
    texts = [prompt.tokens for prompt in repetitive_prompts(5)]
    first = open_engine(build_tiny(tmp_path / "a"), "no_speculation")
    other = open_engine(build_tiny(tmp_path / "b", seed=1), "no_speculation")
    same = check_quality(first, first, texts, bound=1.25, source="x")
    assert same.measured == 1.0
    assert same.verdict is Verdict.PASS
    assert same.evidence["top1_agreement"] == 1.0
    different = check_quality(first, other, texts, bound=1.25, source="x")
    assert different.measured != 1.0
    assert different.evidence["top1_agreement"] < 0.5
