"""The shapes of draft trees: static ones from ``choices`` and EAGLE-2's dynamic ones.

A *choice* is the path of a node from the current token: ``(0, 2)`` is the third most likely second token
after the most likely first one (Medusa, arXiv 2401.10774, section 2.1.2). A drafter grows every tree level
by level: :class:`Growth` is handed the candidates below the nodes of its *frontier* and says which nodes to
go on from.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trtspec.embedded.tree import EMPTY_DRAFT, Draft
from trtspec.errors import InputError, Problem

Choices = Sequence[Sequence[int]]

DEFAULT_NODES = 63
"""Nodes of the default tree, as many as TensorRT-LLM's has."""

# Shares of the positions at which a head's rank-r candidate is right, for heads 0, 1, 2 ...: rounded from
# Medusa heads measured on a small chat model (top 1 .436 .270 .199 .152, top 5 .686 .480 .412 .336), the mass
# between ranks 0 and 4 falling as 1 / rank. They only shape the default tree; a measured tree is better.
_DEFAULT_FIRST = (0.436, 0.270, 0.199, 0.152)
_DEFAULT_TOP5 = (0.686, 0.480, 0.412, 0.336)
_DEFAULT_RANKS = 10


@dataclass(frozen=True)
class StaticTree:
    """A tree fixed before anything is drafted: node i is the candidate of rank ``ranks[i]`` below
    ``parents[i]`` (-1: the current token). Parents precede children; the order is the one in which a tree
    is cut to fewer nodes."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    @functools.cached_property
    def depths(self) -> tuple[int, ...]:
        found: list[int] = []
        for parent in self.parents:
            found.append(1 if parent < 0 else found[parent] + 1)
        return tuple(found)

    @property
    def depth(self) -> int:
        return max(self.depths, default=0)

    @functools.cached_property
    def num_inner(self) -> int:
        """Nodes with children: those that a draft model has to compute."""
        return len(set(self.parents) - {-1})

    def within(self, max_depth: int, num_nodes: int) -> StaticTree:
        """The first ``num_nodes`` of the nodes at most ``max_depth`` deep; as the engine would cut it."""
        if num_nodes >= len(self.parents) and max_depth >= self.depth:
            return self
        return _within(self, max_depth, num_nodes)


@functools.lru_cache(maxsize=4096)
def _within(tree: StaticTree, max_depth: int, num_nodes: int) -> StaticTree:
    kept = [node for node, depth in enumerate(tree.depths) if depth <= max_depth][:num_nodes]
    number = {node: at for at, node in enumerate(kept)} | {-1: -1}
    return StaticTree(
        tuple(number[tree.parents[node]] for node in kept), tuple(tree.ranks[node] for node in kept)
    )


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's tree (arXiv 2406.16858, section 4): each level expands the ``top_k`` nodes of the largest
    *value*, the product of the draft's probabilities on the path, by ``top_k`` children each; of all
    candidates the ``num_nodes`` most valuable are kept, which are prefix-closed because no child is worth
    more than its parent."""

    top_k: int
    depth: int
    num_nodes: int

    @property
    def num_inner(self) -> int:
        return self.top_k * (self.depth - 1)


def chain_tree(length: int) -> StaticTree:
    """The tree that is a chain of the most likely tokens."""
    return StaticTree(tuple(range(-1, length - 1)), (0,) * length)


# --------------------------------------------------------------------------- choices


def static_tree(choices: Choices, max_depth: int | None = None, vocab_size: int | None = None) -> StaticTree:
    """The tree of ``choices``, in their order except that parents come first.

    Raises InputError with every problem: an empty list or path, a repeated path, a path whose prefix is
    missing, one deeper than ``max_depth`` or with a rank that a vocabulary of ``vocab_size`` does not have.
    """
    problems = [
        Problem(message, key=f"speculation.choices{'' if at is None else f'.{at}'}")
        for at, message in _choice_problems([tuple(path) for path in choices], max_depth, vocab_size)
    ]
    if problems:
        raise InputError(problems)
    number: dict[tuple[int, ...], int] = {(): -1}
    parents: list[int] = []
    ranks: list[int] = []

    def add(path: tuple[int, ...]) -> int:
        if path not in number:
            parent = add(path[:-1])
            number[path] = len(parents)
            parents.append(parent)
            ranks.append(path[-1])
        return number[path]

    for path in choices:
        add(tuple(path))
    return StaticTree(tuple(parents), tuple(ranks))


def _choice_problems(
    paths: list[tuple[int, ...]], max_depth: int | None, vocab_size: int | None
) -> list[tuple[int | None, str]]:
    problems: list[tuple[int | None, str]] = []
    if not paths:
        problems.append((None, "an empty tree; give at least one path such as [0], or null"))
    seen: set[tuple[int, ...]] = set()
    known = set(paths)
    for at, path in enumerate(paths):
        shown = list(path)
        if not path:
            problems.append((at, "found []; the root is implied; remove it"))
        elif path in seen:
            problems.append((at, f"{shown} is listed twice; keep one"))
        elif len(path) > 1 and path[:-1] not in known:
            problems.append((at, f"{shown} without its prefix {shown[:-1]}; every prefix is a node; add it"))
        if max_depth is not None and len(path) > max_depth:
            problems.append((at, f"{shown} is {len(path)} deep; the heads draft {max_depth} tokens; cut it"))
        if any(rank < 0 or (vocab_size is not None and rank >= vocab_size) for rank in path):
            problems.append((at, f"{shown} has a rank outside 0 .. {vocab_size or 'vocabulary'} - 1"))
        seen.add(path)
    return problems


def best_choices(accuracies: Sequence[Sequence[float]], num_nodes: int) -> tuple[tuple[int, ...], ...]:
    """The tree of at most ``num_nodes`` nodes with the largest expected acceptance length, best node first.

    ``accuracies[i][r]`` is the measured probability that the rank-r candidate of head i is right where the
    path before it is. Taking it as independent of that path, a node is accepted with the product of the
    accuracies along its path, and E[N] is 1 plus the sum of these products over the nodes (Medusa,
    section 2.3.3). A child's product is at most its parent's, so picking the largest products one by one
    is optimal. Nodes that are never right are left out. Raises ValueError for numbers outside 0 .. 1.
    """
    for head in accuracies:
        if not all(0.0 <= value <= 1.0 for value in head):
            raise ValueError(f"accuracies must be within 0 and 1, found {list(head)}")
    # (-product, depth, path): equal products take the shallower node first, so parents precede children.
    heap: list[tuple[float, int, tuple[int, ...]]] = [(-1.0, 0, ())]
    chosen: list[tuple[int, ...]] = []
    while heap and len(chosen) < num_nodes:
        product, depth, path = heapq.heappop(heap)
        if path:
            chosen.append(path)
        if depth < len(accuracies):
            for rank, accuracy in enumerate(accuracies[depth]):
                if product * accuracy < 0.0:
                    heapq.heappush(heap, (product * accuracy, depth + 1, (*path, rank)))
    return tuple(chosen)


def expected_length(choices: Choices, accuracies: Sequence[Sequence[float]]) -> float:
    """E[N] of a tree under the model of :func:`best_choices`, the bonus token included."""
    total = 1.0
    for path in choices:
        product = 1.0
        for depth, rank in enumerate(path):
            product *= accuracies[depth][rank]
        total += product
    return total


@functools.cache
def default_choices(num_heads: int, num_nodes: int = DEFAULT_NODES) -> tuple[tuple[int, ...], ...]:
    """The tree for heads of which nothing was measured."""
    tail = sum(1 / rank for rank in range(1, 5))
    accuracies = []
    for head in range(num_heads):
        at = min(head, len(_DEFAULT_FIRST) - 1)
        rest = (_DEFAULT_TOP5[at] - _DEFAULT_FIRST[at]) / tail
        accuracies.append([_DEFAULT_FIRST[at], *(rest / rank for rank in range(1, _DEFAULT_RANKS))])
    return best_choices(accuracies, num_nodes)


# --------------------------------------------------------------------------- growing


@dataclass
class Growth:
    """One draft while it grows. ``frontier`` are the nodes to go on from, at first the current token."""

    shape: StaticTree | DynamicTree
    frontier: list[int] = field(default_factory=lambda: [-1])
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    level: int = 0
    """Of the nodes of the frontier; 0 for the current token."""
    probs: list[Tensor] | None = None
    """Of each node the law it was drawn from; None for point masses."""
    _values: list[float] = field(default_factory=list)
    _log_probs: list[float] = field(default_factory=list)
    _tree_node: list[int] = field(default_factory=list)

    def num_children(self, row: int) -> int:
        """How many candidates are wanted below ``frontier[row]``."""
        if isinstance(self.shape, DynamicTree):
            return self.shape.top_k
        return len(self._below(row))

    def num_ranks(self) -> int:
        """The most likely candidates of a node that may be asked for: the largest rank and one."""
        if isinstance(self.shape, DynamicTree):
            return self.shape.top_k
        return 1 + max(
            self.shape.ranks[node] for row in range(len(self.frontier)) for node in self._below(row)
        )

    def _below(self, row: int) -> list[int]:
        """The nodes of the static tree below ``frontier[row]``, in tree order."""
        assert isinstance(self.shape, StaticTree)
        node = self.frontier[row]
        above = -1 if node < 0 else self._tree_node[node]
        return [child for child, parent in enumerate(self.shape.parents) if parent == above]

    def extend(self, candidates: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]]) -> None:
        """Add the children of the frontier: ``candidates[row]`` are tokens from the most likely down, at
        least :meth:`num_ranks` of them unless the vocabulary is smaller, and ``log_probs`` the drafter's
        own for them."""
        if isinstance(self.shape, DynamicTree):
            self._extend_dynamic(self.shape, candidates, log_probs)
            return
        rows = range(len(self.frontier))
        chosen = [[self.shape.ranks[node] for node in self._below(row)] for row in rows]
        for row, ranks in enumerate(chosen):
            self._log_probs += [log_probs[row][rank] for rank in ranks]
        self._extend_static([[candidates[row][rank] for rank in chosen[row]] for row in rows])

    def extend_drawn(self, drawn: Sequence[Sequence[int]], laws: Sequence[Tensor]) -> None:
        """Add children that were drawn without replacement: ``drawn[row]`` from ``laws[row]``, in order.
        For static trees: what the shape of a dynamic tree depends on is not independent of the tokens."""
        if self.probs is None:
            self.probs = []
        for row, tokens in enumerate(drawn):
            self.probs += [laws[row]] * len(tokens)
        self._extend_static(drawn)

    def _extend_static(self, children: Sequence[Sequence[int]]) -> None:
        assert isinstance(self.shape, StaticTree)
        inner = set(self.shape.parents)
        nodes = [(row, child) for row in range(len(self.frontier)) for child in self._below(row)]
        tokens = [token for row in children for token in row]
        frontier = []
        for (row, tree_node), token in zip(nodes, tokens, strict=True):
            if tree_node in inner:
                frontier.append(len(self.tokens))
            self.tokens.append(token)
            self.parents.append(self.frontier[row])
            self._tree_node.append(tree_node)
        self.frontier = frontier
        self.level += 1

    def _extend_dynamic(
        self, shape: DynamicTree, candidates: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]]
    ) -> None:
        start = len(self.tokens)
        for node, tokens, logs in zip(self.frontier, candidates, log_probs, strict=True):
            above = 0.0 if node < 0 else self._values[node]
            for token, log_prob in zip(tokens[: shape.top_k], logs[: shape.top_k], strict=True):
                self.tokens.append(token)
                self.parents.append(node)
                self._values.append(above + min(log_prob, 0.0))
                self._log_probs.append(log_prob)
        self.level += 1
        new = range(start, len(self.tokens))
        best = sorted(new, key=lambda node: -self._values[node])[: shape.top_k]
        self.frontier = best if self.level < shape.depth else []

    def draft(self) -> Draft:
        """The finished draft: a static tree in its own order, of a dynamic one the best nodes."""
        if not self.tokens:
            return EMPTY_DRAFT
        if isinstance(self.shape, DynamicTree):
            nodes = range(len(self.tokens))
            # The sort is stable and parents precede children: of equal values a parent comes first.
            order = sorted(nodes, key=lambda node: -self._values[node])[: self.shape.num_nodes]
        else:
            order = sorted(range(len(self.tokens)), key=lambda node: self._tree_node[node])
        number = {node: at for at, node in enumerate(order)} | {-1: -1}
        probs = None
        if self.probs is not None:
            probs = torch.stack([self.probs[node] for node in order])
        return Draft(
            tuple(self.tokens[node] for node in order),
            tuple(number[self.parents[node]] for node in order),
            probs,
            confidence=self._confidence(order),
        )

    def _confidence(self, order: Sequence[int]) -> tuple[float, ...] | None:
        """The drafter's probabilities; None for nodes that were drawn."""
        if self.probs is not None:
            return None
        return tuple(math.exp(min(self._log_probs[node], 0.0)) for node in order)
