"""What stands in records is judged again as it was, and no further: gates, items of tasks, what runs."""

from __future__ import annotations

import json

import pytest
from made import made_report
from test_bundle import again

from trtspec.engine import Completion
from trtspec.recipe_file import parse_recipe
from trtspec.verify import gpu
from trtspec.verify.bundle import write_bundle
from trtspec.verify.gates import Check, Verdict, raw_as_records
from trtspec.verify.recheck_gates import unanswered
from trtspec.verify.records import Records
from trtspec.verify.report import check_fields
from trtspec.verify.suite import judge_task


def test_what_a_judge_keeps_as_raw_goes_into_the_bundle_and_not_into_the_report(tmp_path):
    raw = {"table": [{"parameter": "seed", "honoured": True, "found": "x"}], "labelled": [], "drafted": 3}
    check = Check("later", Verdict.PASS, "", True, evidence={"p": 0.5, "raw": raw})
    moved = raw_as_records(check)
    assert moved.evidence == {"p": 0.5}
    assert moved.records == Records("parameters", {}, {"raw": [raw]})
    assert raw_as_records(moved) is moved
    write_bundle(tmp_path / "b", made_report(moved))
    assert json.loads(next((tmp_path / "b").glob("records/*/raw.jsonl")).read_text()) == raw


def test_verdicts_on_engines_of_tensorrt_llm_again():
    def completion(name: str, tokens: tuple[int, ...], steps: int | None = 3) -> Completion:
        return Completion(name, tokens, "length", steps, 6, 4)

    left = [completion("a", (1, 2, 3)), completion("b", (4, 5, 6))]
    right = [completion("a", (1, 2, 3)), completion("b", (4, 5, 7))]
    checks = [
        gpu.check_same("lossless", left, right, (left[:1], left), drafts=8, required=True),
        gpu.check_same("lossless", left[:1], left, None, drafts=None, required=True),
        gpu.check_acceptance(left, draft_limit=4, bound=1.0),
        gpu.check_acceptance(left, draft_limit=0, bound=None, all_drafted=9),
        gpu.check_speed(
            "speedup", [[1.0, 1.1], [2.0, 2.2]], [[2.0, 2.1], [3.0, 3.3]], tokens=(8, 8), bound=1.2
        ),
    ]
    for check in checks:
        assert check_fields(again(check)[0]) == check_fields(check)
    assert checks[-1].evidence["interleaved"] is False


def test_a_gate_on_losslessness_is_answered_by_the_proof_where_16_bit_cannot_tell():
    undecided = Check("lossless", Verdict.INCONCLUSIVE, "near ties", False)
    proof = Check("lossless_float64", Verdict.PASS, "same", True)
    recipe = parse_recipe(
        b"version: 1\nname: x\nmodel: {source: a}\nbackend: {kind: embedded}\ngates: {lossless: true}\n"
    ).model_dump(mode="json")
    assert unanswered(made_report(undecided, proof, recipe=recipe)) == []
    assert len(unanswered(made_report(undecided, recipe=recipe))) == 1
    asked = Check("lossless_float64", Verdict.PASS, "same", False)
    assert len(unanswered(made_report(undecided, asked, recipe=recipe))) == 1


def test_a_score_that_its_output_does_not_get_is_seen():
    exact = {"answers": ["Four"], "extract": r"#### (\w+)", "ignore_case": True}
    told = {"task": "t", "target_error": "", "baseline_error": "", "target_why": "", "baseline_why": ""}
    rows = [
        {**told, "id": "a", "kind": "exact", "asked": exact, "target": 1.0, "baseline": 0.0,
         "target_output": "so #### four", "baseline_output": "four"},
        {**told, "id": "b", "kind": "regex", "asked": {**exact, "answers": ["^5$"], "extract": ""},
         "target": 0.0, "baseline": 1.0, "target_output": "55", "baseline_output": "4\n5\n"},
        {**told, "id": "c", "kind": "choice", "asked": {"right": 1}, "target": 1.0, "baseline": 0.0,
         "target_logprobs": [-2.0, -1.0], "baseline_logprobs": [-1.0, -1.0]},
        {**told, "id": "d", "kind": "code", "asked": None, "target": 1.0, "baseline": 1.0},
    ]  # fmt: skip
    assert judge_task("t", rows, margin=None).verdict is Verdict.MEASURED
    for number, change in (
        (0, {"baseline": 1.0}), (0, {"target_output": "five"}), (1, {"target": 1.0}),
        (1, {"baseline_output": "6"}), (2, {"baseline": 1.0}), (2, {"target_logprobs": [-1.0, -2.0]}),
    ):  # fmt: skip
        altered = [{**row, **change} if at == number else row for at, row in enumerate(rows)]
        check = judge_task("t", altered, margin=None)
        assert check.verdict is Verdict.ERROR, change
        assert f"what {rows[number]['id']} answered" in check.summary
    believed = [{**row, "target": 0.0} if row["id"] == "d" else row for row in rows]
    assert judge_task("t", believed, margin=None).verdict is Verdict.MEASURED  # code is not run again
    older = [{key: value for key, value in row.items() if key != "asked"} for row in rows]
    assert judge_task("t", older, margin=None).verdict is Verdict.MEASURED


@pytest.mark.parametrize("kind", ["code", "judge"])
def test_a_program_in_the_records_is_not_run(tmp_path, kind):
    """A bundle is somebody's: its rows may claim that an answer was code."""
    told = {"task": "t", "target_error": "", "baseline_error": "", "target_why": "", "baseline_why": ""}
    program = f"open({str(tmp_path / 'ran')!r}, 'w')"
    tmp_path.chmod(0o777)
    asked = {"answers": [program], "extract": "", "ignore_case": False}
    row = {**told, "id": "a", "kind": kind, "asked": asked, "target": 1.0, "baseline": 1.0,
           "target_output": program, "baseline_output": program}  # fmt: skip
    assert judge_task("t", [row], margin=None).verdict is Verdict.MEASURED
    assert not (tmp_path / "ran").exists()
    with pytest.raises(ValueError, match="no pattern"):
        judge_task("t", [{**row, "kind": "regex", "asked": {**asked, "answers": ["("]}}], margin=None)
