"""The prompts and texts that verification runs on: those that ship with trtspec, or the user's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trtspec.errors import InputError, Problem
from trtspec.text import Tokenizer
from trtspec.user_files import parse_json, read_user_text

DATA_FOLDER = Path(__file__).parent / "data"
PROMPTS_FILE = DATA_FOLDER / "prompts.jsonl"
HELDOUT_FILE = DATA_FOLDER / "heldout.jsonl"
_MAX_BYTES = 256_000_000
_Piece = TypeVar("_Piece", bound=Sequence[object])


@dataclass(frozen=True)
class Prompt:
    id: str
    tokens: tuple[int, ...]
    task: str = ""
    """What kind of prompt it is (``chat``, ``rewrite`` ...), if the file says."""
    language: str = ""
    """``en``, ``zh`` ..., if the file says."""


@dataclass(frozen=True)
class Chat:
    """A prompt before any tokenizer: for endpoints, which have their own."""

    id: str
    messages: tuple[dict[str, str], ...]
    """``role`` and ``content``."""
    task: str = ""
    language: str = ""

    @property
    def text(self) -> str:
        """What a model without a chat template continues."""
        return "\n\n".join(message["content"] for message in self.messages)


def load_prompts(
    path: Path, tokenizer: Tokenizer, *, limit: int, max_tokens: int, sample: bool = False
) -> list[Prompt]:
    """Up to ``limit`` prompts of a JSONL file, tokenized: the first ones, or with ``sample`` ones spread
    evenly over the file, whose tasks come one after another.

    A line is an object with ``messages`` (a chat; the model is to answer), ``prompt`` or ``text`` (the
    user's message of a chat), and maybe an ``id``. A model without a chat template continues the text.
    Prompts of more than ``max_tokens`` tokens are never cut: they are refused, or passed over with
    ``sample``. Raises InputError with every bad line.
    """
    prompts: list[Prompt] = []
    problems: list[Problem] = []
    seen: set[str] = set()
    lines: dict[object, int] = {}
    if max_tokens < 1:
        message = "leaves no room for a prompt within limits.max_seq_tokens; ask for shorter answers"
        raise InputError(Problem(message, key="max_new_tokens"))
    for number, value in read_lines(path, problems):
        if len(prompts) >= limit and not sample and not problems:
            break
        tokens = _prompt_tokens(value, tokenizer)
        name = str(value.get("id", f"line-{number}"))
        if tokens is None:
            message = (
                "needs messages (a list of role: system, user or assistant, and content), prompt or text, "
                "not empty"
            )
            problems.append(Problem(message, file=str(path), line=number))
        elif sample and len(tokens) > max_tokens:
            continue
        elif not 0 < len(tokens) <= max_tokens:
            message = (
                f"{len(tokens)} tokens; allowed are 1 to {max_tokens} (limits.max_input_tokens and room "
                "for the answer)"
            )
            problems.append(Problem(message, file=str(path), line=number))
        elif name in seen:
            problems.append(Problem(f"id {name!r} occurs twice", file=str(path), line=number))
        elif (first := lines.setdefault(tuple(tokens), number)) != number:
            problems.append(Problem(repeats(first), file=str(path), line=number))
        else:
            task, language = (str(value.get(key, "")) for key in ("task", "language"))
            prompts.append(Prompt(name, tuple(tokens), task, language))
        seen.add(name)
    if not prompts and not problems:
        message = f"holds no prompt of at most {max_tokens} tokens (limits.max_input_tokens, max_seq_tokens)"
        problems.append(Problem(message, file=str(path)))
    if problems:
        raise InputError(problems)
    if len(prompts) > limit:
        prompts = [prompts[i * len(prompts) // limit] for i in range(limit)]
    return prompts


def repeats(line: int) -> str:
    """Why a line is refused that says what ``line`` says: intervals and sample sizes count each as new."""
    return f"says the same as line {line}, which is no more evidence; leave it out"


def load_chats(path: Path, *, limit: int, sample: bool = False) -> list[Chat]:
    """Up to ``limit`` prompts of a JSONL file as they are: the first ones, or with ``sample`` ones spread
    evenly over the file. Lines as :func:`load_prompts` reads them; raises InputError with every bad line."""
    problems: list[Problem] = []
    chats: dict[str, Chat] = {}
    lines: dict[object, int] = {}
    for number, value in read_lines(path, problems):
        messages = _messages(value)
        name = str(value.get("id", f"line-{number}"))
        if messages is None:
            message = "needs messages (a list of role and content), prompt or text, not empty"
            problems.append(Problem(message, file=str(path), line=number))
        elif name in chats:
            problems.append(Problem(f"id {name!r} occurs twice", file=str(path), line=number))
        else:
            kept = tuple({key: one[key] for key in ("role", "content")} for one in messages)
            first = lines.setdefault(tuple((one["role"], one["content"]) for one in kept), number)
            if first != number:
                problems.append(Problem(repeats(first), file=str(path), line=number))
            chats[name] = Chat(name, kept, str(value.get("task", "")), str(value.get("language", "")))
    if not chats and not problems:
        problems.append(Problem("holds no prompts", file=str(path)))
    if problems:
        raise InputError(problems)
    found = list(chats.values())
    if len(found) <= limit:
        return found
    return [found[i * len(found) // limit] for i in range(limit)] if sample else found[:limit]


def load_texts(path: Path, tokenizer: Tokenizer, *, total_tokens: int, max_tokens: int) -> list[list[int]]:
    """Texts of a JSONL file (``text`` a line), tokenized and cut to ``max_tokens``, up to a total."""
    return _gathered(
        path, lambda text: tokenizer.encode(text)[:max_tokens], lambda tokens: len(tokens) - 1, total_tokens
    )


def read_texts(path: Path, *, total_letters: int, max_letters: int) -> list[str]:
    """Texts of a JSONL file as :func:`load_texts` reads them, for servers that have the tokenizer: cut to
    ``max_letters`` at a space, up to a total. Raises InputError with every bad line."""

    def cut(text: str) -> str:
        head = text[:max_letters]
        return text if text == head else head.rpartition(" ")[0] or head

    return _gathered(path, cut, len, total_letters)


def _gathered(
    path: Path, cut: Callable[[str], _Piece], size: Callable[[_Piece], int], enough: int
) -> list[_Piece]:
    """What ``cut`` leaves of the file's texts, until their sizes make ``enough``; nothing of one item."""
    found: list[_Piece] = []
    problems: list[Problem] = []
    lines: dict[object, int] = {}
    total = 0
    for number, value in read_lines(path, problems):
        if total >= enough:
            break
        text = value.get("text")
        if not isinstance(text, str):
            problems.append(Problem("needs text, a string", file=str(path), line=number))
            continue
        if (first := lines.setdefault(text, number)) != number:
            problems.append(Problem(repeats(first), file=str(path), line=number))
        piece = cut(text)
        if len(piece) > 1:
            found.append(piece)
            total += size(piece)
    if not found and not problems:
        problems.append(Problem("holds no texts", file=str(path)))
    if problems:
        raise InputError(problems)
    return found


def _prompt_tokens(value: dict[str, Any], tokenizer: Tokenizer) -> list[int] | None:
    messages = _messages(value)
    if messages is None:
        return None
    if tokenizer.has_chat_template:
        return tokenizer.encode_chat(messages)
    return tokenizer.encode("\n\n".join(message["content"] for message in messages))


def _messages(value: dict[str, Any]) -> list[dict[str, str]] | None:
    """The messages of a line, checked; None if there are none."""
    text = value.get("prompt", value.get("text"))
    messages = value.get("messages", [{"role": "user", "content": text}])
    if not (isinstance(messages, list) and messages and all(_is_message(message) for message in messages)):
        return None
    return messages


def _is_message(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.get("role") in ("system", "user", "assistant", "tool")
        and isinstance(value.get("content"), str)
        and bool(value["content"].strip())
    )


def read_lines(path: Path, problems: list[Problem]) -> list[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file by line. Lines end with a newline only: JSON strings may hold U+2028."""
    values = []
    text = read_user_text(path, max_bytes=_MAX_BYTES).removeprefix("\ufeff")
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = parse_json(line)
        except ValueError as error:
            problems.append(Problem(f"not a JSON object: {error}", file=str(path), line=number))
            continue
        if isinstance(value, dict):
            values.append((number, value))
        else:
            problems.append(Problem("not a JSON object", file=str(path), line=number))
    return values
