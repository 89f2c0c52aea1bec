"""Is what an approximate acceptance writes as good as what strict sampling writes?

An approximate acceptance (typical, Medusa, arXiv 2401.10774, section 2.3.1) changes the law of sampled
output, so it is never called lossless. Instead its own output is judged, against strict sampling of the same
weights: the same prompts, temperature and seeds, so that a pair differs only where a draft was accepted.

* *likelihood*: both texts are teacher-forced under the target, at temperature 1 and without drafts. The
  perplexity of the one over that of the other must stay below a margin (non-inferiority, one-sided).
* *repetition*: a text can be likely because it says the same thing again, which drafting by copying
  invites. So the share of 4-grams of tokens that the answer had before must not rise by more than a margin.

Neither sees everything: a change of law that keeps perplexity and repetition passes. Bootstrap over prompts,
whose samples stay together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtspec.engine import Engine, Request, Sampling
from trtspec.prompts import Prompt
from trtspec.ruler import Answer, Run, acceptance_length, counter, run
from trtspec.stats import Array, Interval, all_alike, bootstrap
from trtspec.verify.gates import Check, Verdict, gated
from trtspec.verify.records import Records, Row, answers_from, rows_of

PERPLEXITY_MARGIN = 1.25
"""Used where the recipe sets no gates.max_perplexity_ratio: that key's default."""
REPETITION_MARGIN = 0.10
"""Share of 4-grams. An answer caught in a loop repeats most of its own, so one in eight to ten that is spoilt
this way reaches the margin."""
MIN_PROMPTS = 8
"""Below this texts as different as sampled ones are say too little about each other."""
_GRAM = 4


@dataclass(frozen=True)
class Sampled:
    """The answers of one way of sampling, each with what the target thinks of it.

    ``logprobs[prompt][sample]``: natural log-probability of the whole answer under the target, at
    temperature 1; ``answers`` likewise.
    """

    answers: tuple[tuple[Answer, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]

    @property
    def perplexity(self) -> float:
        return math.exp(-float(self.sums().sum() / self.tokens().sum()))

    def sums(self) -> Array:
        """Log-probability of all samples, ``[prompts]``."""
        return np.array([math.fsum(row) for row in self.logprobs])

    def tokens(self) -> Array:
        """Tokens of all samples, ``[prompts]``."""
        return np.array([sum(len(one.tokens) for one in row) for row in self.answers], dtype=np.float64)


def sampled_requests(
    prompts: Sequence[Prompt],
    *,
    samples: int,
    max_new_tokens: int,
    temperature: float,
    stop_tokens: frozenset[int],
) -> list[Request]:
    """``samples`` requests a prompt, next to each other, with seeds of their own."""
    return [
        Request(
            f"{prompt.id}#{sample}",
            prompt.tokens,
            max_new_tokens,
            Sampling(temperature=temperature, seed=1000 * number + sample),
            stop_tokens,
        )
        for number, prompt in enumerate(prompts)
        for sample in range(samples)
    ]


def score_answers(
    scorer: Engine,
    prompts: Sequence[Prompt],
    answers: Sequence[Answer],
    on_answer: Callable[[], None] = lambda: None,
) -> Sampled:
    """Teacher-force every answer with ``scorer``; ``answers`` are those of :func:`sampled_requests`."""
    samples = len(answers) // len(prompts)
    grouped = tuple(tuple(answers[i * samples : (i + 1) * samples]) for i in range(len(prompts)))
    logprobs = []
    for prompt, row in zip(prompts, grouped, strict=True):
        values = []
        for answer in row:
            scores = scorer.score((*prompt.tokens, *answer.tokens))
            values.append(math.fsum(scores.logprobs[len(prompt.tokens) - 1 :]))
            on_answer()
        logprobs.append(tuple(values))
    return Sampled(grouped, tuple(logprobs))


def perplexity_over(approximate: Sampled, strict: Sampled) -> tuple[float, Interval]:
    """Perplexity of what the one wrote over that of the other, both under the target, with its interval."""
    sums, counts = (approximate.sums(), strict.sums()), (approximate.tokens(), strict.tokens())

    def statistic(chosen: NDArray[np.intp]) -> Array:
        mean = [s[chosen].sum(axis=1) / c[chosen].sum(axis=1) for s, c in zip(sums, counts, strict=True)]
        ratio: Array = np.exp(mean[1] - mean[0])
        return ratio

    value = approximate.perplexity / strict.perplexity
    return value, bootstrap(value, statistic, len(sums[0]), positive=True)


def repeated_grams(tokens: Sequence[int]) -> tuple[int, int]:
    """(4-grams that the text had before, 4-grams) of one answer."""
    grams = [tuple(tokens[i : i + _GRAM]) for i in range(len(tokens) - _GRAM + 1)]
    return len(grams) - len(set(grams)), len(grams)


def repetition_over(approximate: Sampled, strict: Sampled) -> tuple[float, float, Interval]:
    """(repeated share of the one, its excess over the other's, interval of the excess)."""
    counted = [
        np.array(
            [np.sum([repeated_grams(one.tokens) for one in row], axis=0) for row in sampled.answers],
            dtype=np.float64,
        )
        for sampled in (approximate, strict)
    ]

    def share(counts: Array, chosen: NDArray[np.intp]) -> Array:
        found = counts[chosen].sum(axis=-2)
        value: Array = found[..., 0] / np.maximum(found[..., 1], 1.0)
        return value

    everyone = np.arange(len(counted[0]))
    mine, theirs = (float(share(counts, everyone)) for counts in counted)
    low, high = bootstrap(
        mine - theirs,
        lambda chosen: share(counted[0], chosen) - share(counted[1], chosen),
        len(everyone),
    )
    if low == high:
        # No answer repeats itself, or all alike: loops of a prompt that was not asked are not excluded.
        low, high = all_alike(mine - theirs, len(everyone), (-1.0, 1.0))
    return mine, mine - theirs, (low, high)


def check_approximate(
    approximate: Engine,
    plain: Engine,
    prompts: Sequence[Prompt],
    *,
    samples: int,
    max_new_tokens: int,
    temperature: float,
    stop_tokens: frozenset[int],
    draft_limit: int | None,
    margin: float | None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Check]:
    """The two required checks of an approximate acceptance; ``plain`` is the same weights without drafts.

    ``margin``: the recipe's ``gates.max_perplexity_ratio``; None: :data:`PERPLEXITY_MARGIN`.
    """
    requests = sampled_requests(
        prompts,
        samples=samples,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        stop_tokens=stop_tokens,
    )
    advance = counter(on_progress, 4 * len(requests))
    runs = (
        run(approximate, requests, draft_limit=draft_limit, on_answer=advance),
        run(plain, requests, draft_limit=0, on_answer=advance),
    )
    scored = [score_answers(plain, prompts, one.answers, advance) for one in runs]
    drafting = replace(runs[0], contradictions=(*runs[0].contradictions, *runs[1].contradictions))
    return judge_approximate(scored[0], scored[1], drafting, temperature=temperature, margin=margin)


def judge_approximate(
    approximate: Sampled, strict: Sampled, drafting: Run, *, temperature: float, margin: float | None
) -> list[Check]:
    """The verdicts over what was sampled and scored. ``drafting``: the run of ``approximate``, with what
    contradicts itself in either."""
    answers = drafting.answers
    drafted = sum(answer.drafted for answer in answers)
    accepted = sum(answer.accepted for answer in answers)
    prompts, samples = len(approximate.answers), len(approximate.answers[0])
    how = (
        f"sampled at temperature {temperature:g}, {samples} answer{'s' if samples > 1 else ''} a prompt, "
        "the same seeds with and without drafts; 95 % bootstrap over prompts"
    )
    evidence: dict[str, Any] = {
        "fidelity": "approximate",
        "temperature": temperature,
        "samples_per_prompt": samples,
        "tokens": int(approximate.tokens().sum()),
        "tokens_strict": int(strict.tokens().sum()),
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_length": acceptance_length(answers),
        "contradictions": list(drafting.contradictions),
    }
    ratio, interval = perplexity_over(approximate, strict)
    likelihood = gated(
        name="approximate_likelihood",
        what=(
            f"approximate acceptance at temperature {temperature:g} ({acceptance_length(answers):.2f} tokens "
            f"a step) writes text of perplexity {approximate.perplexity:.2f} under the target, strict "
            f"sampling {strict.perplexity:.2f}: ratio"
        ),
        measured=ratio,
        interval=interval,
        bound=PERPLEXITY_MARGIN if margin is None else margin,
        sense="at most",
        n=prompts,
        n_unit="prompts",
        how=f"exp of the mean log-probability of a token, scored in one pass without drafts; {how}",
        evidence={
            **evidence,
            "perplexity": approximate.perplexity,
            "perplexity_strict": strict.perplexity,
            "margin_from": "default" if margin is None else "gates.max_perplexity_ratio",
        },
    )
    share, excess, spread = repetition_over(approximate, strict)
    repetition = gated(
        name="approximate_repetition",
        what=f"{share:.1%} of the {_GRAM}-grams occurred before in their answer; excess over strict sampling",
        measured=excess,
        interval=spread,
        bound=REPETITION_MARGIN,
        sense="at most",
        n=prompts,
        n_unit="prompts",
        how=f"{_GRAM}-grams of tokens within each answer; {how}",
        evidence={**evidence, "repeated_share": share, "repeated_share_strict": share - excess},
    )
    records = Records(
        "approximate",
        {"temperature": temperature, "margin": margin, "contradictions": list(drafting.contradictions)},
        {"approximate": sampled_rows(approximate), "strict": sampled_rows(strict)},
    )
    return [
        replace(_sound(check, drafting, drafted, prompts), records=records)
        for check in (likelihood, repetition)
    ]


def sampled_rows(sampled: Sampled) -> list[Row]:
    """A row for every answer of ``sampled``."""
    return [
        {"prompt": prompt, "logprob": logprob} | rows_of([answer])[0]
        for prompt, (answers, logprobs) in enumerate(zip(sampled.answers, sampled.logprobs, strict=True))
        for answer, logprob in zip(answers, logprobs, strict=True)
    ]


def sampled_from(rows: Sequence[Row]) -> Sampled:
    """The answers whose :func:`sampled_rows` these are."""
    answers: list[list[Answer]] = []
    logprobs: list[list[float]] = []
    for row in rows:
        if row["prompt"] == len(answers):
            answers.append([])
            logprobs.append([])
        answers[row["prompt"]] += answers_from([row])
        logprobs[row["prompt"]].append(math.nan if row["logprob"] is None else row["logprob"])
    return Sampled(tuple(map(tuple, answers)), tuple(map(tuple, logprobs)))


def _sound(check: Check, drafting: Run, drafted: int, prompts: int) -> Check:
    """``check``, unless what it rests on cannot bear it."""
    if drafting.contradictions:
        text = f"the engine's counts contradict its outputs: {drafting.contradictions[0]}"
        return replace(check, verdict=Verdict.ERROR, summary=text)
    if not drafted:
        text = "nothing was drafted, so this shows nothing; use prompts on which the drafter finds something"
        return replace(check, verdict=Verdict.INCONCLUSIVE, summary=f"{text} (--prompts). {check.summary}")
    if prompts < MIN_PROMPTS:
        text = f"{prompts} prompts are too few to judge by, at least {MIN_PROMPTS} are needed"
        return replace(check, verdict=Verdict.INCONCLUSIVE, summary=f"{text}. {check.summary}")
    return check
