"""A draft model changes no token, and drafts what it would write by itself: its KV is in step with what the
target turned down, however the target's side is paged, chunked, shared, preempted or cancelled.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from draft_models import Kind, Watched, draft_decoder, drafter_of
from test_identity import SAMPLED, check, run_and_check
from tiny_engine import VOCAB, expected, tiny_engine, workload

from trtspec.embedded.acceptance import rejection
from trtspec.embedded.drafters import DraftView
from trtspec.embedded.drafters.draft_model import DraftModelDrafter
from trtspec.engine import Sampling, generate

KINDS: tuple[Kind, ...] = ("itself", "noisy", "stranger")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_tokens", [1, 16])
@pytest.mark.parametrize("rows", [7, 1024])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_greedy_tokens_are_the_references(
    kind: Kind, page_tokens: int, rows: int, prefix_cache: bool
) -> None:
    requests = workload()
    drafter = drafter_of(draft_decoder(kind), page_tokens=page_tokens, rows=rows, prefix_cache=prefix_cache)
    watched = Watched(drafter, kind)
    engine = tiny_engine(page_tokens=page_tokens, rows=rows, prefix_cache=prefix_cache, drafter=watched)
    run_and_check(engine, requests)
    for request in requests[2:5]:  # alone, hitting all of its own prompt on both sides
        run_and_check(engine, [request])
    stats = engine.stats()
    assert drafter.pages_held == 0
    assert watched.num_drafts > 20
    if kind == "itself":
        assert stats.accepted_tokens == stats.drafted_tokens > 100
    if kind == "noisy":
        assert stats.drafted_tokens > stats.accepted_tokens > 50
    assert stats.draft_seconds > 0


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("kv_tokens", "prefix_cache"), [(1024, False), (180, True)])
def test_preemption_loses_nothing(sampling: Sampling, kv_tokens: int, prefix_cache: bool) -> None:
    requests = workload(sampling)
    longest = max(len(request.prompt_tokens) + request.max_new_tokens for request in requests)
    drafter = drafter_of(draft_decoder("noisy"), kv_tokens=kv_tokens, prefix_cache=prefix_cache)
    engine = tiny_engine(
        kv_tokens=-(-longest // 4) * 4 + 8, prefix_cache=prefix_cache, drafter=Watched(drafter, "noisy")
    )
    stats = run_and_check(engine, requests)
    assert stats.preemptions > 0
    assert stats.accepted_tokens > 20
    assert drafter.pages_held == 0


def test_seeded_sampling_with_exact_acceptance_is_that_without_drafts() -> None:
    requests = [
        replace(request, sampling=replace(SAMPLED, seed=at, temperature=(0.5, 1.0, 1.5)[at % 3]))
        for at, request in enumerate(workload())
    ]
    engine = tiny_engine(drafter=Watched(drafter_of(draft_decoder("itself")), "itself"))
    assert run_and_check(engine, requests).accepted_tokens > 20


def test_the_same_seed_gives_the_same_tokens_under_rejection() -> None:
    def run(**options: int) -> list[tuple[int, ...]]:
        drafter = drafter_of(draft_decoder("noisy"), sampled=True, **options)
        engine = tiny_engine(drafter=drafter, accept=rejection)
        completions = generate(engine, workload(SAMPLED))
        assert engine.stats().accepted_tokens > 50
        return [completion.tokens for completion in completions]

    assert run() == run() == run(page_tokens=1)
    drafter = drafter_of(draft_decoder("itself"), sampled=True)
    engine = tiny_engine(drafter=drafter, accept=rejection)
    generate(engine, workload(SAMPLED))
    stats = engine.stats()
    assert stats.accepted_tokens == stats.drafted_tokens > 100  # sum(min(p, p)) is 1


def test_greedy_neighbours_of_sampled_requests_are_drafted_for_greedily() -> None:
    greedy = workload(count=4)
    sampled = [replace(request, id=f"s{request.id}") for request in workload(SAMPLED, count=4)]
    drafter = drafter_of(draft_decoder("noisy"), sampled=True)
    engine = tiny_engine(drafter=drafter, accept=rejection)
    completions = generate(engine, [*greedy, *sampled])
    check(completions[:4], greedy)
    alone = tiny_engine(drafter=drafter_of(draft_decoder("noisy")))
    assert sum(c.accepted for c in completions[:4]) == sum(c.accepted for c in generate(alone, greedy))


@pytest.mark.parametrize("seed", range(2))
def test_soak(seed: int) -> None:
    """Random arrivals and cancellations, both caches too small; books and drafts checked in every step."""
    chance = random.Random(seed)
    base = workload() + [
        replace(request, id=f"s{at}", sampling=SAMPLED) for at, request in enumerate(workload())
    ]
    requests = [replace(chance.choice(base), id=f"q{at}") for at in range(25)]
    drafter = drafter_of(draft_decoder("noisy"), page_tokens=3, kv_tokens=150, rows=20)
    watched = Watched(drafter, "noisy")
    engine = tiny_engine(page_tokens=3, kv_tokens=126, batch=5, rows=20, drafter=watched)
    arriving = list(requests)
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    while arriving or engine.in_flight:
        if arriving and chance.random() < 0.6:
            engine.add(arriving.pop())
        if chance.random() < 0.05:
            engine.cancel(f"q{chance.randint(len(arriving), len(requests) - 1)}")
        for output in engine.step():
            tokens[output.request_id] += output.new_tokens
        engine.check_integrity()
        drafter.check_integrity()
    for request in requests:
        found = tuple(tokens[request.id])
        assert found == expected("llama", request)[: len(found)]
    assert engine.stats().preemptions > 0
    assert engine.stats().accepted_tokens > 50
    assert drafter.pages_held == 0
    assert not drafter._states


# ---------------------------------------------------------------- any history of acceptance


def walk(watched: Watched, *, rounds: int = 200, seed: int = 0) -> None:
    """Sequences that come, go, pause and grow by part of their draft and by other tokens."""
    chance = random.Random(seed)
    known: dict[str, list[int]] = {}
    drafted: dict[str, tuple[int, ...]] = {}
    for turn in range(rounds):
        if len(known) < 4:
            known[f"w{turn}"] = [chance.randrange(VOCAB) for _ in range(chance.choice((1, 2, 9, 30)))]
        elif chance.random() < 0.05:
            gone = chance.choice(sorted(known))
            watched.release(gone)
            del known[gone]
        views = []
        for name, tokens in known.items():
            if chance.random() < 0.7:
                draft = drafted.pop(name, ())
                tokens += draft[: chance.randint(0, len(draft))]
                tokens += [chance.randrange(VOCAB) for _ in range(chance.choice((1, 1, 1, 2)))]
                views.append(DraftView(name, tokens, chance.choice((0, 1, 4, 9))))
        for view, draft in zip(views, watched.propose(views), strict=True):
            drafted[view.id] = draft.tokens
        for name in [name for name, tokens in known.items() if len(tokens) > 60]:
            watched.release(name)
            del known[name]
    assert watched.num_drafts > rounds / 2
    for name in known:
        watched.release(name)
    assert watched.drafter.pages_held == 0


@pytest.mark.parametrize("kv_tokens", [1024, 200])
@pytest.mark.parametrize("rows", [7, 64])
@pytest.mark.parametrize("page_tokens", [1, 4])
def test_drafts_follow_any_history(kv_tokens: int, rows: int, page_tokens: int) -> None:
    drafter = drafter_of(draft_decoder("stranger"), page_tokens=page_tokens, kv_tokens=kv_tokens, rows=rows)
    walk(Watched(drafter, "stranger"))


class KeepsRejected(DraftModelDrafter):
    """Takes what it drafted for what became output, as far as that has tokens."""

    def _rolled_back(self, state, tokens):
        start = state.table.num_computed if state.table else 0
        state.written = list(tokens[start : min(start + len(state.written), len(tokens) - 1)])
        return super()._rolled_back(state, tokens)


class ForgetsTheLast(DraftModelDrafter):
    """Does not compute the last drafted token when the whole draft was accepted."""

    def _rolled_back(self, state, tokens):
        if state.table is not None and len(tokens) - state.table.num_computed > len(state.written) + 1:
            state.written = list(tokens[state.table.num_computed : len(tokens) - 1])
        return super()._rolled_back(state, tokens)


class WritesBesideItsPages(DraftModelDrafter):
    """Drafts on without slots for it."""

    def _make_room(self, table, num_tokens, busy):
        super()._make_room(table, table.num_computed + 1, busy)
        return num_tokens


class LeaksOnRelease(DraftModelDrafter):
    def release(self, sequence_id):
        self._states.pop(sequence_id, None)


@pytest.mark.parametrize("broken", [KeepsRejected, ForgetsTheLast, WritesBesideItsPages, LeaksOnRelease])
def test_a_drafter_out_of_step_is_noticed(broken: type[DraftModelDrafter]) -> None:
    def run(drafter_kind: type[DraftModelDrafter]) -> None:
        walk(Watched(drafter_of(draft_decoder("noisy"), kind=drafter_kind), "noisy"), rounds=100)

    run(DraftModelDrafter)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        run(broken)
