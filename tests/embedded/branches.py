"""Exact laws of programs that draw: every branch of ``draw`` is replayed and weighted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import TypeVar

from torch import Tensor

from trtspec.embedded.sampling import Draw

Result = TypeVar("Result", bound=Hashable)


def law_of(program: Callable[[Draw], Result]) -> dict[Result, float]:
    """The probability of every result of ``program(draw)``, which must be random through ``draw`` alone.

    Runs the program once per path through its draws, depth first: each run follows a script of choices,
    takes the first possible choice where the script ends, and leaves the other choices for later.
    """
    law: dict[Result, float] = defaultdict(float)
    pending: list[list[int]] = [[]]
    while pending:
        result, probability, others = _replay(program, pending.pop())
        law[result] += probability
        pending.extend(others)
    return dict(law)


def _replay(program: Callable[[Draw], Result], script: list[int]) -> tuple[Result, float, list[list[int]]]:
    """One run: its result, its probability, and the scripts of the branches it left for later."""
    taken: list[int] = []
    others: list[list[int]] = []
    probability = 1.0

    def draw(weights: Tensor) -> int:
        nonlocal probability
        mass = weights.tolist()
        if len(taken) < len(script):
            choice = script[len(taken)]
        else:
            choice, *rest = [index for index, weight in enumerate(mass) if weight > 0.0]
            others.extend([*taken, other] for other in rest)
        probability *= mass[choice] / sum(mass)
        taken.append(choice)
        return choice

    return program(draw), probability, others
