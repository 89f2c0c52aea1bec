"""Two engines compared by counting answers: error rate, power, and what depends on order."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from scipy import stats

from trtspec.embedded import specimen
from trtspec.embedded.acceptance import rejection
from trtspec.engine import Sampling
from trtspec.errors import InputError
from trtspec.prompts import Prompt
from trtspec.verify.blackbox import (
    check_blackbox,
    judge_blackbox,
    planned_answers,
    same_beginnings,
    same_grams,
)
from trtspec.verify.gates import Verdict
from trtspec.verify.report import plain

LAW = np.array([0.45, 0.3, 0.15, 0.06, 0.04])
BIASED = LAW * np.array([1.35, 0.6, 1.0, 1.0, 1.0])


def answers(rng: Any, law: Any, count: int, length: int = 4) -> list[list[int]]:
    drawn: list[list[int]] = rng.choice(len(law), size=(count, length), p=law / law.sum()).tolist()
    return drawn


def sticky(rng: Any, count: int, length: int, stay: float) -> list[list[int]]:
    """Tokens that repeat the one before with probability ``stay``: the same law at each place, other
    pairs."""
    found = []
    for _ in range(count):
        row = [int(rng.choice(5, p=LAW))]
        while len(row) < length:
            row.append(row[-1] if rng.random() < stay else int(rng.choice(5, p=LAW)))
        found.append(row)
    return found


def test_p_values_of_equal_laws_are_no_smaller_than_chance():
    rng = np.random.default_rng(1)
    for test in (
        lambda a, b: same_beginnings(a, b, 2),
        lambda a, b: same_grams(a, b, least=0.01),
    ):
        p_values = [test(answers(rng, LAW, 60), answers(rng, LAW, 60)) for _ in range(150)]
        for level in (0.05, 0.2):
            alarms = sum(p <= level for p in p_values)
            assert stats.binomtest(alarms, 150, level, alternative="greater").pvalue > 1e-3


def test_grams_see_what_places_do_not():
    """Tokens of one answer that depend on each other are no independent counts: only whole answers
    permute."""
    rng = np.random.default_rng(2)
    left, right = sticky(rng, 150, 12, 0.0), sticky(rng, 150, 12, 0.5)
    assert same_beginnings(left, right, 1) > 0.01
    assert same_grams(left, right, least=1e-4) < 1e-3
    alike = [same_grams(sticky(rng, 40, 12, 0.8), sticky(rng, 40, 12, 0.8), least=0.01) for _ in range(60)]
    assert stats.binomtest(sum(p <= 0.1 for p in alike), 60, 0.1, alternative="greater").pvalue > 1e-3


def test_too_little_to_count():
    assert same_beginnings([[1]], [[2]], 1) == 1.0
    assert same_grams([], [[1, 2]], least=0.01) == 1.0
    assert same_grams([[1, 2]], [[3, 4]], least=0.01) == 1.0


@pytest.fixture(scope="module")
def planned() -> int:
    return planned_answers(0.3, 2)


def judged(left: Any, right: Any, planned: int, **changed: Any) -> Any:
    return judge_blackbox(reference=left, drafted=right, planned=planned, bias=0.3, **changed)


def test_the_suite_keeps_its_rate_and_finds_a_planned_bias(planned):
    rng = np.random.default_rng(3)

    def side(law: Any) -> dict[str, list[list[int]]]:
        return {name: answers(rng, law, planned) for name in ("a", "b")}

    alarms = sum(judged(side(LAW), side(LAW), planned).verdict is Verdict.FAIL for _ in range(40))
    assert alarms <= 2
    found = [judged(side(LAW), side(BIASED), planned).verdict for _ in range(10)]
    assert found.count(Verdict.FAIL) >= 9


def test_a_bad_engine_is_found_early_and_the_verdict_follows_from_the_report(planned):
    rng = np.random.default_rng(4)
    left, right = ({"a": answers(rng, law, planned)} for law in (LAW, LAW[::-1]))
    check = judged(left, right, planned)
    assert check.verdict is Verdict.FAIL
    assert [look["answers"] for look in check.evidence["looks"]] == [round(planned / 4)]
    stored = json.loads(json.dumps(plain(check.evidence["raw"])))
    assert plain(asdict(judge_blackbox(**stored))) == plain(asdict(check))


def test_few_answers_decide_nothing(planned):
    rng = np.random.default_rng(5)
    few = {"a": answers(rng, LAW, planned // 2)}
    check = judged(few, few, planned)
    assert check.verdict is Verdict.INCONCLUSIVE
    assert f"{planned} would decide" in check.summary
    assert judged(few, few, planned, contradictions=["x"]).verdict is Verdict.ERROR
    with pytest.raises(InputError):
        judged(few, {"b": few["a"]}, planned)
    with pytest.raises(InputError):
        judged(few, few, planned, first_tokens=1)


@pytest.mark.parametrize("accept", [rejection, specimen.accept_always])
def test_engines(accept):
    prompts = [Prompt("p", (3, 14, 15, 9, 26))]
    with specimen.one_thread():
        check = check_blackbox(
            specimen.open_specimen(specimen.model_drafter(), accept=accept),
            specimen.open_specimen(),
            prompts,
            bias=0.3,
            most_answers=1000,
            max_new_tokens=4,
            sampling=Sampling(0.7),
            draft_limit=specimen.DRAFT_TOKENS,
            required=True,
        )
    assert check.verdict is (Verdict.PASS if accept is rejection else Verdict.FAIL), check.summary


@pytest.mark.parametrize("count", [7, 49, 110, 333])
def test_an_engine_that_always_answers_alike_equals_itself(count: int) -> None:
    """Sums of 1 / count round: a difference of 1e-17 instead of 0 once looked like a law of its own."""
    one = [5, 9, 40, 22, 17, 8, 31, 3]
    assert same_grams([one] * count, [one] * count, least=1e-4) == 1.0
    assert same_grams([one] * count, [one] * (count + 3), least=1e-4) == 1.0
