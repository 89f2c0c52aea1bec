"""The load matrix on a tiny engine, and what is refused as evidence."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random

import pytest
from built_tiny import build_tiny, write_jsonl

from trtspec.backends import open_engine
from trtspec.errors import InputError
from trtspec.prompts import Prompt
from trtspec.ruler import Answer
from trtspec.text import Tokenizer
from trtspec.verify.faults import Altered
from trtspec.verify.gates import Verdict
from trtspec.verify.matrix_load import check_loads, judge_loads, measure_loads, plan_loads
from trtspec.verify.recheck import rejudge
from trtspec.verify.sanity import (
    check_evidence,
    forced_acceptance,
    forced_switches,
    impossible_length,
    impossible_speedup,
    random_tokens,
    unequal_work,
)
from trtspec.verify.settings import LoadSettings


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loads")
    prompts = [
        {
            "id": f"{task}-{language}-{i}",
            "task": task,
            "language": language,
            "prompt": f"{task} " * (3 + i) + language,
        }
        for task in ("chat", "copy")
        for language in ("en", "zh")
        for i in range(3)
    ]
    file = write_jsonl(folder / "prompts.jsonl", prompts)
    built = build_tiny(folder)
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(contextlib.closing(open_engine(built, variant)))
            for variant in ("recipe", "no_speculation")
        ]
        yield built, Tokenizer.load(built.target_dir), engines, file


SETTINGS = LoadSettings(prompts=2, rounds=2, tokens=8, batch=3, long_tokens=100)


def test_every_cell_has_its_speedup_and_is_judged_again(tiny):
    built, tokenizer, (mine, plain), file = tiny
    settings = dataclasses.replace(SETTINGS, file=file)
    plan = plan_loads(built.recipe, settings, tokenizer)
    check = check_loads((mine, plain, plain), plan, settings, built.recipe, tokenizer.eos_token_ids)
    assert check.verdict in (Verdict.MEASURED, Verdict.ERROR)
    told = [*check.evidence.get("loads", []), *check.evidence.get("refused", [])]
    assert len(told) == 2 * len(plan.cells)  # batch 1 and N
    assert {cell.length for cell in plan.cells} <= {"short", "long"}
    assert rejudge(check.records) == [check]


def test_long_prompts_are_long_and_end_as_the_short_ones_do(tiny):
    built, tokenizer, _, file = tiny
    settings = dataclasses.replace(SETTINGS, file=file)
    cells = plan_loads(built.recipe, settings, tokenizer).cells
    short = {prompt.id: prompt for cell in cells if cell.length == "short" for prompt in cell.prompts}
    for cell in cells:
        if cell.length == "long":
            for prompt in cell.prompts:
                of = short[prompt.id.removeprefix("long-")]
                assert 50 <= len(prompt.tokens) <= 100
                assert prompt.tokens[-6:] == of.tokens[-6:]


def test_the_shipped_prompts_fill_every_cell_or_say_why(tiny):
    built, tokenizer, *_ = tiny
    limits = built.recipe.limits.model_copy(update={"max_input_tokens": 4000, "max_seq_tokens": 4096})
    roomy = built.recipe.model_copy(update={"limits": limits})
    plan = plan_loads(roomy, LoadSettings(long_tokens=2500), tokenizer)
    assert len(plan.cells) == 20
    assert not plan.missing
    small = plan_loads(built.recipe, SETTINGS, tokenizer)
    assert len(small.cells) + len(small.missing) == 20
    with pytest.raises(InputError, match="max_batch_size"):
        plan_loads(built.recipe, LoadSettings(batch=99), tokenizer)
    limits = limits.model_copy(update={"max_input_tokens": 2})
    with pytest.raises(InputError, match="no prompt"):
        plan_loads(roomy.model_copy(update={"limits": limits}), SETTINGS, tokenizer)


def rows_with(tiny, change):
    from trtspec.verify.load import Contender

    built, tokenizer, (mine, plain), file = tiny
    settings = dataclasses.replace(SETTINGS, file=file, prompts=2)
    plan = plan_loads(built.recipe, settings, tokenizer)
    plan = dataclasses.replace(plan, cells=plan.cells[:1], batch=1)
    sides = Contender("recipe", mine, 3), Contender("no_speculation", change(plain), 0)
    return measure_loads(sides, plan, settings, tokenizer.eos_token_ids)


def test_both_sides_answer_every_prompt_once_before_the_clock_runs(tiny):
    """Else one side's prefix cache holds prompts that the other must compute."""
    built, tokenizer, (mine, plain), file = tiny
    from trtspec.verify.load import Contender

    seen: dict[str, list[tuple[int, ...]]] = {"recipe": [], "no_speculation": []}

    class Watched(Altered):
        def __init__(self, engine, name):
            super().__init__(engine)
            self._name = name

        def add(self, request):
            seen[self._name].append(request.prompt_tokens)
            self._engine.add(request)

    for batch in (1, 3):
        for found in seen.values():
            found.clear()
        settings = dataclasses.replace(SETTINGS, file=file, rounds=1, batch=batch)
        plan = plan_loads(built.recipe, settings, tokenizer)
        plan = dataclasses.replace(plan, cells=plan.cells[:1])
        sides = (
            Contender("recipe", Watched(mine, "recipe"), 3),
            Contender("no_speculation", Watched(plain, "no_speculation"), 0),
        )
        rows = measure_loads(sides, plan, settings, tokenizer.eos_token_ids)
        assert seen["recipe"] == seen["no_speculation"]
        timed = sum(len(row["prompt_tokens"]) for row in rows) // 2
        assert set(seen["recipe"][:-timed]) == set(seen["recipe"])
        alone = {row["prompt"] for row in rows if row["batch"] == 1}
        assert len(alone) == settings.prompts


def judged(rows):
    return judge_loads(rows, name="recipe", over="no_speculation", missing={}, max_seq_tokens=256, longest=9)


def test_a_sleep_in_the_baseline_is_refused_as_evidence(tiny):
    check = judged(rows_with(tiny, lambda plain: Altered(plain, delay_s=0.05)))
    assert check.verdict is Verdict.ERROR
    assert "can give" in check.summary


def test_a_batch_timed_once_must_be_possible_too(tiny):
    rows = [row for row in rows_with(tiny, lambda plain: plain) if (row["prompt"], row["round"]) == (0, 0)]
    for row in rows:
        row["batch"], row["seconds"] = 4, 1.0 if row["contender"] == "recipe" else 1.05
    assert judged(rows).verdict is Verdict.MEASURED
    next(row for row in rows if row["contender"] == "no_speculation")["seconds"] = 30.0
    assert "can give" in judged(rows).summary


def test_shorter_answers_on_one_side_are_refused(tiny):
    rows = rows_with(tiny, lambda plain: plain)
    for row in rows:
        if row["contender"] == "recipe":
            row["answers"] = [{**answer, "tokens": answer["tokens"][:-1]} for answer in row["answers"]]
    assert "unequal baselines" in judged(rows).summary


def test_random_tokens_are_told_from_text():
    rng = random.Random(1)
    drawn = [[rng.randrange(50_000) for _ in range(80)] for _ in range(8)]
    assert "random tokens" in random_tokens(drawn, 50_000)
    weights = [1 / rank for rank in range(1, 50_001)]  # Zipf's law
    text = [rng.choices(range(50_000), weights, k=80) for _ in range(8)]
    assert random_tokens(text, 50_000) == ""
    assert random_tokens(drawn[:1], 50_000) == ""  # too few to say
    accused = sum(
        bool(random_tokens([rng.choices(range(50_000), weights, k=300)], 50_000)) for _ in range(50)
    )
    missed = sum(not random_tokens([[rng.randrange(50_000) for _ in range(300)]], 50_000) for _ in range(50))
    assert (accused, missed) == (0, 0)


def test_forced_acceptance_is_seen_in_the_steps_and_in_the_environment():
    assert "exactly 3" in forced_acceptance([[1, *[3] * 30, 2]] * 2)
    rng = random.Random(2)
    assert forced_acceptance([[1, *(rng.choice((2, 3, 3, 3)) for _ in range(60)), 1]]) == ""
    assert forced_acceptance([[1] * 90]) == ""  # a drafter of no use forces nothing
    assert "SGLANG_SIMULATE_ACC_LEN" in forced_switches({"SGLANG_SIMULATE_ACC_LEN": "3.2"})
    assert (
        forced_switches({"SGLANG_SIMULATE_ACC_LEN": "-1", "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS": "0"})
        == ""
    )


def test_impossible_numbers():
    assert impossible_length(4.2, 3)
    assert not impossible_length(4.0, 3)
    assert not impossible_length(9.0, None)
    assert impossible_speedup(2.5, 2.0)
    assert not impossible_speedup(1.9, 2.0)
    assert impossible_speedup(1.9, 2.0, step_ratio=0.6)  # its steps cost more: 1.2 is all there is
    assert not impossible_speedup(1.2, 2.0, step_ratio=0.6)
    assert unequal_work({"a": 3}, {"a": 3}) == ""
    assert "one side only" in unequal_work({"a": 3}, {"b": 3})


def test_the_check_of_evidence(tiny):
    answers = [Answer("a", tuple(range(60)), "length", (1, *[2] * 29, 1), 29, 29, (1,) * 31)] * 2
    prompts = [Prompt("a", tuple([5, 6, 7] * 90))]
    bad = check_evidence(prompts, answers, vocab_size=50_000, draft_tokens=4, environment={})
    assert bad.verdict is Verdict.ERROR
    assert bad.required
    assert "exactly 2" in bad.summary
    mixed = [Answer("a", tuple(range(60)), "length", (1, *[2, 1, 3] * 14, 1), 60, 40, (1,) * 44)] * 2
    good = check_evidence(prompts, mixed, vocab_size=50_000, draft_tokens=4, environment={})
    assert good.verdict is Verdict.MEASURED
    assert not good.required
    assert [rejudge(one.records) for one in (good, bad)] == [[good], [bad]]
    forced = check_evidence(
        prompts, mixed, vocab_size=50_000, draft_tokens=4, environment={"SIMULATE_ACC_LEN": "2"}
    )
    assert forced.verdict is Verdict.ERROR


def made_runs(slow: dict[str, float], rounds: int = 3, spread: float = 0.05):
    """Rows of a matrix whose drafts take ``slow`` times as long where a task or batch says so."""
    rng, rows = random.Random(4), []
    for task in ("chat", "copy"):
        for batch in (1, 4):
            for number in range(rounds):
                for prompt in range(3 if batch == 1 else 1):
                    for side in ("recipe", "no_speculation"):
                        factor = slow.get(task, 1.0) * slow.get(f"batch {batch}", 1.0)
                        seconds = rng.gauss(1.0, spread) * (0.8 * factor if side == "recipe" else 1.0)
                        emitted = [2] * 4 if side == "recipe" else [1] * 8
                        tokens = [number, prompt, 3, 4, 5, 6, 7, 8]
                        answer = {"request_id": f"{prompt}", "tokens": tokens, "finish_reason": "length",
                                  "emitted": emitted, "drafted": 4, "accepted": 4,
                                  "drafted_by_step": [1] * len(emitted)}  # fmt: skip
                        rows.append({"length": "short", "task": task, "language": "en", "batch": batch,
                                     "prompt": prompt, "round": number, "contender": side, "seconds": seconds,
                                     "counted": 8, "contradictions": [], "prompt_tokens": [9],
                                     "answers": [answer]})  # fmt: skip
    return rows


def gate(rows, bound=1.0):
    return judge_loads(
        rows, name="recipe", over="no_speculation", missing={}, max_seq_tokens=99, longest=9, bound=bound
    )


def test_rounds_of_one_prompt_are_no_prompts():
    """However often it is timed: a kind of load of three prompts is known as well as three prompts tell."""

    def spread_of(rounds: int) -> float:
        rows = [row for row in made_runs({}, rounds, 0.001) if (row["task"], row["batch"]) == ("chat", 1)]
        for row in rows:
            if row["contender"] == "recipe":
                row["seconds"] *= (0.8, 1.0, 1.25)[row["prompt"]]
        (one,) = (one for one in judged(rows).evidence["by_kind"] if one["load"] == "chat")
        return math.log(one["high"] / one["low"])

    assert spread_of(4) > 0.8 * spread_of(2) > 0.5


def test_a_gate_on_every_kind_of_load_is_not_passed_by_the_mean():
    good = gate(made_runs({}))
    assert (good.verdict, good.required) == (Verdict.PASS, True)
    bad = gate(made_runs({"batch 4": 1.32}, spread=0.02))
    assert bad.verdict is Verdict.FAIL
    assert "slowest kind of load: batch 4" in bad.summary
    # Deliberately broken: all loads together are above the gate.
    together = judged(made_runs({"batch 4": 1.32}, spread=0.02))
    assert together.interval[0] > 1.0
    assert gate(made_runs({"copy": 1.25}, spread=0.2)).verdict is Verdict.INCONCLUSIVE
    assert rejudge(bad.records) == [bad]
