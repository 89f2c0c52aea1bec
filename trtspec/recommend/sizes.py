"""Limits, gates and the recipe itself."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from trtspec.errors import InputError
from trtspec.recipe import (
    Gates,
    Limits,
    Load,
    Model,
    Parallel,
    PytorchBackend,
    Quantization,
    Recipe,
    ServiceLevel,
    Serving,
    TensorrtBackend,
    W8A8SqQuantization,
)
from trtspec.recipe_facts import drafted_positions, longest_acceptance
from trtspec.recipe_file import dump_recipe, lint_content
from trtspec.recipe_yaml import dotted
from trtspec.recommend.decision import Path
from trtspec.recommend.drafting import Drafting
from trtspec.recommend.formats import Format
from trtspec.recommend.pricing import Case
from trtspec.trtllm.facts import versions_for
from trtspec.trtllm.rules import check
from trtspec.versions import parse_range, parse_version, range_text

PERPLEXITY_RATIO = {
    "none": 1.01,
    "fp8": 1.03,
    "w8a8_sq": 1.05,
    "w4a8_awq": 1.10,
    "w4a16_awq": 1.10,
    "nvfp4": 1.10,
}
"""Bounds for the quality gate by weights format: several times what published models of 7B and more lose."""
GOODPUT = 0.9
"""Share of requests that must meet the scenario's objectives."""
SMALL_MODEL = 1e9
SMALL_MODEL_FACTOR = 5.0
"""Below that many weights the same format loses several times more (a 135M model: 1.34 with 4 bits)."""
MOST_ROWS = 8192


def build_recipe(
    case: Case, chosen: Format, drafting: Drafting, path: Path, *, baseline_fits: bool
) -> Recipe:
    """The recipe, checked by the rules of ``trtspec lint``: what is recommended has no error and no warning.
    By those of TensorRT-LLM on this GPU its versions have no error either, and ``path`` has the warnings.
    Where the 16-bit baseline does not fit, no gate compares with its speed."""
    limits = _limits(case, chosen, drafting, path)
    recipe = Recipe(
        version=1,
        name=recipe_name(case),
        description=_description(case),
        model=Model(source=case.model.source),
        backend=_backend(case, drafting),
        quantization=_quantization(case, chosen),
        speculation=drafting.speculation,
        acceptance=drafting.acceptance,
        limits=limits,
        parallel=Parallel(tp=chosen.tp, pp=1),
        serving=Serving(default_max_tokens=case.scenario.output_tokens),
        gates=_gates(case, chosen, drafting, baseline_fits, limits),
    )
    checked = lint_content(dump_recipe(recipe), "recommended recipe")
    if checked.errors or checked.warnings:
        # The tree must not lead here; a recipe that lint complains about is never handed out.
        raise RuntimeError("; ".join(str(p) for p in (*checked.errors, *checked.warnings)))
    return _for_its_versions(case, recipe, path)


def _quantization(case: Case, chosen: Format) -> Quantization:
    """SmoothQuant's alpha as quantize.py has it, which makes the weights of engines and takes no other."""
    if case.backend == "tensorrt" and isinstance(chosen.quantization, W8A8SqQuantization):
        return chosen.quantization.model_copy(update={"alpha": 1.0})
    return chosen.quantization


def _for_its_versions(case: Case, recipe: Recipe, path: Path) -> Recipe:
    """``recipe`` without the versions of TensorRT-LLM that refuse it; ``path`` has what the others warn of.
    InputError when all refuse it, as they do heads for an architecture that their converter does not know."""
    if not isinstance(recipe.backend, TensorrtBackend | PytorchBackend):
        return recipe
    asked = parse_range(recipe.backend.version)
    draft = None if case.draft is None or recipe.speculation.kind != "draft_model" else case.draft.spec
    found = {
        version: check(recipe, version, gpu=case.gpu, checkpoint=case.spec, draft=draft)
        for version in versions_for(recipe.backend.kind, asked)
    }
    refused = {v: [f for f in findings if f.severity == "error"] for v, findings in found.items()}
    taken = [version for version in found if not refused[version]]
    if not taken:
        told = dict.fromkeys(f"{dotted(f.path)}: {f.message} [{f.rule}]" for v in found for f in refused[v])
        what = f"{recipe.speculation.kind} with {recipe.quantization.kind} weights"
        raise InputError(
            f"no version of TensorRT-LLM takes {what}, the best by its numbers: {'; '.join(told)}"
        )
    for finding in (f for v in taken for f in found[v] if f.severity == "warning"):
        path.warn(f"{dotted(finding.path)}: {finding.message} [{finding.rule}]")
    if len(taken) == len(found):
        return recipe
    versions = asked
    if refused[next(iter(found))]:
        versions = replace(versions, low=parse_version(taken[0]), low_included=True)
    if refused[next(reversed(found))]:
        versions = replace(versions, high=parse_version(taken[-1]), high_included=True)
    narrowed = range_text(versions)
    why = next(findings[0].message for findings in refused.values() if findings)
    path.take("backend", f"TensorRT-LLM {narrowed}", why.split(";")[0])
    return recipe.model_copy(update={"backend": recipe.backend.model_copy(update={"version": narrowed})})


def recipe_name(case: Case) -> str:
    """Scenario, model and GPU as a folder name."""
    model = case.model.source.removeprefix("sample:").rstrip("/").rsplit("/", 1)[-1]
    board = case.gpu.name if case.gpu else "cpu"
    text = f"{case.scenario.name}-{model}-{board}".lower()
    return re.sub(r"[^a-z0-9._-]+", "-", text)[:63].strip("-._") or "recommended"


def _description(case: Case) -> str:
    board = f"{case.count} x {case.gpu.name}" if case.gpu else "a machine without a GPU"
    return f"Recommended for {case.scenario.name} on {board}."


def _backend(case: Case, drafting: Drafting) -> Any:
    from pydantic import TypeAdapter

    from trtspec.recipe import Backend

    values: dict[str, Any] = {"kind": case.backend}
    if case.backend == "embedded":
        values["device"] = "cpu" if case.gpu is None else "cuda"
    elif case.backend == "pytorch" and drafting.version is not None:
        values["version"] = drafting.version
    return TypeAdapter(Backend).validate_python(values)


def _limits(case: Case, chosen: Format, drafting: Drafting, path: Path) -> Limits:
    scenario, speculation = case.scenario, drafting.speculation
    batch = chosen.sequences
    if drafting.speculation.kind == "eagle" and case.backend == "tensorrt":
        batch = min(batch, 512)
    drafting_at_once = min(batch, getattr(speculation, "max_concurrency", None) or batch)
    rows = max(batch, (drafted_positions(speculation) + 1) * drafting_at_once)
    chunk = 512 if case.backend == "embedded" else min(MOST_ROWS, max(2048, scenario.input_tokens))
    seq = scenario.input_tokens + scenario.output_tokens
    longest = longest_acceptance(speculation) or 0
    if longest + 1 >= seq:
        raise InputError(
            f"{scenario.name}: {seq} tokens a request are fewer than one step can emit ({longest + 1})"
        )
    limits = Limits(
        max_batch_size=batch,
        max_input_tokens=scenario.input_tokens,
        max_seq_tokens=seq,
        max_num_tokens=max(rows, chunk),
    )
    why = f"{batch} x {seq} tokens; a step has up to {rows} decoding and verified rows, the rest of its "
    why += f"{limits.max_num_tokens} rows takes prompts in chunks"
    path.take("limits", f"batch {batch}", why)
    return limits


def _gates(case: Case, chosen: Format, drafting: Drafting, baseline_fits: bool, limits: Limits) -> Gates:
    quantization, speculation = chosen.quantization, drafting.speculation
    quantized = quantization.kind != "none" or quantization.kv_cache != "none"
    ratio = PERPLEXITY_RATIO[quantization.kind]
    if case.spec.num_parameters < SMALL_MODEL:
        ratio = 1 + SMALL_MODEL_FACTOR * (ratio - 1)
    speculates = speculation.kind != "none"
    return Gates(
        lossless=drafting.acceptance.kind != "typical",
        max_perplexity_ratio=round(ratio, 3) if quantized else 1.01,
        min_speedup=1.0 if speculates and case.gpu is not None else None,
        min_speedup_over_baseline=1.0 if quantized and baseline_fits else None,
        **_service_level(case, limits),
    )


def _service_level(case: Case, limits: Limits) -> dict[str, Any]:
    """The scenario's objectives, at its load, as gates. Not on a machine without a GPU, whose times are not
    what the scenario is about, and where so many long requests take hours."""
    scenario = case.scenario
    slo = ServiceLevel(ttft_ms=scenario.slo.ttft_ms, tpot_ms=scenario.slo.tpot_ms)
    if case.gpu is None or slo == ServiceLevel():
        return {}
    load = Load(
        concurrency=min(scenario.concurrency, limits.max_batch_size),
        input_tokens=scenario.input_tokens,
        output_tokens=max(2, scenario.output_tokens),
    )
    return {"load": load, "slo": slo, "min_goodput": GOODPUT}
