"""Tasks: what a file may say, how answers are scored, what the sandbox holds, and the suite as a whole."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path

import pytest
from built_tiny import build_tiny, write_jsonl

from trtspec.backends import open_engine
from trtspec.engine import LawScores, Scores
from trtspec.errors import InputError, MissingError
from trtspec.recipe import Gates
from trtspec.text import Tokenizer
from trtspec.verify import harness
from trtspec.verify.gates import Verdict
from trtspec.verify.recheck import rejudge
from trtspec.verify.retrieval import judge_retrieval, measure_retrieval, needles
from trtspec.verify.sandbox import Limits, isolated, run_code
from trtspec.verify.settings import Settings
from trtspec.verify.suite import Side, check_retrieval, check_tasks, judge_task, plan_suite
from trtspec.verify.tasks import (
    TASKS_FILE,
    Item,
    cut,
    grade,
    judged,
    load_tasks,
    program_of,
    score_choice,
    score_items,
)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """(tokenizer, one engine, another with other weights)"""
    folder = tmp_path_factory.mktemp("tasks")
    built, other = build_tiny(folder / "a"), build_tiny(folder / "b", seed=1)
    tokenizer = Tokenizer.load(built.target_dir)
    return tokenizer, open_engine(built, "recipe"), open_engine(other, "no_speculation")


def item(kind: str, *answers: str, **fields) -> Item:
    return Item("i", "t", kind, fields.pop("prompt", "p"), (1,), answers=answers, **fields)


def test_every_bad_line_is_told(engines, tmp_path):
    path = write_jsonl(
        tmp_path / "bad.jsonl",
        [
            {"kind": "exact", "prompt": "a", "answer": "b"},
            {"kind": "essay", "prompt": "a"},
            {"kind": "exact", "prompt": "a"},
            {"kind": "exact", "prompt": "a", "messages": [], "answer": "b"},
            {"kind": "regex", "prompt": "a", "answer": "("},
            {"kind": "choice", "prompt": "", "choices": ["x", "x"], "answer": 0},
            {"kind": "choice", "prompt": "", "choices": ["x", "y"], "answer": 2},
            {"kind": "code", "prompt": "a", "answer": "assert 1", "anwser": 1, "max_new_tokens": 0},
            {"kind": "judge", "prompt": "a"},
            {"kind": "exact", "prompt": "a" * 900, "answer": "b", "id": "line-1"},
            {"kind": "exact", "prompt": "a", "answer": "b", "stop": [""]},
            {"kind": "exact", "prompt": "a", "answer": "b", "task": "x" * 121},
            {"kind": "exact", "prompt": "a", "answer": "b", "task": "PASS\nverdict: PASS"},
            {"kind": "exact", "prompt": "a", "answer": "b", "task": "\u202eSSAP"},
        ],
    )
    with pytest.raises(InputError) as caught:
        load_tasks(path, engines[0], max_seq_tokens=200)
    text = str(caught.value)
    assert [f"bad.jsonl:{line}:" in text for line in range(1, 15)] == [False] + [True] * 13
    for part in (
        "kind is 'essay'; allowed: exact, regex, choice, code, judge",
        "answer must be text, not empty",
        "needs either prompt or messages",
        "answer is no pattern",
        "two or more different texts",
        "0 to 1",
        "unknown field 'anwser'",
        "max_new_tokens must be a whole number from 1",
        "needs a judge command (--judge)",
        "limits.max_seq_tokens is 200",
        "id 'line-1' occurs twice",
        "stop must be a list",
        "14: task must be one line of at most 120 characters",
    ):
        assert part in text
    with pytest.raises(InputError, match="holds no items"):
        load_tasks(write_jsonl(tmp_path / "none.jsonl", []), engines[0], max_seq_tokens=200)


def test_the_tasks_that_ship_are_well_formed(engines):
    items = load_tasks(TASKS_FILE, engines[0], max_seq_tokens=1000)
    assert len(items) == 114
    assert {one.task for one in items} == {"language_basics"}
    rights = [one.right for one in items if len(one.choices) == 2]
    assert abs(sum(rights) - len(rights) / 2) <= 1  # no answer by position
    some = load_tasks(TASKS_FILE, engines[0], max_seq_tokens=1000, limit=10)
    assert len({one.id.split("-")[0] for one in some}) == 4


@pytest.mark.parametrize(
    ("one", "output", "value"),
    [
        (item("exact", "42"), " 42\n", 1.0),
        (item("exact", "42", "forty-two"), "forty-two", 1.0),
        (item("exact", "42"), "It is 42", 0.0),
        (item("exact", "42", extract=r"#### (-?\d+)"), "7\n#### 41\nno\n#### 42", 1.0),
        (item("exact", "42", extract=r"#### (-?\d+)"), "42", 0.0),
        (item("exact", "Yes", ignore_case=True), "yes", 1.0),
        (item("regex", r"^b\w+"), "a\nbc", 1.0),
        (item("regex", r"^b\w+"), "a bc", 0.0),
        (item("code", "assert f(2) == 4", prefix="def f(x):\n"), "    return 2 * x", 1.0),
        (item("code", "assert f(2) == 4", prefix="def f(x):\n"), "    return x", 0.0),
        (item("code", "assert f(2) == 4"), "Sure:\n```python\ndef f(x):\n    return x + 2\n```\nDone", 1.0),
    ],
)
def test_grades(one: Item, output: str, value: float):
    assert grade(one, output)[0] == value


def test_stops_cut_at_the_first():
    assert cut("a\ndef b\nclass c", ["\nclass", "\ndef"]) == "a"
    assert cut("abc", []) == "abc"


SECONDS = Limits(seconds=1.0)


def test_a_program_that_multiplies_is_stopped_by_the_number_of_processes():
    """Root is no exception: without the change of user, this makes all 1,500."""
    child = "        time.sleep(8)\n        os._exit(0)\n"
    program = "import os, time\nfor _ in range(1500):\n    if os.fork() == 0:\n" + child
    outcome = run_code(program, SECONDS)
    assert not outcome.passed
    assert "Resource temporarily unavailable" in outcome.why


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("assert 1 == 2, 'no'", "AssertionError: no"),
        ("import os; os._exit(0)", "it ended before its last line"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("import os; os._exit(2)", "exit code 2"),
        ("x = 'a' * (3 << 30)", "MemoryError"),
        ("open('big', 'wb').write(bytes(20_000_000))", "File too large"),
        ("import resource as r; r.setrlimit(r.RLIMIT_AS, (1 << 40, 1 << 40))", "not allowed"),
        ("while True: pass", "not done after 1 s"),
        ("def (", "SyntaxError"),
        ("import os\nassert os.environ.get('PLANTED')", "AssertionError"),
    ],
)
def test_code_that_must_not_pass(program: str, why: str, monkeypatch):
    monkeypatch.setenv("PLANTED", "secret")
    # A busy machine may take a second to start Python; only the endless program needs its end soon.
    outcome = run_code(program, SECONDS if "not done" in why else Limits(seconds=30.0))
    assert not outcome.passed
    if not ("resource" in program and not isolated()):  # root without a namespace may raise limits
        assert why in outcome.why


def test_code_that_passes_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run_code("print('x' * 100_000)\nopen('y', 'w').write('z')").passed
    assert list(tmp_path.iterdir()) == []
    deep = "import os\nfor _ in range(1500):\n    os.mkdir('a')\n    os.chdir('a')\n"
    assert run_code(deep, Limits(seconds=30.0)).passed  # deeper than Python's own removal goes
    assert list(tmp_path.iterdir()) == []


def test_code_has_no_network_where_the_kernel_allows():
    if not isolated():
        pytest.skip("no user namespaces here")
    program = (
        "import socket\nnames = [name for _, name in socket.if_nameindex()]\nassert names == ['lo'], names"
    )
    assert run_code(program).passed
    assert not run_code("import socket; socket.create_connection(('192.0.2.1', 80), 1)", SECONDS).passed


def test_a_judge_reads_the_item_and_prints_a_number(tmp_path):
    script = tmp_path / "judge.py"
    script.write_text(
        "import json, sys\nitem = json.load(open(sys.argv[1]))\nprint('thinking')\n"
        "print(1.0 if item['answer'] in item['output'] else 0.25)\n"
    )
    command = f"{sys.executable} {script}"
    assert judged(command, item("judge", "cat"), "a cat") == 1.0
    assert judged(command, item("judge", "cat"), "a dog") == 0.25
    script.write_text("print('good')")
    with pytest.raises(InputError, match="number from 0 to 1, it is 'good'"):
        judged(command, item("judge", "cat"), "a cat")
    with pytest.raises(MissingError):
        judged("no-such-judge-program", item("judge", "cat"), "a cat")


@pytest.mark.parametrize("printed", ["'1' * 3000000", "'0.5\\n' * 1000000"])
def test_a_judge_that_floods_is_ended(tmp_path, printed):
    script = tmp_path / "judge.py"
    script.write_text(f"import sys\nwhile True: sys.stdout.write({printed})")
    with pytest.raises(InputError, match="printed over"):
        judged(f"{sys.executable} {script}", item("judge", "cat"), "a cat")


@pytest.mark.parametrize("command", ["", "'unclosed", "no-such-judge-program x"])
def test_a_judge_that_cannot_run_is_refused_before_anything_runs(engines, command):
    tokenizer, _, _ = engines
    with pytest.raises((InputError, MissingError), match="judge"):
        plan_suite(Settings(judge=command), Gates(), tokenizer, 200)


def test_a_choice_is_scored_by_its_own_tokens(engines, tmp_path):
    """The oracle: log-probabilities summed by hand, whether there is a prompt, a chat or neither."""
    tokenizer, engine, _ = engines
    values = [
        {"kind": "choice", "prompt": "The sky is", "choices": [" blue", " a loaf of bread"], "answer": 0},
        {"kind": "choice", "prompt": "", "choices": ["A cat sleeps.", "A cat sleep."], "answer": 0},
        {
            "kind": "choice",
            "messages": [{"role": "user", "content": "hi"}],
            "choices": ["hello", "bye"],
            "answer": 1,
            "normalize": "bytes",
        },
    ]
    for one in load_tasks(write_jsonl(tmp_path / "c.jsonl", values), tokenizer, max_seq_tokens=200):
        scored = score_choice(one, engine)
        sums = [math.fsum(engine.score(c).logprobs[one.first - 1 :]) for c in one.choices]
        expected = [value / weight for value, weight in zip(sums, one.weights, strict=True)]
        assert list(scored.logprobs) == expected
        assert scored.value == float(max(range(2), key=expected.__getitem__) == one.right)
        assert all(c[: one.first] == one.tokens[: one.first] for c in one.choices)


class _Flat:
    """A scorer that cannot tell anything apart."""

    def score(self, tokens, chunk_tokens=None):
        return Scores([0.0] * (len(tokens) - 1), [0] * (len(tokens) - 1))


def test_ties_gain_nothing():
    one = Item("i", "t", "choice", "", (1,), right=0, choices=((1, 2), (1, 3)), first=1, weights=(1, 1))
    assert score_choice(one, _Flat()).value == 0.0


def test_the_suite_on_engines(engines, tmp_path):
    """The same engine differs in nothing; records recompute every verdict; a bundle's JSON is enough."""
    tokenizer, engine, other = engines
    values = [
        {"kind": "choice", "prompt": f"{n} is", "choices": [" q", " w", " z"], "answer": n % 3}
        for n in range(40)
    ]
    values += [{"kind": "exact", "prompt": f"say {n}", "answer": "x", "max_new_tokens": 20} for n in range(4)]
    path = write_jsonl(tmp_path / "own.jsonl", values)
    gates = Gates(max_task_loss=0.1)
    settings = Settings(tasks=(path,))
    plan = plan_suite(settings, gates, tokenizer, 256)

    def stage(name):
        return lambda done, total: None

    side = Side(engine, engine, 3)
    checks, written = check_tasks(plan, side, side, tokenizer, settings, gates, stage)
    assert [check.name for check in checks] == ["task:own"]
    assert checks[0].verdict is Verdict.PASS
    assert checks[0].measured == 0.0
    assert [row["id"] for row in written] == [f"line-{n}" for n in range(41, 45)]
    different, _ = check_tasks(plan, side, Side(other, other, 0), tokenizer, settings, gates, stage)
    assert different[0].evidence["gained"] + different[0].evidence["lost"] > 0
    for check in (*checks, *different):
        stored = json.loads(json.dumps({"a": check.records.arguments, "t": check.records.tables}))
        again = rejudge(type(check.records)(check.records.judge, stored["a"], stored["t"]))
        assert again == [check]


def test_a_gate_brings_the_tasks_that_ship(engines):
    plan = plan_suite(Settings(), Gates(max_task_loss=0.1), engines[0], 512)
    assert len(plan.items) == 114
    assert plan_suite(Settings(), Gates(), engines[0], 512).items == ()
    assert plan_suite(Settings(), Gates(max_retrieval_loss=0.1), engines[0], 512).retrieval


def test_an_item_given_twice_is_refused(engines, tmp_path):
    """Under another id too: a hundred copies of one item would pass any gate."""
    one = {"kind": "exact", "prompt": "a", "answer": "b"}
    copies = [{**one, "id": f"i{n}"} for n in range(3)]
    with pytest.raises(InputError) as caught:
        load_tasks(write_jsonl(tmp_path / "t.jsonl", copies), engines[0])
    assert str(caught.value).count("says the same as line 1") == 2
    others = [one, {**one, "prompt": "c"}, {**one, "answer": "d"}, {**one, "task": "other"}]
    assert len(load_tasks(write_jsonl(tmp_path / "u.jsonl", others), engines[0])) == 4


def test_two_files_may_not_share_a_task(engines, tmp_path):
    paths = tuple(
        write_jsonl(tmp_path / f"{n}.jsonl", [{"kind": "exact", "prompt": "a", "answer": "b", "task": "t"}])
        for n in "ab"
    )
    with pytest.raises(InputError, match="task t is in an earlier file too"):
        plan_suite(Settings(tasks=paths), Gates(), engines[0], 512)


def test_scores_that_are_no_numbers_are_an_error():
    rows = [
        {"id": str(n), "kind": "choice", "target": 1.0, "baseline": 1.0, "target_why": ""} for n in range(50)
    ]
    assert judge_task("t", rows, margin=0.1).verdict is Verdict.PASS
    for broken in (math.nan, None):
        rows[3]["target"] = broken
        assert judge_task("t", rows, margin=0.1).verdict is Verdict.ERROR


# --------------------------------------------------------------------------- retrieval


class _Reader:
    """Finds the number if the tokens of the needle are among the last ``sees``: a perfect or a shortsighted
    reader."""

    max_seq_tokens = 512

    def __init__(self, sees: int) -> None:
        self.sees = sees

    def score_law(self, tokens, sampling, *, first):
        window = list(tokens[-self.sees :])
        above = []
        for position in range(first, len(tokens)):
            known = list(tokens[max(0, position - 12) : position])
            follow = [
                window[i + 12]
                for i in range(len(window) - 12)
                if window[i : i + 12] == known and i + 12 + len(tokens) - len(window) < position
            ]
            above.append(0.0 if follow[:1] == [tokens[position]] else 0.5)
        return LawScores([0.0] * len(above), above=above)


def test_needles_are_where_they_should_be(engines):
    tokenizer = engines[0]
    items = needles(tokenizer, longest=400)
    assert len(items) == 15
    for one in items:
        text = tokenizer.decode(one.tokens)
        number = tokenizer.decode(one.tokens[one.first :]).strip()
        assert len(number) == 5
        assert number.isdigit()
        assert text.count(number) == 2
        assert one.length <= 400
    long = [one for one in items if one.length > 350]
    assert len(long) == 5
    places = [tokenizer.decode(one.tokens).find("The secret number") for one in long]
    assert places == sorted(places)
    with pytest.raises(InputError, match="too short to hide"):
        needles(tokenizer, longest=40)


def test_a_cache_that_forgets_is_caught(engines):
    """Perfect against perfect passes, one that sees half of it fails; a blind baseline decides nothing."""
    items = needles(engines[0], longest=400, per_cell=4)
    perfect, short, blind = _Reader(10_000), _Reader(120), _Reader(1)
    same = judge_retrieval(measure_retrieval(perfect, perfect, items), margin=0.1)
    assert same.verdict is Verdict.PASS
    assert same.evidence["score_baseline"] == 1.0
    worse = judge_retrieval(measure_retrieval(short, perfect, items), margin=0.1)
    assert worse.verdict is Verdict.FAIL
    nothing = judge_retrieval(measure_retrieval(perfect, blind, items), margin=0.1)
    assert nothing.verdict is Verdict.INCONCLUSIVE
    assert "can tell nothing" in nothing.summary


def test_found_means_that_greedy_decoding_would_write_it(engines):
    """Against the most likely tokens of a whole pass, for hidden numbers and for what the engine writes."""
    tokenizer, engine, _ = engines
    for one in needles(tokenizer, longest=128)[:6]:
        prompt = one.tokens[: one.first]
        written = [*prompt]
        for _ in range(3):
            written.append(engine.score([*written, 5]).top_tokens[-1])
        for tokens in (one.tokens, tuple(written), (*written[:-1], (written[-1] + 1) % 256)):
            row = measure_retrieval(engine, engine, [dataclasses.replace(one, tokens=tokens)])[0]
            scores = engine.score(tokens)
            tops, logprobs = scores.top_tokens[one.first - 1 :], scores.logprobs[one.first - 1 :]
            assert row["target"] == (tops == list(tokens[one.first :]))
            assert row["target_logprob"] == pytest.approx(math.fsum(logprobs), rel=1e-4)
        assert measure_retrieval(engine, engine, [dataclasses.replace(one, tokens=tuple(written))])[0][
            "target"
        ]


def test_retrieval_on_an_engine(engines):
    tokenizer, engine, _ = engines
    check = check_retrieval(
        engine, engine, tokenizer, Settings(), Gates(), lambda name: lambda done, total: None
    )
    assert check.verdict is Verdict.MEASURED
    assert check.measured == 0.0


# --------------------------------------------------------------------------- third-party data, the harness


def test_human_eval_runs_in_the_sandbox(shared_data):
    path = shared_data / "tasks" / "humaneval.jsonl"
    if not path.is_file():
        pytest.skip("no tasks/humaneval.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()[:6]]
    for row in rows:
        one = item("code", f"{row['test']}\ncheck({row['entry_point']})", prefix=row["prompt"])
        assert run_code(program_of(one, row["canonical_solution"])).passed
        assert not run_code(program_of(one, "    return None\n")).passed


def test_without_the_harness_it_is_said(engines, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(MissingError, match="pip install 'lm_eval"):
        plan_suite(Settings(lm_eval=("arc_easy",)), Gates(), engines[0], 512)


def write_harness_tasks(folder: Path) -> Path:
    """Two tasks of the harness with local data: a choice, and an answer to be generated."""
    rows = [{"q": f"{n} plus {n} is", "good": f" {2 * n}", "bad": " x"} for n in range(12)]
    data = write_jsonl(folder / "data.jsonl", rows)
    head = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
    (folder / "own_choice.yaml").write_text(
        f"task: own_choice\n{head}output_type: multiple_choice\ndoc_to_text: '{{{{q}}}}'\n"
        "doc_to_choice: '{{[good, bad]}}'\ndoc_to_target: 0\ntarget_delimiter: ''\n"
        "metric_list: [{metric: acc}]\n"
    )
    (folder / "own_writing.yaml").write_text(
        f"task: own_writing\n{head}output_type: generate_until\ndoc_to_text: '{{{{q}}}}'\n"
        "doc_to_target: '{{good}}'\ngeneration_kwargs: {until: [\"\\n\"], max_gen_toks: 8}\n"
        "metric_list: [{metric: exact_match}]\n"
    )
    return folder


def test_the_harness_over_an_engine(engines, tmp_path, monkeypatch):
    """Its scores are those of our own tasks over the same items."""
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tokenizer, engine, _ = engines
    folder = write_harness_tasks(tmp_path)
    arguments = {"draft_limit": 3, "folder": folder}
    found = harness.run_harness(["own_choice", "own_writing"], engine, engine, tokenizer, **arguments)
    choice = [one for one in found if one.task == "own_choice"]
    rows = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    values = [
        {"kind": "choice", "prompt": row["q"], "choices": [row["good"], row["bad"]], "answer": 0}
        for row in rows
    ]
    values += [
        {"kind": "exact", "prompt": row["q"], "answer": row["good"], "stop": ["\n"], "max_new_tokens": 8}
        for row in rows
    ]
    items = load_tasks(write_jsonl(tmp_path / "own.jsonl", values), tokenizer, max_seq_tokens=200)
    ours = score_items(items, engine, engine, tokenizer, draft_limit=3)
    assert [one.value for one in choice] == [one.value for one in ours[:12]]
    writing = [one for one in found if one.task == "own_writing"]
    assert [one.output for one in writing] == [one.output for one in ours[12:]]
    assert all(one.tokens for one in writing)
    with pytest.raises(InputError, match="knows no task nonsense"):
        harness.run_harness(["nonsense"], engine, engine, tokenizer, **arguments)


def test_what_an_engine_cannot_give_is_skipped_and_not_passed():
    from trtspec.verify.suite import skipped_suite

    assert skipped_suite(Gates(), Settings(), "no scores") == []
    gates = Gates(max_mean_kl=0.1, max_task_loss=0.1)
    checks = skipped_suite(gates, Settings(retrieval=True), "no scores")
    assert {check.name: check.required for check in checks} == {
        "mean_kl": True,
        "tasks": True,
        "retrieval": False,
    }
    assert {check.verdict for check in checks} == {Verdict.SKIPPED}
