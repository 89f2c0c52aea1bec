"""What rows of two endpoints do not prove: load, lying ids, one answer for all, one server, kept answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from trtspec.verify.endpoint_acceptance import judge_comparable, judge_plain_baseline
from trtspec.verify.endpoint_verdict import judge_endpoints
from trtspec.verify.gates import Check, Verdict

Say = Callable[[str, str, int, int], str]
"""Text of (side, at, round, prompt)."""
RUNS = [("alone", 0), ("alone", 1), ("load", 0)]
QUICK = [("alone", 0), ("load", 0), ("load", 1)]


def row(side: str, at: str, number: int, prompt: int, text: str, **more: Any) -> dict[str, Any]:
    return {
        "side": side,
        "at": at,
        "round": number,
        "request_id": f"p{prompt}",
        "seconds": 1.0,
        "tokens": 4,
        "error": "",
        "text": text,
        "token_ids": None,
        "finish_reason": "length",
        "drafted": None,
        "accepted": None,
        "pieces": 4,
        "tokens_per_step": None,
        "emitted": None,
        "prompt_tokens": None,
        "prompt_token_ids": None,
        **more,
    }


def rows_of(say: Say, prompts: int = 12, runs: Sequence[tuple[str, int]] = RUNS) -> list[dict[str, Any]]:
    return [
        row(side, at, number, prompt, say(side, at, number, prompt))
        for at, number in runs
        for prompt in range(prompts)
        for side in ("url", "baseline")
        if (side, at, number) != ("url", "load", 1)
    ]


def judged(rows: Sequence[Mapping[str, Any]], **more: Any) -> Check:
    arguments = {"load": "4 at a time", "max_new_tokens": 8, "draft_tokens": None, "min_speedup": None}
    return judge_endpoints(rows, counters={}, **{**arguments, **more})[0]


def honest(side: str, at: str, number: int, prompt: int) -> str:
    return f"answer to {prompt}"


def wrong_under_load(side: str, at: str, number: int, prompt: int) -> str:
    return f"answer to {prompt}" + (" not" if (side, at) == ("url", "load") else "")


@pytest.mark.parametrize("runs", [RUNS, QUICK])
def test_answers_that_only_load_spoils_are_no_identity(runs):
    assert judged(rows_of(honest, runs=runs)).verdict is Verdict.PASS
    found = judged(rows_of(wrong_under_load, runs=runs))
    assert found.verdict is Verdict.FAIL
    assert "under load 12 more differ" in found.summary
    assert found.details[0].startswith("under load: p0")
    few = judged(rows_of(wrong_under_load, prompts=6, runs=runs))
    assert few.verdict is Verdict.INCONCLUSIVE
    assert "ask more prompts" in few.summary


def test_load_that_spoils_both_alike_is_noise():
    def noisy(side: str, at: str, number: int, prompt: int) -> str:
        return f"answer to {prompt}" + (side if at == "load" else "")

    found = judged(rows_of(noisy))
    assert (found.verdict, found.evidence["floor"]) == (Verdict.PASS, 12)


def alarms(floor_counts: bool, runs: int = 150) -> int:
    """How often equal sides, of whose answers 30 % change from run to run, FAIL. ``floor_counts``: whether
    the baseline's second run counts as url's does."""
    found = 0
    for seed in range(runs):
        chance = random.Random(seed)

        def say(side: str, at: str, number: int, prompt: int, chance: random.Random = chance) -> str:
            still = (at, number) == ("alone", 0) and side == "baseline"
            if (at, number, side) == ("alone", 1, "baseline") and not floor_counts:
                still = True
            return f"{prompt}" if still or chance.random() > 0.3 else f"{prompt} {chance.random()}"

        found += judged(rows_of(say, prompts=16)).verdict is Verdict.FAIL
    return found


def test_equal_noise_is_seldom_a_fault_and_would_be_if_url_were_held_to_it_more_often():
    assert alarms(floor_counts=True) <= 3  # 0.004 of 150, and chance
    assert alarms(floor_counts=False) >= 4


def test_a_wide_margin_is_no_fault_where_the_baseline_parts_as_far():
    margins = [{"request_id": f"p{prompt}", "token": "answer", "nats": 6.0} for prompt in range(4)]

    def one_of_two_models(side: str, at: str, number: int, prompt: int) -> str:
        return "answer" if (side, at, number) != ("baseline", "alone", 0) else f"other {prompt}"

    def lossy(side: str, at: str, number: int, prompt: int) -> str:
        return f"answer {prompt}" if side == "baseline" else "other"

    assert judged(rows_of(lossy, prompts=4), margins=margins).verdict is Verdict.FAIL
    margins = [{**one, "token": f"other {number}"} for number, one in enumerate(margins)]
    assert judged(rows_of(one_of_two_models, prompts=4), margins=margins).verdict is Verdict.INCONCLUSIVE


def test_token_ids_that_do_not_stand_for_the_text_are_no_identity():
    for ids in ([], [1, 1, 1, 1]):
        rows = rows_of(lambda side, at, number, prompt: f"{side if prompt else 'both'} {prompt}")
        lying = [{**one, "token_ids": ids} for one in rows]
        found = judged(lying)
        assert found.verdict is Verdict.ERROR, found.summary
        assert "the same token ids stand for other texts in" in found.summary
    # A character that the limit cuts is spelled by one server and not by the other.
    cut = [
        {**one, "token_ids": [1], "text": one["text"] + "\ufffd" * (one["side"] == "url")}
        for one in rows_of(honest)
    ]
    assert judged(cut).verdict is Verdict.PASS


def test_one_answer_to_everything_and_answers_to_nothing_prove_nothing():
    found = judged(rows_of(lambda *_: "I cannot help with that"))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "one and the same answer" in found.summary
    some = judged(rows_of(lambda side, at, number, prompt: f"answer to {prompt}" if prompt < 3 else ""))
    assert (some.n, some.warnings) == (3, ("9 prompts left out: both answers are empty",))
    assert judged(rows_of(lambda *_: "")).verdict is Verdict.ERROR


def test_one_server_under_both_urls_shows_nothing_of_drafts():
    rows = rows_of(honest)
    assert judge_comparable(rows, {}).verdict is Verdict.MEASURED
    found = judge_comparable(rows, {}, one_server=True)
    assert (found.verdict, found.required) == (Verdict.INCONCLUSIVE, True)


def timed(factor: Callable[[str, int], float]) -> list[dict[str, Any]]:
    """Rows whose seconds, when asked again, are the first's over ``factor(side, prompt)``."""
    return [
        {
            **one,
            "seconds": 1.0
            if (one["at"], one["round"]) == ("alone", 0)
            else 1 / factor(one["side"], int(one["request_id"][1:])),
        }
        for one in rows_of(honest)
    ]


def test_answers_that_are_kept_from_before_are_no_speed():
    found = judge_comparable(timed(lambda side, prompt: 20.0 if side == "url" else 1.0), {})
    assert (found.verdict, found.required) == (Verdict.INCONCLUSIVE, True)
    assert "asked again, url answers 20.0 times as fast" in found.summary
    # Both keep prefixes alike; one that warmed up on its first prompts; noise.
    for fair in (
        lambda side, prompt: 3.0,
        lambda side, prompt: 9.0 if side == "url" and prompt < 6 else 1.0,
        lambda side, prompt: random.Random(f"{side} {prompt}").uniform(0.5, 3.0),
    ):
        assert judge_comparable(timed(fair), {}).verdict is Verdict.MEASURED


def test_prefixes_that_both_keep_are_no_advantage_of_the_faster_one():
    """Ten seconds of prompt, two of answer, 2.5 times as fast with drafts: 13 times as fast again, or 6."""
    rows = rows_of(honest)
    for one in rows:
        new = (one["at"], one["round"]) == ("alone", 0)
        one["seconds"] = 10.0 * new + (0.8 if one["side"] == "url" else 2.0)
    assert judge_comparable(rows, {}).verdict is Verdict.MEASURED
    for one in rows:  # and where the baseline keeps none
        one["seconds"] += 10.0 * (one["side"] == "baseline" and one["seconds"] < 10)
    assert judge_comparable(rows, {}).verdict is Verdict.INCONCLUSIVE


def test_counters_that_stand_still_or_fall_do_not_clear_a_baseline():
    rows = rows_of(honest)  # 36 answers of the baseline, 4 tokens each
    none = {"drafts": 0.0, "drafted": 0.0, "accepted": 0.0}
    drafts_nothing = judge_plain_baseline(rows, {**none, "generated": 144.0})
    assert drafts_nothing.summary == "the baseline's counters say that it drafts nothing"
    assert (
        judge_plain_baseline(rows, {**none, "generated": 500.0}).verdict is Verdict.MEASURED
    )  # others ask too
    for counted in ({**none, "generated": 0.0}, {**none, "drafts": -9.0, "generated": 144.0}):
        assert judge_plain_baseline(rows, counted).verdict is Verdict.SKIPPED


def test_a_speedup_of_a_server_that_sends_one_token_at_a_time_is_doubted():
    def doubts(pieces: int, seconds: float) -> tuple[str, ...]:
        rows = [
            {**one, "pieces": pieces, "seconds": seconds if one["side"] == "baseline" else 1.0}
            for one in rows_of(honest)
        ]
        arguments = {
            "load": "",
            "max_new_tokens": 8,
            "draft_tokens": None,
            "min_speedup": None,
            "counters": {},
        }
        return next(one for one in judge_endpoints(rows, **arguments) if one.name == "speedup").warnings

    assert "url sends one token at a time" in doubts(4, 3.0)[0]
    assert doubts(2, 3.0) == doubts(4, 1.0) == ()


def test_a_side_that_counts_no_tokens_does_no_other_work():
    rows = [{**one, "tokens": None if one["side"] == "url" else 4} for one in rows_of(honest)]
    arguments = {"load": "", "max_new_tokens": 8, "draft_tokens": None, "min_speedup": 0.5, "counters": {}}

    def speedup(rows: Sequence[Mapping[str, Any]]) -> Verdict:
        return next(one for one in judge_endpoints(rows, **arguments) if one.name == "speedup").verdict

    assert speedup(rows) is Verdict.PASS
    assert speedup([{**one, "text": one["text"] + one["side"]} for one in rows]) is Verdict.SKIPPED
