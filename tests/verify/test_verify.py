"""The whole protocol by its verb: verdicts to exit codes, reports whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import shlex
from pathlib import Path

import pytest
from built_tiny import build_tiny, keeps_near_misses, write_jsonl

from trtspec.cli import main
from trtspec.errors import InputError
from trtspec.prompts import HELDOUT_FILE, PROMPTS_FILE, load_prompts, load_texts
from trtspec.text import Tokenizer
from trtspec.verify import protocol, render, report
from trtspec.verify.gates import Check, Verdict
from trtspec.verify.settings import QUICK, Settings


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("data")
    chance = random.Random(1)
    words = ["tea", "or", "noise", "rain", "the", "lesson", "is", "here", "that", "one"]
    prompts = [
        {"id": f"q{i}", "messages": [{"role": "user", "content": " ".join(chance.sample(words, 3) * 2)}]}
        for i in range(5)
    ]
    texts = [{"text": " ".join(chance.choices(words, k=12))} for _ in range(8)]
    return write_jsonl(folder / "prompts.jsonl", prompts), write_jsonl(folder / "heldout.jsonl", texts)


def arguments(folder: Path, data: tuple[Path, Path], *more: str) -> list[str]:
    prompts, heldout = data
    given = ["verify", str(folder), "--prompts", str(prompts), "--heldout", str(heldout)]
    return [*given, "--quick", "--max-new-tokens", "16", *more]


def test_a_good_engine_passes_and_the_report_says_how(tmp_path, data, capsys):
    built = build_tiny(tmp_path / "good")
    output, page = tmp_path / "report.json", tmp_path / "report.md"
    code = main(arguments(built.folder, data, "-o", str(output), "--markdown", str(page)))
    shown = capsys.readouterr()
    assert code == 0, shown
    assert "verdict: PASS" in shown.out
    value = json.loads(output.read_text())
    assert value["schema"] == "trtspec.report/1"
    assert value["verdict"] == "PASS"
    assert value["recipe_digest"] == built.manifest.recipe_digest
    assert value["source_digest"] == built.manifest.source.digest
    assert value["machine"]["cores"] >= 1
    assert value["tools"]["torch"]
    by_name = {check["name"]: check for check in value["checks"]}
    assert by_name["lossless"]["verdict"] == "PASS"
    assert by_name["quality"]["verdict"] == "SKIPPED"
    assert by_name["lossless_float64"]["verdict"] == "PASS"
    assert by_name["lossless_float64"]["required"]
    assert by_name["speedup"]["measured"] > 0
    assert by_name["acceptance"]["verdict"] == "MEASURED"
    assert all(check["how"] for check in value["checks"] if check["verdict"] not in ("SKIPPED",))
    assert "| lossless | PASS | yes |" in page.read_text()


@pytest.mark.parametrize(("nats", "quick"), [(0.4, True), (1.0, False)], ids=["0.4 quick", "1.0 full"])
def test_an_acceptance_that_keeps_near_misses_exits_1(tmp_path, data, monkeypatch, capsys, nats, quick):
    """It accepts more and is faster; in 16 bit it hides in the noise."""
    built = build_tiny(tmp_path / "careless", dtype="bfloat16")
    monkeypatch.setattr("trtspec.embedded.engine.exact", keeps_near_misses(nats))
    given = arguments(built.folder, data)
    assert main(given if quick else [one for one in given if one != "--quick"]) == 1
    assert "FAIL          lossless_float64" in capsys.readouterr().out


def test_stages_are_reported_one_after_the_other(tmp_path, data, capsys):
    built = build_tiny(tmp_path / "stages")
    main(arguments(built.folder, data))
    lines = [
        line for line in capsys.readouterr().err.splitlines() if line.endswith("...") or ": done in" in line
    ]
    assert len(lines) >= 6
    for began, ended in zip(lines[::2], lines[1::2], strict=True):
        assert began.endswith(" ...")
        assert ended.startswith(began.removesuffix(" ...") + ": done in")


def test_help_shows_the_defaults_that_hold(capsys):
    main(["verify", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    full, quick = Settings(), QUICK
    shown = re.findall(r"--([a-z-]+) [A-Z ]+[^\[]*\[default: (\d+); quick: (\d+)[;\]]", text)
    assert len(shown) == 7
    for option, default, quick_default in shown:
        name = option.replace("-", "_")
        assert (int(default), int(quick_default)) == (getattr(full, name), getattr(quick, name))


def test_float64_proves_itself(tmp_path, data, capsys):
    built = build_tiny(tmp_path / "exact", dtype="float64")
    assert main(arguments(built.folder, data, "--json")) == 0
    checks = json.loads(capsys.readouterr().out)["report"]["checks"]
    assert [check["name"] for check in checks][:2] == ["lossless", "sampled"]
    assert checks[0]["evidence"]["near_misses"]["refused"] > 0


def test_a_gate_that_is_not_met_exits_1(tmp_path, data, capsys):
    built = build_tiny(tmp_path / "slow", gates="{min_acceptance_length: 3.99}")
    assert main(arguments(built.folder, data, "--json")) == 1
    value = json.loads(capsys.readouterr().out)
    assert value["report"]["verdict"] == "FAIL"
    assert value["report"]["exit_code"] == 1


def test_a_required_check_that_cannot_run_is_no_pass(tmp_path, data):
    """The recipe's rules refuse such gates; should one come through, skipping it must not pass."""
    built = build_tiny(tmp_path / "plain", speculation="{kind: none}")
    gates = built.recipe.gates.model_copy(update={"min_speedup": 1.1})
    demanding = dataclasses.replace(built, recipe=built.recipe.model_copy(update={"gates": gates}))
    settings = dataclasses.replace(QUICK, prompts=data[0], heldout=data[1], max_new_tokens=8)
    result = protocol.verify(demanding, settings)
    assert result.exit_code == 4
    assert [check.verdict for check in result.checks if check.name == "speedup"] == [Verdict.SKIPPED]


def test_a_plain_recipe_is_checked_for_batching(tmp_path, data, capsys):
    built = build_tiny(tmp_path / "plain", speculation="{kind: none}")
    assert main(arguments(built.folder, data)) == 0
    assert "at batch 1" in capsys.readouterr().out


def test_an_interruption_leaves_no_report(tmp_path, data, monkeypatch):
    built = build_tiny(tmp_path / "stopped")
    output = tmp_path / "report.json"

    def interrupted(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(protocol, "check_acceptance", interrupted)
    assert main(arguments(built.folder, data, "-o", str(output))) == 130
    assert list(tmp_path.glob("*report*")) == []


def test_bad_input_exits_2(tmp_path, data):
    assert main(["verify", str(tmp_path)]) == 2
    built = build_tiny(tmp_path / "x")
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{\n[]\n")
    assert main(arguments(built.folder, (bad, data[1]))) == 2
    assert main(arguments(built.folder, (tmp_path / "none.jsonl", data[1]))) == 2
    assert main(arguments(built.folder, data, "-o", str(tmp_path / "nowhere" / "r.json"))) == 2


# --------------------------------------------------------------------------- prompts and texts


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer.load(build_tiny(tmp_path_factory.mktemp("t")).target_dir)


def test_prompts_in_every_form(tmp_path, tokenizer):
    forms = [
        {"messages": [{"role": "user", "content": "hi"}]},
        {"prompt": "hi", "id": 7},
        {"text": "hi", "id": "x"},
    ]
    files = [write_jsonl(tmp_path / f"{number}.jsonl", [form]) for number, form in enumerate(forms)]
    prompts = [prompt for file in files for prompt in load_prompts(file, tokenizer, limit=9, max_tokens=100)]
    assert [prompt.id for prompt in prompts] == ["line-1", "7", "x"]
    assert prompts[0].tokens == prompts[1].tokens == prompts[2].tokens
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": f"hi {number}"} for number in range(3)])
    assert len(load_prompts(path, tokenizer, limit=2, max_tokens=100)) == 2


def test_every_bad_prompt_is_named(tmp_path, tokenizer):
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "ok", "id": 1}\n{"prompt": 3}\nnot json\n{"messages": []}\n'
        '{"prompt": "again", "id": 1}\n{"prompt": "' + "x" * 500 + '"}\n'
    )
    with pytest.raises(InputError) as caught:
        load_prompts(path, tokenizer, limit=9, max_tokens=100)
    assert sorted(problem.line for problem in caught.value.problems) == [2, 3, 4, 5, 6]


def test_texts_are_cut_and_counted(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "t.jsonl", [{"text": f"{n} two three four"} for n in "abcde"])
    texts = load_texts(path, tokenizer, total_tokens=12, max_tokens=6)
    assert [len(text) for text in texts] == [6, 6, 6]


@pytest.mark.parametrize("path", [PROMPTS_FILE, HELDOUT_FILE], ids=lambda path: path.name)
def test_what_ships_is_readable(path: Path, tokenizer):
    if path == PROMPTS_FILE:
        prompts = load_prompts(path, tokenizer, limit=1000, max_tokens=100_000)
        assert len(prompts) >= Settings().num_prompts
        assert len({prompt.tokens for prompt in prompts}) == len(prompts)
    else:
        texts = load_texts(path, tokenizer, total_tokens=10**9, max_tokens=100_000)
        assert len({tuple(text) for text in texts}) == len(texts)
        assert len(texts) >= 20


# --------------------------------------------------------------------------- reports


def made_report(*checks: Check) -> report.Report:
    return report.Report(
        engine="engines/x",
        recipe_name="x",
        recipe_digest="0" * 64,
        recipe={},
        source_digest="1" * 64,
        created="2026-01-01T00:00:00+00:00",
        argv=("trtspec", "verify"),
        tools={"torch": "2"},
        built_with={},
        machine={"processor": "p"},
        settings={},
        seconds=1.0,
        checks=checks,
    )


def test_numbers_that_are_not_finite_become_null(tmp_path):
    made = made_report(
        Check("a", Verdict.INCONCLUSIVE, "", True, measured=float("nan"), interval=(float("-inf"), 1.0))
    )
    (tmp_path / "r.json").write_bytes(report.to_bytes(made))
    value = json.loads((tmp_path / "r.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert value["checks"][0]["measured"] is None
    assert value["checks"][0]["interval"] == [None, 1.0]
    assert value["verdict"] == "INCONCLUSIVE"


def test_renderings_hold_every_check_and_warning():
    made = made_report(
        Check("one", Verdict.PASS, "all | good", True, measured=1.5, bound=1.2, sense="at least", n=3),
        Check("two", Verdict.ERROR, "bad " * 40, False, warnings=("look here",)),
    )
    assert made.exit_code == 0, "nobody asked for the one that could not be measured"
    for text in (render.terminal(made), render.markdown(made)):
        for word in (
            "one",
            "two",
            "PASS",
            "ERROR",
            "look here",
            "PASS (1 of 1 required checks passed; no valid measurement: two)",
        ):
            assert word in text
    assert max(len(line) for line in render.terminal(made, width=80).splitlines()) <= 80


def test_the_command_can_be_pasted():
    argv = ("trtspec", "verify", "my engines/x", "--prompts", "it's.jsonl")
    page = render.markdown(dataclasses.replace(made_report(), argv=argv))
    command = page.split("- command: `")[1].split("`")[0]
    assert tuple(shlex.split(command)) == argv


def test_the_quality_suite_through_the_verb(tmp_path, data, capsys):
    """Tasks, retrieval and degenerate text are in the report, and its bundle gives them again."""
    built = build_tiny(tmp_path / "good", gates="{max_task_loss: 0.1, max_degenerate_rise: 0.1}")
    rows = [{"kind": "choice", "prompt": "", "choices": [f"a{n}", f"b{n}"], "answer": 0} for n in range(80)]
    rows += [{"kind": "exact", "prompt": f"x{n}", "answer": "y", "max_new_tokens": 4} for n in range(40)]
    own, bundle = write_jsonl(tmp_path / "own.jsonl", rows), tmp_path / "bundle"
    more = ["--tasks", str(own), "--retrieval", "--no-sampled", "--bundle", str(bundle)]
    code = main([*arguments(built.folder, data, *more), "--json"])
    shown = capsys.readouterr()
    value = json.loads(shown.out)
    assert "report" in value, shown
    checks = {one["name"]: one for one in value["report"]["checks"]}
    assert code == 0
    assert checks["task:own"]["verdict"] == "PASS"
    assert checks["degenerate_text"]["verdict"] == "PASS"
    assert checks["degenerate_text"]["n"] == 45
    assert checks["retrieval"]["verdict"] == "MEASURED"
    assert main(["report", "--recheck", str(bundle)]) in (0, 4)
    assert "differs" not in capsys.readouterr().out


def test_a_bad_task_file_is_told_before_anything_runs(tmp_path, data, capsys):
    built = build_tiny(tmp_path / "good")
    own = write_jsonl(tmp_path / "own.jsonl", [{"kind": "essay", "prompt": "a"}])
    assert main(arguments(built.folder, data, "--tasks", str(own))) == 2
    shown = capsys.readouterr()
    assert "own.jsonl:1: kind is 'essay'" in shown.err
    assert "loading" not in shown.err
