"""Acceptance: which drafted tokens become output, and the token that follows them.

Three functions, one signature ``(draft, law, draw) -> Accepted``. Row 0 of ``law`` is the target's law
after the current token, row i + 1 after node i. Every random choice goes through ``draw``.

* :func:`exact` and :func:`rejection` are *strict*: over the draft's and the draws' randomness, the
  emitted tokens have exactly the law of sampling the target one token at a time.
* :func:`typical` is an approximation and changes the law.

docs/math.md proves the first two and shows what the third does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trtspec.embedded.sampling import Draw, TargetLaw
from trtspec.embedded.tree import Draft, children, path_to


@dataclass(frozen=True)
class Accepted:
    """The outcome of one verification: the tokens of ``path``, then ``token``."""

    path: tuple[int, ...]
    """Accepted draft nodes from the first candidate down; () when none was accepted."""
    token: int
    """The token that follows them: *recovered* where a candidate was turned down, *bonus* where the
    path ended at a leaf."""


def exact(draft: Draft, law: TargetLaw, draw: Draw) -> Accepted:
    """Draw the target's own token, follow the child that equals it, until none does.

    Strict for any draft, however it was made, because the draft cannot touch what is drawn. One draw per
    emitted token from the law that plain sampling would have used, so with the same seed the tokens are
    those of sampling without speculation. A greedy law draws nothing. Of equal siblings the first is
    followed. ``draft.probs`` is not used. Accepts a single candidate x with probability p(x).
    """
    below = children(draft)
    row = 0
    while True:
        token = law.sample(row, draw)
        follower = next((node for node in below[row] if draft.tokens[node] == token), None)
        if follower is None:
            return Accepted(path_to(draft, row - 1), token)
        row = follower + 1


def rejection(draft: Draft, law: TargetLaw, draw: Draw) -> Accepted:
    """Try the children in order: accept x with probability min(1, p(x)/q(x)), else p becomes the residual.

    The residual is max(p - q, 0), renormalised; the rejected token then leaves the q of the siblings
    after it, which is renormalised too. With every child rejected the token is drawn from what is left
    of p. Chains: Leviathan et al., arXiv 2211.17192, algorithm 1, and Chen et al., arXiv 2302.01318;
    several siblings: SpecInfer, arXiv 2305.09781 and, without replacement, Sequoia, arXiv 2402.12374.

    Point masses (``draft.probs`` None) are accepted with probability p(x), and the residual is p without x.

    Strict if node i was drawn from ``draft.probs[i]``, independently of everything but its ancestors, with
    the tokens of its earlier siblings either taken out (renormalised) or possible again: a repeated
    sibling is passed over. It is *not* strict for candidates that were picked by their probability (the top
    k of q, or a sample pruned by q(x)) and handed over with ``probs``; hand those over as point
    masses, which are strict however they were chosen. A candidate to which its own q gives nothing
    cannot have been drawn from it and is treated as a point mass.
    """
    below = children(draft)
    row = 0
    while True:
        nodes = below[row]
        if not nodes:
            return Accepted(path_to(draft, row - 1), law.sample(row, draw))
        p = law.probs(row)
        tried: list[int] = []
        follower = None
        for node in nodes:
            x = draft.tokens[node]
            if x in tried:
                continue
            q = _point_mass(p, x) if draft.probs is None else _draft_law(draft.probs[node], tried, x)
            p_x, q_x = float(p[x]), float(q[x])
            if draw(_coin(min(1.0, p_x / q_x))) == 0:
                follower = node
                break
            residual = (p - q).clamp_(min=0.0)
            mass = float(residual.sum())
            if mass > 0.0:
                p = residual / mass
            # Else p and q differ by rounding alone, or x had no mass in p: what follows a rejection is p.
            tried.append(x)
        if follower is None:
            return Accepted(path_to(draft, row - 1), draw(p))
        row = follower + 1


def _draft_law(q: Tensor, tried: list[int], x: int) -> Tensor:
    """``[vocab] float64``: q without the tokens tried, normalised; x itself if it has no mass there."""
    q = q.to("cpu", torch.float64, copy=True)
    q[tried] = 0.0
    if not float(q[x]) > 0.0:
        return _point_mass(q, x)
    return q / q.sum()


def _point_mass(like: Tensor, x: int) -> Tensor:
    """The law that always gives x; for it the general rule accepts with p(x) and leaves p without x."""
    return torch.zeros_like(like).index_fill_(0, torch.tensor(x), 1.0)


def _coin(accept: float) -> Tensor:
    """Weights of (accept, reject)."""
    return torch.tensor([accept, 1.0 - accept], dtype=torch.float64)


def typical(draft: Draft, law: TargetLaw, draw: Draw, epsilon: float, delta: float) -> Accepted:
    """Accept the longest path of plausible tokens: p(x) > min(epsilon, delta * exp(-H(p))). Not lossless.

    H is the entropy of p in nats, so where the target is unsure less probable tokens pass (Medusa,
    arXiv 2401.10774, section 2.3.1). Of equally long paths the one with the largest product of p wins,
    then the first. The token that follows is drawn from p at the end of the path.

    The paper takes the first token of each step greedily and without a condition, so that a step
    always yields one; here that is the token that followed the path of the step before, and it is drawn
    rather than maximised, so that a step with nothing accepted is plain sampling. p is the law after
    temperature, top-k and top-p; a token outside them has probability 0 and is never accepted.
    ``draft.probs`` is not used. One draw; none if the law is greedy, and then a token is accepted only if
    it is the most likely one.
    """
    below = children(draft)
    # Rows whose whole path is accepted: (length, log probability) of the path.
    reached: dict[int, tuple[int, float]] = {0: (0, 0.0)}
    best = 0
    for row in range(len(draft) + 1):
        if row not in reached or not below[row]:
            continue
        length, log_p = reached[row]
        p = law.probs(row)
        threshold = min(epsilon, delta * math.exp(-float(torch.special.entr(p).sum())))
        for node in below[row]:
            p_x = float(p[draft.tokens[node]])
            if p_x > threshold:
                reached[node + 1] = (length + 1, log_p + math.log(p_x))
                if reached[node + 1] > reached[best]:
                    best = node + 1
    return Accepted(path_to(draft, best - 1), law.sample(best, draw))
