"""The gates of a bundle's recipe, held against those that its checks were judged by: the same, and all.

Part of :mod:`trtspec.verify.recheck`; nothing here judges records.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from trtspec.recipe import Recipe
from trtspec.recipe_facts import is_for_gpu, is_quantized
from trtspec.verify.bundle import Bundle
from trtspec.verify.gates import Check, Verdict
from trtspec.verify.records import Records
from trtspec.verify.report import Report

_TOLERANCE = 1e-9
_QUALITY = {
    "max_perplexity_ratio": "quality",
    "max_mean_kl": "mean_kl",
    "max_p99_kl": "p99_kl",
    "min_same_top_token": "same_top_token",
    "max_task_loss": "task:",
    "max_retrieval_loss": "retrieval",
}
_ANSWERED_BY = {
    **_QUALITY,
    "lossless": "lossless",
    "min_acceptance_length": "acceptance",
    "min_speedup": "speedup",
    "min_speedup_over_baseline": "speedup_over_baseline",
    "max_degenerate_rise": "degenerate_text",
    "min_speedup_by_load": "speedup_by_load",
}
"""Gate -> the check that every report of an embedded engine answers it by, "vs_other." before it or not;
``task:`` and what follows."""


def unanswered(report: Report) -> list[str]:
    """Gates that the recipe sets and no required check of the report is about: one was taken out, or said not
    to be required."""
    recipe = recipe_of(report.recipe)
    if recipe is None or is_for_gpu(recipe) or "matrix" in report.settings:
        return []  # of a matrix, its check ``gates`` tells
    left_open: set[str] = set()
    if report.other.get("question") == "speculation":  # the target's quality would be compared with itself
        left_open = set(_QUALITY)
    elif not report.other and not is_quantized(recipe.quantization):
        left_open = {"max_perplexity_ratio"}
    gates = recipe.gates.model_dump()
    asked = [name for name in _ANSWERED_BY if gates[name] and name not in left_open]
    return [
        f"gates.{name} is set, and no required check is about it"
        for name in asked
        if not any(
            _is_about(name, check) and (check.required or _left_to_the_proof(check, report.checks))
            for check in report.checks
        )
    ]


def _left_to_the_proof(check: Check, checks: Sequence[Check]) -> bool:
    """Where 16 bit cannot decide, the run in float64 is what is required."""
    proof = f"{check.name}_float64"
    return (
        check.name == _ANSWERED_BY["lossless"]
        and check.verdict is Verdict.INCONCLUSIVE
        and any(one.name == proof and one.required for one in checks)
    )


def _is_about(gate: str, check: Check) -> bool:
    name, wanted = check.name.removeprefix("vs_other."), _ANSWERED_BY[gate]
    if gate == "max_task_loss":
        return name.startswith(wanted) or name == "tasks"
    if gate == "min_speedup_over_baseline" and check.name == "vs_other.speedup":
        return True
    return name == wanted


def recipe_of(value: Mapping[str, Any]) -> Recipe | None:
    try:
        return Recipe.model_validate(value)
    except ValidationError:
        return None


def gates_asked(bundle: Bundle, records: Records) -> Mapping[str, Any]:
    """The recipe; of endpoints, which have none, what stands in the settings as gates of quality."""
    report = bundle.report
    if not report.recipe and records.judge in ("quality", "task", "retrieval", "degenerate"):
        return {"gates": report.settings.get("gates")}
    return report.recipe


def other_gates(names: Sequence[str], records: Records, recipe: Mapping[str, Any]) -> list[str]:
    """Gates in the records that are not those of the recipe."""
    if records.judge == "against_other":
        from trtspec.verify.versus import VS, inner_records

        return other_gates([name.removeprefix(VS) for name in names], inner_records(records), recipe)
    arguments, problems = records.arguments, []
    gates = recipe.get("gates") if isinstance(recipe.get("gates"), Mapping) else {}
    for name in names:
        match records.judge:
            case "lossless":
                key, found = "lossless", arguments.get("required")
            case "sampled" | "parameters":
                raw = records.tables.get("raw") or [{}]
                key, found = "lossless", raw[0].get("required")
            case "quality":
                key, found = "max_perplexity_ratio", arguments.get("bound")
            case "approximate":
                key, found = "max_perplexity_ratio", arguments.get("margin")
            case "divergence":
                key = {
                    "mean_kl": "max_mean_kl",
                    "p99_kl": "max_p99_kl",
                    "same_top_token": "min_same_top_token",
                }.get(name, name)
                found = arguments.get(key)
            case "task" | "retrieval" | "degenerate":
                suffix = "rise" if records.judge == "degenerate" else "loss"
                key, found = f"max_{records.judge}_{suffix}", arguments.get("margin")
            case "acceptance" | "gpu_acceptance":
                key, found = "min_acceptance_length", arguments.get("bound")
            case "speed" | "gpu_speed":
                key, found = f"min_{name}", arguments.get("bound")
                if arguments.get("over") == "other":
                    key = "min_speedup_over_baseline"
            case "served":
                problems += _other_load(name, arguments, gates or {})
                continue
            case "matrix":
                if name == names[0]:  # one judge made them all
                    problems += _other_matrix(name, arguments, recipe)
                continue
            case _:
                continue
        if gates and gates.get(key) != found:
            problems.append(
                f"{name}: judged by a gate of {found!r}, the recipe's {key} is {gates.get(key)!r}"
            )
    return problems


def _other_load(name: str, arguments: Mapping[str, Any], gates: Mapping[str, Any]) -> list[str]:
    """Where latency was judged by other gates, or under another load, than the recipe's."""
    judged = dict(arguments.get("gates", {}))
    load = gates.get("load") or {}
    if any(load.get(key) is not None for key in ("concurrency", "rate_per_s")):
        judged |= {f"load.{key}": arguments.get(key) for key in ("concurrency", "rate_per_s")}
        judged |= {f"slo.{key}": value for key, value in arguments.get("slo", {}).items()}
    problems = []
    for key, found in judged.items():
        section, _, inner = key.partition(".")
        wanted = (gates.get(section) or {}).get(inner) if inner else gates.get(key)
        if gates and wanted != found:
            problems.append(f"{name}: judged by {key} {found!r}, the recipe's gates.{key} is {wanted!r}")
    return problems


def _other_matrix(name: str, arguments: Mapping[str, Any], recipe: Mapping[str, Any]) -> list[str]:
    """What a matrix was judged with and the recipe does not say."""
    from trtspec.verify.matrix_verdict import asked_of_matrix

    known = recipe_of(recipe)
    return [
        f"{name}: judged with {key} {short(arguments[key])}, the recipe makes it {short(value)}"
        for key, value in ({} if known is None else asked_of_matrix(known)).items()
        if key in arguments and not equal(arguments[key], value)
    ]


def equal(left: Any, right: Any) -> bool:
    numbers = (int, float)
    if isinstance(left, numbers) and isinstance(right, numbers) and bool not in (type(left), type(right)):
        if max(abs(left), abs(right)) > 1e308:  # a whole number may be more than a float holds
            return left == right
        return math.isclose(left, right, rel_tol=_TOLERANCE, abs_tol=1e-12)
    return type(left) is type(right) and bool(left == right)


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
