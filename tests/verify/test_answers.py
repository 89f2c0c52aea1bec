"""The first lines of a report: each answer follows from its checks, and no better than they say."""

from __future__ import annotations

import pytest
from made import full_report, made_report

from trtspec.verify import render
from trtspec.verify.answers import answers
from trtspec.verify.gates import Check, Verdict
from trtspec.verify.html import page
from trtspec.verify.i18n import speaker

SAY = speaker("en")


def asked(*checks: Check, **changes) -> dict[str, str]:
    return dict(answers(made_report(*checks, **changes), SAY))


def check(name: str, verdict: Verdict, required: bool = True, **fields) -> Check:
    return Check(name, verdict, "x", required, **fields)


def speed(low: float, high: float, verdict: Verdict = Verdict.MEASURED, **fields) -> Check:
    given = {"measured": (low + high) / 2, "interval": (low, high), "evidence": {"loads": ["1 at a time"]}}
    return check("speedup", verdict, verdict is not Verdict.MEASURED, **{**given, **fields})


PROOF = check("lossless_float64", Verdict.PASS)
UNSURE = check("lossless", Verdict.INCONCLUSIVE, False)


def test_the_answers_of_a_whole_report():
    assert answers(full_report(), SAY) == [
        ("lossless?", "yes: lossless, lossless_float64"),
        ("good enough?", "no: quality 1.27 (1.25 to 1.28; at most 1.25)"),
        (
            "faster?",
            "yes: speedup 1.57 (1.31 to 1.8; at least 1.2); "
            "not shown: speedup_over_baseline 1.05 (0.95 to 1.15; at least 1)",
        ),
    ]


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ((UNSURE, PROOF), "yes: lossless_float64; undecided: lossless"),
        (
            (UNSURE, check("sampled", Verdict.FAIL), PROOF),
            "no: sampled; passed: lossless_float64; undecided: lossless",
        ),
        ((check("lossless", Verdict.INCONCLUSIVE),), "undecided: lossless"),
        ((UNSURE, check("lossless_float64", Verdict.INCONCLUSIVE)), "undecided: lossless_float64, lossless"),
        ((PROOF, check("sampled", Verdict.SKIPPED)), "undecided: sampled; passed: lossless_float64"),
        ((PROOF, check("sampled", Verdict.SKIPPED, False)), "yes: lossless_float64; not run: sampled"),
        ((PROOF, check("other.lossless", Verdict.FAIL)), "no: other.lossless; passed: lossless_float64"),
        ((PROOF, check("sampled", Verdict.ERROR, False)), "no: sampled; passed: lossless_float64"),
    ],
)
def test_lossless_is_yes_only_if_nothing_that_is_required_is_open_or_wrong(found, text):
    assert asked(*found)["lossless?"] == text


def test_an_approximate_engine_is_never_said_to_be_lossless():
    found = (check("greedy", Verdict.PASS), check("approximate_likelihood", Verdict.PASS))
    answered = asked(*found, fidelity="approximate")
    assert "lossless?" not in answered
    said = answered["acceptance?"]
    assert said == "approximate, as the recipe says: greedy, approximate_likelihood"
    assert "lossless?" not in asked(*found)  # those are not the checks of a strict one


def test_what_no_gate_asks_is_measured_and_not_good_enough():
    one = check("quality", Verdict.MEASURED, False, measured=1.2, interval=(1.1, 1.3))
    assert asked(one)["good enough?"] == "measured, no gate asks: quality 1.2 (1.1 to 1.3)"
    task = check("task:mine", Verdict.INCONCLUSIVE, bound=-0.05, sense="at least", measured=-0.02)
    said = asked(check("quality", Verdict.PASS, measured=1.0), task)["good enough?"]
    assert said == "undecided: task:mine -0.02 (at least -0.05); passed: quality 1"
    assert asked(check("degenerate_text", Verdict.FAIL, False))["good enough?"] == "no: degenerate_text"


@pytest.mark.parametrize(
    ("one", "word"),
    [
        (speed(1.01, 1.2), "yes"),
        (speed(0.99, 1.2), "not shown"),
        (speed(0.8, 0.99), "slower"),
        (
            speed(0.99, 1.2, Verdict.PASS, bound=0.9, sense="at least"),
            "not shown",
        ),  # a gate below 1 is no speed
        (speed(float("-inf"), float("inf"), measured=3.0), "not shown"),  # whatever the point
        (speed(2.0, 2.2, Verdict.ERROR), "no measurement"),
    ],
)
def test_faster_means_that_the_whole_interval_is(one, word):
    assert asked(one)["faster?"].startswith(f"{word}: speedup")


def test_each_load_has_what_was_found_there():
    assert asked(speed(1.1, 1.2))["at which load?"] == "1 at a time: yes (speedup)"
    two = check(
        "speedup_under_load", Verdict.MEASURED, False, measured=1.0, interval=(0.8, 1.2),
        evidence={"loads": ["8 at a time"]},
    )  # fmt: skip
    said = asked(speed(1.1, 1.2), two)["at which load?"]
    assert said == "1 at a time: yes (speedup); 8 at a time: not shown (speedup_under_load)"
    cells = [{"load": f"load {i}", "speedup": 0.5 + i / 4} for i in range(9)]
    listed = {"loads": [one["load"] for one in cells], "by_load": cells}
    many = check("speedup_by_load", Verdict.MEASURED, False, measured=1.2, evidence=listed)
    assert asked(many)["at which load?"] == (
        "9 loads, timed too few times for intervals: from 0.50 (load 0) to 2.50 (load 8)"
    )
    sure = {**listed, "by_load": [{**one, "low": 0.4, "high": 3.0} for one in cells]}
    many = check("speedup_by_load", Verdict.MEASURED, False, measured=1.2, evidence=sure)
    assert asked(many)["at which load?"] == "9 loads: from 0.50 (load 0) to 2.50 (load 8)"
    void = speed(1.1, 1.2, Verdict.ERROR)
    assert "at which load?" not in asked(void)


def test_a_report_of_other_things_has_no_answers():
    assert asked(check("cell BF16 ngram", Verdict.PASS), check("sampled", Verdict.SKIPPED, False)) == {}
    text = render.terminal(made_report(check("cell BF16 ngram", Verdict.PASS)))
    assert "lossless?" not in text


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_every_form_begins_or_ends_with_them(lang):
    report = full_report()
    first = answers(report, speaker(lang))[0]
    lines = render.terminal(report, lang=lang).splitlines()
    assert any(line.startswith(first[0]) and line.endswith(first[1]) for line in lines[-8:])
    assert f"- **{first[0]}** {first[1]}" in render.markdown(report, lang=lang).splitlines()[:8]
    assert f"<dt>{first[0]}</dt>" in page(report, lang)
