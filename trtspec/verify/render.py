"""A report for eyes: terminal lines and Markdown. Pure: the same report gives the same text."""

from __future__ import annotations

import math
import re
import shlex
import textwrap

from trtspec.verify.gates import Check, Verdict
from trtspec.verify.report import VERDICT_WORDS, Report

_NAMES_WIDTH = 22
_INDENT = " " * 4


def terminal(report: Report, width: int = 100) -> str:
    """The checks as a table, one after the other, and the verdict last."""
    hardware = report.machine.get("gpus") or report.machine.get("processor", "unknown processor")
    lines = [
        f"{report.recipe_name}  {report.engine}" + _label(report),
        f"recipe {report.recipe_digest[:12]}, {hardware}, {report.created}, {report.seconds:.0f} s",
        "",
    ]
    for check in report.checks:
        head = f"{_word(check):<13} {check.name:<{_NAMES_WIDTH}} "
        body = textwrap.wrap(check.summary + _need(check), max(width - len(head), 30)) or [""]
        lines.append(head + body[0])
        lines += [" " * len(head) + line for line in body[1:]]
        for detail in check.details:
            lines += textwrap.wrap(
                f"- {detail}", max(width, 40), initial_indent=_INDENT, subsequent_indent=f"{_INDENT}  "
            )
        for warning in check.warnings:
            wrapped = textwrap.wrap(f"warning: {warning}", max(width - len(head), 30))
            lines += [" " * len(head) + line for line in wrapped]
    lines += ["", *_notes(report, width), f"verdict: {verdict(report)}"]
    return "\n".join(lines)


def verdict(report: Report) -> str:
    """One line: the verdict and how many required checks it rests on."""
    required = [check for check in report.checks if check.required]
    passed = sum(check.verdict is Verdict.PASS for check in required)
    word = VERDICT_WORDS[report.exit_code] + (", approximate" if report.fidelity == "approximate" else "")
    line = f"{word} ({passed} of {len(required)} required checks passed"
    broken = [check.name for check in report.checks if check.verdict is Verdict.ERROR and not check.required]
    return line + (f"; not measured: {', '.join(broken)})" if broken else ")")


def markdown(report: Report) -> str:
    """A page with the table of checks, how each number was obtained, and what it ran on."""
    rows = [
        "| check | verdict | required | measured | 95 % interval | gate | n |",
        "|---|---|---|---|---|---|---|",
    ]
    for check in report.checks:
        cells = (
            check.name,
            _word(check),
            "yes" if check.required else "no",
            _number(check.measured, check.unit),
            _interval(check),
            f"{check.sense} {check.bound:g}" if check.bound is not None and check.sense else "",
            f"{check.n} {check.n_unit}".strip() if check.n else "",
        )
        rows.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    details = []
    for check in report.checks:
        details += [f"### {check.name}: {_word(check)}", "", check.summary, ""]
        details += [f"- {_code(detail)}" for detail in check.details]
        details += [f"- warning: {warning}" for warning in check.warnings]
        if check.how:
            details += [f"- how: {check.how}"]
        details.append("")
    tools = ", ".join(f"{name} {version}" for name, version in report.tools.items())
    machine = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    settings = ", ".join(f"{name} {value}" for name, value in report.settings.items())
    return "\n".join(
        [
            f"# {report.recipe_name}: {verdict(report)}",
            "",
            *rows,
            "",
            *(f"Note: {note}\n" for note in report.notes),
            *details,
            "## What it ran on",
            "",
            f"- fidelity of sampled output: {report.fidelity}",
            f"- engine: `{report.engine}`, recipe digest `{report.recipe_digest}`, "
            f"source digest `{report.source_digest}`",
            f"- date: {report.created}, {report.seconds:.0f} s",
            f"- command: `{shlex.join(report.argv)}`",
            f"- machine: {machine}",
            f"- versions: {tools}",
            f"- settings: {settings}",
            "",
        ]
    )


def _notes(report: Report, width: int) -> list[str]:
    return [
        line
        for note in report.notes
        for line in textwrap.wrap(f"note: {note}", max(width, 40), subsequent_indent="      ")
    ]


def _label(report: Report) -> str:
    """What must not be overlooked about the engine."""
    if report.fidelity == "strict":
        return ""
    return "  (approximate: sampled output is not the target's law)"


def _code(text: str) -> str:
    """Characters of a model's text that Markdown would read as markup."""
    return re.sub(r"([`*_<>|\\\[\]])", r"\\\1", text)


def _word(check: Check) -> str:
    """The verdict; "measured" is none, so it is not in capitals."""
    return "measured" if check.verdict is Verdict.MEASURED else check.verdict.value


def _need(check: Check) -> str:
    """What a reader must know of a check that did not pass and does not count."""
    decides = check.required or check.verdict in (Verdict.PASS, Verdict.MEASURED, Verdict.SKIPPED)
    return "" if decides else " (not required)"


def _number(value: float | None, unit: str) -> str:
    if value is None or not math.isfinite(value):
        return ""
    return f"{value:.4g} {unit}".strip()


def _interval(check: Check) -> str:
    if check.interval is None or not all(map(math.isfinite, check.interval)):
        return ""
    return f"{check.interval[0]:.4g} to {check.interval[1]:.4g}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
