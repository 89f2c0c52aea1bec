"""10,000 random operations over every drafter, adaptive and not: after each the books balance, no token
differs, and drafts are those of a drafter that has never seen anything but the tokens.

Operations: a request comes (often one seen before: prefix hits), is cancelled, a text is scored in between,
or the engine steps. Pages are so few that sequences are preempted. Times are random numbers, so what adaptive
drafting cuts is random too. In float64.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from draft_models import continuation, draft_decoder
from draft_models import drafter_of as model_drafter
from test_identity import SAMPLED
from tiny_engine import expected, tiny_engine, workload
from tiny_heads import LAYERS, answer, drafter_of, heads_engine, hidden_states

from trtspec.embedded.acceptance import Accepted
from trtspec.embedded.drafters import DraftView
from trtspec.embedded.drafters import feature_drafter as feature_drafter_module
from trtspec.embedded.drafters import medusa as medusa_module
from trtspec.embedded.drafters.adaptive import AdaptiveDrafter
from trtspec.embedded.drafters.draft_model import DraftModelDrafter
from trtspec.embedded.drafters.lookahead import LookaheadDrafter
from trtspec.embedded.drafters.ngram import NgramDrafter
from trtspec.embedded.engine import EmbeddedEngine
from trtspec.embedded.kvcache import CacheCorrupted, PagedCache
from trtspec.embedded.tree import Draft
from trtspec.engine import EngineStats, Request

STEPS = 10_000
PAGE_TOKENS, KV_TOKENS, BATCH, ROWS = 3, 75, 4, 40
HEADS = ("medusa", "hydra", "eagle-dynamic", "eagle3-chain")
MODELS = ("noisy", "stranger")
KINDS = ("ngram", "ngram-tree", "lookahead", *MODELS, *HEADS)
SOUND: dict[str, Callable[[], Any]] = {
    "ngram": lambda: NgramDrafter(4, 1, 3),
    "ngram-tree": lambda: NgramDrafter(8, 1, 3, branches=3),
    "lookahead": lambda: LookaheadDrafter(3, 3, 3),
    "noisy": lambda: model_drafter(draft_decoder("noisy")),  # often right
    "stranger": lambda: model_drafter(draft_decoder("stranger")),  # hardly ever
    **{kind: functools.partial(drafter_of, kind) for kind in HEADS},
}


class Watched:
    """Holds a share of the drafts to those of a fresh drafter; the books of the drafter always."""

    def __init__(self, kind: Any, drafter: Any, chance: random.Random, share: float) -> None:
        self.kind, self.drafter, self.chance, self.share = kind, drafter, chance, share
        self.hidden_layers = drafter.hidden_layers
        self.compared = 0

    def propose(self, sequences: Sequence[DraftView]) -> list[Draft]:
        drafts: list[Draft] = self.drafter.propose(sequences)
        for view, draft in zip(sequences, drafts, strict=True):
            # An empty draft may be for want of pages or of rows; a copier needs neither.
            if (len(draft) or "ngram" in self.kind) and self.chance.random() < self.share:
                self.compare(view, draft)
                self.compared += 1
        return drafts

    def compare(self, view: DraftView, draft: Draft) -> None:
        if self.kind in MODELS:
            wanted = continuation(self.kind, tuple(view.tokens), len(draft))
            assert draft.tokens == wanted, f"stale draft of {view.id} at {len(view.tokens)}"
            return
        fresh = SOUND[self.kind]()
        if self.kind == "lookahead":
            # The window is the past's, its candidates begin with the text's own n-grams.
            fresh._pool_text(state := fresh._new_state(view.tokens), view.tokens)
            mine = self.drafter._states[view.id].pool.continuations(view.tokens[-1])
            latest = state.pool.continuations(view.tokens[-1])[:1]
            assert not latest or latest[0] in mine, f"stale draft of {view.id} at {len(view.tokens)}"
            return
        if self.kind in HEADS:
            known = list(view.tokens)
            states = hidden_states(known[:-1])
            fresh.observe(
                [replace(view, start=0)], [Accepted((), known[-1])], [states], [torch.zeros(1, LAYERS)]
            )
        [wanted_draft] = fresh.propose([view])
        assert draft == wanted_draft, f"stale draft of {view.id} at {len(view.tokens)}"

    def observe(self, *arguments: Any) -> None:
        self.drafter.observe(*arguments)

    def release(self, sequence_id: str) -> None:
        self.drafter.release(sequence_id)

    def cut(self, *arguments: Any) -> None:
        self.drafter.cut(*arguments)

    def window_nodes(self, sequence_id: str) -> Any:
        return self.drafter.window_nodes(sequence_id)

    def check_integrity(self) -> None:
        check = getattr(self.drafter, "check_integrity", None)
        if check is not None:
            check()


class Timed(AdaptiveDrafter):
    """Steps of random duration."""

    def __init__(self, inner: Any, chance: random.Random, **options: Any) -> None:
        self.now, self.chance = 0.0, chance
        super().__init__(inner, clock=lambda: self.now, **options)

    def observe(self, *arguments: Any) -> None:
        self.now += self.chance.random() ** 3
        super().observe(*arguments)


def walk(
    kind: Any, *, adaptive: bool, steps: int, make: Callable[[], Any] | None = None, share: float = 1.0
) -> tuple[EngineStats, Watched]:
    chance = random.Random(f"{kind} {adaptive}")
    watched = Watched(kind, (make or SOUND[kind])(), chance, share)
    drafter: Any = watched
    if adaptive:
        windows = watched if kind == "lookahead" else None
        costly = "ngram" not in kind and kind != "lookahead"
        drafter = Timed(watched, chance, costly=costly, windows=windows)
    make_engine: Callable[..., EmbeddedEngine] = heads_engine if kind in HEADS else tiny_engine
    told = answer if kind in HEADS else functools.partial(expected, "llama")
    engine = make_engine(
        page_tokens=PAGE_TOKENS, kv_tokens=KV_TOKENS, batch=BATCH, rows=ROWS, drafter=drafter
    )
    bases = [*workload(count=5), *(replace(one, sampling=SAMPLED) for one in workload(SAMPLED, count=5))]
    base_of: dict[str, Request] = {}
    said: dict[str, list[int]] = {}
    text = bases[1].prompt_tokens[:12]
    scores = engine.score(text).logprobs
    for step in range(steps):
        operation = chance.random()
        if operation < 0.15 and len(base_of) < 7:
            name, base = f"q{step}", chance.choice(bases)
            engine.add(replace(base, id=name, max_new_tokens=chance.randint(1, 24)))
            base_of[name], said[name] = base, []
        elif operation < 0.18 and base_of:
            engine.cancel(chance.choice(sorted(base_of)))
        elif operation < 0.19:
            assert engine.score(text, chunk_tokens=chance.randint(1, 12)).logprobs == pytest.approx(scores)
        else:
            for output in engine.step():
                name = output.request_id
                said[name] += output.new_tokens
                assert tuple(said[name]) == told(base_of[name])[: len(said[name])], name
                if output.finish_reason is not None:
                    del base_of[name]
        engine.check_integrity()
        watched.check_integrity()
    for name in sorted(base_of):
        engine.cancel(name)
    engine.step()
    engine.check_integrity()
    watched.check_integrity()
    assert engine.stats().pages_held == 0
    held = watched.drafter
    for state in ("_states", "_indexes", "_last", "_draws"):
        assert not getattr(held, state, None), f"{state} outlives its sequences"
    if adaptive:
        assert not drafter.acceptance._shift
        assert not drafter._brought
    return engine.stats(), watched


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_random_walk_keeps_every_book(kind: str, adaptive: bool) -> None:
    stats, watched = walk(kind, adaptive=adaptive, steps=-(-STEPS // (2 * len(KINDS))), share=0.1)
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 100
    assert stats.drafted_tokens > 50
    assert watched.compared > 5


# ---------------------------------------------------------------- what the walk must catch


def test_a_leaked_page_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    release = PagedCache.release

    def leaks(self: PagedCache, table: Any) -> None:
        if len(table._pages) > 5:
            table._pages[-1].refs += 1
        release(self, table)

    monkeypatch.setattr(PagedCache, "release", leaks)
    with pytest.raises(CacheCorrupted):
        walk("ngram", adaptive=False, steps=600)


class LeavesStaleKeys(DraftModelDrafter):
    """Rolls back, and leaves another token's keys where the last one that stayed should have its own."""

    def _rolled_back(self, state: Any, tokens: Any) -> Any:
        table = super()._rolled_back(state, tokens)
        if table is not None and table.num_computed > 1:
            slots = table.slots(0, table.num_computed)
            self._store.copy(slots[:1], slots[-1:])
        return table


def test_stale_keys_of_a_draft_model_are_noticed() -> None:
    def broken() -> DraftModelDrafter:
        return model_drafter(draft_decoder("noisy"), kind=LeavesStaleKeys)

    with pytest.raises(AssertionError, match="stale draft"):
        walk("noisy", adaptive=False, steps=600, make=broken)


@pytest.mark.parametrize("kind", ["medusa", "eagle-dynamic"])
def test_states_of_rejected_branches_are_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "medusa":
        monkeypatch.setattr(
            medusa_module.MedusaDrafter, "observe", lambda self, *args: keeps_the_last_row(self, *args)
        )
    else:
        whole = feature_drafter_module._final_rows
        monkeypatch.setattr(
            feature_drafter_module, "_final_rows", lambda *args: list(range(len(whole(*args))))
        )
    with pytest.raises(AssertionError, match="stale draft"):
        walk(kind, adaptive=False, steps=600)


def keeps_the_last_row(drafter: Any, sequences: Any, accepted: Any, hidden: Any, logits: Any) -> None:
    for view, outcome, states in zip(sequences, accepted, hidden, strict=True):
        if outcome is not None:
            drafter._last[view.id] = medusa_module._Last(len(view.tokens), states[LAYERS][-1].clone())


class Loses(NgramDrafter):
    """Its index skips what it was not asked for."""

    def _extend(self, index: Any, tokens: Any) -> None:
        index.indexed = max(index.indexed, len(tokens) - 3)
        super()._extend(index, tokens)


def test_a_stale_index_is_noticed() -> None:
    with pytest.raises(AssertionError, match="stale draft"):
        walk("ngram", adaptive=False, steps=600, make=lambda: Loses(4, 1, 3))


class Keeps(NgramDrafter):
    def release(self, sequence_id: str) -> None:
        """Nothing."""


def test_state_that_outlives_its_sequence_is_noticed() -> None:
    with pytest.raises(AssertionError, match="outlives"):
        walk("ngram", adaptive=False, steps=100, make=lambda: Keeps(4, 1, 3))
