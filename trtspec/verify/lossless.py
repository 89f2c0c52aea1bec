"""Is greedy output with speculation that of the same weights without it, token by token?

In exact arithmetic the answer is yes or no, so the proof is a run in float64: there every difference is a
fault, and the drafts hold near misses (:mod:`trtspec.verify.near_misses`), which a careless acceptance would
keep. A run in which nothing was drafted or refused proves nothing and is INCONCLUSIVE.

In 16 bit a pass of another shape (five verified tokens instead of one, another batch) rounds otherwise,
and where the two most likely tokens are nearly tied the other one may win: after that the two texts differ
for good, though nothing is wrong. So three things are measured in the same run, with the same engine that
runs without speculation:

* *gap*: at each first divergence, how far (in nats, differences of natural log-probabilities) the less
  likely of the two tokens lies below the most likely one, both texts scored in one pass;
* *noise*: how far the margin between the two most likely tokens, and the log-probability of a token, move
  when nothing but the number of tokens that a pass computes changes;
* *floor*: how often batch 1 and batch N of the engine without speculation diverge from each other.

What these make of a run is in :mod:`trtspec.verify.lossless_verdict`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from trtspec.engine import Engine, Request
from trtspec.prompts import Prompt
from trtspec.ruler import Answer, Run, counter, run
from trtspec.stats import quantile
from trtspec.verify.gates import Check
from trtspec.verify.lossless_verdict import (
    FAULT,
    POWER_NATS,
    TIES_ALLOWED,
    Comparison,
    Divergence,
    NearMissRun,
    Noise,
    judge,
)
from trtspec.verify.near_misses import Drafts, miss_rows, misses_from, plan_near_misses, refusals
from trtspec.verify.records import Records, Row, answers_from, rows_of

_USUAL = 0.95
# Each costs a few passes over its text, one of them token by token.
_LOOKED_AT = 3


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
    engine: Engine,
    comparison: Comparison,
    prompts: Sequence[Prompt],
    reference: Sequence[Answer],
    spell: Callable[[int], str] | None = None,
) -> Comparison:
    """Score every divergence with ``engine`` (the one without speculation). ``spell``: a token's text."""
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
        found = replace(divergence, gap_nats=gap, margin=at_place.margins[-1])
        if spell is not None:
            reference_text, other_text = spell(divergence.reference_token), spell(divergence.other_token)
            found = replace(found, reference_text=reference_text, other_text=other_text)
        scored.append(found)
    return replace(comparison, divergences=tuple(scored))


@dataclass(frozen=True)
class Move:
    """How far scores at one place of a text moved when a pass computed ``rows`` tokens instead of all."""

    text: int
    position: int
    rows: int
    nats: float


def row_noise(
    engine: Engine,
    texts: Sequence[Sequence[int]],
    rows: Sequence[int],
    on_text: Callable[[], None] = lambda: None,
) -> Noise:
    """Score ``texts`` in chunks of each of ``rows`` tokens and in one pass; how far the scores move."""
    return noise_of(row_moves(engine, texts, rows, on_text), rows)


def row_moves(
    engine: Engine,
    texts: Sequence[Sequence[int]],
    rows: Sequence[int],
    on_text: Callable[[], None] = lambda: None,
) -> list[Move]:
    """How far the scores of each place of ``texts`` move, for each of ``rows``."""
    moves = []
    for number, text in enumerate(texts):
        whole = engine.score(text)
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
                moves.append(Move(number, i, count, moved))
            on_text()
    return moves


def noise_of(moves: Sequence[Move], rows: Sequence[int]) -> Noise:
    """The noise that ``moves`` show; each place of each text has one for each of ``rows``."""
    worst = {
        str(count): max((move.nats for move in moves if move.rows == count), default=0.0) for count in rows
    }
    nats = [move.nats for move in moves]
    rms = math.sqrt(math.fsum(moved**2 for moved in nats) / len(nats)) if nats else 0.0
    positions = len(moves) // max(len(rows), 1)
    return Noise(quantile(nats, _USUAL), max(worst.values(), default=0.0), rms, positions, worst)


def look_closer(
    engine: Engine,
    comparison: Comparison,
    prompts: Sequence[Prompt],
    reference: Sequence[Answer],
    noise: Noise,
    rows: Sequence[int],
) -> Comparison:
    """Measure the noise at divergences (the first few) where it can change the verdict: beyond the usual
    noise if that is small enough for near ties to count, else beyond what would be a fault.

    Divergences are where rounding was large, so a rare large difference must be looked for where it
    happened.
    """
    looked_at, found = 0, []
    enough = noise.usual_nats if noise.usual_nats <= POWER_NATS else FAULT * noise.nats
    for divergence in comparison.divergences:
        gap, left, right = divergence.gap_nats, divergence.reference_token, divergence.other_token
        if gap is None or left is None or right is None or gap <= enough or looked_at >= _LOOKED_AT:
            found.append(divergence)
            continue
        looked_at += 1
        common = _common(divergence, prompts, reference)
        whole = _difference(engine, common, left, right, None)
        local = max(abs(_difference(engine, common, left, right, count) - whole) for count in rows)
        found.append(replace(divergence, local_noise_nats=local))
    return replace(comparison, divergences=tuple(found))


def _difference(engine: Engine, common: tuple[int, ...], left: int, right: int, rows: int | None) -> float:
    """Log-probability of ``left`` after ``common`` minus that of ``right``."""
    scores = engine.score((*common, left), chunk_tokens=rows)
    top, second = scores.top_tokens[-1], scores.second_tokens[-1]
    if {top, second} == {left, right}:
        return scores.margins[-1] if top == left else -scores.margins[-1]
    return scores.logprobs[-1] - engine.score((*common, right), chunk_tokens=rows).logprobs[-1]


def _common(
    divergence: Divergence, prompts: Sequence[Prompt], reference: Sequence[Answer]
) -> tuple[int, ...]:
    """The tokens on which both answers still agree, prompt included."""
    prompt = next(prompt for prompt in prompts if prompt.id == divergence.prompt_id)
    answer = next(answer for answer in reference if answer.request_id == divergence.prompt_id)
    return prompt.tokens + answer.tokens[: divergence.position]


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
    offer: Callable[[Drafts], AbstractContextManager[None]] | None = None,
    proof: str | None = None,
    spell: Callable[[int], str] | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Identity:
    """Compare ``speculative`` with ``plain`` (same weights, no speculation) on ``prompts``.

    A recipe without speculation is compared with itself at batch 1: then batching is what must change
    nothing. ``floor_prompts`` of the prompts are also run one by one, ``noise_texts`` texts of up to
    ``noise_tokens`` tokens scored in passes of several lengths. ``offer`` makes ``speculative`` draft by a
    plan: then the prompts are run once more, with near misses as drafts. ``proof``: see :func:`judge`.
    ``spell``: see :func:`locate`.
    """
    requests = requests_for(prompts, max_new_tokens, stop_tokens)
    rows = sorted({1, (draft_limit or 4) + 1, 16})  # decode, verification, a batch
    alone = requests if not speculates else requests[:floor_prompts]
    total = 2 * len(requests) + len(alone) + min(noise_texts, len(prompts)) * len(rows)
    total += 0 if offer is None else 2 * len(requests)
    advance = counter(on_progress, total)
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
    near = None
    near_tables: dict[str, list[dict[str, Any]]] = {}
    if offer is not None:
        plan = plan_near_misses(plain, prompts, reference.answers, draft_limit, advance)
        with offer(plan.drafts):
            missed = run(speculative, requests, draft_limit=None, on_answer=advance)
        contradictions += missed.contradictions
        compared = compare(reference.answers, missed.answers)
        compared = locate(plain, compared, prompts, reference.answers, spell)
        near = NearMissRun(compared, refusals(plan, prompts, missed.answers))
        near_tables = {"near_answers": rows_of(missed.answers), "near_misses": miss_rows(plan)}
    texts = [
        (*prompt.tokens, *answer.tokens)[-noise_tokens:]
        for prompt, answer in list(zip(prompts, reference.answers, strict=True))[:noise_texts]
    ]
    moves = row_moves(plain, texts, rows, advance)
    noise = noise_of(moves, rows)
    comparison = locate(plain, comparison, prompts, reference.answers, spell)
    floor = locate(plain, compare(one_by_one, together), prompts, one_by_one, spell)
    if dtype in TIES_ALLOWED:
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
        near=near,
        proof=proof,
    )
    records = Records(
        "lossless",
        {
            "name": name,
            "dtype": dtype,
            "speculates": speculates,
            "required": required,
            "contradictions": list(contradictions),
            "proof": proof,
            "rows": rows,
            "near": near is not None,
        },
        {
            "prompts": [{"id": prompt.id, "tokens": list(prompt.tokens)} for prompt in prompts],
            "reference": rows_of(reference.answers),
            "other": rows_of(other.answers),
            "batch_1": rows_of(one_by_one),
            "noise": rows_of(moves),
            "divergences": [
                {"of": of} | row
                for of, found in (
                    ("comparison", comparison),
                    ("floor", floor),
                    *([("near", near.comparison)] if near is not None else []),
                )
                for row in rows_of(found.divergences)
            ],
            **near_tables,
        },
    )
    return Identity(replace(check, records=records), reference, other)


def judge_rows(arguments: Mapping[str, Any], tables: Mapping[str, Sequence[Row]]) -> Check:
    """The verdict over the records of :func:`check_lossless`: what was measured, judged again.

    Where ``reference`` is not the run without speculation, the table ``batch_n`` has the latter's answers,
    with which ``batch_1`` is compared, and ``against`` says what the reference is.
    """
    prompts = [Prompt(str(row["id"]), tuple(row["tokens"])) for row in tables["prompts"]]
    reference, other, alone = (answers_from(tables[name]) for name in ("reference", "other", "batch_1"))
    together = answers_from(tables["batch_n"]) if "batch_n" in tables else reference
    speculates = arguments["speculates"]
    comparison = compare(reference, other) if speculates else compare(alone, reference)
    floor = compare(alone, together[: len(alone)])
    near = None
    if arguments["near"]:
        missed = answers_from(tables["near_answers"])
        near = NearMissRun(
            _scored(compare(reference, missed), "near", tables["divergences"]),
            refusals(misses_from(tables["near_misses"]), prompts, missed),
        )
    moves = [Move(row["text"], row["position"], row["rows"], row["nats"]) for row in tables["noise"]]
    return judge(
        arguments["name"],
        _scored(comparison, "comparison", tables["divergences"]),
        noise_of(moves, arguments["rows"]),
        _scored(floor, "floor", tables["divergences"]),
        dtype=arguments["dtype"],
        drafted=sum(answer.drafted for answer in other),
        accepted=sum(answer.accepted for answer in other),
        speculates=speculates,
        required=arguments["required"],
        contradictions=arguments["contradictions"],
        near=near,
        proof=arguments["proof"],
        against=arguments.get("against"),
    )


def _scored(comparison: Comparison, of: str, rows: Sequence[Row]) -> Comparison:
    """The divergences with what the engine measured of them; one that the records do not know has no gap,
    so it is a fault."""
    known = {
        (row["prompt_id"], row["position"], row["reference_token"], row["other_token"]): row
        for row in rows
        if row["of"] == of
    }
    found = []
    for one in comparison.divergences:
        row = known.get((one.prompt_id, one.position, one.reference_token, one.other_token))
        measured = ("gap_nats", "margin", "local_noise_nats", "reference_text", "other_text")
        found.append(one if row is None else replace(one, **{key: row[key] for key in measured}))
    return replace(comparison, divergences=tuple(found))
