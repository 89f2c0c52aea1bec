"""Chinese reports of every kind hold no English sentence, and say the same numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from fake_endpoints import Fake, serving
from made import made_report
from test_report_forms import Page

from trtspec.prompts import PROMPTS_FILE, load_chats
from trtspec.verify import phrases
from trtspec.verify.endpoint import connect
from trtspec.verify.endpoint_check import EndpointSettings, verify_endpoints
from trtspec.verify.gates import Check, Verdict, gated, skipped
from trtspec.verify.html import page
from trtspec.verify.matrix_verdict import _interaction, _whole
from trtspec.verify.phrases import FILE, in_chinese
from trtspec.verify.report import Report

TABLE = json.loads(FILE.read_text(encoding="utf-8"))
_NAMES = (
    r"trtspec( [a-z]+)?( [a-z]+)?|speculation draft_model|lm_eval ls tasks|[a-z_]+(, [a-z_]+)+|16 bit"
    r"|(max )?[A-Z0-9]+, ms"
)


def english(text: str) -> list[str]:
    """Two English words in a row, beside what is quoted, options, commands and lists of names."""
    text = re.sub(rf"(?<!\w)'[^']*'|`[^`]*`|--[a-z-]+( [A-Z]+)?|{_NAMES}", "·", text)
    return re.findall(r"[A-Za-z]{2,}[,;:]? [a-z]{2,}[^\u3000-\uffef]*", text)


def left(made: Report) -> list[str]:
    """English of a report in Chinese: the terminal's lines, and the page without evidence and settings."""
    said = phrases.told(made, "zh")
    texts = [text for one in said.checks for text in (one.summary, one.how, *one.details, *one.warnings)]
    drawn = re.sub(r"<pre.*?</pre>|<code>.*?</code>|<dl>.*?</dl>", " ", page(made, "zh"), flags=re.DOTALL)
    return [found for text in (*texts, *said.notes, *Page(drawn).texts) for found in english(text)]


# --------------------------------------------------------------------------- kinds of reports


@pytest.fixture(scope="module")
def endpoints() -> Report:
    settings = EndpointSettings(num_prompts=6, max_new_tokens=8, rounds=1, requests=48, concurrency=4)
    with serving(Fake(per_step=2, counters=True, lossy=True), Fake(counters=True)) as urls:
        ends = [connect(url, timeout_s=5.0) for url in urls]
        return verify_endpoints(*ends, load_chats(PROMPTS_FILE, limit=6, sample=True), settings)


def matrix() -> Report:
    found = (
        "lossless in float64 (24 tokens, 4 drafted; mismatch rate below 11.7%); speedup 1.03 (1.00 to 1.06); "
        "1.03 times BF16 without drafts"
    )
    wrong = "NOT lossless: 1 of 4 answers differ in float64; perplexity ratio 1.018"
    cells = [
        Check("cell BF16 ngram", Verdict.PASS, found, True, measured=1.03),
        Check("cell FP8 ngram", Verdict.FAIL, wrong, False, evidence={"lossless": {"different": 1}}),
        skipped("cell BF16 medusa", "no medusa heads; --heads DIR names trained ones (trtspec draft train)"),
    ]
    scores = {one: [[-1.0, -2.0], [-1.5]] for one in ("BF16", "W4A16", "KV8", "W4A16+KV8")}
    whole = _whole(cells, [[None]], ["BF16"], scores)
    return made_report(*cells, whole, *_interaction(scores, {}), *_interaction({}, {"BF16": "not asked for"}))


def loads() -> Report:
    by_load = [{"load": "short chat en, batch 1", "speedup": 1.2, "low": 1.0, "high": 1.4}]
    text = (
        "39 loads: from 0.43 (short copy en, batch 1) to 3.47 (long chat zh, batch 4); together 1.3 "
        "(95 % interval 1.1 to 1.5)"
    )
    line = (
        "short chat en, batch 1: 1.02 (0.77 to 1.32); 50.7 against 49.5 tokens/s, 1.00 tokens a step, "
        "prompts of 52 tokens"
    )
    ratio = gated(
        name="quality",
        what="perplexity 46.84 against 34.55 of the 16-bit baseline over 1016 tokens: ratio",
        measured=1.49,
        interval=(1.4, 1.6),
        bound=1.5,
        sense="at most",
        n=8,
        n_unit="texts",
        how="",
    )
    by = {"by_load": by_load}
    return made_report(
        Check("speedup_by_load", Verdict.MEASURED, text, False, details=(line,), evidence=by), ratio
    )


def test_a_report_of_endpoints_is_all_chinese(endpoints):
    assert left(endpoints) == []


@pytest.mark.parametrize("made", [matrix, loads])
def test_reports_of_a_matrix_and_of_loads_are_all_chinese(made):
    assert left(made()) == []


@pytest.mark.parametrize(
    "key", ["gate: at most {0#}", "{0#} times BF16 without drafts", "exact one-sided McNemar test"]
)
def test_a_sentence_that_is_not_translated_is_seen(key, endpoints, tmp_path, monkeypatch):
    path = tmp_path / "p.json"
    path.write_text(json.dumps({one: said for one, said in TABLE.items() if one != key}))
    monkeypatch.setattr(phrases, "FILE", Path(path))
    for cached in (phrases._phrases, phrases._said):
        cached.cache_clear()
    try:
        assert left(endpoints) + left(matrix()) + left(loads())
    finally:
        monkeypatch.undo()
        for cached in (phrases._phrases, phrases._said):
            cached.cache_clear()


# --------------------------------------------------------------------------- sentences


def test_every_template_says_its_numbers_and_in_chinese():
    for told, said in TABLE.items():
        fields = re.findall(r"\{(\d+)#?\}", told)
        kept = re.findall(r"\{(\d+)\}", said)
        assert len(fields) == len(set(fields)), told
        assert set(kept) <= set(fields), told
        assert set(re.findall(r"\{(\d+)#\}", told)) <= set(kept), told
        assert told == said or re.search(r"[\u3000-\u9fff\uff00-\uffef]", said), told
        filled = re.sub(r"\{(\d+)#?\}", lambda field: f"7.{field[1]}", told)
        numbers = [set(re.findall(r"\d+(?:\.\d+)?", text)) for text in (filled, in_chinese(filled))]
        assert numbers[1] <= numbers[0], told


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("a; b", "a; b"),
        ("'no gate'", "'no gate'"),
        ("x, token 3: ' a; b' instead of ' c'", "x，第 3 个词元：' a; b' 而非 ' c'"),
        (
            "t 1.5 (95 % interval 1 to 2); no gate; who knows",
            "t 1.5（95 % 区间 1 至 2）；未设门槛；who knows",
        ),
        ("PASS before, FAIL now: NOT lossless: y", "此前 PASS，现在 FAIL：并非无损：y"),
    ],
)
def test_sentences_are_said_and_what_is_a_models_or_unknown_stands(told, said):
    assert in_chinese(told) == said
