"""Quality of two endpoints: planted losses FAIL, equal ones pass, what is missing is never a pass."""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from built_tiny import build_tiny, write_jsonl
from fake_endpoints import Fake, serving

from trtspec.cli import main
from trtspec.errors import InputError
from trtspec.prompts import PROMPTS_FILE, load_chats
from trtspec.recipe import Gates
from trtspec.text import Tokenizer
from trtspec.verify.bundle import write_bundle
from trtspec.verify.degenerate import degeneration, pieces
from trtspec.verify.endpoint import connect
from trtspec.verify.endpoint_check import EndpointSettings, verify_endpoints
from trtspec.verify.endpoint_quality import as_sent, plan_quality
from trtspec.verify.gates import Verdict
from trtspec.verify.prompt_scores import PromptScores, choose, first_scored
from trtspec.verify.recheck import recheck
from trtspec.verify.settings import Settings
from trtspec.verify.suite import judge_task, read_items
from trtspec.verify.tasks import JUDGE_PATIENCE, Grader, Item

SMALL = EndpointSettings(4, 12, rounds=1, requests=4, concurrency=4, parameters=False)
CHATS = load_chats(PROMPTS_FILE, limit=4, sample=True)
MARGIN = 0.1
ITEMS = 120
"""Enough to pass an equal server and to catch twice the margin."""


def write_tasks(folder: Path, count: int = ITEMS) -> Path:
    words = [
        {"task": "words", "kind": "exact", "prompt": f"{n} say elm", "answer": "elm", "max_new_tokens": 2}
        | {"extract": r"^ (\w+)"}
        for n in range(count)
    ]
    choices = [
        {"task": "choices", "kind": "choice", "prompt": f"{n} is", "choices": [" bad", " good"], "answer": 1}
        for n in range(count)
    ]
    return write_jsonl(folder / "mine.jsonl", [*words, *choices])


def judged(mine: Fake, baseline: Fake, tasks: Path, gates: Gates, **changes):
    settings = {"tasks": (tasks,), "retrieval": True, "retrieval_tokens": 150, "quality_tokens": 400}
    plan = plan_quality(Settings(**{**settings, **changes}), gates, None)
    with serving(mine, baseline) as urls:
        ends = [connect(url, timeout_s=5.0) for url in urls]
        report = verify_endpoints(*ends, CHATS, SMALL, quality=plan)
    return report, {check.name: check for check in report.checks}


GATES = Gates(max_task_loss=MARGIN, max_perplexity_ratio=1.1, max_retrieval_loss=0.3)


def test_equal_servers_pass_and_a_loss_of_twice_the_margin_fails(tmp_path):
    tasks = write_tasks(tmp_path)
    quick = {"step_s": 0.0, "scores": True}
    report, checks = judged(Fake(per_step=2, **quick), Fake(**quick), tasks, GATES)
    names = ("quality", "task:words", "task:choices", "retrieval")
    assert {name: checks[name].verdict for name in names} == dict.fromkeys(names, Verdict.PASS)
    assert checks["degenerate_text"].verdict is Verdict.MEASURED
    assert checks["task:words"].n == ITEMS
    assert "of the baseline endpoint" in checks["task:words"].summary
    assert report.exit_code == 0

    worse = Fake(wrong=2 * MARGIN + 0.05, blur=1.2, **quick)
    report, checks = judged(worse, Fake(**quick), tasks, GATES)
    for name in ("quality", "task:words", "task:choices"):
        assert checks[name].verdict is Verdict.FAIL, checks[name].summary
    assert checks["retrieval"].verdict is not Verdict.PASS  # 15 items
    assert report.exit_code == 1
    write_bundle(tmp_path / "b", report)
    again = recheck(tmp_path / "b")
    assert (again.problems, again.exit_code) == ((), 0), again
    assert all(one.status == "same" for one in again.findings if one.check in (*names, "degenerate_text"))
    # A gate that was loosened afterwards, in the report, its records and the manifest alike.
    milder = replace(report, settings={**report.settings, "gates": Gates(max_task_loss=0.4).model_dump()})
    write_bundle(tmp_path / "c", milder)
    assert any("judged by a gate of 0.1" in one for one in recheck(tmp_path / "c").problems)


def test_too_few_items_decide_nothing_and_say_how_many_would(tmp_path):
    quick = Fake(step_s=0.0, scores=True)
    _, checks = judged(quick, quick, write_tasks(tmp_path, 12), GATES, retrieval=False)
    check = checks["task:words"]
    assert check.verdict is Verdict.INCONCLUSIVE
    assert "12 items do not decide" in check.summary
    assert check.evidence["items_to_pass_an_equal_model"] > 12


def test_other_weights_claim_no_identity_and_need_a_gate_of_quality(tmp_path):
    tasks = write_tasks(tmp_path)
    other = EndpointSettings(**{**vars(SMALL), "other_weights": True})
    fakes = Fake(step_s=0.0, lossy=True, scores=True), Fake(step_s=0.0, scores=True)
    verdicts = []
    for gates, settings in ((GATES, other), (Gates(max_perplexity_ratio=None), other), (GATES, SMALL)):
        plan = plan_quality(Settings(tasks=(tasks,)), gates, None)
        with serving(*fakes) as urls:
            report = verify_endpoints(*map(connect, urls), CHATS, settings, quality=plan)
        verdicts.append(report.exit_code)
        first = report.checks[0]
        assert (first.name, first.verdict) == (
            ("greedy", Verdict.MEASURED) if settings is other else ("lossless", Verdict.INCONCLUSIVE)
        )
    assert verdicts == [0, 4, 4]  # four prompts cannot tell a fault from noise


@pytest.mark.parametrize("mine", ["openai", "llmapi"])
def test_what_a_server_does_not_tell_is_skipped_with_reason_and_count(mine, tmp_path):
    tasks = write_tasks(tmp_path)
    report, checks = judged(Fake(mine, step_s=0.0), Fake(step_s=0.0, scores=True), tasks, GATES)
    assert checks["quality"].verdict is Verdict.SKIPPED
    assert checks["quality"].required
    choices = checks["task:choices"]
    assert choices.verdict is Verdict.SKIPPED
    assert choices.summary.startswith(f"{ITEMS} of {ITEMS} items are not asked: a choice needs")
    assert checks["task:words"].verdict is Verdict.PASS
    assert report.exit_code == 4  # a gate without a measurement is no pass


def test_a_server_that_dies_keeps_what_was_scored_and_passes_nothing(tmp_path):
    tasks = write_tasks(tmp_path)
    dying = Fake(step_s=0.0, scores=True, dies_after=190)
    report, checks = judged(dying, Fake(step_s=0.0, scores=True), tasks, GATES)
    assert checks["task:words"].verdict is Verdict.PASS  # asked before it died
    check = checks["task:choices"]
    assert check.verdict is Verdict.INCONCLUSIVE
    assert 0 < check.n < ITEMS
    assert check.evidence["unscored"] == ITEMS - check.n
    assert "could not be scored: url: " in check.summary
    assert "\n" not in check.summary
    reasons = [row["target_error"] for row in check.records.tables["items"]]
    assert sum("not asked" in reason for reason in reasons) > 0
    assert checks["retrieval"].verdict is Verdict.INCONCLUSIVE
    assert report.exit_code == 4


@pytest.mark.parametrize("mine", ["openai", "llmapi"])
def test_chats_go_as_messages_or_as_text(mine, tmp_path):
    rows = [
        {"kind": "exact", "answer": "elm", "extract": r"^ (\w+)", "max_new_tokens": 2}
        | {"messages": [{"role": "system", "content": "Obey."}, {"role": "user", "content": f"{n} say elm"}]}
        for n in range(80)
    ]
    tasks = write_jsonl(tmp_path / "chats.jsonl", rows)
    chatting = Fake(step_s=0.0, refuse=("prompt",)) if mine == "openai" else Fake(step_s=0.0)
    plan = plan_quality(
        Settings(tasks=(tasks,)), Gates(max_task_loss=MARGIN, max_perplexity_ratio=None), None
    )
    with serving(Fake(mine, step_s=0.0), chatting) as urls:
        report = verify_endpoints(*map(connect, urls), CHATS, SMALL, quality=plan)
    (check,) = (one for one in report.checks if one.name == "task:chats")
    assert (check.verdict, check.n) == (Verdict.PASS, 80), check.summary


def test_a_server_that_gets_stuck_is_caught_without_a_gate(tmp_path):
    rows = [
        {"kind": "exact", "prompt": f"{n} say elm", "answer": "elm", "extract": r"^ (\w+)"} for n in range(40)
    ]
    plan = plan_quality(Settings(tasks=(write_jsonl(tmp_path / "t.jsonl", rows),)), Gates(), None)
    with serving(Fake(step_s=0.0, stuck=0.4), Fake(step_s=0.0)) as urls:
        report = verify_endpoints(*map(connect, urls), CHATS, SMALL, quality=plan)
    (check,) = (one for one in report.checks if one.name == "degenerate_text")
    assert check.verdict is Verdict.FAIL
    assert "one token" in check.summary


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "empty"),
        ("ha" * 40, "one token"),
        ("no no no no no no no no no", "one token"),
        ("I am sure of it. " * 8, "loop"),
        ("我们" * 12, "loop"),
        ("The quick brown fox jumps over the lazy dog, and then it sleeps for nine hours.", ""),
    ],
)
def test_degenerate_text_by_its_words(text, fault):
    assert degeneration(pieces(text)) == fault


# --------------------------------------------------------------------------- choices


def split(text: str, cuts: set[int]) -> list[str]:
    places = [0, *sorted(cut for cut in cuts if 0 < cut < len(text)), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(places)]


def test_scoring_begins_at_the_choice_or_before_a_token_that_reaches_into_it():
    chance = random.Random(1)
    prompt = "the prompt"
    for _ in range(300):
        ends = [prompt + tail for tail in (" good", " goods", " x")]
        cuts = {chance.randrange(1, len(prompt)) for _ in range(3)}
        whole = chance.random() < 0.5
        spelled = [split(end, cuts | ({len(prompt)} if whole else set())) for end in ends]
        first = first_scored(spelled, prompt)
        inside = ["".join(tokens[:first]) for tokens in spelled]
        assert len(set(inside)) == 1  # the same context for every choice
        assert first == 1 or prompt.startswith(inside[0])
        if whole:
            assert inside[0] == prompt


def test_a_choice_needs_to_be_strictly_the_most_likely_one():
    def score(prompt):
        scores = {" a": -1.0, " b": -2.0, " c": -1.0}
        tail = prompt[-2:]
        return PromptScores(("the", tail), (math.nan, scores[tail]), ("", ""))

    def chosen(right: int, *texts: str) -> float:
        item = Item("i", "t", "choice", "the", (), right=right, texts=texts, weights=(1,) * len(texts))
        return choose(item, score).value

    assert chosen(0, " a", " b") == 1.0
    assert chosen(1, " a", " b") == 0.0
    assert chosen(0, " a", " c") == 0.0  # a tie gains nothing


def test_a_rendered_chat_has_one_beginning(tmp_path):
    tokenizer = Tokenizer.load(build_tiny(tmp_path).target_dir)
    text = tokenizer.render_chat([{"role": "user", "content": "hi"}]) if tokenizer.has_chat_template else "hi"
    sent = as_sent(text, tokenizer)
    assert tokenizer.encode(sent) == tokenizer.encode(text)
    assert as_sent(text, None) == text


# --------------------------------------------------------------------------- a judge that fails


def write_judge(folder: Path, fails_on: str) -> str:
    script = folder / "judge.py"
    script.write_text(
        "import json, sys\nitem = json.load(open(sys.argv[1]))\n"
        f"sys.exit('no credit left') if {fails_on} else print(1.0)\n"
    )
    return f"{sys.executable} {script}"


def test_a_judge_that_fails_on_one_item_costs_that_item_and_no_pass(tmp_path):
    grader = Grader(write_judge(tmp_path, "item['id'] == '7'"))
    items = [Item(str(n), "t", "judge", "p", ()) for n in range(9)]
    scored = [grader(item, "out") for item in items]
    assert [one.value for one in scored[:7]] == [1.0] * 7
    assert math.isnan(scored[7].value)
    assert "no credit left" in scored[7].error
    rows = [
        {"task": "t", "id": item.id, "kind": "judge", "target": one.value, "target_error": one.error}
        | {"target_why": "", "baseline": 1.0, "baseline_error": ""}
        for item, one in zip(items * 20, scored * 20, strict=True)
    ]
    check = judge_task("t", rows, margin=0.1)
    assert check.verdict is Verdict.INCONCLUSIVE
    assert check.n == 160
    assert "20 more could not be scored" in check.summary
    good = [row for row in rows if not row["target_error"]]
    assert judge_task("t", good, margin=0.1).verdict is Verdict.PASS


def test_a_broken_judge_is_told_before_anything_is_measured(tmp_path):
    tasks = write_jsonl(tmp_path / "j.jsonl", [{"kind": "judge", "prompt": "p"}])
    settings = Settings(tasks=(tasks,), judge=write_judge(tmp_path, "True"))
    with pytest.raises(Exception, match="no credit left"):
        read_items(settings, Gates(), None, None)
    grader = Grader(write_judge(tmp_path, "True"))
    item = Item("i", "t", "judge", "p", ())
    errors = [grader(item, "out").error for _ in range(JUDGE_PATIENCE + 1)]
    assert errors[-1].startswith("not judged: the judge failed 5 times in a row")


# --------------------------------------------------------------------------- command line, harness


def test_the_command_line(tmp_path, capsys):
    tasks = write_tasks(tmp_path, 40)
    with serving(Fake(step_s=0.0, wrong=0.6, scores=True), Fake(step_s=0.0, scores=True)) as urls:
        given = ["verify", "--url", urls[0], "--baseline-url", urls[1], "--quick", "--num-prompts", "4"]
        more = ["--tasks", str(tasks), "--max-task-loss", "0.2", "--no-sampled", "--requests", "8"]
        assert main([*given, *more, "--json"]) == 1
        report = json.loads(capsys.readouterr().out)["report"]
        verdicts = {check["name"]: check["verdict"] for check in report["checks"]}
        assert verdicts["task:words"] == "FAIL"
        assert verdicts["quality"] == "MEASURED"
        assert report["settings"]["gates"]["max_task_loss"] == 0.2
        assert report["settings"]["tasks"] == [str(tasks)]
    assert main(["verify", "engines/none", "--max-task-loss", "0.1", "--tokenizer", "x"]) == 2
    told = capsys.readouterr().err
    assert "--max-task-loss: belongs to --url" in told
    assert "--tokenizer: belongs to --url" in told


def test_gates_of_a_recipe_judge_endpoints(tmp_path):
    from trtspec.cli.verify_quality import QualityOptions

    recipe = Path(__file__).parents[2] / "recipes" / "smollm2-w4a16-kv8-ngram.yaml"
    none = dict.fromkeys(QualityOptions.__dataclass_fields__)
    options = QualityOptions(**{**none, "tasks": (), "retrieval": False, "gates": recipe})
    plan = options.at_endpoints(Settings())
    assert plan.gates.max_perplexity_ratio is not None
    given = QualityOptions(**{**vars(options), "max_perplexity_ratio": 9.0})
    assert given.at_endpoints(Settings()).gates.max_perplexity_ratio == 9.0


def test_the_harness_over_endpoints(tmp_path, monkeypatch):
    """Its local-completions against test servers, and the adapter for Triton."""
    pytest.importorskip("lm_eval")
    pytest.importorskip("tenacity")
    from test_tasks import write_harness_tasks

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = write_harness_tasks(tmp_path)
    settings = Settings(lm_eval=("own_writing", "own_choice"), lm_eval_path=folder)
    plan = plan_quality(settings, Gates(max_perplexity_ratio=None), None)
    for mine in ("openai", "llmapi"):
        with serving(Fake(mine, step_s=0.0), Fake(step_s=0.0)) as urls:
            report = verify_endpoints(*map(connect, urls), CHATS, SMALL, quality=plan)
        checks = {check.name: check for check in report.checks}
        assert checks["task:own_writing"].n == 12
        assert checks["task:own_choice"].verdict is Verdict.SKIPPED
    with pytest.raises(InputError, match="knows no task nonsense"):
        plan_quality(Settings(lm_eval=("nonsense",)), Gates(), None)
