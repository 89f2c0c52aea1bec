"""What each TensorRT-LLM version knows: the flags of its commands, the keys of its classes.

``data/VERSION.json`` holds one version; its ``read`` says of each part how it was learned (source, container
record, documentation, carried over). Nothing that trtspec renders goes out with a flag, key or value that the
version's table does not have: :meth:`Facts.check_argv` and :meth:`Facts.check_keys`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal

from trtspec.errors import InputError, Problem
from trtspec.versions import VersionRange, parse_version

DATA_DIR = Path(__file__).parent / "data"
VERSIONS = ("0.17.0", "0.21.0", "1.0.0", "1.1.0", "1.2.1", "1.3.0rc27", "1.4.0rc4")
"""The versions with a table, oldest first."""
Kind = Literal["tensorrt", "pytorch"]


@dataclass(frozen=True)
class Flag:
    """A command's option. ``type``: int, float, str, switch, or "" where ``choices`` are listed."""

    name: str
    type: str
    choices: tuple[str, ...]
    default: Any
    many: bool
    deprecated: bool


@dataclass(frozen=True)
class Field:
    """A key of a class. ``type`` as TensorRT-LLM writes it (``int|null``, ``KvCacheConfig``)."""

    name: str
    type: str
    default: Any
    required: bool
    rules: tuple[str, ...]


@dataclass(frozen=True)
class Facts:
    """One version's table."""

    version: str
    backends: tuple[Kind, ...]
    read: Mapping[str, str]
    commands: Mapping[str, Mapping[str, Flag]]
    """Command -> option or alias -> flag. Commands: trtllm-build, quantize.py, medusa/convert_checkpoint.py,
    eagle/convert_checkpoint.py, trtllm-serve."""
    classes: Mapping[str, Mapping[str, Field]]
    """Class -> key -> field, with the keys of its bases."""
    decoding_types: Mapping[str, str]
    """Value of ``decoding_type`` -> class."""
    enums: Mapping[str, tuple[str, ...]]

    def check_argv(self, command: str, argv: Sequence[str]) -> list[str]:
        """What is wrong with the options ``argv`` (without the command); positional words are skipped."""
        flags = self.commands.get(command)
        if flags is None:
            return [f"{command} does not exist in TensorRT-LLM {self.version}{_elsewhere(command, None)}"]
        problems: list[str] = []
        index = 0
        while index < len(argv):
            word = argv[index]
            index += 1
            if not word.startswith("-"):
                continue
            name, _, inline = word.partition("=")
            flag = flags.get(name)
            if flag is None:
                problems.append(
                    f"{command} {name}: unknown in TensorRT-LLM {self.version}{_elsewhere(command, name)}"
                )
                while index < len(argv) and not argv[index].startswith("--"):
                    index += 1
                continue
            if flag.type == "switch":
                continue
            values = [inline] if inline else []
            while index < len(argv) and not argv[index].startswith("--") and (flag.many or not values):
                values.append(argv[index])
                index += 1
            problems += [f"{command} {name}: {wrong}" for wrong in _wrong_values(flag, values)]
        return problems

    def check_keys(self, class_name: str, values: Mapping[str, Any], where: str = "") -> list[str]:
        """What is wrong with a mapping for ``class_name``: unknown or missing keys, values of another type.

        Nested classes are checked too; ``speculative_config`` by its ``decoding_type``."""
        fields = self.classes.get(class_name)
        if fields is None:
            return [f"{where or class_name}: no {class_name} in TensorRT-LLM {self.version}"]
        problems: list[str] = []
        for key, value in values.items():
            path = f"{where}.{key}" if where else key
            if key == "decoding_type" and class_name in self.decoding_types.values():
                continue
            field = fields.get(key)
            if field is None:
                close = get_close_matches(key, fields, n=1, cutoff=0.8)
                nearest = f"; the nearest key is {close[0]}" if close else ""
                problems.append(
                    f"{path}: unknown in {class_name} of TensorRT-LLM {self.version}"
                    f"{_elsewhere(class_name, key)}{nearest}"
                )
            else:
                problems += self._check_value(field.type, value, path)
        problems += [
            f"{where + '.' if where else ''}{field.name}: missing; {class_name} requires it"
            for field in fields.values()
            if field.required and field.name not in values
        ]
        return problems

    def _check_value(self, wanted: str, value: Any, path: str) -> list[str]:
        if isinstance(value, Mapping):
            if "SpeculativeConfig" in wanted:
                return self._check_speculative(value, path)
            nested = next((part for part in _alternatives(wanted) if part in self.classes), None)
            return [] if nested is None else self.check_keys(nested, value, path)
        if any(self._fits(part, value) for part in _alternatives(wanted)):
            return []
        return [f"{path}: found {json.dumps(value)}; allowed: {wanted}"]

    def _check_speculative(self, value: Mapping[str, Any], path: str) -> list[str]:
        kind = value.get("decoding_type")
        if not isinstance(kind, str) or kind not in self.decoding_types:
            known = ", ".join(sorted(self.decoding_types))
            return [f"{path}.decoding_type: found {kind!r}; TensorRT-LLM {self.version} allows: {known}"]
        return self.check_keys(self.decoding_types[kind], value, path)

    def _fits(self, wanted: str, value: Any) -> bool:
        if wanted == "null":
            return value is None
        if wanted in ("int", "float", "str", "bool"):
            number = isinstance(value, int) and not isinstance(value, bool)
            return {
                "int": number,
                "float": number or isinstance(value, float),
                "str": isinstance(value, str),
                "bool": isinstance(value, bool),
            }[wanted]
        if wanted.startswith("Literal["):
            return str(value) in re.findall(r"'([^']*)'", wanted)
        if wanted in self.enums:
            return value in self.enums[wanted]
        if wanted.startswith(("list", "set")):
            return isinstance(value, list | tuple)
        if wanted.startswith("dict"):
            return isinstance(value, Mapping)
        # A class wants a mapping; the rest (Path, object, any) takes what it gets.
        return wanted not in self.classes


def load_facts(version: str) -> Facts:
    """The table of ``version``. InputError, with the nearest version that has one, if there is none."""
    try:
        parsed = parse_version(version)
    except ValueError as error:
        raise InputError([Problem(f"TensorRT-LLM version: {error}")]) from None
    for known in VERSIONS:
        if parse_version(known) == parsed:
            return _load(known)
    raise InputError(
        [
            Problem(
                f"TensorRT-LLM {version}: not in the table of known versions; allowed: "
                f"{', '.join(VERSIONS)}; the nearest is {nearest_version(version)}"
            )
        ]
    )


def nearest_version(version: str) -> str:
    """Of the known versions next to ``version``, below and above, the one that differs in a later number, or
    by less; beyond the newest it is the newest."""
    wanted = parse_version(version)
    below = [known for known in VERSIONS if parse_version(known) <= wanted]
    above = [known for known in VERSIONS if parse_version(known) > wanted]
    return min((*below[-1:], *above[:1]), key=lambda known: _distance(parse_version(known), wanted))


def _distance(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(abs(x - y) for x, y in zip(a, b, strict=True))


def versions_for(kind: str, asked: VersionRange) -> tuple[str, ...]:
    """The known versions with that backend inside the range, oldest first."""
    return tuple(v for v in VERSIONS if kind in _load(v).backends and asked.admits(v))


def versions_with(owner: str, name: str | None) -> tuple[str, ...]:
    """The known versions that have the command or class ``owner`` and, if given, its flag or key ``name``."""
    found = []
    for version in VERSIONS:
        facts = _load(version)
        table: Mapping[str, Any] | None = facts.commands.get(owner, facts.classes.get(owner))
        if table is not None and (name is None or name in table):
            found.append(version)
    return tuple(found)


def _elsewhere(owner: str, name: str | None) -> str:
    found = versions_with(owner, name)
    return f"; it exists in {', '.join(found)}" if found else "; no known version has it"


def _alternatives(wanted: str) -> list[str]:
    """``int|null`` -> [int, null]; a bar inside brackets does not separate."""
    return re.findall(r"(?:[^|\[\]]|\[(?:[^\[\]]|\[[^\[\]]*\])*\])+", wanted)


def _wrong_values(flag: Flag, values: Sequence[str]) -> Iterator[str]:
    if not values:
        yield "a value is missing"
    for value in values:
        if flag.choices and value not in flag.choices:
            yield f"found {value}; allowed: {', '.join(flag.choices)}"
        elif flag.type in ("int", "float"):
            try:
                float(value) if flag.type == "float" else int(value)
            except ValueError:
                yield f"found {value}; allowed: {flag.type}"


@cache
def _load(version: str) -> Facts:
    raw = json.loads((DATA_DIR / f"{version}.json").read_text("utf-8"))
    classes: dict[str, dict[str, Field]] = {}

    def fields_of(name: str) -> dict[str, Field]:
        if name not in classes:
            entry, fields = raw["classes"][name], {}
            for base in entry.get("bases", ()):
                fields.update(fields_of(base))
            for key, field in entry["fields"].items():
                fields[key] = Field(
                    key,
                    field["type"],
                    field.get("default"),
                    field.get("required", False),
                    tuple(field.get("rules", ())),
                )
            classes[name] = fields
        return classes[name]

    for name in raw["classes"]:
        fields_of(name)
    return Facts(
        version,
        tuple(raw["backends"]),
        raw["read"],
        {command: _flags(options) for command, options in raw["commands"].items()},
        classes,
        {entry["decoding_type"]: name for name, entry in raw["classes"].items() if "decoding_type" in entry},
        {name: tuple(values) for name, values in raw["enums"].items()},
    )


def _flags(options: Mapping[str, Mapping[str, Any]]) -> dict[str, Flag]:
    flags = {}
    for name, option in options.items():
        flag = Flag(
            name,
            option.get("type", ""),
            tuple(option.get("choices", ())),
            option.get("default"),
            option.get("many", False),
            option.get("deprecated", False),
        )
        for spelling in (name, *option.get("aliases", ())):
            flags[spelling] = flag
    return flags
