"""Read, check, digest and write recipe files.

:func:`load_recipe` returns a valid :class:`~trtspec.recipe.Recipe` or raises InputError with every problem
of the file, each with line and dotted key. :func:`lint` returns problems and warnings instead. Three layers
contribute: the YAML reader (:mod:`trtspec.recipe_yaml`), the schema (:mod:`trtspec.recipe`; its errors are
put into the field's terms here) and the rules that span keys (:mod:`trtspec.recipe_rules`, and with the
model at hand :mod:`trtspec.recipe_model`). The rules run even when the schema complains, except those that
look at a section with an error.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import ValidationError

from trtspec.errors import InputError, Problem
from trtspec.recipe import HOST_PATTERN, MODEL_NAME_PATTERN, NAME_PATTERN, Recipe
from trtspec.recipe_model import MODEL_RULES, look
from trtspec.recipe_rules import RULES, Finding, Rule
from trtspec.recipe_yaml import (
    MAX_PROBLEMS,
    Document,
    Path,
    describe_character,
    dotted,
    dump_plain,
    read_bytes,
    read_document,
    resolve_plain,
    visible,
)

_PATTERN_WORDS = {
    NAME_PATTERN: "a-z, 0-9, '.', '_' and '-', a letter or digit first, at most 63 characters",
    MODEL_NAME_PATTERN: "letters, digits, '.', '_' and '-', at most 128 characters, '.' and '-' not first",
    HOST_PATTERN: "an IP address or host name",
}


@dataclass(frozen=True)
class Lint:
    """What is to be said about one recipe file; ``recipe`` is None exactly when there are ``errors``.

    ``notes`` say what could not be checked because the model is not on this machine, and what a choice of
    the recipe means."""

    file: str
    recipe: Recipe | None
    errors: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    notes: tuple[Problem, ...] = ()


def load_recipe(path: str | os.PathLike[str], *, model: bool = False) -> Recipe:
    """The valid recipe in the file ``path``. Raises InputError with all problems, in line order.
    ``model`` as in :func:`lint`."""
    return _recipe_or_raise(lint(path, model=model))


def parse_recipe(raw: bytes | str, file: str = "<recipe>") -> Recipe:
    """Like :func:`load_recipe` for content already in memory; ``file`` names it in problems."""
    return _recipe_or_raise(lint_content(raw, file))


def lint(path: str | os.PathLike[str], *, model: bool = False) -> Lint:
    """All problems and warnings of the file ``path``; never raises on a bad file. With ``model`` also whether
    it suits its model, where that is on this machine."""
    file = visible(os.fspath(path), limit=4096)
    raw = read_bytes(path)
    if isinstance(raw, str):
        return Lint(file, None, (Problem(raw, file),), ())
    return lint_content(raw, file, pathlib.Path(path).resolve().parent if model else None)


def lint_content(raw: bytes | str, file: str = "<recipe>", base: pathlib.Path | None = None) -> Lint:
    """All problems and warnings of a recipe's content; ``file`` names it in problems. With ``base``, the
    folder where relative paths start, also whether it suits its model."""
    if isinstance(raw, str):
        raw = raw.encode("utf-8", "surrogatepass")
    document = read_document(raw, file)
    recipe: Recipe | None = None
    if not document.fatal:
        recipe = _check(document, base)
    errors, warnings, notes = map(_in_order, (document.problems, document.warnings, document.notes))
    return Lint(file, None if errors else recipe, errors, warnings, () if errors else notes)


def _in_order(problems: list[Problem]) -> tuple[Problem, ...]:
    return tuple(sorted(dict.fromkeys(problems), key=lambda problem: problem.line or 0))


def recipe_digest(recipe: Recipe) -> str:
    """SHA-256 (hex) of the recipe's values: the same whatever the file's comments, key order, formatting
    and whether defaults are written out.

    Defaults are left out of what is hashed, so that a key which a later trtspec adds does not disown the
    engines sealed before it. Hence the rule for schema version 1: a default never changes.
    """
    chosen = recipe.model_dump(mode="json", exclude_defaults=True)
    canonical = json.dumps(chosen, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML, every key written out; :func:`parse_recipe` gives an equal recipe back."""
    return dump_plain(plain_recipe(recipe))


def plain_recipe(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain data (what YAML and JSON have), ``kind`` first in each mapping."""
    plain: dict[str, Any] = _kind_first(recipe.model_dump(mode="json"))
    return plain


def _kind_first(data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    ordered = sorted(data.items(), key=lambda item: item[0] != "kind")
    return {key: _kind_first(value) for key, value in ordered}


def parse_section(name: str, value: Any) -> Any:
    """One top-level key of a recipe alone, such as ``quantization``. Raises InputError with all problems."""
    document = Document("", {**_PLACEHOLDERS, name: value}, lines={(): 1})
    try:
        return getattr(Recipe.model_validate(document.data), name)
    except ValidationError as failure:
        _note_schema_errors(document, failure)
        raise InputError([Problem(found.message, key=found.key) for found in document.problems]) from None


def _recipe_or_raise(result: Lint) -> Recipe:
    if result.recipe is None:
        raise InputError(result.errors)
    return result.recipe


# --------------------------------------------------------------------------- checking


def _check(document: Document, base: pathlib.Path | None) -> Recipe | None:
    data = document.data
    if data is None:
        text = "the file is empty; allowed: a recipe; write one with: trtspec init"
        document.problems.append(Problem(text, document.file, 1))
        return None
    if not isinstance(data, dict):
        text = (
            f"found {found(data)} at the top; allowed: a mapping (version:, name:, model: ...); add the keys"
        )
        document.problems.append(Problem(text, document.file, document.line_of(())))
        return None
    try:
        recipe: Recipe | None = Recipe.model_validate(data)
    except ValidationError as failure:
        recipe = None
        _note_schema_errors(document, failure)
    broken = {path[0] for path in document.noted if path}
    if recipe is None:
        recipe = Recipe.model_validate(_without(data, broken))
    _apply_rules(document, RULES, broken, recipe)
    if base is not None and not broken.intersection(("model", "backend", "quantization", "speculation")):
        here = look(recipe, base)
        _apply_rules(document, MODEL_RULES, broken, recipe, here)
        document.notes += [_problem(document, note) for note in here.notes]
    return recipe


_PLACEHOLDERS: dict[str, Any] = {
    "version": 1,
    "name": "x",
    "model": {"source": "x"},
    "backend": {"kind": "embedded"},
}


def _without(data: Mapping[str, Any], broken: set[str | int]) -> dict[str, Any]:
    """The recipe with its broken sections replaced by defaults, for the rules that do not look at them."""
    return {**_PLACEHOLDERS, **{key: value for key, value in data.items() if key not in broken}}


def _apply_rules(
    document: Document, rules: Mapping[str, Rule], broken: set[str | int], *arguments: Any
) -> None:
    for rule in rules.values():
        if not broken.intersection(rule.reads):
            found = [_problem(document, finding, rule.id) for finding in rule.check(*arguments)]
            match rule.severity:
                case "error":
                    document.problems += found
                case "warning":
                    document.warnings += found
                case "note":
                    document.notes += found


def _problem(document: Document, finding: Finding, rule: str = "") -> Problem:
    path, message = finding
    tagged = f"{message} [{rule}]" if rule else message
    return Problem(tagged, document.file, document.line_of(path), dotted(path) or None)


def _note_schema_errors(document: Document, failure: ValidationError) -> None:
    located = [
        (error["type"], *_locate(error["loc"]))
        for error in failure.errors(include_url=False, include_context=False, include_input=False)
    ]
    located.sort(key=lambda item: document.line_of(item[1]))
    explained = 0
    for kind, path, schema, parent in located:
        if any(path[:length] in document.noted for length in range(1, len(path) + 1)):
            continue
        document.noted.add(path)
        explained += 1
        if explained <= MAX_PROBLEMS:
            document.problems.append(_explain(document, kind, path, schema, parent))
    if explained > MAX_PROBLEMS:
        message = f"{explained - MAX_PROBLEMS} more problems are not shown; fix these first"
        document.problems.append(Problem(message, document.file, max(document.lines.values())))


def _explain(
    document: Document, kind: str, path: Path, schema: dict[str, Any], parent: dict[str, Any]
) -> Problem:
    value = _value_at(document.data, path)
    if kind == "extra_forbidden":
        message = _explain_unknown(path, parent)
    elif kind == "missing":
        message = f"missing; allowed: {allowed(schema)}; add it"
    elif kind in ("union_tag_not_found", "union_tag_invalid"):
        path = (*path, "kind")
        message = _explain_kind(schema, value)
    else:
        message = f"found {found(value)}; allowed: {allowed(schema)}; {_remedy(value, schema)}"
    return Problem(message, document.file, document.line_of(path), dotted(path))


def _value_at(data: Any, path: Path) -> Any:
    for part in path:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return None
    return data


# --------------------------------------------------------------------------- the schema in words


@cache
def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a recipe, for editors and validators."""
    schema: dict[str, Any] = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    schema.update(Recipe.model_json_schema())
    return schema


def resolve(schema: dict[str, Any]) -> dict[str, Any]:
    """``schema`` with its ``$ref`` replaced by what it refers to."""
    if "$ref" in schema:
        target: dict[str, Any] = json_schema()["$defs"][schema["$ref"].rsplit("/", 1)[1]]
        return target
    return schema


def variants(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Kind -> schema of a union tagged by ``kind``, in the order of the recipe; empty for anything else."""
    resolved = [resolve(option) for option in schema.get("oneOf", [])]
    return {option["properties"]["kind"]["const"]: option for option in resolved}


def _without_null(schema: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    options = schema.get("anyOf")
    if options is None:
        return schema, False
    return next(option for option in options if option.get("type") != "null"), True


def _locate(loc: Sequence[str | int]) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """Pydantic's location as (path in the file, schema there, schema of the mapping around it).

    Pydantic puts the tag of a union into the location; the file has no such level.
    """
    path: Path = ()
    schema, parent = json_schema(), json_schema()
    for part in loc:
        schema = resolve(_without_null(schema)[0])
        options = variants(schema)
        if part in options:
            schema = {**options[str(part)], "siblings": options}
            continue
        path, parent = (*path, part), schema
        schema = schema.get("items") or schema.get("properties", {}).get(part, {})
    return path, resolve(schema), parent


def found(value: Any) -> str:
    """A value of the file, as a message shows it."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else (".inf" if value > 0 else "-.inf")
    if isinstance(value, int | float):
        return visible(str(value), limit=45)
    if isinstance(value, str):
        return f"'{visible(value)}'"
    return "a list" if isinstance(value, list) else "a mapping"


def allowed(schema: dict[str, Any]) -> str:
    """What ``schema`` allows, in words."""
    schema, nullable = _without_null(schema)
    words = _allowed(resolve(schema))
    if not nullable:
        return words
    return "true, false or null" if words == "true or false" else f"{words}, or null"


def _allowed(schema: dict[str, Any]) -> str:
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return "one of " + ", ".join(str(value) for value in schema["enum"])
    kind = schema.get("type")
    if kind == "integer":
        return f"a whole number from {schema['minimum']} to {schema['maximum']}"
    if kind == "number":
        low, high = schema.get("minimum"), schema["maximum"]
        if low is None:
            return f"a number above {_shown(schema['exclusiveMinimum'])}, at most {_shown(high)}"
        return f"a number from {_shown(low)} to {_shown(high)}"
    if kind == "boolean":
        return "true or false"
    if kind == "array":
        return "a list of " + _several(schema["items"])
    if "pattern" in schema:
        return _PATTERN_WORDS[schema["pattern"]]
    if kind == "string":
        return "text, not empty" if schema.get("minLength") else "text"
    if "oneOf" in schema:
        return "a mapping with kind: " + ", ".join(variants(schema))
    return "a mapping with the keys " + ", ".join(schema.get("properties", {}))


def _several(schema: dict[str, Any]) -> str:
    if schema.get("type") == "array":
        return "lists of " + _several(schema["items"])
    return _allowed(schema).replace("a whole number", "whole numbers").removesuffix(", not empty")


def _shown(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else str(number)


def _remedy(value: Any, schema: dict[str, Any]) -> str:
    schema, nullable = _without_null(schema)
    schema = resolve(schema)
    kind = schema.get("type")
    if value is None:
        return "give it a value" if kind not in ("object", None) else "indent its keys below it, or remove it"
    if "enum" in schema or "const" in schema:
        return _remedy_choice(value, schema.get("enum", [schema.get("const")]))
    if kind in ("integer", "number"):
        return _remedy_number(value, schema)
    if kind == "boolean":
        if isinstance(value, str) and value.lower() in ("yes", "on", "y", "no", "off", "n"):
            return f"write {'true' if value.lower() in ('yes', 'on', 'y') else 'false'}"
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return f"write {value.lower()} without quotes"
        return "write true or false"
    if kind == "string":
        return _remedy_text(value, schema)
    if kind == "array":
        if isinstance(value, list):
            return f"it has {len(value)} items; shorten it to {schema['maxItems']}"
        return "write it as [a, b]" + (", or null" if nullable else "")
    if isinstance(value, str) and value in variants(schema):
        return f"write kind: {value} on an indented line below it"
    return "indent its keys below it"


def _remedy_choice(value: Any, choices: Sequence[Any]) -> str:
    names = [str(choice) for choice in choices]
    if isinstance(value, str) and value in names:
        return f"write {value} without quotes"
    if isinstance(value, str) and value:
        lowered = value.lower()
        near = [name for name in names if lowered == name.lower()]
        near = near or [name for name in names if lowered in name]
        near = near or difflib.get_close_matches(lowered, names, n=1, cutoff=0.5)
        if near:
            return f"did you mean {' or '.join(near[:3])}?"
    return f"write {names[0]}" if len(names) == 1 else "choose one of them"


def _remedy_number(value: Any, schema: dict[str, Any]) -> str:
    whole = schema["type"] == "integer"
    if isinstance(value, str):
        plain = resolve_plain(value.strip().replace("_", "").lstrip("0") or "0")
        if type(plain) is int or (isinstance(plain, float) and math.isfinite(plain) and not whole):
            quoted = isinstance(resolve_plain(value.strip()), int | float)
            return f"write {plain} without quotes" if quoted else f"write {plain}"
    elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        low, high = schema.get("minimum"), schema["maximum"]
        if low is None and value <= schema["exclusiveMinimum"]:
            return f"raise it above {_shown(schema['exclusiveMinimum'])}"
        if low is not None and value < low:
            return f"raise it to {_shown(low)} or more"
        if value > high:
            return f"lower it to {_shown(high)} or less"
        return f"write {round(value)}"
    return "write a whole number" if whole else "write a number"


def _remedy_text(value: Any, schema: dict[str, Any]) -> str:
    if isinstance(value, bool | int | float):
        return "put it in quotes"
    if not isinstance(value, str):
        return "write one text"
    if len(value) < schema.get("minLength", 0):
        return "fill it in"
    if len(value) > schema.get("maxLength", len(value)):
        return f"it has {len(value)} characters; shorten it to {schema['maxLength']}"
    foreign = next((c for c in value if ord(c) > 126), None)
    if foreign is not None:
        return f"replace {describe_character(foreign)}"
    similar = re.sub(r"[^a-z0-9._-]+", "-", value.lower()).strip("-._")[:63]
    return f"for example {similar}" if similar else "fill it in"


def _explain_kind(schema: dict[str, Any], value: Any) -> str:
    options = list(variants(schema))
    choice = value.get("kind") if isinstance(value, Mapping) else None
    listed = "allowed: one of " + ", ".join(options)
    if isinstance(value, Mapping) and "kind" not in value:
        return f"missing; {listed}; add it"
    return f"found {found(choice)}; {listed}; {_remedy_choice(choice, options)}"


def _explain_unknown(path: Path, parent: dict[str, Any]) -> str:
    key = str(path[-1])
    here = sorted(parent.get("properties", {}), key=lambda name: name != "kind")
    listed = "unknown key; allowed here: " + ", ".join(here)
    owners = [kind for kind, option in parent.get("siblings", {}).items() if key in option["properties"]]
    if owners:
        mine = parent["properties"]["kind"]["const"]
        others = " or ".join(f"kind: {owner}" for owner in owners)
        return f"{listed}; it belongs to {others}, not to kind: {mine}; remove it or change the kind"
    lowered = {name.lower(): name for name in here}
    close = difflib.get_close_matches(key.lower(), here, n=1, cutoff=0.6)
    foreign = next((c for c in key if ord(c) > 126 or not c.isprintable()), None)
    if foreign is not None and close:
        # It may look the same: a Cyrillic letter in a Latin word.
        return f"{listed}; it contains {describe_character(foreign)}; write {close[0]}"
    if key.lower() in lowered or close:
        return f"{listed}; did you mean {lowered.get(key.lower()) or close[0]}?"
    sections = _sections_with(key)
    if sections:
        return f"{listed}; it belongs under {' or '.join(sections)}; move it there"
    if foreign is not None:
        return f"{listed}; it contains {describe_character(foreign)}; remove it"
    return f"{listed}; remove it"


@cache
def _sections_with(key: str) -> list[str]:
    """Top-level sections that have ``key`` (in any variant); ``the top level`` when it is one itself."""
    result = []
    for name, section in json_schema()["properties"].items():
        if name == key:
            result.append("the top level")
        resolved = resolve(section)
        for option in variants(resolved).values() or [resolved]:
            if key in option.get("properties", {}) and name not in result:
                result.append(name)
    return result
