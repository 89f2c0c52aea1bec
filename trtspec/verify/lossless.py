"""Is greedy output with speculation that of the same weights without it, token by token?

In exact arithmetic the answer is yes or no. In 16 bit a forward of another shape (five verified rows
instead of one, another batch) rounds otherwise, and where the two most likely tokens are nearly tied the
other one may win: after that the two texts differ for good, though nothing is wrong. So three things are
measured in the same run, with the same engine that runs without speculation:

* *gap*: at each first divergence, how far (in nats) the less likely of the two tokens lies below the most
  likely one, both texts scored in one pass;
* *noise*: how far the margin between the two most likely tokens, and the log-probability of a token, move
  when nothing but the number of rows of a forward changes;
* *floor*: how often batch 1 and batch N of the engine without speculation diverge from each other.

A divergence whose gap is within the noise is a numeric tie. Verdicts: ``identical``; ``numeric ties only``,
a pass that says so, for 16-bit computation only; anything else fails. A text that simply ends early is never
a tie.

Where noise is large, "within the noise" excludes little: an 8-bit KV cache alone, whose codes flip when
their input moves by a rounding error, makes a small model's log-probabilities move by tenths of a nat. So
the protocol also runs the same weights, KV format, schedule and drafts in float64, where codes do not flip
and every difference, however small its gap, is a fault of the algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from trtspec.engine import Engine, Request
from trtspec.verify.gates import Check, Verdict
from trtspec.verify.ruler import Answer, Run, run
from trtspec.verify.stats import rate_interval, rate_upper_bound
from trtspec.verify.texts import Prompt

_TIES_ALLOWED = ("bfloat16", "float16")
# Each costs a few passes over its text, one of them row by row.
_LOOKED_AT = 4


@dataclass(frozen=True)
class Divergence:
    """Where one answer first differs from its reference."""

    prompt_id: str
    position: int
    """Index into the new tokens."""
    reference_token: int | None
    """None: the reference ended here."""
    other_token: int | None
    gap_nats: float | None = None
    """See the module; None where one text ended."""
    margin: float | None = None
    """Logit margin between the two most likely tokens there."""
    local_noise_nats: float | None = None
    """How far the two tokens' difference moves at this very place with the rows of a forward; measured
    only where the gap exceeds the noise elsewhere."""


@dataclass(frozen=True)
class Comparison:
    """Two runs of the same prompts. ``positions``: token decisions that were compared, up to and
    including each first divergence."""

    positions: int
    prompts: int
    divergences: tuple[Divergence, ...]


@dataclass(frozen=True)
class Noise:
    """What changing only the number of rows of a forward does to scores."""

    nats: float
    """Largest difference found."""
    rms_nats: float
    """Root mean square of all differences."""
    positions: int
    by_rows: dict[str, float]
    """The largest difference for each number of rows, against one pass over the text."""


def requests_for(
    prompts: Sequence[Prompt], max_new_tokens: int | Sequence[int], stop_tokens: frozenset[int]
) -> list[Request]:
    """Greedy requests, one a prompt."""
    lengths = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    return [
        Request(prompt.id, prompt.tokens, length, stop_tokens=stop_tokens)
        for prompt, length in zip(prompts, lengths, strict=True)
    ]


def compare(reference: Sequence[Answer], other: Sequence[Answer]) -> Comparison:
    """Compare answers token by token, lengths included. Raises ValueError unless the prompts are the same."""
    if [answer.request_id for answer in reference] != [answer.request_id for answer in other]:
        raise ValueError("the two runs answer different prompts")
    positions, divergences = 0, []
    for left, right in zip(reference, other, strict=True):
        longest = max(len(left.tokens), len(right.tokens))
        place = next((index for index in range(longest) if _token(left, index) != _token(right, index)), None)
        positions += longest if place is None else place + 1
        if place is not None:
            divergences.append(Divergence(left.request_id, place, _token(left, place), _token(right, place)))
    return Comparison(positions, len(reference), tuple(divergences))


def _token(answer: Answer, index: int) -> int | None:
    return answer.tokens[index] if index < len(answer.tokens) else None


def locate(
    engine: Engine, comparison: Comparison, prompts: Sequence[Prompt], reference: Sequence[Answer]
) -> Comparison:
    """Score every divergence with ``engine`` (the one without speculation)."""
    scored = []
    for divergence in comparison.divergences:
        if divergence.reference_token is None or divergence.other_token is None:
            scored.append(divergence)
            continue
        common = _common(divergence, prompts, reference)
        at_place = engine.score((*common, divergence.reference_token))
        logprobs = {divergence.reference_token: at_place.logprobs[-1]}
        for token in (divergence.other_token, at_place.top_tokens[-1]):
            if token not in logprobs:
                logprobs[token] = engine.score((*common, token)).logprobs[-1]
        best = logprobs[at_place.top_tokens[-1]]
        gap = best - min(logprobs[divergence.reference_token], logprobs[divergence.other_token])
        scored.append(replace(divergence, gap_nats=gap, margin=at_place.margins[-1]))
    return replace(comparison, divergences=tuple(scored))


def row_noise(
    engine: Engine,
    texts: Sequence[Sequence[int]],
    rows: Sequence[int],
    on_text: Callable[[], None] = lambda: None,
) -> Noise:
    """Score ``texts`` in chunks of each of ``rows`` rows and in one pass; the largest difference."""
    worst = {str(count): 0.0 for count in rows}
    positions, moves = 0, []
    for text in texts:
        whole = engine.score(text)
        positions += len(whole.margins)
        for count in rows:
            chunked = engine.score(text, chunk_tokens=count)
            for i in range(len(whole.margins)):
                moved = abs(whole.logprobs[i] - chunked.logprobs[i])
                first = (whole.top_tokens[i], whole.second_tokens[i])
                second = (chunked.top_tokens[i], chunked.second_tokens[i])
                if first == second:
                    moved = max(moved, abs(whole.margins[i] - chunked.margins[i]))
                elif first == second[::-1]:
                    moved = max(moved, whole.margins[i] + chunked.margins[i])
                worst[str(count)] = max(worst[str(count)], moved)
                moves.append(moved)
            on_text()
    rms = math.sqrt(math.fsum(moved**2 for moved in moves) / len(moves)) if moves else 0.0
    return Noise(max(worst.values(), default=0.0), rms, positions, worst)


def look_closer(
    engine: Engine,
    comparison: Comparison,
    prompts: Sequence[Prompt],
    reference: Sequence[Answer],
    noise: Noise,
    rows: Sequence[int],
) -> Comparison:
    """Measure the noise at the divergences that the noise elsewhere does not cover (the first few).

    The noise is a largest value over some hundred places, and the divergences are drawn from more places
    than that, so a rare large rounding difference must be looked for where it happened.
    """
    looked_at, found = 0, []
    for divergence in comparison.divergences:
        gap, left, right = divergence.gap_nats, divergence.reference_token, divergence.other_token
        if gap is None or left is None or right is None or gap <= noise.nats or looked_at >= _LOOKED_AT:
            found.append(divergence)
            continue
        looked_at += 1
        common = _common(divergence, prompts, reference)
        first, second = (*common, left), (*common, right)
        whole = _difference(engine, first, second, None)
        local = max(abs(_difference(engine, first, second, count) - whole) for count in rows)
        found.append(replace(divergence, local_noise_nats=local))
    return replace(comparison, divergences=tuple(found))


def _difference(engine: Engine, first: tuple[int, ...], second: tuple[int, ...], rows: int | None) -> float:
    """Log-probability of the last token of ``first`` minus that of ``second``."""
    left, right = (engine.score(text, chunk_tokens=rows).logprobs[-1] for text in (first, second))
    return left - right


def _common(
    divergence: Divergence, prompts: Sequence[Prompt], reference: Sequence[Answer]
) -> tuple[int, ...]:
    """The tokens on which both answers still agree, prompt included."""
    prompt = next(prompt for prompt in prompts if prompt.id == divergence.prompt_id)
    answer = next(answer for answer in reference if answer.request_id == divergence.prompt_id)
    return prompt.tokens + answer.tokens[: divergence.position]


def is_tie(divergence: Divergence, noise: Noise) -> bool:
    """Whether rounding, as measured, explains a divergence."""
    allowed = max(noise.nats, divergence.local_noise_nats or 0.0)
    return divergence.gap_nats is not None and divergence.gap_nats <= allowed


def judge(
    name: str,
    comparison: Comparison,
    noise: Noise,
    floor: Comparison,
    *,
    dtype: str,
    drafted: int,
    accepted: int,
    speculates: bool,
    required: bool,
    contradictions: Sequence[str],
) -> Check:
    """The verdict over what was measured. ``comparison`` and ``floor`` are already located."""
    ties_allowed = dtype in _TIES_ALLOWED
    against = "without speculation" if speculates else "at batch 1"
    count = len(comparison.divergences)
    upper = rate_upper_bound(count, comparison.positions)
    real = [
        divergence
        for divergence in comparison.divergences
        if not (ties_allowed and is_tie(divergence, noise))
    ]
    batch_real = [
        divergence for divergence in floor.divergences if not (ties_allowed and is_tie(divergence, noise))
    ]
    scope = f"{comparison.prompts} prompts, {comparison.positions} tokens"
    measured_as: Literal["identical", "numeric ties only", "different"] = "identical"
    warnings: tuple[str, ...] = ()
    if real:
        verdict, measured_as = Verdict.FAIL, "different"
        summary = f"differs from the same weights {against} in {len(real)} of {scope}: " + _describe(real[0])
        if ties_allowed:
            summary += f"; rounding explains up to {noise.nats:.3g} nats"
        else:
            summary += f"; in {dtype} no divergence counts as rounding"
    elif contradictions:
        verdict = Verdict.ERROR
        summary = f"the engine's books do not balance: {contradictions[0]}"
    elif batch_real:
        verdict, measured_as = Verdict.FAIL, "different"
        summary = "without speculation, batching alone changes answers: " + _describe(batch_real[0])
    elif speculates and drafted == 0:
        verdict = Verdict.INCONCLUSIVE
        summary = f"identical in {scope}, but nothing was drafted, so this shows nothing; use other prompts"
    elif count:
        verdict, measured_as = Verdict.PASS, "numeric ties only"
        largest = max(divergence.gap_nats or 0.0 for divergence in comparison.divergences)
        summary = (
            f"numeric ties only, {count} in {scope}: gaps up to {largest:.3g} nats, "
            f"changing only the rows of a forward moves scores by {noise.rms_nats:.2g} (rms) to "
            f"{noise.nats:.3g}; without speculation, batch 1 against {comparison.prompts} together diverges "
            f"in {len(floor.divergences)} of {floor.prompts} prompts"
        )
    else:
        verdict = Verdict.PASS
        summary = f"identical to the same weights {against} in {scope}; mismatch rate < {upper:.2g} (95 %)"
    if speculates and drafted and not accepted:
        warnings = (f"none of {drafted} drafted tokens was accepted: only rejection was exercised",)
    how = f"greedy, {dtype}; compared token by token, lengths included, up to the first divergence"
    if noise.positions:
        how += (
            "; gaps scored in one pass by the engine without speculation; noise: the same texts scored with "
            f"{', '.join(noise.by_rows)} rows a forward against one pass"
        )
    floor_low, floor_high = rate_interval(len(floor.divergences), max(floor.positions, 1))
    return Check(
        name=name,
        verdict=verdict,
        summary=summary,
        required=required,
        measured=float(count),
        unit="divergences",
        n=comparison.positions,
        n_unit="tokens",
        how=how,
        warnings=warnings,
        evidence={
            "result": measured_as,
            "divergences": [asdict(divergence) for divergence in comparison.divergences],
            "mismatch_rate_upper_95": upper,
            "noise": asdict(noise),
            "floor": {
                "what": "engine without speculation, batch 1 against batch N",
                "prompts": floor.prompts,
                "tokens": floor.positions,
                "divergences": [asdict(divergence) for divergence in floor.divergences],
                "rate_95": [floor_low, floor_high],
            },
            "drafted": drafted,
            "accepted": accepted,
            "contradictions": list(contradictions),
        },
    )


def _describe(divergence: Divergence) -> str:
    place = f"prompt {divergence.prompt_id}, token {divergence.position}"
    if divergence.other_token is None:
        return f"{place}: ends early"
    if divergence.reference_token is None:
        return f"{place}: goes on where the reference ended"
    gap = "" if divergence.gap_nats is None else f", {divergence.gap_nats:.3g} nats apart"
    return f"{place}: {divergence.other_token} instead of {divergence.reference_token}{gap}"


@dataclass(frozen=True)
class Identity:
    """The check and the reference answers (which later measurements reuse)."""

    check: Check
    reference: Run
    speculative: Run


def check_lossless(
    speculative: Engine,
    plain: Engine,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    stop_tokens: frozenset[int],
    draft_limit: int | None,
    dtype: str,
    speculates: bool,
    required: bool,
    name: str = "lossless",
    floor_prompts: int = 4,
    noise_texts: int = 3,
    noise_tokens: int = 96,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Identity:
    """Compare ``speculative`` with ``plain`` (same weights, no speculation) on ``prompts``.

    A recipe without speculation is compared with itself at batch 1: then batching is what must change
    nothing. ``floor_prompts`` of the prompts are also run one by one, ``noise_texts`` texts of up to
    ``noise_tokens`` tokens scored in several row shapes.
    """
    requests = requests_for(prompts, max_new_tokens, stop_tokens)
    rows = sorted({1, (draft_limit or 4) + 1, 16})  # decode, verification, a batch
    alone = requests if not speculates else requests[:floor_prompts]
    total = 2 * len(requests) + len(alone) + min(noise_texts, len(prompts)) * len(rows)
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        on_progress(done, total)

    reference = run(plain, requests, draft_limit=0, on_answer=advance)
    singles = [run(plain, [request], draft_limit=0, on_answer=advance) for request in alone]
    one_by_one = [single.answers[0] for single in singles]
    together = reference.answers[: len(alone)]
    contradictions = [
        *reference.contradictions,
        *(line for single in singles for line in single.contradictions),
    ]
    if speculates:
        other = run(speculative, requests, draft_limit=draft_limit, on_answer=advance)
        contradictions += other.contradictions
        comparison = compare(reference.answers, other.answers)
    else:
        other = reference
        comparison = compare(one_by_one, reference.answers)
    texts = [
        (*prompt.tokens, *answer.tokens)[-noise_tokens:]
        for prompt, answer in list(zip(prompts, reference.answers, strict=True))[:noise_texts]
    ]
    noise = row_noise(plain, texts, rows, advance)
    comparison = locate(plain, comparison, prompts, reference.answers)
    floor = locate(plain, compare(one_by_one, together), prompts, one_by_one)
    if dtype in _TIES_ALLOWED:
        comparison = look_closer(plain, comparison, prompts, reference.answers, noise, rows)
        floor = look_closer(plain, floor, prompts, one_by_one, noise, rows)
    check = judge(
        name,
        comparison,
        noise,
        floor,
        dtype=dtype,
        drafted=sum(answer.drafted for answer in other.answers),
        accepted=sum(answer.accepted for answer in other.answers),
        speculates=speculates,
        required=required,
        contradictions=contradictions,
    )
    return Identity(check, reference, other)
