"""Sampled answers of two endpoints: error rates of the judge, faults of acceptance, parameters honoured."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from fake_endpoints import Fake, serving
from fake_sampling import KEEPING, draft_law, draw, law, next_token
from scipy import stats

from trtspec.prompts import PROMPTS_FILE, load_chats
from trtspec.verify.blackbox import found_bias, judge_blackbox, planned_answers
from trtspec.verify.bundle import write_bundle
from trtspec.verify.endpoint import connect, learn
from trtspec.verify.endpoint_check import EndpointSettings, verify_endpoints
from trtspec.verify.endpoint_labels import PARAMETERS
from trtspec.verify.endpoint_sampled import (
    STREAMS,
    DrawSettings,
    check_sampled,
    judge_draws,
    pieces,
    seed_of,
    units,
)
from trtspec.verify.endpoint_verdict import ALPHA
from trtspec.verify.gates import Verdict
from trtspec.verify.power import INTENDED, PRODUCED, bias_size
from trtspec.verify.recheck import recheck

CHATS = load_chats(PROMPTS_FILE, limit=8, sample=True)
DRAWS = DrawSettings(prompts=1, bias=0.3)
SMALL = EndpointSettings(
    num_prompts=8, max_new_tokens=12, rounds=1, requests=4, concurrency=4, parameters=False, draws=DRAWS
)


def judged(mine: Fake, baseline: Fake, settings: EndpointSettings = SMALL):
    with serving(replace(mine, step_s=0.0), replace(baseline, step_s=0.0)) as urls:
        report = verify_endpoints(*(connect(url, timeout_s=5.0) for url in urls), CHATS, settings)
    return report, {check.name: check for check in report.checks}


def rows(streams, *, ids=True):
    """Draws as a client records them; ``streams``: answers by stream, to one prompt."""
    return [
        {
            "stream": stream, "request_id": "p", "at": at, "error": "", "drafted": 1, "answers": 1,
            "text": "".join(f" w{token}" for token in answer), "token_ids": list(answer) if ids else None,
        }
        for stream, answers in streams.items()
        for at, answer in enumerate(answers)
    ]  # fmt: skip


def verdict(streams, planned, bias, **changed):
    return verdict_of(rows(streams, **changed), planned, bias)


def verdict_of(draws, planned=60, bias=0.5):
    given = {"temperature": 1.0, "drafted": None, "seeded": {"url": True, "baseline": True}}
    return judge_draws(draws, planned=planned, bias=bias, **given)


def test_equal_laws_pass_and_the_sequence_of_looks_keeps_its_rate():
    rng = np.random.default_rng(5)
    target = np.array(law(0, 0, temperature=1.0))
    planned = planned_answers(0.6, 1, alpha=ALPHA)

    def side():
        return {"a": rng.choice(len(target), size=(planned, 3), p=target).tolist()}

    alarms = sum(
        judge_blackbox(reference=side(), drafted=side(), planned=planned, bias=0.6, alpha=ALPHA).verdict
        is Verdict.FAIL
        for _ in range(120)
    )
    assert stats.binomtest(alarms, 120, 2 * ALPHA, alternative="greater").pvalue > 0.01, alarms
    assert alarms <= 2
    passed = sum(
        verdict({stream: side()["a"] for stream in STREAMS}, planned, 0.6).verdict is Verdict.PASS
        for _ in range(40)
    )
    assert passed >= 39


def test_the_bias_of_2026_is_found_with_the_planned_answers():
    rng = np.random.default_rng(2026)
    bias = bias_size(INTENDED, PRODUCED)
    planned = planned_answers(bias, 1, alpha=ALPHA)
    assert found_bias(planned, 1, alpha=ALPHA) <= bias * 1.001

    def side(second):
        first = rng.choice(3, size=planned, p=INTENDED)
        return np.stack([first, rng.choice(3, size=planned, p=np.array(second) / sum(second))], 1).tolist()

    found = [
        judge_blackbox(
            reference={"a": side(INTENDED)},
            drafted={"a": side(PRODUCED)},
            planned=planned,
            bias=bias,
            alpha=ALPHA,
        ).verdict
        for _ in range(8)
    ]
    assert found.count(Verdict.FAIL) == 8


def test_text_alone_sees_what_it_can():
    """Pieces are cut by the text alone, so another cut into tokens or stream events changes nothing."""
    for text in ("To be, or not to be", "你好，世界", " a  b\n\n", ""):
        assert "".join(pieces(text)) == text
    chance = random.Random(4)
    target = law(2, 0, temperature=1.0)
    planned = planned_answers(0.3, 1, alpha=ALPHA)

    def answers(weights):
        return [[draw(chance, weights) for _ in range(4)] for _ in range(planned)]

    for other, expected in ((target, Verdict.PASS), (draft_law(target), Verdict.FAIL)):
        streams = {"baseline": answers(target), "url": answers(other), "control": answers(target)}
        by_text = verdict(streams, planned, 0.3, ids=False)
        assert by_text.verdict is expected
        assert by_text.evidence["compared"] == "text"
    few = rows({stream: [[1, 2]] for stream in STREAMS}, ids=True)
    few[0]["token_ids"] = None
    assert not units(few)[1], "ids of one side alone are compared with nothing"


def test_what_is_no_ruler_fails_nobody():
    chance = random.Random(9)
    target = law(2, 0, temperature=1.0)
    planned = planned_answers(0.3, 1, alpha=ALPHA)

    def answers(weights, count=planned):
        return [[draw(chance, weights) for _ in range(4)] for _ in range(count)]

    plain, other = answers(target), answers(draft_law(target))
    drifting = verdict({"baseline": plain, "url": other, "control": other}, planned, 0.3)
    assert drifting.verdict is Verdict.INCONCLUSIVE
    assert "does not draw like itself" in drifting.summary
    one_seed = verdict(
        {"baseline": [[1, 2, 3]] * planned, "url": plain, "control": [[1, 2, 3]] * planned}, planned, 0.3
    )
    assert one_seed.verdict is Verdict.INCONCLUSIVE
    assert "does not sample" in one_seed.summary
    deaf = verdict(
        {"baseline": plain, "url": [[1, 2, 3]] * planned, "control": answers(target)}, planned, 0.3
    )
    assert deaf.verdict is Verdict.FAIL
    few = verdict({stream: answers(target, planned // 2) for stream in STREAMS}, planned, 0.3)
    assert few.verdict is Verdict.INCONCLUSIVE
    assert f"{planned} answers" in few.summary
    failing = rows({stream: answers(target) for stream in STREAMS})
    for row in failing[-planned // 2 :]:
        row["error"] = "HTTP 503: busy"
    settings = {"planned": planned, "bias": 0.3, "temperature": 1.0, "drafted": None, "seeded": {}}
    assert "no fair sample" in judge_draws(failing, **settings).summary


def test_no_seed_comes_twice():
    seeds = {
        seed_of(stream, prompt, at)
        for stream in range(4)
        for prompt in (0, 1, 399)
        for at in (0, 1, 2, 99_999)
    }
    assert len(seeds) == 4 * 3 * 4
    assert all(0 < seed < 2**31 for seed in seeds)


@pytest.mark.parametrize("way", [*KEEPING, "biased", "always"])
def test_ways_of_acceptance_have_the_laws_that_they_are_said_to_have(way):
    chance = random.Random(1)
    target = law(3, 0, temperature=1.0)
    counts = np.bincount(
        [next_token(way, chance, target, drafted=True) for _ in range(4000)], minlength=len(target)
    )
    p = stats.chisquare(counts, np.array(target) * 4000).pvalue
    assert p > 1e-3 if way in KEEPING else p < 1e-6


@pytest.mark.parametrize(
    ("protocol", "way"),
    [*(("openai", way) for way in ("rejection", "biased", "always", "deaf")), ("llmapi", "biased")],
)
def test_endpoints_that_draft(protocol, way, tmp_path):
    report, checks = judged(Fake(protocol, per_step=2, sampler=way), Fake(protocol))
    check = checks["sampled"]
    assert check.verdict is (Verdict.PASS if way == "rejection" else Verdict.FAIL), check.summary
    assert checks["lossless"].verdict is Verdict.PASS, "greedy answers show nothing of this"
    assert report.exit_code == (0 if way == "rejection" else 1)
    if way == "biased":
        write_bundle(tmp_path / "b", report)
        again = recheck(tmp_path / "b")
        assert (again.problems, again.exit_code) == ((), 0), again


@pytest.mark.parametrize("protocol", ["openai", "llmapi"])
def test_what_is_drawn_is_asked_where_url_drafts(protocol):
    """An acceptance that spoils what it drafts for is nowhere else to be seen."""
    words = CHATS[4].messages[-1]["content"][:20]
    assert sum(words in chat.text for chat in CHATS) == 1
    _, checks = judged(Fake(protocol, per_step=2, sampler="biased", drafts_on=words), Fake(protocol))
    assert checks["sampled"].verdict is Verdict.FAIL, checks["sampled"].summary
    first = {"url": Fake(protocol, per_step=2, sampler="biased", drafts_on=words), "baseline": Fake(protocol)}
    with serving(*(replace(one, step_s=0.0) for one in first.values())) as urls:
        ends = dict(zip(first, (learn(connect(url), CHATS[0]) for url in urls), strict=True))
        check = check_sampled(ends, CHATS[:1], DRAWS, concurrency=4)  # as the first prompts would be asked
    assert check.verdict is Verdict.PASS


def test_a_server_that_drafts_elsewhere_has_shown_nothing_here():
    chance = random.Random(9)
    target = law(2, 0, temperature=1.0)
    planned = planned_answers(0.3, 1, alpha=ALPHA)
    drawn = rows({one: [[draw(chance, target) for _ in range(4)] for _ in range(planned)] for one in STREAMS})
    settings = {"planned": planned, "bias": 0.3, "temperature": 1.0, "drafted": None, "seeded": {}}
    assert judge_draws(drawn, **settings, speculates=True).verdict is Verdict.PASS
    nothing = [{**row, "drafted": 0} for row in drawn]
    check = judge_draws(nothing, **settings, speculates=True)
    assert check.verdict is Verdict.INCONCLUSIVE
    assert "drafted only 0 tokens" in check.summary
    plain = judge_draws(nothing, **settings)  # a server that never drafts: its law is what it is
    assert plain.verdict is Verdict.PASS
    assert "nothing was drafted" in plain.warnings[0]


def test_a_server_without_seeds_draws_with_its_own_randomness():
    _, checks = judged(Fake(refuse=("seed",)), Fake())
    assert checks["sampled"].verdict is Verdict.PASS
    assert any("takes no seed" in one for one in checks["sampled"].warnings)
    _, checks = judged(Fake(refuse=("top_p",)), Fake())
    assert checks["sampled"].verdict is Verdict.SKIPPED
    assert checks["sampled"].required


def test_too_few_tokens_or_seconds_are_said():
    few = replace(SMALL, draws=replace(DRAWS, tokens=160))
    _, checks = judged(Fake(), Fake(), few)
    assert checks["sampled"].verdict is Verdict.INCONCLUSIVE
    assert "--sampled-tokens) would decide" in checks["sampled"].summary
    _, checks = judged(Fake(), Fake(), replace(SMALL, draws=replace(DRAWS, seconds=0.001)))
    assert checks["sampled"].verdict is Verdict.SKIPPED
    assert not checks["sampled"].required


TABLE = replace(SMALL, draws=None, parameters=True)


@pytest.mark.parametrize("protocol", ["openai", "llmapi"])
def test_the_table_of_parameters(protocol, tmp_path):
    report, checks = judged(Fake(protocol, per_step=2), Fake(protocol), TABLE)
    table = {row["parameter"]: row["url"] for row in checks["sampling_parameters"].evidence["table"]}
    assert table == dict.fromkeys(table, True) | ({} if protocol == "openai" else {"n": None})
    assert len(table) == 7
    assert checks["sampling_parameters"].verdict is Verdict.PASS
    write_bundle(tmp_path / "b", report)
    assert recheck(tmp_path / "b").exit_code == 0


@pytest.mark.parametrize("parameter", PARAMETERS)
def test_what_only_one_side_ignores_is_a_fault(parameter):
    deaf = Fake(per_step=2, ignores=(parameter,))
    report, checks = judged(deaf, Fake(), TABLE)
    check = checks["sampling_parameters"]
    assert check.verdict is Verdict.FAIL, check.details
    assert parameter in check.summary
    assert report.exit_code == 1


def test_what_both_ignore_is_no_matter_of_drafts_and_what_is_refused_is_not_ignored():
    settings = TABLE
    _, checks = judged(Fake(ignores=("seed", "n")), Fake(ignores=("seed", "n")), settings)
    assert checks["sampling_parameters"].verdict is Verdict.MEASURED
    assert "the baseline ignores it too" in "".join(checks["sampling_parameters"].details)
    assert "not told: seed, n" in checks["sampling_parameters"].summary
    _, checks = judged(Fake(refuse=("seed",)), Fake(), settings)
    assert "not told: seed" in checks["sampling_parameters"].summary, (
        "what is refused is left out of the rest"
    )
    tied = Fake(sampler="tied")
    _, checks = judged(tied, tied, settings)
    table = {row["parameter"]: row["url"] for row in checks["sampling_parameters"].evidence["table"]}
    assert table["temperature"] is table["top_k"] is True, "16-bit ties are no fault"
    _, checks = judged(Fake(refuse=("top_k",)), Fake(), settings)
    assert checks["sampling_parameters"].verdict is Verdict.MEASURED
    assert "refused" in "".join(checks["sampling_parameters"].details)


def test_a_server_that_dies_of_a_probe_is_named_and_ignores_nothing():
    _, checks = judged(Fake(dies_after=45), Fake(), TABLE)
    check = checks["sampling_parameters"]
    assert check.verdict is Verdict.INCONCLUSIVE
    assert check.required
    assert "url stopped answering when asked for" in check.summary


def test_approximate_acceptance_is_never_lossless(tmp_path):
    said = replace(SMALL, acceptance="relaxed", max_new_tokens=24)
    report, checks = judged(Fake(lossy=True), Fake(), said)
    assert report.fidelity == "approximate"
    assert "lossless" not in checks
    assert checks["greedy"].verdict is Verdict.MEASURED
    assert "not claimed" in checks["greedy"].summary + checks["sampled"].summary
    assert checks["approximate_repetition"].verdict is not Verdict.SKIPPED
    assert checks["approximate"].verdict is Verdict.SKIPPED
    assert report.exit_code == 4, "nothing judges its quality"
    write_bundle(tmp_path / "b", report)
    assert recheck(tmp_path / "b").problems == ()
    _, checks = judged(Fake(lossy=True), Fake(), replace(said, acceptance="typical"))
    assert checks["greedy"].verdict is Verdict.FAIL, "at temperature 0 typical acceptance is strict"


def test_a_server_that_dies_among_the_draws_is_not_asked_for_all_of_them():
    """One that hangs would cost a time-out a draw."""
    with serving(Fake(step_s=0.0, dies_after=30), Fake(step_s=0.0)) as urls:
        sides = dict(zip(("url", "baseline"), (learn(connect(url), CHATS[0]) for url in urls), strict=True))
        check = check_sampled(sides, CHATS[:1], DRAWS, concurrency=4)
    assert check.verdict is Verdict.INCONCLUSIVE
    errors = [row["error"] for row in check.records.tables["draws"] if row["error"]]
    assert sum(not error.startswith("not asked, as those before failed") for error in errors) <= 8
    assert len(errors) > 50


def test_a_prompt_that_a_server_refuses_is_no_division_by_zero():
    """A filter of contents, say: none of its draws has an answer."""
    chance = random.Random(5)
    draws = rows({stream: [[chance.randrange(4) for _ in range(8)] for _ in range(60)] for stream in STREAMS})
    for refused in (("url",), STREAMS):
        more = [
            {**row, "request_id": "q", **({"error": "HTTP 400: no"} if row["stream"] in refused else {})}
            for row in draws
        ]
        found = verdict_of([*draws, *more])
        assert found.verdict is Verdict.INCONCLUSIVE
        assert "requests of" in found.summary


def test_a_bias_that_two_answers_would_show_has_looks_at_more():
    huge = DrawSettings(prompts=1, bias=1e6, tokens=16)
    with serving(Fake(step_s=0.0), Fake(step_s=0.0)) as urls:
        sides = dict(zip(("url", "baseline"), (learn(connect(url), CHATS[0]) for url in urls), strict=True))
        assert check_sampled(sides, CHATS[:1], huge, concurrency=4).verdict is Verdict.INCONCLUSIVE
    assert (huge.needed, replace(huge, tokens=None).planned) == (20, 20)
