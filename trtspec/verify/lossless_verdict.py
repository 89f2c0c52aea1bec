"""The verdict on losslessness, over what :mod:`trtspec.verify.lossless` measured.

In exact arithmetic (float64, float32) any difference is a FAIL, and a PASS needs drafts that were refused,
near misses among them.

In 16 bit, the usual noise is a quantile, the value that 95 % of the places do not exceed: a maximum grows
with the number of places and one outlier would excuse everything. A divergence whose gap is within the
usual noise, or within that measured at its own place, is a *near tie*. One far beyond the largest noise
seen anywhere is a FAIL. Between the two nothing is decided.

Near ties show no fault, and no more: a careless acceptance also diverges at near ties, so this check cannot
see a loss below the noise. Where the usual noise is above :data:`POWER_NATS` (an 8-bit KV cache alone, whose
codes flip when their input moves by a rounding error, moves a small model's log-probabilities by tenths of
a nat) it is therefore INCONCLUSIVE when answers differ, and the verdict rests on the run in float64.

*Numeric ties only* also means no more of them than the engine without speculation shows against itself
(Fisher's exact test over answers, one-sided, :data:`FLOOR_ALPHA`): a fault that changes nothing but near ties
has each of them excused, and not their number. More than that is left to the proof, or FAIL without one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from trtspec.stats import rate_interval, rate_upper_bound, scipy
from trtspec.verify.gates import Check, Verdict
from trtspec.verify.near_misses import NEAR_NATS, Refusals

TIES_ALLOWED = ("bfloat16", "float16")
POWER_NATS = 0.1
"""Usual noise up to which near ties in 16 bit still show something: 10 % in probability."""
MIN_NEAR = 12
"""Refused near misses that the proof needs: an acceptance that keeps every fourth of them is then caught
with 97 %."""
FLOOR_ALPHA = 0.01
"""Chance to find more ties than the floor has where there are no more."""
_SHOWN, _SHOWN_OF_FLOOR = 5, 3
FAULT = 3
"""Times the largest noise measured. A divergence is where rounding was largest among all places of all texts,
along the run's own mix of passes, and noise is measured at fewer places: a little above is no fault yet."""


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
    reference_text: str | None = None
    """Of ``reference_token``; None where one text ended."""
    other_text: str | None = None


@dataclass(frozen=True)
class Comparison:
    """Two runs of the same prompts. ``positions``: token decisions that were compared, up to and
    including each first divergence."""

    positions: int
    prompts: int
    divergences: tuple[Divergence, ...]


@dataclass(frozen=True)
class Noise:
    """What changing only the number of tokens that a pass computes does to scores."""

    usual_nats: float
    """95 % of the differences do not exceed it."""
    nats: float
    """Largest difference found."""
    rms_nats: float
    """Root mean square of all differences."""
    positions: int
    by_rows: dict[str, float]
    """The largest difference for each number of rows, against one pass over the text."""


def is_tie(divergence: Divergence, noise: Noise) -> bool:
    """Whether rounding of the usual size, or as measured at this very place, explains a divergence."""
    allowed = max(noise.usual_nats, divergence.local_noise_nats or 0.0)
    return divergence.gap_nats is not None and divergence.gap_nats <= allowed


def is_fault(divergence: Divergence, noise: Noise) -> bool:
    """Whether no rounding of the size seen anywhere explains a divergence. A text that simply ends is
    always a fault."""
    return divergence.gap_nats is None or divergence.gap_nats > FAULT * max(
        noise.nats, divergence.local_noise_nats or 0.0
    )


def _is_inside(divergence: Divergence, noise: Noise) -> bool:
    """Whether rounding of the size seen anywhere explains a divergence. Where nothing is drafted that is all
    that is asked: no loss can hide behind it."""
    allowed = max(noise.nats, divergence.local_noise_nats or 0.0)
    return divergence.gap_nats is not None and divergence.gap_nats <= allowed


@dataclass(frozen=True)
class NearMissRun:
    """The run whose drafts hold near misses, against the same reference."""

    comparison: Comparison
    refusals: Refusals


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
    near: NearMissRun | None = None,
    proof: str | None = None,
    against: str | None = None,
) -> Check:
    """The verdict over what was measured. ``comparison`` and ``floor`` are already located.

    ``near`` None: no near misses were offered. ``proof``: the check in exact arithmetic that decides where
    this one cannot; None: there is none, so this one must decide by itself. ``against``: how the other side
    ran, where that is neither without speculation nor at batch 1.
    """
    rounds = dtype in TIES_ALLOWED
    against = against or ("without speculation" if speculates else "at batch 1")
    different = len(comparison.divergences)
    upper = rate_upper_bound(different, comparison.positions)
    faults = [one for one in comparison.divergences if not rounds or is_fault(one, noise)]
    batch_faults = [one for one in floor.divergences if not rounds or is_fault(one, noise)]
    explained = is_tie if speculates else _is_inside
    doubtful = [one for one in comparison.divergences if not explained(one, noise)]
    by_chance = _more_than(comparison, floor) if rounds and speculates else None
    too_many = by_chance is not None and by_chance < FLOOR_ALPHA
    scope = f"{comparison.prompts} answers ({comparison.positions} tokens)"
    measured_as: Literal[
        "identical", "numeric ties only", "beyond the usual noise", "more ties than the floor", "different"
    ] = "identical"
    if faults:
        verdict, measured_as = Verdict.FAIL, "different"
        summary = (
            f"{len(faults)} of {comparison.prompts} answers differ from the same weights {against}: "
            + _describe(faults[0])
            + (
                f"; the largest rounding difference measured is {_nats(noise.nats)}"
                if rounds
                else f"; in {dtype} no difference counts as rounding"
            )
        )
        if near is not None and near.refusals.kept:
            summary += f"; {near.refusals.kept} of {near.refusals.offered} second choices were kept as drafts"
    elif near is not None and near.comparison.divergences:
        verdict, measured_as = Verdict.FAIL, "different"
        wrong = near.comparison.divergences
        summary = (
            "drafts are kept that should be refused: with the target's second choice as draft "
            f"{len(wrong)} of {near.comparison.prompts} answers differ from the same weights {against}: "
            f"{_describe(wrong[0])}"
        )
    elif contradictions:
        verdict = Verdict.ERROR
        summary = f"the engine's counts contradict its outputs: {contradictions[0]}"
    elif batch_faults:
        verdict, measured_as = Verdict.FAIL, "different"
        summary = "without speculation, batching alone changes answers: " + _describe(batch_faults[0])
    elif speculates and drafted == 0:
        verdict = Verdict.INCONCLUSIVE
        summary = (
            f"identical in {scope}, but nothing was drafted, so this shows nothing; use prompts on which the "
            "drafter finds something (--prompts), or longer answers (--max-new-tokens)"
        )
    elif near is not None and (few := _too_few(near.refusals)):
        verdict = Verdict.INCONCLUSIVE
        summary = (
            f"identical in {scope}, but {few}: more (--exact-prompts) or longer (--exact-tokens) answers "
            "would decide"
        )
    elif different:
        verdict, measured_as = Verdict.PASS, "beyond the usual noise" if doubtful else "numeric ties only"
        if too_many:
            measured_as = "more ties than the floor"
        blind = speculates and noise.usual_nats > POWER_NATS
        if blind or doubtful or (too_many and proof is not None):
            verdict, required = Verdict.INCONCLUSIVE, required and proof is None
        elif too_many:
            verdict = Verdict.FAIL
        summary = _ties(comparison, noise, doubtful, against, proof, blind)
        if verdict is Verdict.PASS:
            summary = f"numeric ties only: {summary}"
        elif too_many:
            summary += (
                f"; more of them than without speculation between batch 1 and {comparison.prompts} prompts "
                f"together, {len(floor.divergences)} of {floor.prompts} (by chance: p = {by_chance:.2g})"
            )
    else:
        verdict = Verdict.PASS
        summary = f"identical to the same weights {against} in {scope}"
    if verdict in (Verdict.PASS, Verdict.INCONCLUSIVE) and speculates and drafted and not different:
        summary += f"; its own drafts: {drafted} tokens, {drafted - accepted} of them refused"
        if near is not None:
            summary += f"; {_shown(near.refusals)}"
    warnings: tuple[str, ...] = ()
    if speculates and drafted and not accepted:
        warnings = (f"none of {drafted} drafted tokens was accepted: only refusing was exercised",)
    how = f"greedy, {dtype}; compared token by token, lengths included, up to the first divergence"
    if near is not None:
        how += (
            "; then again with drafts that follow the known answer and hold the second most likely token "
            "where the two are closest"
        )
    if noise.positions:
        how += (
            "; gaps scored in one pass by the engine without speculation; noise: the same texts scored with "
            f"{', '.join(noise.by_rows)} tokens a pass against all in one pass, usual: the 95 % quantile"
        )
    floor_low, floor_high = rate_interval(len(floor.divergences), max(floor.positions, 1))
    return Check(
        name=name,
        verdict=verdict,
        summary=summary,
        required=required,
        measured=float(different),
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
                "more_than_it_by_chance": by_chance,
            },
            "drafted": drafted,
            "accepted": accepted,
            "rejected": drafted - accepted,
            "near_misses": None if near is None else _near_evidence(near),
            "contradictions": list(contradictions),
        },
        details=_details(comparison, noise, floor, upper, rounds=rounds, speculates=speculates),
    )


def _more_than(comparison: Comparison, floor: Comparison) -> float | None:
    """The chance of so many different answers if they were no more often than in ``floor``; None where that
    was not measured."""
    if not floor.prompts or not comparison.divergences:
        return None
    table = [[len(one.divergences), one.prompts - len(one.divergences)] for one in (comparison, floor)]
    return float(scipy("stats").fisher_exact(table, alternative="greater").pvalue)


def _details(
    comparison: Comparison,
    noise: Noise,
    floor: Comparison,
    upper: float,
    *,
    rounds: bool,
    speculates: bool,
) -> tuple[str, ...]:
    """Every divergence (the first few), the bound on their rate, and what batching alone does."""
    lines = _listed(comparison, noise, rounds, _SHOWN)
    if comparison.positions:
        below = f"{_up(upper):.3g}" if upper < 0.001 else f"{100 * _up(upper):.3g}%"
        rule = " (less than 3/n)" if not comparison.divergences else ""
        lines.append(
            f"mismatch rate: {len(comparison.divergences)} of {comparison.positions} compared tokens, below "
            f"{below} with 95 % confidence{rule}"
        )
    if speculates and floor.prompts:
        lines.append(
            f"without speculation, batch 1 against all {comparison.prompts} prompts together: "
            f"{len(floor.divergences)} of {floor.prompts} answers differ ({floor.positions} tokens)"
        )
        lines += [f"there, {line}" for line in _listed(floor, noise, rounds, _SHOWN_OF_FLOOR)]
    return tuple(lines)


def _up(value: float) -> float:
    """An upper bound to three figures, rounded up."""
    step = 10.0 ** (math.floor(math.log10(value)) - 2) if value > 0 else 1.0
    return min(1.0, math.ceil(value / step - 1e-9) * step)


def _listed(comparison: Comparison, noise: Noise, rounds: bool, most: int) -> list[str]:
    """Those that decide first: beyond the noise, then near ties, each kind in the order of its prompts."""
    weight = {
        id(one): 0 if is_fault(one, noise) else 2 if is_tie(one, noise) else 1
        for one in comparison.divergences
    }
    ordered = sorted(comparison.divergences, key=lambda one: weight[id(one)])
    shown = [_place(divergence, noise, rounds) for divergence in ordered[:most]]
    if (more := len(comparison.divergences) - most) > 0:
        shown.append(f"and {more} more, all of them in the JSON report")
    return shown


def _place(divergence: Divergence, noise: Noise, rounds: bool) -> str:
    """``chat-1, token 3: ' x' instead of ' y', top-2 margin 0.031, gap 0.031: near tie`` (in nats)"""
    text = f"{divergence.prompt_id}, token {divergence.position}: {_tokens(divergence)}"
    if divergence.margin is not None and divergence.gap_nats is not None:
        text += f", top-2 margin {divergence.margin:.2g}, gap {divergence.gap_nats:.2g}"
    if not rounds or is_fault(divergence, noise):
        return text
    return text + (": near tie" if is_tie(divergence, noise) else ": above the usual noise")


def _ties(
    comparison: Comparison,
    noise: Noise,
    doubtful: Sequence[Divergence],
    against: str,
    proof: str | None,
    blind: bool,
) -> str:
    """What differs, how near the ties were, and what that is worth. ``blind``: the noise is so large that a
    loss could hide in it."""
    count = len(comparison.divergences)
    largest = max(divergence.gap_nats or 0.0 for divergence in comparison.divergences)
    local = max(divergence.local_noise_nats or 0.0 for divergence in comparison.divergences)
    text = f"{count} of {comparison.prompts} answers differ from the run {against}, "
    if doubtful:
        text += (
            f"{len(doubtful)} of them by somewhat more than rounding noise, first {_describe(doubtful[0])}"
        )
    else:
        text += "all at near ties within rounding noise"
    text += (
        f" (gaps between the two tokens up to {_nats(largest)}; rounding alone moves scores by up to "
        f"{noise.usual_nats:.2g} at 95 % of the places, up to {max(noise.nats, local):.2g} anywhere"
    )
    text += ")"
    if blind or doubtful:
        text += f"; a loss smaller than {_nats(max(noise.usual_nats, largest))} cannot be seen here"
        text += f": the proof is {proof}" if proof else ", and no run in float64 could prove more"
    return text


def _nats(value: float) -> str:
    return f"{value:.2g} nat{'' if value <= 1 else 's'}"


def _too_few(found: Refusals) -> str:
    if found.near >= MIN_NEAR:
        return ""
    return (
        f"only {found.near} near misses (second choices within {NEAR_NATS} nat of the best token) were "
        f"offered and refused, {MIN_NEAR} are needed"
    )


def _shown(found: Refusals) -> str:
    return (
        f"the target's second choice as draft: {len(found.gaps_nats)} of {found.offered} refused, "
        f"{found.near} of them near misses (within {NEAR_NATS} nat of the best token)"
    )


def _near_evidence(near: NearMissRun) -> dict[str, object]:
    found = near.refusals
    return {
        "answers": near.comparison.prompts,
        "offered": found.offered,
        "refused": len(found.gaps_nats),
        "refused_within_nats": {
            str(nats): sum(gap <= nats for gap in found.gaps_nats) for nats in (0.01, 0.1, NEAR_NATS, 1.0)
        },
        "smallest_gap_refused_nats": found.gaps_nats[0] if found.gaps_nats else None,
        "kept_rate_upper_95": rate_upper_bound(found.kept, found.offered),
        "divergences": [asdict(divergence) for divergence in near.comparison.divergences],
    }


def _describe(divergence: Divergence) -> str:
    place = f"prompt {divergence.prompt_id}, token {divergence.position}"
    gap = "" if divergence.gap_nats is None else f", {_nats(divergence.gap_nats)} below the best token"
    if divergence.local_noise_nats is not None:
        gap += f" (rounding at this place: {divergence.local_noise_nats:.3g})"
    return f"{place}: {_tokens(divergence)}{gap}"


def _tokens(divergence: Divergence) -> str:
    if divergence.other_token is None:
        return "ends early"
    if divergence.reference_token is None:
        return "goes on where the reference ended"
    texts = (divergence.other_text, divergence.reference_text)
    numbers = (divergence.other_token, divergence.reference_token)
    # Repeated bytes of one character look alike as text.
    known = None not in texts and texts[0] != texts[1]
    other, reference = (repr(text) for text in texts) if known else (f"token {n}" for n in numbers)
    return f"{other} instead of {reference}"
