"""The proof of losslessness: the same weights, KV format and drafts in float64, where rounding is nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from trtspec.artifact import Artifact
from trtspec.available_memory import available_memory_bytes
from trtspec.backends import open_engine
from trtspec.engine import Engine
from trtspec.prompts import Prompt
from trtspec.recipe import NoSpeculation
from trtspec.recipe_facts import fidelity
from trtspec.ruler import Answer, OnProgress, acceptance_within, max_draft, stage_of
from trtspec.text import Tokenizer
from trtspec.verify.lossless import Identity, check_lossless
from trtspec.verify.near_misses import Drafts
from trtspec.verify.settings import Settings

LOSSLESS = {"strict": "lossless", "approximate": "greedy"}
"""The check of greedy answers by what the recipe's acceptance does when sampling: an approximate one accepts
greedy requests exactly, and is lossless in nothing else."""


def why_no_exact_run(built: Artifact) -> str | None:
    """Why identity is not checked again in float64, "" if there is no need to; None if it is."""
    recipe = built.recipe
    if isinstance(recipe.speculation, NoSpeculation) or recipe.backend.dtype == "float64":
        return ""
    weights = sum(path.stat().st_size for path in built.baseline_dir.glob("*.safetensors"))
    available = available_memory_bytes()
    if available is not None and 2 * 4 * weights > available // 2:  # two engines, 16 bit to 64 bit
        return (
            f"two copies of the weights in float64 ({8 * weights / 1e9:.0f} GB) do not fit this machine; a "
            f"machine with {16 * weights / 1e9:.0f} GB of free memory could prove more"
        )
    return None


def liveliest(prompts: Sequence[Prompt], answers: Sequence[Answer], settings: Settings) -> list[Prompt]:
    """The prompts to compare in float64: those with most drafts for the tokens that must be computed."""
    drafted = {answer.request_id: acceptance_within(answer, settings.exact_tokens)[0] for answer in answers}
    ranked = sorted(
        prompts,
        key=lambda prompt: (1 + drafted[prompt.id]) / (len(prompt.tokens) + 3 * settings.exact_tokens),
        reverse=True,
    )
    return ranked[: settings.exact_prompts]


def exact_run(
    built: Artifact,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    settings: Settings,
    on_progress: OnProgress,
    prefix: str = "",
) -> Identity:
    """Identity in float64, where rounding excuses nothing, with near misses among the drafts.
    ``prefix``: of the check's name."""
    recipe = built.recipe
    limits = recipe.limits.model_copy(update={"max_batch_size": len(prompts), "kv_cache_bytes": None})
    small = replace(built, recipe=recipe.model_copy(update={"limits": limits}))
    name = f"{prefix}{LOSSLESS[fidelity(recipe)]}_float64"
    progress = stage_of(on_progress, f"{name}: the same in float64, with near misses as drafts")
    with contextlib.ExitStack() as stack:
        plain, speculative = (
            stack.enter_context(contextlib.closing(open_engine(small, variant, dtype="float64")))
            for variant in ("no_speculation", "recipe")
        )
        return check_lossless(
            speculative,
            plain,
            prompts,
            max_new_tokens=min(settings.exact_tokens, settings.max_new_tokens),
            stop_tokens=tokenizer.eos_token_ids,
            draft_limit=max_draft(recipe.speculation),
            dtype="float64",
            speculates=True,
            required=recipe.gates.lossless,
            name=name,
            floor_prompts=0,
            noise_texts=0,
            offer=offer_of(speculative),
            spell=speller(tokenizer),
            on_progress=progress,
        )


def speller(tokenizer: Tokenizer) -> Callable[[int], str]:
    return lambda token: tokenizer.decode([token], skip_special_tokens=False)


def offer_of(engine: Engine) -> Callable[[Drafts], contextlib.AbstractContextManager[None]]:
    """How to make ``engine`` draft by a plan."""

    def offer(drafts: Drafts) -> contextlib.AbstractContextManager[None]:
        from trtspec.embedded.drafters.planned import drafting_by_plan

        return drafting_by_plan(engine, drafts)

    return offer
