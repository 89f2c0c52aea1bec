"""The recommended recipe as a YAML file whose comments give the reasons."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from trtspec.recipe_file import plain_recipe
from trtspec.recipe_yaml import dump_plain
from trtspec.recommend.decision import Recommendation, show

SECTION_OF = {
    "fidelity": "quantization", "weights": "quantization", "kv_cache": "quantization", "backend": "backend",
    "serving": "limits", "memory": "quantization", "parallel": "parallel", "speculation": "speculation",
    "length": "speculation", "acceptance": "acceptance", "limits": "limits", "slo": "gates",
}  # fmt: skip
WIDTH = 108


def recipe_text(found: Recommendation, command: Sequence[str] = ()) -> str:
    """The recipe, section by section with its reasons above; ``build`` reads it as it is."""
    return "\n".join(_lines(found, command)) + "\n"


def _lines(found: Recommendation, command: Sequence[str]) -> Iterator[str]:
    yield f"# Recommended by trtspec for the scenario {found.scenario.name}: {found.model} on {found.gpu}."
    if command:
        yield from _comment("Made with: " + " ".join(command))
    if found.estimate is not None:
        estimate = found.estimate
        low, high = estimate.interval
        yield from _comment(
            f"Estimated: TTFT {show(estimate.ttft_ms)} ms, TPOT {show(estimate.tpot_ms)} ms "
            f"({show(low)} to {show(high)}), {show(estimate.tokens_per_s)} tokens/s at "
            f"{found.recipe.limits.max_batch_size} sequences; basis: {estimate.basis}. verify measures."
        )
    if found.replicas > 1:
        yield from _comment(f"Run {found.replicas} engines of it side by side.")
    for warning in found.warnings:
        yield from _comment(f"Note: {warning}")
    for key, value in _given(found).items():
        if isinstance(value, dict):
            yield ""
            for reason in found.because:
                if SECTION_OF[reason.step] == key:
                    yield from _comment(f"{reason.choice}: {reason.because}")
            if key == "limits":
                yield from _comment("Longer prompts need larger limits, and their KV fewer sequences.")
        yield dump_plain({key: value}).rstrip("\n")


def _given(found: Recommendation) -> dict[str, Any]:
    """The recipe without the keys that have their defaults."""
    everything = plain_recipe(found.recipe)
    given = found.recipe.model_dump(mode="json", exclude_defaults=True)

    def cut(values: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
        return {
            key: cut(value, kept[key]) if isinstance(value, dict) else value
            for key, value in values.items()
            if key in kept and kept[key] != {}
        }

    return cut(everything, given)


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="#   ", break_long_words=False,
                         break_on_hyphens=False)  # fmt: skip
