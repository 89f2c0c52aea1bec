"""Regressions: what is worse than a stored report is found, what is not worse is left alone."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from made import full_report, made_report

from trtspec.cli import main
from trtspec.errors import InputError
from trtspec.ruler import Answer, Run
from trtspec.verify.against import MARGIN, PREFIX, read_old, with_regressions
from trtspec.verify.bundle import write_bundle
from trtspec.verify.gates import Check, Verdict
from trtspec.verify.load import Race, check_acceptance, check_speed
from trtspec.verify.quality import judge
from trtspec.verify.records import Records
from trtspec.verify.report import Report, to_bytes

PROMPTS = 12


def measured(seed: int, *, slower: float = 1.0, worse: float = 0.0, refused: float = 0.0) -> Report:
    """A report over made-up measurements of the same prompts; what makes one prompt differ from another is
    the same for every seed."""
    prompts, rng = np.random.default_rng(1), np.random.default_rng(seed)
    answers, runs = [], {"recipe": [], "no_speculation": []}
    for number in range(PROMPTS):
        eager, pace = prompts.uniform(0.3, 0.8), prompts.uniform(0.5, 2.0)
        steps = [1 + int(rng.binomial(3, max(eager - refused, 0))) for _ in range(60)]
        tokens = tuple(range(sum(steps)))
        accepted = sum(steps) - len(steps)
        answer = Answer(
            f"p{number}", tokens, "length", tuple(steps), 3 * len(steps), accepted, (3,) * len(steps)
        )
        answers.append(answer)
        for side, factor in (("recipe", 0.6 * slower), ("no_speculation", 1.0)):
            one = Answer(f"p{number}", tuple(range(32)), "length", (1,) * 32, 0, 0, (0,) * 32)
            seconds = [pace * factor * float(rng.lognormal(0, 0.03)) for _ in range(3)]
            runs[side].append([Run((one,), value, 32, ()) for value in seconds])
    acceptance = check_acceptance(answers, draft_limit=3, bound=None, contradictions=())
    race = Race(runs, ())
    # Over the baseline: no law ties its times to the steps of this made-up race.
    race = Race({"recipe": runs["recipe"], "baseline": runs["no_speculation"]}, ())
    speed = check_speed(race, check_name="speedup_over_baseline", name="recipe", over="baseline", bound=1.0)
    return made_report(quality(rng, worse), acceptance, speed)


def quality(rng: np.random.Generator, worse: float) -> Check:
    texts = np.random.default_rng(2)
    rows, target, baseline = [], [], []
    for text in range(16):
        base = [-float(texts.exponential(2.0)) for _ in range(60)]
        mine = [value - 0.05 - worse + float(rng.normal(0, 0.02)) for value in base]
        target.append(mine)
        baseline.append(base)
        rows += [
            {"text": text, "position": place, "target": a, "baseline": b, "same_top": True}
            for place, (a, b) in enumerate(zip(mine, base, strict=True))
        ]
    check = judge(target, baseline, bound=1.25, source="s", agreements=len(rows))
    return dataclasses.replace(
        check, records=Records("quality", {"bound": 1.25, "source": "s"}, {"tokens": rows})
    )


def verdicts(made: Report) -> dict[str, Verdict]:
    return {
        check.name.removeprefix(PREFIX): check.verdict
        for check in made.checks
        if check.name.startswith(PREFIX)
    }


def without_records(made: Report) -> Report:
    return dataclasses.replace(
        made, checks=tuple(dataclasses.replace(one, records=None) for one in made.checks)
    )


def test_the_same_engine_again_is_no_regression():
    """At most 5 % of whole suites may fail; of 60, 7 or more would be beyond chance (p < 0.04 at 5 %)."""
    old = measured(0)
    failing = sum(
        Verdict.FAIL in verdicts(with_regressions(measured(seed), old, "old")).values()
        for seed in range(1, 61)
    )
    assert failing <= 6


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"slower": 1.15}, "speedup_over_baseline"),
        ({"worse": 0.05}, "quality"),
        ({"refused": 0.15}, "acceptance"),
    ],
)
def test_a_planted_loss_is_caught_and_named(change, name):
    for seed in range(1, 9):
        made = with_regressions(measured(seed, **change), measured(0), "old")
        assert verdicts(made) == {
            other: Verdict.FAIL if other == name else Verdict.PASS for other in verdicts(made)
        }
        assert made.exit_code == 1
        found = next(one for one in made.checks if one.name == PREFIX + name)
        assert found.evidence["paired"]
        assert found.required


def test_pairs_see_what_intervals_do_not():
    """The very reason for records: the prompts differ more from each other than the engines do."""
    old, new = measured(0), measured(3, refused=0.08)
    assert verdicts(with_regressions(new, old, "old"))["acceptance"] is Verdict.FAIL
    made = with_regressions(without_records(new), without_records(old), "old")
    assert verdicts(made)["acceptance"] is Verdict.PASS
    assert not next(one for one in made.checks if one.name == PREFIX + "acceptance").evidence["paired"]


def test_intervals_apart_are_a_regression_without_records():
    old, new = without_records(measured(0)), without_records(measured(3, refused=0.4))
    assert verdicts(with_regressions(new, old, "old"))["acceptance"] is Verdict.FAIL
    assert verdicts(with_regressions(old, new, "old"))["acceptance"] is Verdict.PASS


def test_less_than_the_margin_fails_nothing():
    """Significant, and a trifle: paired token by token, half a percent is seen and does not matter."""
    made = with_regressions(measured(3, worse=0.5 * MARGIN), measured(0), "old")
    found = next(one for one in made.checks if one.name == PREFIX + "quality")
    assert found.interval is not None
    assert found.interval[0] > 1.0
    assert found.verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("before", "now", "verdict"),
    [
        (Verdict.PASS, Verdict.FAIL, Verdict.FAIL),
        (Verdict.PASS, Verdict.ERROR, Verdict.FAIL),
        (Verdict.INCONCLUSIVE, Verdict.FAIL, Verdict.FAIL),
        (Verdict.PASS, Verdict.SKIPPED, Verdict.INCONCLUSIVE),
        (Verdict.PASS, Verdict.INCONCLUSIVE, Verdict.INCONCLUSIVE),
        (Verdict.PASS, Verdict.PASS, Verdict.PASS),
        (Verdict.FAIL, Verdict.FAIL, Verdict.SKIPPED),
        (Verdict.FAIL, Verdict.PASS, Verdict.SKIPPED),
    ],
)
def test_verdicts_are_compared_where_there_are_no_numbers(before, now, verdict):
    old, new = (made_report(Check("lossless", one, "", True)) for one in (before, now))
    assert verdicts(with_regressions(new, old, "old")) == {"lossless": verdict}


@pytest.mark.parametrize("side", ["old", "new"])
def test_times_that_contradict_themselves_are_not_compared(side):
    """A busy machine's race keeps its records: they are no evidence, on neither side."""
    old, new = measured(0), measured(3, slower=1.5)
    assert verdicts(with_regressions(new, old, "old"))["speedup_over_baseline"] is Verdict.FAIL
    broken = [
        dataclasses.replace(one, verdict=Verdict.ERROR, required=False) if "speedup" in one.name else one
        for one in (old if side == "old" else new).checks
    ]
    pair = {"old": old, "new": new} | {side: made_report(*broken)}
    pair = {
        key: dataclasses.replace(
            made, checks=tuple(dataclasses.replace(one, required=False) for one in made.checks)
        )
        for key, made in pair.items()
    }
    made = with_regressions(pair["new"], pair["old"], "old")
    assert verdicts(made)["speedup_over_baseline"] is Verdict.SKIPPED


def test_records_that_do_not_fit_are_bad_input():
    old = measured(0)
    rows = [{"text": 0}]
    broken = [
        dataclasses.replace(one, records=Records("quality", {}, {"tokens": rows}))
        if one.name == "quality"
        else one
        for one in old.checks
    ]
    with pytest.raises(InputError, match="its records do not fit"):
        with_regressions(measured(1), made_report(*broken), "old")


def test_a_check_that_is_gone_is_not_forgotten():
    old = made_report(Check("a", Verdict.PASS, "", True), Check("b", Verdict.MEASURED, "", False))
    made = with_regressions(made_report(), old, "old")
    assert verdicts(made) == {"a": Verdict.INCONCLUSIVE, "b": Verdict.SKIPPED}
    assert made.exit_code == 4


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"settings": {"prompts_sha256": "other", "max_new_tokens": 48}}, "acceptance"),
        ({"settings": {"prompts_sha256": "a", "max_new_tokens": 12}}, "acceptance"),
        ({"settings": {"prompts_sha256": "a", "max_new_tokens": 48, "heldout_sha256": "x"}}, "quality"),
        ({"machine": {"processor": "other", "cores": 2}}, "speedup_over_baseline"),
    ],
)
def test_what_cannot_be_compared_is_said_and_not_compared(changes, name):
    old = measured(0)
    new = dataclasses.replace(measured(3, slower=2, worse=1, refused=0.5), **changes)
    made = with_regressions(new, old, "old.json")
    found = next(one for one in made.checks if one.name == PREFIX + name)
    lost = found.verdict is Verdict.FAIL and "PASS before" in found.summary
    assert lost or "not compared: " in found.summary
    assert "interval" not in found.evidence
    assert any(f"other {kind} than in old.json" in note for note in made.notes for kind in changes)


def test_another_recipe_is_said_and_compared():
    old = measured(0)
    changed = {**old.recipe, "speculation": {"kind": "ngram", "num_draft_tokens": 2}}
    new = dataclasses.replace(measured(3), recipe=changed, recipe_digest="f" * 64)
    made = with_regressions(new, old, "old")
    assert any("speculation.num_draft_tokens 4 before, 2 now" in note for note in made.notes)
    assert set(verdicts(made).values()) == {Verdict.PASS}


def test_another_model_is_refused(tmp_path):
    path = tmp_path / "old.json"
    path.write_bytes(to_bytes(made_report()))
    with pytest.raises(InputError, match="another model"):
        read_old(path, source_digest="2" * 64)
    assert read_old(path, source_digest="1" * 64) == made_report()


def test_regressions_are_not_compared_with_regressions():
    once = with_regressions(full_report(), full_report(), "old")
    twice = with_regressions(full_report(), once, "old")
    assert verdicts(twice) == verdicts(once)


def test_the_verb_compares_stored_reports_and_bundles(tmp_path, capsys):
    old, new = measured(0), measured(3, slower=1.2)
    places: dict[str, Any] = {}
    for name, made in (("old", old), ("new", new)):
        places[name] = tmp_path / f"{name}.json", tmp_path / name
        places[name][0].write_bytes(to_bytes(made))
        write_bundle(places[name][1], made)
    assert main(["report", str(places["new"][1]), "--against", str(places["old"][1]), "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)["report"]["checks"]
    failed = [one["name"] for one in checks if one["verdict"] == "FAIL"]
    assert failed == [PREFIX + "speedup_over_baseline"]
    assert main(["report", str(places["old"][0]), "--against", str(places["old"][0])]) == 0
    assert main(["report", str(places["old"][0]), "--against", str(tmp_path / "nowhere.json")]) == 2
