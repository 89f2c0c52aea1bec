"""Drafting with trained heads: no token changes, and every draft is the one that the papers define.

The second law is the stronger one for the drafter: whatever is paged, chunked, shared, preempted or dropped
around it, a draft depends on the sequence's tokens alone. It fails as soon as a feature is stale, a rejected
branch survives or a position is off.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_engine import workload
from tiny_heads import METHODS, answer, drafter_of, feature_drafter, heads_engine, reference_draft

from trtspec.embedded.acceptance import Accepted, rejection
from trtspec.embedded.drafters import DraftView
from trtspec.embedded.drafters import feature_drafter as feature_drafter_module
from trtspec.embedded.drafters.eagle import EagleHead
from trtspec.embedded.engine import EmbeddedEngine
from trtspec.embedded.kvcache import CacheCorrupted
from trtspec.embedded.tree import Draft
from trtspec.engine import EngineStats, Request, Sampling, generate

SAMPLED = Sampling(temperature=0.8, top_k=20, top_p=0.95, seed=3)


def run_and_check(
    engine: EmbeddedEngine, requests: Sequence[Request], base: Sequence[Request]
) -> EngineStats:
    """``base[i]`` is the workload's request of which ``requests[i]`` is a copy under another id."""
    for completion, request in zip(generate(engine, requests), base, strict=True):
        assert completion.tokens == answer(request), request.id
    engine.check_integrity()
    check_drafter(engine)
    assert engine.stats().pages_held == 0
    return engine.stats()


def check_drafter(engine: EmbeddedEngine) -> None:
    check = getattr(engine._drafter, "check_integrity", None)
    if check is not None:
        check()


# ---------------------------------------------------------------- tokens


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("page_tokens", [1, 16])
@pytest.mark.parametrize("rows", [17, 1024])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_greedy_tokens_are_the_references(
    method: str, page_tokens: int, rows: int, prefix_cache: bool
) -> None:
    drafter = drafter_of(
        method, page_tokens=page_tokens, num_pages=1200 // page_tokens, prefix_cache=prefix_cache
    )
    engine = heads_engine(page_tokens=page_tokens, rows=rows, prefix_cache=prefix_cache, drafter=drafter)
    requests = workload()
    stats = run_and_check(engine, requests, requests)  # a batch of 8, hitting prefixes of its neighbours
    assert stats.generated_tokens / stats.decode_steps > 1.4
    run_and_check(engine, requests[2:4], requests[2:4])  # hitting all of their own prompts
    if prefix_cache:
        assert engine.stats().prefix_hit_tokens > stats.prefix_hit_tokens


@pytest.mark.parametrize("method", METHODS)
def test_preemption_loses_nothing(method: str) -> None:
    requests = workload()
    longest = max(len(request.prompt_tokens) + request.max_new_tokens for request in requests)
    for prefix_cache in (True, False):
        engine = heads_engine(
            kv_tokens=-(-longest // 4) * 4 + 8, prefix_cache=prefix_cache, drafter=drafter_of(method)
        )
        stats = run_and_check(engine, requests, requests)
        assert stats.preemptions > 0
        assert stats.accepted_tokens > 20


@pytest.mark.parametrize("method", [*METHODS, "eagle-chain", "eagle3-static"])
def test_seeded_sampling_does_not_depend_on_drafts(method: str) -> None:
    requests = workload(SAMPLED)
    stats = run_and_check(heads_engine(drafter=drafter_of(method)), requests, requests)
    assert stats.accepted_tokens > 0


@pytest.mark.parametrize("method", METHODS)
def test_no_draft_above_max_concurrency(method: str) -> None:
    """And what was held back is counted; drafts go on as if nothing had been when the batch is smaller."""
    engine = heads_engine(drafter=drafter_of(method), max_concurrency=2)
    requests = workload()
    stats = run_and_check(engine, requests, requests)
    assert 0 < stats.accepted_tokens <= stats.drafted_tokens < 900
    assert stats.held_back_steps > 20
    unlimited = run_and_check(heads_engine(drafter=drafter_of(method)), requests, requests)
    assert unlimited.held_back_steps == 0


@pytest.mark.parametrize("method", METHODS)
def test_soak(method: str) -> None:
    """Random arrivals and cancellations under small caches, all books checked after every step."""
    chance = random.Random(METHODS.index(method))
    base = {f"q{at}": chance.choice(workload()) for at in range(25)}
    requests = [replace(request, id=name) for name, request in base.items()]
    # Fewer pages than the sequences in flight may need: state is dropped and drafts go on with less context.
    drafter = drafter_of(method, page_tokens=3, num_pages=36, max_batch_size=5)
    engine = heads_engine(page_tokens=3, kv_tokens=126, batch=5, rows=30, drafter=drafter)
    arriving = list(requests)
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    ended: dict[str, str] = {}
    while arriving or engine.in_flight:
        if arriving and chance.random() < 0.6:
            engine.add(arriving.pop())
        if chance.random() < 0.1:
            engine.cancel(f"q{chance.randint(len(arriving), len(requests) - 1)}")
        for output in engine.step():
            tokens[output.request_id] += output.new_tokens
            if output.finish_reason is not None:
                ended[output.request_id] = output.finish_reason
        engine.check_integrity()
        check_drafter(engine)
    for name, request in base.items():
        found, whole = tuple(tokens[name]), answer(request)
        assert found == (whole[: len(found)] if ended[name] == "cancelled" else whole)
    assert engine.stats().accepted_tokens > 0
    if "-" in method:
        assert drafter._cache.num_sequences == 0
        assert not drafter._draws
    else:
        assert not drafter._last


# ---------------------------------------------------------------- drafts


class Watched:
    """Holds every ``every``th draft of the drafter to the reference; counts what it compared."""

    def __init__(self, drafter: Any, kind: str, shape: str, every: int = 5) -> None:
        self.drafter, self.kind, self.shape, self.every = drafter, kind, shape, every
        self.hidden_layers = drafter.hidden_layers
        self.seen = self.compared = self.empty = 0

    def propose(self, sequences: Sequence[DraftView]) -> list[Draft]:
        drafts: list[Draft] = self.drafter.propose(sequences)
        for view, draft in zip(sequences, drafts, strict=True):
            self.seen += 1
            self.empty += not len(draft)
            if self.seen % self.every == 0:
                wanted = reference_draft(self.kind, self.shape, list(view.tokens), view.max_draft, view.room)
                assert draft == wanted, f"{view.id} at {len(view.tokens)}"
                self.compared += 1
        return drafts

    def observe(self, *arguments: Any) -> None:
        self.drafter.observe(*arguments)

    def release(self, sequence_id: str) -> None:
        self.drafter.release(sequence_id)

    def check_integrity(self) -> None:
        self.drafter.check_integrity()


FEATURED = (("eagle", "static"), ("eagle", "dynamic"), ("eagle3", "chain"), ("eagle3", "dynamic"))


@pytest.mark.parametrize(("kind", "shape"), FEATURED)
@pytest.mark.parametrize("page_tokens", [1, 16])
def test_drafts_depend_on_the_tokens_alone(kind: str, shape: str, page_tokens: int) -> None:
    watched = Watched(
        feature_drafter(kind, shape, page_tokens=page_tokens, num_pages=1200 // page_tokens), kind, shape
    )
    engine = heads_engine(page_tokens=page_tokens, rows=60, drafter=watched)
    requests = workload()
    run_and_check(engine, requests, requests)
    again = [replace(request, id=f"again-{request.id}") for request in requests]
    run_and_check(engine, again, requests)  # all prompts, and their features, come from the caches
    assert engine.stats().prefix_hit_tokens > 100
    assert watched.compared > 30
    assert watched.empty == 0


@pytest.mark.parametrize(("kind", "shape"), [("eagle", "dynamic"), ("eagle3", "chain")])
def test_drafts_survive_preemption(kind: str, shape: str) -> None:
    watched = Watched(feature_drafter(kind, shape), kind, shape)
    engine = heads_engine(kv_tokens=120, drafter=watched)
    requests = workload()
    assert run_and_check(engine, requests, requests).preemptions > 0
    assert watched.compared > 20
    assert watched.empty == 0


def test_a_lost_past_gives_drafts_from_what_is_left() -> None:
    """The target finds its prefix in the cache and the drafter does not: fewer pairs, the same tokens."""
    drafter = feature_drafter("eagle", "dynamic")
    engine = heads_engine(drafter=drafter)
    requests = workload()
    run_and_check(engine, requests, requests)
    engine._drafter = fresh = feature_drafter("eagle", "dynamic")
    before = engine.stats()
    again = [replace(request, id=f"again-{request.id}") for request in requests]
    stats = run_and_check(engine, again, requests)
    fresh.check_integrity()
    assert stats.prefix_hit_tokens > before.prefix_hit_tokens
    assert stats.accepted_tokens > before.accepted_tokens


# ---------------------------------------------------------------- broken drafters, which must be noticed


class OldFeatures(EagleHead):
    """Pairs a token with a feature one position too old."""

    def fuse(self, hidden: Any) -> torch.Tensor:
        return super().fuse(hidden).roll(1, 0)


def kept_in_row_order(view: DraftView, outcome: Accepted | None, num_rows: int, ends: Any) -> list[int]:
    """Takes the first rows for the accepted ones: features of rejected branches stay."""
    rows = whole(view, outcome, num_rows, ends)
    return list(range(len(rows)))


whole = feature_drafter_module._final_rows


def watched_run(drafter: Any) -> EngineStats:
    engine = heads_engine(drafter=Watched(drafter, "eagle", "dynamic", every=3))
    return run_and_check(engine, workload(), workload())


def accepted_by(drafter: Any) -> int:
    return run_and_check(heads_engine(drafter=drafter), workload(), workload()).accepted_tokens


def test_stale_features_are_noticed() -> None:
    from tiny_heads import eagle_head

    watched_run(feature_drafter("eagle", "dynamic"))
    old = OldFeatures(eagle_head("eagle").weights)
    with pytest.raises(AssertionError, match=r"^r\d at"):
        watched_run(feature_drafter("eagle", "dynamic", head=old))
    assert accepted_by(feature_drafter("eagle", "dynamic", head=old)) < 0.7 * accepted_by(
        feature_drafter("eagle", "dynamic")
    )


def test_features_of_rejected_branches_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = accepted_by(feature_drafter("eagle", "dynamic"))
    monkeypatch.setattr(feature_drafter_module, "_final_rows", kept_in_row_order)
    with pytest.raises(AssertionError, match=r"^r\d at"):
        watched_run(feature_drafter("eagle", "dynamic"))
    assert accepted_by(feature_drafter("eagle", "dynamic")) < right


def test_siblings_that_see_each_other_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_drafter_module.FeatureDrafter, "_visible", lambda self, one: None)
    with pytest.raises(AssertionError, match=r"^r\d at"):
        watched_run(feature_drafter("eagle", "dynamic"))


def test_a_feature_cache_that_leaks_is_noticed() -> None:
    drafter = feature_drafter("eagle", "dynamic")
    engine = heads_engine(drafter=drafter)
    engine.add(workload()[0])
    for _ in range(3):
        engine.step()
    drafter.check_integrity()
    drafter._cache._states.clear()
    with pytest.raises(CacheCorrupted):
        drafter.check_integrity()


def test_rejection_acceptance_serves_drawn_candidates() -> None:
    """Drawn chains with their laws: greedy neighbours keep their tokens, acceptance is not worse."""
    requests = workload(SAMPLED, count=4)
    greedy = workload()[4:]
    accepted = {}
    for samples in (True, False):
        engine = heads_engine(drafter=feature_drafter("eagle3", "chain", samples=samples), accept=rejection)
        completions = generate(engine, [*requests, *greedy])
        for completion, request in zip(completions[4:], greedy, strict=True):
            assert completion.tokens == answer(request)
        check_drafter(engine)
        accepted[samples] = engine.stats().accepted_tokens
    assert accepted[True] > 0
