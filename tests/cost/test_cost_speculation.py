"""Closed forms, the best chain and tree against exhaustive search, break-even, physical checks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.cost.acceptance import Curve, expected_tokens
from trtspec.cost.speculation import (
    best_chain_length,
    best_tree,
    best_tree_size,
    break_even_batch,
    constant_alpha,
    physical_problems,
    speedup,
)
from trtspec.errors import InputError


def test_worked_values() -> None:
    tokens = constant_alpha(0.8, 4)
    assert round(tokens, 4) == 3.3616
    pairs = {(1, 1): 2.4011, (2, 2): 4.8023, (2, 1): 3.7351, (1, 2): 2.8013, (2, 1.5): 4.3847}
    for (q_t, q_d), value in pairs.items():
        assert round(speedup(tokens, 4, 10, q_t, q_d), 4) == value
    assert constant_alpha(1.0, 4) == 5.0


@given(st.floats(0.05, 0.95), st.integers(1, 12))
def test_constant_alpha_is_a_constant_curve(alpha: float, k: int) -> None:
    assert constant_alpha(alpha, k) == pytest.approx(expected_tokens(Curve((alpha,) * k, ""), k))


@given(st.lists(st.floats(0.1, 0.95), min_size=1, max_size=8), st.floats(0.01, 0.5), st.floats(0.0, 0.5))
def test_the_best_chain_is_the_best_of_all(a: list[float], per_token: float, fixed: float) -> None:
    curve = Curve(tuple(a), "")

    def cost(k: int) -> float:
        return 1.0 if k == 0 else 1.0 + fixed + per_token * k

    best = best_chain_length(curve, cost, 12)
    gains = {k: expected_tokens(curve, k) / cost(k) for k in range(13)}
    assert best.speedup == pytest.approx(max(gains.values()))
    assert gains[best.size] == pytest.approx(best.speedup)


def trees(nodes: int, ranks: int, depth: int) -> set[frozenset[tuple[int, ...]]]:
    """Every tree of that many nodes, as its set of paths."""
    found: set[frozenset[tuple[int, ...]]] = {frozenset()}
    for _ in range(nodes):
        grown = set()
        for tree in found:
            for parent in (*tree, ()):
                for rank in range(ranks):
                    path = (*parent, rank)
                    if len(path) <= depth and path not in tree:
                        grown.add(tree | {path})
        found = grown
    return found


def tokens_of(
    tree: frozenset[tuple[int, ...]] | tuple[tuple[int, ...], ...], ranks: tuple[float, ...]
) -> float:
    total = 1.0
    for path in tree:
        product = 1.0
        for rank in path:
            product *= ranks[rank]
        total += product
    return total


@pytest.mark.parametrize(
    "ranks", [(0.7, 0.2, 0.05), (0.5, 0.3, 0.1), (0.4, 0.35, 0.2), (0.9,), (0.3, 0.3, 0.3)]
)
@pytest.mark.parametrize(("nodes", "depth"), [(1, 3), (3, 2), (4, 4), (5, 3)])
def test_the_best_tree_is_the_best_of_all(ranks: tuple[float, ...], nodes: int, depth: int) -> None:
    tree = best_tree(ranks, nodes, depth)
    every = trees(nodes, len(ranks), depth)
    possible = max(tokens_of(t, ranks) for t in every) if every else tokens_of(tree.paths, ranks)
    assert tree.tokens == pytest.approx(possible)
    assert tokens_of(tree.paths, ranks) == pytest.approx(tree.tokens)
    assert all(path[:-1] == () or path[:-1] in tree.paths for path in tree.paths)
    # A chain, the careless tree, must lose where several children are likely.
    if ranks == (0.4, 0.35, 0.2) and nodes == 4:
        assert tokens_of(tuple((0,) * n for n in range(1, 5)), ranks) < tree.tokens - 0.1


def test_the_tree_with_the_hardwares_cost() -> None:
    """Where rows are free the largest tree wins, where each costs a step none does."""
    ranks = (0.6, 0.2, 0.1)
    free, chosen = best_tree_size(ranks, lambda n: 1.0, max_nodes=24, max_depth=5)
    assert chosen.size == 24
    assert len(free.paths) == 24
    assert best_tree_size(ranks, lambda n: 1.0 + n, max_nodes=24, max_depth=5)[1].size == 0
    middle = best_tree_size(ranks, lambda n: 1.0 + 0.05 * n, max_nodes=24, max_depth=5)[1].size
    assert 0 < middle < 24


@pytest.mark.parametrize("ranks", [(), (0.8, 0.5), (-0.1,)])
def test_ranks_must_be_probabilities(ranks: tuple[float, ...]) -> None:
    with pytest.raises(InputError):
        best_tree(ranks, 3, 3)


@settings(max_examples=60)
@given(st.integers(1, 700))
def test_break_even_finds_the_crossing(crossing: int) -> None:
    found = break_even_batch(lambda b: 2.0 if b < crossing else 0.5)
    assert found == (crossing if crossing <= 512 else None)


def test_break_even_sees_a_dip_that_recovers() -> None:
    """The host's work stops growing at some batch: the speedup may fall below 1 around it only."""
    assert break_even_batch(lambda b: 0.9 if 20 <= b <= 30 else 1.1) == 20


def test_physical_checks() -> None:
    assert physical_problems(speedup_found=2.5, acceptance_length=2.6, num_draft=3) == []
    assert len(physical_problems(speedup_found=2.7, acceptance_length=2.6, num_draft=3)) == 1
    assert len(physical_problems(speedup_found=2.0, acceptance_length=4.1, num_draft=3)) == 1
    assert len(physical_problems(speedup_found=5.0, acceptance_length=4.1, num_draft=3)) == 2


def test_an_unquantized_draft_loses_the_same_for_every_alpha() -> None:
    losses = {
        round(1 - speedup(constant_alpha(a, 4), 4, 10, 2, 1) / speedup(constant_alpha(a, 4), 4, 10, 2, 2), 9)
        for a, _ in itertools.product((0.3, 0.6, 0.9), range(2))
    }
    assert len(losses) == 1
    assert losses.pop() > 0.20
