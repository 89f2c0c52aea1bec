"""A bundle's verdicts follow from its records, and whatever is changed in it is caught."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from built_tiny import build_tiny, write_jsonl
from made import made_report
from test_phrases import left

from trtspec.cli import main
from trtspec.errors import InputError
from trtspec.ruler import Answer, Run
from trtspec.verify import protocol
from trtspec.verify.approximate import Sampled, judge_approximate
from trtspec.verify.bundle import open_bundle, write_bundle
from trtspec.verify.divergence import judge_divergence
from trtspec.verify.gates import Check, Verdict
from trtspec.verify.quality import judge
from trtspec.verify.recheck import Recheck, recheck, rejudge
from trtspec.verify.records import Records
from trtspec.verify.report import Report, check_fields, plain
from trtspec.verify.settings import QUICK


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """What verify finds of a tiny engine in bfloat16, with its records."""
    folder = tmp_path_factory.mktemp("bundle")
    chance = random.Random(1)
    words = ["tea", "or", "noise", "rain", "the", "lesson", "is", "here", "that", "one"]
    contents = [" ".join(chance.sample(words, 3) * 2) for _ in range(5)]
    rows = [
        {"id": f"q{i}", "task": "chat", "messages": [{"role": "user", "content": one}]}
        for i, one in enumerate(contents)
    ]
    prompts = write_jsonl(folder / "p.jsonl", rows)
    gates = "{min_acceptance_length: 1.0, min_speedup: 0.01}"
    built = build_tiny(folder / "e", dtype="bfloat16", gates=gates)
    return protocol.verify(built, dataclasses.replace(QUICK, prompts=prompts, max_new_tokens=16))


@pytest.fixture
def bundle(made: Report, tmp_path: Path) -> Path:
    write_bundle(tmp_path / "b", made)
    return tmp_path / "b"


def test_every_measured_verdict_is_computed_again(made, bundle):
    result = recheck(bundle)
    assert result.exit_code == 0
    assert result.problems == ()
    assert {one.check: one.status for one in result.findings} == {
        check.name: "no records" if check.verdict is Verdict.SKIPPED else "same" for check in made.checks
    }
    assert sum(one.status == "same" for one in result.findings) >= 4


def test_what_such_a_report_says_is_all_chinese_in_chinese(made):
    assert left(made) == []


def test_the_records_are_tokens_and_requests(made, bundle):
    rows = [json.loads(line) for line in next(bundle.glob("records/*-acceptance/requests.jsonl")).open()]
    assert len(rows) == 5
    assert all(sum(row["emitted"]) == len(row["tokens"]) for row in rows)
    noise = [json.loads(line) for line in next(bundle.glob("records/*-lossless/noise.jsonl")).open()]
    assert {"text", "position", "rows", "nats"} == set(noise[0])


def test_nothing_heavy_is_needed(bundle):
    code = (
        "import sys; from trtspec.cli import main; code = main(sys.argv[1:]); "
        "print([m for m in ('torch', 'transformers', 'tokenizers') if m in sys.modules], code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "report", "--recheck", str(bundle)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.stdout.splitlines()[-1] == "[] 0", done


# --------------------------------------------------------------------------- tampering


def sealed(folder: Path) -> None:
    """Make the manifest agree with what the files are now, as somebody who tampers would."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in manifest["files"]:
        manifest["files"][name]["sha256"] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


def edit(path: Path, change: Callable[[Any], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_row(path: Path, number: int, change: Callable[[dict[str, Any]], None]) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows[number])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def table(folder: Path, check: str, name: str) -> Path:
    return next(folder.glob(f"records/*-{check}/{name}.jsonl"))


def check_of(value: dict[str, Any], name: str) -> dict[str, Any]:
    return next(check for check in value["checks"] if check["name"] == name)


def a_token(folder: Path) -> None:
    edit_row(table(folder, "lossless_float64", "other"), 1, lambda row: row["tokens"].__setitem__(4, 7))


def a_gap(folder: Path) -> None:
    edit_row(table(folder, "lossless_float64", "near_misses"), 0, lambda row: row.update(gap_nats=0.9))


def a_count(folder: Path) -> None:
    edit_row(table(folder, "acceptance", "requests"), 0, lambda row: row.update(accepted=row["accepted"] + 1))


def a_time(folder: Path) -> None:
    edit_row(table(folder, "speedup", "runs"), 0, lambda row: row.update(seconds=row["seconds"] * 1.001))


def a_token_nobody_counts(folder: Path) -> None:
    """No verdict rests on which token it was: another table of the same run has it too."""
    edit_row(table(folder, "acceptance", "requests"), 0, lambda row: row["tokens"].__setitem__(1, 7))


def a_step_more(folder: Path) -> None:
    edit_row(table(folder, "lossless", "reference"), 0, lambda row: row["emitted"].append(1))


def another_prompt(folder: Path) -> None:
    edit_row(table(folder, "lossless", "prompts"), 0, lambda row: row.update(id="another"))


def a_row_less(folder: Path) -> None:
    path = table(folder, "acceptance", "requests")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))


def no_json(folder: Path) -> None:
    table(folder, "acceptance", "requests").write_text("{\n")


def another_type(folder: Path) -> None:
    edit_row(table(folder, "acceptance", "requests"), 0, lambda row: row.update(tokens="x", emitted=None))


def a_verdict(folder: Path) -> None:
    edit(folder / "report.json", lambda value: check_of(value, "acceptance").update(verdict="FAIL"))


def not_required(folder: Path) -> None:
    edit(folder / "report.json", lambda value: check_of(value, "lossless_float64").update(required=False))


def a_number(folder: Path) -> None:
    edit(folder / "report.json", lambda value: check_of(value, "speedup").update(measured=3.0))


def a_summary(folder: Path) -> None:
    edit(folder / "report.json", lambda value: check_of(value, "lossless").update(summary="identical"))


def the_whole(folder: Path) -> None:
    edit(folder / "report.json", lambda value: value.update(verdict="FAIL", exit_code=1))


def a_check_less(folder: Path) -> None:
    edit(folder / "report.json", lambda value: value["checks"].pop(0))


def a_pitfall(folder: Path) -> None:
    edit(folder / "report.json", lambda value: value["pitfalls"][4].update(status="answered"))


def a_gate(folder: Path) -> None:
    def lower(manifest: dict[str, Any]) -> None:
        one = next(one for one in manifest["judged"] if one["checks"] == ["speedup"])
        one["arguments"]["bound"] = 0.001

    edit(folder / "manifest.json", lower)


def the_recipe(folder: Path) -> None:
    edit(folder / "report.json", lambda value: value["recipe"]["gates"].update(min_speedup=0.001))


def no_object(folder: Path) -> None:
    path = table(folder, "speedup", "runs")
    path.write_text("\n".join(["5", *path.read_text().splitlines()[1:]]) + "\n")


def no_path(folder: Path) -> None:
    edit(folder / "manifest.json", lambda value: value["judged"][0].update(tables={"prompts": [1]}))


def a_number_beyond_floats(folder: Path) -> None:
    def change(value: dict[str, Any]) -> None:
        check_of(value, "acceptance")["evidence"]["acceptance_rate"] = 10**400

    edit(folder / "report.json", change)


def another_engine_that_is_none(folder: Path) -> None:
    edit(folder / "report.json", lambda value: value.update(other={"recipe": 5}))


TAMPERINGS = [
    a_token, a_gap, a_count, a_time, a_token_nobody_counts, a_step_more, another_prompt, a_row_less, no_json,
    another_type, a_verdict, not_required, a_number, a_summary, the_whole, a_check_less, a_pitfall, a_gate,
    the_recipe, no_object, no_path, another_engine_that_is_none, a_number_beyond_floats,
]  # fmt: skip


@pytest.mark.parametrize("tamper", TAMPERINGS)
def test_tampering_is_caught_by_the_hashes(bundle, tamper):
    tamper(bundle)
    result = recheck(bundle)
    assert result.exit_code == 1
    assert tamper in (a_gate, no_path) or any("changed" in problem for problem in result.problems)


@pytest.mark.parametrize("tamper", TAMPERINGS)
def test_tampering_is_caught_without_them(bundle, tamper):
    tamper(bundle)
    sealed(bundle)
    result = recheck(bundle)
    assert not any("SHA-256" in problem for problem in result.problems)
    assert result.exit_code == 1, result


def test_an_untouched_bundle_that_is_sealed_again_passes(bundle):
    sealed(bundle)
    assert recheck(bundle).exit_code == 0


@pytest.mark.parametrize("name", ["lossless", "acceptance", "speedup"])
@pytest.mark.parametrize("instead", [None, "skipped"])
def test_a_check_that_a_gate_asks_for_cannot_be_taken_out(bundle, name, instead):
    """Out of report, records and manifest at once, or left there as one that was skipped and need not be."""

    def of_report(value: dict[str, Any]) -> None:
        found = check_of(value, name)
        if instead is None:
            value["checks"].remove(found)
        else:
            found.update(verdict="SKIPPED", required=False)

    def of_manifest(value: dict[str, Any]) -> None:
        value["judged"] = [one for one in value["judged"] if one["checks"] != [name]]

    assert recheck(bundle).problems == ()
    edit(bundle / "report.json", of_report)
    edit(bundle / "manifest.json", of_manifest)
    sealed(bundle)
    gate = {"lossless": "lossless", "acceptance": "min_acceptance_length", "speedup": "min_speedup"}[name]
    assert f"report.json: gates.{gate} is set, and no required check is about it" in recheck(bundle).problems


def problems_after(folder: Path, change: Callable[[Path], object]) -> Recheck:
    change(folder)
    return recheck(folder)


def test_missing_and_added_files_are_caught(bundle):
    gone = table(bundle, "speedup", "runs")
    result = problems_after(bundle, lambda _: gone.unlink())
    assert any("missing" in problem for problem in result.problems)
    assert next(one for one in result.findings if one.check == "speedup").status == "differs"
    assert result.exit_code == 1
    gone.write_text("")
    (bundle / "extra.txt").write_text("x")
    assert any("not in the manifest" in problem for problem in recheck(bundle).problems)


def no_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: no_numbers(one) for name, one in value.items()}
    if isinstance(value, list):
        return [no_numbers(one) for one in value]
    return math.nan if isinstance(value, float) else value


@pytest.mark.filterwarnings("error")
def test_records_that_are_no_numbers_are_a_finding(bundle):
    """A judge that refuses them as bad input must not end the recheck, nor may numpy complain aloud."""
    for path in bundle.glob("records/*/*.jsonl"):
        lines = [json.dumps(no_numbers(json.loads(line))) for line in path.read_text().splitlines()]
        path.write_text("".join(line + "\n" for line in lines))
    edit(bundle / "manifest.json", lambda value: value.update(judged=no_numbers(value["judged"])))
    sealed(bundle)
    assert recheck(bundle).exit_code == 1


def test_a_verdict_without_records_is_not_believed(bundle):
    def forget(manifest: dict[str, Any]) -> None:
        manifest["judged"] = [one for one in manifest["judged"] if one["checks"] != ["acceptance"]]

    edit(bundle / "manifest.json", forget)
    result = recheck(bundle)
    assert result.undecided == ("acceptance",)
    assert result.exit_code == 4


def test_a_manifest_cannot_lead_out(bundle, tmp_path):
    (tmp_path / "secret").write_text("x")
    edit(bundle / "manifest.json", lambda value: value["files"].update({"../secret": {"sha256": "0"}}))
    assert any("leads out" in problem for problem in recheck(bundle).problems)


def test_what_is_no_bundle_is_bad_input(tmp_path, bundle):
    with pytest.raises(InputError):
        open_bundle(tmp_path / "nowhere")
    for text in ("[]", "{", '{"schema": "x"}'):
        (bundle / "manifest.json").write_text(text)
        with pytest.raises(InputError):
            open_bundle(bundle)


def test_a_folder_that_holds_something_is_left_alone(made, bundle):
    with pytest.raises(InputError):
        write_bundle(bundle, made)


def test_an_unknown_judge_is_told(tmp_path):
    records = Records("of tomorrow", {}, {})
    made = made_report(Check("later", Verdict.PASS, "", True, records=records))
    write_bundle(tmp_path / "b", made)
    finding = recheck(tmp_path / "b").findings[0]
    assert "no judge 'of tomorrow'" in finding.differences[0]
    with pytest.raises(ValueError, match="of tomorrow"):
        rejudge(records)


# --------------------------------------------------------------------------- judges without an engine


def again(check: Check) -> list[Check]:
    """The checks out of records that went through JSON."""
    assert check.records is not None
    arguments, tables = json.loads(
        json.dumps([plain(check.records.arguments), plain(check.records.tables)], allow_nan=False)
    )
    return rejudge(Records(check.records.judge, arguments, tables))


def test_approximate_acceptance_again():
    chance = random.Random(3)

    def sampled(shift: float) -> Sampled:
        answers, logprobs = [], []
        for prompt in range(10):
            tokens = [tuple(chance.randrange(50) for _ in range(12)) for _ in range(2)]
            answers.append(
                tuple(
                    Answer(f"p{prompt}#{i}", one, "length", (4, 4, 4), 9, 9, (3, 3, 3))
                    for i, one in enumerate(tokens)
                )
            )
            logprobs.append(tuple(-12 * (1 + shift) - chance.random() for _ in tokens))
        return Sampled(tuple(answers), tuple(logprobs))

    mine, strict = sampled(0.1), sampled(0.0)
    answers = tuple(answer for row in mine.answers for answer in row)
    checks = judge_approximate(mine, strict, Run(answers, 1.0, 120, ()), temperature=1.0, margin=None)
    assert [check_fields(one) for one in again(checks[0])] == [check_fields(one) for one in checks]


@pytest.mark.parametrize("broken", [False, True])
def test_quality_and_divergence_again(broken):
    chance = random.Random(5)
    rows = [
        {"text": text, "position": place, "target": -chance.random(), "baseline": -chance.random()}
        | {"same_top": chance.random() < 0.9, "kl": chance.random()}
        for text in range(8)
        for place in range(5)
    ]
    if broken:
        rows[7] |= {"target": float("nan"), "kl": float("inf")}
    target = [[row["target"] for row in rows if row["text"] == text] for text in range(8)]
    baseline = [[row["baseline"] for row in rows if row["text"] == text] for text in range(8)]
    agreements = sum(row["same_top"] for row in rows)
    check = judge(target, baseline, bound=1.25, source="s", agreements=agreements)
    records = Records("quality", {"bound": 1.25, "source": "s"}, {"tokens": rows})
    check = dataclasses.replace(check, records=records)
    assert (check.verdict is Verdict.ERROR) == broken
    assert check_fields(again(check)[0]) == check_fields(check)
    bounds = {"max_mean_kl": 0.9, "max_p99_kl": None, "min_same_top_token": 0.5}
    checks = judge_divergence(rows, **bounds, source="s")
    if not broken:
        assert [check_fields(one) for one in again(checks[0])] == [check_fields(one) for one in checks]


# --------------------------------------------------------------------------- the verbs


def test_verify_writes_every_form_and_report_shows_them_again(tmp_path, capsys):
    built = build_tiny(tmp_path / "e", dtype="float64")
    prompts = write_jsonl(
        tmp_path / "p.jsonl", [{"prompt": "rain rain tea rain rain tea"}, {"prompt": "one"}]
    )
    files = {form: tmp_path / f"out.{form}" for form in ("markdown", "html", "junit")}
    given = ["verify", str(built.folder), "--prompts", str(prompts), "--quick", "--max-new-tokens", "12"]
    given += ["-o", str(tmp_path / "r.json"), "--bundle", str(tmp_path / "b"), "--lang", "zh"]
    given += [text for form, path in files.items() for text in (f"--{form}", str(path))]
    code = main(given)
    shown = capsys.readouterr().out
    assert "结论：" in shown
    assert hashlib.sha256((tmp_path / "b" / "manifest.json").read_bytes()).hexdigest() in shown
    written = {form: path.read_text() for form, path in files.items()}
    assert '<html lang="zh-Hans">' in written["html"]
    assert (tmp_path / "b" / "report.json").read_bytes() == (tmp_path / "r.json").read_bytes()
    assert main(["report", "--recheck", str(tmp_path / "b")]) == 0
    assert "every verdict follows" in capsys.readouterr().out
    for source in ("r.json", "b"):
        for path in files.values():
            path.unlink()
        arguments = [text for form, path in files.items() for text in (f"--{form}", str(path))]
        assert main(["report", str(tmp_path / source), "--lang", "zh", *arguments]) == code
        assert {form: path.read_text() for form, path in files.items()} == written
    capsys.readouterr()
    assert main(["report", str(tmp_path / "b"), "--json"]) == code
    value = json.loads(capsys.readouterr().out)["report"]
    assert value == json.loads((tmp_path / "r.json").read_text())


def test_verify_compares_with_a_stored_bundle(tmp_path, made, bundle, capsys):
    """The engine of the fixture again, shorter: what is not comparable is said; another model is refused."""
    built = build_tiny(tmp_path / "e", dtype="float64", seed=0)
    prompts = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "rain rain tea rain rain tea"}])
    given = ["verify", str(built.folder), "--prompts", str(prompts), "--quick", "--max-new-tokens", "8"]
    main([*given, "--against", str(bundle), "--json"])
    value = json.loads(capsys.readouterr().out)["report"]
    compared = [check["name"] for check in value["checks"] if check["name"].startswith("regression.")]
    assert compared == [f"regression.{check.name}" for check in made.checks]
    assert any(str(bundle) in note for note in value["notes"])
    other = build_tiny(tmp_path / "other", seed=9)
    assert main(["verify", str(other.folder), "--against", str(bundle)]) == 2
    assert "another model" in capsys.readouterr().err


def test_recheck_says_what_differs(bundle, capsys):
    assert main(["report", "--recheck", str(bundle), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == []
    a_verdict(bundle)
    assert main(["report", "--recheck", str(bundle)]) == 1
    shown = capsys.readouterr().out
    assert "verdict: 'FAIL' in the report, 'PASS' from the records" in shown
    assert "report.json: changed" in shown


def test_report_refuses_what_makes_no_sense(tmp_path, bundle, capsys):
    assert main(["report"]) == 2
    assert main(["report", str(bundle), "--recheck", str(bundle)]) == 2
    assert main(["report", "--recheck", str(bundle), "--html", str(tmp_path / "x.html")]) == 2
    assert main(["report", str(tmp_path / "none.json")]) == 2
    assert main(["report", str(bundle), "--html", str(tmp_path / "no" / "x.html")]) == 2
    assert main(["schema", "--report", "--markdown"]) == 2
    capsys.readouterr()
    assert main(["schema", "--report"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "trtspec.report/1"


def test_a_damaged_bundle_is_not_shown_as_a_report(bundle, capsys):
    a_verdict(bundle)
    assert main(["report", str(bundle)]) == 2
    assert "changed" in capsys.readouterr().err
    shutil.rmtree(bundle)
