"""The law above all others: whatever is drafted, paged, chunked, shared, preempted or cancelled around a
request, its tokens are those of the plain reference. In float64, so that rounding decides nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tiny import Family
from tiny_engine import VOCAB, Hostile, TestDrafter, expected, oracle, tiny_engine, workload

from trtspec.embedded import engine as engine_module
from trtspec.embedded.acceptance import rejection, typical
from trtspec.embedded.drafters import DraftView
from trtspec.embedded.drafters.ngram import NgramDrafter
from trtspec.embedded.engine import EmbeddedEngine
from trtspec.embedded.kvcache import PagedCache
from trtspec.embedded.scheduler import ScheduledRows
from trtspec.embedded.tree import Draft, chain, depths
from trtspec.engine import Completion, EngineStats, Request, Sampling, generate

FAMILIES: tuple[Family, ...] = ("llama", "qwen3")
SAMPLED = Sampling(temperature=0.8, top_k=20, top_p=0.95, seed=3)


def ngram() -> NgramDrafter:
    return NgramDrafter(num_draft_tokens=4, min_ngram=1, max_ngram=3)


def check(completions: Sequence[Completion], requests: Sequence[Request], family: Family = "llama") -> None:
    for completion, request in zip(completions, requests, strict=True):
        assert completion.request_id == request.id
        assert completion.tokens == expected(family, request), request.id


def run_and_check(
    engine: EmbeddedEngine, requests: Sequence[Request], family: Family = "llama"
) -> EngineStats:
    check(generate(engine, requests), requests, family)
    engine.check_integrity()
    assert engine.stats().pages_held == 0
    return engine.stats()


# ---------------------------------------------------------------- the grid


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("drafting", [True, False])
@pytest.mark.parametrize("page_tokens", [1, 16])
@pytest.mark.parametrize("rows", [7, 64, 1024])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_greedy_tokens_are_the_references(
    family: Family, drafting: bool, page_tokens: int, rows: int, prefix_cache: bool
) -> None:
    requests = workload()
    engine = tiny_engine(
        family,
        page_tokens=page_tokens,
        rows=rows,
        prefix_cache=prefix_cache,
        drafter=ngram() if drafting else None,
    )
    run_and_check(engine, requests, family)  # a batch of 8, hitting prefixes of its neighbours
    missed = engine.stats().prefix_hit_tokens
    for request in requests[2:5]:  # alone, hitting all of its own prompt
        run_and_check(engine, [request], family)
    stats = engine.stats()
    assert stats.accepted_tokens > 20 if drafting else stats.drafted_tokens == 0
    if prefix_cache:
        prompts = sum(len(request.prompt_tokens) for request in requests[2:5])
        assert stats.prefix_hit_tokens - missed == prompts - 3
    else:
        assert stats.prefix_hit_tokens == 0


@pytest.mark.parametrize("page_tokens", [1, 4, 16])
@pytest.mark.parametrize("rows", [7, 64])
def test_hostile_tree_drafts_change_nothing(page_tokens: int, rows: int) -> None:
    requests = workload()
    engine = tiny_engine(page_tokens=page_tokens, rows=rows, drafter=oracle(requests, kind=Hostile))
    run_and_check(engine, requests)
    stats = run_and_check(engine, requests)
    assert stats.drafted_tokens > stats.accepted_tokens > 20


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafting", [True, False])
def test_preemption_loses_nothing(sampling: Sampling, drafting: bool) -> None:
    requests = workload(sampling)
    longest = max(len(request.prompt_tokens) + request.max_new_tokens for request in requests)
    for prefix_cache in (True, False):
        engine = tiny_engine(
            kv_tokens=-(-longest // 4) * 4 + 8,
            prefix_cache=prefix_cache,
            drafter=oracle(requests, kind=Hostile) if drafting else None,
        )
        assert run_and_check(engine, requests).preemptions > 0


# ---------------------------------------------------------------- sampling


@pytest.mark.parametrize("page_tokens", [1, 16])
def test_seeded_sampling_does_not_depend_on_drafts_or_neighbours(page_tokens: int) -> None:
    requests = [
        replace(request, sampling=replace(SAMPLED, seed=at, temperature=(0.5, 1.0, 1.5)[at % 3]))
        for at, request in enumerate(workload())
    ]
    for drafter in (None, ngram(), oracle(requests, kind=Hostile)):
        engine = tiny_engine(page_tokens=page_tokens, drafter=drafter)
        stats = run_and_check(engine, requests)
        for request in requests[1:4]:
            run_and_check(engine, [request])
        assert drafter is None or stats.accepted_tokens > 0


def test_greedy_requests_are_exact_under_every_acceptance() -> None:
    requests = workload()

    def typical_acceptance(draft, law, draw):  # type: ignore[no-untyped-def]
        return typical(draft, law, draw, epsilon=0.3, delta=0.09)

    for accept in (rejection, typical_acceptance):
        engine = tiny_engine(drafter=oracle(requests, kind=Hostile), accept=accept)
        assert run_and_check(engine, requests).accepted_tokens > 0


def test_the_named_acceptance_serves_requests_that_sample() -> None:
    calls = []

    def spy(draft, law, draw):  # type: ignore[no-untyped-def]
        calls.append(len(draft))
        return rejection(draft, law, draw)

    requests = workload(SAMPLED, count=3)
    neighbours = workload(count=6)[4:]
    completions = generate(
        tiny_engine(drafter=oracle([*requests, *neighbours]), accept=spy), [*requests, *neighbours]
    )
    check(completions[3:], neighbours)
    assert max(calls) == 4
    assert len(calls) == sum(completion.steps for completion in completions[:3])


# ---------------------------------------------------------------- ends


def test_max_new_tokens_is_met_exactly() -> None:
    base = workload(count=1)[0]
    for wanted in range(1, 12):
        request = replace(base, max_new_tokens=wanted)
        engine = tiny_engine(drafter=oracle([base]))
        [completion] = generate(engine, [request])
        assert completion.tokens == expected("llama", base)[:wanted]
        assert completion.finish_reason == "length"


def test_a_stop_token_inside_an_accepted_draft_ends_there() -> None:
    base = workload(count=1)[0]
    answer = expected("llama", base)
    # The prompt yields token 0; drafts of 4 then cover 1-4 (and 5 is the bonus), 6-9 (and 10) ...
    at = next(at for at in (2, 3, 7, 8, 12, 13) if answer[at] not in answer[:at])
    request = replace(base, stop_tokens=frozenset({answer[at], VOCAB + 5}))
    engine = tiny_engine(drafter=oracle([base]))
    [completion] = generate(engine, [request])
    assert completion.tokens == answer[: at + 1]
    assert completion.finish_reason == "stop"
    drafts, cut = divmod(at, 5)
    assert completion.drafted == 4 * (drafts + 1)
    assert completion.accepted == 4 * drafts + cut  # what was verified behind the stop token is not output
    # What lies behind the stop token must not be found either.
    longer = replace(base, prompt_tokens=(*base.prompt_tokens, *answer[: at + 1]), max_new_tokens=3)
    run_and_check(engine, [longer])
    assert engine.stats().prefix_hit_tokens <= len(longer.prompt_tokens) - 1


def test_cancelled_neighbours_leave_no_trace() -> None:
    requests = workload()
    engine = tiny_engine(page_tokens=4, kv_tokens=256, drafter=oracle(requests, kind=Hostile))
    for request in requests:
        engine.add(request)
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    reasons = {}
    for step in range(400):
        if step in (1, 3, 5):
            engine.cancel(f"r{step}")
        for output in engine.step():
            tokens[output.request_id] += output.new_tokens
            reasons[output.request_id] = output.finish_reason
        engine.check_integrity()
        if not engine.in_flight:
            break
    for request in requests:
        answer = expected("llama", request)
        if reasons[request.id] == "cancelled":
            assert tuple(tokens[request.id]) == answer[: len(tokens[request.id])]
        else:
            assert tuple(tokens[request.id]) == answer
    assert sorted(name for name, reason in reasons.items() if reason == "cancelled") == ["r1", "r3", "r5"]


@pytest.mark.parametrize("seed", range(3))
def test_soak(seed: int) -> None:
    """Random arrivals and cancellations under a small cache, books checked after every step."""
    chance = random.Random(seed)
    base = workload() + [
        replace(request, id=f"s{at}", sampling=SAMPLED) for at, request in enumerate(workload())
    ]
    requests = [replace(chance.choice(base), id=f"q{at}") for at in range(50)]
    drafter = oracle(requests, kind=Hostile)
    engine = tiny_engine(page_tokens=3, kv_tokens=126, batch=5, rows=20, drafter=drafter)
    arriving = list(requests)
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    cancelled: set[str] = set()
    finished: set[str] = set()
    while arriving or engine.in_flight:
        if arriving and chance.random() < 0.6:
            engine.add(arriving.pop())
        if chance.random() < 0.1:
            engine.cancel(f"q{chance.randint(len(arriving), len(requests) - 1)}")
        for output in engine.step():
            tokens[output.request_id] += output.new_tokens
            if output.finish_reason == "cancelled":
                cancelled.add(output.request_id)
            elif output.finish_reason is not None:
                finished.add(output.request_id)
        engine.check_integrity()
    assert cancelled | finished == tokens.keys()
    assert cancelled
    for request in requests:
        answer, found = expected("llama", request), tuple(tokens[request.id])
        assert found == (answer[: len(found)] if request.id in cancelled else answer)
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 0
    assert stats.pages_held == 0
    assert sorted(drafter.released) == sorted(tokens)


# ---------------------------------------------------------------- broken engines, which must be noticed


class KeepsRejectedRows(PagedCache):
    """Takes the rows as written, whichever were accepted: stale KV."""

    def commit(self, table, known, rows):
        return super().commit(table, known, range(len(rows)))


class PublishesDrafts(EmbeddedEngine):
    """Makes pages findable before their drafts were verified, and writes to them afterwards."""

    def _commit(self, rows: ScheduledRows, draft: Draft, accepted: Any, store: Any) -> Any:
        table = rows.table
        computed = table.num_computed
        table.num_computed += rows.count + len(draft)
        self._cache._publish(table, [*rows.sequence.tokens, *draft.tokens])
        table.num_computed = computed
        return super()._commit(rows, draft, accepted, store)


class LosesDrawsOnPreemption(EmbeddedEngine):
    def _round(self):  # type: ignore[no-untyped-def]
        preemptions = self._scheduler.num_preemptions
        outputs = super()._round()
        if self._scheduler.num_preemptions > preemptions:
            for sequence in self._scheduler.waiting:
                sampling = sequence.request.sampling
                self._draws[sequence.request.id] = engine_module.generator_draw(sampling.seed)
        return outputs


class WrongTail(TestDrafter):
    """Drafts the same three wrong tokens always."""

    def draft(self, view: DraftView) -> Draft:
        return chain((5, 6, 7)[: view.max_draft])


def hostile_run(engine: EmbeddedEngine | None = None) -> None:
    requests = workload()
    engine = engine or tiny_engine(page_tokens=4, drafter=oracle(requests, kind=Hostile))
    check(generate(engine, requests), requests)


def test_stale_kv_after_rejection_is_noticed() -> None:
    engine = tiny_engine(page_tokens=4, drafter=oracle(workload(), kind=Hostile))
    engine._cache.__class__ = KeepsRejectedRows
    with pytest.raises(AssertionError, match=r"^r\d"):
        hostile_run(engine)


def test_wrong_positions_in_a_branch_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    hostile_run()
    monkeypatch.setattr(engine_module, "depths", lambda draft: tuple(range(1, len(draft) + 1)))
    with pytest.raises(AssertionError, match=r"^r\d"):
        hostile_run()


def test_a_causal_mask_over_a_tree_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "tree_mask", lambda draft: None)
    with pytest.raises(AssertionError, match=r"^r\d"):
        hostile_run()


def test_publishing_drafts_is_noticed() -> None:
    def run(kind: type[EmbeddedEngine]) -> None:
        first = workload()
        engine = tiny_engine(page_tokens=4, drafter=WrongTail(), engine=kind)
        generate(engine, first)
        # Prompts that go on as the rejected drafts did.
        second = [
            replace(
                request,
                prompt_tokens=(*request.prompt_tokens, *expected("llama", request)[:cut], 5, 6, 7, 9),
                max_new_tokens=8,
            )
            for request in first[:4]
            for cut in (1, 2, 3, 4)
        ]
        for request in second:
            check(generate(engine, [request]), [request])

    run(EmbeddedEngine)
    with pytest.raises(AssertionError, match=r"^r\d"):
        run(PublishesDrafts)


def test_a_restarted_random_stream_is_noticed() -> None:
    requests = workload(SAMPLED)
    with pytest.raises(AssertionError, match=r"^r\d"):
        run_and_check(tiny_engine(kv_tokens=112, engine=LosesDrawsOnPreemption), requests)


# depths is what the position test replaces; should it move, that test would prove nothing.
assert engine_module.depths is depths
