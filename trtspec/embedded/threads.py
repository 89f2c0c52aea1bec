"""How many of torch's threads each kernel of a forward gets.

With ``OMP_WAIT_POLICY=PASSIVE``, which a machine that does anything else needs, threads sleep between kernels
and waking them costs about 45 us, whatever the kernel does (one row through 576 x 960 on Zen 5: 44 us with
one thread, 80 to 90 with two). A small model's decode step is some 250 kernels of 1 to 100 us: it is
fastest on one thread, its head and its prompts on all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

WAKE_US = 45.0

# About what one thread needs, in ns, measured on Zen 5 (benchmarks/kernels.py): bfloat16 and 4-bit products
# differ by less than the choice is sensitive to.
WEIGHT_NS = 0.05
"""Per weight, to read it."""
PRODUCT_NS = 0.006
"""Per weight and row."""
SCORE_NS = 0.2
"""Per row, key and number of a head."""
ELEMENT_NS = 0.5
"""Per number of the feed-forward part's inner row."""


@dataclass(frozen=True)
class Threads:
    """Thread counts of one forward: of the products of a layer, of attention, of the head and of the rest."""

    products: int
    attention: int
    head: int
    rest: int

    def run(self, count: int, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """``function(x)`` on ``count`` threads; then ``rest`` again."""
        if count == self.rest:
            return function(x)
        torch.set_num_threads(count)  # takes 0.1 us
        out = function(x)
        torch.set_num_threads(self.rest)
        return out


def threads_sleep() -> bool:
    """Whether this process's OpenMP threads sleep while they have nothing to do."""
    return os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"


def product_us(weights: float, rows: int) -> float:
    """Of one linear with that many weights, on one thread."""
    return weights * (WEIGHT_NS + PRODUCT_NS * rows) / 1000


def worth(one_thread_us: float, available: int) -> int:
    """``available``, if sharing the work saves more than waking the others costs; else 1."""
    return available if one_thread_us * (1 - 1 / available) > WAKE_US else 1
