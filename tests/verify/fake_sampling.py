"""How the fake endpoints sample: a law for every prefix, and ways of drafting that keep or spoil it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

SIZE = 8
"""Words of the vocabulary; that of :mod:`fake_endpoints`."""
KEEPING, SPOILING = ("plain", "rejection"), ("biased", "always", "deaf")


def greedy(prompt: str, count: int) -> list[int]:
    state, tokens = prompt.encode(), []
    for _ in range(count):
        state = hashlib.sha256(state).digest()
        tokens.append(state[0] % SIZE)
    return tokens


def law(best: int, at: int, *, temperature: float, top_k: int = 0, top_p: float = 1.0) -> list[float]:
    """The target's law at one place: ``best`` and the words after it in falling order."""
    weights = [0.0] * SIZE
    for rank, weight in enumerate((4.0, 3.0, 2.0, 0.5, 0.2, 0.1, 0.1, 0.1)):
        weights[(best + rank) % SIZE] = (weight / 4.0) ** (1 / temperature)
    order = sorted(range(SIZE), key=lambda token: -weights[token])
    mass, kept = 0.0, []
    for token in order[: top_k or SIZE]:
        kept.append(token)
        mass += weights[token] / sum(weights)
        if mass >= top_p:
            break
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(SIZE)]


def draft_law(target: Sequence[float]) -> list[float]:
    """What a drafter thinks of it: too sure of the likely ones."""
    powers = [value**2 for value in target]
    return [value / sum(powers) for value in powers]


def draw(chance: random.Random, weights: Sequence[float]) -> int:
    return chance.choices(range(len(weights)), weights)[0]


def next_token(way: str, chance: random.Random, target: Sequence[float], *, drafted: bool) -> int:
    """A token as an engine with that ``way`` draws it: rejection keeps the law; biased draws what it rejects
    again from q instead of max(p - q, 0); always keeps every draft."""
    if not drafted or way == "plain":
        return draw(chance, target)
    drafts = draft_law(target)
    token = draw(chance, drafts)
    if way == "always" or chance.random() < target[token] / drafts[token]:
        return token
    rest = [max(p - q, 0.0) for p, q in zip(target, drafts, strict=True)]
    return draw(chance, drafts if way == "biased" or not sum(rest) else rest)


def answer(way: str, ignored: Sequence[str], prompt: str, count: int, asked: dict[str, Any]) -> list[int]:
    """An answer to a request's fields, by OpenAI's names or those of the LLM API's model. The way ``tied``
    draws its law, but near temperature 0 now and then the second-best token, as 16-bit ties do."""
    values = {key.removeprefix("sampling_param_"): value for key, value in asked.items()}
    values = {key: value for key, value in values.items() if key not in ignored}
    temperature = float(values.get("temperature") or 0.0)
    best = greedy(prompt, count)
    if not temperature or way == "deaf":
        return best
    chance = random.Random(values.get("seed"))
    if values.get("seed") is not None:
        chance = random.Random(f"{prompt} {values['seed']}")
    if way == "tied" and temperature < 0.1:
        return [(token + (chance.random() < 0.08)) % SIZE for token in best]
    return [
        next_token(
            "plain" if way == "tied" else way,
            chance,
            law(
                best[at],
                at,
                temperature=temperature,
                top_k=values.get("top_k") or 0,
                top_p=float(values.get("top_p", 1.0)),
            ),
            drafted=at > 0,
        )
        for at in range(count)
    ]
