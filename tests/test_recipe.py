"""The schema, the recipes that ship and the generated reference say the same thing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from trtspec.recipe import Recipe
from trtspec.recipe_docs import markdown, starter
from trtspec.recipe_file import json_schema, lint, lint_content, load_recipe, plain_recipe, resolve, variants

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted((ROOT / "recipes").rglob("*.y*ml"))
REFERENCE = ROOT / "recipes" / "reference.yaml"
SECTIONS = list(json_schema()["properties"])


def test_the_number_of_recipes() -> None:
    """A recipe that moves out of sight of this test must be missed."""
    assert len(RECIPES) == 18
    assert len({load_recipe(path).name for path in RECIPES}) == 18


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_recipe_that_ships_is_clean(path: Path) -> None:
    result = lint(path)
    assert [str(problem) for problem in (*result.errors, *result.warnings)] == []
    assert result.recipe is not None
    assert result.recipe.name == path.stem
    assert result.recipe.description


# --------------------------------------------------------------------------- the reference


def _blocks() -> Iterator[tuple[int, str]]:
    """(line, text) of every alternative in the reference, its ``#| `` taken off."""
    numbered = enumerate(REFERENCE.read_text().splitlines(), start=1)
    for alternative, group in itertools.groupby(numbered, key=lambda item: item[1].startswith("#|")):
        if alternative:
            lines = list(group)
            yield (
                lines[0][0],
                "\n".join(line.removeprefix("#|").removeprefix(" ") for _, line in lines) + "\n",
            )


BLOCKS = list(_blocks())


def _with_block(block: str) -> str:
    """The reference with ``block`` in the place of its active sections of the same names."""
    replaced = set(yaml.safe_load(block))
    kept: list[str] = []
    section = ""
    for line in REFERENCE.read_text().splitlines():
        if line[:1].isalpha():
            section = line.split(":")[0]
        if section not in replaced or line.startswith("#") or not line:
            kept.append(line)
    return "\n".join(kept) + "\n" + block


@pytest.mark.parametrize(("line", "block"), BLOCKS, ids=[f"line {line}" for line, _ in BLOCKS])
def test_every_alternative_of_the_reference_is_valid(line: int, block: str) -> None:
    result = lint_content(_with_block(block), "reference")
    assert [str(problem) for problem in result.errors] == []
    assert result.recipe is not None
    plain = plain_recipe(result.recipe)
    for section, values in yaml.safe_load(block).items():
        assert plain[section]["kind"] == values["kind"] if "kind" in values else True


def test_an_alternative_that_rots_is_noticed() -> None:
    _, block = next(item for item in BLOCKS if "kind: medusa" in item[1])
    assert lint_content(_with_block(block.replace("heads:", "head:"))).errors
    assert lint_content(_with_block(block.replace("[1, 0]", "[2, 0]"))).errors


def _schema_keys() -> set[tuple[str, ...]]:
    """(section, kind, key ...) of every key of every variant."""
    keys: set[tuple[str, ...]] = set()

    def walk(schema: dict[str, Any], path: tuple[str, ...]) -> None:
        for key, value in schema.get("properties", {}).items():
            inner = resolve(value)
            keys.add((*path, key))
            if variants(inner):
                if path and path[-1] == "draft_model":
                    continue  # the quantization of a draft is the quantization above
                for kind, option in variants(inner).items():
                    walk(option, (*path, key, kind))
            else:
                walk(inner, (*path, key))

    walk(json_schema(), ())
    return keys


def _used_keys(data: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if not isinstance(data, dict):
        return
    if "kind" in data:
        path = (*path, data["kind"])
    for key, value in data.items():
        yield (*path, key)
        yield from _used_keys(value, (*path, key))


def test_the_reference_shows_every_key_of_every_kind() -> None:
    texts = [REFERENCE.read_text(), *(block for _, block in BLOCKS)]
    used = {key for text in texts for key in _used_keys(yaml.safe_load(text))}
    missing = _schema_keys() - used
    assert not missing


def test_the_reference_shows_defaults_where_it_does_not_say_otherwise() -> None:
    shown = plain_recipe(load_recipe(REFERENCE))
    head = {"version": 1, "name": "a", "model": {"source": "x"}, "backend": {"kind": "embedded"}}
    head |= {"quantization": {"kind": "fp8"}, "speculation": {"kind": "ngram"}}
    defaults = plain_recipe(Recipe.model_validate(head))
    shown["quantization"]["kv_cache"] = "none"
    for section in (
        "backend",
        "quantization",
        "speculation",
        "acceptance",
        "limits",
        "parallel",
        "serving",
        "gates",
    ):
        assert shown[section] == defaults[section]


# --------------------------------------------------------------------------- the schema


def _described(schema: dict[str, Any]) -> str:
    return str(schema.get("description") or resolve(schema).get("description", ""))


def test_every_key_has_a_description_for_editors() -> None:
    schema = json_schema()
    for owner in (schema, *schema["$defs"].values()):
        assert owner["description"]
        for key, value in owner["properties"].items():
            assert len(_described(value)) > 8, (owner["title"], key)


def test_every_number_has_a_range() -> None:
    """So that every message can say what is allowed."""

    def numbers(schema: Any) -> Iterator[dict[str, Any]]:
        if isinstance(schema, dict):
            if schema.get("type") in ("integer", "number") and not {"enum", "const"} & set(schema):
                yield schema
            for value in schema.values():
                yield from numbers(value)
        elif isinstance(schema, list):
            for value in schema:
                yield from numbers(value)

    found = list(numbers(json_schema()))
    assert len(found) > 30
    for schema in found:
        assert {"minimum", "exclusiveMinimum"} & set(schema)
        assert "maximum" in schema


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("version",), True),
        (("version",), 1.0),
        (("limits", "max_batch_size"), True),
        (("limits", "max_batch_size"), 8.0),
        (("limits", "max_batch_size"), "8"),
        (("gates", "min_speedup"), True),
        (("gates", "min_speedup"), float("nan")),
        (("gates", "min_speedup"), float("inf")),
        (("gates", "lossless"), 1),
        (("quantization", "group_size"), 64.0),
        (("quantization", "exclude"), "lm_head"),
        (("quantization", "exclude"), [1]),
        (("description",), 5),
    ],
)
def test_values_are_strict(path: tuple[str, ...], value: object) -> None:
    data: dict[str, Any] = {
        "version": 1,
        "name": "a",
        "model": {"source": "x"},
        "backend": {"kind": "embedded"},
    }
    data |= {"quantization": {"kind": "w4a16_awq"}, "limits": {}, "gates": {}}
    Recipe.model_validate(data)
    place = data
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    with pytest.raises(ValidationError):
        Recipe.model_validate(data)


# --------------------------------------------------------------------------- generated texts


def test_the_committed_reference_page_is_current() -> None:
    assert (ROOT / "docs" / "recipes.md").read_text() == markdown(), (
        "run: trtspec schema --markdown -o docs/recipes.md"
    )


def test_the_page_has_every_section_kind_and_key() -> None:
    page = markdown()
    for keys in _schema_keys():
        if keys[-1] != "kind":
            assert f"`{keys[-1]}`" in page or f"## {keys[-1]}" in page
    for section, schema in json_schema()["properties"].items():
        for kind in variants(resolve(schema)):
            assert f"### {section}, kind: {kind}\n" in page


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_starter_says_what_the_recipe_says(path: Path) -> None:
    recipe = load_recipe(path)
    text = starter(plain_recipe(recipe))
    assert lint_content(text).recipe == recipe
    keys = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    comments = [line for line in text.splitlines() if line.lstrip().startswith("# ")]
    assert len(comments) >= len(keys)
