"""Calibration texts: reading, seeded choice, packing into rows.

Rows are packed without padding: ModelOpt's AWQ search costs batches x 11 candidate scales x layers, and
padding would enter the statistics.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from trtspec.errors import InputError, Problem
from trtspec.recipe import Calibration
from trtspec.text import Tokenizer
from trtspec.user_files import parse_json, read_user_text, shown_path

MAX_FILE_BYTES = 1_000_000_000
MIN_ROW_TOKENS = 8
"""A remainder shorter than this is dropped: its statistics are those of a text's start only."""


@dataclass(frozen=True)
class Sample:
    """One text: exactly one of the two is set. ``messages`` are ``{"role", "content"}``."""

    text: str | None
    messages: tuple[dict[str, str], ...] | None


def read_samples(data: str) -> list[Sample]:
    """The samples of ``builtin`` or of a JSONL file; InputError names every bad line."""
    if data == "builtin":
        text = resources.files("trtspec").joinpath("data/calibration.jsonl").read_text(encoding="utf-8")
        place = "builtin calibration data"
    else:
        place = shown_path(data)
        try:
            text = read_user_text(Path(data), max_bytes=MAX_FILE_BYTES).removeprefix("\ufeff")
        except InputError as error:
            why = error.problems[0].message
            raise InputError(
                Problem(f"calibration data cannot be read: {why}; give 'builtin' or a JSONL file", place)
            ) from None
    samples: list[Sample] = []
    problems: list[Problem] = []
    # Not splitlines(): a line of JSON may hold U+2028 and others that it takes for line ends.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            samples.append(_parse(line))
        except ValueError as error:
            problems.append(Problem(str(error), place, number))
    if not samples and not problems:
        problems.append(Problem('no samples; one JSON object per line with "text" or "messages"', place))
    if problems:
        raise InputError(problems)
    return samples


def plain_texts(data: str) -> list[str]:
    """The samples of :func:`read_samples` as texts, a conversation's messages one after the other."""
    return [
        sample.text
        if sample.text is not None
        else "\n\n".join(message["content"] for message in sample.messages or ())
        for sample in read_samples(data)
    ]


def _parse(line: str) -> Sample:
    try:
        value = parse_json(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict) or ("text" in value) == ("messages" in value):
        raise ValueError('must be a JSON object with either "text" or "messages"')
    if "text" in value:
        if not isinstance(value["text"], str) or not value["text"].strip():
            raise ValueError('"text" must be a string that is not blank')
        return Sample(value["text"], None)
    messages = value["messages"]
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise ValueError('"messages" must be a list of {"role": string, "content": string}')
    return Sample(None, tuple({"role": item["role"], "content": item["content"]} for item in messages))


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str)
    )


@dataclass(frozen=True)
class Rows:
    """Token rows of equal length, the last possibly shorter; ``digest`` is their SHA-256."""

    rows: tuple[tuple[int, ...], ...]
    num_samples: int
    digest: str

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.rows))


def pack(
    samples: Sequence[Sample], tokenizer: Tokenizer, calibration: Calibration, *, max_row_tokens: int
) -> Rows:
    """Choose ``num_samples`` by the seed, tokenize, join, and cut into rows.

    The same samples, tokenizer and seed give the same rows. Chats of a model without a chat template are
    joined as plain text. Raises InputError when fewer than MIN_ROW_TOKENS tokens come out.
    """
    chooser = random.Random(calibration.seed)
    chosen = chooser.sample(list(samples), min(calibration.num_samples, len(samples)))
    stream: list[int] = []
    for sample in chosen:
        if sample.text is not None:
            stream += tokenizer.encode(sample.text)
        elif sample.messages is not None and tokenizer.has_chat_template:
            stream += tokenizer.encode_chat(sample.messages)
        elif sample.messages is not None:
            stream += tokenizer.encode(
                "\n\n".join(message["content"] for message in sample.messages) + "\n\n"
            )
    length = min(calibration.max_tokens, max_row_tokens)
    rows = [tuple(stream[start : start + length]) for start in range(0, len(stream), length)]
    if rows and len(rows[-1]) < MIN_ROW_TOKENS:
        rows.pop()
    if not rows:
        raise InputError(
            f"calibration data gives {len(stream)} tokens, at least {MIN_ROW_TOKENS} are needed; "
            "add texts or raise quantization.calibration.num_samples"
        )
    digest = hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()
    return Rows(tuple(rows), len(chosen), digest)


def spread(rows: Rows, max_tokens: int) -> Rows:
    """Rows evenly spaced over ``rows``, up to ``max_tokens`` tokens (at least one row)."""
    wanted = max(1, min(len(rows.rows), max_tokens // len(rows.rows[0])))
    chosen = [rows.rows[index * len(rows.rows) // wanted] for index in range(wanted)]
    return Rows(tuple(chosen), rows.num_samples, rows.digest)


def batches(rows: Rows, *, max_batch_tokens: int = 4096) -> list[list[tuple[int, ...]]]:
    """Group rows of equal length, each group up to ``max_batch_tokens`` (at least one row)."""
    groups: list[list[tuple[int, ...]]] = []
    for row in rows.rows:
        fits = (
            groups and len(groups[-1][0]) == len(row) and (len(groups[-1]) + 1) * len(row) <= max_batch_tokens
        )
        if fits:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups
