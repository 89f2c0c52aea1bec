"""Migration: the result lints, every key is accounted for once, and nothing is lost without a reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trtspec.cli import main
from trtspec.errors import InputError
from trtspec.recipe import Recipe
from trtspec.recipe_file import lint, lint_content, load_recipe, parse_recipe, plain_recipe
from trtspec.trtllm.account import Migration, get, leaves, migrated_yaml
from trtspec.trtllm.facts import versions_for
from trtspec.trtllm.lint import with_gpu_rules
from trtspec.trtllm.migrate import TARGETS, migrate
from trtspec.trtllm.plan import plan_commands
from trtspec.versions import parse_range, range_text

ROOT = Path(__file__).parent.parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
HEAD = "version: 1\nname: a\nmodel: {source: org/m}\n"


def recipe(text: str) -> Recipe:
    return parse_recipe(HEAD + text)


def problems(migration: Migration) -> list[str]:
    """What is wrong with the account of a migration, by comparing it with both recipes."""
    before, after = dict(leaves(plain_recipe(migration.source))), plain_recipe(migration.recipe)
    wrong = []
    keys = [change.key for change in migration.changes]
    for key in before:
        if keys.count(key) != 1:
            wrong.append(f"{key} is reported {keys.count(key)} times")
    wrong += [f"{key} is no key of the source" for key in keys if key not in before]
    for change in migration.changes:
        if change.found != before.get(change.key):
            wrong.append(f"{change.key}: the source has {before.get(change.key)}")
        if change.outcome != "kept" and not change.why:
            wrong.append(f"{change.key}: no reason")
        if change.outcome == "lost":
            if change.to is not None:
                wrong.append(f"{change.key}: lost, but {change.to}")
            continue
        if get(after, str(change.to)) != change.value:
            wrong.append(f"{change.key}: {change.to} is {get(after, str(change.to))}")
        if (change.outcome == "kept") != (change.to == change.key and change.value == change.found):
            wrong.append(f"{change.key}: not {change.outcome}")
        if (change.outcome == "renamed") != (change.to != change.key):
            wrong.append(f"{change.key}: not {change.outcome}")
    reached = {change.to for change in migration.changes} | {one.key for one in migration.added}
    lost = {change.key for change in migration.changes if change.outcome == "lost"}
    wrong += [f"{key}: nobody says where it is from" for key, _ in leaves(after) if key not in reached | lost]
    return wrong


CASES = [(path, to) for path in RECIPES for to in TARGETS if load_recipe(path).backend.kind != to]


@pytest.mark.parametrize(("path", "to"), CASES, ids=[f"{path.stem}-{to}" for path, to in CASES])
def test_every_shipped_recipe_migrates_lints_and_is_accounted_for(
    path: Path, to: Any, tmp_path: Path
) -> None:
    migration = migrate(load_recipe(path), to)
    out = tmp_path / "m.yaml"
    out.write_text(migrated_yaml(migration, path.name), "utf-8")
    checked = with_gpu_rules(lint(out), out)
    assert checked.errors == ()
    assert checked.recipe == migration.recipe
    assert migration.recipe.backend.kind == to
    assert problems(migration) == []
    if to != "embedded":
        versions = versions_for(to, parse_range(migration.recipe.backend.version))  # type: ignore[union-attr]
        assert versions
        for version in versions:
            plan = plan_commands(migration.recipe, version)
            assert plan.commands or plan.files


def test_all_shipped_recipes_were_tried() -> None:
    assert len(CASES) == 2 * len(RECIPES)
    assert len(RECIPES) >= 15


def test_a_dropped_a_doubled_and_a_false_entry_would_be_caught() -> None:
    migration = migrate(load_recipe(RECIPES[0]), "embedded")
    assert problems(migration) == []
    dropped = replace(migration, changes=migration.changes[1:])
    assert problems(dropped) != []
    doubled = replace(migration, changes=(*migration.changes, migration.changes[0]))
    assert problems(doubled) != []
    silent = [replace(c, outcome="kept") if c.outcome == "replaced" else c for c in migration.changes]
    assert problems(replace(migration, changes=tuple(silent))) != []
    other = migration.recipe.model_copy(
        update={"limits": migration.recipe.limits.model_copy(update={"max_batch_size": 3})}
    )
    assert problems(replace(migration, recipe=other)) != []


KV = "quantization: {{kind: {weights}, kv_cache: {kv}}}\n"
SPECULATIONS = (
    "{kind: none}",
    "{kind: ngram, branches: 3, corpus: c.txt, corpus_min_count: 2, adaptive: true}",
    "{kind: ngram, max_concurrency: 4}",
    "{kind: lookahead, window: 6, ngram: 5, verification_set: 6}",
    "{kind: draft_model, model: {source: o/d}, quantization: {kind: w8a8_sq, kv_cache: int8}}",
    "{kind: draft_model, model: {source: o/d}, quantization: {kind: fp8, kv_cache: fp8}, max_concurrency: 2}",
    "{kind: medusa, heads: h, choices: [[0], [0, 0], [1]], quantization: fp8}",
    "{kind: eagle, heads: h, depth: 7, top_k: 4, num_draft_tokens: 20}",
    "{kind: eagle, heads: h, depth: 3, choices: [[0], [0, 0], [1]]}",
    "{kind: eagle3, heads: h, num_draft_tokens: 20, top_k: 4, depth: 5, max_concurrency: 2}",
)
ACCEPTANCES = ("{kind: exact}", "{kind: rejection}", "{kind: typical}\ngates: {lossless: false}")


def grid() -> list[tuple[str, Recipe]]:
    """Every combination of weights, KV, method and acceptance that is a legal recipe, on each backend."""
    found = []
    for backend in TARGETS:
        for weights in ("none", "fp8", "w4a16_awq", "w8a8_sq", "nvfp4"):
            for kv in ("none", "fp8", "int8", "nvfp4"):
                for speculation in SPECULATIONS:
                    for acceptance in ACCEPTANCES:
                        text = (
                            f"{HEAD}backend: {{kind: {backend}}}\n{KV.format(weights=weights, kv=kv)}"
                            f"speculation: {speculation}\nacceptance: {acceptance}\n"
                            "limits: {max_batch_size: 600, max_num_tokens: 1024}\n"
                        )
                        if checked := lint_content(text).recipe:
                            found.append((text, checked))
    return found


def test_every_legal_combination_migrates_and_is_accounted_for() -> None:
    cases = grid()
    assert len(cases) > 400
    for text, source in cases[::5]:  # a fifth of them, for time; the whole grid passed when this was written
        for to in TARGETS:
            if to != source.backend.kind:
                assert problems(migrate(source, to)) == [], text


def relevant(recipe: Recipe) -> dict[str, Any]:
    """What decides a plan: all but names, and of the backend what is not its own default."""
    data = plain_recipe(recipe)
    backend = {key: data["backend"][key] for key in ("kind", "version", "cuda_graphs", "attention")}
    others = {key: value for key, value in data.items() if key not in ("name", "description", "backend")}
    return {"backend": backend, **others}


@pytest.mark.parametrize(
    "text",
    [
        "backend: {kind: pytorch}\nspeculation: {kind: ngram, num_draft_tokens: 6}\n",
        "backend: {kind: pytorch, version: '>=1.1,<=1.2.1', dtype: float16}\n"
        "quantization: {kind: fp8, kv_cache: fp8}\n"
        "speculation: {kind: draft_model, model: {source: a/b}}\nparallel: {tp: 4}\n",
        "backend: {kind: pytorch}\nquantization: {kind: w4a16_awq}\n",
    ],
)
def test_there_and_back_is_the_same_plan(text: str) -> None:
    source = recipe(text)
    there = migrate(source, "tensorrt").recipe
    back = migrate(there, "pytorch").recipe
    assert relevant(back) == relevant(source)
    assert there.backend.version != source.backend.version or "1.2.1" in text  # type: ignore[union-attr]


def test_a_round_trip_through_another_method_is_not_the_same_plan() -> None:
    source = recipe("backend: {kind: pytorch}\nspeculation: {kind: eagle3, heads: h}\n")
    assert relevant(migrate(migrate(source, "tensorrt").recipe, "pytorch").recipe) != relevant(source)


def outcome(migration: Migration, key: str) -> tuple[str, str | None, Any]:
    found = next(change for change in migration.changes if change.key == key)
    return found.outcome, found.to, found.value


def test_medusa_becomes_eagle3_with_named_heads_and_ngram_without() -> None:
    source = recipe("backend: {kind: tensorrt}\nspeculation: {kind: medusa, heads: h}\n")
    named = migrate(source, "pytorch", heads="org/eagle3")
    assert named.recipe.speculation.kind == "eagle3"
    assert outcome(named, "speculation.heads") == ("replaced", "speculation.heads", "org/eagle3")
    bare = migrate(source, "pytorch")
    assert bare.recipe.speculation.kind == "ngram"
    assert outcome(bare, "speculation.heads") == ("lost", None, None)
    assert outcome(bare, "speculation.choices") == ("lost", None, None)


def test_published_heads_are_found_by_the_target() -> None:
    text = "backend: {kind: tensorrt}\nspeculation: {kind: medusa, heads: h}\n"
    source = parse_recipe((HEAD + text).replace("org/m", "lmsys/vicuna-13b-v1.3"))
    assert migrate(source, "pytorch").recipe.speculation.heads == "yuhuili/EAGLE3-Vicuna1.3-13B"  # type: ignore[union-attr]


def test_an_eagle_tree_becomes_a_chain_as_deep() -> None:
    source = recipe("backend: {kind: tensorrt}\nspeculation: {kind: eagle, heads: h, depth: 7}\n")
    migration = migrate(source, "pytorch", heads="e3")
    assert outcome(migration, "speculation.depth") == ("renamed", "speculation.num_draft_tokens", 7)
    assert outcome(migration, "speculation.num_draft_tokens") == (
        "replaced",
        "speculation.num_draft_tokens",
        7,
    )
    back = migrate(migration.recipe, "tensorrt", heads="e2")
    assert outcome(back, "speculation.num_draft_tokens") == ("renamed", "speculation.depth", 7)


def test_int8_kv_under_drafting_in_an_engine_finds_a_format_with_paged_context() -> None:
    text = (
        "backend: {{kind: embedded}}\nquantization: {{kind: {}, kv_cache: int8}}\n"
        "speculation: {{kind: ngram}}\n"
    )
    for weights, kv in (("fp8", "fp8"), ("none", "none"), ("w4a16_awq", "none")):
        migration = migrate(recipe(text.format(weights)), "tensorrt")
        assert migration.recipe.quantization.kv_cache == kv


@pytest.mark.parametrize(
    ("version", "to", "expected"),
    [
        (">=0.17,<=1.2.1", "pytorch", ">=1.0,<1.5"),
        (">=1.1,<=1.2.1", "pytorch", ">=1.1,<=1.2.1"),
        ("==1.2.1", "pytorch", "==1.2.1"),
        ("==0.21", "pytorch", ">=1.0,<1.5"),
        (">=0.21,<=1.2.1,!=1.1", "pytorch", ">=1.0,<=1.2.1,!=1.1"),
    ],
)
def test_the_versions_a_recipe_chose_are_respected_where_they_have_the_backend(
    version: str, to: Any, expected: str
) -> None:
    source = recipe(f"backend: {{kind: tensorrt, version: '{version}'}}\n")
    assert migrate(source, to).recipe.backend.version == expected  # type: ignore[union-attr]


def test_rejection_narrows_the_versions_or_gives_way() -> None:
    text = (
        "backend: {{kind: tensorrt, version: '{}'}}\n"
        "speculation: {{kind: draft_model, model: {{source: a/b}}}}\nacceptance: {{kind: rejection}}\n"
    )
    wide = migrate(recipe(text.format(">=0.17,<=1.2.1")), "pytorch").recipe
    assert (wide.acceptance.kind, wide.backend.version) == ("rejection", ">=1.3,<1.5")  # type: ignore[union-attr]
    narrow = migrate(recipe(text.format("==1.2.1")), "pytorch").recipe
    assert (narrow.acceptance.kind, narrow.backend.version) == ("exact", "==1.2.1")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "text", [">=1.0,<1.5", "==1.2.1", ">0.17,<=1.2", ">=1.3.0rc4,<1.4", ">=1.0,<2.0,!=1.1.2"]
)
def test_a_range_is_written_as_it_reads(text: str) -> None:
    assert range_text(parse_range(text)) == text


def test_names_do_not_collide_and_do_not_grow() -> None:
    source = parse_recipe((HEAD + "backend: {kind: pytorch}\n").replace("name: a", f"name: {'x' * 63}"))
    there = migrate(source, "tensorrt").recipe
    assert there.name.endswith("x-tensorrt")
    assert len(there.name) == 63
    assert migrate(there, "pytorch").recipe.name.endswith("x-pytorch")
    assert migrate(there, "pytorch", name="mine").recipe.name == "mine"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"to": "pytorch"}, "for that backend already"),
        ({"to": "embedded", "heads": "h"}, "ngram has no heads"),
        ({"to": "embedded", "name": "Bad Name"}, "a-z, 0-9"),
    ],
)
def test_what_cannot_be_migrated_is_said(arguments: dict[str, Any], said: str) -> None:
    source = recipe("backend: {kind: pytorch}\nspeculation: {kind: ngram}\n")
    with pytest.raises(InputError, match=said):
        migrate(source, **arguments)


def test_impossible_heads_are_bad_input() -> None:
    source = recipe("backend: {kind: tensorrt}\nspeculation: {kind: medusa, heads: h}\n")
    with pytest.raises(InputError, match="heads"):
        migrate(source, "pytorch", heads="")


def test_the_verb_writes_what_lints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = ROOT / "recipes" / "vicuna-7b-fp8-medusa-tensorrt.yaml", tmp_path / "m.yaml"
    assert main(["migrate", str(source), "--to", "pytorch", "-o", str(out)]) == 0
    said = capsys.readouterr().out
    assert "replaced   speculation.kind: medusa -> ngram" in said
    assert "comments of the file do not come along" in said
    assert main(["lint", str(out)]) == 0
    assert main(["migrate", str(source), "--to", "pytorch", "-o", str(out)]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["migrate", str(source), "--to", "tensorrt"]) == 2
