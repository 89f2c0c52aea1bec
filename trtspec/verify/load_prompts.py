"""Prompts for measurements under load: those that ship with trtspec, made longer where a load wants it."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trtspec.prompts import DATA_FOLDER, HELDOUT_FILE, PROMPTS_FILE, Chat, load_chats, read_lines
from trtspec.text import Tokenizer

MORE_PROMPTS_FILE = DATA_FOLDER / "load_prompts.jsonl"
"""With prompts.jsonl a hundred, eight and more of each task and language. Apart from it, so that what other
checks draw from that file stays as it is."""

_SHORTEST = 16
"""Near enough to the length wanted: the texts left need not be counted."""
_SENTENCE = re.compile(r"(?<=[.!?。！？])\s*")


def chats_for_loads(file: Path | None) -> list[Chat]:
    """Every prompt of ``file``, or of ours. Raises InputError for lines that are none."""
    files = (PROMPTS_FILE, MORE_PROMPTS_FILE) if file is None else (file,)
    return [chat for one in files for chat in load_chats(one, limit=1_000_000)]


def background_texts(language: str) -> list[str]:
    """Our held-out texts in ``language``, in English where there are none."""
    rows = [row for _, row in read_lines(HELDOUT_FILE, [])]
    found = [str(row["text"]) for row in rows if row.get("language") == language]
    return found or [str(row["text"]) for row in rows if row.get("language") == "en"]


def prompt_tokens(
    chat: Chat, tokenizer: Tokenizer, *, background: Sequence[str] = (), wanted: int = 0, head: str = ""
) -> list[int]:
    """The chat's prompt with as much of ``background`` before its last message as ``wanted`` tokens hold.
    ``head`` begins the first message that is not the system's: with one of its own, a prompt shares no more
    with any other than the template's beginning."""
    messages = _headed(chat, head)
    tokens = _encode(messages, tokenizer)
    left, chosen = wanted - len(tokens), list[str]()
    for text in background:
        if left < _SHORTEST:
            break
        size = len(tokenizer.encode(text)) + 4
        if size <= left:
            chosen.append(text)
            left -= size
    if not chosen:
        return tokens
    *before, last = messages
    # Where there is but one message its head stays in front, lest all prompts begin with the same text.
    in_front = head if head and not any(one["content"].startswith(head) for one in before) else ""
    asked = last["content"].removeprefix(in_front)
    content = in_front + "\n\n".join([*chosen, asked])
    return _encode([*before, {**last, "content": content}], tokenizer)


def stream_of_chats(chats: Sequence[Chat], count: int, tag: str) -> list[Chat]:
    """``count`` chats for endpoints, no two of them alike: pass after pass over ``chats``, each numbered in
    front, as :func:`stream_of_prompts` does, and with ``tag``, the run's own: a server keeps the prompts of
    the run before. A system's message stays as it is, for servers share it."""
    return [
        replace(chat, messages=tuple(_headed(chat, f"[{tag}-{number + 1}] ")))
        for number, chat in ((number, chats[number % len(chats)]) for number in range(count))
    ]


def _headed(chat: Chat, head: str) -> list[dict[str, str]]:
    """The messages with ``head`` in front of the first that is not the system's."""
    messages = [dict(message) for message in chat.messages]
    if head:
        first = next((one for one in messages if one["role"] != "system"), messages[0])
        first["content"] = head + first["content"]
    return messages


def _encode(messages: Sequence[dict[str, str]], tokenizer: Tokenizer) -> list[int]:
    if tokenizer.has_chat_template:
        return tokenizer.encode_chat(list(messages))
    return tokenizer.encode("\n\n".join(message["content"] for message in messages))


def stream_of_prompts(
    chats: Sequence[Chat], tokenizer: Tokenizer, count: int, *, room: int, wanted: int | None, seed: int = 1
) -> list[list[int]]:
    """``count`` prompts of at most ``room`` tokens, no two of them alike: pass after pass over ``chats``,
    each in an order of its own, numbered in front so that no prefix cache holds one already. ``wanted``:
    about so many tokens each, by held-out text before the question. Fewer, or none, where nothing fits."""
    rng = random.Random(seed)
    texts: dict[str, list[str]] = {}
    found: list[list[int]] = []
    while len(found) < count:
        before, order = len(found), list(chats)
        rng.shuffle(order)
        for chat in order:
            head = f"[{len(found) + 1}] "
            background: list[str] = []
            if wanted is not None:
                texts.setdefault(chat.language, background_texts(chat.language))
                chosen = list(texts[chat.language])
                rng.shuffle(chosen)
                background = [piece for text in chosen for piece in _SENTENCE.split(text) if piece]
            tokens = prompt_tokens(chat, tokenizer, background=background, wanted=wanted or 0, head=head)
            if 0 < len(tokens) <= room:
                found.append(tokens)
            if len(found) == count:
                return found
        if len(found) == before:
            break
    return found
