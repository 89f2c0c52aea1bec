"""Which draft nodes pay: the most expected tokens a second, by the measured cost of a step."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

_SAMPLES = 12


class StepCost:
    """Seconds of a step by its rows, from the latest steps of about as many rows; never falling."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[tuple[int, float]]] = {}
        self._points: list[tuple[float, float]] | None = None
        self.num_plain = 0
        """Steps without drafts among those observed, and how many were observed since the last."""
        self.since_plain = 0

    def observe(self, rows: int, seconds: float) -> None:
        self._seen.setdefault(_bucket(rows), deque(maxlen=_SAMPLES)).append((rows, seconds))
        self._points = None

    @property
    def fewest(self) -> float:
        """Of rows measured; infinite without any."""
        return self._curve()[0][0] if self._seen else math.inf

    @property
    def most(self) -> float:
        """Of rows measured; 0 without any."""
        return self._curve()[-1][0] if self._seen else 0.0

    def at(self, rows: int) -> float:
        """Linear between measured points and, with their last slope, beyond. ValueError without any."""
        if not self._seen:
            raise ValueError("no step was measured")
        points = self._curve()
        if rows <= points[0][0] or len(points) == 1:
            return points[0][1]
        after = min(bisect_left(points, (rows, -math.inf)), len(points) - 1)
        low, high = points[after - 1], points[after]
        return low[1] + (rows - low[0]) * (high[1] - low[1]) / (high[0] - low[0])

    def _curve(self) -> list[tuple[float, float]]:
        """(rows, seconds), rising: neighbours that fall are given their mean (isotonic regression)."""
        if self._points is None:
            blocks: list[tuple[float, int, list[float]]] = []
            for _, seen in sorted(self._seen.items()):
                seconds, weight = _lower_quartile([s for _, s in seen]), len(seen)
                rows = [float(median(r for r, _ in seen))]
                while blocks and blocks[-1][0] >= seconds:
                    before, times, earlier = blocks.pop()
                    seconds = (before * times + seconds * weight) / (times + weight)
                    weight, rows = weight + times, earlier + rows
                blocks.append((seconds, weight, rows))
            self._points = [(row, seconds) for seconds, _, rows in blocks for row in rows]
        return self._points


def _lower_quartile(seconds: Sequence[float]) -> float:
    """A neighbour on the machine only ever makes a step longer, so the short ones tell more."""
    return sorted(seconds)[(len(seconds) - 1) // 4]


def _bucket(rows: int) -> int:
    """One for every number to 8, then four for every doubling."""
    return rows if rows <= 8 else 8 + math.floor(4 * math.log2(rows / 8))


def best_nodes(
    values: Sequence[Sequence[float]],
    rows: int,
    seconds: Callable[[int], float],
    tokens: float,
    most: int | None = None,
) -> list[list[int]]:
    """Of each draft the nodes, ascending and at most ``most`` in all, that give the most expected tokens a
    second.

    ``values[i][n]``: the probability that node n of draft i becomes output, no more than its parent's.
    ``seconds(r)``: a round whose step has r rows, of which ``rows`` are there anyway and yield ``tokens``.

    Nodes are taken from the most valuable down and the best of all prefixes of that order wins. No other
    choice is faster: expected tokens are a sum over nodes, so for a given number of them the denominator is
    fixed and the numerator largest for the most valuable. And as no child is worth more than its parent (of
    equals the parent, whose number is lower, comes first), a prefix always holds whole paths.
    """
    gains = sorted((-value, node, at) for at, nodes in enumerate(values) for node, value in enumerate(nodes))
    gains = gains[:most]
    best, best_speed = 0, tokens / seconds(rows)
    for added, (negated, _, _) in enumerate(gains, start=1):
        tokens -= negated
        speed = tokens / seconds(rows + added)
        if speed > best_speed:
            best, best_speed = added, speed
    kept: list[list[int]] = [[] for _ in values]
    for _, node, at in gains[:best]:
        kept[at].append(node)
    return [sorted(nodes) for nodes in kept]


def best_levels(
    values: Sequence[Sequence[float]],
    rows_per_level: float,
    step_seconds: Callable[[int], float],
    draft_seconds_per_level: float,
) -> list[int]:
    """The levels to draft for each sequence that give the most expected tokens a second.

    ``values[i][l]``: the probability that a token of level l + 1 becomes output, never rising. The best
    choice without a drafter's time; with it, which the deepest draft decides, the order is a heuristic.
    """
    count = len(values)
    gains = sorted(
        (-value, level, i) for i, levels in enumerate(values) for level, value in enumerate(levels)
    )
    best, best_speed = 0, count / step_seconds(count)
    tokens, deepest = float(count), 0
    for added, (negated, level, _) in enumerate(gains, start=1):
        tokens, deepest = tokens - negated, max(deepest, level + 1)
        seconds = step_seconds(count + round(added * rows_per_level)) + deepest * draft_seconds_per_level
        if tokens / seconds > best_speed:
            best, best_speed = added, tokens / seconds
    chosen = [0] * count
    for _, _, i in gains[:best]:
        chosen[i] += 1
    return chosen
