"""A judge: the user's own command that scores an answer, run once an item."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import tempfile
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from trtspec import process
from trtspec.errors import InputError, MissingError, Problem

JUDGE_SECONDS = 300.0
JUDGE_OUTPUT = 1_000_000


def judge_command(command: str) -> list[str]:
    """The words of the judge's command. InputError if there are none, MissingError without the program."""
    try:
        argv = shlex.split(command)
    except ValueError as error:
        raise InputError(Problem(f"not a command: {error}", key="--judge")) from None
    if not argv:
        raise InputError(Problem("is empty; give a command", key="--judge"))
    if shutil.which(argv[0]) is None:
        raise MissingError(f"--judge: {argv[0]}: no such program; give its path, or install it")
    return argv


def run_judge(command: str, question: Mapping[str, object]) -> float:
    """The score that the judge gives: ``command`` is run with the path of a JSON file (``question``: id,
    task, prompt, answer, output) as its last argument, and its last line must be a number from 0 to 1.

    Raises InputError for anything else, MissingError where there is no such program or it fails.
    """
    argv = judge_command(command)
    said: deque[str] = deque(maxlen=process.TAIL_LINES)
    size = 0

    def heard(line: str) -> None:
        nonlocal size
        said.append(line)
        size += len(line) + 1
        if size > JUDGE_OUTPUT:
            message = f"item {question['id']!r}: printed over {JUDGE_OUTPUT:,} characters; a number is enough"
            raise InputError(Problem(message, key="--judge"))

    with tempfile.TemporaryDirectory(prefix="trtspec-judge-") as name:
        path = Path(name) / "item.json"
        path.write_text(json.dumps(question, ensure_ascii=False), encoding="utf-8")
        process.run([*argv, str(path)], timeout_s=JUDGE_SECONDS, on_line=heard, foreign=True)
    lines = [line for line in said if line.strip()]
    try:
        value = float(lines[-1])
    except (IndexError, ValueError):
        value = math.nan
    if not 0 <= value <= 1:
        last = lines[-1][:80] if lines else ""
        message = f"item {question['id']!r}: the last line must be a number from 0 to 1, it is {last!r}"
        raise InputError(Problem(message, key="--judge"))
    return value
