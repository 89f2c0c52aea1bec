"""Lookahead, n-gram trees and a corpus under the law above all others: the tokens are those of the plain
reference, whatever is drafted, paged, chunked, shared, preempted or cancelled. In float64.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from branches import law_of
from reference import generate_plainly
from test_identity import SAMPLED, run_and_check
from tiny_engine import VOCAB, expected, store_for, tiny_decoder, tiny_engine, workload

from trtspec.embedded.acceptance import Accepted, exact, rejection
from trtspec.embedded.drafters import Drafter, DraftView
from trtspec.embedded.drafters.corpus import Corpus, build_corpus
from trtspec.embedded.drafters.lookahead import LookaheadDrafter
from trtspec.embedded.drafters.ngram import NgramDrafter
from trtspec.embedded.sampling import Draw, TargetLaw
from trtspec.embedded.tree import Draft, path_to, subset
from trtspec.engine import Request, Sampling, generate

Make = Callable[[], Drafter]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Every second answer of the workload, and noise."""
    chance = random.Random(1)
    texts: list[Sequence[int]] = [expected("llama", request) for request in workload()[::2]]
    texts += [[chance.randrange(VOCAB) for _ in range(50)] for _ in range(5)]
    return build_corpus(texts, tmp_path_factory.mktemp("corpus") / "store", vocab_size=VOCAB)


KINDS = ("lookahead", "lookahead-pairs", "lookahead-deep", "tree", "corpus-chain", "corpus-tree")


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, corpus: Corpus) -> Make:
    return {
        "lookahead": lambda: LookaheadDrafter(4, 3, 4),
        "lookahead-pairs": lambda: LookaheadDrafter(3, 2, 2),
        "lookahead-deep": lambda: LookaheadDrafter(2, 5, 3),
        "tree": lambda: NgramDrafter(6, 1, 3, branches=3),
        "corpus-chain": lambda: NgramDrafter(4, 1, 3, corpus=corpus),
        "corpus-tree": lambda: NgramDrafter(8, 1, 3, branches=4, corpus=corpus),
    }[request.param]


@pytest.mark.parametrize(
    ("page_tokens", "rows", "prefix_cache"),
    [(1, 7, True), (16, 1024, True), (4, 64, False), (1, 1024, False), (16, 7, False)],
)
def test_greedy_tokens_are_the_references(
    make: Make, page_tokens: int, rows: int, prefix_cache: bool
) -> None:
    requests = workload()
    engine = tiny_engine(page_tokens=page_tokens, rows=rows, prefix_cache=prefix_cache, drafter=make())
    run_and_check(engine, requests)
    for request in requests[2:4]:
        run_and_check(engine, [request])
    stats = engine.stats()
    assert stats.drafted_tokens > stats.accepted_tokens > 20
    assert (stats.prefix_hit_tokens > 0) == prefix_cache


def test_preemption_and_sampling_change_nothing(make: Make) -> None:
    requests = [
        replace(request, sampling=SAMPLED if at % 2 else Sampling()) for at, request in enumerate(workload())
    ]
    longest = max(len(request.prompt_tokens) + request.max_new_tokens for request in requests)
    engine = tiny_engine(kv_tokens=-(-longest // 4) * 4 + 8, drafter=make())
    stats = run_and_check(engine, requests)
    assert stats.preemptions > 0
    assert stats.accepted_tokens > 0


def test_cancelled_sequences_are_forgotten_and_books_balance(make: Make) -> None:
    requests = workload()
    drafter = make()
    engine = tiny_engine(page_tokens=3, kv_tokens=150, drafter=drafter)
    chance = random.Random(2)
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.in_flight:
        if chance.random() < 0.1:
            engine.cancel(f"r{chance.randrange(len(requests))}")
        for output in engine.step():
            tokens[output.request_id] += output.new_tokens
        engine.check_integrity()
    for request in requests:
        assert tuple(tokens[request.id]) == expected("llama", request)[: len(tokens[request.id])]
    state: Any = getattr(drafter, "_states", None)
    assert not (drafter._indexes if state is None else state)  # type: ignore[attr-defined]


# ---------------------------------------------------------------- output law


def test_the_output_law_is_the_targets_over_drafts_with_nodes_to_observe() -> None:
    """Exact acceptance and rejection over every branch of the draw, beside a rule that takes its draft."""
    generator = torch.Generator().manual_seed(0)
    draft = Draft((0, 1, 2, 1, 0, 2, 3), (-1, 0, 0, -1, 3, -1, 5), None, 3)
    logits = torch.randn(8, 4, generator=generator, dtype=torch.float64)

    def first_token(accept: Any) -> dict[int, float]:
        def program(draw: Draw) -> int:
            outcome = accept(draft, TargetLaw(logits, Sampling(temperature=0.9)), draw)
            assert all(node < draft.num_candidates for node in outcome.path)
            return draft.tokens[outcome.path[0]] if outcome.path else outcome.token

        return law_of(program)

    target = torch.softmax(logits[0] / 0.9, 0).tolist()
    for accept in (exact, rejection):
        assert first_token(accept) == pytest.approx(dict(enumerate(target)), abs=1e-12)

    def takes_the_first(draft: Draft, law: TargetLaw, draw: Draw) -> Any:
        return Accepted((0,), law.sample(1, draw))

    assert first_token(takes_the_first) != pytest.approx(dict(enumerate(target)), abs=1e-6)


# ---------------------------------------------------------------- lookahead itself


class Watched(LookaheadDrafter):
    """Checks every guess of the window against the target itself, run on the guess's own path."""

    checked = 0
    silent = 0

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.seen: dict[str, tuple[list[int], Draft, Any]] = {}

    def propose(self, sequences: Sequence[DraftView]) -> list[Draft]:
        drafts = super().propose(sequences)
        self.seen = {
            view.id: (list(view.tokens), draft, self._states[view.id])
            for view, draft in zip(sequences, drafts, strict=True)
        }
        for view, draft in zip(sequences, drafts, strict=True):
            assert len(draft) <= min(self.max_nodes, view.room)
            assert len(set(zip(draft.parents, draft.tokens, strict=True))) == len(draft)
        return drafts

    def observe(self, sequences: Any, accepted: Any, hidden: Any, logits: Any) -> None:
        model = tiny_decoder()
        for view, rows in zip(sequences, logits, strict=True):
            if view.id not in self.seen:
                continue
            tokens, draft, state = self.seen.pop(view.id)
            last = list(zip(state.ends, state.rows, strict=True)) if state.rows else []
            if rows is None or not last or len(rows) < 1 + draft.num_read or self.checked > 60:
                continue
            self.silent += len(draft.silent)
            for node, row in last[:2]:
                path = [draft.tokens[at] for at in path_to(draft, node)]
                plain = Request("x", tuple(tokens + path), 1)
                assert generate_plainly(model, store_for(model), plain) == (int(rows[row].argmax()),)
                self.checked += 1
        super().observe(sequences, accepted, hidden, logits)


def test_the_window_is_what_the_target_says_on_each_guess_s_own_path() -> None:
    drafter = Watched(4, 4, 3)
    generate(tiny_engine(drafter=drafter), workload(count=3))
    assert drafter.checked > 30
    assert drafter.silent > 30, "only the window's last level needs logits"


def test_the_size_is_tensorrt_llms() -> None:
    assert LookaheadDrafter(4, 3, 4).max_nodes == 15
    assert LookaheadDrafter(7, 7, 7).max_nodes == 83
    view = DraftView("a", [5], 99, max_nodes=99)
    drafter = LookaheadDrafter(3, 4, 2)
    sizes = []
    vocab = torch.eye(64)
    for step in range(6):
        [draft] = drafter.propose([view])
        sizes.append(len(draft))
        logits = vocab[torch.arange(10 * step, 10 * step + len(draft) + 1) % 64]  # all guesses differ
        drafter.observe([view], [None], [{}], [logits])
    # The window fills level by level: W - 1, 2 W - 1, then 3 W - 1 nodes, and pool n-grams beside them.
    assert sizes[:3] == [2, 5, 8]
    assert max(sizes) <= drafter.max_nodes


def test_a_window_whose_candidates_were_cut_reads_its_own_rows() -> None:
    """Adaptive drafting takes candidates out in front of the window: the same guesses, if it says so."""

    def windows(cutting: bool, telling: bool) -> list[list[list[int]]]:
        drafter, found = LookaheadDrafter(3, 4, 3), []
        tokens = [5, 6, 7, 5, 8, 9, 5]
        for _ in range(12):
            view = DraftView("a", list(tokens), 40, max_nodes=60)
            [draft] = drafter.propose([view])
            needed: set[int] = set()
            for node in drafter.window_nodes("a"):
                needed |= set(path_to(draft, node))
            kept = sorted(needed) if cutting else list(range(len(draft)))
            if telling:
                drafter.cut("a", draft, kept)
            seen = subset(draft, kept)
            read = [-1, *(node for node in range(len(seen)) if node not in seen.silent)]
            paths = [[*tokens, *(seen.tokens[at] for at in path_to(seen, node))] for node in read]
            said = [sum(7 * token for token in path[-4:]) % 12 for path in paths]
            drafter.observe([view], [None], [{}], [torch.eye(12)[said]])
            found.append([list(level) for level in drafter._states["a"].levels])
            tokens.append(said[0])
        return found

    whole = windows(cutting=False, telling=False)
    assert windows(cutting=True, telling=True) == whole
    assert windows(cutting=True, telling=False) != whole, "a drafter that is not told must be noticed"


def test_jacobi_finds_ngrams_that_the_text_has_not() -> None:
    """Without the text's own n-grams the window alone must fill the pool with what comes true."""

    class WindowOnly(LookaheadDrafter):
        def _pool_text(self, state: Any, tokens: Any) -> None:
            pass

    class Blind(WindowOnly):
        def _advance(self, state: Any, guessed: list[int]) -> None:
            super()._advance(state, [(token * 7 + 1) % VOCAB for token in guessed])

    accepted = []
    for kind in (WindowOnly, Blind):
        engine = tiny_engine(drafter=kind(5, 3, 5))
        accepted.append(run_and_check(engine, workload()).accepted_tokens)
    assert accepted[0] > 2 * accepted[1] + 10
