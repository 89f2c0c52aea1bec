"""Renderings of a report: whole, well formed, without network, in two languages, whatever the checks hold."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import string
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from made import RECIPE, full_report, made_report

from trtspec.errors import InputError
from trtspec.verify import i18n, render, report
from trtspec.verify.gates import Check, Verdict
from trtspec.verify.html import page
from trtspec.verify.junit import junit
from trtspec.verify.pitfalls import IDS
from trtspec.verify.plots import figures
from trtspec.verify.report_file import (
    CheckFile,
    PitfallFile,
    ReportFile,
    json_schema,
    read_report,
    report_from,
)

ROOT = Path(__file__).parent.parent.parent
FORMS = {"terminal": render.terminal, "markdown": render.markdown, "html": page, "junit": junit}
_VOID = {"meta", "br", "wbr", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """What a browser would be told: open tags, ids, links, texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.problems: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        self.problems += [f"<{tag}> is not closed" for tag in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "srcset", "data", "action", "poster"):
                self.links.append(value or "")
            if name.startswith("on"):
                self.problems.append(f"<{tag} {name}>")
            if name in ("aria-label", "data-label", "title"):
                self.texts.append(value or "")
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open[-1] != tag:
            self.problems.append(f"</{tag}> closes {self.open[-1:]}")
        else:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.texts.append(data)


def faults(text: str) -> list[str]:
    """What a self-contained, well-formed page must not have."""
    found = Page(text)
    problems = list(found.problems)
    problems += [f"<{tag}>" for tag in ("script", "link", "iframe", "object", "img") if tag in found.tags]
    problems += [f"a link to {link}" for link in found.links if not link.startswith("#")]
    problems += [f"no #{link[1:]}" for link in found.links if link[1:] not in found.ids]
    problems += [f"id {one} twice" for one in set(found.ids) if found.ids.count(one) > 1]
    style = text.split("<style>")[1].split("</style>")[0]
    problems += [word for word in ("url(", "@import", "http") if word in style]
    return problems


@pytest.mark.parametrize("lang", i18n.LANGS)
def test_the_page_is_well_formed_and_needs_no_network(lang):
    text = page(full_report(), lang)
    assert faults(text) == []
    assert "prefers-color-scheme:dark" in text
    assert "<script>alert" not in text
    assert text.count("<figure>") == 9
    assert len(re.findall(r'<svg [^>]*role="img" aria-label="[^"]+', text)) == 9
    assert text == page(full_report(), lang)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("<main>", "<main><img src='https://example.org/x.png'>"),
        ("</main>", ""),
        ("*{box-sizing", "@import 'x';*{box-sizing"),
        ("</nav>", "<a href='#nowhere'>x</a></nav>"),
        ("<main>", "<main onclick='x()'>"),
    ],
)
def test_a_page_that_is_not_would_be_seen(old, new):
    assert faults(page(full_report()).replace(old, new))


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("lang", i18n.LANGS)
def test_every_form_shows_every_check_its_verdict_and_every_pitfall(form, lang):
    made = full_report()
    text = FORMS[form](made, lang=lang).replace("<wbr>", "")
    for check in made.checks:
        assert check.name in text
        assert i18n.speaker(lang)(check.verdict.name) in text
    found = report.pitfalls(made)
    assert [one.id for one in found] == list(IDS)
    for one in found:
        assert (form == "terminal" and one.status != "open") or one.id in text
    assert "busy?" in text


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("lang", i18n.LANGS)
def test_a_report_without_anything_is_still_shown(form, lang):
    for made in (made_report(), made_report(recipe={}, settings={}, machine={}, tools={}, notes=())):
        assert FORMS[form](made, lang=lang)


def test_evidence_of_any_kind_breaks_nothing():
    """Later checks and other writers put what they like under the names that plots and pitfalls read."""
    chance = random.Random(11)
    keys = re.findall(r"``([a-z_]+)``", Path(ROOT / "trtspec/verify/plots.py").read_text())
    keys += ["pitfalls", "loads", "near_misses", "scan", "p99", "interleaved", "acceptance_rate"]
    inner = ["rows", "columns", "cells", "verdict", "speedup", "0.5", "p99", "1", "2", "load", "low", "high"]
    inner += ["gap_nats", "usual_nats", "nats", "recipe"]

    def value(depth: int) -> Any:
        kind = chance.randrange(8 if depth < 4 else 5)
        if kind == 5 or kind == 6:
            return {chance.choice(inner): value(depth + 1) for _ in range(chance.randrange(4))}
        if kind == 7:
            return [value(depth + 1) for _ in range(chance.randrange(4))]
        return chance.choice([None, True, 0, -1, 1.5, 1e300, 1e-300, 3, "x<y", "", 10**12, 10**400, 0.5])

    for _ in range(400):
        evidence = {chance.choice(keys): value(0) for _ in range(3)}
        measured = chance.choice([None, 0.0, 1e300, -2.0])
        made = made_report(
            Check(
                chance.choice(["speedup", "lossless_float64", "acceptance", "retrieval"]),
                Verdict.PASS,
                "",
                True,
                measured=measured,
                interval=(-1e300, 1.0),
                evidence=evidence,
            )
        )
        for figure in figures(made, i18n.speaker("en")):
            ElementTree.fromstring(figure.svg)
            assert not re.search(r"\b(nan|inf)\b", figure.svg)
        assert faults(page(made)) == []
        render.markdown(made)


# --------------------------------------------------------------------------- two languages


def leaks(text: str) -> set[str]:
    """English words in a Chinese rendering of a report that holds none: beside names and units."""
    text = re.sub(r"`[^`]*`|--[a-z-]+|trtspec( [a-z]+)*|speculation\.[a-z]+", " ", text)
    found = set(re.findall(r"[A-Za-z]{2,}", text))
    names = {"lossless", "float", "quality", "acceptance", "speedup", "over", "baseline", "of", "tomorrow"}
    names |= {"later", "still", "engines", "FILE", "KV", "KL", "TTFT", "ms", "BF", "FP", "gram", "none", "fp"}
    names |= {
        "trtspec",
        "torch",
        "cores",
        "processor",
        "max",
        "new",
        "tokens",
        "longest",
        "prompt",
        "prompts",
    }
    names |= {"sha", "verify", "scaling", "bench", "drafters", "engine", "chat", "alpha", "tau", "nan"}
    ids = {word for one in IDS for word in one.split("-")}
    return found - names - ids


def wordless() -> report.Report:
    """The full report, its own words taken out."""
    made = full_report()
    checks = tuple(
        dataclasses.replace(one, summary="0", how="1", details=("2",), warnings=("3",), evidence=one.evidence)
        for one in made.checks
    )
    return dataclasses.replace(made, checks=checks, notes=("4",), recipe=RECIPE)


def chinese_texts() -> str:
    texts = [render.terminal(wordless(), lang="zh"), render.markdown(wordless(), lang="zh")]
    text = page(wordless(), "zh")
    text = re.sub(r"<pre.*?</pre>|<code>.*?</code>", " ", text, flags=re.DOTALL)
    return "\n".join([*texts, *Page(text).texts])


def test_no_english_leaks_into_chinese():
    assert leaks(chinese_texts()) == set()


@pytest.mark.parametrize(
    "key", ["pitfalls.intro", "plot.tasks", "gate", "passed", "contents", "terminal-head"]
)
def test_a_leak_would_be_seen(key, monkeypatch):
    monkeypatch.setitem(i18n.TEXTS, key, (i18n.TEXTS[key][0],) * 2)
    assert leaks(chinese_texts())


def test_every_text_stands_in_both_languages_with_the_same_fields():
    def fields(text: str) -> set[str | None]:
        return {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}

    neutral = {"n", "pitfall.untuned-draft.run"}
    for key, (english, chinese) in i18n.TEXTS.items():
        assert all((english, chinese)), key
        assert fields(english) == fields(chinese), key
        has = re.search(r"[\u3000-\u9fff\uff00-\uffef]", chinese)
        assert has or key in neutral or not re.search("[A-Za-z]{2}", re.sub(r"\{.*?\}", "", english)), key


def test_every_text_that_is_said_exists_and_every_text_is_said():
    source = "\n".join(
        (ROOT / "trtspec/verify" / f"{name}.py").read_text()
        for name in ("render", "html", "junit", "plots", "pitfalls", "report", "answers")
    )
    said = set(re.findall(r"say\(\s*\"([^\"{]+)\"", source))
    assert said - set(i18n.TEXTS) == set()
    literals = set(re.findall(r"[\"']([A-Za-z][A-Za-z0-9./ -]*)[\"']", source))
    values = {verdict.name for verdict in Verdict} | {"at least", "at most"}
    built = ("check.", "unit.", "task.", "side.", "pitfall.", "plot.margins.", "ask.", "answer.")
    assert {k for k in i18n.TEXTS if not k.startswith(built)} - literals - values == set()
    # Of these the code holds the whole key, or its last part.
    keys = {key for key in i18n.TEXTS if key.startswith(("ask.", "answer."))}
    assert {key for key in keys - literals if key.split(".", 1)[1] not in literals} == set()
    for one in IDS:
        assert f"pitfall.{one}" in i18n.TEXTS


@pytest.mark.parametrize("name", ["goodput", "task", "latency_", "nobody.knows"])
def test_a_check_of_any_name_is_shown(name):
    assert name in render.terminal(made_report(Check(name, Verdict.PASS, "x", True)), lang="zh")


def test_numbers_and_evidence_are_the_same_in_both_languages():
    def numbers(text: str) -> list[str]:
        return sorted(re.findall(r"\d+\.\d+", text))

    for form in (render.terminal, render.markdown, page):
        assert numbers(form(full_report(), lang="en")) == numbers(form(full_report(), lang="zh"))
    for check in full_report().checks:
        assert check.summary in render.markdown(full_report(), lang="zh").replace("\\<", "<")


FORGED = "\x1b]0;x\x07\nverdict: PASS\u2028## PASS\u202e<img src=x> `x` [y](javascript:z)"
MARKUP = re.compile(r"(?<!\\)(?:\\\\)*(?:<img|\[y\]\()")


def forged(form: str, text: str) -> list[str]:
    """What of :data:`FORGED` a form lets through."""
    found = [char for char in "\x1b\x07\u2028\u202e" if char in text]
    lines = [line.strip().lower() for line in text.split("\n")]
    found += [line for line in lines if line.startswith(("verdict: pass", "## pass"))]
    if form == "markdown":
        outside = re.sub(r"(`+) ?[^`].*?(?<!`)\1(?!`)", "", text)
        found += MARKUP.findall(outside)
    return found


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("form", FORMS)
def test_what_a_model_or_a_file_says_forges_no_line_of_a_report(form, lang):
    """In every text of a report at once; and the check sees each of them where nothing is escaped."""
    check = Check(
        f"task:{FORGED}", Verdict.FAIL, f"#{FORGED}", True, how=FORGED, warnings=(FORGED,), details=(FORGED,),
        n=1, n_unit=FORGED, measured=1.0, unit=FORGED, evidence={FORGED: [FORGED]},
    )  # fmt: skip
    made = made_report(
        check,
        engine=FORGED,
        recipe_name=FORGED,
        argv=("trtspec", FORGED),
        notes=(FORGED,),
        machine={FORGED: FORGED},
        settings={"prompts": [FORGED]},
        other={"engine": FORGED},
    )
    assert forged(form, FORMS[form](made, lang=lang)) == []
    assert len(forged("markdown", f"a\n{FORGED}".replace("\u2028", "\u2028\n"))) == 8


def test_chinese_lines_fit_the_terminal():
    lines = render.terminal(full_report(), width=80, lang="zh").splitlines()
    assert max(render._columns(line) for line in lines) <= 80


# --------------------------------------------------------------------------- JUnit


def test_a_long_name_leaves_its_text_the_room_of_others():
    made = made_report(Check("task:" + "x" * 90, Verdict.MEASURED, "one two " * 40, False))
    lines = render.terminal(made).splitlines()
    assert max(map(len, lines)) <= 110
    assert sum("one two" in line for line in lines) < 10


def test_junit_fails_where_the_report_does():
    root = ElementTree.fromstring(junit(full_report()).split("\n", 1)[1])
    checks, pitfalls = root.findall("testsuite")
    by_name = {case.get("name"): case for case in checks}
    results = {
        name: next((one.tag for one in case if one.tag != "system-out"), "passed")
        for name, case in by_name.items()
        if name and case.tag == "testcase"
    }
    assert results == {
        "lossless": "passed",
        "lossless_float64": "passed",
        "quality": "failure",
        "acceptance": "passed",
        "speedup": "passed",
        "speedup_over_baseline": "failure",
        "of/tomorrow.x": "skipped",
        "later_still": "skipped",
    }
    assert (checks.get("tests"), checks.get("failures"), checks.get("errors")) == ("8", "2", "0")
    assert len(pitfalls.findall("testcase")) == len(IDS)


def test_junit_never_passes_what_the_report_does_not():
    for verdict in Verdict:
        for required in (True, False):
            made = made_report(Check("a", verdict, "\x00\x1b[31m\ud800", required))
            root = ElementTree.fromstring(junit(made).encode("utf-8", "replace").split(b"\n", 1)[1])
            failing = root.findall("testsuite[1]/testcase/failure") + root.findall(
                "testsuite[1]/testcase/error"
            )
            assert bool(failing) == (required and verdict is not Verdict.PASS)


# --------------------------------------------------------------------------- the file


def test_a_report_comes_back_from_its_file(tmp_path):
    made = full_report()
    path = tmp_path / "r.json"
    path.write_bytes(report.to_bytes(made))
    back = read_report(path)
    assert report.to_json(back) == report.to_json(made)
    for form in FORMS.values():
        assert form(back) == form(made)
    path.write_text(json.dumps({"trtspec": {}, "report": json.loads(report.to_bytes(made))}))
    assert read_report(path) == back


def test_the_published_schema_is_the_one_that_holds():
    published = json.loads((ROOT / "docs" / "report-schema.json").read_text())
    assert published == json_schema(), "run: trtspec schema --report -o docs/report-schema.json"
    value = report.to_json(full_report())
    assert set(value) == set(published["properties"])
    assert {frozenset(one) for one in value["checks"]} == {frozenset(CheckFile.model_fields)}
    assert {frozenset(one) for one in value["pitfalls"]} == {frozenset(PitfallFile.model_fields)}
    assert set(published["required"]) <= set(value)
    ReportFile.model_validate(value)


def test_every_problem_of_a_file_is_told_at_once():
    value = report.to_json(full_report())
    value["checks"][0]["verdict"] = "GREAT"
    value["checks"][2]["measured"] = "much"
    del value["engine"]
    with pytest.raises(InputError) as caught:
        report_from(value, "r.json")
    keys = {problem.key for problem in caught.value.problems}
    assert keys == {"checks.0.verdict", "checks.2.measured", "engine"}
    for wrong in ({}, [], {"schema": "trtspec.report/9"}, None):
        with pytest.raises(InputError, match="schema is"):
            report_from(wrong, "r.json")
    twice = report.to_json(made_report(*[Check("a", Verdict.PASS, "", True)] * 2))
    with pytest.raises(InputError, match="twice"):
        report_from(twice, "r.json")


def test_no_median_of_a_few_requests_is_drawn_or_told():
    """The two middle ones of four are no median that stands for anything (order statistics need six)."""
    told = {}
    for n in (5, 6):
        seconds = {"recipe": [[0.1 * i for i in range(n)]]}
        check = Check("speedup", Verdict.MEASURED, "x", False, evidence={"seconds": seconds})
        (figure,) = [
            one for one in figures(made_report(check), i18n.speaker("en")) if "Time of a request" in one.title
        ]
        told[n] = figure.text, figure.rows[0][2:]
    assert "too few (5) for a median" in told[5][0]
    assert told[5][1] == ("", "")
    assert "Median" in told[6][0]
    assert told[6][1] == ("0.2", "")


def test_an_interval_of_few_prompts_does_not_flatten_the_plot():
    """It ends at the edge, and the table has its ends."""
    loads = [
        {"load": name, "speedup": value, "low": low, "high": high}
        for name, value, low, high in (("a", 1.0, 0.9, 1.1), ("b", 2.0, 0.02, 90.0))
    ]
    check = Check("speedup_by_load", Verdict.MEASURED, "x", False, evidence={"by_load": loads})
    (figure,) = [one for one in figures(made_report(check), i18n.speaker("en")) if "(speedup" in one.title]
    first, second = (float(x) for x in re.findall(r'class="dot" cx="([\d.]+)"', figure.svg))
    assert second - first > 40
    assert figure.rows[1][:4] == ("b", "2.000", "0.020", "90.000")
