"""The cases of the matrix, and the laws that each recommendation must keep.

:func:`broken_laws` says what a recommendation violates; ``test_recommend_laws.py`` shows that it notices.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from trtspec.errors import InconclusiveError, InputError
from trtspec.hardware import find_gpu
from trtspec.known_models import NamedModel, find_model
from trtspec.recipe_facts import SPECULATION_ON
from trtspec.recipe_file import dump_recipe, lint_content
from trtspec.recommend import Recommendation, recommend
from trtspec.recommend.write import recipe_text
from trtspec.scenario import PRESETS, load_scenario

GPUS = ("L4", "L40S", "A100-SXM", "H100-SXM", "H200", "B200")
SMALL_CARD = "RTX-4060"
MATRIX = [
    (scenario, model, gpu)
    for scenario in PRESETS
    for model, gpus in (("8B", GPUS), ("32B", GPUS), ("70B", GPUS), ("7B", (SMALL_CARD, *GPUS)))
    for gpu in gpus
]


def draft_of(model: NamedModel) -> NamedModel | None:
    return find_model(model.draft) if model.draft else None


@cache
def outcome(scenario: str, model: str, gpu: str) -> Recommendation | InputError | InconclusiveError:
    named = find_model(model)
    try:
        return recommend(load_scenario(scenario), named, find_gpu(gpu), draft=draft_of(named))
    except (InputError, InconclusiveError) as refusal:
        return refusal


def chosen(scenario: str, model: str, gpu: str) -> Recommendation:
    found = outcome(scenario, model, gpu)
    assert isinstance(found, Recommendation), found
    return found


def one_line(found: Recommendation | InputError | InconclusiveError) -> str:
    """The decision without its times, which a refit of the cost model changes."""
    if not isinstance(found, Recommendation):
        return f"exit {found.exit_code}: {str(found).splitlines()[-1]}"
    recipe = found.recipe
    s = recipe.speculation
    drafting = s.kind
    if s.kind != "none":
        drafting += f" K={getattr(s, 'num_draft_tokens', '?')}"
        if getattr(s, "max_concurrency", None):
            drafting += f" up to {s.max_concurrency}"
    return (
        f"{recipe.backend.kind} {recipe.quantization.kind} kv={recipe.quantization.kv_cache} "
        f"tp={recipe.parallel.tp} batch={recipe.limits.max_batch_size} {drafting}"
    )


def broken_laws(
    found: Recommendation, *, heads: str | None = None, passed: str | None = None
) -> Iterator[str]:
    """What a recommendation violates, in words; nothing when all is well. ``heads``: what the user named;
    ``passed``: the weights format whose quality gate passed."""
    recipe, work = found.recipe, found.scenario
    weights, kv, s = recipe.quantization.kind, recipe.quantization.kv_cache, recipe.speculation
    on_gpu = recipe.backend.kind != "embedded"
    lint = lint_content(dump_recipe(recipe))
    if lint.errors or lint.warnings:
        yield "does not lint clean"
    elif lint_content(recipe_text(found)).recipe != recipe:
        yield "the file with comments is another recipe"
    if work.fidelity == "exact" and weights not in ("none", passed):
        yield "quantizes weights without a passed gate"
    if work.fidelity != "approximate" and recipe.acceptance.kind == "typical":
        yield "accepts approximately"
    flagged = passed is not None or any("KV cache" in warning for warning in found.warnings)
    if work.fidelity == "exact" and kv != "none" and not flagged:
        yield "quantizes the KV cache without a flag"
    if on_gpu and weights == "w4a16_awq" and recipe.limits.max_batch_size >= 8:
        yield "weight-only 4 bit at a batch of 8 or more"
    if on_gpu and weights in ("w4a16_awq", "w4a8_awq") and kv != "none":
        yield "4-bit weights with an 8-bit cache lose paged attention"
    if on_gpu and s.kind not in SPECULATION_ON[recipe.backend.kind]:
        yield "a method that the backend lacks"
    if s.kind in ("medusa", "eagle", "eagle3") and s.heads != heads:
        yield "invents a trained head"
    if recipe.parallel.pp > 1:
        yield "pipeline parallel"
    if found.estimate is not None and found.plain is not None:
        if found.estimate.ttft_ms < found.plain.ttft_ms * (1 - 1e-9):
            yield "credits the time to the first token to drafting"
        if found.estimate.memory.max_sequences < recipe.limits.max_batch_size:
            yield "does not fit its own batch"
        always = s.kind != "none" and getattr(s, "max_concurrency", None) is None
        if always and found.estimate.tpot_ms >= found.plain.tpot_ms:
            yield "drafts above its break-even"
    if not found.because or not all(reason.because for reason in found.because):
        yield "a step without a reason"
    if not all(rejected.because for rejected in found.rejected):
        yield "a rejection without a reason"
