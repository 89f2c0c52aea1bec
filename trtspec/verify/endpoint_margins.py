"""By how much an endpoint's best token leads its second best: what tells a near tie from a fault.

Two ways: vLLM scores a given text (``prompt_logprobs`` of completions), so the very answer that was compared
is given and each of its positions read; where a server does not, it is asked for the answer once more with
``top_logprobs`` (chats) or ``logprobs`` (completions), which tells only while it goes the same way again.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Sequence
from typing import Any

from trtspec.prompts import Chat
from trtspec.verify.endpoint import GREEDY, Endpoint, openai_body
from trtspec.verify.http_stream import Refused, Silent, json_value, post
from trtspec.verify.prompt_scores import MOST_LOGPROB
from trtspec.verify.records import Row

_NOT_TOLD = (
    Silent, Refused, KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError,
)  # fmt: skip
"""What comes of asking for an extension that a server does not have, or answers with something else."""


def margin_rows(endpoint: Endpoint, chat: Chat, answer: Row, *, max_tokens: int) -> list[dict[str, Any]]:
    """Margins along ``answer``, a reply's row: ``request_id, token, nats`` each, and ``at``, the place of the
    token in the answer, where it was scored as given. Empty where the server tells none."""
    prompt, ids = answer.get("prompt_token_ids"), answer["token_ids"]
    scored = scored_margins(endpoint, prompt, ids) if prompt and ids else None
    if scored is not None:
        return [
            {"request_id": chat.id, "token": token, "nats": nats, "at": place}
            for place, (token, nats) in enumerate(scored)
        ]
    again = margins(endpoint, chat, max_tokens=max_tokens) or []
    return [{"request_id": chat.id, "token": token, "nats": nats} for token, nats in again]


def scored_margins(
    endpoint: Endpoint, prompt: Sequence[int], ids: Sequence[int]
) -> list[tuple[str, float]] | None:
    """Each of ``ids`` as text, with the gap in nats between the two most likely tokens in its place, after
    ``prompt`` and those before it. None where the server scores no given tokens (vLLM does)."""
    if endpoint.protocol != "openai":
        return None
    asked = {
        "model": endpoint.model,
        "prompt": [*prompt, *ids],
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": 2,
    }
    try:
        status, content = post(endpoint, "/v1/completions", asked)
        told = json_value(content)["choices"][0]["prompt_logprobs"] if status == 200 else None
        if not told or len(told) != len(prompt) + len(ids):
            return None
        found = []
        for given, place in zip(ids, told[len(prompt) :], strict=True):
            gap = _gap([one["logprob"] for one in place.values()])
            found.append((str(place[str(given)].get("decoded_token") or ""), gap))
        return found
    except _NOT_TOLD:
        return None


def margins(endpoint: Endpoint, chat: Chat, *, max_tokens: int) -> list[tuple[str, float]] | None:
    """Greedy answer once more: its tokens as text, each with the gap in nats between the two most likely.

    None where the server shows no log-probabilities (``top_logprobs`` of chats, ``logprobs`` of completions).
    A token that ends within a character has the text that is complete with it, maybe none."""
    if endpoint.protocol != "openai":
        return None
    path, body = openai_body(endpoint, chat, max_tokens, GREEDY)
    kept = ("model", "max_tokens", "temperature", "messages", "prompt")
    body = {key: body[key] for key in kept if key in body}
    try:
        asked = {**body, **({"logprobs": 2} if endpoint.raw else {"logprobs": True, "top_logprobs": 2})}
        status, content = post(endpoint, path, asked)
        shown = json_value(content)["choices"][0]["logprobs"] if status == 200 else None
        if not shown:
            return None
        if endpoint.raw:
            listed = [
                (str(token), None, list(top.values()))
                for token, top in zip(shown["tokens"], shown["top_logprobs"], strict=True)
            ]
        else:
            listed = [
                (str(one["token"]), one.get("bytes"), [top["logprob"] for top in one["top_logprobs"]])
                for one in shown["content"]
            ]
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        whole = all(isinstance(raw, list) for _, raw, _ in listed)
        found = []
        for token, raw, tops in listed:
            found.append((decoder.decode(bytes(raw or ())) if whole else token, _gap(tops)))
        return found or None
    except _NOT_TOLD:
        return None


def _gap(logprobs: Iterable[Any]) -> float:
    """Between the two largest. ValueError where they are no log-probabilities."""
    values = sorted(map(float, logprobs), reverse=True)
    gap = values[0] - values[1]
    if not math.isfinite(gap) or values[0] > MOST_LOGPROB:
        raise ValueError("no log-probabilities")
    return gap
