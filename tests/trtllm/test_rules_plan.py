"""What lint lets pass can be rendered: commands and options where it finds no error, and a Triton repository
where it finds nothing against serving either."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from bad_recipes_gpu import BAD_RECIPES, DRAFT, EAGLE, EAGLE3, LOOKAHEAD, MEDUSA, NGRAM, PYT, TRT, merged

from trtspec.errors import InputError
from trtspec.recipe import Recipe
from trtspec.recipe_file import lint_content
from trtspec.recipe_yaml import dump_plain
from trtspec.trtllm.command import Paths
from trtspec.trtllm.facts import VERSIONS, load_facts
from trtspec.trtllm.llm_api import llm_options
from trtspec.trtllm.plan import plan_commands
from trtspec.trtllm.rules import RULES, check
from trtspec.trtllm.triton import render_repository

SPECULATION: tuple[dict[str, Any], ...] = (
    {"kind": "none"},
    NGRAM,
    {**NGRAM, "max_concurrency": 4},
    LOOKAHEAD,
    DRAFT,
    {**DRAFT, "quantization": {"kind": "w4a16_awq", "group_size": 64}},
    MEDUSA,
    {**MEDUSA, "choices": None},
    {**MEDUSA, "quantization": "fp8"},
    EAGLE,
    {**EAGLE, "choices": None, "num_draft_tokens": 31},
    EAGLE3,
    {**EAGLE3, "top_k": 4, "depth": 2},
    {**EAGLE3, "quantization": "fp8"},
    {**EAGLE3, "max_concurrency": 4},
)
QUANTIZATION: tuple[dict[str, Any], ...] = tuple(
    {"kind": kind, "kv_cache": kv}
    for kind in ("none", "fp8", "w4a16_awq", "w4a8_awq", "w8a8_sq", "nvfp4")
    for kv in ("none", "fp8", "int8", "nvfp4")
)
FP8 = {"kind": "fp8", "kv_cache": "fp8"}
KEPT: tuple[dict[str, Any], ...] = tuple(
    {"kind": kind, "kv_cache": "none", **more}
    for kind in ("fp8", "w4a16_awq", "w8a8_sq", "nvfp4")
    for more in ({"lm_head": True}, {"exclude": ["*.o_proj"]})
)
OTHERS: tuple[dict[str, Any], ...] = (
    {"limits": {"kv_cache_bytes": 2**33}},
    {"acceptance": {"kind": "rejection"}},
    {"acceptance": {"kind": "typical"}, "gates": {"lossless": False}},
    {"parallel": {"tp": 16}},
)


def refused(recipe: Recipe, version: str, *, served: bool = True) -> str | None:
    try:
        plan_commands(recipe, version)
        if served:
            facts = load_facts(version)
            options = llm_options(recipe, facts, Paths()) if recipe.backend.kind == "pytorch" else None
            folders = {"engine_dir": "/engine", "tokenizer_dir": "/model", "draft_engine_dir": "/draft"}
            render_repository(recipe, version, **folders, llm_options=options)
    except InputError as error:
        return str(error)
    return None


def combinations() -> Iterator[dict[str, Any]]:
    """Each method with each format, and each of the rest with a few of them."""
    for speculation in SPECULATION:
        yield from ({"speculation": speculation, "quantization": q} for q in QUANTIZATION)
        yield from ({"speculation": speculation, **other} for other in OTHERS)
        yield from ({"speculation": speculation, "quantization": FP8, **other} for other in OTHERS)
    yield from (
        {"speculation": s, "quantization": q} for s in ({"kind": "none"}, MEDUSA, DRAFT) for q in KEPT
    )


def rendered(version: str, base: dict[str, Any]) -> Iterator[str | None]:
    """For each combination without an error: why it cannot be rendered, None if it can."""
    for changes in combinations():
        named = merged(base, {**changes, "backend": {"version": f"=={version}"}})
        recipe = lint_content(dump_plain(named)).recipe
        if recipe is None:
            continue
        found = check(recipe, version)
        if any(f.severity == "error" for f in found):
            continue
        why = refused(recipe, version, served=not any(f.rule == "trtllm-serve" for f in found))
        yield None if why is None else f"{changes}: {why}"


def pairs() -> list[tuple[str, dict[str, Any]]]:
    engines = [(version, TRT) for version in VERSIONS if not version.startswith(("1.3", "1.4"))]
    return engines + [(version, PYT) for version in VERSIONS if not version.startswith("0.")]


@pytest.mark.parametrize(
    ("version", "base"), pairs(), ids=lambda v: v if isinstance(v, str) else v["backend"]["kind"]
)
def test_what_lint_lets_pass_is_rendered(version: str, base: dict[str, Any]) -> None:
    found = list(rendered(version, base))
    assert [why for why in found if why is not None] == []
    assert len(found) > 50


@pytest.mark.parametrize(
    ("rule", "version", "base"),
    [
        ("trtllm-serve", "1.2.1", TRT),
        ("trtllm-quant-format", "0.17.0", TRT),
        ("trtllm-lm-head-option", "0.17.0", TRT),
        ("trtllm-kv-bytes", "1.0.0", PYT),
        ("trtllm-eagle3-tree", "1.0.0", PYT),
    ],
)
def test_without_the_rule_the_tables_refuse_instead(
    rule: str, version: str, base: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(RULES, rule)  # for lint and for plan_commands, which asks the rules first
    assert any(why is not None for why in rendered(version, base))


def test_repaired_recipes_are_rendered() -> None:
    for bad in BAD_RECIPES:
        good = bad.repaired()
        if not any(f.severity == "error" for f in check(good.recipe(), good.version)):
            assert refused(good.recipe(), good.version, served=False) is None, bad
