"""Speed and acceptance: fair on both sides, and impossible numbers are refused."""

from __future__ import annotations

import built_tiny
import pytest
from built_tiny import Broken, build_tiny, repetitive_prompts

from trtspec.backends import open_engine
from trtspec.verify.gates import Verdict
from trtspec.verify.load import Contender, Race, check_acceptance, check_speed, race
from trtspec.verify.lossless import requests_for
from trtspec.verify.ruler import Answer, Run, run


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory):
    return build_tiny(tmp_path_factory.mktemp("built"))


def contenders(artifact, **plain_faults):
    plain = open_engine(artifact, "no_speculation")
    return [
        Contender("recipe", open_engine(artifact), 3),
        Contender("no_speculation", Broken(plain, **plain_faults), 0),
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
    assert check.verdict is Verdict.PASS
    assert not check.required
    assert check.measured > 0


def test_a_slowed_baseline_is_an_error(artifact):
    """Sleeping in the engine that is compared against gives a speedup that no drafting could."""
    result = race(contenders(artifact, delay_s=0.02), repetitive_prompts(4), [12] * 4, rounds=1)
    check = check_speed(result, check_name="speedup", name="recipe", over="no_speculation", bound=1.5)
    assert check.verdict is Verdict.ERROR
    assert "more than fewer target steps can give" in check.summary


def test_an_inflated_counter_voids_the_race(artifact):
    result = race(
        contenders(artifact, change_stats=built_tiny.counts_double), repetitive_prompts(2), [8, 8], rounds=1
    )
    check = check_speed(result, check_name="speedup", name="recipe", over="no_speculation", bound=1.0)
    assert check.verdict is Verdict.ERROR
    assert "void" in check.summary


def test_an_answer_that_ends_early_voids_the_race(artifact):
    result = race(
        contenders(artifact, change_output=built_tiny.drops_the_last_token),
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
        (2.0, None, 0.02, Verdict.PASS),
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


def accepted(emitted: tuple[int, ...], name: str = "a", drafted: int = 0) -> Answer:
    tokens = tuple(range(sum(emitted)))
    return Answer(name, tokens, "length", emitted, drafted, sum(emitted) - len(emitted))


def test_more_tokens_a_step_than_drafts_allow_is_an_error():
    answers = [accepted((6, 6, 6), str(i), drafted=15) for i in range(4)]
    assert check_acceptance(answers, draft_limit=5, bound=None, contradictions=()).verdict is Verdict.PASS
    check = check_acceptance(answers, draft_limit=4, bound=None, contradictions=())
    assert check.verdict is Verdict.ERROR
    assert "impossible" in check.summary


def test_a_dead_drafter_is_said():
    answers = [accepted((1,) * 30, str(i), drafted=90) for i in range(4)]
    check = check_acceptance(answers, draft_limit=4, bound=None, contradictions=())
    assert any("dead drafter" in warning for warning in check.warnings)
    lively = [accepted((3,) * 10, str(i), drafted=30) for i in range(4)]
    assert check_acceptance(lively, draft_limit=4, bound=None, contradictions=()).warnings == ()


def test_answers_stuck_on_one_token_are_said():
    stuck = Answer("a", (5,) * 24, "length", (4,) * 6, 18, 18)
    check = check_acceptance(
        [stuck, accepted((2,) * 8, "b", 16)], draft_limit=4, bound=None, contradictions=()
    )
    assert any("1 of 2 answers end in a repeated token" in warning for warning in check.warnings)


def test_token_and_request_weighted_means_differ_and_are_both_there():
    answers = [accepted((4,) * 10, "long", drafted=30), accepted((1, 1), "short", drafted=6)]
    evidence = check_acceptance(answers, draft_limit=4, bound=None, contradictions=()).evidence
    assert evidence["acceptance_length"] == pytest.approx(42 / 12)
    assert evidence["acceptance_length_mean_over_requests"] == pytest.approx((4 + 1) / 2)
    assert evidence["acceptance_rate"] == pytest.approx(30 / 36)
    assert evidence["acceptance_rate_mean_over_requests"] == pytest.approx(0.5)
