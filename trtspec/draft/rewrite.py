"""A recipe with other keys in one section, its text otherwise as it was: comments, order and layout.

Values are replaced where the YAML parser says they stand. What comes out is parsed again and must be exactly
the recipe that was wanted; where that fails, the recipe is written anew and the caller says so.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trtspec.errors import InputError
from trtspec.recipe import Recipe
from trtspec.recipe_file import dump_recipe, parse_recipe, plain_recipe

_FOLDERS = (
    ("model", "source"),
    ("speculation", "model", "source"),
    ("speculation", "heads"),
    ("speculation", "corpus"),
    ("quantization", "calibration", "data"),
    ("speculation", "quantization", "calibration", "data"),
)
"""Keys whose relative paths start at the recipe's folder."""

Keys = tuple[str, ...]


@dataclass(frozen=True)
class Rewritten:
    """``comments_kept`` False: the text was written anew, every key of it. Comments between the items of a
    list that was replaced are gone in any case."""

    text: str
    recipe: Recipe
    comments_kept: bool


def rewrite(text: str, changes: Mapping[str, Any], old_folder: Path | None, new_folder: Path) -> Rewritten:
    """The recipe in ``text`` with ``changes`` in its speculation, to be kept in ``new_folder``: relative
    paths that lead somewhere from ``old_folder`` lead there from the new one. ``old_folder`` None: unknown.

    Raises InputError where the changed recipe breaks a rule.
    """
    recipe = parse_recipe(text)
    plain = plain_recipe(recipe)
    edits: dict[Keys, Any] = {
        ("speculation", key): _plain(value)
        for key, value in changes.items()
        if _plain(value) != plain["speculation"].get(key)
    }
    if old_folder is not None and old_folder.resolve() != new_folder.resolve():
        edits |= _moved(plain, old_folder.resolve(), new_folder.resolve())
    for keys, value in edits.items():
        _section(plain, keys)[keys[-1]] = value
    wanted = parse_recipe(json.dumps(plain))
    edited = _edit(text, edits)
    if edited is not None:
        try:
            if parse_recipe(edited) == wanted:
                return Rewritten(edited, wanted, True)
        except InputError:
            pass
    return Rewritten(dump_recipe(wanted), wanted, False)


def has_relative_paths(recipe: Recipe) -> bool:
    """Whether it names what looks like a folder or file that starts at the recipe's own folder."""
    return any(
        isinstance(value, str)
        and not Path(value).is_absolute()
        and value != "builtin"
        and not value.startswith("sample:")
        and (value.startswith(".") or value.count("/") != 1)  # OWNER/NAME is a hub id
        for value in _named(plain_recipe(recipe))
    )


def _named(plain: dict[str, Any]) -> list[Any]:
    """The values of :data:`_FOLDERS`, None where there is none."""
    found = []
    for keys in _FOLDERS:
        value: Any = plain
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        found.append(value)
    return found


def _plain(value: Any) -> Any:
    return [list(path) for path in value] if isinstance(value, tuple | list) else value


def _section(plain: dict[str, Any], keys: Keys) -> dict[str, Any]:
    for key in keys[:-1]:
        plain = plain[key]
    return plain


def _moved(plain: dict[str, Any], old: Path, new: Path) -> dict[Keys, str]:
    found: dict[Keys, str] = {}
    for keys, value in zip(_FOLDERS, _named(plain), strict=True):
        if isinstance(value, str) and not Path(value).is_absolute() and (old / value).exists():
            found[keys] = os.path.relpath(old / value, new)
    return found


def _edit(text: str, edits: Mapping[Keys, Any]) -> str | None:
    """``text`` with the values of ``edits``; None where the place of one cannot be found."""
    try:
        top = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return None
    pieces: list[tuple[int, int, str]] = []
    for keys, value in edits.items():
        section = top
        for key in keys[:-1]:
            section = _entry(section, key)[1]
        if not isinstance(section, yaml.MappingNode) or not section.value:
            return None
        name, shown = keys[-1], json.dumps(value, ensure_ascii=False)
        _, node = _entry(section, name)
        if node is not None:
            start, end = node.start_mark.index, _end(node)
            if isinstance(node, yaml.SequenceNode) and not node.flow_style:
                shown, start = f" {shown}", len(text[:start].rstrip())
            pieces.append((start, end, shown))
        elif section.flow_style:
            end = section.value[0][1].end_mark.index
            pieces.append((end, end, f", {name}: {shown}"))
        else:
            first, behind = section.value[0]
            line_end = text.find("\n", behind.end_mark.index - 1)
            at = len(text) if line_end < 0 else line_end
            pieces.append((at, at, f"\n{' ' * first.start_mark.column}{name}: {shown}"))
    for start, end, shown in sorted(pieces, reverse=True):
        text = text[:start] + shown + text[end:]
    return text


def _end(node: yaml.Node) -> int:
    """Where the value ends; a block's own end mark is behind the comments that follow it."""
    if isinstance(node, yaml.SequenceNode) and not node.flow_style and node.value:
        return _end(node.value[-1])
    return int(node.end_mark.index)


def _entry(section: Any, key: str) -> tuple[Any, Any]:
    """(key node, value node) of ``key``; Nones where there is none."""
    if isinstance(section, yaml.MappingNode):
        for name, node in section.value:
            if name.value == key:
                return name, node
    return None, None
