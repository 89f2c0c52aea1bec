"""Sampled answers against the target's law: the scores, the tests' error rates and power, the verdicts."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from trtspec.embedded import specimen
from trtspec.embedded.acceptance import exact, rejection
from trtspec.embedded.sampling import TargetLaw
from trtspec.engine import Sampling
from trtspec.prompts import Prompt
from trtspec.ruler import Answer
from trtspec.verify.gates import Check, Verdict
from trtspec.verify.power import SUITE_ALPHA
from trtspec.verify.report import plain
from trtspec.verify.sampled import (
    Drawn,
    check_sampled,
    judge_sampled,
    kept_whole,
    law_requests,
    run_tests,
)

TEXT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32, 38, 46]
PROMPTS = [Prompt(f"p{number}", tuple(TEXT[: 5 + number])) for number in range(5)]


@pytest.fixture(autouse=True)
def _one_thread():
    with specimen.one_thread():
        yield


# --------------------------------------------------------------------------- scores


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(0.6),
        Sampling(1.3, top_k=5),
        Sampling(1.0, top_p=0.7),
        Sampling(0.8, top_k=20, top_p=0.9),
        Sampling(1.0, top_k=1),
        Sampling(1.0, top_p=1e-9),
    ],
)
@pytest.mark.parametrize("chunk", [None, 3])
def test_scores_are_those_of_the_law_that_is_drawn_from(sampling, chunk):
    engine, first = specimen.open_specimen(), 4
    scores = engine.score_law(TEXT, sampling, first=first, chunk_tokens=chunk)
    assert len(scores.logprobs) == len(TEXT) - first
    logits = specimen.text_logits(specimen.specimen(), TEXT)
    for at, token in enumerate(TEXT[first:]):
        p = TargetLaw(logits[first - 1 + at][None], sampling).probs(0)
        likely = sorted(range(len(p)), key=lambda i: (-float(p[i]), i))
        above = sum(float(p[i]) for i in likely[: likely.index(token)])
        entropy = float(torch.special.entr(p).sum())
        surprisal = torch.where(p > 0, -p.log(), 0.0)
        assert math.exp(scores.logprobs[at]) == pytest.approx(float(p[token]), abs=1e-12)
        assert scores.entropies[at] == pytest.approx(entropy, abs=1e-9)
        assert scores.variances[at] == pytest.approx(float((p * (surprisal - entropy) ** 2).sum()), abs=1e-9)
        if p[token] > 0:
            assert scores.above[at] == pytest.approx(above, abs=1e-9)


def test_no_law_to_score():
    engine = specimen.open_specimen()
    for sampling, first in ((Sampling(0.0), 1), (Sampling(1.0), 0)):
        with pytest.raises(ValueError, match="no law"):
            engine.score_law(TEXT, sampling, first=first)


# --------------------------------------------------------------------------- error rates and power

CELLS = 12


def simulated(rng: Any, answers: int, length: int, bias: float = 0.0, repeat: bool = False) -> list[Drawn]:
    """Answers drawn from random laws, ``bias`` of the mass moved to the most likely token; with ``repeat``
    every second answer shares its neighbour's random numbers."""
    found: list[Drawn] = []
    stream = rng
    for number in range(answers):
        if repeat and number % 2 == 0:
            seed = int(rng.integers(1 << 40))
        stream = np.random.default_rng(seed) if repeat else rng
        laws = rng.dirichlet(np.full(CELLS, 0.4), size=length)
        laws = -np.sort(-laws, axis=1)
        drawn = laws * (1 - bias)
        drawn[:, 0] += bias
        u = stream.random(length)
        tokens = (drawn.cumsum(1) < u[:, None]).sum(1).clip(0, CELLS - 1)
        p = laws[np.arange(length), tokens]
        with np.errstate(divide="ignore"):
            logs = np.where(laws > 0, np.log(laws), 0.0)
        entropy = -(laws * logs).sum(1)
        found.append(
            Drawn(
                f"a{number}",
                1.0,
                0,
                1.0,
                number,
                tuple(map(int, tokens)),
                tuple(np.log(np.maximum(p, 1e-300)).tolist()),
                tuple(entropy.tolist()),
                tuple((laws * (logs + entropy[:, None]) ** 2).sum(1).tolist()),
                tuple((laws.cumsum(1)[np.arange(length), tokens] - p).tolist()),
            )
        )
    return found


def judged(law: list[Drawn], control: list[Drawn], **changed: Any) -> Check:
    given: dict[str, Any] = {
        "law": [asdict(one) for one in law],
        "control": [asdict(one) for one in control],
        "tokens_an_answer": len(law[0].tokens),
        "drafted": 100,
        "accepted": 50,
        "tokens_a_step": 1.5,
        "contradictions": [],
        "bias": 0.2,
        "dtype": "float64",
        "required": True,
    }
    return judge_sampled(**(given | changed))


def test_each_test_keeps_its_level():
    rng = np.random.default_rng(1)
    runs = [run_tests(simulated(rng, 10, 24), 0).p_values for _ in range(400)]
    for name in runs[0]:
        for level in (0.01, 0.05):
            alarms = sum(one[name] <= level for one in runs)
            assert stats.binomtest(alarms, 400, level, alternative="greater").pvalue > 1e-3, name


def test_the_whole_family_raises_false_alarms_in_one_of_a_hundred():
    rng = np.random.default_rng(2)
    checks = [judged(simulated(rng, 12, 24), simulated(rng, 12, 24)) for _ in range(300)]
    alarms = sum(check.verdict is Verdict.FAIL for check in checks)
    assert stats.binomtest(alarms, 300, SUITE_ALPHA, alternative="greater").pvalue > 0.01


def test_a_bias_of_the_planned_size_is_found():
    """Mass moved to the likeliest token, as an acceptance that keeps too many drafts does."""
    rng = np.random.default_rng(3)
    checks = [judged(simulated(rng, 26, 48, bias=0.15), simulated(rng, 26, 48)) for _ in range(40)]
    assert sum(check.verdict is Verdict.FAIL for check in checks) >= 39
    assert all("law" in check.evidence["rejected"][0] for check in checks if check.verdict is Verdict.FAIL)


def touched(law: list[Drawn], other: list[Drawn], share: int) -> list[Drawn]:
    """Tokens of ``law`` at every ``share``-th place, where a draft had a part, and of ``other`` between."""
    found = []
    for mine, theirs in zip(law, other, strict=True):
        flags = tuple(at % share == 0 for at in range(len(mine.tokens)))
        columns = {
            name: tuple(
                a if flag else b
                for flag, a, b in zip(flags, getattr(mine, name), getattr(theirs, name), strict=True)
            )
            for name in ("tokens", "logprobs", "entropies", "variances", "above")
        }
        found.append(dataclasses.replace(mine, **columns, drafted=flags))
    return found


def test_a_fault_where_drafts_had_a_part_does_not_drown_among_the_other_tokens():
    rng = np.random.default_rng(6)
    caught = drowned = alarms = 0
    for _ in range(20):
        bad, good, control = (simulated(rng, 26, 48, bias=one) for one in (0.35, 0.0, 0.0))
        mixed = touched(bad, good, 6)
        check = judged(mixed, control)
        caught += check.verdict is Verdict.FAIL
        assert check.details[0].startswith("a draft had a part in 208 of 1248 tokens; of these alone")
        # Broken: all tokens together.
        blind = [dataclasses.replace(one, drafted=()) for one in mixed]
        drowned += judged(blind, control).verdict is not Verdict.FAIL
        alarms += judged(touched(good, good, 6), control).verdict is Verdict.FAIL
    assert caught >= 18
    assert drowned >= 10
    assert alarms <= 1
    few = touched(good, good, 24)
    assert judged(few, control).details[:1] == (
        "a draft had a part in 52 of 1248 tokens, too few to test them alone",
    )


def test_drafts_that_were_hardly_ever_kept_whole_are_said(drawn):
    assert judged(*drawn, bias=0.5, whole=20).warnings == judged(*drawn, bias=0.5).warnings == ()
    assert judged(*drawn, bias=0.5, whole=3).warnings[0].startswith("only 3 drafts were kept whole")
    answer = Answer("x", (1,) * 9, "length", (1, 5, 2, 1), 8, 5, (0, 4, 4, 0))
    tree = dataclasses.replace(answer, drafted_by_step=(0, 16, 16, 0))
    assert kept_whole([answer], 4) == kept_whole([answer], None) == kept_whole([tree], 4) == 1


def test_requests_that_share_a_random_stream_are_found():
    rng = np.random.default_rng(5)
    check = judged(simulated(rng, 20, 32, repeat=True), simulated(rng, 20, 32))
    assert check.verdict is Verdict.FAIL
    assert check.evidence["rejected"] == ["law: independent (neighbouring answers)"]


# --------------------------------------------------------------------------- verdicts


@pytest.fixture(scope="module")
def drawn() -> tuple[list[Drawn], list[Drawn]]:
    rng = np.random.default_rng(9)
    return simulated(rng, 12, 40), simulated(rng, 12, 40)


def test_too_few_tokens_decide_nothing_and_say_how_many_would(drawn):
    check = judged(*drawn, bias=0.01)
    assert check.verdict is Verdict.INCONCLUSIVE
    assert f"{check.evidence['tokens_needed']} would decide" in check.summary
    assert judged(*drawn, bias=0.5).verdict is Verdict.PASS
    assert judged(*drawn, bias=0.5, drafted=0).verdict is Verdict.INCONCLUSIVE


def test_a_short_answer_fails(drawn):
    check = judged(*drawn, tokens_an_answer=41)
    assert check.verdict is Verdict.FAIL
    assert "do not have the 41 tokens" in check.summary


def test_counts_that_contradict_the_answers_are_an_error(drawn):
    check = judged(*drawn, contradictions=["counted twice"], required=False)
    assert (check.verdict, check.required) == (Verdict.ERROR, True)


def test_a_token_outside_the_law_is_a_fault_in_exact_arithmetic_only(drawn):
    law, control = drawn
    outside = dataclasses.replace(law[0], logprobs=(None, *law[0].logprobs[1:]))
    assert judged([outside, *law[1:]], control, bias=0.5).verdict is Verdict.FAIL
    rounded = judged([outside, *law[1:]], control, bias=0.5, dtype="bfloat16")
    assert rounded.verdict is Verdict.PASS
    many = [dataclasses.replace(one, logprobs=(None,) * 8 + one.logprobs[8:]) for one in law]
    assert judged(many, control, dtype="bfloat16").verdict is Verdict.FAIL


def test_a_control_that_departs_from_its_scores_is_no_ruler_in_16_bit(drawn):
    bad = simulated(np.random.default_rng(11), 12, 40, bias=0.4)
    assert judged(bad, bad, dtype="bfloat16").verdict is Verdict.INCONCLUSIVE
    assert judged(drawn[0], bad, dtype="bfloat16").verdict is Verdict.INCONCLUSIVE
    assert judged(drawn[0], bad).verdict is Verdict.FAIL


def test_the_verdict_follows_from_what_the_report_keeps(drawn):
    check = judged(*drawn)
    stored = json.loads(json.dumps(plain(check.evidence["raw"])))
    again = judge_sampled(**stored)
    assert plain(asdict(again)) == plain(asdict(check))


# --------------------------------------------------------------------------- engines


def test_requests_meet_both_laws():
    requests = law_requests(PROMPTS, answers=20, max_new_tokens=4, temperature=1.0, first_seed=7)
    assert len({one.sampling.seed for one in requests}) == len({one.id for one in requests}) == 20
    for prompt in PROMPTS:
        mine = [one.sampling for one in requests if one.prompt_tokens == prompt.tokens]
        assert {one.top_k for one in mine} == {0, 40}
    assert not any(one.stop_tokens for one in requests)


@pytest.mark.parametrize("accept", [exact, rejection, specimen.biased_residual, specimen.accept_always])
def test_engines_that_draw_rightly_and_wrongly(accept):
    engine = specimen.open_specimen(specimen.model_drafter(), accept=accept)
    check = check_sampled(
        engine,
        specimen.open_specimen(),
        PROMPTS,
        tokens=720,
        max_new_tokens=24,
        temperature=1.0,
        bias=0.08,
        draft_limit=specimen.DRAFT_TOKENS,
        dtype="float64",
        required=True,
    )
    right = accept in (exact, rejection)
    assert check.verdict is (Verdict.PASS if right else Verdict.FAIL), check.summary
    assert check.evidence["raw"]["accepted"] > 0
    assert check.evidence["tests"]["law"]["touched"] > 300
    assert check.evidence["tests"]["control"]["touched"] == 0
