"""The cost model's speedup against the one measured: a made-up engine of known costs, each term broken."""

from __future__ import annotations

import contextlib
import copy
import random
from typing import Any

import pytest
from built_tiny import build_tiny, repetitive_prompts

from trtspec.backends import open_engine
from trtspec.ruler import run
from trtspec.verify.gates import Verdict
from trtspec.verify.load import Contender, race
from trtspec.verify.lossless import requests_for
from trtspec.verify.prediction import SIDES, TERMS, check_prediction, judge_prediction, time_steps
from trtspec.verify.recheck import rejudge

PROMPTS, ROUNDS, TOKENS, EMIT = 6, 2, 31, 3
PROMPT_S, ONE, MANY, DRAFT, REST = 0.05, 0.010, 0.012, 0.002, 0.001
"""Seconds of a prompt, of forwards without drafts and on a draft's rows, of drafting, of the rest."""


def made() -> dict[str, list[dict[str, Any]]]:
    """Everything as the model says: 30 tokens after the first, 3 a step with drafts."""
    steps, runs = [], []
    for side in SIDES:
        drafts = side == "recipe"
        count = (TOKENS - 1) // EMIT if drafts else TOKENS - 1
        target, draft = (MANY, DRAFT) if drafts else (ONE, 0.0)
        for prompt in range(PROMPTS):
            name = f"p{prompt}"
            one = {"side": side, "request_id": name, "draft_s": 0.0, "other_s": REST}
            steps.append({**one, "rows": 20, "target_s": PROMPT_S, "prompt": True})
            steps += [
                {**one, "rows": 5 if drafts else 1, "target_s": target, "draft_s": draft, "prompt": False}
                for _ in range(count)
            ]
            runs += [
                {
                    "contender": side, "prompt": prompt, "round": number, "tokens": TOKENS, "first": 1,
                    "steps": count, "target_s": PROMPT_S + count * target, "draft_s": count * draft,
                    "seconds": PROMPT_S + REST + count * (target + draft + REST),
                }
                for number in range(ROUNDS)
            ]  # fmt: skip
    answers = [{"request_id": f"p{at}", "tokens": TOKENS, "first": 1, "steps": 10} for at in range(PROMPTS)]
    return {"runs": runs, "steps": steps, "answers": answers}


def test_the_prediction_is_the_formula_and_agrees():
    check = judge_prediction(**made())
    each, one = MANY + DRAFT + REST, ONE + REST
    want = (PROMPT_S + REST + 30 * one) / (PROMPT_S + REST + 10 * each)
    assert check.evidence["predicted"] == pytest.approx(want)
    assert check.evidence["measured"] == pytest.approx(want)
    assert check.evidence["decode_speedup_predicted"] == pytest.approx(EMIT * one / each)
    assert check.evidence["agree"]
    assert check.measured == pytest.approx(1)
    assert max(map(abs, check.evidence["share_of_predicted_time"].values())) < 1e-9
    assert not check.required


def test_step_times_and_c_have_intervals():
    rows = made()
    terms = judge_prediction(**rows).evidence["step_times"]
    want = {"T_p": 1e3 * ONE, "T_v": 1e3 * MANY, "T_q": 1e3 * DRAFT / 4, "c": ONE / (DRAFT / 4)}
    assert {name: one["median"] for name, one in terms.items()} == pytest.approx(want)
    chance = random.Random(3)
    for row in rows["steps"]:
        row |= {key: row[key] * chance.lognormvariate(0, 0.3) for key in ("target_s", "draft_s")}
    terms = judge_prediction(**rows).evidence["step_times"]
    for name, one in terms.items():
        assert one["interval"][0] < want[name] < one["interval"][1]
    # Deliberately broken: the drafting of a whole step is not that of a token.
    assert not terms["c"]["interval"][0] < ONE / DRAFT < terms["c"]["interval"][1]


def broken(term: str) -> dict[str, list[dict[str, Any]]]:
    """The same with one term of the race twice or half what the model says."""
    found = copy.deepcopy(made())
    for row in found["runs"]:
        drafts = row["contender"] == "recipe"
        more = 0.0
        if term == "acceptance" and drafts:  # two tokens a step in the race
            row["steps"] = 15
            row["target_s"] += 5 * MANY
            row["draft_s"] += 5 * DRAFT
            more = 5 * (MANY + DRAFT + REST)
        if term == "verification" and drafts:
            more = row["target_s"] - PROMPT_S
            row["target_s"] += more
        if term == "drafting" and drafts:
            more = 5 * row["draft_s"]
            row["draft_s"] += more
        if term == "overhead" and drafts:
            more = 10 * 5 * REST
        if term == "plain step" and not drafts:  # a sleep in the baseline
            more = 30 * ONE
        row["seconds"] += more
    return found


@pytest.mark.parametrize("term", TERMS)
def test_the_term_that_differs_is_named(term):
    check = judge_prediction(**broken(term))
    assert not check.evidence["agree"]
    assert check.evidence["main_term"] == term
    assert f"mostly by {term}" in check.summary
    others = {k: v for k, v in check.evidence["share_of_predicted_time"].items() if k != term}
    assert max(map(abs, others.values())) < 1e-9


def test_the_terms_add_up_to_the_whole_difference_whatever_was_measured():
    found = broken("drafting")
    for at, row in enumerate(found["runs"]):
        row["seconds"] += 0.003 * (at % 5)
        row["target_s"] += 0.001 * (at % 3)
    check = judge_prediction(**found)
    evidence = check.evidence
    shares = evidence["share_of_predicted_time"]
    mine = 1 + sum(value for term, value in shares.items() if term != "plain step")
    assert f"{evidence['measured'] / evidence['predicted']:.3f} times the predicted speedup" in " ".join(
        check.details
    )
    assert evidence["measured"] == pytest.approx(evidence["predicted"] * (1 + shares["plain step"]) / mine)


def test_a_machine_that_changed_its_pace_is_said_and_a_slow_side_is_none():
    found = copy.deepcopy(made())
    for row in found["runs"]:
        for key in ("seconds", "target_s", "draft_s"):
            row[key] *= 1.4
    check = judge_prediction(**found)
    assert check.evidence["agree"]
    assert "changed its pace" in check.warnings[0]
    for quiet in (made(), *map(broken, TERMS)):
        assert judge_prediction(**quiet).warnings == ()


def test_one_slow_step_does_not_move_the_model():
    found = copy.deepcopy(made())
    next(row for row in found["steps"] if not row["prompt"])["target_s"] = 5.0
    assert judge_prediction(**found).evidence["agree"]


def test_what_tells_nothing_is_skipped():
    found = copy.deepcopy(made())
    for row in (*found["runs"], *found["steps"]):
        row["target_s"] = 0.0
    assert judge_prediction(**found).verdict is Verdict.SKIPPED
    assert judge_prediction([], [], []).verdict is Verdict.SKIPPED


def test_on_an_engine_every_step_is_timed_and_it_is_judged_again(tmp_path):
    built = build_tiny(tmp_path)
    prompts = repetitive_prompts(4)
    requests = requests_for(prompts, [16] * 4, frozenset())
    with contextlib.ExitStack() as stack:
        mine, plain = (
            stack.enter_context(contextlib.closing(open_engine(built, variant)))
            for variant in ("recipe", "no_speculation")
        )
        contenders = [Contender("recipe", mine, 3), Contender("no_speculation", plain, 0)]
        result = race(contenders, prompts, [16] * 4, rounds=2)
        steps = time_steps({"recipe": mine, "no_speculation": plain}, requests)
        answers = run(mine, requests, draft_limit=3).answers
    for one in (run_ for rounds in result.runs["recipe"] for run_ in rounds):
        assert 0 < one.target_seconds + one.draft_seconds < one.seconds
    plain_steps = [row for row in steps if row["side"] == "no_speculation" and not row["prompt"]]
    assert len(plain_steps) == 4 * 15
    assert {row["rows"] for row in plain_steps} == {1}
    check = check_prediction(result, steps, answers)
    assert check.verdict is Verdict.MEASURED
    assert rejudge(check.records) == [check]
    check.records.tables["runs"][0]["seconds"] *= 10
    assert rejudge(check.records) != [check]
