"""Adaptive drafting: as much as pays by the measured cost, off where it does not, answers untouched."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tiny_engine import VOCAB, TestDrafter, expected, oracle, tiny_decoder, tiny_engine, workload

from trtspec.embedded.acceptance import Accepted
from trtspec.embedded.drafters import DraftView, adaptive
from trtspec.embedded.drafters.adaptive import AdaptiveDrafter, kinds_of
from trtspec.embedded.drafters.choice import StepCost, best_levels, best_nodes
from trtspec.embedded.tree import Draft, chain, depths, no_deeper
from trtspec.engine import EngineStats, generate

Cost = Callable[[int], float]


def memory_bound(rows: int) -> float:
    return 1.0 + 0.001 * rows


def compute_bound(rows: int) -> float:
    return 0.1 + 0.1 * rows


def roofline(rows: int) -> float:
    return max(1.0, rows / 16)


# ---------------------------------------------------------------- the choice


def level_speed(
    values: Sequence[Sequence[float]], levels: Sequence[int], cost: Cost, seconds: float
) -> float:
    tokens = sum(1 + sum(each[:k]) for each, k in zip(values, levels, strict=True))
    return tokens / (cost(len(values) + sum(levels)) + seconds * max(levels))


@pytest.mark.parametrize("cost", [memory_bound, compute_bound, roofline])
@pytest.mark.parametrize("draft_seconds", [0.0, 0.2])
def test_no_other_depths_are_faster(cost: Cost, draft_seconds: float) -> None:
    chance = random.Random(1)
    beaten = 0
    for _ in range(60):
        rates = [[chance.choice([0.0, 0.2, 0.6, 0.9, 1.0]) for _ in range(3)] for _ in range(3)]
        values = [
            list(itertools.accumulate(each[: chance.randint(0, 3)], lambda a, b: a * b)) for each in rates
        ]
        found = best_levels(values, 1.0, cost, draft_seconds)
        assert all(0 <= k <= len(each) for k, each in zip(found, values, strict=True))
        every = itertools.product(*(range(len(each) + 1) for each in values))
        best = max(level_speed(values, levels, cost, draft_seconds) for levels in every)
        chosen = level_speed(values, found, cost, draft_seconds)
        # With a drafter's time in it the order of levels is a heuristic; without, the choice is the best.
        assert chosen >= best * (1 - 1e-12 if draft_seconds == 0 else 0.85)
        assert chosen >= level_speed(values, [0] * 3, cost, draft_seconds) * (1 - 1e-12)
        beaten += level_speed(values, [len(each) for each in values], cost, draft_seconds) < 0.99 * best
    assert beaten > 0 or cost is not compute_bound, "drafting all that is allowed must lose somewhere"


Tree = tuple[list[int], list[float]]


def random_tree(chance: random.Random) -> Tree:
    """Parents and values of up to five nodes, with ties."""
    parents: list[int] = []
    values: list[float] = []
    for node in range(chance.randint(0, 5)):
        parents.append(chance.randrange(-1, node))
        above = 1.0 if parents[-1] < 0 else values[parents[-1]]
        values.append(above * chance.choice([0.0, 0.1, 0.5, 0.9, 1.0]))
    return parents, values


def node_speed(trees: Sequence[Tree], kept: Sequence[Sequence[int]], cost: Cost) -> float:
    tokens = sum(1 + sum(tree[1][node] for node in nodes) for tree, nodes in zip(trees, kept, strict=True))
    return tokens / cost(len(trees) + sum(len(nodes) for nodes in kept))


def is_closed(tree: Tree, nodes: Sequence[int]) -> bool:
    return all(tree[0][node] < 0 or tree[0][node] in nodes for node in nodes)


def subsets(tree: Tree) -> list[tuple[int, ...]]:
    """Every choice of nodes that is a tree."""
    nodes = range(len(tree[0]))
    every = itertools.chain.from_iterable(itertools.combinations(nodes, n) for n in range(len(nodes) + 1))
    return [found for found in every if is_closed(tree, found)]


@pytest.mark.parametrize("cost", [memory_bound, compute_bound, roofline])
def test_no_other_nodes_are_faster(cost: Cost) -> None:
    """Against every prefix-closed choice of nodes of two trees; a choice level by level is not as good."""
    chance = random.Random(2)
    by_level = 0
    for _ in range(150):
        trees = [random_tree(chance), random_tree(chance)]
        found = best_nodes([values for _, values in trees], 2, cost, 2.0)
        assert all(is_closed(tree, nodes) for tree, nodes in zip(trees, found, strict=True))
        best = max(node_speed(trees, kept, cost) for kept in itertools.product(*map(subsets, trees)))
        assert node_speed(trees, found, cost) >= best * (1 - 1e-12)
        drafts = [Draft(tuple(range(len(parents))), tuple(parents)) for parents, _ in trees]
        levels = itertools.product(*(range(max(depths(draft), default=0) + 1) for draft in drafts))
        whole = max(
            node_speed(trees, [no_deeper(d, k).tokens for d, k in zip(drafts, each, strict=True)], cost)
            for each in levels
        )
        by_level += whole < 0.999 * best
    assert by_level > 20 or cost is not compute_bound


def test_a_choice_that_ignores_the_cost_is_noticed() -> None:
    """What the tests above must catch: all nodes of some worth, and nodes of the highest worth alone."""
    tree: Tree = ([-1, 0, -1], [0.5, 0.25, 0.2])
    best = node_speed([tree], best_nodes([tree[1]], 1, compute_bound, 1.0), compute_bound)
    assert best > node_speed([tree], [[0, 1, 2]], compute_bound)
    cheap = node_speed([tree], best_nodes([tree[1]], 1, memory_bound, 1.0), memory_bound)
    assert cheap > node_speed([tree], [[0]], memory_bound)


def test_the_break_even_batch_is_where_the_roof_is() -> None:
    chain_of_4 = [0.5**level for level in range(1, 5)]
    on = [any(best_nodes([chain_of_4] * batch, batch, roofline, batch)) for batch in (1, 4, 15, 16, 32)]
    assert on == [True, True, True, False, False]


def test_costs_never_fall_and_do_not_follow_outliers() -> None:
    cost = StepCost()
    assert (cost.fewest, cost.most) == (float("inf"), 0.0)
    with pytest.raises(ValueError, match="no step"):
        cost.at(1)
    for rows, seconds in [(1, 1.0), (1, 1.0), (1, 90.0), (4, 0.6), (8, 2.9)]:
        cost.observe(rows, seconds)
    # 1.0 three times and 0.6 once are 0.9 each.
    assert [cost.at(rows) for rows in (1, 4, 6, 8, 10)] == pytest.approx([0.9, 0.9, 1.9, 2.9, 3.9])
    assert (cost.fewest, cost.most) == (1, 8)


def test_a_noisy_neighbour_does_not_bend_the_curve() -> None:
    """A few steps three times as long as they should be, at some numbers of rows."""
    chance = random.Random(3)
    cost = StepCost()
    for _ in range(200):
        rows = chance.choice([1, 2, 3, 5, 9, 17, 33])
        cost.observe(rows, roofline(rows) * (3.0 if chance.random() < 0.3 else 1.0 + 0.1 * chance.random()))
    for rows in (1, 2, 3, 5, 9, 17, 33):
        assert cost.at(rows) == pytest.approx(roofline(rows), rel=0.15)


# ---------------------------------------------------------------- what is known of acceptance


def feed(drafter: AdaptiveDrafter, draft: Draft, outcome: Accepted, name: str = "a", times: int = 40) -> None:
    for _ in range(times):
        drafter._learn(name, draft, outcome)


def test_rates_go_by_depth_and_rank_and_by_sequence() -> None:
    drafter = AdaptiveDrafter(TestDrafter(), costly=False)
    tree = Draft((5, 6, 7, 8), (-1, -1, 0, 0))
    feed(drafter, tree, Accepted((0,), 9))  # the first is always right, its children never
    first, second, below, other = drafter._values(DraftView("a", [1], 4), tree)
    assert first > 0.9
    assert max(second, below, other) < 0.12
    strange = drafter._values(DraftView("b", [1], 4), tree)
    assert strange[0] > 0.9, "what one sequence showed is the guess for the next"
    feed(drafter, tree, Accepted((), 9), "c", 5)
    assert drafter._values(DraftView("c", [1], 4), tree)[0] < drafter._values(DraftView("a", [1], 4), tree)[0]
    drafter.release("c")
    assert drafter.acceptance.shift("c") == 0.0


def test_a_confidence_is_calibrated() -> None:
    """A drafter that says 0.9 and is never right, and 0.2 and always is."""
    drafter = AdaptiveDrafter(TestDrafter(), costly=False)
    boast = chain((5,), confidence=(0.9,))
    modest = chain((6,), confidence=(0.2,))
    view = DraftView("x", [1], 4)
    assert drafter._values(view, boast) == [0.9]
    feed(drafter, boast, Accepted((), 9))
    feed(drafter, modest, Accepted((0,), 9), "b")
    assert drafter._values(view, boast)[0] < 0.1 < 0.9 < drafter._values(view, modest)[0]


def test_drawn_candidates_are_not_chosen_by_their_probability() -> None:
    probs = torch.full((2, 4), 0.25)
    for confidence in ((0.9, 0.1), (0.1, 0.9)):
        drawn = Draft((0, 1), (-1, -1), probs, 0, confidence)
        assert kinds_of(drawn) == kinds_of(Draft((3, 2), (-1, -1), probs))


def test_a_tree_is_cut_to_its_likely_branch() -> None:
    """Six children of which the third is always right: in the end it alone is verified."""
    clock = Clock()

    class Broad(TestDrafter):
        def draft(self, view: DraftView) -> Draft:
            told = (0.3, 0.2, 0.5, 0.1, 0.1, 0.1)
            return Draft((1, 2, 3, 4, 5, 6), (-1,) * 6, None, 0, told)

    drafter = AdaptiveDrafter(Broad(), costly=False, clock=clock)
    view = DraftView("a", [1, 2], 8)
    last: Draft = Draft((), ())
    for _ in range(120):
        [last] = drafter.propose([view])
        clock.now += compute_bound(1 + len(last))
        right = last.tokens.index(3) if 3 in last.tokens else None
        outcome = Accepted(() if right is None else (right,), 9)
        drafter.observe([view], [outcome], [{}], [torch.zeros(1 + len(last), 4)])
    assert last.tokens == (3,)


def test_a_plain_step_that_was_measured_in_a_bad_moment_is_measured_again() -> None:
    """The first plain step takes ten times as long, so drafts look free; they are worth nothing."""
    clock = Clock()
    drafter = AdaptiveDrafter(Wrong(), costly=False, clock=clock)
    view = DraftView("a", [1, 2], 8)
    lengths = []
    for at in range(200):
        [draft] = drafter.propose([view])
        lengths.append(len(draft))
        clock.now += compute_bound(1 + len(draft)) * (10 if at == 0 else 1)
        outcome = Accepted((0,) if len(draft) and at % 12 == 0 else (), 9)
        drafter.observe([view], [outcome], [{}], [torch.zeros(1 + len(draft), 4)])
    assert sum(lengths[-100:]) < 20


def test_a_draft_cut_by_the_scheduler_is_judged_by_what_was_left() -> None:
    drafter = AdaptiveDrafter(TestDrafter(), costly=False)
    view = DraftView("a", [1], 8)
    draft = Draft((5, 6, 7), (-1, 0, 1))
    drafter._drafts, drafter._asked = {"a": draft}, {"a"}
    drafter.observe([view], [Accepted((0,), 9)], [{}], [torch.zeros(2, 4)])
    assert set(drafter.acceptance._found) == {(1, -1)}


# ---------------------------------------------------------------- the engine


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Wrong(TestDrafter):
    """Drafts four random tokens: nearly all are turned down."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(2)
        self.asked = 0

    def draft(self, view: DraftView) -> Draft:
        self.asked += 1
        return chain([self.random.randrange(VOCAB) for _ in range(min(4, view.max_draft))])


def run(
    monkeypatch: pytest.MonkeyPatch, inner: Any, cost: Cost, *, costly: bool = False, adaptive: bool = True
) -> tuple[float, EngineStats, AdaptiveDrafter]:
    """(synthetic seconds, counters, drafter) of the workload; answers are checked against the reference."""
    clock, model = Clock(), tiny_decoder()
    forward = type(model).forward

    def timed(self: Any, batch: Any, *rest: Any) -> Any:
        clock.now += cost(len(batch.tokens))
        return forward(self, batch, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "forward", timed)
        drafter = AdaptiveDrafter(inner, costly=costly, clock=clock)
        requests = workload(new_tokens=90)
        engine = tiny_engine(rows=256, kv_tokens=2048, drafter=drafter if adaptive else inner)
        done = generate(engine, requests)
    for completion, request in zip(done, requests, strict=True):
        assert completion.tokens == expected("llama", request)
    engine.check_integrity()
    return clock.now, engine.stats(), drafter


@pytest.mark.parametrize("costly", [False, True])
def test_drafts_that_pay_are_made(monkeypatch: pytest.MonkeyPatch, costly: bool) -> None:
    requests = workload(new_tokens=90)
    plain, _, _ = run(monkeypatch, TestDrafter(), memory_bound, adaptive=False)
    always, _, _ = run(monkeypatch, oracle(requests), memory_bound, adaptive=False)
    seconds, stats, _ = run(monkeypatch, oracle(requests), memory_bound, costly=costly)
    assert stats.accepted_tokens > 200
    assert stats.held_back_steps == 0
    assert always < seconds < 1.3 * always < 0.5 * plain


@pytest.mark.parametrize("costly", [False, True])
def test_drafts_that_do_not_pay_are_not(monkeypatch: pytest.MonkeyPatch, costly: bool) -> None:
    plain, _, _ = run(monkeypatch, TestDrafter(), compute_bound, adaptive=False)
    always, _, _ = run(monkeypatch, Wrong(), compute_bound, adaptive=False)
    inner = Wrong()
    seconds, stats, _ = run(monkeypatch, inner, compute_bound, costly=costly)
    assert stats.held_back_steps > 40
    assert stats.drafted_tokens < 300
    assert seconds < 1.3 * plain < 0.5 * always
    if costly:
        assert inner.asked < 300, "a drafter that costs time is not even asked"


def test_a_variant_that_never_switches_off_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _, _ = run(monkeypatch, TestDrafter(), compute_bound, adaptive=False)
    monkeypatch.setattr(adaptive, "best_nodes", lambda values, *rest: [list(range(len(v))) for v in values])
    seconds, stats, _ = run(monkeypatch, Wrong(), compute_bound)
    assert stats.held_back_steps == 0
    assert seconds > 2 * plain


def test_state_ends_with_the_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Wrong()
    _, _, drafter = run(monkeypatch, inner, roofline)
    assert sorted(inner.released) == [f"r{i}" for i in range(8)]
    assert not drafter.acceptance._shift
    assert not drafter._brought


def test_what_was_turned_off_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Wrong()
    monkeypatch.setattr(adaptive, "PROBE_SHARE", 0.2)
    monkeypatch.setattr(adaptive, "PROBE_ROUNDS", 16)
    _, often, _ = run(monkeypatch, inner, compute_bound)
    monkeypatch.setattr(adaptive, "PROBE_ROUNDS", 10**9)
    _, never, _ = run(monkeypatch, Wrong(), compute_bound)
    monkeypatch.setattr(adaptive, "PROBE_ROUNDS", 16)
    monkeypatch.setattr(adaptive, "PROBE_SHARE", 1e-9)
    _, dear, _ = run(monkeypatch, Wrong(), compute_bound)
    assert often.drafted_tokens > never.drafted_tokens == dear.drafted_tokens
