"""``verify --scan``: the fastest length or tree beside the one in use, judged again from its records."""

from __future__ import annotations

import json
import math

import pytest
from built_tiny import build_tiny, write_jsonl

from trtspec.cli import main
from trtspec.verify.gates import Verdict
from trtspec.verify.pitfalls import answer_pitfalls
from trtspec.verify.recheck import rejudge
from trtspec.verify.scan import judge_scan, no_scan


def option(label: str, length: float = 2.0, rate: float = 50.0) -> dict[str, object]:
    return {"label": label, "length": length, "nodes": 3.0, "tokens_per_s": rate, "changes": {}}


def rows(gain: float, count: int = 8) -> list[dict[str, object]]:
    return [
        {"prompt": f"p{at}", "tokens": 40 + at, "current_s": gain * (1 + at / 10), "best_s": 1 + at / 10}
        for at in range(count)
    ]


def judged(gain: float, *, best: str = "a chain of 5", none: float = 10.0):
    return judge_scan(
        rows(gain),
        options=[option(best, 3.0), option("a chain of 2")],
        current=option("a chain of 2"),
        none=option("no drafts", 1.0, none),
        priced=9,
        cross_fitted=True,
        load="8 prompts",
    )


def test_the_gain_is_the_quotient_of_the_seconds_and_decides_what_is_best():
    check = judged(1.25)
    assert check.verdict is Verdict.MEASURED
    assert not check.required
    assert check.measured == pytest.approx(1.25)
    assert check.evidence["best"]["label"] == "a chain of 5"
    pace = check.evidence["tokens_per_s"]
    assert pace["best"] / pace["in_use"] == pytest.approx(1.25)
    assert "a chain of 2" in check.summary
    assert "a chain of 5" in check.summary
    assert any("draft measure" in warning for warning in check.warnings)


@pytest.mark.parametrize(("gain", "best"), [(1.01, "a chain of 5"), (1.3, "a chain of 2"), (0.9, "other")])
def test_noise_and_the_same_shape_replace_nothing(gain, best):
    check = judged(gain, best=best)
    assert check.evidence["kept"]
    assert check.evidence["best"]["label"] == "a chain of 2"
    assert not check.warnings


def test_drafting_that_does_not_pay_is_said():
    assert any("drafting nothing is faster" in one for one in judged(1.0, none=1e9).warnings)


def test_it_is_judged_again_and_a_changed_row_is_seen():
    check = judged(1.25)
    assert rejudge(check.records) == [check]
    check.records.tables["prompts"][0]["best_s"] = 0.1
    assert rejudge(check.records)[0].measured != pytest.approx(1.25)


def test_it_answers_the_pitfall_and_a_skipped_one_does_not():
    recipe = {"speculation": {"kind": "ngram"}}

    def status(check):
        found = answer_pitfalls([check], recipe, {}, engine="e", fidelity="strict")
        return next(one for one in found if one.id == "untuned-draft")

    assert status(judged(1.25)).status == "answered"
    left = status(no_scan("no reason"))
    assert left.status == "open"


def test_verify_scans_and_the_bundle_is_computed_again(tmp_path, capsys):
    built = build_tiny(tmp_path / "e", dtype="float64")
    lines = [{"id": f"q{at}", "prompt": "rain tea " * (3 + at)} for at in range(3)]
    prompts = write_jsonl(tmp_path / "p.jsonl", lines)
    given = ["verify", str(built.folder), "--prompts", str(prompts), "--quick", "--max-new-tokens", "12"]
    given += ["--scan", "--json", "--bundle", str(tmp_path / "b")]
    main(given)
    report = json.loads(capsys.readouterr().out)["report"]
    check = next(one for one in report["checks"] if one["name"] == "draft_scan")
    assert check["verdict"] == "MEASURED"
    assert check["evidence"]["priced"] == len({*range(1, 17)})  # lengths 1 to 16, the recipe's own among them
    assert math.isfinite(check["measured"])
    assert next(one for one in report["pitfalls"] if one["id"] == "untuned-draft")["status"] == "answered"
    assert main(["report", "--recheck", str(tmp_path / "b")]) == 0


def test_what_cannot_be_scanned_is_said_before_anything_is_measured(tmp_path, capsys):
    built = build_tiny(tmp_path / "e")
    one = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "rain tea rain tea"}])
    assert main(["verify", str(built.folder), "--prompts", str(one), "--scan"]) == 2
    assert "at least two" in capsys.readouterr().err
    assert main(["verify", "--matrix", str(one), "--scan"]) == 2
    assert "--scan needs an ENGINE" in capsys.readouterr().err
