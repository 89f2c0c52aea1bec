"""The prompts and texts that ship: complete, varied, and apart from what calibration has seen."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest

import trtspec

DATA = Path(trtspec.__file__).parent / "data"


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def text_of(row: dict) -> str:
    return row.get("text") or "\n".join(message["content"] for message in row["messages"])


def runs(text: str, length: int) -> set[tuple[str, ...]]:
    """Every run of so many words (Chinese: characters)."""
    words = re.findall(r"[a-z0-9']+|[\u4e00-\u9fff]", text.lower())
    return {tuple(words[start : start + length]) for start in range(len(words) - length + 1)}


def words(text: str) -> int:
    """Words; three Chinese characters count as two words."""
    chinese = len(re.findall(r"[\u4e00-\u9fff]", text))
    return chinese * 2 // 3 if chinese > 40 else len(text.split())


@pytest.mark.parametrize("name", ["prompts.jsonl", "heldout.jsonl"])
def test_ids_are_unique_and_texts_share_no_phrase(name: str) -> None:
    found = rows(name)
    assert len({row["id"] for row in found}) == len(found)
    phrases = [runs(text_of(row), 9) for row in found]
    assert not [pair for pair in combinations(range(len(found)), 2) if phrases[pair[0]] & phrases[pair[1]]]


@pytest.mark.parametrize("name", ["prompts.jsonl", "load_prompts.jsonl", "heldout.jsonl"])
def test_nothing_is_measured_on_what_was_calibrated_on(name: str) -> None:
    seen = set().union(*(runs(text_of(row), 7) for row in rows("calibration.jsonl")))
    assert seen
    assert not [row["id"] for row in rows(name) if runs(text_of(row), 7) & seen]


def test_with_those_of_the_load_matrix_there_are_a_hundred_prompts_in_every_cell() -> None:
    """They have a file of their own: what other checks draw from ``prompts.jsonl`` stays as it is."""
    prompts = rows("prompts.jsonl") + rows("load_prompts.jsonl")
    assert len(prompts) == 100
    assert len({row["id"] for row in prompts}) == 100
    cells = Counter((row["task"], row["language"]) for row in prompts)
    assert len(cells) == 10
    assert min(cells.values()) >= 8
    phrases = [runs(text_of(row), 9) for row in prompts]
    assert not [pair for pair in combinations(range(100), 2) if phrases[pair[0]] & phrases[pair[1]]]


def test_prompts_cover_five_tasks_and_two_languages_from_the_start_of_the_file_on() -> None:
    prompts = rows("prompts.jsonl")
    assert len(prompts) == 60
    tasks = Counter(row["task"] for row in prompts)
    assert set(tasks) == {"chat", "code", "summarization", "translation", "copy"}
    assert min(tasks.values()) >= 10
    assert 10 <= Counter(row["language"] for row in prompts)["zh"] <= 16
    for count in (10, 20, 40):
        # A short run takes the first prompts: they must be like the whole.
        head = prompts[:count]
        assert min(Counter(row["task"] for row in head).values()) >= count // 10
        assert {row["language"] for row in head} == {"en", "zh"}


def test_every_prompt_is_a_conversation_that_waits_for_an_answer() -> None:
    for row in rows("prompts.jsonl") + rows("load_prompts.jsonl"):
        roles = [message["role"] for message in row["messages"]]
        if roles[0] == "system":
            roles = roles[1:]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
        assert all(message["content"].strip() for message in row["messages"])


def test_summaries_have_something_to_summarize() -> None:
    for row in rows("prompts.jsonl") + rows("load_prompts.jsonl"):
        if row["task"] == "summarization":
            assert 120 <= words(text_of(row)) <= 280


def test_heldout_texts_are_of_several_kinds_and_a_page_long() -> None:
    texts = rows("heldout.jsonl")
    assert len(texts) >= 40
    kinds = Counter(row["language"] for row in texts)
    assert set(kinds) == {"en", "zh", "code"}
    assert min(kinds.values()) >= 8
    for row in texts:
        assert 80 <= words(row["text"]) <= 200, row["id"]
