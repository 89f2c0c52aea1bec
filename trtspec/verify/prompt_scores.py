"""Log-probabilities of a given text, where a server tells them: OpenAI's completions with ``echo`` and
``logprobs`` (vLLM does; Triton's generate endpoints and chat completions do not).

A server is asked to repeat the prompt and to add one token, with the log-probability of each; the added one
is dropped. The first token of a prompt has none, as nothing comes before it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trtspec.ruler import shared_start
from trtspec.verify.endpoint import Endpoint
from trtspec.verify.http_stream import Refused, Silent, json_value, post, refused
from trtspec.verify.records import Row
from trtspec.verify.tasks import Item, Scored, chosen

MOST_LOGPROB = 0.01
"""Of a token that is certain, with the rounding of 16-bit arithmetic."""


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
    status, content = post(endpoint, "/v1/completions", body)
    if status != 200:
        raise refused(endpoint, status, content)
    value = json_value(content)
    try:
        told = value["choices"][0]["logprobs"]
        tokens, logprobs = list(map(str, told["tokens"])), list(told["token_logprobs"])
        tops = list(told.get("top_logprobs") or [None] * len(tokens))
        count = _prompt_tokens(value, len(tokens))
        found = [math.nan if one is None else float(one) for one in logprobs[:count]]
        likely = [_likeliest(one) for one in tops[:count]]
        if not len(tokens) == len(logprobs) == len(tops) or count < 2 or any(map(math.isnan, found[1:])):
            raise ValueError("another number of tokens than of log-probabilities")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError):
        raise Silent("its completions come without the log-probabilities of the prompt (echo)") from None
    if wrong := [one for one in found[1:] if not -math.inf < one <= MOST_LOGPROB]:
        raise Silent(f"its log-probabilities of the prompt are none: {wrong[0]:.3g} is among them (echo)")
    return PromptScores(tuple(tokens[:count]), tuple(found), tuple(map(str, likely)))


def _likeliest(top: Any) -> str:
    return max(top, key=lambda token: float(top[token])) if isinstance(top, dict) and top else ""


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


def scored_texts(
    url: Sequence[PromptScores | str], baseline: Sequence[PromptScores | str]
) -> tuple[list[Row], list[str]]:
    """A row for each token that both scored, and why the other texts have none."""
    rows: list[Row] = []
    unscored: list[str] = []
    done = 0
    for mine, theirs in zip(url, baseline, strict=True):
        if isinstance(mine, str) or isinstance(theirs, str):
            unscored.append(mine if isinstance(mine, str) else str(theirs))
        elif mine.tokens != theirs.tokens:
            unscored.append("the two servers split it into other tokens: not the same tokenizer")
        else:
            values = zip(mine.logprobs, theirs.logprobs, mine.tops, theirs.tops, strict=True)
            for position, (a, b, top, other) in enumerate(itertools.islice(values, 1, None)):
                same = top == other
                row = {"text": done, "position": position, "target": a, "baseline": b, "same_top": same}
                rows.append(row)
            done += 1
    return rows, unscored


def choose(item: Item, score: Callable[[str | Sequence[int]], PromptScores]) -> Scored:
    """1 if the right choice is strictly the most likely one, as
    :func:`trtspec.verify.tasks.score_choice` says; by token ids where the item has them, else by text."""
    if item.choices:
        found = [score(tokens) for tokens in item.choices]
        first = item.first
    else:
        # Something must come before the first scored token.
        prompt = item.prompt or "\n"
        found = [score(prompt + text) for text in item.texts]
        first = first_scored([one.tokens for one in found], prompt)
    values = tuple(
        math.fsum(one.logprobs[first:]) / weight for one, weight in zip(found, item.weights, strict=True)
    )
    return chosen(values, item.right)


def first_scored(choices: Sequence[Sequence[str]], prompt: str) -> int:
    """The first token that belongs to a choice, or to the prompt where a choice changes how that is split:
    for all choices the same one."""
    shared = shared_start(choices)
    spelled = ""
    for number, token in enumerate(choices[0][:shared]):
        spelled += token
        if not prompt.startswith(spelled):
            # Beyond the prompt; or the server spells tokens otherwise, and those shared cancel out anyway.
            return max(number if spelled.startswith(prompt) else shared, 1)
    return max(shared, 1)
