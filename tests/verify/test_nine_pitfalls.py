"""The nine pitfalls: when a report answers each, when it is open, when it does not apply."""

from __future__ import annotations

from typing import Any

import pytest
from made import made_report

from trtspec.verify.gates import Check, Verdict
from trtspec.verify.i18n import speaker
from trtspec.verify.pitfalls import IDS, Status, answer_pitfalls
from trtspec.verify.report import pitfalls, to_json

NGRAM = {"speculation": {"kind": "ngram"}}
W4 = {"quantization": {"kind": "w4a16_awq", "kv_cache": "none"}}
W4_KV8 = {"quantization": {"kind": "w4a16_awq", "kv_cache": "fp8"}}
DRAFT = {"speculation": {"kind": "draft_model", "quantization": {"kind": "none"}}}
DRAFT_W4 = {"speculation": {"kind": "draft_model", "quantization": {"kind": "w4a16_awq"}}}
PLAIN: dict[str, Any] = {
    "speculation": {"kind": "none"},
    "quantization": {"kind": "none", "kv_cache": "none"},
}
LIMIT = {"limits": {"max_seq_tokens": 512}}


def check(name: str, verdict: Verdict = Verdict.PASS, **evidence: Any) -> Check:
    return Check(name, verdict, "", False, evidence=evidence)


SHORT = {"longest_prompt_tokens": 100, "max_new_tokens": 26}
FAIR = check("speedup", interleaved=True)
CASES: list[tuple[str, dict[str, Any], list[Check], dict[str, Any], Status]] = [
    ("wrong-baseline", NGRAM, [FAIR], {}, "answered"),
    ("wrong-baseline", NGRAM, [check("speedup", interleaved=False)], {}, "open"),
    ("wrong-baseline", NGRAM, [check("speedup", Verdict.ERROR, interleaved=True)], {}, "open"),
    ("wrong-baseline", NGRAM, [], {}, "open"),
    ("wrong-baseline", {**NGRAM, **W4}, [FAIR], {}, "open"),
    (
        "wrong-baseline",
        {**NGRAM, **W4},
        [FAIR, check("speedup_over_baseline", interleaved=True)],
        {},
        "answered",
    ),
    ("wrong-baseline", PLAIN, [], {}, "does not apply"),
    (
        "alpha-without-tau",
        NGRAM,
        [check("acceptance", acceptance_rate=0.5, acceptance_length=2)],
        {},
        "answered",
    ),
    ("alpha-without-tau", NGRAM, [check("acceptance", acceptance_rate=0.5)], {}, "open"),
    (
        "alpha-without-tau",
        NGRAM,
        [check("acceptance", acceptance_rate=None, acceptance_length=1)],
        {},
        "open",
    ),
    ("alpha-without-tau", PLAIN, [], {}, "does not apply"),
    ("unquantized-draft", {**W4, **DRAFT}, [], {}, "open"),
    ("unquantized-draft", {**W4, **DRAFT_W4}, [], {}, "answered"),
    ("unquantized-draft", {**W4, "speculation": {"kind": "medusa"}}, [], {}, "answered"),
    ("unquantized-draft", {**W4, **NGRAM}, [], {}, "does not apply"),
    ("unquantized-draft", DRAFT, [], {}, "does not apply"),
    ("untested-together", W4_KV8, [check("quality")], {}, "answered"),
    ("untested-together", W4_KV8, [check("quality", Verdict.SKIPPED)], {}, "open"),
    ("untested-together", {**W4, **NGRAM}, [check("quality")], {"fidelity": "approximate"}, "open"),
    (
        "untested-together",
        {**W4, **NGRAM},
        [check("both", pitfalls=["untested-together"])],
        {"fidelity": "approximate"},
        "answered",
    ),
    ("untested-together", W4, [], {}, "does not apply"),
    ("one-load", NGRAM, [FAIR], {}, "open"),
    ("one-load", NGRAM, [check("latency", loads=["chat, batch 1", "chat, batch 8"])], {}, "answered"),
    ("one-load", NGRAM, [check("latency", loads=["chat, batch 1"])], {}, "open"),
    ("one-load", PLAIN, [], {}, "does not apply"),
    ("tail-ignored", NGRAM, [check("latency", ttft={"p99_ms": 3.0})], {}, "answered"),
    ("tail-ignored", NGRAM, [check("latency", ttft={"p99_ms": None})], {}, "open"),
    ("tail-ignored", NGRAM, [check("quality", p99_kl=0.3)], {}, "open"),
    ("lazy-lossless", NGRAM, [check("lossless_float64", near_misses={"refused": 30})], {}, "answered"),
    ("lazy-lossless", NGRAM, [check("lossless", near_misses=None)], {}, "open"),
    ("lazy-lossless", NGRAM, [check("lossless", Verdict.FAIL)], {}, "answered"),
    (
        "lazy-lossless",
        NGRAM,
        [check("lossless_float64", Verdict.INCONCLUSIVE, near_misses={"refused": 3})],
        {},
        "open",
    ),
    ("lazy-lossless", NGRAM, [check("lossless")], {"fidelity": "approximate"}, "open"),
    ("lazy-lossless", NGRAM, [check("approximate_likelihood")], {"fidelity": "approximate"}, "answered"),
    ("lazy-lossless", PLAIN, [], {}, "does not apply"),
    ("untuned-draft", NGRAM, [], {}, "open"),
    ("untuned-draft", {"speculation": {"kind": "ngram", "adaptive": True}}, [], {}, "answered"),
    ("untuned-draft", NGRAM, [check("draft_scan", scan=[])], {}, "answered"),
    ("untuned-draft", PLAIN, [], {}, "does not apply"),
    (
        "long-context",
        LIMIT,
        [],
        {"settings": {"longest_prompt_tokens": 230, "max_new_tokens": 26}},
        "answered",
    ),
    ("long-context", LIMIT, [], {"settings": {"longest_prompt_tokens": 229, "max_new_tokens": 26}}, "open"),
    ("long-context", LIMIT, [], {"settings": {}}, "open"),
    ("long-context", LIMIT, [check("retrieval", lengths=[99, 500])], {}, "answered"),
    (
        "long-context",
        {**LIMIT, **NGRAM},
        [check("retrieval", lengths=[99, 500])],
        {"settings": SHORT},
        "open",
    ),
    ("long-context", LIMIT, [check("retrieval", pitfalls=["long-context"])], {"settings": {}}, "answered"),
]


@pytest.mark.parametrize(("name", "recipe", "checks", "changes", "status"), CASES)
def test_answers(name, recipe, checks, changes, status):
    made = made_report(*checks, recipe=recipe, **changes)
    found = next(one for one in pitfalls(made) if one.id == name)
    assert found.status == status
    assert bool(found.run) == (status == "open")


def test_each_pitfall_has_all_its_sides():
    assert len(IDS) == 9
    for name in IDS:
        assert {status for one, _, _, _, status in CASES if one == name} >= {"answered", "open"}


@pytest.mark.parametrize("verdict", [Verdict.SKIPPED, Verdict.ERROR, Verdict.INCONCLUSIVE])
def test_what_was_not_found_out_answers_nothing(verdict):
    made = made_report(check("later", verdict, pitfalls=list(IDS), loads=["a", "b"], p99=1.0, scan=[]))
    assert all(one.status != "answered" or one.id == "untested-together" for one in pitfalls(made))


def test_the_file_says_what_to_run():
    for one in to_json(made_report())["pitfalls"]:
        assert one["found"]
        assert bool(one["run"]) == (one["status"] == "open")


def test_what_to_run_for_two_endpoints_is_a_command():
    """The broken variant names them as the report does, "A against B", which no command takes."""
    engine = "http://a:8000 against http://b:8001"
    found = answer_pitfalls([], {}, {}, engine=engine, fidelity="strict")
    told = [speaker("en")(one.run, engine=one.engine) for one in found if one.run]
    assert told
    assert not any("against http" in text for text in told)
    assert any("verify --url http://a:8000 --baseline-url http://b:8001" in text for text in told)


def test_endpoints_are_told_no_option_that_needs_an_engine():
    engine = "http://a:8000 against http://b:8001"
    found = answer_pitfalls([], {}, {}, engine=engine, fidelity="strict")
    assert {one.id for one in found if one.status == "open"} >= {"one-load", "untuned-draft", "lazy-lossless"}
    for lang in ("en", "zh"):
        told = [one.command(speaker(lang)) for one in found]
        assert not [text for text in told if "--scan" in text or "--load" in text or "float64" in text]


def test_a_matrix_is_told_to_build_the_engine_first():
    """The broken variant takes the matrix's folder for an engine."""
    recipe = {"name": "mine", **NGRAM, **LIMIT}
    found = answer_pitfalls([], recipe, {"matrix": {}}, engine="engines/.matrix-mine", fidelity="strict")
    told = [one.command(speaker("en")) for one in found if one.status == "open"]
    assert "build the recipe (trtspec build), then trtspec verify engines/mine --scan" in told
    assert not [text for text in told if ".matrix" in text]
    assert not [one for one in found if one.status != "open" and one.command(speaker("en"))]
    bare = answer_pitfalls([], recipe, {}, engine="engines/.matrix-mine", fidelity="strict")
    assert [one for one in bare if ".matrix" in one.command(speaker("en"))]
