"""Latency and throughput of an engine under load: clocks of their own, planted sleeps, a recipe's gates."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json

import numpy as np
import pytest
from built_tiny import build_tiny, write_jsonl
from made import made_report

from trtspec.backends import open_engine
from trtspec.cli import main
from trtspec.cli.verify_speed import SpeedOptions
from trtspec.errors import InputError
from trtspec.recipe import Gates
from trtspec.recipe_facts import P99_REQUESTS, requests_for_p99
from trtspec.stats import ratio_of_sums
from trtspec.text import Tokenizer
from trtspec.verify import served_load
from trtspec.verify.faults import Altered
from trtspec.verify.gates import Verdict
from trtspec.verify.latency import judge_latency, requests_needed
from trtspec.verify.recheck import rejudge
from trtspec.verify.report import check_fields
from trtspec.verify.served_load import check_served, drive, judge_driven, plan_served
from trtspec.verify.served_verdict import _blocks, judge_served, with_load_gates
from trtspec.verify.settings import LatencySettings, Settings
from trtspec.verify.timed import steady, timed_from

STEP_S, DELAY_S = 0.001, 0.02


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    file = write_jsonl(folder / "p.jsonl", [{"id": f"p{i}", "prompt": "ab cd " * (2 + i)} for i in range(8)])
    built = build_tiny(folder)
    with contextlib.ExitStack() as stack:
        engines = {
            variant: stack.enter_context(contextlib.closing(open_engine(built, variant)))
            for variant in ("recipe", "no_speculation")
        }
        yield built, Tokenizer.load(built.target_dir), engines, file


def asked(tiny, gates: dict, **latency):
    """The recipe with ``gates``, and the plan of its load; answers of a few tokens."""
    built, tokenizer, _, file = tiny
    recipe = built.recipe.model_copy(update={"gates": Gates.model_validate(gates)})
    settings = Settings(prompts=file, latency=LatencySettings(**latency) if latency else None)
    plan = plan_served(recipe, settings, tokenizer)
    return recipe, plan


def gates(**given) -> dict:
    load = {"concurrency": 8, "requests": 240, "output_tokens": 4}
    return {"load": load, **given}


class Clock:
    """The machine's clock, on which nothing but an engine's steps takes time."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def on(self, engine, step_s: float = STEP_S):
        return Costly(engine, self, step_s)


class Costly(Altered):
    def __init__(self, engine, clock: Clock, step_s: float) -> None:
        super().__init__(engine)
        self._clock, self._step_s = clock, step_s

    def step(self):
        self._clock.now += self._step_s
        return super().step()


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(served_load, "time", made)
    return made


def verdicts(checks) -> dict[str, Verdict]:
    return {check.name: check.verdict for check in checks}


def test_a_sleep_in_the_engine_under_load_fails_its_gates_and_without_it_they_pass(tiny, clock):
    _, _, engines, _ = tiny
    wanted = gates(slo={"e2e_ms": 1e3 * DELAY_S * 2}, min_goodput=0.5, min_tokens_per_s=1000.0)
    recipe, plan = asked(tiny, wanted)
    good = check_served({"recipe": clock.on(engines["recipe"])}, plan, recipe)
    found = verdicts(good)
    assert (found["goodput_recipe"], found["throughput"]) == (Verdict.PASS, Verdict.PASS)
    slow = clock.on(engines["recipe"], DELAY_S)
    bad = check_served({"recipe": slow}, plan, recipe)
    found = verdicts(bad)
    assert (found["goodput_recipe"], found["throughput"]) == (Verdict.FAIL, Verdict.FAIL)
    for checks in (good, bad):
        assert list(map(check_fields, rejudge(checks[0].records))) == list(map(check_fields, checks))


def test_a_sleep_in_the_baseline_touches_its_own_clock_only_and_is_no_speedup(tiny, clock):
    _, _, engines, _ = tiny
    recipe, plan = asked(tiny, gates(min_speedup_under_load=1.0))
    sides = {
        "recipe": clock.on(engines["recipe"]),
        "no_speculation": clock.on(engines["no_speculation"], DELAY_S),
    }
    driven = drive(sides, plan)
    wall = clock.now
    ends = {}
    for side in sides:
        mine = [row for row in driven.slices if row["side"] == side]
        assert all(a["ended_s"] == b["began_s"] for a, b in itertools.pairwise(mine))
        ends[side] = mine[-1]["ended_s"]
        # Every token is in a slice and in a request.
        rows = [row for row in driven.requests if row["side"] == side]
        assert sum(row["tokens"] for row in mine) == sum(sum(row["emitted"]) for row in rows)
    # With one clock for both, each would show nearly the whole wall time.
    assert sum(ends.values()) == pytest.approx(wall)
    assert ends["recipe"] < ends["no_speculation"] / 2
    tpot = {
        side: np.median([one.tpot_s for one in timed_from(rows_of(driven, side)) if one.tpot_s])
        for side in sides
    }
    assert tpot["recipe"] < DELAY_S < tpot["no_speculation"]
    checks = {check.name: check for check in judge_driven(driven, plan, recipe)}
    assert checks["speedup_under_load"].verdict is Verdict.ERROR
    assert "can give" in checks["speedup_under_load"].summary


def rows_of(driven, side):
    return [row for row in driven.requests if row["side"] == side]


def test_a_counter_that_runs_ahead_and_a_lost_answer_void_the_load(tiny):
    _, _, engines, _ = tiny
    recipe, plan = asked(tiny, gates(min_tokens_per_s=1.0))
    plan = dataclasses.replace(plan, requests=plan.requests[:10])
    inflated = Altered(
        engines["recipe"],
        change_stats=lambda stats: dataclasses.replace(stats, generated_tokens=2 * stats.generated_tokens),
    )
    lost = Altered(engines["recipe"], change_output=lambda o: dataclasses.replace(o, finish_reason=None))
    for engine, told in ((inflated, "counted"), (lost, "unanswered")):
        (check,) = check_served({"recipe": engine}, plan, recipe)
        assert check.verdict is Verdict.ERROR
        assert check.required
        assert told in check.summary


def test_an_open_loop_counts_from_when_a_request_was_due_and_does_not_idle(tiny, clock):
    _, _, engines, _ = tiny
    recipe, plan = asked(tiny, {}, rate_per_s=4.0, requests=40)
    driven = drive({"recipe": clock.on(engines["recipe"])}, plan)
    assert clock.now < 1.0  # ten seconds of arrivals; idling is skipped, not slept
    assert max(row["ended_s"] for row in driven.requests) > 5.0
    slow = clock.on(engines["recipe"], DELAY_S)  # four steps an answer, eight at a time: 100 a second
    wanted = {"load": {"rate_per_s": 400.0, "requests": 100, "output_tokens": 4}, "slo": {"ttft_ms": 150.0}}
    recipe, plan = asked(tiny, {**wanted, "min_goodput": 0.9})
    driven = drive({"recipe": slow}, plan)

    def goodput(rows):
        arguments = check_served({"recipe": engines["recipe"]}, plan, recipe)[0].records.arguments
        checks = judge_served(rows, driven.slices, **{**arguments, "counters": driven.counters})
        return next(check for check in checks if check.name == "goodput_recipe")

    assert goodput(driven.requests).verdict is Verdict.FAIL
    # Deliberately broken: times from when a place in the batch was free hide the queue.
    hidden = [{**row, "due_s": row["arrivals_s"][0] - 0.04} for row in driven.requests]
    assert goodput(hidden).measured == 1.0


def test_too_few_requests_decide_no_p99(tiny):
    _, _, engines, _ = tiny
    wanted = {"load": {"concurrency": 8, "output_tokens": 4}, "max_p99_tpot_ms": 1e5}
    recipe, plan = asked(tiny, wanted, requests=64)
    checks = {check.name: check for check in check_served({"recipe": engines["recipe"]}, plan, recipe)}
    tail = checks["p99_tpot"]
    assert (tail.verdict, tail.required) == (Verdict.INCONCLUSIVE, True)
    assert "368 needed" in tail.summary
    assert checks["latency_recipe"].evidence["latency"]["TPOT"]["p99_ms"] is None
    # The same times again and again, so that there are enough: then it is decided.
    rows = tail.records.tables["requests"]
    span = max(row["ended_s"] for row in rows)
    more = [
        {
            **row,
            **{key: row[key] + span * copy for key in ("due_s", "sent_s", "ended_s")},
            "arrivals_s": [at + span * copy for at in row["arrivals_s"]],
        }
        for copy in range(10)
        for row in rows
    ]
    again = judge_served(more, tail.records.tables["slices"], **tail.records.arguments)
    assert verdicts(again)["p99_tpot"] is Verdict.PASS


def test_the_planned_requests_suffice_for_a_p99():
    assert requests_needed(0.99) == P99_REQUESTS
    for concurrency in (1, 8, 64):
        load = Gates.model_validate({"load": {"concurrency": concurrency}}).load
        count = requests_for_p99(load)
        rng, ends, rows = np.random.default_rng(1), [0.0] * concurrency, []
        for number in range(count):
            slot = int(np.argmin(ends))
            began, ends[slot] = ends[slot], ends[slot] + float(rng.uniform(0.5, 1.5))
            rows.append(row_of(number, began, ends[slot]))
        assert len(steady(timed_from(rows), concurrency=concurrency)) >= P99_REQUESTS


def row_of(number, began, ended):
    return {"request_id": f"r{number}", "due_s": began, "sent_s": began, "arrivals_s": [began, ended],
            "ended_s": ended, "tokens": 9, "error": ""}  # fmt: skip


def test_prompts_of_a_load_share_nothing_but_their_beginning_and_grow_as_told(tiny):
    built, tokenizer, _, file = tiny
    _, plan = asked(tiny, {"load": {"concurrency": 4, "requests": 30, "input_tokens": 110}})
    prompts = [request.prompt_tokens for request in plan.requests]
    assert len(set(prompts)) == 30
    assert len({prompt[:24] for prompt in prompts}) == 30
    assert sum(map(len, prompts)) / 30 > 85  # 38 without
    assert max(map(len, prompts)) <= built.recipe.limits.max_input_tokens
    small = built.recipe.limits.model_copy(update={"max_input_tokens": 2})
    recipe = built.recipe.model_copy(update={"limits": small})
    with pytest.raises(InputError, match="no prompt"):
        plan_served(recipe, Settings(prompts=file, latency=LatencySettings()), tokenizer)
    with pytest.raises(InputError, match=r"--slo-ttft-ms: the recipe says its own load"):
        asked(tiny, gates(), ttft_ms=5.0)
    assert asked(tiny, {})[1] is None


def test_throughput_is_sure_of_itself_only_over_blocks():
    """Consecutive slices share requests, so their noise is of one piece."""
    rng, inside = np.random.default_rng(2), {"blocks": 0, "slices": 0}
    for _ in range(150):
        noise = [0.0]
        for _ in range(199):
            noise.append(0.7 * noise[-1] + float(rng.normal(0, 0.1)))
        slices = [(100.0 + 10 * one, 1.0) for one in noise]
        for name, parts in (("blocks", _blocks(slices)), ("slices", slices)):
            _, (low, high) = ratio_of_sums(*zip(*parts, strict=True))
            inside[name] += low <= 100.0 <= high
    assert inside["blocks"] / 150 > 0.9
    assert inside["slices"] / 150 < 0.65  # deliberately broken: each slice for itself


def test_gates_of_the_recipe_are_measured_without_a_flag_and_judged_again(tiny, tmp_path, capsys):
    *_, file = tiny
    wanted = (
        "{load: {concurrency: 4, requests: 40, output_tokens: 4}, slo: {ttft_ms: 60000}, min_goodput: 0.5}"
    )
    built = build_tiny(tmp_path, gates=wanted)
    bundle = tmp_path / "bundle"
    given = ["verify", str(built.folder), "--prompts", str(file), "--quick", "--max-new-tokens", "12"]
    assert main([*given, "--no-sampled", "--bundle", str(bundle)]) == 0, capsys.readouterr()
    shown = capsys.readouterr().out
    assert "PASS          goodput_recipe" in shown
    assert "latency_no_speculation" in shown
    assert main(["report", "--recheck", str(bundle)]) == 0
    place = bundle / "manifest.json"
    text = place.read_text()
    value = json.loads(text)
    entry = next(one for one in value["judged"] if one["judge"] == "served")
    entry["arguments"]["slo"]["ttft_ms"] = 90000.0  # another objective than the recipe's
    place.write_text(json.dumps(value))
    capsys.readouterr()
    assert main(["report", "--recheck", str(bundle)]) == 1
    assert "slo.ttft_ms" in capsys.readouterr().out


def test_a_recipes_gates_on_its_load_judge_endpoints():
    rows = [row_of(number, number // 4, number // 4 + 1) for number in range(400)]
    none = {"ttft_s": None, "tpot_s": None, "e2e_s": None}
    checks = judge_latency(
        rows,
        name="url",
        side="url",
        load="4 at a time",
        concurrency=4,
        rate_per_s=None,
        objectives=none,
        bound=None,
    )
    wanted = Gates.model_validate({"max_p99_tpot_ms": 130.0, "max_p99_ttft_ms": 5.0, "min_tokens_per_s": 1.0})
    found = {check.name: check for check in with_load_gates(made_report(*checks), wanted).checks}
    assert (found["p99_tpot"].verdict, found["p99_ttft"].verdict) == (Verdict.PASS, Verdict.PASS)
    strict = wanted.model_copy(update={"max_p99_tpot_ms": 120.0})
    (tail,) = [one for one in with_load_gates(made_report(*checks), strict).checks if one.name == "p99_tpot"]
    assert tail.verdict is Verdict.FAIL  # 125 ms
    (again,) = [one for one in rejudge(tail.records) if one.name == "p99_tpot"]
    assert check_fields(again) == check_fields(tail)
    empty = {field.name: None for field in dataclasses.fields(SpeedOptions)}
    load = {"concurrency": 3, "output_tokens": 9}
    asked = Gates.model_validate({"load": load, "slo": {"e2e_ms": 500.0}, "min_goodput": 0.9})
    given = SpeedOptions(**empty)._asked_of_load(asked, None, None)
    assert given == {
        "concurrency": 3, "requests": 422, "max_new_tokens": 9, "e2e_s": 0.5, "min_goodput": 0.9
    }  # fmt: skip
    with pytest.raises(InputError, match="--rate: the recipe of --gates says its own load"):
        SpeedOptions(**{**empty, "rate": 2.0})._asked_of_load(asked, None, None)
    longer = Gates.model_validate({"load": {**load, "input_tokens": 900}})
    with pytest.raises(InputError, match="needs yours"):
        SpeedOptions(**empty)._asked_of_load(longer, None, None)
