"""Latency, goodput and throughput of an engine under load, in this process, beside the same weights without
speculation and the 16-bit baseline.

Requests join the in-flight batch through the very calls that a server's thread makes (``Engine.add`` and
``Engine.step``), so a time here is what a server adds to: HTTP or gRPC, tokenizing, text and the
hand-over between threads are not in it. A closed loop keeps so many in flight; an open one adds them when
they are due (Poisson), whatever became of those before.

*Interleaved*: each side runs a few steps, then stands still while the others run theirs. Its clock stands
still with it, so its requests notice nothing, and a slow minute of the machine hits all sides. Where an
engine waits for the next arrival its clock jumps there: nothing would happen meanwhile.

:mod:`trtspec.verify.served_verdict` judges the rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trtspec.engine import Engine, Request
from trtspec.errors import InputError, Problem
from trtspec.recipe import Gates, Recipe
from trtspec.recipe_facts import LOAD_GATES, P99_REQUESTS, asks_of_load, requests_for_p99
from trtspec.ruler import OnProgress, stage_of
from trtspec.text import Tokenizer
from trtspec.verify.arrivals import poisson_times
from trtspec.verify.gates import Check, skipped
from trtspec.verify.latency import requests_needed
from trtspec.verify.load_prompts import chats_for_loads, stream_of_prompts
from trtspec.verify.served_verdict import judge_served, slice_tokens
from trtspec.verify.settings import Settings

OUTPUT_TOKENS = 32
"""Longest answer where the recipe does not say."""


@dataclass(frozen=True)
class ServedPlan:
    """The requests and how they come: exactly one of ``concurrency`` and ``rate_per_s``. ``slo``: objectives
    in ms by name."""

    requests: tuple[Request, ...]
    concurrency: int | None
    rate_per_s: float | None
    slo: Mapping[str, float | None]

    @property
    def told(self) -> str:
        if self.rate_per_s is not None:
            return f"{self.rate_per_s:g} requests/s (Poisson)"
        return f"{self.concurrency} at a time"


def plan_served(recipe: Recipe, settings: Settings, tokenizer: Tokenizer) -> ServedPlan | None:
    """The load that ``settings.latency`` or the recipe's gates ask for; None if neither does.

    Raises InputError where both name a load or objectives, for prompts that are none, and where none fits.
    """
    asked, load, limits = settings.latency, recipe.gates.load, recipe.limits
    in_recipe = load.concurrency is not None or load.rate_per_s is not None
    if asked is None and not in_recipe:
        return None
    given = {} if asked is None else {key: value for key, value in vars(asked).items() if value is not None}
    named = [key for key in ("concurrency", "rate_per_s", "ttft_ms", "tpot_ms", "e2e_ms") if key in given]
    if in_recipe and named:
        flag = f"--{'' if named[0] in ('concurrency', 'rate_per_s') else 'slo-'}{named[0]}".replace("_", "-")
        message = "the recipe says its own load and objectives (gates.load, gates.slo); leave it out"
        raise InputError(Problem(message, key=flag.removesuffix("-per-s")))
    concurrency, rate = load.concurrency, load.rate_per_s
    if not in_recipe:
        concurrency, rate = given.get("concurrency"), given.get("rate_per_s")
        if concurrency is None and rate is None:
            concurrency = min(limits.max_batch_size, 8)
    slo = (
        dict(recipe.gates.slo)
        if in_recipe
        else {key: given.get(key) for key in ("ttft_ms", "tpot_ms", "e2e_ms")}
    )
    output = min(load.output_tokens or OUTPUT_TOKENS, limits.max_seq_tokens - 1)
    count = given.get("requests") or load.requests
    if count is None:
        all_of = requests_for_p99(load.model_copy(update={"concurrency": concurrency, "rate_per_s": rate}))
        tails = not settings.quick if asked is None else asked.tails
        count = all_of if tails else all_of - P99_REQUESTS + requests_needed(0.9) + 4
    room = min(limits.max_input_tokens, limits.max_seq_tokens - output)
    chats = chats_for_loads(settings.prompts)
    prompts = stream_of_prompts(chats, tokenizer, count, room=room, wanted=load.input_tokens)
    if len(prompts) < count:
        message = f"no prompt has at most {room} tokens; raise limits.max_input_tokens or max_seq_tokens"
        raise InputError(Problem(message, key="latency"))
    requests = tuple(
        Request(f"r{number}", tuple(tokens), output, stop_tokens=tokenizer.eos_token_ids)
        for number, tokens in enumerate(prompts)
    )
    return ServedPlan(requests, concurrency, rate, slo)


# --------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Driven:
    """``requests``: a row each, as :class:`~trtspec.verify.latency.Timed`, with ``side``, ``prompt_tokens``
    and ``emitted``, the tokens of each arrival. ``slices``: ``side, number, began_s, ended_s, tokens``.
    ``counters``: side -> what its engine counted meanwhile; ``problems``: what contradicts itself."""

    requests: list[dict[str, Any]]
    slices: list[dict[str, Any]]
    counters: dict[str, dict[str, Any]]
    problems: list[str]


@dataclass
class _Side:
    name: str
    engine: Engine
    plan: ServedPlan
    due_s: Sequence[float]
    clock_s: float = 0.0
    sent: int = 0
    emitted: int = 0
    flying: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    slices: list[dict[str, Any]] = field(default_factory=list)
    problem: str = ""

    @property
    def finished(self) -> bool:
        return bool(self.problem) or (self.sent == len(self.plan.requests) and not self.flying)

    def run(self, until: int) -> None:
        """Steps until ``until`` tokens are emitted since the beginning, on the side's own clock."""
        offset, began, tokens = self.clock_s - time.perf_counter(), self.clock_s, 0
        while self.emitted + tokens < until:
            now = time.perf_counter() + offset
            if not self.flying and self.plan.rate_per_s is not None and self.sent < len(self.due_s):
                wait = max(0.0, self.due_s[self.sent] - now)  # nothing to do until then
                offset, now = offset + wait, max(now, self.due_s[self.sent])
            self._send(now)
            if not self.flying:
                break
            outputs = self.engine.step()
            now = time.perf_counter() + offset
            if not outputs and not self.engine.in_flight:
                self.problem = f"{self.name}: the engine is idle with {len(self.flying)} requests unanswered"
                break
            for output in outputs:
                row = self.flying.get(output.request_id)
                if row is None:
                    self.problem = f"{self.name}: an output for {output.request_id}, which is not in flight"
                    continue
                if output.new_tokens:
                    row["arrivals_s"].append(now)
                    row["emitted"].append(len(output.new_tokens))
                    row["tokens"] += len(output.new_tokens)
                    tokens += len(output.new_tokens)
                if output.finish_reason is not None:
                    row["ended_s"] = now
                    row["error"] = "" if output.finish_reason != "cancelled" else "cancelled by the engine"
                    del self.flying[output.request_id]
        self.clock_s = time.perf_counter() + offset
        self.emitted += tokens
        if tokens or self.flying:
            one = {"side": self.name, "number": len(self.slices), "began_s": began, "ended_s": self.clock_s}
            self.slices.append({**one, "tokens": tokens})

    def _send(self, now: float) -> None:
        requests = self.plan.requests
        while self.sent < len(requests):
            if self.plan.rate_per_s is None:
                if len(self.flying) >= (self.plan.concurrency or 1):
                    return
                due = now
            elif (due := self.due_s[self.sent]) > now:
                return
            request = requests[self.sent]
            self.engine.add(request)
            row = {
                "side": self.name,
                "request_id": request.id,
                "prompt_tokens": len(request.prompt_tokens),
                "due_s": due,
                # A server takes it in when it comes, also while a step runs: that wait is the engine's.
                "sent_s": due,
                "arrivals_s": [],
                "emitted": [],
                "ended_s": due,
                "tokens": 0,
                "error": "unanswered",
            }
            self.flying[request.id] = row
            self.rows.append(row)
            self.sent += 1


def drive(
    sides: Mapping[str, Engine],
    plan: ServedPlan,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Driven:
    """Answer the plan's requests on every side, a slice of tokens each in an order that turns.

    By tokens, not by steps: a side that drafts needs fewer steps for the same work, and what the others do
    after it would meet another machine."""
    due = poisson_times(len(plan.requests), plan.rate_per_s, seed=1) if plan.rate_per_s else ()
    running = [_Side(name, engine, plan, due) for name, engine in sides.items()]
    before = {one.name: one.engine.stats() for one in running}
    turn, total = 0, len(running) * len(plan.requests)
    while not all(one.finished for one in running):
        order = running if turn % 2 else running[::-1]
        for one in order:
            if not one.finished:
                one.run((turn + 1) * slice_tokens(plan.concurrency))
        turn += 1
        on_progress(sum(one.sent - len(one.flying) for one in running), total)
    counters, problems = {}, [one.problem for one in running if one.problem]
    for one in running:
        after, was = one.engine.stats(), before[one.name]
        for request_id in one.flying:
            one.engine.cancel(request_id)
        counted, sent = after.generated_tokens - was.generated_tokens, sum(row["tokens"] for row in one.rows)
        if counted != sent:
            problems.append(f"{one.name}: the engine counted {counted} tokens, its outputs hold {sent}")
        counters[one.name] = {
            "prefix_hit_tokens": after.prefix_hit_tokens - was.prefix_hit_tokens,
            "preemptions": after.preemptions - was.preemptions,
            "held_back_steps": after.held_back_steps - was.held_back_steps,
            "steps": after.steps - was.steps,
        }
    return Driven(
        [row for one in running for row in one.rows],
        [row for one in running for row in one.slices],
        counters,
        problems,
    )


def check_served(
    sides: Mapping[str, Engine],
    plan: ServedPlan,
    recipe: Recipe,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> list[Check]:
    """Measure and judge. ``sides``: ``recipe`` and what it is compared with, ``no_speculation`` and
    ``baseline``; an engine that two names have runs once, by the first."""
    sides = {
        name: engine
        for number, (name, engine) in enumerate(sides.items())
        if engine not in list(sides.values())[:number]
    }
    stage = f"latency: {plan.told}, {', '.join(sides)} in turn"
    return judge_driven(drive(sides, plan, stage_of(on_progress, stage)), plan, recipe)


def judge_driven(driven: Driven, plan: ServedPlan, recipe: Recipe) -> list[Check]:
    """The checks on what was measured."""
    gates = recipe.gates
    return judge_served(
        driven.requests,
        driven.slices,
        load=plan.told,
        concurrency=plan.concurrency,
        rate_per_s=plan.rate_per_s,
        slo=dict(plan.slo),
        gates={key: getattr(gates, key) for key in LOAD_GATES},
        counters=driven.counters,
        problems=driven.problems,
        speculates=recipe.speculation.kind != "none",
    )


def not_served(gates: Gates, settings: Settings, reason: str) -> list[Check]:
    """What stands in the report where the load that is asked for cannot be measured."""
    asked = settings.latency is not None or asks_of_load(gates)
    required = any(getattr(gates, key) is not None for key in LOAD_GATES)
    return [skipped("latency_recipe", reason, required)] if asked else []
