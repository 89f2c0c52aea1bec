"""Speed and acceptance: fair on both sides, and impossible numbers are refused."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from built_tiny import build_tiny, repetitive_prompts

from trtspec.backends import open_engine
from trtspec.ruler import Answer, Run, run
from trtspec.verify.faults import Altered, counts_double, drops_the_last_token
from trtspec.verify.gates import Check, Verdict, exit_code
from trtspec.verify.load import (
    Contender,
    Race,
    by_position,
    check_acceptance,
    check_speed,
    compare_acceptance,
    race,
    too_fast,
)
from trtspec.verify.lossless import requests_for


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory):
    return build_tiny(tmp_path_factory.mktemp("built"))


def contenders(artifact, **plain_faults):
    plain = open_engine(artifact, "no_speculation")
    return [
        Contender("recipe", open_engine(artifact), 3),
        Contender("no_speculation", Altered(plain, **plain_faults), 0),
    ]


def test_a_race_runs_the_same_prompts_to_the_same_lengths(artifact):
    prompts = repetitive_prompts(4)
    lengths = [12, 16, 20, 24]
    result = race(contenders(artifact), prompts, lengths, rounds=2)
    assert result.contradictions == ()
    for name in ("recipe", "no_speculation"):
        assert [[one.tokens for one in rounds] for rounds in result.runs[name]] == [[n, n] for n in lengths]
        assert [rounds[0].answers[0].request_id for rounds in result.runs[name]] == [p.id for p in prompts]
    check = check_speed(result, check_name="speedup", name="recipe", over="no_speculation", bound=None)
    assert check.verdict is Verdict.MEASURED
    assert not check.required
    rates = check.evidence["tokens_per_s"]
    assert check.measured == pytest.approx(rates["recipe"] / rates["no_speculation"])
    for text in ("batch 1, prompt included, 4 prompts 2 times", f"speedup {check.measured:.3f}", "95 %"):
        assert text in check.summary


def test_a_slowed_baseline_is_an_error(artifact):
    """Sleeping in the engine that is compared against gives a speedup that no drafting could."""
    result = race(contenders(artifact, delay_s=0.02), repetitive_prompts(4), [12] * 4, rounds=1)
    check = check_speed(result, check_name="speedup", name="recipe", over="no_speculation", bound=1.5)
    assert check.verdict is Verdict.ERROR
    assert "more than fewer target steps can give" in check.summary
    assert "machine busy?" in check.summary
    ungated = check_speed(result, check_name="speedup", name="recipe", over="no_speculation", bound=None)
    assert ungated.verdict is Verdict.ERROR
    assert not ungated.required
    kept = Check("lossless", Verdict.PASS, "", True)
    assert exit_code([kept, ungated]) == 0
    assert exit_code([kept, check]) == 1


def test_one_slow_moment_cannot_pass_a_gate():
    """One impossible pair lifts the sum above what fewer steps can give: doubtful, not a contradiction."""
    fair = synthetic(1.0, steps=20, prompts=8)
    slow = [[timed("0", 9.0, 20)], *fair.runs["no_speculation"][1:]]
    result = Race({"recipe": fair.runs["recipe"], "no_speculation": slow}, ())
    assert too_fast(fair) == ""
    assert too_fast(result) == "sum"
    check = check_speed(result, check_name="speedup", name="recipe", over="no_speculation", bound=0.9)
    assert check.verdict is Verdict.INCONCLUSIVE
    assert "machine busy?" in check.warnings[0]


def test_an_inflated_counter_voids_the_race(artifact):
    result = race(contenders(artifact, change_stats=counts_double), repetitive_prompts(2), [8, 8], rounds=1)
    check = check_speed(result, check_name="speedup", name="recipe", over="no_speculation", bound=1.0)
    assert check.verdict is Verdict.ERROR
    assert "void" in check.summary
    ungated = check_speed(result, check_name="speedup", name="recipe", over="no_speculation", bound=None)
    assert ungated.required, "a miscounting engine fails whatever the gates"


def test_an_answer_that_ends_early_voids_the_race(artifact):
    result = race(
        contenders(artifact, change_output=drops_the_last_token),
        repetitive_prompts(2),
        [8, 8],
        rounds=1,
    )
    assert any("7 tokens where 8 were to be compared" in line for line in result.contradictions)
    check = check_speed(result, check_name="speedup", name="recipe", over="no_speculation", bound=1.0)
    assert check.verdict is Verdict.ERROR


def timed(name: str, seconds: float, steps: int, tokens: int = 20) -> Run:
    emitted = (tokens - steps + 1,) + (1,) * (steps - 1)
    return Run((Answer(name, (7,) * tokens, "length", emitted, 0, 0),), seconds, tokens, ())


def synthetic(ratio: float, spread: float = 0.02, prompts: int = 8, steps: int = 5) -> Race:
    """A race whose true speedup is ``ratio``."""
    mine, theirs = [], []
    for number in range(prompts):
        factor = 1 + spread * (-1) ** number
        mine.append([timed(str(number), 1.0 / factor, steps)])
        theirs.append([timed(str(number), ratio, 20)])
    return Race({"recipe": mine, "no_speculation": theirs}, ())


@pytest.mark.parametrize(
    ("ratio", "bound", "spread", "verdict"),
    [
        (2.0, 1.5, 0.02, Verdict.PASS),
        (1.4, 1.5, 0.02, Verdict.FAIL),
        (1.5, 1.5, 0.02, Verdict.INCONCLUSIVE),
        (1.6, 1.5, 0.30, Verdict.INCONCLUSIVE),
        (2.0, None, 0.02, Verdict.MEASURED),
    ],
)
def test_the_lower_end_of_the_interval_decides(ratio, bound, spread, verdict):
    result = synthetic(ratio, spread)
    check = check_speed(result, check_name="speedup", name="recipe", over="no_speculation", bound=bound)
    assert check.verdict is verdict
    assert check.required == (bound is not None)


def test_acceptance_on_a_real_engine(artifact):
    requests = requests_for(repetitive_prompts(), 32, frozenset({2}))
    result = run(open_engine(artifact), requests, draft_limit=3)
    check = check_acceptance(result.answers, draft_limit=3, bound=1.0, contradictions=result.contradictions)
    assert check.verdict is Verdict.PASS
    assert 1.0 <= check.measured <= 4.0
    evidence = check.evidence
    steps = evidence["steps_by_tokens_emitted"]
    tokens = sum(emitted * count for emitted, count in steps.items())
    assert tokens == sum(len(answer.tokens) for answer in result.answers)
    assert check.measured == pytest.approx(tokens / sum(steps.values()))
    assert 0 < evidence["acceptance_rate"] <= 1
    assert "bonus or recovered token included" in evidence["definition"]


def test_steps_held_back_are_told_and_counted_by_the_engine(artifact):
    """A run counts its own steps only, whatever the engine did before."""
    held = [7]
    engine = Altered(
        open_engine(artifact), change_stats=lambda stats: replace(stats, held_back_steps=held[0])
    )
    requests = requests_for(repetitive_prompts(), 8, frozenset({2}))
    result = run(engine, requests, draft_limit=3, on_answer=lambda: held.append(held.pop() + 2))
    assert result.held_back_steps == 2 * len(requests)
    check = check_acceptance(
        result.answers, draft_limit=3, bound=None, contradictions=(), held_back_steps=result.held_back_steps
    )
    assert check.evidence["held_back_steps"] == 12
    assert "drafting held back in 12 steps" in check.summary
    quiet = check_acceptance(result.answers, draft_limit=3, bound=None, contradictions=())
    assert quiet.evidence["held_back_steps"] == 0
    assert "held back" not in quiet.summary


def accepted(emitted: tuple[int, ...], name: str = "a", drafted: int = 0) -> Answer:
    tokens = tuple(range(sum(emitted)))
    return Answer(name, tokens, "length", emitted, drafted, sum(emitted) - len(emitted))


def test_more_tokens_a_step_than_drafts_allow_is_an_error():
    answers = [accepted((6, 6, 6), str(i), drafted=15) for i in range(4)]
    assert check_acceptance(answers, draft_limit=5, bound=None, contradictions=()).verdict is Verdict.MEASURED
    check = check_acceptance(answers, draft_limit=4, bound=None, contradictions=())
    assert check.verdict is Verdict.ERROR
    assert "impossible" in check.summary


def test_a_dead_drafter_is_said():
    answers = [accepted((1,) * 30, str(i), drafted=90) for i in range(4)]
    check = check_acceptance(answers, draft_limit=4, bound=None, contradictions=())
    assert any("of no use" in warning for warning in check.warnings)
    lively = [accepted((3,) * 10, str(i), drafted=30) for i in range(4)]
    assert check_acceptance(lively, draft_limit=4, bound=None, contradictions=()).warnings == ()


def test_answers_stuck_on_one_token_are_said():
    stuck = Answer("a", (5,) * 24, "length", (4,) * 6, 18, 18)
    check = check_acceptance(
        [stuck, accepted((2,) * 8, "b", 16)], draft_limit=4, bound=None, contradictions=()
    )
    assert any("1 of 2 answers end in the same one or two tokens" in warning for warning in check.warnings)


def test_token_and_request_weighted_means_differ_and_are_both_there():
    answers = [accepted((4,) * 10, "long", drafted=30), accepted((1, 1), "short", drafted=6)]
    evidence = check_acceptance(answers, draft_limit=4, bound=None, contradictions=()).evidence
    assert evidence["acceptance_length"] == pytest.approx(42 / 12)
    assert evidence["acceptance_length_mean_over_requests"] == pytest.approx((4 + 1) / 2)
    assert evidence["acceptance_rate"] == pytest.approx(30 / 36)
    assert evidence["acceptance_rate_mean_over_requests"] == pytest.approx(0.5)


def answered(name: str, steps: int, drafted: int, accepted: int) -> Answer:
    """``steps`` steps of ``drafted`` candidates, of which the first ``accepted`` steps keep one."""
    emitted = (2,) * accepted + (1,) * (steps - accepted)
    tokens = tuple(range(sum(emitted)))
    return Answer(name, tokens, "length", emitted, steps * drafted, accepted, (drafted,) * steps)


@pytest.mark.parametrize(
    ("verdict", "expected"), [(Verdict.PASS, Verdict.INCONCLUSIVE), (Verdict.FAIL, Verdict.FAIL)]
)
def test_more_acceptance_than_in_float64_is_suspicious(verdict, expected):
    check = Check("lossless", verdict, "fine", False)
    exact = [answered(str(i), 20, 2, 6) for i in range(8)]
    generous = [answered(str(i), 20, 2, 14) for i in range(8)]
    result = compare_acceptance(check, generous, exact, required=True)
    assert result.verdict is expected
    assert "suspicious" in result.summary + "".join(result.warnings)
    if expected is Verdict.INCONCLUSIVE:
        assert result.required
    assert compare_acceptance(check, exact, exact, required=True).verdict is verdict
    assert compare_acceptance(check, exact, generous, required=True).verdict is verdict, "lower is no fault"


def test_too_few_prompts_show_nothing_suspicious():
    check = Check("lossless", Verdict.PASS, "fine", False)
    exact = [answered(str(i), 20, 2, 6) for i in range(4)]
    generous = [answered(str(i), 20, 2, 14) for i in range(4)]
    result = compare_acceptance(check, generous, exact, required=True)
    assert result.verdict is Verdict.PASS
    evidence = result.evidence["acceptance_rate_against_float64"]
    assert evidence["rate"] > evidence["rate_float64"]
    assert evidence["higher_by_chance"] == evidence["least_possible"] == 1 / 16


def test_only_as_many_tokens_are_compared_as_float64_has():
    check = Check("lossless", Verdict.PASS, "fine", False)
    exact = [answered(str(i), 10, 2, 0) for i in range(8)]
    longer = [answered(str(i), 10, 2, 0) for i in range(8)]
    longer = [
        Answer(a.request_id, (*a.tokens, *range(20)), "length", (*a.emitted, *(2,) * 10), 40, 10, (2,) * 20)
        for a in longer
    ]
    evidence = compare_acceptance(check, longer, exact, required=True).evidence
    assert evidence["acceptance_rate_against_float64"]["rate"] == 0.0


def test_acceptance_by_position_is_conditional_and_has_an_interval():
    chance, law = random.Random(8), (0.8, 0.5, 0.25)
    answers = []
    for number in range(60):
        emitted = []
        for _ in range(20):
            kept = 0
            while kept < 3 and chance.random() < law[kept]:
                kept += 1
            emitted.append(kept + 1)
        tokens = tuple(range(sum(emitted)))
        accepted = sum(emitted) - 20
        answers.append(Answer(f"p{number}", tokens, "length", tuple(emitted), 60, accepted, (3,) * 20))
    found = by_position(answers)
    assert [one["position"] for one in found] == [1, 2, 3]
    for one, true in zip(found, law, strict=True):
        assert one["low"] - 0.01 < true < one["high"] + 0.01
    # Deliberately broken: of all steps 0.8 * 0.5 accept the second draft; a product is no rate of its own.
    assert not found[1]["low"] < 0.4 < found[1]["high"]
    check = check_acceptance(answers, draft_limit=3, bound=None, contradictions=())
    assert check.details[0].startswith("position 1: ")
    low, high = check.evidence["acceptance_rate_interval"]
    assert low < check.evidence["acceptance_rate"] < high
