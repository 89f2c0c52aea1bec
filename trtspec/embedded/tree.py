"""Drafts: candidate tokens as a tree under the current token.

A node's parent is an earlier node or -1, the *current token*: the last known token, whose KV is written
in the same forward. A chain is a tree with one branch and no speculation is the empty tree, so one mask
builder and one signature of acceptance serve every way of drafting (token trees: SpecInfer,
arXiv 2305.09781; Medusa, arXiv 2401.10774, section 2.1.2).

Two numberings occur. *Nodes* are 0 .. n-1. *Rows* are the n + 1 rows that verify a draft in one forward:
row 0 is the current token, row i + 1 is node i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Draft:
    """Candidates for the tokens that follow the current token; prefix-closed and in topological order.

    Raises ValueError when the fields do not fit each other: a draft is made by code, not by users.
    Equality compares tokens and parents only.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    """Of each node: an earlier node, or -1 for the current token."""
    probs: Tensor | None = field(default=None, compare=False)
    """[n, vocab]: row i is the law that node i was drawn from given its parent, *before* the tokens of
    earlier siblings are taken out of it. None: candidates chosen without randomness (point masses)."""
    num_observed: int = 0
    """The last so many nodes are no candidates: the target computes them so that the drafter may observe
    what follows (lookahead's window), acceptance never goes there."""
    confidence: tuple[float, ...] | None = field(default=None, compare=False)
    """Of each node the drafter's own estimate, 0 .. 1, that it is right if its parent is; None: it has none.
    Whoever uses it calibrates it, and never chooses by it among nodes that were drawn (``probs``)."""
    silent: tuple[int, ...] = field(default=(), compare=False)
    """Nodes to observe, ascending, whose own logits nobody reads: rows without an output projection."""

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"draft of {len(self.tokens)} tokens with {len(self.parents)} parents")
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise ValueError(f"draft node {node} has parent {parent}; must be -1 or an earlier node")
        if not 0 <= self.num_observed <= len(self.tokens):
            raise ValueError(f"draft of {len(self.tokens)} tokens with {self.num_observed} to observe")
        if self.confidence is not None and len(self.confidence) != len(self.tokens):
            raise ValueError(f"draft of {len(self.tokens)} tokens with {len(self.confidence)} confidences")
        if any(not self.num_candidates <= node < len(self.tokens) for node in self.silent):
            raise ValueError(f"silent nodes {self.silent} must be nodes to observe")
        if self.probs is not None and (self.probs.ndim != 2 or self.probs.shape[0] != len(self.tokens)):
            raise ValueError(
                f"draft of {len(self.tokens)} tokens with probs of shape {list(self.probs.shape)}; "
                f"must be [{len(self.tokens)}, vocab]"
            )

    def __len__(self) -> int:
        """The number of nodes."""
        return len(self.tokens)

    @property
    def num_candidates(self) -> int:
        """The nodes that may be accepted: the first so many."""
        return len(self.tokens) - self.num_observed

    @property
    def num_read(self) -> int:
        """The nodes whose logits are read."""
        return len(self.tokens) - len(self.silent)

    @property
    def is_chain(self) -> bool:
        """Whether every node's parent is the node before it; the empty draft is a chain."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))


EMPTY_DRAFT = Draft((), ())


class PrefixTree:
    """Nodes of a draft under way, in which equal tokens under one parent are one node: exact acceptance
    follows the first of equal siblings only, so a second one, and all below it, would be computed in vain."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._nodes: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int) -> int:
        """The node of ``token`` under ``parent`` (-1: the current token), new if there was none."""
        node = self._nodes.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
        return node

    def add_path(self, tokens: Sequence[int]) -> None:
        """Add ``tokens`` from the current token down."""
        node = -1
        for token in tokens:
            node = self.add(node, token)

    def draft(
        self,
        num_observed: int = 0,
        *,
        confidence: Sequence[float] | None = None,
        silent: Sequence[int] = (),
    ) -> Draft:
        """All nodes, as point masses; the last ``num_observed`` are no candidates."""
        told = None if confidence is None else tuple(confidence)
        return Draft(tuple(self.tokens), tuple(self.parents), None, num_observed, told, tuple(silent))


def chain(
    tokens: Sequence[int], probs: Tensor | None = None, confidence: Sequence[float] | None = None
) -> Draft:
    """The one-branch draft that proposes ``tokens`` in order; ``probs`` ``[n, vocab]`` or None."""
    told = None if confidence is None else tuple(confidence)
    return Draft(tuple(tokens), tuple(range(-1, len(tokens) - 1)), probs, 0, told)


def truncate(draft: Draft, max_nodes: int) -> Draft:
    """The first ``max_nodes`` nodes (none if that is negative); prefix-closed because parents come first.

    What is cut depends on the order of the nodes alone, never on the tokens, so a draft whose tokens
    were drawn at random stays fit for rejection sampling.
    """
    if max_nodes >= len(draft):
        return draft
    return EMPTY_DRAFT if max_nodes <= 0 else subset(draft, range(max_nodes))


def no_deeper(draft: Draft, max_depth: int) -> Draft:
    """The nodes at most ``max_depth`` below the current token, in their order; prefix-closed as before."""
    return subset(draft, [node for node, depth in enumerate(depths(draft)) if depth <= max_depth])


def subset(draft: Draft, kept: Sequence[int]) -> Draft:
    """The nodes ``kept``, ascending and with every kept node's parent among them, in their order."""
    if len(kept) == len(draft):
        return draft
    if not kept:
        return EMPTY_DRAFT
    place = {-1: -1} | {node: at for at, node in enumerate(kept)}
    return Draft(
        tuple(draft.tokens[node] for node in kept),
        tuple(place[draft.parents[node]] for node in kept),
        None if draft.probs is None else draft.probs[list(kept)],
        sum(node >= draft.num_candidates for node in kept),
        None if draft.confidence is None else tuple(draft.confidence[node] for node in kept),
        tuple(place[node] for node in draft.silent if node in place),
    )


def seen_part(draft: Draft, num_read: int) -> Draft:
    """What is left of ``draft`` where the step had no room for all: its first nodes, so many of them read."""
    return next(cut for n in range(len(draft), -1, -1) if (cut := truncate(draft, n)).num_read <= num_read)


def depths(draft: Draft) -> tuple[int, ...]:
    """Of each node, its distance from the current token: 1 for the first candidates.

    A node's position in its sequence is the current token's position plus its depth.
    """
    found: list[int] = []
    for parent in draft.parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return tuple(found)


def children(draft: Draft) -> list[list[int]]:
    """Of each row, the candidates that may follow it, in node order; length n + 1."""
    found: list[list[int]] = [[] for _ in range(len(draft) + 1)]
    for node, parent in enumerate(draft.parents[: draft.num_candidates]):
        found[parent + 1].append(node)
    return found


def path_to(draft: Draft, node: int) -> tuple[int, ...]:
    """The nodes from the first candidate down to ``node``; () for -1, the current token."""
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = draft.parents[node]
    return tuple(reversed(path))


def tree_mask(draft: Draft) -> Tensor | None:
    """Which row attends to which: ``[n + 1, n + 1] bool``, row to its ancestors and itself.

    None for a chain, where that is every earlier row and the causal mask serves.
    """
    if draft.is_chain:
        return None
    mask = np.eye(len(draft) + 1, dtype=np.bool_)
    for node, parent in enumerate(draft.parents):
        mask[node + 1] |= mask[parent + 1]
    return torch.from_numpy(mask)
