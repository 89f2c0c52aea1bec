"""From logits to laws, and from laws to tokens.

:data:`Draw` is the only source of randomness of the embedded engine. A request's draws come from its own
generator, so its tokens do not depend on its neighbours; a test replaces the function and replays every
branch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trtspec.engine import Sampling
from trtspec.errors import InputError

Draw = Callable[[Tensor], int]
"""``weights [n] float64``, nonnegative and not all zero -> an index, with probability in proportion to its
weight; never one of weight zero."""


def generator_draw(seed: int) -> Draw:
    """A Draw with its own random stream: the inverse of the cumulative sum at one uniform per draw.

    The same seed gives the same stream on every machine: the uniforms and the sums are made on the CPU.
    Raises ValueError for weights that sum to nothing, or not to a finite number.
    """
    generator = torch.Generator(device="cpu")
    generator.manual_seed(seed)

    def draw(weights: Tensor) -> int:
        return inverse_cdf(weights, float(torch.rand((), dtype=torch.float64, generator=generator)))

    return draw


def draft_draw(seed: int) -> Draw:
    """The Draw of whoever drafts for the request of that seed: a stream apart from the request's own.

    Rejection sampling is strict only if candidates are drawn independently of the coins that judge them.
    """
    digest = hashlib.sha256(b"draft %d" % seed).digest()
    return generator_draw(int.from_bytes(digest[:8], "big") >> 1)


def inverse_cdf(weights: Tensor, uniform: float) -> int:
    """The first index whose cumulative weight exceeds ``uniform`` (0 <= uniform <= 1) of the total.

    ``weights [n]`` nonnegative, need not sum to 1. Zero weights are never returned, whatever ``uniform``:
    the sum does not grow there. Raises ValueError for weights that sum to nothing, or not to a
    finite number.
    """
    weights = weights.to("cpu", torch.float64)
    cumulative = torch.cumsum(weights, 0)
    total = float(cumulative[-1])
    if not 0.0 < total < float("inf"):
        raise ValueError(f"cannot draw from weights that sum to {total}")
    if total < 1e-280:
        # Products with subnormal numbers would round to a handful of values.
        return inverse_cdf(weights / weights.max(), uniform)
    found = int(torch.searchsorted(cumulative, uniform * total, right=True))
    if found < len(weights):
        return found
    return int(weights.nonzero()[-1])


class TargetLaw:
    """The target's laws at the rows of one sequence's verification, each computed when first asked for.

    ``logits [rows, vocab]``: any float type, any device. ``sampling`` turns a row of it into a law:
    temperature, then the ``top_k`` most likely tokens, then the smallest set of the most likely of those
    whose mass reaches ``top_p`` (nucleus sampling, arXiv 1904.09751), then normalised; all in float64.
    Equally likely tokens rank by id, lowest first, so that the sets do not depend on a sort's whims.
    ``argmax``: the most likely token of each row, if the caller has it already; used when greedy.

    A row is computed on its own: its law does not depend on how many rows there are. A logit of -inf is a
    token of probability 0. Raises InputError at the row asked for if it holds NaN or +inf, or nothing
    but -inf (a greedy row is checked at its maximum only).
    """

    def __init__(self, logits: Tensor, sampling: Sampling, argmax: Sequence[int] | None = None) -> None:
        self.logits = logits
        self.sampling = sampling
        self.vocab_size = int(logits.shape[-1])
        self._argmax = argmax
        self._laws: dict[int, tuple[Tensor | None, Tensor]] = {}

    def probs(self, row: int) -> Tensor:
        """``[vocab] float64`` on the CPU, summing to 1; one-hot when greedy. Not to be changed."""
        if self.sampling.greedy:
            dense = torch.zeros(self.vocab_size, dtype=torch.float64)
            dense[self.greedy_token(row)] = 1.0
            return dense
        ids, weights = self._law(row)
        if ids is None:
            return weights
        return torch.zeros(self.vocab_size, dtype=torch.float64).scatter_(0, ids, weights)

    def sample(self, row: int, draw: Draw) -> int:
        """A token with the law of ``row``: one draw, or the most likely token without a draw when greedy."""
        if self.sampling.greedy:
            return self.greedy_token(row)
        ids, weights = self._law(row)
        index = draw(weights)
        return index if ids is None else int(ids[index])

    def greedy_token(self, row: int) -> int:
        """The most likely token of ``row``; the lowest id of several."""
        # torch.argmax returns the first maximum and takes NaN for the largest number, so one look at the
        # maximum finds every NaN and +inf.
        token = int(self.logits[row].argmax()) if self._argmax is None else int(self._argmax[row])
        self._check_finite(row, float(self.logits[row, token]))
        return token

    def _law(self, row: int) -> tuple[Tensor | None, Tensor]:
        """Tokens ``[n] int64`` ascending (None: all of them) and their probabilities ``[n] float64``."""
        found = self._laws.get(row)
        if found is None:
            found = self._laws[row] = self._compute(row)
        return found

    def _compute(self, row: int) -> tuple[Tensor | None, Tensor]:
        logits = self.logits[row]
        ids = None
        if 0 < self.sampling.top_k < self.vocab_size:
            ids = _largest(logits, self.sampling.top_k)
            logits = logits[ids]
        logits = logits.to(torch.float64)
        peak = logits.max()
        self._check_finite(row, float(peak))
        # Less the maximum first: a tiny temperature then underflows to 0 and never overflows.
        weights = ((logits - peak) / self.sampling.temperature).exp_()
        weights /= weights.sum()
        if self.sampling.top_p < 1.0:
            kept = _nucleus(weights, self.sampling.top_p)
            ids = kept if ids is None else ids[kept]
            weights = weights[kept]
            weights = weights / weights.sum()
        return None if ids is None else ids.cpu(), weights.cpu()

    def _check_finite(self, row: int, value: float) -> None:
        if not -float("inf") < value < float("inf"):
            raise InputError(
                f"verification row {row}: non-finite logits (maximum {value}); the target's weights or "
                "scales hold NaN or infinity, or the dtype overflows: rebuild, or use a wider dtype"
            )


def _largest(values: Tensor, count: int) -> Tensor:
    """Indices, ascending, of the ``count`` largest of ``values [n]``; of equal ones the lowest indices."""
    least = torch.topk(values, count, sorted=False).values.min()
    # `not below` rather than `at least`: keeps NaN, so that the caller sees it.
    kept = (~(values < least)).nonzero().squeeze(1)
    surplus = len(kept) - count
    if surplus > 0:
        at_least = kept[values[kept] == least]
        dropped = at_least[len(at_least) - surplus :]
        kept = kept[~torch.isin(kept, dropped)]
    return kept


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Indices, ascending, of the shortest run of the most likely that has mass ``top_p`` or more.

    ``probs [n] float64`` sums to 1; never empty. Lowers a threshold by factors of four until the tokens
    above it have the mass, then ranks only those between the last two thresholds: sorting the whole
    vocabulary would cost more than everything else here.
    """
    above, mass = float("inf"), 0.0
    threshold = float(probs.max()) / 4
    while True:
        found = float(torch.nn.functional.threshold(probs, threshold, 0.0).sum())
        if found >= top_p or threshold < 0.0:
            break
        above, mass = threshold, found
        threshold = threshold / 4 if threshold > 1e-290 else -1.0
    kept = probs > above
    ids = ((probs > threshold) & ~kept).nonzero().squeeze(1)
    ranked, order = torch.sort(probs[ids], descending=True, stable=True)
    short = int((mass + torch.cumsum(ranked, 0) < top_p).sum())
    kept[ids[order[: short + 1]]] = True
    return kept.nonzero().squeeze(1)
