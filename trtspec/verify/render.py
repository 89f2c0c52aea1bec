"""A report for eyes: terminal lines and Markdown, in English or Chinese. Pure: the same report gives the same
text. What checks say of themselves is said in Chinese by :mod:`trtspec.verify.phrases`.
"""

from __future__ import annotations

import math
import re
import shlex
import unicodedata
from collections.abc import Callable, Mapping

from trtspec.verify.answers import answers
from trtspec.verify.gates import Check, Verdict
from trtspec.verify.i18n import TEXTS, Lang, Say, check_title, speaker
from trtspec.verify.phrases import told
from trtspec.verify.report import VERDICT_WORDS, Report, pitfalls, plain

_VERDICT_WIDTH = 13
_NAMES_WIDTH, _LONGEST_NAME = 22, 34
_INDENT = " " * 4


def terminal(report: Report, width: int = 100, lang: Lang = "en") -> str:
    """The checks as a table, one after the other, the pitfalls counted, and the verdict last."""
    say, report = speaker(lang), told(report, lang)
    lines = [
        f"{report.recipe_name}  {report.engine}" + _label(report, say),
        say(
            "terminal-head" if report.recipe_digest else "terminal-head.url",
            digest=report.recipe_digest[:12],
            processor=report.machine.get("processor", say("unknown-processor")),
            created=report.created,
            seconds=f"{report.seconds:.0f}",
        ),
        *([say("against-other", engine=report.other.get("engine", ""))] if report.other else []),
        "",
    ]
    names = min(max((len(check.name) for check in report.checks), default=0), _LONGEST_NAME)
    for check in report.checks:
        head = f"{_padded(say(check.verdict.name), _VERDICT_WIDTH)} {check.name:<{max(names, _NAMES_WIDTH)}} "
        if _columns(head) > width // 2:  # beside such a name its text would have no room
            lines.append(head.rstrip())
            head = " " * (_VERDICT_WIDTH + max(names, _NAMES_WIDTH) + 2)
        room = max(width - _columns(head), 30)
        text = check.summary + _need(check, say)
        title = check_title(check.name, say)
        if lang != "en" and title:
            text = say("sentence", title=title, text=text)
        body = _wrapped(text, room) or [""]
        lines.append(head + body[0])
        lines += [" " * _columns(head) + line for line in body[1:]]
        for detail in check.details:
            lines += _wrapped(f"- {detail}", max(width, 40), _INDENT, f"{_INDENT}  ")
        for warning in check.warnings:
            wrapped = _wrapped(say("warning", text=warning), room)
            lines += [" " * _columns(head) + line for line in wrapped]
    lines += ["", *_notes(report, width, say)]
    lines += _pitfall_lines(report, width, say)
    lines += _answer_lines(report, width, say)
    lines += _wrapped(say("verdict-line", text=verdict(report, lang)), max(width, 40), rest="  ")
    return "\n".join(lines)


def verdict(report: Report, lang: Lang = "en") -> str:
    """One line: the verdict and how many required checks it rests on."""
    say = speaker(lang)
    required = [check for check in report.checks if check.required]
    passed = sum(check.verdict is Verdict.PASS for check in required)
    word = say(VERDICT_WORDS[report.exit_code])
    word += say("approximate") if report.fidelity == "approximate" else ""
    text = say("passed", passed=passed, required=len(required))
    for kind in (Verdict.FAIL, Verdict.ERROR, Verdict.INCONCLUSIVE, Verdict.SKIPPED):
        if names := [check.name for check in required if check.verdict is kind]:
            text += say("joined") + say("of-required", word=say(kind.name), names=say("listed").join(names))
    broken = [check.name for check in report.checks if check.verdict is Verdict.ERROR and not check.required]
    if broken:
        text += say("joined") + say("not-measured", names=", ".join(broken))
    return say("in-brackets", word=word, text=text)


def markdown(report: Report, lang: Lang = "en") -> str:
    """A page with the table of checks, how each number was obtained, the pitfalls, and what it ran on."""
    say, report = speaker(lang), told(report, lang)
    columns = ("check", "verdict", "required", "measured", "interval", "gate", "n")
    rows = [_row([say(name) for name in columns]), "|" + "---|" * len(columns)]
    rows += [_row(list(map(_marked, [check.name, *cells(check, say)]))) for check in report.checks]
    details = []
    for check in report.checks:
        title = check_title(check.name, say)
        details += ["### " + say("item", name=_marked(check.name), text=say(check.verdict.name)), ""]
        details += [f"*{_marked(title)}*", ""] if title else []
        details += [_paragraph(check.summary), ""]
        details += [f"- {_code(detail)}" for detail in check.details]
        details += ["- " + say("warning", text=_marked(warning)) for warning in check.warnings]
        details += ["- " + say("how", text=_marked(check.how))] if check.how else []
        details.append("")
    return "\n".join(
        [
            "# " + _marked(say("headline", name=report.recipe_name, text=verdict(report, lang))),
            "",
            *(f"- **{question}** {_marked(text)}" for question, text in answers(report, say)),
            "",
            *rows,
            "",
            *(_paragraph(_note(note, say)) + "\n" for note in report.notes),
            *details,
            "## " + say("pitfalls"),
            "",
            say("pitfalls.intro"),
            "",
            *_pitfall_table(report, say),
            "",
            "## " + say("provenance"),
            "",
            *(
                "- " + say("item", name=name, text=text)
                for name, text in provenance(report, say, _span, _marked)
            ),
            "",
        ]
    )


def cells(check: Check, say: Say) -> list[str]:
    """Verdict, required, measured, interval, gate and sample size, as the columns of a table show them."""
    gate = say(check.sense, bound=f"{check.bound:g}") if check.bound is not None and check.sense else ""
    return [
        say(check.verdict.name),
        say("yes" if check.required else "no"),
        _number(check.measured, unit(check.unit, say)),
        _interval(check, say),
        gate,
        f"{check.n} {unit(check.n_unit, say)}".strip() if check.n else "",
    ]


def unit(name: str, say: Say) -> str:
    """The unit in words, or its name where it is not known here."""
    return say(f"unit.{name}") if f"unit.{name}" in TEXTS else name


def provenance(
    report: Report, say: Say, quoted: Callable[[str], str] = str, worded: Callable[[str], str] = str
) -> list[tuple[str, str]]:
    """What the report ran on: (label, value). ``quoted`` shows what can be pasted, ``worded`` the rest."""

    def listed(values: Mapping[str, object]) -> str:
        """What is set; what is None or empty is in the JSON."""
        shown = ((name, plain(value)) for name, value in values.items())
        texts = (
            f"{name} {'; '.join(map(str, value)) if isinstance(value, list) else value}"
            for name, value in shown
            if value is not None and value != []
        )
        return worded(", ".join(texts))

    word = "strict" if report.fidelity == "strict" else "approximate-word"
    rows = [
        (say("fidelity"), say(word)),
        (say("engine"), quoted(report.engine)),
        (say("recipe-digest"), quoted(report.recipe_digest)),
        *_of_other(report, say, quoted),
        (say("source-digest"), quoted(report.source_digest)),
        (say("date"), worded(f"{report.created}, {say('duration', seconds=f'{report.seconds:.0f}')}")),
        (say("command"), quoted(shlex.join(report.argv))),
        (say("machine"), listed(report.machine)),
        (say("versions"), listed(report.tools)),
        (say("built-with"), listed(report.built_with)),
        (say("settings"), listed(report.settings)),
    ]
    return [(label, value) for label, value in rows if value]


def _of_other(report: Report, say: Say, quoted: Callable[[str], str]) -> list[tuple[str, str]]:
    """The second engine, if there is one."""
    other = report.other
    keys = (("other", "engine"), ("other-digest", "recipe_digest"))
    return [(say(label), quoted(str(other.get(key, "")))) for label, key in keys] if other else []


def _answer_lines(report: Report, width: int, say: Say) -> list[str]:
    found = answers(report, say)
    room = max((_columns(question) for question, _ in found), default=0) + 2
    lines = []
    for question, text in found:
        lines += _wrapped(text, max(width, 40), _padded(question, room), " " * room)
    return [*lines, ""] if lines else []


def _pitfall_lines(report: Report, width: int, say: Say) -> list[str]:
    """The count, and the open ones with what to run."""
    found = pitfalls(report)
    counts = [sum(one.status == status for one in found) for status in ("answered", "open", "does not apply")]
    lines = [say("pitfalls.count", answered=counts[0], open=counts[1], rest=counts[2])]
    for one in found:
        if one.status == "open":
            text = say("item", name=one.id, text=one.command(say))
            lines += _wrapped(f"- {text}", max(width, 40), _INDENT, f"{_INDENT}  ")
    return [*lines, ""]


def _pitfall_table(report: Report, say: Say) -> list[str]:
    rows = [_row([say(name) for name in ("pitfall", "status", "found", "to-run")]), "|---|---|---|---|"]
    for one in pitfalls(report):
        run = one.command(say)
        title = f"{say(f'pitfall.{one.id}')} (`{one.id}`)"
        found = _marked(say(one.key, **one.values))
        rows.append(_row([title, say(one.status), found, _marked(run)]))
    return rows


def _wrapped(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    """Lines of at most ``width`` columns. Chinese breaks anywhere but before what closes and behind what
    opens, English between words."""
    lines, line = [], first
    word = r"（*(?:[\u2e80-\uffef]|[^\s\u2e80-\uffef]+)[，。；：、）？！]*"
    for piece in re.findall(rf"{word}|\s+", text):
        if _columns(line + piece.rstrip()) > width and line.strip():
            lines.append(line.rstrip())
            line = rest
            piece = piece.lstrip()
        line += piece
    return [*lines, line.rstrip()]


def _columns(text: str) -> int:
    """How many columns of a terminal the text takes."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def _padded(text: str, width: int) -> str:
    return text + " " * max(width - _columns(text), 0)


def _notes(report: Report, width: int, say: Say) -> list[str]:
    return [
        line
        for note in report.notes
        for line in _wrapped(say("note", text=note), max(width, 40), rest="      ")
    ]


def _note(note: str, say: Say) -> str:
    text = say("note", text=note)
    return text[0].upper() + text[1:]


def _label(report: Report, say: Say) -> str:
    """What must not be overlooked about the engine."""
    return "" if report.fidelity == "strict" else f"  {say('approximate-label')}"


def _marked(text: str) -> str:
    """``text`` with what would be a tag, a link or code in Markdown escaped."""
    return re.sub(r"([\\`<\[])", r"\\\1", text)


def _paragraph(text: str) -> str:
    """``text`` as lines of its own, no heading, list or quotation."""
    text = _marked(text)
    return f"\\{text}" if text.startswith(("#", ">", "-", "+", "=", "~")) else text


def _span(text: str) -> str:
    """``text`` as code, whatever backticks it holds; "" for nothing."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    room = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{room}{text}{room}{fence}" if text else ""


def _code(text: str) -> str:
    """Characters of a model's text that Markdown would read as markup."""
    return re.sub(r"([`*_<>|\\\[\]])", r"\\\1", text)


def _need(check: Check, say: Say) -> str:
    """What a reader must know of a check that did not pass and does not count."""
    decides = check.required or check.verdict in (Verdict.PASS, Verdict.MEASURED, Verdict.SKIPPED)
    return "" if decides else say("not-required")


def _number(value: float | None, name: str) -> str:
    if value is None or not math.isfinite(value):
        return ""
    return f"{value:.4g} {name}".strip()


def _interval(check: Check, say: Say) -> str:
    if check.interval is None or not all(map(math.isfinite, check.interval)):
        return ""
    low, high = check.interval
    return say("range", low=f"{low:.4g}", high=f"{high:.4g}")


def _row(values: list[str]) -> str:
    return "| " + " | ".join(value.replace("|", "\\|").replace("\n", " ") for value in values) + " |"
