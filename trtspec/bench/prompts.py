"""The prompts that all peers get, as token ids."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

from trtspec.artifact import Artifact
from trtspec.errors import InputError
from trtspec.text import Tokenizer

WORKLOADS = {"chat": ("chat",), "code": ("code",), "copy": ("copy", "summarization")}
"""Name -> the tasks of our prompts that it holds."""
PROMPTS_FILE = Path(__file__).parents[1] / "data" / "prompts.jsonl"


@lru_cache
def _encoded(target_dir: Path) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """(task, token ids) of each prompt."""
    tokenizer = Tokenizer.load(target_dir)
    lines = [json.loads(line) for line in PROMPTS_FILE.read_text("utf-8").splitlines()]
    return tuple((line["task"], tuple(tokenizer.encode_chat(line["messages"]))) for line in lines)


def prompts_of(artifact: Artifact, workload: str, count: int, longest: int) -> list[list[int]]:
    """``count`` prompts of at most ``longest`` tokens; repeated in order where there are fewer. InputError
    where there is none."""
    found = [
        list(ids)
        for task, ids in _encoded(artifact.target_dir)
        if task in WORKLOADS[workload] and len(ids) <= longest
    ]
    if not found:
        raise InputError(
            f"{artifact.recipe.name}: no {workload} prompt has at most {longest} tokens; raise "
            "limits.max_input_tokens and limits.max_seq_tokens"
        )
    return [found[i % len(found)] for i in range(count)]


def text_of(artifact: Artifact, length: int, start: int) -> list[int]:
    """``length`` tokens of prompts in a row, from prompt ``start`` on."""
    encoded = _encoded(artifact.target_dir)
    tokens: list[int] = []
    at = start
    while len(tokens) < length:
        tokens += encoded[at % len(encoded)][1]
        at += 1
    return tokens[:length]
