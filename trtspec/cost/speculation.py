"""What follows from acceptance and step costs: speedup, the best chain, the best tree, the break-even
batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from trtspec.cost.acceptance import Curve, expected_tokens
from trtspec.errors import InputError


def constant_alpha(alpha: float, num_draft: int) -> float:
    """Tokens per target step of a chain with the same acceptance everywhere (arXiv 2211.17192, equation 1):
    (1 - alpha^(K+1)) / (1 - alpha)."""
    return float(num_draft + 1) if alpha == 1 else (1 - alpha ** (num_draft + 1)) / (1 - alpha)


def speedup(tokens: float, num_draft: int, c: float, q_t: float = 1.0, q_d: float = 1.0) -> float:
    """Over plain decoding of the unquantized target, with verification for free: tokens per step over
    1/q_t + K/(c*q_d). ``c``: a target step in draft steps; ``q_t``, ``q_d``: what quantization gains each."""
    return tokens / (1 / q_t + num_draft / (c * q_d))


@dataclass(frozen=True)
class Choice:
    """A draft length (or tree size) with the tokens per step it yields and its speedup over plain steps."""

    size: int
    tokens: float
    speedup: float


def best_chain_length(curve: Curve, round_cost: Callable[[int], float], longest: int = 16) -> Choice:
    """The K in 0 .. ``longest`` with the largest tokens per step over ``round_cost(K)``; cost(0) is a plain
    step. Ties go to the shorter chain."""
    plain = round_cost(0)
    best = Choice(0, 1.0, 1.0)
    for k in range(1, longest + 1):
        tokens = expected_tokens(curve, k)
        gain = tokens * plain / round_cost(k)
        if gain > best.speedup:
            best = Choice(k, tokens, gain)
    return best


@dataclass(frozen=True)
class Tree:
    """``paths``: child ranks from the root to each node, as a recipe's ``choices``; ``tokens`` per step."""

    paths: tuple[tuple[int, ...], ...]
    tokens: float


def best_tree(ranks: Sequence[float], num_nodes: int, max_depth: int) -> Tree:
    """The tree of ``num_nodes`` drafted nodes, at most ``max_depth`` deep, that yields the most tokens per
    step when the i-th likeliest child of an accepted node is accepted with probability ``ranks[i]``, wherever
    the node is (Sequoia, arXiv 2402.12374, section 3: dynamic programming over the number of nodes).

    The best tree under that law is the set of the ``num_nodes`` largest path products that holds their
    ancestors; the dynamic program over (nodes, depth) finds it exactly. Raises InputError for ranks that are
    not probabilities summing to at most 1.
    """
    if not ranks or any(not 0.0 <= p <= 1.0 for p in ranks) or sum(ranks) > 1.0 + 1e-9:
        raise InputError(f"rank probabilities must lie in 0 .. 1 and sum to at most 1, found {list(ranks)}")
    ordered = tuple(ranks)

    @cache
    def forest(nodes: int, rank: int, depth: int) -> tuple[float, int]:
        """(most expected tokens below a node, size of the rank-th child's subtree) with ``nodes`` to spend on
        children of rank >= ``rank``."""
        if nodes == 0 or depth == 0 or rank == len(ordered):
            return 0.0, 0
        best = forest(nodes, rank + 1, depth)[0], 0
        for own in range(1, nodes + 1):
            value = ordered[rank] * (1.0 + forest(own - 1, 0, depth - 1)[0])
            value += forest(nodes - own, rank + 1, depth)[0]
            if value > best[0] + 1e-15:
                best = value, own
        return best

    paths: list[tuple[int, ...]] = []

    def collect(nodes: int, rank: int, depth: int, path: tuple[int, ...]) -> None:
        while nodes and depth and rank < len(ordered):
            own = forest(nodes, rank, depth)[1]
            if own:
                paths.append((*path, rank))
                collect(own - 1, 0, depth - 1, (*path, rank))
            nodes, rank = nodes - own, rank + 1

    collect(num_nodes, 0, max_depth, ())
    return Tree(tuple(sorted(paths, key=lambda p: (len(p), p))), 1.0 + forest(num_nodes, 0, max_depth)[0])


def best_tree_size(
    ranks: Sequence[float], round_cost: Callable[[int], float], *, max_nodes: int, max_depth: int
) -> tuple[Tree, Choice]:
    """The best tree with the hardware's cost of each size: sizes are powers of two and their middles up to
    ``max_nodes``; ``round_cost(nodes)`` with cost(0) a plain step."""
    sizes = sorted({size for n in range(9) for size in (2**n, 3 * 2**n // 2) if size <= max_nodes})
    plain = round_cost(0)
    best_tree_found, best = Tree((), 1.0), Choice(0, 1.0, 1.0)
    for size in sizes:
        tree = best_tree(ranks, size, max_depth)
        gain = tree.tokens * plain / round_cost(size)
        if gain > best.speedup:
            best_tree_found, best = tree, Choice(size, tree.tokens, gain)
    return best_tree_found, best


def break_even_batch(speedup_at: Callable[[int], float], largest: int = 512) -> int | None:
    """The smallest batch at which ``speedup_at`` is below 1; None where it never is up to ``largest``; 1
    where speculation does not pay even alone. Powers of two and their middles find the bracket, bisection
    the batch: a dip that lies wholly between two of them is not seen."""
    tried: list[int] = sorted(
        {b for n in range(largest.bit_length()) for b in (2**n, 3 * 2**n // 2) if b <= largest}
    )
    low = 0
    for high in (*tried, largest):
        if speedup_at(high) < 1.0:
            break
        low = high
    else:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if speedup_at(middle) < 1.0:
            high = middle
        else:
            low = middle
    return high


def physical_problems(
    *, speedup_found: float, acceptance_length: float, num_draft: int, tolerance: float = 0.0
) -> list[str]:
    """What is impossible about a published or measured result; empty where nothing is.

    A step with drafts is no cheaper than one without, so against an equal baseline the speedup cannot exceed
    the acceptance length; and a step emits at most ``num_draft`` + 1 tokens.
    """
    problems = []
    if speedup_found > acceptance_length * (1 + tolerance):
        problems.append(f"speedup {speedup_found:.4g} exceeds acceptance length {acceptance_length:.4g}")
    if acceptance_length > (num_draft + 1) * (1 + tolerance):
        problems.append(f"acceptance length {acceptance_length:.4g} exceeds K + 1 = {num_draft + 1}")
    return problems
