"""The training prompts: as their script makes them, many, and none that heads are measured on."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "trtspec" / "data"


def texts(name: str) -> list[str]:
    lines = (DATA / name).read_text(encoding="utf-8").splitlines()
    return [
        message["content"]
        for line in lines
        for message in json.loads(line)["messages"]
        if message["role"] == "user"
    ]


def test_prompts_are_what_the_script_makes() -> None:
    spec = importlib.util.spec_from_file_location(
        "training_prompts", ROOT / "scripts" / "training_prompts.py"
    )
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    made = "".join(json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in script.make_prompts())
    assert (DATA / "training_prompts.jsonl").read_text(encoding="utf-8") == made
    assert script.make_prompts(50) == script.make_prompts()[:50]


def test_prompts_are_many_different_and_not_measured_on() -> None:
    found = texts("training_prompts.jsonl")
    assert len(found) == len(set(found)) >= 1500
    assert not set(found) & set(texts("prompts.jsonl"))
    tasks = {json.loads(line)["task"] for line in (DATA / "training_prompts.jsonl").open(encoding="utf-8")}
    assert {"chat", "code", "zh"} <= tasks
