"""What checks say of themselves (summary, how, details, warnings, notes), in Chinese.

Checks are written once, in English, and that is the datum. For a Chinese page each sentence is recognised by
its template in ``data/phrases.zh.json`` and said in Chinese with the same numbers. A template is a text with
fields: ``{0#}`` is a number, ``{0}`` anything, itself said in Chinese where it is a phrase. What no template
fits (names, a model's text, a message of another program) stands as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

from trtspec.user_files import visible
from trtspec.verify.gates import Check
from trtspec.verify.i18n import Lang
from trtspec.verify.report import Report

FILE = Path(__file__).parent.parent / "data" / "phrases.zh.json"
_NUMBER = r"[-+±]?(?:\d[\d.,]*(?:e[-+]?\d+)?|nan|inf) ?%?"
_CLAUSE = r"(?:\((?:[^()]|\([^()]*\))*\)|(?!; )[^(])+?"
_FIELD = re.compile(r"\{(\d+)(#?)\}")
_JOINTS = (("; ", "；"), (". ", "。"))
_DEEPEST = 6


def told(report: Report, lang: Lang) -> Report:
    """``report`` with what its checks say in ``lang``; numbers, names and evidence are the same. What a file,
    a model or a judge brought into it is made visible: no form of a report can be forged from inside."""
    report = replace(
        report,
        **{one.name: _visible(getattr(report, one.name)) for one in fields(report) if one.name != "checks"},
    )
    report = replace(report, checks=tuple(_visible_check(check) for check in report.checks))
    if lang == "en":
        return report
    checks = tuple(
        replace(
            check,
            summary=in_chinese(check.summary),
            how=in_chinese(check.how),
            details=tuple(map(in_chinese, check.details)),
            warnings=tuple(map(in_chinese, check.warnings)),
            evidence=_labels(check.evidence),
        )
        for check in report.checks
    )
    return replace(report, checks=checks, notes=tuple(map(in_chinese, report.notes)))


def _visible_check(check: Check) -> Check:
    texts = ("name", "summary", "how", "unit", "n_unit", "warnings", "details", "evidence")
    return replace(check, **{name: _visible(getattr(check, name)) for name in texts})


def _visible(value: Any) -> Any:
    if isinstance(value, str):
        return value if isinstance(value, Enum) else visible(value)
    if isinstance(value, Mapping):
        return {_visible(key): _visible(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_visible, value))
    return value


def _labels(evidence: dict[str, Any]) -> dict[str, Any]:
    """``evidence`` with the names of loads, which plots show, in Chinese."""
    loads = evidence.get("loads")
    if isinstance(loads, list):
        evidence = {**evidence, "loads": [in_chinese(str(one)) for one in loads]}
    listed = evidence.get("by_load")
    if not isinstance(listed, list):
        return evidence
    said = [
        {**one, "load": in_chinese(str(one["load"]))} if isinstance(one, dict) and "load" in one else one
        for one in listed
    ]
    return {**evidence, "by_load": said}


def in_chinese(text: str) -> str:
    """``text`` in Chinese, as far as its templates are known."""
    return _said(text, 0)


@dataclass(frozen=True)
class _Phrase:
    clause: re.Pattern[str]
    """Its fields end where a clause ends, at a semicolon outside brackets."""
    anything: re.Pattern[str]
    chinese: str
    numbers: frozenset[str]


@cache
def _phrases() -> tuple[_Phrase, ...]:
    """All templates, those with the most fixed text first."""
    table: dict[str, str] = json.loads(FILE.read_text(encoding="utf-8"))
    found = []
    for english, chinese in sorted(table.items(), key=lambda pair: -len(_FIELD.sub("", pair[0]))):
        numbers = frozenset(number for number, kind in _FIELD.findall(english) if kind)
        clause, anything = _pattern(english, _CLAUSE), _pattern(english, ".+?")
        found.append(_Phrase(clause, anything, chinese, numbers))
    return tuple(found)


def _pattern(english: str, anything: str) -> re.Pattern[str]:
    pattern, at = "", 0
    for field in _FIELD.finditer(english):
        number, kind = field.groups()
        pattern += re.escape(english[at : field.start()])
        pattern += f"(?P<f{number}>{_NUMBER if kind else anything})"
        at = field.end()
    return re.compile(pattern + re.escape(english[at:]), re.DOTALL)


@lru_cache(maxsize=4096)
def _said(text: str, depth: int) -> str:
    if depth > _DEEPEST or not re.search("[A-Za-z]{2}", text):
        return text
    whole = _whole(text, depth, clause=True)
    if whole is not None:
        return whole
    for joint, between in _JOINTS:
        parts = _parts(text, joint)
        if len(parts) > 1:
            said = [_said(part, depth) for part in parts]
            if said != parts:
                return between.join(said)
    return _whole(text, depth, clause=False) or text


def _parts(text: str, joint: str) -> list[str]:
    """``text`` cut at each ``joint`` outside brackets."""
    parts: list[str] = []
    for piece in text.split(joint):
        if parts and parts[-1].count("(") > parts[-1].count(")"):
            parts[-1] += joint + piece
        else:
            parts.append(piece)
    return parts


def _whole(text: str, depth: int, *, clause: bool) -> str | None:
    """All of ``text`` by that template which leaves the least of it in English; None where none fits."""
    found = []
    for phrase in _phrases():
        pattern = phrase.clause if clause else phrase.anything
        if match := pattern.fullmatch(text):
            fields = {
                name[1:]: value if name[1:] in phrase.numbers else _said(value, depth + 1)
                for name, value in match.groupdict().items()
            }
            found.append(_FIELD.sub(partial(_filled, fields), phrase.chinese))
    return min(found, key=lambda said: len(re.findall("[A-Za-z]", said)), default=None)


def _filled(fields: dict[str, str], field: re.Match[str]) -> str:
    return fields[field[1]]
