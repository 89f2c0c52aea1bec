"""Log-probabilities of a given text, where a server tells them: OpenAI's completions with ``echo`` and
``logprobs`` (vLLM does; Triton's generate endpoints and chat completions do not).

A server is asked to repeat the prompt and to add one token, with the log-probability of each; the added one
is dropped. The first token of a prompt has none, as nothing comes before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from trtspec.verify.endpoint import Endpoint
from trtspec.verify.http_stream import Refused, Silent, exchange, json_value, opened, refused


@dataclass(frozen=True)
class PromptScores:
    """Token i of the prompt: its text, its log-probability (NaN for the first), and the most likely token in
    its place as text ("" where the server does not tell)."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    tops: tuple[str, ...]


def prompt_scores(endpoint: Endpoint, prompt: str | Sequence[int]) -> PromptScores:
    """The scores of ``prompt``, a text or token ids.

    Raises Silent where nothing comes or no such scores are in the answer, Refused for an HTTP error.
    """
    if endpoint.protocol != "openai":
        raise Silent("Triton's generate endpoint tells no log-probabilities of a given text")
    body = {
        "model": endpoint.model,
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": 1,
        "temperature": 0,
        "echo": True,
        "logprobs": 1,
    }
    with closing(opened(endpoint)) as connection:
        status, content = exchange(endpoint, connection, "POST", "/v1/completions", body)
    if status != 200:
        raise refused(status, content)
    value = json_value(content)
    try:
        told = value["choices"][0]["logprobs"]
        tokens, logprobs = list(map(str, told["tokens"])), list(told["token_logprobs"])
        tops = list(told.get("top_logprobs") or [None] * len(tokens))
        count = _prompt_tokens(value, len(tokens))
        found = [math.nan if one is None else float(one) for one in logprobs[:count]]
        likely = [max(one, key=one.get) if isinstance(one, dict) and one else "" for one in tops[:count]]
        if not len(tokens) == len(logprobs) == len(tops) or count < 2 or any(map(math.isnan, found[1:])):
            raise ValueError("another number of tokens than of log-probabilities")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise Silent("its completions come without the log-probabilities of the prompt (echo)") from None
    return PromptScores(tuple(tokens[:count]), tuple(found), tuple(map(str, likely)))


def _prompt_tokens(value: Any, listed: int) -> int:
    """How many of ``listed`` tokens are the prompt's: as the server counts, else all but the added one."""
    usage = value.get("usage")
    count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return count if type(count) is int and listed - 1 <= count <= listed else listed - 1


def why_no_scores(endpoint: Endpoint) -> str:
    """Why ``endpoint`` cannot score a given text; "" if it can. Asks it once."""
    try:
        prompt_scores(endpoint, "The cat sat on the mat.")
    except (Silent, Refused) as error:
        return str(error)
    return ""
