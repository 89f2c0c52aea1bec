"""Identity is proved token by token, and every way of losing it is caught."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import built_tiny
import pytest
from built_tiny import build_tiny, repetitive_prompts

from trtspec.backends import open_engine
from trtspec.embedded.acceptance import Accepted
from trtspec.embedded.drafters.planned import drafting_by_plan
from trtspec.ruler import Answer, run
from trtspec.verify.faults import Altered, counts_double, drops_the_last_token
from trtspec.verify.gates import Verdict
from trtspec.verify.lossless import (
    check_lossless,
    compare,
    locate,
    requests_for,
    row_noise,
)
from trtspec.verify.lossless_verdict import (
    MIN_NEAR,
    Comparison,
    Divergence,
    NearMissRun,
    Noise,
    is_tie,
    judge,
)
from trtspec.verify.near_misses import NEAR_NATS, Refusals, plan_near_misses, refusals


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory):
    return build_tiny(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def plain(artifact):
    return open_engine(artifact, "no_speculation")


@pytest.fixture
def speculative(artifact):
    return open_engine(artifact)


def check(speculative, plain, *, dtype: str = "float32", draft_limit: int = 3, speculates: bool = True):
    return check_lossless(
        speculative,
        plain,
        repetitive_prompts(),
        max_new_tokens=32,
        stop_tokens=frozenset({2}),
        draft_limit=draft_limit,
        dtype=dtype,
        speculates=speculates,
        required=True,
        floor_prompts=2,
        noise_texts=2,
        noise_tokens=40,
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_ngram_drafting_is_lossless(artifact, dtype: str):
    result = check(
        open_engine(artifact, dtype=dtype), open_engine(artifact, "no_speculation", dtype=dtype), dtype=dtype
    )
    assert result.check.verdict is Verdict.PASS
    assert "identical" in result.check.summary
    assert result.check.evidence["result"] == "identical"
    assert result.check.evidence["drafted"] > 0
    assert result.check.evidence["accepted"] > 0
    assert 0 < result.check.evidence["mismatch_rate_upper_95"] < 0.05
    noise = result.check.evidence["noise"]["nats"]
    assert noise < (1e-10 if dtype == "float64" else 1e-3)


def test_16_bit_passes_and_says_which_way(artifact):
    result = check(
        open_engine(artifact, dtype="bfloat16"),
        open_engine(artifact, "no_speculation", dtype="bfloat16"),
        dtype="bfloat16",
    )
    noise = result.check.evidence["noise"]
    assert 0 < noise["rms_nats"] < noise["usual_nats"] <= noise["nats"]
    assert result.check.verdict in (Verdict.PASS, Verdict.INCONCLUSIVE)
    assert result.check.evidence["result"] in ("identical", "numeric ties only")


def test_a_real_difference_is_not_excused_by_a_closer_look(artifact):
    """In bfloat16, where the place itself is measured too, a wrong token still stands out."""
    speculative = open_engine(artifact, dtype="bfloat16")
    result = check(
        Altered(speculative, change_output=built_tiny.changes_one_token("p3")),
        open_engine(artifact, "no_speculation", dtype="bfloat16"),
        dtype="bfloat16",
    )
    assert result.check.verdict is Verdict.FAIL
    wrong = {
        one["prompt_id"]: one
        for one in result.check.evidence["divergences"]
        if one["local_noise_nats"] is not None
    }
    assert wrong["p3"]["gap_nats"] > wrong["p3"]["local_noise_nats"]


def test_noise_at_the_place_itself_excuses():
    divergence = Divergence("a", 3, 1, 2, gap_nats=0.2)
    assert not is_tie(divergence, NOISE)
    assert is_tie(replace(divergence, local_noise_nats=0.25), NOISE)
    assert not is_tie(replace(divergence, local_noise_nats=0.15), NOISE)


def test_without_speculation_batching_is_compared(artifact, plain):
    result = check(plain, plain, draft_limit=0, speculates=False)
    assert result.check.verdict is Verdict.PASS
    assert "at batch 1" in result.check.summary


def test_a_dropped_last_token_fails(speculative, plain):
    broken = Altered(speculative, change_output=drops_the_last_token)
    result = check(broken, plain)
    assert result.check.verdict is Verdict.FAIL
    assert "ends early" in result.check.summary


def test_a_plain_zip_would_have_missed_it(speculative, plain):
    """The broken variant of the comparison: cut to the shorter text, every token agrees."""
    requests = requests_for(repetitive_prompts(), 32, frozenset({2}))
    reference = run(plain, requests, draft_limit=0)
    broken = run(Altered(speculative, change_output=drops_the_last_token), requests, draft_limit=3)
    for left, right in zip(reference.answers, broken.answers, strict=True):
        assert all(a == b for a, b in zip(left.tokens, right.tokens, strict=False))
    assert len(compare(reference.answers, broken.answers).divergences) == len(requests)


def test_one_changed_token_fails_and_is_located(speculative, plain):
    broken = Altered(speculative, change_output=built_tiny.changes_one_token("p3"))
    result = check(broken, plain, dtype="bfloat16")
    assert result.check.verdict is Verdict.FAIL
    (divergence,) = result.check.evidence["divergences"]
    assert divergence["prompt_id"] == "p3"
    assert divergence["position"] >= 2
    assert divergence["other_token"] == (divergence["reference_token"] + 1) % 256
    assert divergence["gap_nats"] > result.check.evidence["noise"]["nats"]


def test_an_engine_that_accepts_every_draft_fails(speculative, plain, monkeypatch):
    def accept_all(draft, law, draw):
        path = tuple(range(len(draft.tokens)))
        return Accepted(path, law.sample(len(path), draw))

    monkeypatch.setattr("trtspec.embedded.engine.exact", accept_all)
    result = check(speculative, plain, dtype="bfloat16")
    assert result.check.verdict is Verdict.FAIL
    assert result.check.evidence["result"] == "different"


# --------------------------------------------------------------------------- near misses


def proof(artifact, dtype: str = "float64"):
    speculative = open_engine(artifact, dtype=dtype)
    return check_lossless(
        speculative,
        open_engine(artifact, "no_speculation", dtype=dtype),
        repetitive_prompts(),
        max_new_tokens=24,
        stop_tokens=frozenset({2}),
        draft_limit=3,
        dtype=dtype,
        speculates=True,
        required=True,
        name="lossless_float64",
        floor_prompts=0,
        noise_texts=0,
        offer=lambda drafts: drafting_by_plan(speculative, drafts),
    ).check


def test_the_proof_counts_what_was_refused(artifact):
    check = proof(artifact)
    assert check.verdict is Verdict.PASS, check.summary
    near = check.evidence["near_misses"]
    assert near["refused"] == near["offered"] >= near["refused_within_nats"][str(NEAR_NATS)] >= MIN_NEAR
    assert 0 < near["smallest_gap_refused_nats"] < NEAR_NATS
    assert check.evidence["drafted"] == check.evidence["accepted"] + check.evidence["rejected"]
    for text in ("near misses", "refused", "its own drafts"):
        assert text in check.summary


@pytest.mark.parametrize(("nats", "chance"), [(1.0, 1.0), (0.4, 1.0), (0.1, 1.0), (0.4, 0.3)])
def test_an_acceptance_that_keeps_near_misses_fails(artifact, monkeypatch, nats, chance):
    monkeypatch.setattr("trtspec.embedded.engine.exact", built_tiny.keeps_near_misses(nats, chance))
    check = proof(artifact)
    assert check.verdict is Verdict.FAIL
    assert check.evidence["near_misses"]["refused"] < check.evidence["near_misses"]["offered"]


def test_own_drafts_alone_would_miss_it(artifact, monkeypatch):
    """The broken variant of the proof: a drafter seldom proposes what a careless acceptance would keep."""
    monkeypatch.setattr("trtspec.embedded.engine.exact", built_tiny.keeps_near_misses(0.02))
    own = check(
        open_engine(artifact, dtype="float64"),
        open_engine(artifact, "no_speculation", dtype="float64"),
        dtype="float64",
    ).check
    assert own.verdict is Verdict.PASS
    assert proof(artifact).verdict is Verdict.FAIL


def test_the_engine_drafts_its_own_again_after_the_plan(artifact):
    engine = open_engine(artifact)
    requests = requests_for(repetitive_prompts(2), 12, frozenset())
    before = run(engine, requests, draft_limit=3)
    with drafting_by_plan(engine, {}):
        assert run(engine, requests, draft_limit=3).answers[0].drafted == 0
    after = run(engine, requests, draft_limit=3)
    assert [a.drafted_by_step for a in after.answers] == [a.drafted_by_step for a in before.answers]
    engine.add(requests[0])
    with pytest.raises(ValueError, match="in flight"), drafting_by_plan(engine, {}):
        pass
    with pytest.raises(TypeError), drafting_by_plan(Altered(engine), {}):
        pass


def test_refusals_are_read_from_the_steps(artifact, plain):
    prompts = repetitive_prompts(2)
    reference = run(plain, requests_for(prompts, 12, frozenset()), draft_limit=0).answers
    plan = plan_near_misses(plain, prompts, reference, 3)
    assert plan.misses
    assert all(len(draft) <= 3 for draft in plan.drafts.values())
    for (name, known), miss in plan.misses.items():
        prompt, answer = next((p, a) for p, a in zip(prompts, reference, strict=True) if p.id == name)
        place = known - len(prompt.tokens) + miss.at
        assert plan.drafts[name, known][: miss.at] == answer.tokens[place - miss.at : place]
        assert plan.drafts[name, known][miss.at] != answer.tokens[place]
    # No step drafted anything: nothing was offered, whatever was planned.
    assert refusals(plan, prompts, reference) == Refusals(0, ())


def judged(
    *,
    divergences: tuple[Divergence, ...] = (),
    noise: Noise | None = None,
    dtype: str = "bfloat16",
    near: NearMissRun | None = None,
    proof: str | None = None,
    drafted: int = 40,
):
    return judge(
        "lossless",
        Comparison(100, 4, divergences),
        noise or NOISE,
        NO_FLOOR,
        dtype=dtype,
        drafted=drafted,
        accepted=drafted // 2,
        speculates=True,
        required=True,
        contradictions=(),
        near=near,
        proof=proof,
    )


def test_too_few_near_misses_prove_nothing_and_the_way_out_is_said():
    refused = (0.2,) * (MIN_NEAR - 1) + (0.9,) * 50
    few = NearMissRun(Comparison(100, 4, ()), Refusals(len(refused), refused))
    check = judged(dtype="float64", near=few)
    assert check.verdict is Verdict.INCONCLUSIVE
    assert check.required
    assert "--exact-prompts" in check.summary
    enough = NearMissRun(few.comparison, Refusals(len(refused) + 1, (0.1, *refused)))
    assert judged(dtype="float64", near=enough).verdict is Verdict.PASS


def test_ties_in_large_noise_leave_it_to_the_proof():
    """Every answer differs, all within noise: that is no PASS, and it does not claim to be one."""
    divergences = tuple(Divergence(name, 3, 1, 2, gap_nats=0.5) for name in "abcd")
    loud = Noise(0.6, 2.0, 0.3, 500, {"1": 2.0})
    check = judged(divergences=divergences, noise=loud, proof="lossless_float64")
    assert check.verdict is Verdict.INCONCLUSIVE
    assert not check.required
    for text in ("4 of 4 answers differ", "near ties", "cannot be seen", "the proof is lossless_float64"):
        assert text in check.summary
    alone = judged(divergences=divergences, noise=loud)
    assert alone.verdict is Verdict.INCONCLUSIVE
    assert alone.required, "with nothing else to prove it, undecided is undecided"
    quiet = judged(divergences=(Divergence("a", 3, 1, 2, gap_nats=0.05),), proof="lossless_float64")
    assert quiet.verdict is Verdict.PASS
    assert quiet.required


def test_one_rounding_outlier_does_not_excuse_everything():
    """By the maximum a gap of 1 nat would be a tie wherever one place in a hundred is that noisy."""
    outlier = Noise(0.05, 1.2, 0.1, 500, {"1": 1.2})
    assert not is_tie(Divergence("a", 3, 1, 2, gap_nats=1.0), outlier)
    check = judged(divergences=(Divergence("a", 3, 1, 2, gap_nats=1.0),), noise=outlier)
    assert check.verdict is Verdict.INCONCLUSIVE


# --------------------------------------------------------------------------- the engine's own counts


def test_inflated_counters_are_an_error(speculative, plain):
    result = check(Altered(speculative, change_stats=counts_double), plain)
    assert result.check.verdict is Verdict.ERROR
    assert "generated_tokens" in result.check.summary


def test_claimed_acceptance_is_an_error(speculative, plain):
    result = check(Altered(speculative, change_output=built_tiny.claims_everything_accepted), plain)
    assert result.check.verdict is Verdict.ERROR


def test_neighbours_that_change_answers_fail(speculative, plain):
    change = built_tiny.changes_one_token("p0")

    class OnlyInABatch(Altered):
        def step(self):
            alone = self._engine.in_flight == 1
            return [output if alone else change(output) for output in self._engine.step()]

    result = check(OnlyInABatch(plain), OnlyInABatch(plain), draft_limit=0, speculates=False)
    assert result.check.verdict is Verdict.FAIL


def test_nothing_drafted_shows_nothing(artifact, plain):
    """An engine without drafts is identical of course; that proves nothing about speculation."""
    result = check(plain, plain)
    assert result.check.verdict is Verdict.INCONCLUSIVE
    assert "nothing was drafted" in result.check.summary


def test_scores_do_not_move_in_float64(artifact):
    engine = open_engine(artifact, "no_speculation", dtype="float64")
    noise = row_noise(engine, [prompt.tokens for prompt in repetitive_prompts(2)], [1, 2, 4, 16])
    assert noise.nats < 1e-10
    assert set(noise.by_rows) == {"1", "2", "4", "16"}


def test_gap_is_how_far_the_worse_token_lies_below_the_best(plain):
    prompts = repetitive_prompts(1)
    (answer,) = run(plain, requests_for(prompts, 8, frozenset()), draft_limit=0).answers
    scores = plain.score((*prompts[0].tokens, *answer.tokens))
    at = len(prompts[0].tokens) + 3 - 1
    second = scores.second_tokens[at]
    comparison = Comparison(4, 1, (Divergence("p0", 3, answer.tokens[3], second),))
    (located,) = locate(plain, comparison, prompts, [answer]).divergences
    assert located.gap_nats == pytest.approx(scores.margins[at], abs=1e-4)
    assert located.margin == pytest.approx(scores.margins[at], abs=1e-4)


# --------------------------------------------------------------------------- the verdict itself


def answer(name: str, *tokens: int) -> Answer:
    return Answer(name, tokens, "length", (1,) * len(tokens), 0, 0)


def test_comparison_counts_decisions_up_to_the_first_difference():
    reference = [answer("a", 1, 2, 3, 4), answer("b", 1, 2), answer("c", 5)]
    other = [answer("a", 1, 9, 3, 4), answer("b", 1), answer("c", 5)]
    result = compare(reference, other)
    assert result.positions == 2 + 2 + 1
    assert result.divergences == (Divergence("a", 1, 2, 9), Divergence("b", 1, 2, None))
    with pytest.raises(ValueError, match="different prompts"):
        compare(reference, other[1:])


NOISE = Noise(0.08, 0.1, 0.03, 500, {"1": 0.1})
NO_FLOOR = Comparison(50, 2, ())


@pytest.mark.parametrize(
    ("dtype", "divergence", "verdict", "result"),
    [
        ("bfloat16", Divergence("a", 3, 1, 2, gap_nats=0.05), Verdict.PASS, "numeric ties only"),
        ("float16", Divergence("a", 3, 1, 2, gap_nats=0.05), Verdict.PASS, "numeric ties only"),
        ("float32", Divergence("a", 3, 1, 2, gap_nats=0.05), Verdict.FAIL, "different"),
        ("float64", Divergence("a", 3, 1, 2, gap_nats=0.0), Verdict.FAIL, "different"),
        ("bfloat16", Divergence("a", 3, 1, 2, gap_nats=0.09), Verdict.INCONCLUSIVE, "beyond the usual noise"),
        ("bfloat16", Divergence("a", 3, 1, 2, gap_nats=0.31), Verdict.FAIL, "different"),
        ("bfloat16", Divergence("a", 3, 1, None), Verdict.FAIL, "different"),
        ("bfloat16", Divergence("a", 3, None, 1), Verdict.FAIL, "different"),
    ],
)
def test_only_16_bit_ties_within_the_noise_pass(dtype, divergence, verdict, result):
    check = judge(
        "lossless",
        Comparison(100, 4, (divergence,)),
        NOISE,
        NO_FLOOR,
        dtype=dtype,
        drafted=10,
        accepted=5,
        speculates=True,
        required=True,
        contradictions=(),
    )
    assert check.verdict is verdict
    assert check.evidence["result"] == result


def test_one_real_difference_among_ties_fails():
    divergences = (Divergence("a", 3, 1, 2, gap_nats=0.01), Divergence("b", 3, 1, 2, gap_nats=2.0))
    check = judge(
        "lossless",
        Comparison(100, 4, divergences),
        NOISE,
        NO_FLOOR,
        dtype="bfloat16",
        drafted=10,
        accepted=5,
        speculates=True,
        required=True,
        contradictions=(),
    )
    assert check.verdict is Verdict.FAIL
    assert "prompt b" in check.summary


def test_rejection_only_is_said(tmp_path: Path):
    check = judge(
        "lossless",
        Comparison(100, 4, ()),
        NOISE,
        NO_FLOOR,
        dtype="float32",
        drafted=10,
        accepted=0,
        speculates=True,
        required=True,
        contradictions=(),
    )
    assert check.verdict is Verdict.PASS
    assert "only refusing was exercised" in check.warnings[0]
