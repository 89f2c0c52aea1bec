"""Acceptance of drafts, by position and as a whole, with intervals: pure counting, no engine.

The unit is a *step*: one target forward of one answer after the one that ended its prompt, for which nothing
could be drafted. Terms as in :mod:`trtspec.engine`. By position (a chain's token, a tree's level) j:

* *joint* acceptance: the share of all steps that accepted at least j drafted tokens;
* *conditional* acceptance: the same among the steps that accepted j - 1, joint_j / joint_(j - 1);
* *offered*: the share of those that had a candidate at j at all (prompt lookup often has none).

Tokens a step then are 1 + the sum of the joint ones (docs/math.md, section 4), but for the last step of an
answer, whose bonus token may be cut off. Prompts are the independent blocks of every interval: steps of one
answer are alike.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trtspec.stats import Interval, clustered_rate, gap_of_ratios, ratio_of_sums

DEFINITION = (
    "acceptance length = tokens emitted per target step after the prompt's, bonus or recovered token "
    "included; acceptance rate = accepted / drafted"
)
DEAD_LENGTH = 1.1
"""A drafter whose acceptance length is below this, interval and all, is called dead."""


@dataclass(frozen=True)
class Step:
    """``drafted`` candidates in ``offered`` levels, ``accepted`` of which became output, of ``emitted`` ones.
    ``ranks``: of each accepted node, how many siblings were offered before it; ``rows``: nodes that the
    target computed, lookahead's window included."""

    emitted: int
    drafted: int
    offered: int
    accepted: int
    ranks: tuple[int, ...] = ()
    rows: int = 0


@dataclass(frozen=True)
class Answered:
    """One prompt's answer: its steps after the prompt's own, and all its tokens."""

    prompt: str
    task: str
    tokens: tuple[int, ...]
    steps: tuple[Step, ...]

    @property
    def emitted(self) -> int:
        return sum(step.emitted for step in self.steps)


@dataclass(frozen=True)
class Value:
    """A measured value and its 95 % interval over prompts, by bootstrap or, of a rate, Korn and Graubard's;
    NaN without any data, and an interval without ends from one prompt alone."""

    value: float
    interval: Interval


@dataclass(frozen=True)
class Position:
    """``steps``: those that accepted everything before this position, whose share ``conditional`` is of."""

    position: int
    conditional: Value
    joint: Value
    offered: float
    steps: int


@dataclass(frozen=True)
class Acceptance:
    """What a set of answers says. ``length`` and ``rate`` weigh every token alike, ``..._by_request`` every
    request. ``histogram[n]``: steps that emitted n tokens. ``with_prompt_step``: the length as ``verify``
    counts it, which takes in the step that ends the prompt. ``predicted``: 1 + the sum of the joint rates."""

    prompts: int
    steps: int
    tokens: int
    drafted: int
    accepted: int
    length: Value
    length_by_request: Value
    rate: Value
    rate_by_request: Value
    positions: tuple[Position, ...]
    histogram: dict[int, int]
    with_prompt_step: float
    predicted: float


def summarize(answers: Sequence[Answered]) -> Acceptance:
    """The acceptance of ``answers``; those that ended with the prompt's own step count for nothing."""
    answers = [answer for answer in answers if answer.steps]
    steps = [step for answer in answers for step in answer.steps]
    tokens = [float(answer.emitted) for answer in answers]
    counts = [float(len(answer.steps)) for answer in answers]
    drafted = [float(sum(step.drafted for step in answer.steps)) for answer in answers]
    accepted = [float(sum(step.accepted for step in answer.steps)) for answer in answers]
    rates = [a / d for a, d in zip(accepted, drafted, strict=True) if d]
    positions, limits = _positions(answers), _limits(answers)
    return Acceptance(
        prompts=len(answers),
        steps=len(steps),
        tokens=int(sum(tokens)),
        drafted=int(sum(drafted)),
        accepted=int(sum(accepted)),
        length=_ratio(tokens, counts, limits),
        length_by_request=_mean([t / n for t, n in zip(tokens, counts, strict=True)], limits),
        rate=Value(*clustered_rate(accepted, drafted)),
        rate_by_request=_mean(rates, (0.0, 1.0)),
        positions=positions,
        histogram=dict(sorted(Counter(step.emitted for step in steps).items())),
        with_prompt_step=_over(sum(len(a.tokens) for a in answers), len(steps) + len(answers)),
        predicted=1.0 + sum(position.joint.value for position in positions) if steps else math.nan,
    )


def by_task(answers: Sequence[Answered]) -> dict[str, Acceptance]:
    """:func:`summarize` of each task, in the order of the prompts; those without a task are left out."""
    tasks = dict.fromkeys(answer.task for answer in answers if answer.task)
    return {task: summarize([answer for answer in answers if answer.task == task]) for task in tasks}


def _positions(answers: Sequence[Answered]) -> tuple[Position, ...]:
    deepest = max((step.offered for answer in answers for step in answer.steps), default=0)
    found = []
    for position in range(1, deepest + 1):
        before = [sum(s.accepted >= position - 1 for s in answer.steps) for answer in answers]
        kept = [float(sum(s.accepted >= position for s in answer.steps)) for answer in answers]
        offered = sum(
            s.accepted >= position - 1 and s.offered >= position for answer in answers for s in answer.steps
        )
        found.append(
            Position(
                position,
                conditional=Value(*clustered_rate(kept, [float(count) for count in before])),
                joint=Value(*clustered_rate(kept, [float(len(answer.steps)) for answer in answers])),
                offered=_over(offered, sum(before)),
                steps=sum(before),
            )
        )
    return tuple(found)


def _limits(answers: Sequence[Answered]) -> Interval:
    """The fewest and the most tokens that a step can emit, by what was offered."""
    return 1.0, 1.0 + max((step.offered for answer in answers for step in answer.steps), default=0)


def _ratio(numerators: Sequence[float], denominators: Sequence[float], limits: Interval) -> Value:
    return Value(*ratio_of_sums(numerators, denominators, limits=limits))


def _mean(values: Sequence[float], limits: Interval) -> Value:
    return _ratio(values, [1.0] * len(values), limits)


def _over(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


# --------------------------------------------------------------------------- comparing


@dataclass(frozen=True)
class Difference:
    """Of acceptance lengths, the one's minus the other's on the same prompts: token-weighted, and the mean
    over the prompts; 95 % paired bootstrap."""

    length: Value
    length_by_request: Value
    rate: Value


def difference(one: Sequence[Answered], other: Sequence[Answered]) -> Difference:
    """How much more ``one`` accepts than ``other``; both answered the same prompts in the same order.

    A prompt is resampled with both its answers, so what makes it easy or hard for both cancels out. Raises
    ValueError for other prompts.
    """
    if [answer.prompt for answer in one] != [answer.prompt for answer in other]:
        raise ValueError("not the same prompts on both sides")
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a.steps and b.steps]

    def columns(of: int) -> list[list[float]]:
        rows = [
            (
                pair[of].emitted,
                len(pair[of].steps),
                sum(step.accepted for step in pair[of].steps),
                sum(step.drafted for step in pair[of].steps),
            )
            for pair in pairs
        ]
        found: list[list[float]] = np.array(rows, dtype=np.float64).reshape(-1, 4).T.tolist()
        return found

    left, right = columns(0), columns(1)
    own = [a / b - c / d for a, b, c, d in zip(left[0], left[1], right[0], right[1], strict=True)]
    limits = _limits([answer for pair in pairs for answer in pair])
    most = limits[1] - limits[0]
    return Difference(
        length=Value(*gap_of_ratios((left[0], left[1]), (right[0], right[1]), limits=limits)),
        length_by_request=_mean(own, (-most, most)),
        rate=Value(*gap_of_ratios((left[2], left[3]), (right[2], right[3]), limits=(0.0, 1.0))),
    )


# --------------------------------------------------------------------------- dead drafters


def chance_length(answers: Sequence[Answered]) -> float:
    """The acceptance length of a drafter that knows nothing but how often each token occurs in ``answers``,
    with the nodes and levels that were drafted on average: it offers frequent tokens, in the best tree.

    Which tokens are frequent is told by one half of the answers and how frequent by the other. The best
    tree takes the largest products of frequencies along its paths (Medusa, arXiv 2401.10774, section
    2.3.3); tokens are taken as independent, so it is what guessing yields, not what a text's habits would.
    """
    steps = [step for answer in answers for step in answer.steps if step.drafted]
    if not steps:
        return 1.0
    shares = _shares(answers)
    nodes = round(sum(step.drafted for step in steps) / len(steps))
    levels = round(sum(step.offered for step in steps) / len(steps))
    from trtspec.embedded.drafters.trees import best_choices, expected_length  # torch

    accuracies = [shares] * max(levels, 1)
    return expected_length(best_choices(accuracies, nodes), accuracies)


def _shares(answers: Sequence[Answered], most: int = 64) -> list[float]:
    """Of the most frequent tokens, one after the other, the share of all: which they are, one half of answers
    says, how frequent, the other, and the reverse; few tokens would flatter themselves."""
    halves = [Counter(token for answer in answers[at::2] for token in answer.tokens) for at in (0, 1)]
    if not halves[1]:
        halves[1] = halves[0]
    found = [0.0] * most
    for ranking, counted in (halves, halves[::-1]):
        for rank, (token, _) in enumerate(ranking.most_common(most)):
            found[rank] += counted[token] / counted.total() / 2
    return found


def dead_drafter(answers: Sequence[Answered], *, learned: bool) -> str:
    """Why the drafter of ``answers`` is called dead, "" if it is not.

    Dead: no draft was accepted at all, or its acceptance length, upper end of the interval, is below
    :data:`DEAD_LENGTH`, or (``learned``: a model or heads, which always have something to say) below what
    guessing frequent tokens would reach (:func:`chance_length`). One prompt has no interval and kills nobody.
    """
    whole = summarize(answers)
    found, high = whole.length, whole.length.interval[1]
    if whole.drafted and not whole.accepted and whole.prompts > 1:
        return f"none of {whole.drafted} drafted tokens was accepted: nothing that the target would say"
    told = f"acceptance length {found.value:.3f} (95 % interval to {high:.3f})"
    if high < DEAD_LENGTH:
        return f"{told} is below {DEAD_LENGTH}: it drafts next to nothing that the target would say"
    if learned and math.isfinite(high) and high < (chance := chance_length(answers)):
        return f"{told} is below {chance:.3f}, what offering the most frequent tokens of these answers yields"
    return ""
