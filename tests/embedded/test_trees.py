"""Shapes of draft trees: choices checked, chosen and grown."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from trtspec.embedded.drafters.trees import (
    DEFAULT_NODES,
    DynamicTree,
    Growth,
    StaticTree,
    best_choices,
    chain_tree,
    default_choices,
    expected_length,
    static_tree,
)
from trtspec.errors import InputError

Path = tuple[int, ...]

# ---------------------------------------------------------------- choices given by hand


def test_the_order_of_choices_is_kept_but_for_parents() -> None:
    tree = static_tree([(0, 1), (0,), (1,), (0, 0), (0, 1, 2)])
    assert tree == StaticTree(parents=(-1, 0, -1, 0, 1), ranks=(0, 1, 1, 0, 2))
    assert tree.depths == (1, 2, 1, 2, 3)
    assert (tree.depth, tree.num_inner) == (3, 2)
    assert chain_tree(3) == static_tree([(0,), (0, 0), (0, 0, 0)])


def test_every_problem_of_the_choices_is_named_at_once() -> None:
    with pytest.raises(InputError) as error:
        static_tree([(0,), (), (0,), (1, 0), (0, 0, 0), (0, 9), (0, 0)], max_depth=2, vocab_size=8)
    told = [str(problem) for problem in error.value.problems]
    assert told == [
        "speculation.choices.1: found []; the root is implied; remove it",
        "speculation.choices.2: [0] is listed twice; keep one",
        "speculation.choices.3: [1, 0] without its prefix [1]; every prefix is a node; add it",
        "speculation.choices.4: [0, 0, 0] is 3 deep; the heads draft 2 tokens; cut it",
        "speculation.choices.5: [0, 9] has a rank outside 0 .. 8 - 1",
    ]
    with pytest.raises(InputError, match="an empty tree"):
        static_tree([])


def test_a_tree_is_cut_as_the_engine_cuts_drafts() -> None:
    from trtspec.embedded.tree import Draft, no_deeper, truncate

    chance = random.Random(1)
    for _ in range(200):
        parents = tuple(chance.randrange(-1, node) for node in range(9))
        tree = StaticTree(parents, tuple(range(9)))
        depth, nodes = chance.randint(1, 4), chance.randint(1, 9)
        cut = tree.within(depth, nodes)
        draft = truncate(no_deeper(Draft(tuple(range(9)), parents), depth), nodes)
        assert (cut.ranks, cut.parents) == (draft.tokens, draft.parents)


# ---------------------------------------------------------------- choices from accuracies


def all_trees(accuracies: list[list[float]], num_nodes: int) -> list[tuple[Path, ...]]:
    """Every prefix-closed set of that many paths."""
    paths = [
        path
        for depth in range(1, len(accuracies) + 1)
        for path in itertools.product(*(range(len(head)) for head in accuracies[:depth]))
    ]
    found = []
    for nodes in itertools.combinations(paths, num_nodes):
        if all(len(path) == 1 or path[:-1] in nodes for path in nodes):
            found.append(nodes)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_the_best_tree_is_the_best_of_all_trees(seed: int) -> None:
    chance = random.Random(seed)
    ranks = [(3, 3), (2, 2, 2), (3, 2), (2, 3), (4, 2), (2, 2, 1)][seed]
    accuracies = [[round(chance.random(), 1) for _ in range(n)] for n in ranks]  # with ties and zeros
    for num_nodes in range(1, 6):
        chosen = best_choices(accuracies, num_nodes)
        static_tree(chosen, len(accuracies))  # lawful: prefix-closed, no repeats
        best = max(expected_length(nodes, accuracies) for nodes in all_trees(accuracies, num_nodes))
        assert expected_length(chosen, accuracies) == pytest.approx(best, abs=1e-12)


def test_worse_ways_to_choose_are_noticed() -> None:
    accuracies = [[0.6, 0.3], [0.5, 0.4], [0.5, 0.1]]
    best = expected_length(best_choices(accuracies, 4), accuracies)
    broad = expected_length([(0,), (1,), (0, 0), (1, 0)], accuracies)
    chain = expected_length([(0,), (0, 0), (0, 0, 0), (1,)], accuracies)
    assert best > broad
    assert best > chain
    assert best == pytest.approx(1 + 0.6 + 0.3 + 0.3 + 0.24)


def test_a_larger_budget_only_adds_nodes() -> None:
    accuracies = [[0.5, 0.2, 0.1], [0.4, 0.2], [0.3]]
    most = best_choices(accuracies, 100)
    for num_nodes in range(len(most)):
        assert best_choices(accuracies, num_nodes) == most[:num_nodes]
    assert len(best_choices([[0.5, 0.0], [0.0]], 9)) == 1  # what is never right is no node


def test_accuracies_are_probabilities() -> None:
    with pytest.raises(ValueError, match="within 0 and 1"):
        best_choices([[1.2]], 3)


@pytest.mark.parametrize("num_heads", [1, 2, 3, 4, 6])
def test_the_default_tree_fits_the_heads(num_heads: int) -> None:
    choices = default_choices(num_heads)
    tree = static_tree(choices, num_heads)
    assert tree.depth <= num_heads
    assert len(choices) == DEFAULT_NODES if num_heads > 1 else 1 <= len(choices) <= DEFAULT_NODES
    assert choices[0] == (0,)


# ---------------------------------------------------------------- growing


def candidates(path: Path, count: int) -> tuple[list[int], list[float]]:
    """A deterministic law below each path: tokens with decreasing log probabilities."""
    chance = random.Random(repr(path))
    logs = sorted((math.log(chance.random() * 0.5 + 1e-9) for _ in range(count)), reverse=True)
    return [chance.randrange(100) for _ in range(count)], logs


def grow(growth: Growth, count: int) -> None:
    paths: dict[int, Path] = {-1: ()}
    while growth.frontier:
        below = [candidates(paths[node], count) for node in growth.frontier]
        frontier = list(growth.frontier)
        start = len(growth.tokens)
        growth.extend([tokens for tokens, _ in below], [logs for _, logs in below])
        rank: dict[int, int] = dict.fromkeys(frontier, 0)
        for node in range(start, len(growth.tokens)):
            parent = growth.parents[node]
            paths[node] = (*paths[parent], growth._tree_node[node] if growth._tree_node else rank[parent])
            rank[parent] += 1


def test_a_static_tree_is_filled_by_rank() -> None:
    tree = static_tree([(0,), (2,), (0, 1), (2, 0), (0, 1, 0)])
    growth = Growth(tree)
    growth.extend([[10, 11, 12]], [[-0.1, -0.2, -0.3]])
    assert growth.frontier == [0, 1]
    assert growth.num_ranks() == 2
    growth.extend([[20, 21], [30, 31]], [[-0.4, -0.5], [-0.6, -0.7]])
    growth.extend([[40]], [[-0.8]])
    assert growth.frontier == []
    draft = growth.draft()
    assert draft.tokens == (10, 12, 21, 30, 40)
    assert draft.parents == (-1, -1, 0, 1, 2)
    assert draft.confidence == pytest.approx([math.exp(x) for x in (-0.1, -0.3, -0.5, -0.6, -0.8)])


@pytest.mark.parametrize("shape", [(2, 3, 6), (3, 3, 9), (3, 2, 20), (4, 1, 3), (2, 4, 5)])
def test_a_dynamic_tree_holds_the_most_valuable_of_what_was_expanded(shape: tuple[int, int, int]) -> None:
    """Against a plain reading of EAGLE-2: expand the top_k nodes of each level, keep the best of all."""
    top_k, depth, num_nodes = shape
    growth = Growth(DynamicTree(top_k, depth, num_nodes))
    grow(growth, top_k)
    values: dict[Path, float] = {(): 0.0}
    tokens: dict[Path, int] = {}
    layer: list[Path] = [()]
    for _ in range(depth):
        children = []
        for path in layer:
            for rank, (token, log) in enumerate(zip(*candidates(path, top_k), strict=True)):
                child = (*path, rank)
                values[child], tokens[child] = values[path] + log, token
                children.append(child)
        layer = sorted(children, key=lambda path: -values[path])[:top_k]
    del values[()]
    best = sorted(values, key=lambda path: -values[path])[:num_nodes]
    draft = growth.draft()
    assert draft.tokens == tuple(tokens[path] for path in best)
    own = [values[path] - values.get(path[:-1], 0.0) for path in best]
    assert draft.confidence == pytest.approx([math.exp(value) for value in own])
    assert draft.parents == tuple(best.index(path[:-1]) if len(path) > 1 else -1 for path in best)
