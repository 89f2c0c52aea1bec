"""Do two engines sample the same law? Seen from outside, by counting what they say.

No probabilities are needed, only many answers of each to the same prompts with seeds of their own: the one
under test and a reference (the same weights without drafts, or another endpoint). For every prompt,

* the first 1, 2 .. m tokens of the answers are compared as they stand: two-sample chi-square over the
  nine commonest beginnings and one cell of all others;
* n-grams anywhere in the answers are counted. Those of one answer depend on each other, so the p-value comes
  from a permutation of whole answers between the two sides.

Holm's method over all prompts and positions, at levels that a sequence of looks spends
(:func:`trtspec.verify.power.spent`): all of it raises a false alarm with a chance of at most alpha. A pass
needs the number of answers that finds the planned bias with power 0.99.

The first token of an answer comes out of the prompt's own forward, in which nothing is drafted: m is at least
2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trtspec.engine import Engine, Request, Sampling, generate
from trtspec.errors import InputError, Problem
from trtspec.prompts import Prompt
from trtspec.ruler import run
from trtspec.stats import scipy
from trtspec.verify.gates import Check, Verdict
from trtspec.verify.power import LOOKS, SUITE_ALPHA, draws_needed, holm, least_bias, look_levels, pool

Answers = Mapping[str, Sequence[Sequence[int]]]
"""By prompt id, the tokens of each answer, in the order drawn."""

FIRST_TOKENS = 3
GRAM = 2
OUTCOMES = 10
"""Cells of a comparison at most: the nine commonest beginnings, and all others. A bias is planned on so
many, or a law of more cells would need more answers than were planned."""
_LEAST = 5
_SEED = 20260612
_EXCEEDANCES = 20
_CHUNKS = (50, 500)
"""The first and the later blocks of permutations: equal laws mostly stop in the first."""
_MOST_GRAMS = 500
"""The commonest of both sides together: which they are does not depend on who said them."""
_SHUFFLE = 8
"""Answers a kind from which on drawing counts is faster than shuffling answers."""
_MOST = 10_000
"""Permutations. The first looks ask for p-values that so many do not show: n-grams wait for the last."""


def planned_answers(
    bias: float, prompts: int, *, first_tokens: int = FIRST_TOKENS, alpha: float = SUITE_ALPHA
) -> int:
    """Answers a prompt and a side after which a bias w^2 of one prompt at one position is found with power
    0.99, though all are tested. Two samples of n against each other tell as much as n / 2 draws against a
    known law."""
    last = look_levels(LOOKS, alpha)[-1]
    return 2 * draws_needed(bias, OUTCOMES, alpha=last / _num_tests(prompts, first_tokens))


def found_bias(
    answers: int, prompts: int, *, first_tokens: int = FIRST_TOKENS, alpha: float = SUITE_ALPHA
) -> float:
    """The smallest bias w^2 that so many answers a prompt and side find with power 0.99: the inverse of
    :func:`planned_answers`. Infinite for fewer than two."""
    last = look_levels(LOOKS, alpha)[-1]
    return least_bias(answers // 2, OUTCOMES, alpha=last / _num_tests(prompts, first_tokens))


def _num_tests(prompts: int, first_tokens: int) -> int:
    return prompts * (first_tokens + 1)


def beginnings(left: Sequence[Sequence[int]], right: Sequence[Sequence[int]], length: int) -> Any:
    """How often each beginning of ``length`` tokens came, [2, cells]; rare ones are one cell, so that all
    expect at least 5 on either side."""
    counts = [Counter(tuple(one[:length]) for one in side) for side in (left, right)]
    kinds = sorted(counts[0] | counts[1])
    table = np.array([[side[kind] for kind in kinds] for side in counts], dtype=np.float64)
    both = table.sum(0)
    share = min(len(left), len(right)) / (len(left) + len(right))
    first, total = pool(table[0], both, _LEAST / share)
    if len(total) > OUTCOMES:
        first, total = (np.append(one[: OUTCOMES - 1], one[OUTCOMES - 1 :].sum()) for one in (first, total))
    return np.array([first, total - first])


def same_beginnings(left: Sequence[Sequence[int]], right: Sequence[Sequence[int]], length: int) -> float:
    """p-value of the first ``length`` tokens having one law: chi-square of the table of
    :func:`beginnings`; 1.0 where fewer than two cells are left."""
    table = beginnings(left, right, length)
    if table.shape[1] < 2:
        return 1.0
    expected = table.sum(1, keepdims=True) * table.sum(0) / table.sum()
    statistic = float(((table - expected) ** 2 / expected).sum())
    return float(scipy("special").chdtrc(table.shape[1] - 1, statistic))


def same_grams(
    left: Sequence[Sequence[int]], right: Sequence[Sequence[int]], *, least: float, seed: int = _SEED
) -> float:
    """p-value of the n-grams of the answers having one law: permutation test of sum (a - b)^2 / (a + b).

    Permutations stop once 20 reached the observed value (Besag and Clifford 1991, exact at any stopping), or
    when there are enough of them for a p-value of ``least``.
    """
    kinds = Counter(map(tuple, left)) + Counter(map(tuple, right))
    grams = [Counter(one[i : i + GRAM] for i in range(len(one) - GRAM + 1)) for one in kinds]
    total: Counter[tuple[int, ...]] = Counter()
    for found, answers in zip(grams, kinds.values(), strict=True):
        for gram, count in found.items():
            total[gram] += answers * count
    kept = [gram for gram, count in total.most_common(_MOST_GRAMS) if count >= _LEAST]
    if not kept or not left or not right:
        return 1.0
    counts = np.array([[one[gram] for gram in kept] for one in grams], dtype=np.float64)
    times = np.array(list(kinds.values()))
    both, n, m = times @ counts, len(left), len(right)

    def statistic(mine: Any) -> Any:
        # Frequencies times both numbers of answers are whole, so that equal ones differ by 0.
        return (((n + m) * (mine @ counts) - n * both) ** 2 / both).sum(-1)

    in_left = Counter(map(tuple, left))
    observed = float(statistic(np.array([float(in_left[kind]) for kind in kinds]))) * (1 - 1e-12)
    chance, most = np.random.default_rng(seed), min(int(np.ceil(2 / least)), _MOST)
    # Equal answers are one kind: which of them change sides does not matter, only how many.
    few = _SHUFFLE * len(kinds) < n + m
    labels = np.repeat(np.arange(len(kinds)), times)
    reached = tried = 0
    while tried < most:
        size = min(_CHUNKS[1 if tried else 0], most - tried)
        if few:
            block = chance.multivariate_hypergeometric(times, n, size=size).astype(np.float64)
        else:
            shuffled = chance.permuted(np.tile(labels, (size, 1)), axis=1)[:, :n]
            block = np.array([np.bincount(row, minlength=len(kinds)) for row in shuffled], dtype=np.float64)
        hits = np.flatnonzero(statistic(block) >= observed)
        if reached + len(hits) >= _EXCEEDANCES:
            return float(_EXCEEDANCES / (tried + hits[_EXCEEDANCES - reached - 1] + 1))
        reached += len(hits)
        tried += len(block)
    return (reached + 1) / (tried + 1)


def compare(left: Answers, right: Answers, *, first_tokens: int, least: float) -> dict[str, float]:
    """p-values by prompt and test; ``least``: the smallest that must be told apart from larger ones."""
    found = {}
    for prompt in left:
        a, b = left[prompt], right[prompt]
        for length in range(1, first_tokens + 1):
            found[f"{prompt}: first {length}"] = same_beginnings(a, b, length)
        found[f"{prompt}: {GRAM}-grams"] = same_grams(a, b, least=least)
    return found


def check_blackbox(
    engine: Engine,
    reference: Engine,
    prompts: Sequence[Prompt],
    *,
    bias: float,
    most_answers: int,
    max_new_tokens: int,
    sampling: Sampling,
    draft_limit: int | None,
    required: bool,
    first_tokens: int = FIRST_TOKENS,
    name: str = "sampled",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Check:
    """Draw answers of both, up to ``most_answers`` a prompt and side, and compare them at each look; ends at
    the first look that rejects. ``sampling``: its seed is not used."""
    planned = planned_answers(bias, len(prompts), first_tokens=first_tokens)
    left: dict[str, list[list[int]]] = {one.id: [] for one in prompts}
    right: dict[str, list[list[int]]] = {one.id: [] for one in prompts}
    wrong: list[str] = []
    for share in LOOKS:
        wanted = min(round(share * planned), most_answers)
        for number, (side, one, limit) in enumerate(((left, reference, 0), (right, engine, draft_limit))):
            requests = [
                Request(
                    f"{prompt.id}#{at}",
                    prompt.tokens,
                    max_new_tokens,
                    Sampling(
                        sampling.temperature, sampling.top_k, sampling.top_p, _seed_of(number, index, at)
                    ),
                )
                for index, prompt in enumerate(prompts)
                for at in range(len(side[prompt.id]), wanted)
            ]
            if not requests:
                continue
            answered = run(one, requests, draft_limit=limit)
            wrong += answered.contradictions
            for answer in answered.answers:
                side[answer.request_id.rpartition("#")[0]].append(list(answer.tokens))
            on_progress(min(wanted, planned), planned)
        check = judge_blackbox(
            reference=left,
            drafted=right,
            planned=planned,
            bias=bias,
            contradictions=wrong,
            first_tokens=first_tokens,
            required=required,
            name=name,
        )
        if check.verdict in (Verdict.FAIL, Verdict.ERROR) or wanted == most_answers:
            break
    return check


def draw_answers(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    side: int,
    answers: int,
    max_new_tokens: int = 2 * FIRST_TOKENS + 2,
    temperature: float = 1.0,
) -> dict[str, list[list[int]]]:
    """``answers`` to each prompt from an engine that need not count its steps, for :func:`judge_blackbox`.
    ``side`` 0 is the reference, 1 the engine under test: they never share a seed."""
    requests = [
        Request(
            f"{prompt.id}#{at}",
            prompt.tokens,
            max_new_tokens,
            Sampling(temperature, seed=_seed_of(side, index, at)),
        )
        for index, prompt in enumerate(prompts)
        for at in range(answers)
    ]
    found: dict[str, list[list[int]]] = {prompt.id: [] for prompt in prompts}
    for completion in generate(engine, requests):
        found[completion.request_id.rpartition("#")[0]].append(list(completion.tokens))
    return found


def _seed_of(side: int, prompt: int, at: int) -> int:
    return 1_000_000_007 * (side + 1) + 1_000_003 * prompt + at


def judge_blackbox(
    *,
    reference: Answers,
    drafted: Answers,
    planned: int,
    bias: float,
    contradictions: Sequence[str] = (),
    first_tokens: int = FIRST_TOKENS,
    required: bool = True,
    name: str = "sampled",
    alpha: float = SUITE_ALPHA,
) -> Check:
    """The verdict over all answers, look by look in the order in which they were drawn; ``evidence["raw"]``
    of the Check is all these arguments. Raises InputError for sides that answer different prompts."""
    raw = dict(locals())
    if set(reference) != set(drafted) or not reference or first_tokens < 2:
        found = f"{len(reference)} and {len(drafted)} prompts, first {first_tokens} tokens"
        raise InputError(
            [Problem(f"blackbox: {found}; both sides answer the same prompts, at least 2 tokens")]
        )
    drawn = min(len(one) for side in (reference, drafted) for one in side.values())
    tests, looks = _num_tests(len(reference), first_tokens), []
    found_wrong: list[str] = []
    for share, level in zip(LOOKS, look_levels(LOOKS, alpha), strict=True):
        taken = round(share * planned)
        if taken > drawn:
            break
        left, right = ({key: one[:taken] for key, one in side.items()} for side in (reference, drafted))
        p_values = compare(left, right, first_tokens=first_tokens, least=level / tests)
        rejected = [key for key, no in zip(p_values, holm(list(p_values.values()), level), strict=True) if no]
        looks.append({"answers": taken, "level": level, "p_values": p_values, "rejected": rejected})
        if rejected:
            found_wrong = rejected
            break
    scope = f"{drawn} answers a side to each of {len(reference)} prompts"
    if contradictions:
        verdict, required = Verdict.ERROR, True
        summary = f"the engine's counts contradict its outputs: {contradictions[0]}"
    elif found_wrong:
        verdict, last = Verdict.FAIL, looks[-1]
        p = last["p_values"][found_wrong[0]]  # type: ignore[index]
        summary = (
            f"other answers are drawn than from the reference: {found_wrong[0]}, p = {p:.2g} after "
            f"{last['answers']} answers a side"
        )
    elif drawn < planned:
        verdict = Verdict.INCONCLUSIVE
        summary = f"{scope} show no difference; {planned} would decide on a bias of w^2 = {bias:g}"
    else:
        verdict = Verdict.PASS
        summary = f"{scope} show no difference; a bias of w^2 = {bias:g} would have been found with 99 %"
    return Check(
        name,
        verdict,
        summary,
        required=required,
        n=drawn,
        n_unit="answers",
        how=(
            f"black box: first 1 to {first_tokens} tokens (chi-square, rare ones pooled) and {GRAM}-grams "
            "(permutation of "
            f"answers), with against without drafts; Holm over {tests} tests; looks at "
            f"{', '.join(f'{share:.0%}' for share in LOOKS)} of the planned answers, {alpha:g} for all "
            "together"
        ),
        evidence={"looks": looks, "planned": planned, "alpha": alpha, "raw": raw},
    )
