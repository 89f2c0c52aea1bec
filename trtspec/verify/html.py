"""A report as one HTML file: no script, no network, light and dark as the reader's system is, any width.

Pure: the same report gives the same bytes. Meaning never rests on colour alone: every verdict has its word
and a mark, every plot a text and its numbers. Everything that comes from the report is escaped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from trtspec.verify.answers import answers
from trtspec.verify.gates import Check, Verdict
from trtspec.verify.i18n import Lang, Say, check_title, speaker
from trtspec.verify.phrases import told
from trtspec.verify.plots import MARKS, Figure, figures
from trtspec.verify.render import cells, provenance, verdict
from trtspec.verify.report import VERDICT_WORDS, Report, check_fields, pitfalls

_STYLE_FILE = Path(__file__).parent.parent / "data" / "report.css"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""A browser then fetches nothing, whatever the page holds."""
_MOST_LISTED = 40
_LANG_TAG = {"en": "en", "zh": "zh-Hans"}


def page(report: Report, lang: Lang = "en") -> str:
    """The whole document."""
    say, report = speaker(lang), told(report, lang)
    title = say("title", name=report.recipe_name)
    sections = [
        ("checks", say("checks"), _table(report.checks, say)),
        ("plots", say("plots"), _plots(figures(report, say), say)),
        ("details", say("details"), "".join(_detail(*one, say) for one in enumerate(report.checks))),
        ("pitfalls", say("pitfalls"), _pitfalls(report, say)),
        ("notes", say("notes"), "".join(f"<p>{escape(note)}</p>" for note in report.notes)),
        ("provenance", say("provenance"), _provenance(report, say)),
    ]
    sections = [one for one in sections if one[2]]
    links = "".join(f'<li><a href="#{key}">{escape(head)}</a></li>' for key, head, _ in sections)
    body = "".join(
        f'<section id="{key}" aria-labelledby="h-{key}"><h2 id="h-{key}">{escape(head)}</h2>'
        f"{content}</section>"
        for key, head, content in sections
    )
    return (
        f'<!DOCTYPE html>\n<html lang="{_LANG_TAG[lang]}">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE_FILE.read_text(encoding='utf-8')}</style>\n</head>\n<body>\n"
        f"{_header(report, title, say, lang)}"
        f'<nav aria-label="{escape(say("contents"))}"><ul>{links}</ul></nav>\n<main>\n{body}\n</main>\n'
        "</body>\n</html>\n"
    )


def _header(report: Report, title: str, say: Say, lang: Lang) -> str:
    word = VERDICT_WORDS[report.exit_code]
    label = "" if report.fidelity == "strict" else f"<p class='label'>{escape(say('approximate-label'))}</p>"
    return (
        f'<header class="{word.lower()}"><h1>{escape(title)}</h1>'
        f'<p class="verdict"><span class="mark" aria-hidden="true">{MARKS[word]}</span> '
        f"{escape(verdict(report, lang))}</p>{label}{_answers(report, say)}"
        f"<p class='meta'><code>{escape(report.engine)}</code><br>{_against(report, say)}"
        f"{escape(report.created)}</p></header>\n"
    )


def _answers(report: Report, say: Say) -> str:
    found = "".join(
        f"<div><dt>{escape(question)}</dt><dd>{escape(text).replace('_', '_<wbr>')}</dd></div>"
        for question, text in answers(report, say)
    )
    return f'<dl class="answers">{found}</dl>' if found else ""


def _against(report: Report, say: Say) -> str:
    if not report.other:
        return ""
    text = say("against-other", engine="\0")
    name = f"<code>{escape(str(report.other.get('engine', '')))}</code>"
    return f"{escape(text).replace(chr(0), name)}<br>"


def _chip(check: Check, say: Say) -> str:
    name = check.verdict.name
    return (
        f'<span class="chip {name.lower()}"><span aria-hidden="true">{MARKS[name]}</span> '
        f"{escape(say(name))}</span>"
    )


def _table(checks: Sequence[Check], say: Say) -> str:
    if not checks:
        return f"<p>{escape(say('no-checks'))}</p>"
    columns = [say(key) for key in ("check", "verdict", "required", "measured", "interval", "gate", "n")]
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    rows = []
    for number, check in enumerate(checks):
        _, *values = cells(check, say)
        title = check_title(check.name, say)
        title = f"<small>{escape(title)}</small>" if title else ""
        rows.append(
            f'<tr><th scope="row"><a href="#check-{number}"><code>{_breakable(check.name)}</code></a>'
            f"{title}</th>"
            f'<td data-label="{escape(columns[1])}">{_chip(check, say)}</td>'
            + "".join(
                f'<td data-label="{escape(column)}"{"" if value else " class=empty"}>{escape(value)}</td>'
                for column, value in zip(columns[2:], values, strict=True)
            )
            + "</tr>"
        )
    return _cards(head, rows)


def _cards(head: str, rows: Sequence[str]) -> str:
    """A table whose rows are cards on a narrow screen. Laid out as blocks it would be none any more: the
    role keeps it one for who hears it."""
    return (
        f'<table class="cards" role="table"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _plots(found: Sequence[Figure], say: Say) -> str:
    if not found:
        return ""
    return '<div class="plots">' + "".join(_plot(one, say) for one in found) + "</div>"


def _plot(figure: Figure, say: Say) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in figure.columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(value)}</td>" for value in row) + "</tr>" for row in figure.rows
    )
    text = f"<p>{escape(figure.text)}</p>" if figure.text else ""
    return (
        f"<figure><figcaption>{escape(figure.title)}</figcaption>{figure.svg}{text}"
        f"<details><summary>{escape(say('numbers'))}</summary><div class='scroll' tabindex='0'>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></details></figure>"
    )


def _detail(number: int, check: Check, say: Say) -> str:
    title = check_title(check.name, say)
    parts = [f"<p class='title'>{escape(title)}</p>" if title else ""]
    parts.append(f"<p>{escape(check.summary)}</p>")
    if check.details:
        parts.append("<ul>" + "".join(f"<li>{escape(one)}</li>" for one in check.details) + "</ul>")
    parts += [f"<p class='warning'>{escape(say('warning', text=one))}</p>" for one in check.warnings]
    if check.how:
        parts.append(f"<p class='how'>{escape(say('how', text=check.how))}</p>")
    if check.evidence:
        found = {key: value for key, value in check_fields(check)["evidence"].items() if key != "raw"}
        text = json.dumps(_shortened(found), indent=1, ensure_ascii=False)
        parts.append(
            f"<details><summary>{escape(say('evidence'))}</summary>"
            f"<pre class='scroll' tabindex='0' lang='en'>{escape(text)}</pre></details>"
        )
    opened = "" if check.verdict in (Verdict.PASS, Verdict.MEASURED, Verdict.SKIPPED) else " open"
    return (
        f'<details class="check" id="check-{number}"{opened}><summary>{_chip(check, say)} '
        f"<code>{_breakable(check.name)}</code></summary>{''.join(parts)}</details>"
    )


def _pitfalls(report: Report, say: Say) -> str:
    columns = [say(key) for key in ("pitfall", "status", "found", "to-run")]
    marks = {"answered": ("pass", "✓"), "open": ("inconclusive", "?"), "does not apply": ("skipped", "–")}
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    rows = []
    for one in pitfalls(report):
        kind, mark = marks[one.status]
        run = one.command(say)
        rows.append(
            f"<tr><th scope='row'>{escape(say(f'pitfall.{one.id}'))}<small><code>{one.id}</code></small></th>"
            f"<td data-label='{escape(columns[1])}'><span class='chip {kind}'>"
            f"<span aria-hidden='true'>{mark}</span> {escape(say(one.status))}</span></td>"
            f"<td data-label='{escape(columns[2])}'>{escape(say(one.key, **one.values))}</td>"
            f"<td data-label='{escape(columns[3])}'{'' if run else ' class=empty'}>{_command(run)}</td></tr>"
        )
    return f"<p>{escape(say('pitfalls.intro'))}</p>{_cards(head, rows)}"


def _provenance(report: Report, say: Say) -> str:
    rows = "".join(
        f"<dt>{escape(label)}</dt><dd>{escape(value)}</dd>" for label, value in provenance(report, say)
    )
    recipe = json.dumps(dict(report.recipe), indent=1, ensure_ascii=False, default=str)
    return (
        f"<dl>{rows}</dl><details><summary>{escape(say('recipe'))}</summary>"
        f"<pre class='scroll' tabindex='0' lang='en'>{escape(recipe)}</pre></details>"
    )


def _shortened(value: Any) -> Any:
    """Long lists without their ends, whose length is told: they are whole in the JSON report."""
    if isinstance(value, dict):
        return {key: _shortened(inner) for key, inner in value.items()}
    if not isinstance(value, list):
        return value
    shown = [_shortened(inner) for inner in value[:_MOST_LISTED]]
    return shown if len(value) <= _MOST_LISTED else [*shown, f"… +{len(value) - _MOST_LISTED}"]


def _command(text: str) -> str:
    """A text with options of commands that do not break after their dashes."""
    return re.sub(r"(?<![\w-])(--[a-z-]+)", r'<span class="option">\1</span>', escape(text))


def _breakable(name: str) -> str:
    """A name that may break after its underscores, dots and slashes."""
    text = escape(name)
    for char in "_./":
        text = text.replace(char, f"{char}<wbr>")
    return text
