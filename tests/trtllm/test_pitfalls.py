"""docs/pitfalls.md names rules and verbs that exist, and every rule is accounted for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trtspec.cli import COMMANDS
from trtspec.recipe_model import MODEL_RULES
from trtspec.recipe_rules import RULES as RECIPE_RULES
from trtspec.trtllm.export import EXPORT_RULES
from trtspec.trtllm.rules import RULES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "pitfalls.md"
GPU_RULES = {**RULES, **EXPORT_RULES}
KNOWN = {*RECIPE_RULES, *MODEL_RULES, *GPU_RULES}
ISSUE = r"(?:(?:TB|MO|dynamo) )?#\d+"


def rows(text: str) -> list[tuple[int, str, str, str]]:
    """(number, source, what trtspec does, by what) of each row."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0].isdigit():
            found.append((int(cells[0]), cells[1], cells[3], cells[4]))
    return found


def problems(text: str) -> list[str]:
    table, wrong = rows(text), list[str]()
    if [number for number, *_ in table] != list(range(1, len(table) + 1)):
        wrong.append("the rows are not numbered from 1 on")
    named: dict[str, set[str]] = {}
    for number, source, does, by in table:
        if not does.startswith(("Prevented", "Detected", "Explained")):
            wrong.append(f"{number}: neither prevented, detected nor explained")
        names = re.findall(r"`([^`]+)`", by)
        if not names:
            wrong.append(f"{number}: by nothing")
        for name in names:
            named.setdefault(name, set()).update(re.findall(ISSUE, source) or [source])
            if name.removeprefix("trtspec ") not in COMMANDS and name not in KNOWN:
                wrong.append(f"{number}: no rule or verb {name}")
    for rule in GPU_RULES.values():
        issues = set(re.findall(ISSUE, rule.source.replace("ai-dynamo/", "")))
        if rule.id not in named and (issues or not rule.source):
            wrong.append(f"{rule.id}: in no row, although its source is {rule.source}")
        elif rule.id in named and issues and not issues & named[rule.id]:
            wrong.append(f"{rule.id}: no row of it has its source {rule.source}")
    return wrong


def test_every_row_is_answered_and_every_rule_accounted_for() -> None:
    assert problems(PAGE.read_text()) == []
    assert len(rows(PAGE.read_text())) >= 66  # 53 reports and the traps of the sources


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("`trtllm-bls`", "`trtllm-bsl`", "no rule or verb trtllm-bsl"),
        ("`trtspec migrate`", "`trtspec move`", "no rule or verb trtspec move"),
        ("| 21 |", "| 22 |", "not numbered"),
        ("| Prevented | `parallel-pipeline` |", "| Hm | `parallel-pipeline` |", "15: neither"),
        ("| Prevented | `parallel-pipeline` |", "| Prevented | a rule |", "15: by nothing"),
        ("`trtllm-medusa-qwen`", "`trtllm-version`", "trtllm-medusa-qwen: in no row"),
        ("| 5 | #1798 |", "| 5 | #1 |", "trtllm-medusa-architecture: no row of it has its source"),
    ],
)
def test_a_wrong_page_is_noticed(old: str, new: str, said: str) -> None:
    text = PAGE.read_text()
    assert old in text
    assert any(said in problem for problem in problems(text.replace(old, new)))
