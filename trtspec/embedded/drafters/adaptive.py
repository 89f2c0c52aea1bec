"""Draft as much as pays: expected tokens against the measured cost of a step.

A step over more rows takes longer, a little while memory is the bottleneck and in proportion once arithmetic
is. So the best draft is shorter in a larger batch, and above the break-even batch it is none. This drafter
lets another one propose and cuts its drafts to the lengths that give the most tokens per second:

    (B + sum_i sum_{j <= k_i} a_i^j) / (T(B + sum_i k_i) + D(max_i k_i))

with B sequences, k_i levels drafted for sequence i, a_i its acceptance rate per level (the numerator is the
expected number of tokens, arXiv 2211.17192, equation 1), T the step's time by its rows and D the drafter's.
The engine's own steps are the measurement of all three. Levels are added in the order of what they bring,
a_i^k, which is the best order because every row costs the same; the best of all prefixes wins.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from torch import Tensor

from trtspec.embedded.acceptance import Accepted
from trtspec.embedded.drafters import Drafter, DraftView
from trtspec.embedded.tree import EMPTY_DRAFT, Draft, depths, no_deeper

PROBE_ROUNDS = 64
"""Every so many rounds drafts are not cut, so that what was turned off is measured again."""
_PLAIN_TRIES = 3
_SAMPLES = 9
_OPTIMISTIC_RATE = 0.7
_POOL_WEIGHT = 4.0
_DECAY = 0.9


class StepCost:
    """Seconds of a step by its rows: medians of the latest steps of about as many rows, never falling."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[tuple[int, float]]] = {}

    def observe(self, rows: int, seconds: float) -> None:
        self._seen.setdefault(_bucket(rows), deque(maxlen=_SAMPLES)).append((rows, seconds))

    def knows(self, rows: int) -> bool:
        return _bucket(rows) in self._seen

    def at(self, rows: int) -> float:
        """Linear between measured points and, with their last slope, beyond. ValueError without any."""
        points = [
            (median(r for r, _ in seen), median(s for _, s in seen)) for _, seen in sorted(self._seen.items())
        ]
        if not points:
            raise ValueError("no step was measured")
        rising = [points[0]]
        for r, s in points[1:]:
            rising.append((r, max(s, rising[-1][1])))
        if rows <= rising[0][0] or len(rising) == 1:
            return rising[0][1]
        low, high = next((pair for pair in itertools.pairwise(rising) if rows <= pair[1][0]), rising[-2:])
        return low[1] + (rows - low[0]) * (high[1] - low[1]) / (high[0] - low[0])


def _bucket(rows: int) -> int:
    """One for every number to 8, then four for every doubling."""
    return rows if rows <= 8 else 8 + math.floor(4 * math.log2(rows / 8))


def best_levels(
    rates: Sequence[float],
    most: Sequence[int],
    rows_per_level: float,
    step_seconds: Callable[[int], float],
    draft_seconds_per_level: float = 0.0,
) -> list[int]:
    """The levels to draft for each sequence, at most ``most``, that give the most expected tokens a second.

    ``rates`` in [0, 1]: acceptance per level. ``step_seconds(rows)``: a target step.
    """
    count = len(rates)
    gains = sorted(
        ((rate**level, -level, i) for i, rate in enumerate(rates) for level in range(1, most[i] + 1)),
        reverse=True,
    )
    best, best_speed = 0, count / step_seconds(count)
    tokens, deepest = float(count), 0
    for added, (gain, level, _) in enumerate(gains, start=1):
        tokens, deepest = tokens + gain, max(deepest, -level)
        seconds = step_seconds(count + round(added * rows_per_level)) + deepest * draft_seconds_per_level
        if tokens / seconds > best_speed:
            best, best_speed = added, tokens / seconds
    levels = [0] * count
    for _, _, i in gains[:best]:
        levels[i] += 1
    return levels


class AdaptiveDrafter:
    """``inner`` with its drafts cut to what pays (:func:`best_levels`), down to none.

    ``costly``: drafting takes time worth saving (a model), so that the lengths are chosen before the drafter
    is asked; otherwise after, for those sequences that have a draft. Times are read from ``clock``, in
    seconds. How much is drafted depends on them, so it differs from run to run; answers do not where
    acceptance is exact. ``num_held_back`` counts the rounds without a draft because none would have paid.
    """

    def __init__(
        self, inner: Drafter, *, costly: bool, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.inner = inner
        self.hidden_layers = inner.hidden_layers
        self.num_held_back = 0
        self.cost = StepCost()
        self._costly = costly
        self._clock = clock
        self._round = 0
        self._plain_tries = 0
        self._deepest = 1
        self._draft_seconds = 0.0
        self._pool = (_OPTIMISTIC_RATE * _POOL_WEIGHT, _POOL_WEIGHT)
        self._rates: dict[str, tuple[float, float]] = {}
        self._drafted: dict[str, int] = {}
        self._asked: set[str] = set()
        self._proposed_at = 0.0

    def propose(self, sequences: Sequence[DraftView]) -> list[Draft]:
        drafts = self._propose(sequences)
        self._asked = {view.id for view in sequences}
        self._drafted = {
            view.id: max(depths(draft), default=0) for view, draft in zip(sequences, drafts, strict=True)
        }
        self._proposed_at = self._clock()
        return drafts

    def _propose(self, sequences: Sequence[DraftView]) -> list[Draft]:
        none = [EMPTY_DRAFT] * len(sequences)
        self._round += 1
        if not self.cost.knows(len(sequences)) and self._plain_tries < _PLAIN_TRIES:
            # A plain step of this batch is the measure of all others; one with a prompt in it is no measure.
            self._plain_tries += 1
            return none
        self._plain_tries = 0
        probing = self._round % PROBE_ROUNDS == 0
        if self._costly:
            most = [min(view.max_draft, self._deepest) for view in sequences]
            if probing or not self.cost.knows(len(sequences) + sum(most)):
                return self._ask(sequences)
            levels = self._levels(sequences, most, 1.0, self._draft_seconds)
            if not any(levels):
                self.num_held_back += 1
                return none
            return self._ask(
                [
                    replace(view, max_draft=level, max_nodes=level)
                    for view, level in zip(sequences, levels, strict=True)
                ]
            )
        drafts = self._ask(sequences)
        most = [max(depths(draft), default=0) for draft in drafts]
        nodes = sum(len(draft) for draft in drafts)
        if probing or nodes == 0 or not self.cost.knows(len(sequences) + nodes):
            return drafts
        levels = self._levels(sequences, most, nodes / sum(most), 0.0)
        self.num_held_back += not any(levels)
        return [no_deeper(draft, level) for draft, level in zip(drafts, levels, strict=True)]

    def _levels(
        self, sequences: Sequence[DraftView], most: Sequence[int], rows_per_level: float, seconds: float
    ) -> list[int]:
        known: dict[int, float] = {}

        def step_seconds(rows: int) -> float:
            if rows not in known:
                known[rows] = self.cost.at(rows)
            return known[rows]

        return best_levels(
            [self.rate(view.id) for view in sequences], most, rows_per_level, step_seconds, seconds
        )

    def rate(self, sequence_id: str) -> float:
        """Acceptance per level of one sequence: its own latest, and all sequences' where it has few."""
        accepted, tried = self._rates.get(sequence_id, (0.0, 0.0))
        pool = self._pool[0] / self._pool[1]
        return (accepted + pool * _POOL_WEIGHT) / (tried + _POOL_WEIGHT)

    def _ask(self, sequences: Sequence[DraftView]) -> list[Draft]:
        began = self._clock()
        drafts = self.inner.propose(sequences)
        deepest = max((max(depths(draft), default=0) for draft in drafts), default=0)
        if deepest:
            self._deepest = max(self._deepest, deepest)
            seconds = (self._clock() - began) / deepest
            before = self._draft_seconds or seconds
            self._draft_seconds = 0.8 * before + 0.2 * seconds
        return drafts

    def observe(
        self,
        sequences: Sequence[DraftView],
        accepted: Sequence[Accepted | None],
        hidden: Sequence[Mapping[int, Tensor]],
        logits: Sequence[Tensor | None],
    ) -> None:
        seconds = self._clock() - self._proposed_at
        if all(view.id in self._asked for view in sequences):  # no prompt in it
            self.cost.observe(sum(len(rows) for rows in logits if rows is not None), seconds)
        for view, outcome, rows in zip(sequences, accepted, logits, strict=True):
            if outcome is None or rows is None:
                continue
            tried = min(self._drafted.get(view.id, 0), len(rows) - 1)
            if tried:
                # Levels behind the first that failed were not tried.
                found = len(outcome.path)
                self._rates[view.id] = _learn(self._rates.get(view.id, (0.0, 0.0)), found, tried)
                self._pool = _learn(self._pool, found, tried)
        self._asked, self._drafted = set(), {}
        self.inner.observe(sequences, accepted, hidden, logits)

    def release(self, sequence_id: str) -> None:
        self._rates.pop(sequence_id, None)
        self.inner.release(sequence_id)


def _learn(rate: tuple[float, float], found: int, tried: int) -> tuple[float, float]:
    judged = found + (found < tried)
    return rate[0] * _DECAY + found, rate[1] * _DECAY + judged
