"""The scheduler's promises: budgets, order, drafts that fit, preemption without loss."""

from __future__ import annotations

import random

import pytest

from trtspec.embedded.kvcache import PagedCache
from trtspec.embedded.scheduler import Plan, ScheduledRows, Scheduler, SequenceState
from trtspec.engine import Request
from trtspec.errors import InputError


def state(name: str, prompt: list[int] | int, max_new_tokens: int = 4) -> SequenceState:
    # Distinct first tokens, so that there are no accidental prefix hits.
    tokens = [1000 + ord(name[-1]), *[7] * (prompt - 1)] if isinstance(prompt, int) else prompt
    return SequenceState(Request(name, tuple(tokens), max_new_tokens), list(tokens))


def scheduler(num_pages: int = 64, page_tokens: int = 2, batch: int = 4, rows: int = 16) -> Scheduler:
    return Scheduler(PagedCache(num_pages, page_tokens), max_batch_size=batch, max_num_tokens=rows)


def shape(plan: Plan) -> list[tuple[str, int, int, int]]:
    return [(row.sequence.request.id, row.start, row.count, row.num_draft) for row in plan.rows]


def finish_rows(found: Scheduler, plan: Plan, num_accepted: int = 0) -> None:
    """What the engine does after the forward, with ``num_accepted`` of each chain taken."""
    for row in plan.rows:
        kept = row.count
        if row.reaches_end:
            taken = min(num_accepted, row.num_draft)
            kept += taken
            row.sequence.tokens += [8] * (taken + 1)
        found.cache.commit(row.table, row.sequence.tokens, range(kept))
        if row.sequence.num_remaining == 0:
            found.remove(row.sequence)


def test_prompts_are_chunked_and_admitted_in_order_under_the_row_budget() -> None:
    found = scheduler(rows=8)
    for name, length in (("a", 5), ("b", 6), ("c", 2)):
        found.add(state(name, length))
    plan = found.schedule({})
    assert shape(plan) == [("a", 0, 5, 0), ("b", 0, 3, 0)]
    finish_rows(found, plan)
    plan = found.schedule({})
    assert shape(plan) == [("a", 5, 1, 0), ("b", 3, 3, 0), ("c", 0, 2, 0)]


def test_no_more_than_the_batch_limit_run() -> None:
    found = scheduler(batch=2)
    for name in "abc":
        found.add(state(name, 2))
    assert [row.sequence.request.id for row in found.schedule({}).rows] == ["a", "b"]
    assert [waiting.request.id for waiting in found.waiting] == ["c"]


def test_drafts_only_where_the_prompt_is_computed_and_as_room_allows() -> None:
    found = scheduler(rows=7)
    found.add(state("a", 2, max_new_tokens=10))
    found.add(state("b", 2, max_new_tokens=3))
    found.add(state("c", 9, max_new_tokens=3))
    finish_rows(found, found.schedule({}))
    room = {sequence.request.id: (levels, nodes) for sequence, levels, nodes in found.draft_room()}
    assert room == {"a": (5, 5), "b": (1, 5)}  # 5 rows beside two decode rows; b: 2 tokens still wanted
    plan = found.schedule({"a": 4, "b": 1, "c": 4})
    assert shape(plan) == [("a", 2, 1, 4), ("b", 2, 1, 1)]  # the prompt of c waits for rows
    assert sum(row.count + row.num_draft for row in plan.rows) == 7


def test_drafts_take_pages_but_nobodys_place() -> None:
    found = scheduler(num_pages=4, page_tokens=2)
    found.add(state("a", 3, max_new_tokens=6))
    found.add(state("b", 1, max_new_tokens=4))
    finish_rows(found, found.schedule({}))
    plan = found.schedule({"a": 5, "b": 3})
    assert shape(plan) == [("a", 3, 1, 2), ("b", 1, 1, 0)]
    assert found.num_preemptions == 0
    found.cache.check_integrity()


def test_the_latest_admitted_is_preempted_and_returns_first() -> None:
    found = scheduler(num_pages=6, page_tokens=2)
    for name in ("a", "b", "c"):
        found.add(state(name, 2, max_new_tokens=8))
    plans = [[row[0] for row in shape(plan)] for plan in _steps(found, 3)]
    assert plans == [["a", "b", "c"]] * 3
    tokens = list(found.running[2].tokens)
    plan = found.schedule({})
    assert [row[0] for row in shape(plan)] == ["a", "b"]
    assert found.num_preemptions == 1
    victim = found.waiting[0]
    assert (victim.request.id, victim.tokens, victim.num_computed, victim.table) == ("c", tokens, 0, None)
    found.add(state("d", 1))
    finish_rows(found, plan)
    returned: list[str] = []
    while found.waiting or found.running:
        plan = found.schedule({})
        returned += [name for name, *_ in shape(plan) if name in "cd" and name not in returned]
        finish_rows(found, plan)
    assert returned == ["c", "d"]


def _steps(found: Scheduler, count: int) -> list[Plan]:
    plans = []
    for _ in range(count):
        plans.append(found.schedule({}))
        finish_rows(found, plans[-1])
    return plans


def test_a_request_that_can_never_fit_is_refused() -> None:
    found = scheduler(num_pages=4, page_tokens=2)
    found.add(state("fits", 5, max_new_tokens=4))
    with pytest.raises(InputError, match=r"request 'big': 9 tokens exceed the 4 pages of 2 tokens"):
        found.add(state("big", 6, max_new_tokens=4))


def test_a_long_request_is_not_overtaken_for_ever() -> None:
    found = scheduler(num_pages=8, page_tokens=2, batch=4)
    found.add(state("short0", 2, max_new_tokens=4))
    found.add(state("long", 14, max_new_tokens=3))
    started = None
    for step in range(40):
        found.add(state(f"late{step}", 2, max_new_tokens=4))
        plan = found.schedule({})
        if started is None and any(row.sequence.request.id == "long" for row in plan.rows):
            started = step
        if started is None:
            assert all(row.sequence.request.id == "short0" for row in plan.rows)
        finish_rows(found, plan)
    assert started is not None
    assert started <= 5


class DropsTokensOnPreemption(Scheduler):
    def _make_room(self, sequence):
        before = list(self.running)
        kept = super()._make_room(sequence)
        for victim in before:
            if victim.table is None:
                del victim.tokens[len(victim.request.prompt_tokens) :]
        return kept


class PreemptsTheOldest(Scheduler):
    def _make_room(self, sequence):
        self.running.reverse()
        kept = super()._make_room(sequence)
        self.running.reverse()
        return kept


class ForgetsTheRowBudget(Scheduler):
    def _admit(self, copies):
        self.max_num_tokens += 8
        return super()._admit(copies)


class DraftsBeyondTheEnd(Scheduler):
    def draft_room(self):
        return [(sequence, levels + 3, nodes) for sequence, levels, nodes in super().draft_room()]


def live(found: Scheduler, seed: int, num_requests: int = 60) -> None:
    """Random arrivals, drafts, acceptances and cancellations; every promise checked at every step."""
    chance = random.Random(seed)
    rows = found.max_num_tokens
    arrivals = [
        state(f"r{at}", [chance.randrange(3) for _ in range(chance.randint(1, 14))], chance.randint(1, 10))
        for at in range(num_requests)
    ]
    arrived: list[SequenceState] = []
    expected: dict[str, list[int]] = {}
    done: set[str] = set()
    for _ in range(5000):
        if arrivals and chance.random() < 0.5:
            sequence = arrivals.pop(0)
            found.add(sequence)
            arrived.append(sequence)
            expected[sequence.request.id] = list(sequence.tokens)
        if not arrivals and not found.running and not found.waiting:
            break
        room = {sequence.request.id: levels for sequence, levels, _ in found.draft_room()}
        plan = found.schedule({name: min(most, chance.randint(0, 4)) for name, most in room.items()})
        assert sum(row.count + row.num_draft for row in plan.rows) <= rows
        assert len(found.running) <= found.max_batch_size
        assert len({id(row.sequence) for row in plan.rows}) == len(plan.rows)
        running = [sequence for sequence in arrived if sequence in found.running]
        waiting = [sequence for sequence in arrived if sequence in found.waiting]
        assert found.running == running, "admitted out of order"
        assert list(found.waiting) == waiting, "queued out of order"
        for row in plan.rows:
            check_row(row, expected[row.sequence.request.id])
            kept = row.count
            if row.reaches_end:
                taken = chance.randint(0, row.num_draft)
                new = [chance.randrange(3) for _ in range(taken + 1)]
                kept += taken
                row.sequence.tokens += new
                expected[row.sequence.request.id] += new
            found.cache.commit(row.table, row.sequence.tokens, range(kept))
            if row.sequence.num_remaining == 0 or chance.random() < 0.01:
                found.remove(row.sequence)
                done.add(row.sequence.request.id)
        found.cache.check_integrity()
    assert len(done) == num_requests, "not everybody finished"
    assert found.cache.pages_held == 0


def check_row(row: ScheduledRows, expected: list[int]) -> None:
    sequence = row.sequence
    assert sequence.tokens == expected, "a token was lost"
    assert row.start == sequence.num_computed
    assert row.count >= 1
    stop = row.start + row.count + row.num_draft
    assert len(row.table.slots(row.start, stop)) == stop - row.start
    assert row.num_draft == 0 or (row.count == 1 and row.reaches_end)
    assert stop < len(sequence.request.prompt_tokens) + sequence.request.max_new_tokens


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("page_tokens", [1, 4])
def test_promises_hold_at_every_step(seed: int, page_tokens: int) -> None:
    found = scheduler(num_pages=32 // page_tokens, page_tokens=page_tokens, rows=9)
    live(found, seed)
    assert found.num_preemptions > 0
    assert found.num_prefix_hit_tokens > 0


@pytest.mark.parametrize(
    "broken", [DropsTokensOnPreemption, PreemptsTheOldest, ForgetsTheRowBudget, DraftsBeyondTheEnd]
)
def test_a_broken_scheduler_is_noticed(broken: type[Scheduler]) -> None:
    with pytest.raises(AssertionError):
        live(broken(PagedCache(8, 4), max_batch_size=4, max_num_tokens=9), seed=0)
