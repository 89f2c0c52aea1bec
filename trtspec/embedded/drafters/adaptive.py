"""Draft as much as pays: expected tokens against the measured cost of a step.

A step over more rows takes longer, a little while memory is the bottleneck and in proportion once arithmetic
is. So the best draft is smaller in a larger batch, and above the break-even batch it is none. This drafter
lets another one propose and keeps of all its nodes those that give the most tokens per second:

    (B + sum of v over the nodes kept) / (T(B, B + nodes kept) + D)

with B sequences, v a node's *value*, the probability that it becomes output, T the target's step by sequences
and rows and D the time that drafting took. The sum is the expected number of tokens (acceptance of siblings
excludes each other, so probabilities add: arXiv 2211.17192, equation 1, for a chain, and Medusa, arXiv
2401.10774, section 2.3.3, for a tree). :func:`trtspec.embedded.drafters.choice.best_nodes` finds it.

A node's value is the product of the acceptance rates along its path. The rates are measured: by depth and by
the drafter's own confidence where it has one (a *calibration*, so the confidence need not be a probability),
else by rank among siblings; and for each sequence one number shifts all of them on the logit scale, up for a
text that is copied and down for one that is not. Candidates drawn at random are judged by depth and rank
alone: a choice among them by their probability would bend the law of rejection sampling.

Drafting that itself takes time (a model, heads) is decided first, by the rates per level: how deep, or not at
all.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from trtspec.embedded.acceptance import Accepted
from trtspec.embedded.drafters import Drafter, DraftView
from trtspec.embedded.drafters.choice import StepCost, best_levels, best_nodes
from trtspec.embedded.tree import EMPTY_DRAFT, Draft, children, depths, no_deeper, seen_part, subset, truncate

PROBE_ROUNDS = 64
"""At most every so many rounds more is drafted than pays, so that what was turned off is measured again."""
PROBE_SHARE = 0.02
"""Of the time, at most, that goes into it."""
_FEW_NODES = 4
"""Of each sequence: what is tried before the cost of more is known, and in a probe."""
_WINDOW_ROUNDS = 8
"""A window bears fruit in later rounds only, so it is tried for several."""
PLAIN_ROUNDS = (16, 64)
"""A step without drafts every so many rounds, at first and later: what all is compared with must not be a
guess from a bad moment."""
_PLAIN_TRIES = 3
_MARGIN = 0.02
"""Drafts must promise so much more than none: the best of many estimates is an optimistic one."""
_DECAY = 0.98
_PRIOR_WEIGHT = 3.0
_OPTIMISTIC_RATE = 0.7
_SHIFT_RATE = 0.25
_SHIFT_KEPT = 0.99
_SHIFT_LIMIT = 4.0
_BINS = (0.01, 0.03, 0.06, 0.1, 0.15, 0.25, 0.35, 0.45, 0.55, 0.7, 0.77, 0.85, 0.92, 0.97)
"""Edges of the bins of a drafter's confidence."""
_DEEPEST = 6

Kind = tuple[int, int]
"""A kind of node, all of one rate: (depth, bin of confidence), or (depth, -1 - rank) without one."""


class Acceptance:
    """Acceptance rates of kinds of nodes, over all sequences, and each sequence's shift of them."""

    def __init__(self) -> None:
        self._found: dict[Kind, tuple[float, float]] = {}
        self._shift: dict[str, float] = {}

    def rate(self, kind: Kind, prior: float, sequence_id: str = "") -> float:
        """That a node of ``kind`` is right if its parent is; ``prior`` until enough were tried."""
        accepted, tried = self._found.get(kind, (0.0, 0.0))
        rate = (accepted + _PRIOR_WEIGHT * prior) / (tried + _PRIOR_WEIGHT)
        shift = self._shift.get(sequence_id, 0.0)
        if shift and 0.0 < rate < 1.0:
            rate = 1.0 / (1.0 + (1.0 - rate) / rate * math.exp(-shift))
        return rate

    def learn(self, kind: Kind, prior: float, sequence_id: str, accepted: bool) -> None:
        surprise = accepted - self.rate(kind, prior, sequence_id)
        shift = self._shift.get(sequence_id, 0.0) * _SHIFT_KEPT + _SHIFT_RATE * surprise
        self._shift[sequence_id] = max(-_SHIFT_LIMIT, min(_SHIFT_LIMIT, shift))
        right, tried = self._found.get(kind, (0.0, 0.0))
        self._found[kind] = right * _DECAY + accepted, tried * _DECAY + 1.0

    def shift(self, sequence_id: str) -> float:
        return self._shift.get(sequence_id, 0.0)

    def release(self, sequence_id: str) -> None:
        self._shift.pop(sequence_id, None)


def kinds_of(draft: Draft) -> list[tuple[Kind, float]]:
    """Of each candidate its kind and the rate to expect before any was tried."""
    seen: dict[int, int] = {}
    found: list[tuple[Kind, float]] = []
    confidence = None if draft.probs is not None else draft.confidence
    for node, depth in enumerate(depths(draft)[: draft.num_candidates]):
        level = min(depth, _DEEPEST)
        if confidence is not None:
            found.append(((level, bisect_right(_BINS, confidence[node])), confidence[node]))
            continue
        rank = seen.get(draft.parents[node], 0)
        seen[draft.parents[node]] = rank + 1
        found.append(((level, -1 - min(rank, 7)), _OPTIMISTIC_RATE if rank == 0 else 0.3 / (rank + 1)))
    return found


class Windows(Protocol):
    """What is to be known of a drafter whose drafts hold more than candidates."""

    def window_nodes(self, sequence_id: str) -> Sequence[int]:
        """The nodes of the sequence's last draft that are of use together only."""
        ...

    def cut(self, sequence_id: str, draft: Draft, kept: Sequence[int]) -> None:
        """Of the last ``draft`` the target will see the nodes ``kept`` only, ascending."""
        ...


class AdaptiveDrafter:
    """``inner`` with its drafts cut to what pays (:func:`best_nodes`), down to none.

    ``costly``: drafting takes time worth saving (a model, heads), so that the depth is chosen before the
    drafter is asked. ``windows``: of a drafter that has nodes observed. Times are read from ``clock``, in
    seconds. What is drafted depends on them, so it differs from run to run; answers do not where acceptance
    is exact. ``num_held_back`` counts the rounds without a draft because none would have paid.

    Nodes to observe (lookahead's window) bring no token in their own round: their fruits are the candidates
    of later ones. A sequence's window is kept while the tokens that its drafts brought lately would, at the
    speed without drafts, take longer than the rows of window and candidates do.
    """

    def __init__(
        self,
        inner: Drafter,
        *,
        costly: bool,
        windows: Windows | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.inner = inner
        self.hidden_layers = inner.hidden_layers
        self.num_held_back = 0
        self.acceptance = Acceptance()
        self._levels = Acceptance()
        self._costs: dict[int, StepCost] = {}
        self._costly = costly
        self._windows = windows
        self._clock = clock
        self._since_probe = 0
        self._seconds_since_probe = 0.0
        self._plain_tries = 0
        self._deepest = 0
        self._rows_per_level = 1.0
        self._draft_seconds = 0.0
        self._brought: dict[str, float] = {}
        """Draft tokens accepted lately a round, by sequence; for all of them together ``_brings``."""
        self._brings = 1.0
        self._drafts: dict[str, Draft] = {}
        self._asked: set[str] = set()
        self._began = self._proposed_at = 0.0

    # ------------------------------------------------------------------ how much

    def propose(self, sequences: Sequence[DraftView]) -> list[Draft]:
        self._began = self._clock()
        self._since_probe += 1
        drafts = self._propose(sequences)
        self._asked = {view.id for view in sequences}
        self._drafts = {view.id: draft for view, draft in zip(sequences, drafts, strict=True)}
        self._proposed_at = self._clock()
        return drafts

    def _cost(self, count: int) -> StepCost:
        """Of steps with about ``count`` sequences: rows of many sequences cost more than those of one."""
        return self._costs.setdefault((count - 1).bit_length(), StepCost())

    def _propose(self, sequences: Sequence[DraftView]) -> list[Draft]:
        count, none = len(sequences), [EMPTY_DRAFT] * len(sequences)
        cost = self._cost(count)
        if cost.fewest > 1.25 * count and self._plain_tries < _PLAIN_TRIES:
            # A plain step of this batch is the measure of all others; one with a prompt in it is no measure.
            self._plain_tries += 1
            return none
        self._plain_tries = 0
        if cost.since_plain >= PLAIN_ROUNDS[cost.num_plain > 3]:
            return none
        if cost.fewest == math.inf:
            return self._ask(sequences)
        if not self._costly:
            return self._cut(sequences, self._ask(sequences), cost)
        levels = self._levels_that_pay(sequences, cost)
        if any(levels):
            return self._cut(sequences, self._ask(_no_deeper(sequences, levels)), cost)
        seconds = self._deepest * self._draft_seconds
        if not self._may_probe(cost, count, _FEW_NODES * count, seconds):
            self.num_held_back += 1
            return none
        drafts = self._ask(sequences)
        values = [self._values(view, draft) for view, draft in zip(sequences, drafts, strict=True)]
        few = [_most_valuable(draft, each, _FEW_NODES) for draft, each in zip(drafts, values, strict=True)]
        return self._keep(sequences, drafts, few)

    def _levels_that_pay(self, sequences: Sequence[DraftView], cost: StepCost) -> list[int]:
        """How deep to draft for each sequence, before anything is drafted; unlimited until that is known."""
        if not self._deepest:
            return [view.max_draft for view in sequences]
        values = []
        for view in sequences:
            shift, value, levels = self.acceptance.shift(view.id), 1.0, []
            for level in range(1, min(view.max_draft, self._deepest) + 1):
                rate = self._levels.rate((min(level, _DEEPEST), 0), _OPTIMISTIC_RATE)
                value *= 1.0 / (1.0 + (1.0 - rate) / max(rate, 1e-9) * math.exp(-shift))
                levels.append(value)
            values.append(levels)
        return best_levels(values, self._rows_per_level, cost.at, self._draft_seconds)

    def _cut(self, sequences: Sequence[DraftView], drafts: list[Draft], cost: StepCost) -> list[Draft]:
        """The nodes that pay, of what was drafted."""
        count = len(sequences)
        if not any(len(draft) for draft in drafts):
            return drafts
        spent = self._clock() - self._began
        values = [self._values(view, draft) for view, draft in zip(sequences, drafts, strict=True)]
        windows = self._windows_that_pay(sequences, drafts, cost)
        rows = count + sum(len(nodes) for nodes in windows)
        # Candidates that a window hangs on are in the step anyway: no further row, no further token.
        tokens = count + sum(
            each[node]
            for each, nodes in zip(values, windows, strict=True)
            for node in nodes
            if node < len(each)
        )
        free = [
            [0.0 if node in nodes else value for node, value in enumerate(each)]
            for each, nodes in zip(values, windows, strict=True)
        ]
        # Beyond what was measured the cost is a guess: no further than twice as far at a time.
        most = max(int(2 * cost.most), (1 + _FEW_NODES) * count) - rows

        def seconds(of: int) -> float:
            return (cost.at(of) + spent) * (1.0 if of == rows else 1.0 + _MARGIN)

        best = best_nodes(free, rows, seconds, tokens, max(most, 0))
        kept = [
            _closed(draft, {*nodes, *more}) for draft, nodes, more in zip(drafts, windows, best, strict=True)
        ]
        probe = [
            _closed(draft, {*nodes, *_most_valuable(draft, each, _FEW_NODES)})
            for draft, nodes, each in zip(drafts, kept, values, strict=True)
        ]
        rows = count + sum(map(len, kept))
        more_rows = sum(map(len, probe)) + count - rows
        if more_rows and self._may_probe(cost, rows, more_rows, 0.0):
            kept = probe
        elif rows == count:
            self.num_held_back += 1
        return self._keep(sequences, drafts, kept)

    def _keep(
        self, sequences: Sequence[DraftView], drafts: Sequence[Draft], kept: Sequence[Sequence[int]]
    ) -> list[Draft]:
        for view, draft, nodes in zip(sequences, drafts, kept, strict=True):
            if self._windows is not None and len(nodes) < len(draft):
                self._windows.cut(view.id, draft, nodes)
        return [subset(draft, nodes) for draft, nodes in zip(drafts, kept, strict=True)]

    def _values(self, view: DraftView, draft: Draft) -> list[float]:
        """Of each candidate, the probability that it becomes output."""
        values: list[float] = []
        for (kind, prior), parent in zip(kinds_of(draft), draft.parents, strict=False):
            above = 1.0 if parent < 0 else values[parent]
            values.append(above * self.acceptance.rate(kind, prior, view.id))
        return values

    def _windows_that_pay(
        self, sequences: Sequence[DraftView], drafts: Sequence[Draft], cost: StepCost
    ) -> list[list[int]]:
        """Of each draft its nodes to observe and the candidates that they hang on, where that pays."""
        windows: list[list[int]] = [[] for _ in drafts]
        if self._windows is None:
            return windows
        rows = len(sequences)
        plain = rows / cost.at(rows)
        seconds = 0.0
        for at, (view, draft) in enumerate(zip(sequences, drafts, strict=True)):
            seconds = cost.at(rows + len(draft)) - cost.at(rows)
            if self._brought.get(view.id, self._brings) >= plain * seconds:
                windows[at] = _closed(draft, self._windows.window_nodes(view.id))
                rows += len(windows[at])
        if rows == len(sequences) and self._may_probe(cost, rows, _WINDOW_ROUNDS * len(drafts[-1]), 0.0):
            self._brought, self._brings = {}, 1.0
        return windows

    def _may_probe(self, cost: StepCost, rows: int, more: int, seconds: float) -> bool:
        """Whether it is time to draft more than pays, and the time for it is a small share."""
        needed = cost.at(rows + more) - cost.at(rows) + seconds
        if self._since_probe < PROBE_ROUNDS or needed > PROBE_SHARE * self._seconds_since_probe:
            return False
        self._since_probe, self._seconds_since_probe = 0, 0.0
        return True

    def _ask(self, sequences: Sequence[DraftView]) -> list[Draft]:
        began = self._clock()
        drafts = [
            truncate(no_deeper(draft, view.max_draft), view.room)
            for view, draft in zip(sequences, self.inner.propose(sequences), strict=True)
        ]
        deepest = max((max(depths(draft), default=0) for draft in drafts), default=0)
        if deepest:
            self._deepest = max(self._deepest, deepest)
            seconds = (self._clock() - began) / deepest
            self._draft_seconds = 0.8 * (self._draft_seconds or seconds) + 0.2 * seconds
        return drafts

    # ------------------------------------------------------------------ what came of it

    def observe(
        self,
        sequences: Sequence[DraftView],
        accepted: Sequence[Accepted | None],
        hidden: Sequence[Mapping[int, Tensor]],
        logits: Sequence[Tensor | None],
    ) -> None:
        now, drafted, levels = self._clock(), 0, 0
        for view, outcome, rows in zip(sequences, accepted, logits, strict=True):
            draft = self._drafts.get(view.id, EMPTY_DRAFT)
            if outcome is None or rows is None:
                continue
            if draft.num_read != len(rows) - 1:
                draft = seen_part(draft, len(rows) - 1)
            drafted += len(draft)
            levels += max(depths(draft), default=0)
            self._learn(view.id, draft, outcome)
            brought = len(outcome.path)
            self._brought[view.id] = 0.9 * self._brought.get(view.id, self._brings) + 0.1 * brought
            self._brings = 0.98 * self._brings + 0.02 * brought
        if self._asked and all(view.id in self._asked for view in sequences):  # no prompt in it
            cost = self._cost(len(sequences))
            cost.observe(len(sequences) + drafted, now - self._proposed_at)
            cost.since_plain = 0 if drafted == 0 else cost.since_plain + 1
            cost.num_plain += drafted == 0
            self._seconds_since_probe += now - self._began
            if levels:
                self._rows_per_level = 0.9 * self._rows_per_level + 0.1 * drafted / levels
        self._asked, self._drafts = set(), {}
        self.inner.observe(sequences, accepted, hidden, logits)

    def _learn(self, sequence_id: str, draft: Draft, outcome: Accepted) -> None:
        """Every child of a node on the accepted path was tried; where it has none, nothing was."""
        if not draft.num_candidates:
            return
        kinds, below = kinds_of(draft), children(draft)
        for level, node in enumerate((-1, *outcome.path), start=1):
            followers = below[node + 1]
            for child in followers:
                self.acceptance.learn(*kinds[child], sequence_id, child in outcome.path)
            if followers:
                kind = (min(level, _DEEPEST), 0)
                self._levels.learn(kind, _OPTIMISTIC_RATE, "", len(outcome.path) >= level)

    def release(self, sequence_id: str) -> None:
        self.acceptance.release(sequence_id)
        self._brought.pop(sequence_id, None)
        self.inner.release(sequence_id)


def _no_deeper(sequences: Sequence[DraftView], levels: Sequence[int]) -> list[DraftView]:
    return [
        replace(view, max_draft=min(level, view.max_draft), max_nodes=view.room)
        for view, level in zip(sequences, levels, strict=True)
    ]


def _closed(draft: Draft, nodes: Iterable[int]) -> list[int]:
    """``nodes`` and all above them, ascending."""
    found: set[int] = set()
    for node in nodes:
        while node >= 0 and node not in found:
            found.add(node)
            node = draft.parents[node]
    return sorted(found)


def _most_valuable(draft: Draft, values: Sequence[float], count: int) -> list[int]:
    return _closed(draft, sorted(range(len(values)), key=lambda node: -values[node])[:count])
