"""Strict YAML for recipes: bytes to plain data, the line of every key, and every problem at once.

The subset is the one a reader expects without knowing YAML: mappings, lists, text, numbers, ``true``,
``false`` and ``null``. Anchors, aliases, merge keys, tags and several documents are refused; ``no``, ``010``,
``0x10``, ``12:30`` and ``2024-01-01`` are text (YAML 1.1 would make them something else). Built on PyYAML's
event stream rather than on its composer, so that nesting cannot exhaust the stack and reading stops at
the first absurdity.
"""

from __future__ import annotations

import os
import re
import stat
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from trtspec.errors import Problem

Path = tuple[str | int, ...]

MAX_FILE_BYTES = 1_000_000
MAX_DEPTH = 16
MAX_EVENTS = 10_000
MAX_PROBLEMS = 50

_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)\.[0-9]*|(0|[1-9][0-9]*)(?=[eE]))([eE][-+]?[0-9]+)?")
_SPECIAL_FLOAT = re.compile(r"([-+]?)\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")

# What PyYAML says, and what a person can act on.
_SYNTAX = (
    ("mapping values are not allowed", "a second ': ' on the line; put text that contains ': ' in quotes"),
    ("could not find expected ':'", "a line that is neither 'key: value' nor '- item'; add the ':'"),
    ("expected <block end>", "indentation that fits no key above; align it with its neighbours"),
    ("found unexpected end of stream", "text in quotes that never ends; close the quote"),
    ("expected ',' or", "a list or mapping in brackets that is not closed; close it"),
    (
        "found unknown escape character",
        "an unknown \\ escape in double quotes; double it or use single quotes",
    ),
    ("while scanning a tag", "a tag ('!'); recipes use none, put text that starts with '!' in quotes"),
    ("that cannot start any token", "a character that cannot start a value; put the text in quotes"),
    ("found undefined tag handle", "a tag ('!'); recipes use none, put text that starts with '!' in quotes"),
    ("expected alphabetic or numeric", "'&' or '*' without a name; put text that starts so in quotes"),
)

# Errors that PyYAML finds far below the line that causes them.
_BLAME_THE_START = ("found unexpected end of stream", "expected ',' or", "could not find expected ':'")


class _Refused:
    """Stands for a value that could not be read; its problem is already noted."""

    def __repr__(self) -> str:
        return "<refused>"


REFUSED = _Refused()


@dataclass
class Document:
    """What one file holds.

    ``data`` is plain Python (dict, list, str, int, float, bool, None), or None when ``fatal``: then the text
    could not be read to its end and ``problems`` says why. ``lines`` maps each path to its 1-based line.
    ``noted`` holds the paths whose value is already complained about.
    """

    file: str
    data: Any = None
    fatal: bool = False
    lines: dict[Path, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)
    noted: set[Path] = field(default_factory=set)

    def line_of(self, path: Path) -> int:
        """Line of the key, or of the nearest mapping or list around it that the file has."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


class _Stop(Exception):
    """Reading further makes no sense; the reason is noted."""


def dotted(path: Path) -> str:
    """``("speculation", "choices", 2)`` as ``speculation.choices[2]``; odd characters are escaped."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + visible(part)
    return text


def visible(text: str, limit: int = 60) -> str:
    """``text`` cut to ``limit`` characters, what cannot be seen or printed as escapes."""
    shown = text if len(text) <= limit else text[: limit - 3] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in shown)


def resolve_plain(text: str) -> Any:
    """The value of an unquoted YAML scalar (YAML 1.2 core schema, without octal and hexadecimal)."""
    if text in _NULLS:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if _INTEGER.fullmatch(text):
        return int(text) if len(text) <= 40 else REFUSED
    if _FLOAT.fullmatch(text):
        return float(text)
    special = _SPECIAL_FLOAT.fullmatch(text)
    if special:
        return float("nan") if special.group(1) is None else float(f"{special.group(1)}inf")
    return text


def read_bytes(path: str | os.PathLike[str]) -> bytes | str:
    """The file's bytes, or a message why there are none."""
    try:
        if "\0" in os.fspath(path):
            return "the file name holds a NUL character; allowed: a path; check the name"
        # Non-blocking, so that a FIFO in the place of a recipe cannot hang the command.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISDIR(mode):
                return "is a folder; allowed: a recipe file; name the file in it"
            if not stat.S_ISREG(mode):
                return "is not a regular file; allowed: a recipe file; copy its content into one"
            with open(descriptor, "rb", closefd=False) as handle:
                raw = handle.read(MAX_FILE_BYTES + 1)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return "no such file; check the path, or write a recipe with: trtspec init"
    except OSError as error:
        return f"cannot be read ({os.strerror(error.errno or 0)}); check the path and its permissions"
    if len(raw) > MAX_FILE_BYTES:
        return f"is larger than {MAX_FILE_BYTES // 1_000_000} MB; a recipe has a few kB; is this a recipe?"
    return raw


def read_document(raw: bytes, file: str) -> Document:
    """Read one YAML file. Never raises on bad content: see :attr:`Document.problems`."""
    document = Document(file)
    text = _decode(raw, document)
    if text is None or not _check_characters(text, document):
        document.fatal = True
        return document
    reader = _Reader(text, document)
    try:
        document.data = reader.read()
    except _Stop:
        document.fatal = True
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if error.context_mark and any(said in str(error) for said in _BLAME_THE_START):
            mark = error.context_mark
        _note(document, mark.line + 1 if mark else None, _explain_syntax(error, text))
        document.fatal = True
    except (yaml.YAMLError, ValueError, OverflowError):
        # The scanner hands numbers of escapes and directives to chr() and int() unchecked.
        _note(
            document,
            reader.line,
            "not valid YAML: an escape or directive with an impossible number; remove it",
        )
        document.fatal = True
    return document


# --------------------------------------------------------------------------- text


def _note(document: Document, line: int | None, message: str, path: Path = ()) -> None:
    document.problems.append(Problem(message, document.file, line, dotted(path) or None))
    if len(document.problems) >= MAX_PROBLEMS:
        raise _Stop


def _decode(raw: bytes, document: Document) -> str | None:
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        _note(document, 1, "the file is UTF-16; allowed: UTF-8; save it as UTF-8")
        return None
    if raw.startswith(b"\xef\xbb\xbf"):
        raw = raw[3:]
        message = "starts with a byte order mark (accepted); save the file as UTF-8 without BOM"
        document.warnings.append(Problem(message, document.file, 1))
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        _note(document, line, f"byte 0x{raw[error.start]:02x} is not UTF-8; allowed: UTF-8; save it as UTF-8")
        return None


def odd_character(text: str) -> str | None:
    """Name of the first character that has no place in a recipe (control, bidirectional override,
    line separator, lone surrogate), or None. Newlines and tabs are not odd."""
    for character in text:
        if " " <= character <= "~" or character in "\n\t":
            continue
        if character in "\u200c\u200d":  # joiners: Indic scripts and emoji need them
            continue
        if unicodedata.category(character) in ("Cc", "Cs", "Cf", "Zl", "Zp"):
            return describe_character(character)
    return None


def describe_character(character: str) -> str:
    """``U+0430 CYRILLIC SMALL LETTER A``."""
    names = {"\0": "NUL", "\r": "CARRIAGE RETURN", "\x1b": "ESCAPE", "\x85": "NEXT LINE"}
    name = names.get(character) or unicodedata.name(character, "")
    return f"U+{ord(character):04X} {name}".rstrip()


def _check_characters(text: str, document: Document) -> bool:
    if "\r\n" in text:
        line = text.count("\n", 0, text.index("\r\n")) + 1
        message = "Windows line ends (CRLF) are accepted; save the file with LF to keep its bytes portable"
        document.warnings.append(Problem(message, document.file, line))
    before = len(document.problems)
    for number, line_text in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        if len(document.problems) - before >= 10:
            break
        odd = odd_character(line_text)
        if odd is not None:
            _note(document, number, f"found the character {odd}; allowed: printable text; remove it")
        stripped = line_text.lstrip(" \t")
        if stripped and "\t" in line_text[: len(line_text) - len(stripped)]:
            _note(document, number, "found a tab in the indentation; allowed: spaces; replace it with spaces")
    return len(document.problems) == before


def _explain_syntax(error: yaml.MarkedYAMLError, text: str) -> str:
    said = f"{error.context or ''} {error.problem or ''}"
    if "mapping values are not allowed" in said and _is_first_colon(error.problem_mark, text):
        return (
            "not valid YAML: found a key indented deeper than the keys above it; align it with its "
            "neighbours, or end the line above with ':' if it belongs under it"
        )
    if "found character '\\t'" in said:
        return "found a tab; allowed: spaces between key and value; replace it with a space"
    for pattern, meaning in _SYNTAX:
        if pattern in said:
            return f"not valid YAML: found {meaning}"
    return f"not valid YAML: {visible(error.problem or str(error))}; see recipes/reference.yaml"


def _is_first_colon(mark: yaml.Mark | None, text: str) -> bool:
    """Whether nothing before ``mark`` on its line is a key already: then the indentation is to blame."""
    if mark is None:
        return False
    before = re.split("\r\n|[\n\r\x85\u2028\u2029]", text)[mark.line][: mark.column]
    return re.search(r":(\s|$)", before) is None


# --------------------------------------------------------------------------- events


class _Reader:
    """Walks the event stream of one text, noting problems in its document."""

    def __init__(self, text: str, document: Document) -> None:
        self.document = document
        self.events: Iterator[yaml.Event] = yaml.parse(text, Loader=yaml.SafeLoader)
        self.num_events = 0
        self.line = 1

    def next(self) -> yaml.Event:
        event = next(self.events)
        self.num_events += 1
        self.line = event.start_mark.line + 1  # type: ignore[union-attr]  # its parser always sets marks
        if self.num_events > MAX_EVENTS:
            self.note(f"more than {MAX_EVENTS} values; a recipe has about a hundred; is this a recipe?")
            raise _Stop
        return event

    def note(self, message: str, path: Path = ()) -> None:
        _note(self.document, self.line, message, path)

    def read(self) -> Any:
        self.next()  # the start of the stream
        event = self.next()
        if isinstance(event, yaml.StreamEndEvent):
            return None
        data = self.value(self.next(), (), self.line)
        self.next()  # the end of the document
        event = self.next()
        if isinstance(event, yaml.DocumentStartEvent):
            self.note("a second document starts; allowed: one recipe per file; split the file")
        return data

    def value(self, event: yaml.Event, path: Path, line: int) -> Any:
        self.document.lines[path] = line
        if len(path) > MAX_DEPTH:
            self.note(f"nested more than {MAX_DEPTH} deep; allowed: 4; see recipes/reference.yaml", path[:4])
            raise _Stop
        if isinstance(event, yaml.AliasEvent):
            self.note(
                f"alias *{visible(str(event.anchor))}; recipes are flat on purpose; write the value out", path
            )
            self.document.noted.add(path)
            return REFUSED
        if not isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent):
            raise ValueError(f"unexpected {event}")
        if event.anchor is not None:
            self.note(f"anchor &{visible(event.anchor)}; recipes are flat on purpose; remove it", path)
        if event.tag is not None:
            tag = visible(event.tag.replace("tag:yaml.org,2002:", "!!"))
            self.note(f"tag {tag}; recipes use none; remove it", path)
            self.document.noted.add(path)
        if isinstance(event, yaml.ScalarEvent):
            return self.scalar(event, path)
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Any] = []
            while not isinstance(event := self.next(), yaml.SequenceEndEvent):
                items.append(self.value(event, (*path, len(items)), self.line))
            return items
        return self.mapping(path)

    def scalar(self, event: yaml.ScalarEvent, path: Path) -> Any:
        text: str = event.value
        odd = odd_character(text)
        if odd is not None:
            self.note(f"found the character {odd}; allowed: printable text; remove it", path)
            self.document.noted.add(path)
            return REFUSED
        if not event.implicit[0]:
            return text
        value = resolve_plain(text)
        if value is REFUSED:
            self.note(f"a number of {len(text)} digits; allowed: at most 40; write a smaller one", path)
            self.document.noted.add(path)
        return value

    def mapping(self, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        while not isinstance(event := self.next(), yaml.MappingEndEvent):
            line = self.line
            if not isinstance(event, yaml.ScalarEvent):
                self.note(
                    "a list, mapping or alias as a key; allowed: plain words; see recipes/reference.yaml",
                    path,
                )
                self.value(event, (*path, "?"), line)
                self.value(self.next(), (*path, "?"), line)
                continue
            key: str = event.value
            child = (*path, key)
            if key == "<<" and event.implicit[0]:
                self.note("merge key <<; recipes are flat on purpose; write the keys out", path)
                self.value(self.next(), (*path, "?"), line)
                continue
            if event.anchor is not None or event.tag is not None:
                self.note("an anchor or tag on a key; recipes use none; remove it", child)
            if key in result:
                first = self.document.lines[child]
                self.note(f"given twice, first on line {first}; allowed: once; keep one", child)
                kept = {k: v for k, v in self.document.lines.items() if k[: len(child)] == child}
                self.value(self.next(), child, line)
                self.document.lines.update(kept)
                continue
            result[key] = self.value(self.next(), child, line)
        return result


# --------------------------------------------------------------------------- writing


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    plain = isinstance(resolve_plain(text), str) and text.isprintable() and text == text.strip()
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


def _represent_list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(list, _represent_list)


def dump_plain(data: Any) -> str:
    """``data`` (dict, list, str, int, float, bool, None) as YAML that :func:`read_document` reads back."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
