"""Limits, gates and the recipe itself."""

from __future__ import annotations

import re
from typing import Any

from trtspec.errors import InputError
from trtspec.recipe import Gates, Limits, Model, Parallel, Recipe, Serving
from trtspec.recipe_facts import drafted_positions, longest_acceptance
from trtspec.recipe_file import dump_recipe, lint_content
from trtspec.recommend.decision import Path
from trtspec.recommend.drafting import Drafting
from trtspec.recommend.formats import Format
from trtspec.recommend.pricing import Case

PERPLEXITY_RATIO = {
    "none": 1.01,
    "fp8": 1.03,
    "w8a8_sq": 1.05,
    "w4a8_awq": 1.10,
    "w4a16_awq": 1.10,
    "nvfp4": 1.10,
}
"""Bounds for the quality gate by weights format: several times what published models of 7B and more lose."""
SMALL_MODEL = 1e9
SMALL_MODEL_FACTOR = 5.0
"""Below that many weights the same format loses several times more (a 135M model: 1.34 with 4 bits)."""
MOST_ROWS = 8192


def build_recipe(
    case: Case, chosen: Format, drafting: Drafting, path: Path, *, baseline_fits: bool
) -> Recipe:
    """The recipe, checked by the rules of ``trtspec lint``: what is recommended has no error and no warning.
    Where the 16-bit baseline does not fit, no gate compares with its speed."""
    limits = _limits(case, chosen, drafting, path)
    recipe = Recipe(
        version=1,
        name=recipe_name(case),
        description=_description(case),
        model=Model(source=case.model.source),
        backend=_backend(case, drafting),
        quantization=chosen.quantization,
        speculation=drafting.speculation,
        acceptance=drafting.acceptance,
        limits=limits,
        parallel=Parallel(tp=chosen.tp, pp=1),
        serving=Serving(default_max_tokens=case.scenario.output_tokens),
        gates=_gates(case, chosen, drafting, baseline_fits),
    )
    checked = lint_content(dump_recipe(recipe), "recommended recipe")
    if checked.errors or checked.warnings:
        # The tree must not lead here; a recipe that lint complains about is never handed out.
        raise RuntimeError("; ".join(str(p) for p in (*checked.errors, *checked.warnings)))
    return recipe


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


def _gates(case: Case, chosen: Format, drafting: Drafting, baseline_fits: bool) -> Gates:
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
    )
