"""How long the protocol should take, said before it begins."""

from __future__ import annotations

from collections.abc import Sequence

from trtspec.engine import Engine
from trtspec.prompts import Prompt
from trtspec.recipe import Recipe
from trtspec.recipe_facts import fidelity
from trtspec.ruler import run
from trtspec.verify.lossless import requests_for
from trtspec.verify.settings import Settings

_PARAMETERS_STEPS = 300
"""Plain steps that sampling_parameters takes."""


def about(seconds: float) -> str:
    """An estimate in words: no figure that it does not have."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def sampled_s(step_s: float, settings: Settings, recipe: Recipe) -> float:
    """Seconds of the sampled answers where a plain step takes ``step_s``: two runs in batches, with drafts
    and without, and a pass over each answer. Fitted, as the factors below."""
    answers = -(-settings.sampled_tokens // settings.max_new_tokens)
    batches = -(-answers // recipe.limits.max_batch_size)
    return step_s * (20 * batches * settings.max_new_tokens + 16 * answers)


def estimate_s(
    engines: Sequence[Engine],
    prompts: Sequence[Prompt],
    settings: Settings,
    recipe: Recipe,
    *,
    exact: bool,
    exact_of_other: bool = False,
) -> float:
    """Seconds that the protocol should take, from the time of a few steps of each engine (which also warms
    them up). ``engines``: the recipe's, the one without drafts, the baseline, OTHER or the baseline again;
    ``exact``: whether a run in float64 follows, and one of OTHER."""
    mine, without, reference, other = engines
    step_s = {}
    for engine in {id(engine): engine for engine in (without, reference)}.values():
        requests = requests_for(prompts[:1], 5, frozenset())
        run(engine, requests, draft_limit=0)
        step_s[id(engine)] = run(engine, requests, draft_limit=0).seconds / 5
    plain, baseline = step_s[id(without)], step_s[id(reference)]
    tokens = settings.max_new_tokens
    speculates, quantizes, second = mine is not without, reference is not without, other is not reference
    batches = -(-len(prompts) // recipe.limits.max_batch_size)
    alone = min(settings.floor_prompts, len(prompts)) if speculates else len(prompts)
    noise = settings.noise_texts * settings.noise_tokens * 1.3
    # The factors are fitted to the processor time of each stage on two cores with SmolLM2-135M.
    seconds = 1.75 * plain * (batches * tokens * 4 * (1 + speculates) + alone * tokens + noise)
    if quantizes:
        seconds += settings.quality_tokens / 4.4 * (plain + baseline) / 2
        # The baseline's answers, for degenerate_text.
        seconds += 1.75 * baseline * batches * tokens * 4
    elif second:
        seconds += 1.75 * plain * batches * tokens * 4
    runs = settings.rounds * min(settings.race_prompts, len(prompts)) * min(settings.race_tokens, tokens)
    if speculates:
        # The race, and its requests once more, timed step by step.
        seconds += 1.3 * (runs + 2 * runs / settings.rounds) * plain * 2
        seconds += _PARAMETERS_STEPS * plain
        needed, most = sampled_s(plain, settings, recipe), settings.sampled_seconds
        if settings.sampled and fidelity(recipe) == "strict" and (most is None or needed <= most):
            seconds += needed
    if quantizes or second:
        seconds += 1.3 * runs * (baseline + (0 if speculates else plain))
    if exact or exact_of_other:
        chosen = min(settings.exact_prompts, len(prompts))
        length = sum(len(prompt.tokens) for prompt in prompts) / len(prompts)
        new = min(settings.exact_tokens, tokens)
        # Three passes over prompts and answers, and the steps of two and a half runs.
        once = plain * (3 * 0.55 * chosen * (length + new) + 2.5 * new * 2.5 * chosen)
        seconds += once * (exact + exact_of_other)
    return seconds
