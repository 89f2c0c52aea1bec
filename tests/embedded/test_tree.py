"""Drafts as trees: every derived thing against walking up from each node."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trtspec.embedded.tree import (
    EMPTY_DRAFT,
    Draft,
    chain,
    children,
    depths,
    no_deeper,
    path_to,
    tree_mask,
    truncate,
)


@st.composite
def trees(draw: st.DrawFn) -> Draft:
    parents = [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(0, 12)))]
    tokens = [draw(st.integers(0, 5)) for _ in parents]
    return Draft(tuple(tokens), tuple(parents))


def ancestors(draft: Draft, node: int) -> list[int]:
    """The node itself, its parent, and so on up to -1."""
    found = [node]
    while found[-1] != -1:
        found.append(draft.parents[found[-1]])
    return found


@given(trees())
def test_a_row_attends_to_itself_and_its_ancestors_only(draft: Draft) -> None:
    expected = torch.zeros(len(draft) + 1, len(draft) + 1, dtype=torch.bool)
    for node in range(-1, len(draft)):
        for ancestor in ancestors(draft, node):
            expected[node + 1, ancestor + 1] = True
    mask = tree_mask(draft)
    if mask is None:
        assert torch.equal(expected, torch.ones_like(expected).tril())
    else:
        assert torch.equal(mask, expected)
        assert mask.diagonal().all()
        assert mask[:, 0].all()
        # A causal mask in its place would let siblings see each other.
        assert not torch.equal(mask, torch.ones_like(mask).tril())


@given(trees())
def test_depths_and_paths_follow_the_parents(draft: Draft) -> None:
    for node, depth in enumerate(depths(draft)):
        up = ancestors(draft, node)
        assert depth == len(up) - 1
        assert path_to(draft, node) == tuple(reversed(up[:-1]))
    assert path_to(draft, -1) == ()


@given(trees())
def test_children_are_the_parents_turned_around(draft: Draft) -> None:
    below = children(draft)
    assert len(below) == len(draft) + 1
    assert sorted(node for nodes in below for node in nodes) == list(range(len(draft)))
    for row, nodes in enumerate(below):
        assert nodes == sorted(nodes)
        assert all(draft.parents[node] == row - 1 for node in nodes)


@given(trees(), st.integers(-2, 15))
def test_truncation_keeps_the_first_nodes_and_with_each_its_parents(draft: Draft, max_nodes: int) -> None:
    short = truncate(draft, max_nodes)
    kept = min(len(draft), max(0, max_nodes))
    assert short.tokens == draft.tokens[:kept]
    assert short.parents == draft.parents[:kept]
    assert all(set(ancestors(draft, node)) <= set(range(-1, kept)) for node in range(kept))


def test_truncation_keeps_each_node_its_own_law() -> None:
    probs = torch.rand(3, 7)
    short = truncate(chain([1, 2, 3], probs), 2)
    assert short.probs is not None
    assert torch.equal(short.probs, probs[:2])


def test_a_chain_is_its_own_mask() -> None:
    draft = chain([4, 4, 9])
    assert draft == Draft((4, 4, 9), (-1, 0, 1))
    assert draft.is_chain
    assert tree_mask(draft) is None
    assert depths(draft) == (1, 2, 3)


def test_no_speculation_is_the_empty_chain() -> None:
    assert chain([]) == EMPTY_DRAFT
    assert len(EMPTY_DRAFT) == 0
    assert EMPTY_DRAFT.is_chain
    assert tree_mask(EMPTY_DRAFT) is None
    assert children(EMPTY_DRAFT) == [[]]


@pytest.mark.parametrize(
    ("tokens", "parents", "probs", "message"),
    [
        ((1, 2), (-1,), None, "2 tokens with 1 parents"),
        ((1, 2), (-1, 1), None, "node 1 has parent 1"),
        ((1, 2), (1, -1), None, "node 0 has parent 1"),
        ((1,), (-2,), None, "node 0 has parent -2"),
        ((1, 2), (-1, 0), torch.ones(1, 5), r"probs of shape \[1, 5\]; must be \[2, vocab\]"),
        ((1, 2), (-1, 0), torch.ones(2), r"probs of shape \[2\]"),
    ],
)
def test_fields_that_do_not_fit_are_refused(tokens, parents, probs, message) -> None:
    with pytest.raises(ValueError, match=message):
        Draft(tokens, parents, probs)


@given(trees(), st.integers(0, 12), st.integers(-1, 12), st.integers(0, 12))
def test_nodes_to_observe_stay_last_and_nobodys_children(
    draft: Draft, observed: int, max_nodes: int, max_depth: int
) -> None:
    draft = Draft(draft.tokens, draft.parents, None, min(observed, len(draft)))
    assert [node for nodes in children(draft) for node in nodes] == sorted(
        range(draft.num_candidates), key=lambda node: (draft.parents[node], node)
    )
    cut = truncate(draft, max_nodes)
    assert cut.num_candidates == min(draft.num_candidates, max(0, max_nodes))
    shallow = no_deeper(draft, max_depth)
    depth = depths(draft)
    kept = [node for node in range(len(draft)) if depth[node] <= max_depth]
    assert [shallow.tokens[at] for at in range(len(shallow))] == [draft.tokens[node] for node in kept]
    assert list(depths(shallow)) == [depth[node] for node in kept]
    assert shallow.num_candidates == sum(node < draft.num_candidates for node in kept)
    for at, node in enumerate(kept):
        path = [draft.tokens[step] for step in path_to(draft, node)]
        assert [shallow.tokens[step] for step in path_to(shallow, at)] == path


def test_more_nodes_to_observe_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="to observe"):
        Draft((1,), (-1,), None, 2)
