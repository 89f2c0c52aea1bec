"""A report as JUnit XML, for what builds and shows test results. Pure.

A required check that did not pass is a failure, whatever kept it from passing: undecided or skipped is no
pass. What is not required fails nothing: it stands as skipped unless it passed or was measured. The pitfalls
are a suite of their own, the open ones skipped.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree

from trtspec.verify.gates import Check, Verdict
from trtspec.verify.i18n import Lang, check_title, speaker
from trtspec.verify.phrases import told
from trtspec.verify.render import verdict
from trtspec.verify.report import Report, pitfalls

# What XML 1.0 cannot hold, even escaped.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(report: Report, lang: Lang = "en") -> str:
    """The XML document."""
    say, report = speaker(lang), told(report, lang)
    root = ElementTree.Element("testsuites", name=_clean(report.recipe_name))
    checks = ElementTree.SubElement(root, "testsuite", name=_clean(f"trtspec.verify.{report.recipe_name}"))
    checks.set("timestamp", _clean(report.created.split("+")[0]))
    checks.set("time", f"{report.seconds:.1f}")
    properties = ElementTree.SubElement(checks, "properties")
    for name, value in (
        ("verdict", verdict(report, lang)),
        ("engine", report.engine),
        ("recipe_digest", report.recipe_digest),
        ("source_digest", report.source_digest),
    ):
        ElementTree.SubElement(properties, "property", name=name, value=_clean(value))
    for check in report.checks:
        case = _case(checks, report.recipe_name, check.name)
        text = "\n".join([check.summary, *check.details, *check.warnings, check.how]).strip()
        word = say(check.verdict.name)
        _result(case, check, word, text)
        head = say("item", name=check_title(check.name, say) or check.name, text=word)
        ElementTree.SubElement(case, "system-out").text = _clean(f"{head}\n{text}".strip())
    _count(checks)
    suite = ElementTree.SubElement(root, "testsuite", name=f"{_clean(report.recipe_name)}.pitfalls")
    for one in pitfalls(report):
        case = _case(suite, f"{report.recipe_name}.pitfalls", one.id)
        if one.status != "answered":
            run = say("item", name=say("to-run"), text=one.command(say)) if one.run else ""
            found = say("item", name=say(one.status), text=say(one.key, **one.values))
            message = say("joined").join(part for part in (found, run) if part)
            ElementTree.SubElement(case, "skipped", message=_clean(message))
    _count(suite)
    ElementTree.indent(root, " ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _case(suite: ElementTree.Element, group: str, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(
        suite, "testcase", classname=_clean(f"trtspec.verify.{group}"), name=_clean(name)
    )


def _result(case: ElementTree.Element, check: Check, word: str, text: str) -> None:
    message = _clean(f"{word}: {check.summary}")
    if check.verdict in (Verdict.PASS, Verdict.MEASURED) and not (
        check.required and check.verdict is Verdict.MEASURED
    ):
        return
    if check.required:
        kind = "error" if check.verdict is Verdict.ERROR else "failure"
        ElementTree.SubElement(case, kind, type=check.verdict.value, message=message).text = _clean(text)
    else:
        ElementTree.SubElement(case, "skipped", message=message)


def _count(suite: ElementTree.Element) -> None:
    cases = suite.findall("testcase")
    suite.set("tests", str(len(cases)))
    for key, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(key, str(sum(case.find(tag) is not None for case in cases)))


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("\ufffd", text)
