"""Do sampled answers follow the target's law, where the target's probabilities are at hand?

Each drawn token is scored by the engine without drafts (:meth:`trtspec.engine.Engine.score_law`),
teacher-forced, under the request's own temperature, top-k and top-p. If it was drawn from that law, whatever
came before it,

* *PIT*: with the law's tokens ranked most likely first and V uniform, U = (mass ranked above) + V p(token) is
  uniform on [0, 1] and independent of every other U (randomized probability integral transform; Rosenblatt
  1952, Brockwell 2007), though each token has another law;
* *surprisal*: -ln p(token) less the law's entropy has mean zero and a known variance, and the sums over
  tokens are a martingale.

Both hold too for the tokens of steps that drafted, which are looked at by themselves: a fault of acceptance
is theirs alone.

So every generated token is evidence, and no answer need be drawn twice. Ranking by probability makes what a
wrong acceptance does (too many drafted tokens, too few of others) a change of U's law instead of letting
it average out over token ids. No stop token ends an answer: the number of draws is fixed beforehand.

The *control* is an A/A run: the engine without drafts, other seeds, scored likewise. In 16 bit it shows
whether the scores, computed by another shape of forward, are good enough a ruler. All tests of both runs are
one family, tested by Holm's method at :data:`trtspec.verify.power.SUITE_ALPHA`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtspec.engine import Engine, Request, Sampling
from trtspec.prompts import Prompt
from trtspec.ruler import Answer, Run, acceptance_length, counter, run
from trtspec.stats import scipy
from trtspec.verify.gates import Check, Verdict
from trtspec.verify.power import SUITE_ALPHA, draws_needed, holm, least_bias, told_bias

Array = NDArray[np.float64]

CELLS = 10
"""Equal cells of the chi-square test of U; a planned bias is one of these ten probabilities."""
LAGS = 4
_FEWEST_TOUCHED = 10 * CELLS
"""Tokens that a draft had a part in, of which the tests of these alone are made."""
_FEWEST_WHOLE = 20
_SEED = 20260611
_TRUNCATED = (0.7, 40, 0.95)
"""Temperature, top-k and top-p of every second request."""
_DIGITS = 9
_LAWS = ("law", "control")
_EXACT_DTYPES = ("float32", "float64")


@dataclass(frozen=True)
class Drawn:
    """One answer and what the law of each of its tokens says; floats are rounded to what a report keeps, so
    that a verdict computed again from the report is the same."""

    id: str
    temperature: float
    top_k: int
    top_p: float
    seed: int
    tokens: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    """None: top-k or top-p exclude the token."""
    entropies: tuple[float, ...]
    variances: tuple[float, ...]
    above: tuple[float, ...]
    drafted: tuple[bool, ...] = ()
    """Whether a draft had a part in the token: its step drafted. Known before it is drawn, so those tokens
    alone follow their laws too."""


def law_requests(
    prompts: Sequence[Prompt], *, answers: int, max_new_tokens: int, temperature: float, first_seed: int
) -> list[Request]:
    """``answers`` requests, prompts in turn, each with a seed of its own and no stop token; every second one
    with a law that top-k and top-p cut."""
    requests = []
    for number in range(answers):
        turn, index = divmod(number, len(prompts))
        prompt = prompts[index]
        # So that each prompt meets both laws.
        cut = (turn + index) % 2 == 1
        t, k, p = _TRUNCATED if cut else (temperature, 0, 1.0)
        sampling = Sampling(t, k, p, seed=first_seed + number)
        requests.append(Request(f"{prompt.id}#{number}", prompt.tokens, max_new_tokens, sampling))
    return requests


def score_drawn(
    scorer: Engine,
    requests: Sequence[Request],
    answers: Sequence[Answer],
    on_answer: Callable[[], None] = lambda: None,
) -> list[Drawn]:
    """Every answer with its law, as ``scorer`` (without drafts) sees it. The request's own sampling counts,
    whatever the engine made of it."""
    found = []
    for request, answer in zip(requests, answers, strict=True):
        sampling = request.sampling
        text = (*request.prompt_tokens, *answer.tokens)
        scores = scorer.score_law(text, sampling, first=len(request.prompt_tokens))
        found.append(
            Drawn(
                request.id,
                sampling.temperature,
                sampling.top_k,
                sampling.top_p,
                sampling.seed,
                answer.tokens,
                tuple(round(value, _DIGITS) if math.isfinite(value) else None for value in scores.logprobs),
                entropies=_rounded(scores.entropies),
                variances=_rounded(scores.variances),
                above=_rounded(scores.above),
                drafted=tuple(flag for flag, count in _steps(answer) for _ in range(count)),
            )
        )
        on_answer()
    return found


def _rounded(column: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(value, _DIGITS) for value in column)


def _steps(answer: Answer) -> list[tuple[bool, int]]:
    """Whether each step drafted, and the tokens that it emitted."""
    return [
        (drafted > 0, emitted)
        for drafted, emitted in zip(answer.drafted_by_step, answer.emitted, strict=False)
    ]


def kept_whole(answers: Sequence[Answer], draft_limit: int | None) -> int:
    """Steps that accepted as many tokens as were drafted, or as can be: the *bonus* token follows."""
    return sum(
        drafted > 0 and emitted > min(drafted, drafted if draft_limit is None else draft_limit)
        for answer in answers
        for drafted, emitted in zip(answer.drafted_by_step, answer.emitted, strict=False)
    )


# --------------------------------------------------------------------------- the tests


@dataclass(frozen=True)
class Tests:
    """What one run's tokens say. ``p_values`` by test; ``excess_nats``: mean surprisal less entropy, with its
    standard error."""

    p_values: Mapping[str, float]
    tokens: int
    outside: int
    """Tokens that top-k or top-p exclude; left out of everything else."""
    excess_nats: float
    error_nats: float
    touched: int = 0
    """Tokens that a draft had a part in, of those that are not outside."""


def transformed(drawn: Sequence[Drawn], stream: int) -> list[Array]:
    """U of every token that the law can draw, one array an answer; ``stream`` seeds V."""
    chance = np.random.default_rng((_SEED, stream))
    found = []
    for one in drawn:
        v = chance.random(len(one.logprobs))
        kept = [at for at, value in enumerate(one.logprobs) if value is not None]
        p = np.array([math.exp(one.logprobs[at] or 0.0) for at in kept])
        above = np.array([one.above[at] for at in kept])
        # The rounding of a report may carry a sum of probabilities past 1.
        found.append(np.clip(above + v[kept] * p, 0.0, 1.0))
    return found


def run_tests(drawn: Sequence[Drawn], stream: int) -> Tests:
    """All tests of one run but that of the tokens outside the law. Raises MissingError without scipy."""
    stats = scipy("stats")
    answers = transformed(drawn, stream)
    u = np.concatenate(answers) if answers else np.zeros(0)
    kept = [
        (-value - entropy, variance)
        for one in drawn
        for value, entropy, variance in zip(one.logprobs, one.entropies, one.variances, strict=True)
        if value is not None
    ]
    total = sum(len(one.tokens) for one in drawn)
    if len(u) < CELLS:
        return Tests({}, total, total - len(u), math.nan, math.nan)
    counts = np.histogram(u, bins=CELLS, range=(0.0, 1.0))[0]
    normal = [stats.norm.ppf(np.clip(one, 1e-12, 1 - 1e-12)) for one in answers]
    excess, spread = math.fsum(one[0] for one in kept), math.fsum(one[1] for one in kept)
    score = excess / math.sqrt(spread) if spread > 0 else (0.0 if abs(excess) < 1e-6 else math.inf)
    p_values = {
        "uniform (Kolmogorov-Smirnov)": float(stats.kstest(u, "uniform").pvalue),
        f"uniform (chi-square, {CELLS} cells)": float(stats.chisquare(counts).pvalue),
        f"independent (lags 1 to {LAGS})": _lagged(normal, stats),
        "independent (neighbouring answers)": _across(normal, stats),
        "surprisal less entropy": float(2 * stats.norm.sf(abs(score))),
    }
    mean, error = excess / len(kept), math.sqrt(spread) / len(kept)
    flags = [
        flag
        for one in drawn
        for flag, value in zip(_flags(one), one.logprobs, strict=True)
        if value is not None
    ]
    touched = sum(flags)
    if touched >= _FEWEST_TOUCHED:
        # A fault of acceptance is theirs alone, and among all tokens it may drown.
        mine = [pair for pair, flag in zip(kept, flags, strict=True) if flag]
        excess, spread = math.fsum(one[0] for one in mine), math.fsum(one[1] for one in mine)
        score = excess / math.sqrt(spread) if spread > 0 else (0.0 if abs(excess) < 1e-6 else math.inf)
        counts = np.histogram(u[np.array(flags)], bins=CELLS, range=(0.0, 1.0))[0]
        p_values |= {
            f"uniform where drafted (chi-square, {CELLS} cells)": float(stats.chisquare(counts).pvalue),
            "surprisal less entropy where drafted": float(2 * stats.norm.sf(abs(score))),
        }
    return Tests(p_values, total, total - len(kept), mean, error, touched)


def _flags(one: Drawn) -> Sequence[bool]:
    """Which tokens a draft had a part in; none where the engine's books do not say it of each."""
    return one.drafted if len(one.drafted) == len(one.tokens) else (False,) * len(one.tokens)


def _lagged(normal: Sequence[Array], stats: Any) -> float:
    """Ljung and Box's idea with known mean and variance: the products of normal scores k apart, over all
    answers, have mean 0 and variance 1 each and do not depend on each other; chi-square over the lags."""
    total, lags = 0.0, 0
    for lag in range(1, LAGS + 1):
        products = [one[:-lag] * one[lag:] for one in normal if len(one) > lag]
        count = sum(map(len, products))
        if count:
            total += math.fsum(value for one in products for value in one) ** 2 / count
            lags += 1
    return float(stats.chi2.sf(total, lags)) if lags else 1.0


def _across(normal: Sequence[Array], stats: Any) -> float:
    """The same between answers next to each other in the batch, token by token: two requests that share one
    random stream show here."""
    products: list[float] = []
    for left, right in itertools.pairwise(normal):
        common = min(len(left), len(right))
        products += (left[:common] * right[:common]).tolist()
    if not products:
        return 1.0
    return float(2 * stats.norm.sf(abs(math.fsum(products)) / math.sqrt(len(products))))


# --------------------------------------------------------------------------- the check


def check_sampled(
    engine: Engine,
    plain: Engine,
    prompts: Sequence[Prompt],
    *,
    tokens: int,
    max_new_tokens: int,
    temperature: float,
    bias: float,
    draft_limit: int | None,
    dtype: str,
    required: bool,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Check:
    """Draw at least ``tokens`` tokens with drafts and as many without, score both by ``plain`` (the same
    weights without drafts) and judge. ``bias``: see :func:`judge_sampled`."""
    answers = -(-tokens // max_new_tokens)
    advance = counter(on_progress, 4 * answers)
    runs: list[Run] = []
    scored: list[list[Drawn]] = []
    for number, (one, limit) in enumerate(((engine, draft_limit), (plain, 0))):
        requests = law_requests(
            prompts,
            answers=answers,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            first_seed=1_000_003 * (number + 1),
        )
        runs.append(run(one, requests, draft_limit=limit, on_answer=advance))
        scored.append(score_drawn(plain, requests, runs[-1].answers, advance))
    mine = runs[0].answers
    return judge_sampled(
        law=[asdict(one) for one in scored[0]],
        control=[asdict(one) for one in scored[1]],
        tokens_an_answer=max_new_tokens,
        drafted=sum(one.drafted for one in mine),
        accepted=sum(one.accepted for one in mine),
        tokens_a_step=acceptance_length(mine),
        contradictions=[*runs[0].contradictions, *runs[1].contradictions],
        bias=bias,
        dtype=dtype,
        required=required,
        whole=kept_whole(mine, draft_limit),
    )


def judge_sampled(
    *,
    law: Sequence[Mapping[str, Any]],
    control: Sequence[Mapping[str, Any]],
    tokens_an_answer: int,
    drafted: int,
    accepted: int,
    tokens_a_step: float,
    contradictions: Sequence[str],
    bias: float,
    dtype: str,
    required: bool,
    alpha: float = SUITE_ALPHA,
    whole: int | None = None,
) -> Check:
    """The verdict over two runs as they stand in a report (fields of :class:`Drawn`); ``evidence["raw"]`` of
    the Check is all these arguments. ``whole``: see :func:`kept_whole`.

    FAIL: a test rejects in a family whose chance of any false alarm is ``alpha``. PASS needs enough tokens to
    find a ``bias`` (w^2 of U over ten equal cells) with power 0.99 too; INCONCLUSIVE says how many those are.
    In 16 bit a rejection of the control means that the scores are no ruler for either run: INCONCLUSIVE.
    """
    raw = dict(locals())
    runs = {name: [_drawn(one) for one in given] for name, given in zip(_LAWS, (law, control), strict=True)}
    found = {name: run_tests(runs[name], stream) for stream, name in enumerate(_LAWS)}
    mine, other = found["law"], found["control"]
    p_values = {(name, test): p for name in _LAWS for test, p in found[name].p_values.items()}
    exact = dtype in _EXACT_DTYPES
    p_values["law", "tokens outside top-k or top-p"] = _outside(mine, other, exact)
    rejected = [key for key, no in zip(p_values, holm(list(p_values.values()), alpha), strict=True) if no]
    faults = [test for name, test in rejected if name == "law"]
    ruler = [test for name, test in rejected if name == "control"]
    share = alpha / len(p_values)
    needed = draws_needed(bias, CELLS, alpha=share)
    found_bias = least_bias(mine.tokens - mine.outside, CELLS, alpha=share)
    lengths = [one for one in runs["law"] if len(one.tokens) != tokens_an_answer]
    excess = (
        f"surprisal less entropy {mine.excess_nats:+.3f} ± {1.96 * mine.error_nats:.3f} nats a token "
        f"(without drafts {other.excess_nats:+.3f})"
    )
    kept = f"{tokens_a_step:.2f} a step, {accepted} drafts kept, {drafted - accepted} refused"
    scope = f"{mine.tokens} sampled tokens ({kept})"
    if contradictions:
        verdict, required = Verdict.ERROR, True
        summary = f"the engine's counts contradict its outputs: {contradictions[0]}"
    elif lengths:
        verdict = Verdict.FAIL
        summary = (
            f"{len(lengths)} of {len(law)} answers do not have the {tokens_an_answer} tokens asked for, "
            "first "
            f"{lengths[0].id} with {len(lengths[0].tokens)}, and no stop token was given"
        )
    elif ruler and (exact or not faults):
        verdict = Verdict.FAIL if exact else Verdict.INCONCLUSIVE
        told = "without drafts" if not faults else "with and without drafts"
        summary = (
            f"{told} the engine's own samples do not follow the law that its scores give ({ruler[0]}: "
            f"p = {p_values['control', ruler[0]]:.2g}); {excess}"
        )
    elif ruler:
        verdict = Verdict.INCONCLUSIVE
        summary = (
            f"with and without drafts the samples depart from the scores ({faults[0]}, {ruler[0]}): in "
            f"{dtype} the "
            f"scores are no ruler here; {excess}"
        )
    elif faults:
        verdict = Verdict.FAIL
        summary = (
            f"{scope} do not follow the target's law: {faults[0]}, p = {p_values['law', faults[0]]:.2g}; "
            f"{excess}; "
            "without drafts they do"
        )
    elif not drafted:
        verdict = Verdict.INCONCLUSIVE
        summary = f"{scope}, but nothing was drafted, so this shows nothing; use other --prompts"
    elif mine.tokens < needed:
        verdict = Verdict.INCONCLUSIVE
        summary = (
            f"{scope} follow the target's law as far as they show; {needed} would decide on a bias of "
            f"w^2 = {bias:g} (--sampled-tokens {needed})"
        )
    else:
        verdict = Verdict.PASS
        summary = (
            f"{scope} follow the target's law, each and together; a bias of w^2 = {found_bias:.3f} would "
            "have "
            f"been found with 99 %; {excess}"
        )
    warnings: tuple[str, ...] = ()
    if drafted and not accepted:
        warnings = (f"none of {drafted} drafted tokens was accepted: only refusing was exercised",)
    elif drafted and whole is not None and whole < _FEWEST_WHOLE:
        warnings = (
            f"only {whole} drafts were kept whole: a fault of the token after such a draft would not be seen",
        )
    details: tuple[str, ...] = ()
    if mine.touched and share:
        seen = least_bias(mine.touched, CELLS, alpha=share)
        details = (
            f"a draft had a part in {mine.touched} of {mine.tokens} tokens; of these alone a bias of "
            f"w^2 = {seen:.2g} would be found",
        )
        if mine.touched < _FEWEST_TOUCHED:
            details = (
                f"a draft had a part in {mine.touched} of {mine.tokens} tokens, too few to test them alone",
            )
    return Check(
        "sampled",
        verdict,
        summary,
        required=required,
        measured=mine.excess_nats,
        interval=(mine.excess_nats - 1.96 * mine.error_nats, mine.excess_nats + 1.96 * mine.error_nats),
        unit="nats",
        n=mine.tokens,
        n_unit="tokens",
        how=(
            f"half of the answers at the temperature asked for, half at {_TRUNCATED[0]:g} with top-k "
            f"{_TRUNCATED[1]} and top-p {_TRUNCATED[2]:g}, no stop tokens; scored in one pass without "
            "drafts; "
            "randomized PIT uniform and independent, surprisal less entropy zero, of all tokens and of those "
            "that a draft had a part in; as many tokens without drafts as "
            f"A/A control; {len(p_values)} tests, Holm, {alpha:g} for all together"
        ),
        warnings=warnings,
        details=(*details, *told_bias(found_bias)),
        evidence={
            "p_values": {f"{name}: {test}": p for (name, test), p in p_values.items()},
            "rejected": [f"{name}: {test}" for name, test in rejected],
            "alpha": alpha,
            "tokens_needed": needed,
            "least_bias_found": found_bias,
            "tests": {
                name: {k: v for k, v in asdict(one).items() if k != "p_values"} for name, one in found.items()
            },
            "raw": raw,
        },
    )


def _drawn(given: Mapping[str, Any]) -> Drawn:
    """From a report, in which tuples are lists."""
    fields: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in given.items()
    }
    return Drawn(**fields)


def _outside(mine: Tests, other: Tests, exact: bool) -> float:
    """p-value of tokens that top-k or top-p exclude. In exact arithmetic none can be; in 16 bit the border
    moves with rounding, and the run without drafts says how often (Fisher's exact test, one-sided)."""
    if not mine.outside:
        return 1.0
    if exact:
        return 0.0
    table = [[run.outside, run.tokens - run.outside] for run in (mine, other)]
    return float(scipy("stats").fisher_exact(table, alternative="greater").pvalue)
