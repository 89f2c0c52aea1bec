"""What the protocol asks of sampled answers: the law they follow, the parameters that are obeyed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from trtspec.engine import Engine
from trtspec.prompts import Prompt
from trtspec.recipe import Recipe
from trtspec.recipe_facts import fidelity
from trtspec.ruler import max_draft, run, stage_of
from trtspec.verify.duration import sampled_s
from trtspec.verify.gates import Check, skipped
from trtspec.verify.labels import check_parameters, recipe_labels
from trtspec.verify.lossless import requests_for
from trtspec.verify.sampled import check_sampled
from trtspec.verify.settings import Settings


def sampled_checks(
    engine: Engine,
    plain: Engine,
    prompts: Sequence[Prompt],
    settings: Settings,
    recipe: Recipe,
    on_progress: Callable[[str, int, int], None],
) -> list[Check]:
    """Sampled answers against the target's law, and which sampling parameters ``engine`` obeys drafting.

    ``plain``: the same weights without drafts; ``engine`` itself where the recipe does not speculate.
    """
    strict, speculates = fidelity(recipe) == "strict", engine is not plain
    if not speculates:
        return [skipped("sampled", "the recipe does not speculate", False)]
    draft_limit, required = max_draft(recipe.speculation), recipe.gates.lossless

    progress = partial(stage_of, on_progress)
    reason = ""
    if not strict:
        reason = "the acceptance is approximate: the checks of its own judge what it samples"
    elif not settings.sampled:
        reason = "not asked for (--no-sampled)"
    elif (limit := settings.sampled_seconds) is not None:
        step_s = run(plain, requests_for(prompts[:1], 4, frozenset()), draft_limit=0).seconds / 4
        seconds = sampled_s(step_s, settings, recipe)
        if seconds > limit:
            reason = f"would take about {seconds:.0f} s, more than a quick run has; --sampled runs it"
    checks = [skipped("sampled", reason, False)] if reason else []
    if not reason:
        checks = [
            check_sampled(
                engine,
                plain,
                prompts,
                tokens=settings.sampled_tokens,
                max_new_tokens=settings.max_new_tokens,
                temperature=settings.temperature,
                bias=settings.sampled_bias,
                draft_limit=draft_limit,
                dtype=recipe.backend.dtype,
                required=required,
                on_progress=progress("sampled: drawn answers against the target's law"),
            )
        ]
    parameters = check_parameters(
        engine,
        plain,
        prompts,
        draft_limit=draft_limit,
        dtype=recipe.backend.dtype,
        required=required,
        labelled=recipe_labels(recipe),
        on_progress=progress("sampling_parameters: which are honoured while drafting"),
    )
    return [*checks, parameters]
