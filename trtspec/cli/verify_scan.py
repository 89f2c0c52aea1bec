"""``trtspec verify --scan``: the scan of ``trtspec draft measure``, handed to the judge of verify."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from trtspec.cli.output import Progress
from trtspec.errors import InputError, Problem

if TYPE_CHECKING:
    from trtspec.artifact import Artifact
    from trtspec.draft.choose import Choice, Option
    from trtspec.prompts import Prompt
    from trtspec.verify.gates import Check
    from trtspec.verify.report import Report
    from trtspec.verify.settings import Settings


def plan_scan(built: Artifact, settings: Settings) -> list[Prompt] | str:
    """The prompts to scan on, those of the other checks, or why there is nothing to scan. Raises InputError
    for prompts that do not do, so that this is said before anything is measured."""
    from trtspec.recipe import NoSpeculation
    from trtspec.recipe_facts import is_for_gpu

    if isinstance(built.recipe.speculation, NoSpeculation):
        return "the recipe does not speculate"
    if is_for_gpu(built.recipe):
        return "needs the embedded engine: build the recipe with backend.kind: embedded"
    from trtspec.text import Tokenizer
    from trtspec.verify.protocol import longest_prompt_of, prompts_asked

    found = prompts_asked(
        Tokenizer.load(built.target_dir), settings, longest_prompt_of(built.recipe, settings)
    )
    if len(found) < 2:
        message = "one prompt says nothing about spread; --scan needs at least two"
        raise InputError(Problem(message, key="--num-prompts"))
    return found


def with_scan(
    result: Report, built: Artifact, prompts: list[Prompt] | str, settings: Settings, progress: Progress
) -> Report:
    """``result`` with the check ``draft_scan`` of the engine on what :func:`plan_scan` found. Raises what
    opening the engine raises."""
    return replace(result, checks=(*result.checks, _scanned(built, prompts, settings, progress)))


def _scanned(built: Artifact, prompts: list[Prompt] | str, settings: Settings, progress: Progress) -> Check:
    from trtspec.verify.scan import judge_scan, no_scan

    if isinstance(prompts, str):
        return no_scan(prompts)
    from trtspec.draft.choose import choose
    from trtspec.draft.measure import cells

    def on_progress(stage: str, done: int, total: int) -> None:
        progress(f"scan: {stage}", done, total)

    choice = choose(
        cells(built)[-1], prompts, max_new_tokens=settings.max_new_tokens, on_progress=on_progress
    )
    source = "prompts of ours" if settings.prompts is None else f"prompts of {settings.prompts.name}"
    load = f"{len(prompts)} {source}, up to {settings.max_new_tokens} tokens each, one sequence at a time"
    return judge_scan([asdict(one) for one in choice.paired], **scan_arguments(choice), load=load)


def scan_arguments(choice: Choice) -> dict[str, Any]:
    """What :func:`trtspec.verify.scan.judge_scan` is told of a finished scan, as JSON values."""
    return {
        "options": [_option(one) for one in choice.options],
        "current": _option(choice.current),
        "none": _option(choice.none),
        "priced": choice.priced,
        "cross_fitted": choice.cross_fitted,
    }


def _option(option: Option) -> dict[str, Any]:
    return {
        "label": option.label,
        "length": option.length,
        "nodes": option.nodes,
        "tokens_per_s": option.tokens_per_s.value,
        "changes": None if option.changes is None else _json(option.changes),
    }


def _json(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _json(one) for key, one in value.items()}
    return [_json(one) for one in value] if isinstance(value, list | tuple) else value
