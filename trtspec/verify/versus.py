"""The checks that hold one engine against another (:mod:`~trtspec.verify.pair`): ENGINE against OTHER.

``other.NAME`` is OTHER's own, as ``NAME`` is ENGINE's; ``vs_other.NAME`` holds ENGINE against OTHER.
Greedy answers of both are held against the same weights without drafts, and against each other with the
same rounding noise and floor: two engines that are lossless give the same text, up to near ties.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trtspec.engine import Engine
from trtspec.prompts import Prompt
from trtspec.recipe import NoSpeculation, Recipe
from trtspec.recipe_facts import fidelity
from trtspec.ruler import Answer, OnProgress, Run, emitted_histogram, max_draft
from trtspec.stats import Interval, gap_of_ratios
from trtspec.text import Tokenizer
from trtspec.verify.exact_run import LOSSLESS, exact_run, liveliest, why_no_exact_run
from trtspec.verify.gates import Check, Verdict, gated, skipped
from trtspec.verify.load import (
    DEFINITION,
    MOST_POSITIONS,
    compare_acceptance,
    length_limits,
    reached_position,
)
from trtspec.verify.lossless import Identity, Move, compare, judge_rows, locate, look_closer, noise_of
from trtspec.verify.lossless_verdict import TIES_ALLOWED
from trtspec.verify.pair import Pair
from trtspec.verify.records import Records, Row, answers_from, rows_of
from trtspec.verify.settings import Settings

VS, OWN = "vs_other.", "other."
_SHOWN_POSITIONS = 5


# --------------------------------------------------------------------------- greedy answers


def check_drafts(
    pair: Pair,
    recipe: Recipe,
    plain: Engine,
    prompts: Sequence[Prompt],
    identity: Identity,
    theirs: Run,
    *,
    proof: str | None,
    own_proof: str | None,
    spell: Callable[[int], str] | None = None,
) -> list[Check]:
    """Two ways of drafting for one target: greedy answers and acceptance.

    ``identity``: ENGINE against ``plain``, the same weights without drafts, on ``prompts``; ``theirs``: what
    OTHER answered to them. ``other.lossless`` holds that against ``plain``, ``vs_other.identity`` ENGINE's
    answers against it; where only one of the two drafts, one comparison is all there is. ``proof`` and
    ``own_proof``: the checks in float64 that are to follow, of ENGINE and of OTHER; None where none is.
    """
    own = own_name(pair)
    required = recipe.gates.lossless
    drafts = not isinstance(recipe.speculation, NoSpeculation)
    checks = []
    if pair.drafts:
        sides = identity.reference, theirs
        checks.append(_compared(own, identity, *sides, plain, prompts, required, own_proof, spell))
    name = f"{VS}identity"
    if not drafts:
        checks.append(skipped(name, f"ENGINE drafts nothing: {own} is this comparison"))
    else:
        sides = theirs, identity.speculative
        against, both = "in OTHER, without drafts", proof
        if pair.drafts:
            against = "with OTHER's drafts"
            both = f"{proof} with {own_proof}" if proof and own_proof else None
        checks.append(_compared(name, identity, *sides, plain, prompts, required, both, spell, against))
    if not (drafts and pair.drafts):
        return [*checks, skipped(f"{VS}acceptance", "only one of the two drafts")]
    limits = [max_draft(one.speculation) for one in (recipe, pair.running.recipe)]
    return [*checks, check_acceptances(identity.speculative, theirs, draft_limits=limits)]


def own_name(pair: Pair) -> str:
    """``other.lossless``, or ``other.greedy`` where OTHER's acceptance is approximate."""
    return OWN + LOSSLESS[fidelity(pair.other.recipe)]


def proof_of(pair: Pair) -> str:
    return f"{own_name(pair)}_float64"


def why_no_proof(pair: Pair) -> str | None:
    """Why OTHER's answers are not compared in float64, "" if there is no need to; None if they are."""
    excuse = why_no_exact_run(pair.running)
    return None if excuse == "" and pair.drafts else excuse


def prove_other(
    pair: Pair,
    checks: Sequence[Check],
    prompts: Sequence[Prompt],
    answers: Sequence[Answer],
    tokenizer: Tokenizer,
    settings: Settings,
    excuse: str | None,
    on_progress: OnProgress,
) -> list[Check]:
    """``checks`` with the proof in float64 of OTHER's losslessness after its check in its own dtype, or with
    the ``excuse``."""
    at = [check.name for check in checks].index(own_name(pair))
    if excuse is not None:
        return [*checks[: at + 1], skipped(proof_of(pair), excuse), *checks[at + 1 :]]
    chosen = liveliest(prompts, answers, settings)
    exact = exact_run(pair.running, chosen, tokenizer, settings, on_progress, prefix=OWN)
    required = pair.running.recipe.gates.lossless
    own = compare_acceptance(checks[at], answers, exact.speculative.answers, required=required)
    return [*checks[:at], own, exact.check, *checks[at + 1 :]]


def _compared(
    name: str,
    identity: Identity,
    reference: Run,
    other: Run,
    plain: Engine,
    prompts: Sequence[Prompt],
    required: bool,
    proof: str | None,
    spell: Callable[[int], str] | None,
    against: str | None = None,
) -> Check:
    """The verdict on ``other`` with the noise and the floor that ``identity`` has measured."""
    known = identity.check.records
    if known is None:
        raise ValueError("the comparison with the run without drafts kept no records")
    tables, rows = known.tables, known.arguments["rows"]
    found = locate(plain, compare(reference.answers, other.answers), prompts, reference.answers, spell)
    if known.arguments["dtype"] in TIES_ALLOWED:
        noise = noise_of([Move(**row) for row in tables["noise"]], rows)
        found = look_closer(plain, found, prompts, reference.answers, noise, rows)
    contradictions = dict.fromkeys([*reference.contradictions, *other.contradictions])
    records = Records(
        "lossless",
        {
            **{key: known.arguments[key] for key in ("dtype", "rows")},
            "name": name,
            "speculates": True,
            "required": required,
            "contradictions": list(contradictions),
            "proof": proof,
            "near": False,
            "against": against,
        },
        {
            "prompts": tables["prompts"],
            "reference": rows_of(reference.answers),
            "other": rows_of(other.answers),
            "batch_1": tables["batch_1"],
            "batch_n": rows_of(identity.reference.answers),
            "noise": tables["noise"],
            "divergences": [
                *({"of": "comparison"} | row for row in rows_of(found.divergences)),
                *(row for row in tables["divergences"] if row["of"] == "floor"),
            ],
        },
    )
    return replace(judge_rows(records.arguments, records.tables), records=records)


# --------------------------------------------------------------------------- acceptance


def check_acceptances(mine: Run, other: Run, *, draft_limits: Sequence[int | None]) -> Check:
    """Acceptance of both on the same prompts, side by side. ``draft_limits``: of ENGINE and of OTHER."""
    return judge_acceptances(
        rows_of(mine.answers),
        rows_of(other.answers),
        draft_limits=list(draft_limits),
        contradictions={"recipe": list(mine.contradictions), "other": list(other.contradictions)},
    )


def judge_acceptances(
    mine: Sequence[Row],
    other: Sequence[Row],
    *,
    draft_limits: Sequence[int | None],
    contradictions: Mapping[str, Sequence[str]],
) -> Check:
    """Tokens a step of ENGINE minus those of OTHER, prompts paired, and the acceptance at each position.

    Acceptance at position i is conditional: of the steps that accepted i - 1 drafted tokens and had drafted i
    or more, the share that accepted i. In a tree a position is a depth; a step whose tree ended above it
    counts against it. Required only as an ERROR: an engine that miscounts is a fault.
    """
    sides = {"recipe": answers_from(mine), "other": answers_from(other)}
    how = (
        f"{DEFINITION}; greedy, the same prompts on both; ENGINE minus OTHER; 95 % paired bootstrap over "
        "prompts; at position i: of the steps that accepted i - 1 drafts and had i or more, the share that "
        "accepted i"
    )
    records = Records(
        "acceptances",
        {"draft_limits": list(draft_limits), "contradictions": dict(contradictions)},
        {"recipe": list(mine), "other": list(other)},
    )
    name = f"{VS}acceptance"
    lengths, shares = {}, {}
    problem = ""
    for (side, answers), limit, who in zip(sides.items(), draft_limits, ("ENGINE", "OTHER"), strict=True):
        tokens, steps = (sum(map(one, answers)) for one in (_tokens, _steps))
        drafted, accepted = (sum(getattr(one, key) for one in answers) for key in ("drafted", "accepted"))
        lengths[side] = tokens / steps if steps else float("nan")
        shares[side] = accepted / drafted if drafted else None
        if contradictions[side]:
            problem = problem or f"{who}'s counts contradict its outputs: {contradictions[side][0]}"
        elif limit is not None and lengths[side] > limit + 1:
            problem = problem or (
                f"{who}: {lengths[side]:.3f} tokens a step are impossible: {limit} drafted tokens and one "
                f"more make at most {limit + 1}"
            )
    if [one.request_id for one in sides["recipe"]] != [one.request_id for one in sides["other"]]:
        problem = problem or "the two answered different prompts"
    if problem:
        return Check(name, Verdict.ERROR, problem, required=True, how=how, records=records)
    positions = _positions(sides)
    most = [
        length_limits(answers, limit)[1] for answers, limit in zip(sides.values(), draft_limits, strict=True)
    ]
    value, interval = _paired(sides, _tokens, _steps, (1.0, max(most)))
    better = [_length(a) - _length(b) for a, b in zip(*sides.values(), strict=True)]
    counts = sum(one > 0 for one in better), sum(one < 0 for one in better)
    rates = " against ".join("nothing drafted" if one is None else f"{one:.1%}" for one in shares.values())
    check = gated(
        name=name,
        what=(
            f"{lengths['recipe']:.3f} tokens a step against {lengths['other']:.3f} of OTHER "
            f"(drafts accepted: {rates}): difference"
        ),
        measured=value,
        interval=interval,
        bound=None,
        sense="at least",
        n=len(better),
        n_unit="prompts",
        unit="tokens/step",
        how=how,
        evidence={
            "definition": DEFINITION,
            "acceptance_length": lengths,
            "acceptance_rate": shares,
            "acceptance_by_position": positions,
            "steps_by_tokens_emitted": emitted_histogram(sides["other"]),
            "more_on": counts[0],
            "fewer_on": counts[1],
        },
        records=records,
    )
    told = [
        f"position {number}: {_share(one['recipe'])} against {_share(one['other'])}" + _difference(one)
        for number, one in enumerate(positions[:_SHOWN_POSITIONS], start=1)
    ]
    told.append(
        f"more tokens a step than OTHER on {counts[0]} of {len(better)} prompts, fewer on {counts[1]}"
    )
    return replace(check, details=tuple(told))


def _tokens(answer: Answer) -> float:
    return float(len(answer.tokens))


def _steps(answer: Answer) -> float:
    return float(len(answer.emitted))


def _length(answer: Answer) -> float:
    return _tokens(answer) / max(_steps(answer), 1.0)


def _positions(sides: Mapping[str, Sequence[Answer]]) -> list[dict[str, Any]]:
    """For each position the steps and acceptance of both sides, and the difference with its interval."""
    found = []
    for position in range(1, MOST_POSITIONS + 1):
        one: dict[str, Any] = {"position": position}
        for side, answers in sides.items():
            passed, tried = (
                sum(column) for column in zip(*(reached_position(a, position) for a in answers), strict=True)
            )
            one[side] = {"steps": int(tried), "accepted": passed / tried if tried else None}
        if not any(one[side]["steps"] for side in sides):
            break
        if all(one[side]["steps"] for side in sides):

            def top(answer: Answer, position: int = position) -> float:
                return reached_position(answer, position)[0]

            def bottom(answer: Answer, position: int = position) -> float:
                return reached_position(answer, position)[1]

            value, interval = _paired(sides, top, bottom, (0.0, 1.0))
            one |= {"difference": value, "interval": list(interval)}
        found.append(one)
    return found


def _paired(
    sides: Mapping[str, Sequence[Answer]],
    top: Callable[[Answer], float],
    bottom: Callable[[Answer], float],
    limits: Interval,
) -> tuple[float, Interval]:
    """sum(top) / sum(bottom) of ENGINE minus that of OTHER; prompts are resampled in pairs."""
    mine, other = (
        ([top(answer) for answer in answers], [bottom(answer) for answer in answers])
        for answers in sides.values()
    )
    return gap_of_ratios(mine, other, limits=limits)


def _share(one: Mapping[str, Any]) -> str:
    return "not drafted" if one["accepted"] is None else f"{one['accepted']:.1%} of {one['steps']} steps"


def _difference(one: Mapping[str, Any]) -> str:
    if "difference" not in one:
        return ""
    low, high = one["interval"]
    if not math.isfinite(low):
        return ""
    return f", difference {one['difference']:+.1%} (95 % interval {low:+.1%} to {high:+.1%})"


# --------------------------------------------------------------------------- judges of the baseline


def against_other(checks: Sequence[Check]) -> list[Check]:
    """``checks`` of ENGINE against OTHER, made by judges that know the other side as the 16-bit baseline:
    named ``vs_other.NAME``, and OTHER called OTHER. Their records hold the judge's own, see
    :func:`inner_records`."""
    wrapped: dict[int, Records] = {}
    found = []
    for check in checks:
        records = check.records
        if records is not None:
            inner = {"judge": records.judge, "arguments": dict(records.arguments)}
            records = wrapped.setdefault(id(records), Records("against_other", inner, records.tables))
        found.append(
            replace(
                check,
                name=VS + check.name,
                summary=_reworded(check.summary),
                how=_reworded(check.how),
                warnings=tuple(map(_reworded, check.warnings)),
                records=records,
            )
        )
    return found


def inner_records(records: Records) -> Records:
    """What :func:`against_other` wrapped."""
    return Records(str(records.arguments["judge"]), records.arguments["arguments"], records.tables)


_WORDS = (
    (re.compile(r"\bthe (16-bit )?baseline\b"), "OTHER"),
    (re.compile(r"\b(16-bit )?baseline\b"), "OTHER"),
    (re.compile(r"\|\| target\b"), "|| ENGINE"),
)


def _reworded(text: str) -> str:
    for pattern, word in _WORDS:
        text = pattern.sub(word, text)
    return text
