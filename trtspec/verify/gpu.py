"""The acceptance protocol of an engine that TensorRT-LLM runs.

What the protocol of :mod:`trtspec.verify.protocol` rests on is not there: no scores, so a difference at 16
bit cannot be told from rounding and perplexity is unknown; no float64; no drafts by a plan. Each is SKIPPED
with the reason, or INCONCLUSIVE, and a gate that rests on it is then not passed. One engine takes the GPU's
memory, so the variants run one after another, and speeds are not interleaved.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from trtspec.artifact import Artifact
from trtspec.backends import Variant, open_engine
from trtspec.doctor import read_nvidia_smi
from trtspec.engine import Completion, Engine, generate
from trtspec.errors import MissingError
from trtspec.probes import collect
from trtspec.prompts import Prompt
from trtspec.recipe import NoSpeculation, Recipe
from trtspec.recipe_facts import fidelity
from trtspec.ruler import OnProgress, max_draft
from trtspec.stats import ratio_of_sums, times_faster
from trtspec.trtllm.opening import installed
from trtspec.verify.blackbox import draw_answers, judge_blackbox, planned_answers
from trtspec.verify.gates import Check, Verdict, gated, skipped
from trtspec.verify.labels import recipe_labels
from trtspec.verify.load import DEFINITION, acceptance_gate
from trtspec.verify.lossless import requests_for
from trtspec.verify.records import Records, Row, rows_of
from trtspec.verify.settings import Settings

ELSEWHERE = (
    "quality and losslessness belong to weights and drafter, not to the GPU: verify the recipe of "
    "trtspec migrate RECIPE --to embedded"
)


@dataclass(frozen=True)
class Measured:
    """What one variant did. ``seconds[prompt][round]`` of answers of equal length, one at a time."""

    together: tuple[Completion, ...]
    alone: tuple[Completion, ...]
    """The first prompts of ``together``, one by one."""
    seconds: tuple[tuple[float, ...], ...]
    tokens: int
    """Tokens of each of these timed answers."""
    drafted: int | None = None
    """Drafted for ``together``, as the engine counts them over all requests."""


_BIAS, _DRAWN_PROMPTS = 0.1, 2
"""What the black-box comparison of sampled answers is planned on."""


@dataclass
class _Found:
    measured: dict[Variant, Measured] = field(default_factory=dict)
    drawn: dict[Variant, dict[str, list[list[int]]]] = field(default_factory=dict)
    """Sampled answers by prompt."""
    missing: dict[Variant, str] = field(default_factory=dict)
    """Variant -> why it cannot be run."""


def check_gpu(
    built: Artifact,
    prompts: Sequence[Prompt],
    stop_tokens: frozenset[int],
    settings: Settings,
    on_progress: OnProgress,
    *,
    lossless: str,
) -> list[Check]:
    """All checks of ``built``; ``lossless``: the name of the check of greedy answers.

    Raises MissingError where TensorRT-LLM cannot run the recipe itself.
    """
    recipe = built.recipe
    speculates = not isinstance(recipe.speculation, NoSpeculation)
    quantizes = recipe.quantization.kind != "none" or recipe.quantization.kv_cache != "none"
    found = _Found()
    variants: list[Variant] = ["recipe"]
    variants += ["no_speculation"] if speculates else []
    variants += ["baseline"] if quantizes else []
    undrawn = _undrawn(recipe, settings) if speculates else ""
    planned = planned_answers(_BIAS, _DRAWN_PROMPTS)
    for number, variant in enumerate(variants):
        on_progress(f"TensorRT-LLM: {variant}", number, len(variants))
        try:
            engine = open_engine(built, variant)
        except MissingError as error:
            if variant == "recipe":
                raise
            found.missing[variant] = str(error)
            continue
        with closing(engine):
            found.measured[variant] = _measure(engine, prompts, stop_tokens, settings)
            if speculates and not undrawn and variant != "baseline":
                side = int(variant == "recipe")
                drawn = draw_answers(engine, prompts[:_DRAWN_PROMPTS], side=side, answers=planned)
                found.drawn[variant] = drawn
    gates, draft_limit = recipe.gates, max_draft(recipe.speculation)
    checks = [_lossless(found, lossless, speculates=speculates, required=gates.lossless)]
    if fidelity(recipe) == "approximate":
        reason = f"what approximate acceptance samples is judged by scores, which are not there; {ELSEWHERE}"
        checks.append(skipped("approximate", reason, True))
    if speculates:
        reason = "TensorRT-LLM does not compute in float64"
        checks.append(skipped(f"{lossless}_float64", reason, False))
        missing = undrawn or found.missing.get("no_speculation", "")
        checks.append(
            skipped("sampled", missing, False)
            if missing
            else judge_blackbox(
                reference=found.drawn["no_speculation"],
                drafted=found.drawn["recipe"],
                planned=planned,
                bias=_BIAS,
                required=gates.lossless,
            )
        )
    checks.append(_quality(quantizes=quantizes, required=gates.max_perplexity_ratio is not None))
    if speculates:
        mine, bound = found.measured["recipe"], gates.min_acceptance_length
        drafted = mine.drafted
        checks.append(
            check_acceptance(mine.together, draft_limit=draft_limit, bound=bound, all_drafted=drafted)
        )
    else:
        reason = "the recipe does not speculate"
        checks.append(skipped("acceptance", reason, gates.min_acceptance_length is not None))
    over: Variant = "baseline" if quantizes else "no_speculation"
    checks.append(_speed(found, "speedup", "no_speculation", gates.min_speedup))
    if quantizes or gates.min_speedup_over_baseline is not None:
        checks.append(_speed(found, "speedup_over_baseline", over, gates.min_speedup_over_baseline))
    return checks


def _undrawn(recipe: Recipe, settings: Settings) -> str:
    """Why sampled answers are not compared with and without drafts; "" if they are."""
    told = next(one for one in recipe_labels(recipe) if one.mode == "sampled")
    if told.fidelity == "approximate":
        return f"sampled output is approximate: {told.because}"
    if not settings.sampled:
        return "not asked for (--no-sampled)"
    if settings.sampled_seconds is not None:
        answers = planned_answers(_BIAS, _DRAWN_PROMPTS)
        return f"a quick run has no time for {2 * answers} answers with and without drafts; --sampled runs it"
    return ""


def gpu_record() -> tuple[dict[str, str], dict[str, str]]:
    """What a report says of this machine beside processor and Python packages: (tools, machine)."""
    gpus, driver, _ = read_nvidia_smi(collect().nvidia_smi)
    names = [gpu.name for gpu in gpus]
    told = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    tools = {"tensorrt_llm": installed()}
    return tools | ({"nvidia_driver": driver} if driver else {}), {"gpus": told or "none seen"}


def _measure(
    engine: Engine, prompts: Sequence[Prompt], stop_tokens: frozenset[int], settings: Settings
) -> Measured:
    requests = requests_for(prompts, settings.max_new_tokens, stop_tokens)
    before = engine.stats().drafted_tokens
    together = generate(engine, requests)  # also the warm-up
    after = engine.stats().drafted_tokens
    drafted = None if before is None or after is None else after - before
    alone = [generate(engine, [request])[0] for request in requests[: settings.floor_prompts]]
    tokens = min(settings.race_tokens, settings.max_new_tokens)
    # No stop tokens: each answer has exactly as many tokens, whatever the variant.
    raced = requests_for(prompts[: settings.race_prompts], tokens, frozenset())
    seconds: list[list[float]] = [[] for _ in raced]
    for _ in range(settings.rounds):
        for number, request in enumerate(raced):
            began = time.perf_counter()
            answer = generate(engine, [request])[0]
            seconds[number].append(time.perf_counter() - began)
            if len(answer.tokens) != tokens:
                found = f"{len(answer.tokens)} tokens where {tokens} were asked for without a stop token"
                raise MissingError(f"TensorRT-LLM ended a timed answer otherwise: {found}")
    return Measured(tuple(together), tuple(alone), tuple(map(tuple, seconds)), tokens, drafted)


# --------------------------------------------------------------------------- checks


def _lossless(found: _Found, name: str, *, speculates: bool, required: bool) -> Check:
    mine = found.measured["recipe"]
    if not speculates:
        return check_same(name, mine.alone, mine.together, None, drafts=None, required=required)
    plain = found.measured.get("no_speculation")
    if plain is None:
        reason = f"not compared: {found.missing['no_speculation']}"
        return skipped(name, reason, required)
    floor = (plain.alone, plain.together)
    accepted = [one.accepted for one in mine.together]
    drafts = None if None in accepted else sum(count for count in accepted if count)
    return check_same(name, plain.together, mine.together, floor, drafts=drafts, required=required)


def check_same(
    name: str,
    reference: Sequence[Completion],
    other: Sequence[Completion],
    floor: tuple[Sequence[Completion], Sequence[Completion]] | None,
    *,
    drafts: int | None,
    required: bool,
) -> Check:
    """Whether greedy answers are equal, token by token.

    ``floor``: answers without speculation at batch 1 and in a batch; None: the recipe does not speculate, and
    these are what is compared. ``drafts``: accepted drafted tokens; None: not known.
    """
    pairs = list(zip(reference, other, strict=False))  # batch 1 has fewer
    different = sum(left.tokens != right.tokens for left, right in pairs)
    tokens = sum(len(left.tokens) for left, _ in pairs)
    against = "without speculation" if floor else "at batch 1"
    scope = f"{len(pairs)} answers ({tokens} tokens)"
    evidence: dict[str, Any] = {"answers": len(pairs), "different": different, "accepted": drafts}
    if floor is not None:
        evidence["different_by_batch"] = sum(a.tokens != b.tokens for a, b in zip(*floor, strict=False))
    verdict = Verdict.INCONCLUSIVE
    if different:
        batch = ""
        if floor is not None:
            counted = f"{evidence['different_by_batch']} of {min(map(len, floor))}"
            batch = f"; without speculation, a batch and batch 1 differ in {counted}"
        summary = (
            f"{different} of {len(pairs)} answers differ from the same weights {against}{batch}. "
            f"TensorRT-LLM gives no scores, so rounding at near ties cannot be told from a fault: {ELSEWHERE}"
        )
    elif floor is not None and not drafts:
        told = "TensorRT-LLM does not tell what was accepted" if drafts is None else "no draft was accepted"
        summary = f"identical in {scope}, but {told}, so this shows little; use longer answers or --prompts"
    else:
        verdict = Verdict.PASS
        summary = f"identical to the same weights {against} in {scope}"
        if drafts:
            summary += f"; {drafts} drafted tokens accepted"
    how = "greedy, token by token; the variants one after another on the same GPU"
    records = Records(
        "gpu_same",
        {"name": name, "drafts": drafts, "required": required, "floor": floor is not None},
        {
            "reference": rows_of(reference),
            "other": rows_of(other),
            "floor_batch_1": rows_of(floor[0] if floor else ()),
            "floor_batch": rows_of(floor[1] if floor else ()),
        },
    )
    return Check(
        name,
        verdict,
        summary,
        required,
        n=len(pairs),
        n_unit="prompts",
        how=how,
        evidence=evidence,
        records=records,
    )


def completions_from(rows: Sequence[Row]) -> list[Completion]:
    """The answers whose :func:`~trtspec.verify.records.rows_of` these are."""
    return [Completion(**{**row, "tokens": tuple(row["tokens"])}) for row in rows]


def _quality(*, quantizes: bool, required: bool) -> Check:
    if not quantizes:
        return skipped("quality", "nothing is quantized: the target is the 16-bit baseline", False)
    reason = f"perplexity needs scores, which TensorRT-LLM does not give here; {ELSEWHERE}"
    return skipped("quality", reason, required)


def check_acceptance(
    answers: Sequence[Completion],
    *,
    draft_limit: int | None,
    bound: float | None,
    all_drafted: int | None = None,
) -> Check:
    """Acceptance length by TensorRT-LLM's own counts of each request. ``all_drafted``: what the engine
    drafted for all of them, for the rate where requests do not tell. SKIPPED where it does not count steps,
    ERROR where its counts are impossible or those of a verification that accepts everything."""
    how = f"{DEFINITION}; greedy, TensorRT-LLM's counts of requests (decoding_iter); 95 % bootstrap over them"
    known = [(one, one.steps) for one in answers if one.steps]
    if len(known) < len(answers):
        reason = (
            f"TensorRT-LLM did not tell the steps of {len(answers) - len(known)} of {len(answers)} requests"
        )
        return skipped("acceptance", reason, bound is not None)
    tokens = [float(len(one.tokens)) for one, _ in known]
    length, interval = ratio_of_sums(
        tokens,
        [float(steps) for _, steps in known],
        limits=(1.0, math.inf if draft_limit is None else draft_limit + 1.0),
    )
    drafted = [one.drafted for one in answers if one.drafted is not None]
    accepted = [one.accepted for one in answers if one.accepted is not None]
    all_told = len(drafted) == len(accepted) == len(answers)
    num_drafted, num_accepted = sum(drafted), sum(accepted)
    rate = "drafted tokens not told by this version"
    if all_told:
        rate = f"{num_accepted} of {num_drafted} drafted tokens accepted"
    elif all_drafted is not None and len(accepted) == len(answers):
        rate = f"{num_accepted} of {all_drafted} drafted tokens accepted, drafts by iteration statistics"
    evidence: dict[str, Any] = {
        "definition": DEFINITION,
        "acceptance_length": length,
        "acceptance_rate": num_accepted / num_drafted if all_told and num_drafted else None,
        "drafted": num_drafted if all_told else None,
        "drafted_by_iterations": None if all_told else all_drafted,
        "accepted": num_accepted if len(accepted) == len(answers) else None,
        "decode_steps": sum(steps for _, steps in known),
    }
    records = Records(
        "gpu_acceptance",
        {"draft_limit": draft_limit, "bound": bound, "all_drafted": all_drafted},
        {"requests": rows_of(answers)},
    )
    problem = ""
    if length < 1.0:
        problem = f"acceptance length {length:.3f} is impossible: a step emits at least one token"
    elif draft_limit is not None and length > draft_limit + 1:
        problem = f"acceptance length {length:.3f} is impossible with {draft_limit} drafted tokens a step"
    elif all_told and num_accepted > num_drafted:
        problem = f"{num_accepted} tokens accepted of {num_drafted} drafted"
    elif all_told and num_drafted and num_accepted == num_drafted and len(answers) > 1:
        problem = f"all {num_drafted} drafted tokens accepted: a broken verification (NaN logits) does that"
    return acceptance_gate(
        problem,
        rate,
        length,
        interval,
        bound=bound,
        n=len(answers),
        how=how,
        evidence=evidence,
        records=records,
    )


def _speed(found: _Found, name: str, over: Variant, bound: float | None) -> Check:
    mine, other = found.measured["recipe"], found.measured.get(over)
    if other is None:
        reason = found.missing.get(over, "the recipe does not speculate")
        return skipped(name, reason, bound is not None)
    return check_speed(name, mine.seconds, other.seconds, tokens=(mine.tokens, other.tokens), bound=bound)


def check_speed(
    name: str,
    mine: Sequence[Sequence[float]],
    other: Sequence[Sequence[float]],
    *,
    tokens: Sequence[int],
    bound: float | None,
) -> Check:
    """Speedup from the seconds ``[prompt][round]`` of both sides, each for answers of ``tokens`` tokens."""
    ratio, interval = times_faster(mine, other)
    rates = [
        count * sum(len(row) for row in rows) / sum(sum(row) for row in rows)
        for count, rows in zip(tokens, (mine, other), strict=True)
    ]
    return gated(
        name=name,
        what=f"{rates[0]:.1f} against {rates[1]:.1f} tokens/s (batch 1, prompt included): speedup",
        measured=ratio,
        interval=interval,
        bound=bound,
        sense="at least",
        n=len(mine),
        n_unit="prompts",
        how=(
            "batch 1, greedy, through LLM() in this process; wall time of whole requests of equal length; "
            "the variants one after another, not interleaved; 95 % paired bootstrap over prompts and rounds"
        ),
        evidence={"tokens_per_s": rates, "seconds": [mine, other], "interleaved": False},
        records=Records(
            "gpu_speed",
            {"name": name, "tokens": list(tokens), "bound": bound},
            {
                "seconds": [
                    {"prompt": number, "recipe": list(ours), "other": list(theirs)}
                    for number, (ours, theirs) in enumerate(zip(mine, other, strict=True))
                ]
            },
        ),
    )
