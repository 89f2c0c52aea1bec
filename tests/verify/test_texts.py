"""Prompt files as users write them, and what verify asks before it measures."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from built_tiny import build_tiny

from trtspec.cli import main
from trtspec.errors import InputError
from trtspec.prompts import load_chats, load_prompts, load_texts
from trtspec.text import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    artifact = build_tiny(tmp_path_factory.mktemp("texts"))
    return Tokenizer.load(artifact.target_dir)


def problems(path: Path, tokenizer: Tokenizer, *, limit: int = 9, max_tokens: int = 100) -> list[str]:
    with pytest.raises(InputError) as caught:
        load_prompts(path, tokenizer, limit=limit, max_tokens=max_tokens)
    return [line.removeprefix(f"{path}:") for line in str(caught.value).splitlines()]


NEEDS = "needs messages (a list of role: system, user or assistant, and content), prompt or text, not empty"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not a JSON object"),
        ("[1]", "not a JSON object"),
        ("[" * 100_000, "not a JSON object: nested too deeply"),
        ('{"prompt": "\\ud800"}', "half of a surrogate pair"),
        ('{"id": 1}', NEEDS),
        ('{"prompt": ""}', NEEDS),
        ('{"prompt": 3}', NEEDS),
        ('{"messages": [{"role": "alien", "content": "x"}]}', NEEDS),
        ('{"messages": []}', NEEDS),
    ],
)
def test_a_bad_line_is_named(line: str, message: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n' + line + "\n", encoding="utf-8")
    (found,) = problems(path, tokenizer)
    assert found.startswith("2: ")
    assert message in found


def test_a_text_given_twice_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Under another id too: intervals would take copies of one prompt for so many prompts."""
    path = tmp_path / "p.jsonl"
    path.write_text('{"text": "abc"}\n{"text": "abd"}\n{"text": "abc", "id": "new"}\n', encoding="utf-8")
    for read in (
        lambda: load_prompts(path, tokenizer, limit=9, max_tokens=100),
        lambda: load_chats(path, limit=9),
        lambda: load_texts(path, tokenizer, total_tokens=1000, max_tokens=100),
    ):
        with pytest.raises(InputError, match="says the same as line 1, which is no more evidence"):
            read()
    assert len(load_prompts(path, tokenizer, limit=2, max_tokens=100)) == 2


def test_a_line_separator_inside_a_string_is_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('\ufeff{"prompt": "a\u2028b"}\r\n{"prompt": "c\u0085d"}\n', encoding="utf-8")
    assert len(load_prompts(path, tokenizer, limit=9, max_tokens=100)) == 2


def test_no_room_for_a_prompt_is_the_answers_fault(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n')
    with pytest.raises(InputError, match="max_new_tokens: leaves no room for a prompt"):
        load_prompts(path, tokenizer, limit=1, max_tokens=-97952)


def test_a_changed_byte_of_the_same_size_is_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A build links the source's files: edited in place they change the engine behind its seal."""
    artifact = build_tiny(tmp_path)
    weights = tmp_path / "model" / "model.safetensors"
    stamps = weights.stat()
    with open(weights, "r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\x01" * 8)
    os.utime(weights, ns=(stamps.st_atime_ns, stamps.st_mtime_ns))
    assert main(["verify", str(artifact.folder), "--quick"]) == 2
    assert "changed since the engine was sealed" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["-o", "--markdown"])
def test_an_output_that_cannot_be_written_is_refused_before_measuring(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = build_tiny(tmp_path)
    for bad in (tmp_path, tmp_path / "nowhere" / "r.json"):
        assert main(["verify", str(artifact.folder), option, str(bad), "--json"]) == 2
        (problem,) = json.loads(capsys.readouterr().out)["problems"]
        assert str(bad) in problem["file"]
