"""Prompt lookup: draft by copying what followed the current suffix where it occurred before.

LLMA (arXiv 2304.04487) copies spans from reference documents; prompt lookup decoding is its form for the
sequence's own prompt and answer. It needs no model: the candidates are point masses, and they are good
where the answer repeats its input (summaries, edits, code) and absent elsewhere.

Two things widen it. Where a suffix went on in several ways, up to ``branches`` of them are verified at once
as a tree. And a corpus of the user's own texts (:mod:`trtspec.embedded.drafters.corpus`, REST) can be looked
up besides the sequence itself.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from trtspec.embedded.acceptance import Accepted
from trtspec.embedded.drafters import DraftView
from trtspec.embedded.drafters.corpus import Corpus
from trtspec.embedded.tree import EMPTY_DRAFT, Draft, PrefixTree, chain
from trtspec.errors import InputError, Problem

MAX_PLACES = 16
"""Earlier places of a suffix that are looked at for branches, latest first."""
_ESCAPE = 1.0
"""Places' worth of belief that the text goes on as none of them did (PPM's escape, method A)."""
_LATEST_WEIGHT = 4.0
"""Places that the latest one counts as: copied text goes on where it was. Measured on held-out answers of a
small chat model against 1, 2 and 8; with 1, branches cost copied text more than they bring."""
_CORPUS_WEIGHT = 1.0
"""Places in the sequence itself that all places in the corpus together count as."""

Weighted = tuple[Sequence[int], float]
"""A continuation and how many places it stands for."""


@dataclass
class _Index:
    """Where each n-gram of one sequence ended last: ``ends[n-gram]`` is the position after it."""

    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    earlier: dict[tuple[int, int], int] = field(default_factory=dict)
    """``earlier[n, end]``: where the n-gram that ends there ended the time before; kept for branches only."""
    indexed: int = 0
    """n-grams that end at or before this position are in ``ends``."""


class NgramDrafter:
    """Drafts up to ``num_draft_tokens`` by the longest suffix, of ``max_ngram`` down to ``min_ngram``
    tokens, that occurred before; of several places the most recent.

    The place may overlap the suffix but is never the suffix itself. When the copied span reaches the end
    of the known text it goes on into the tokens just drafted, so text of period p (a list, a table, a
    loop) drafts full length from its second period on instead of at most p tokens.

    With ``branches`` above 1 all places of that suffix count, the latest MAX_PLACES of them; shorter suffixes
    are asked while they know too few ways to go on. The draft then is the tree of ``num_draft_tokens`` nodes
    that is most likely by the places' counts, with at most so many leaves. ``corpus`` gives further places:
    of its own longest suffix, for a chain where the sequence has none, for a tree besides the sequence's.

    A call costs time in proportion to the tokens that are new since the sequence's last call, and
    memory is one dictionary entry per token and n-gram length. Raises InputError when the sizes do not
    fit each other.
    """

    hidden_layers: tuple[int, ...] = ()

    def __init__(
        self,
        num_draft_tokens: int,
        min_ngram: int,
        max_ngram: int,
        *,
        branches: int = 1,
        corpus: Corpus | None = None,
    ) -> None:
        problems = []
        if branches < 1:
            problems.append(Problem(f"{branches} is below 1", key="speculation.branches"))
        if num_draft_tokens < 1:
            problems.append(Problem(f"{num_draft_tokens} is below 1", key="speculation.num_draft_tokens"))
        if min_ngram < 1:
            problems.append(Problem(f"{min_ngram} is below 1", key="speculation.min_ngram"))
        if max_ngram < min_ngram:
            problems.append(
                Problem(
                    f"{max_ngram} is below min_ngram {min_ngram}; raise it or lower min_ngram",
                    key="speculation.max_ngram",
                )
            )
        if problems:
            raise InputError(problems)
        self.num_draft_tokens = num_draft_tokens
        self.min_ngram = min_ngram
        self.max_ngram = max_ngram
        self.branches = branches
        self.corpus = corpus
        self._indexes: dict[str, _Index] = {}

    def propose(self, sequences: Sequence[DraftView]) -> list[Draft]:
        return [self._propose(view) for view in sequences]

    def _propose(self, view: DraftView) -> Draft:
        tokens = view.tokens
        index = self._indexes.setdefault(view.id, _Index())
        self._extend(index, tokens)
        depth = min(self.num_draft_tokens, view.max_draft)
        if depth < 1:
            return EMPTY_DRAFT
        if self.branches == 1:
            return self._chain(index, tokens, depth)
        ways = self._ways(index, tokens, depth) + self._corpus_ways(tokens, depth)
        return likely_tree(ways, min(self.num_draft_tokens, view.room), self.branches)

    def _chain(self, index: _Index, tokens: Sequence[int], depth: int) -> Draft:
        length = len(tokens)
        n, end = next(
            (
                (n, index.ends[suffix])
                for n in range(min(self.max_ngram, length - 1), self.min_ngram - 1, -1)
                if (suffix := tuple(tokens[length - n :])) in index.ends
            ),
            (0, 0),
        )
        if n == 0:
            return likely_tree(self._corpus_ways(tokens, depth), depth, 1)
        # The longer the match, the more likely it goes on: a first guess, which adaptive drafting calibrates.
        return chain(_copied(tokens, end, depth), confidence=[n / (n + 1)] * depth)

    def _ways(self, index: _Index, tokens: Sequence[int], depth: int) -> list[Weighted]:
        """How the suffix went on at its earlier places in the sequence: the longest suffix first, the latest
        place first, no place twice."""
        length = len(tokens)
        ends: dict[int, None] = {}
        firsts: set[int] = set()
        for n in range(min(self.max_ngram, length - 1), self.min_ngram - 1, -1):
            end = index.ends.get(tuple(tokens[length - n :]))
            while end is not None and len(ends) < MAX_PLACES:
                ends.setdefault(end)
                firsts.add(tokens[end])
                end = index.earlier.get((n, end))
            if len(firsts) >= self.branches:
                break
        weights = itertools.chain([_LATEST_WEIGHT], itertools.repeat(1.0))
        return [(_copied(tokens, end, depth), weight) for end, weight in zip(ends, weights, strict=False)]

    def _corpus_ways(self, tokens: Sequence[int], depth: int) -> list[Weighted]:
        found = self.corpus and self.corpus.find(tokens, self.min_ngram, self.max_ngram, depth)
        if not found:
            return []
        weight = min(1.0, _CORPUS_WEIGHT / len(found.continuations))
        return [(way, weight) for way in found.continuations]

    def _extend(self, index: _Index, tokens: Sequence[int]) -> None:
        """Add the n-grams that ended since the last call, the suffix of ``tokens`` itself left out: it
        would be its own latest occurrence. It enters when the next token is known."""
        last = len(tokens) - 1
        for end in range(index.indexed + 1, last + 1):
            for n in range(self.min_ngram, min(self.max_ngram, end) + 1):
                ngram = tuple(tokens[end - n : end])
                if self.branches > 1 and ngram in index.ends:
                    index.earlier[n, end] = index.ends[ngram]
                index.ends[ngram] = end
        index.indexed = max(index.indexed, last)

    def observe(
        self,
        sequences: Sequence[DraftView],
        accepted: Sequence[Accepted | None],
        hidden: Sequence[Mapping[int, Tensor]],
        logits: Sequence[Tensor | None],
    ) -> None:
        """Nothing to learn: the tokens say it all."""

    def release(self, sequence_id: str) -> None:
        self._indexes.pop(sequence_id, None)


def _copied(tokens: Sequence[int], end: int, count: int) -> list[int]:
    """``count`` tokens from position ``end`` on, which is before the end of ``tokens``."""
    copied = list(tokens[end : end + count])
    behind = len(tokens) - end
    while len(copied) < count:
        # The source runs `behind` tokens behind: past the known text it is the copy.
        copied.append(copied[len(copied) - behind])
    return copied


def likely_tree(ways: Sequence[Weighted], max_nodes: int, branches: int) -> Draft:
    """The tree of at most ``max_nodes`` nodes and ``branches`` leaves that is most likely to be right.

    A node's likelihood is the product along its path of (weight of the ways that go there) / (weight of
    those that come to its parent + 1): a single place is believed by half, three that agree by three
    quarters. Nodes are taken from the most likely down; a node is less likely than its parent, so what is
    taken is a tree. Of equally likely nodes the one that ``ways`` name first is taken, and so is its
    sibling order.
    """
    tree = PrefixTree()
    order = itertools.count()
    heap: list[tuple[float, int, float, int, int, list[Weighted]]] = []
    shares: list[float] = []

    def offer(node: int, likelihood: float, depth: int, members: Sequence[Weighted]) -> None:
        for share, token, followers in _followers(members, depth):
            heapq.heappush(heap, (-likelihood * share, next(order), share, node, token, followers))

    depth_of = {-1: 0}
    has_child: set[int] = set()
    leaves = 0
    offer(-1, 1.0, 0, ways)
    while heap and len(tree) < max_nodes:
        negated, _, share, parent, token, members = heapq.heappop(heap)
        new_leaf = parent == -1 or parent in has_child
        if new_leaf and leaves == branches:
            continue
        leaves += new_leaf
        has_child.add(parent)
        node = tree.add(parent, token)
        shares.append(share)
        depth_of[node] = depth_of[parent] + 1
        offer(node, -negated, depth_of[node], members)
    return tree.draft(confidence=shares)


def _followers(members: Sequence[Weighted], depth: int) -> Iterator[tuple[float, int, list[Weighted]]]:
    """(share of the weight, token, ways that go there) of each token that the ways have at ``depth``."""
    found: dict[int, list[Weighted]] = {}
    for way, weight in members:
        if depth < len(way):
            found.setdefault(way[depth], []).append((way, weight))
    total = sum(weight for _, weight in members) + _ESCAPE
    for token, followers in found.items():
        yield sum(weight for _, weight in followers) / total, token, followers
