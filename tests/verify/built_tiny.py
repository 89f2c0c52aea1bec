"""Tiny engines built by the real build, and ways of breaking an engine that verification must notice."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tiny import make_tiny_model

from trtspec.artifact import Artifact, open_artifact
from trtspec.build import build
from trtspec.embedded.acceptance import Accepted
from trtspec.embedded.sampling import Draw, TargetLaw
from trtspec.embedded.tree import Draft, children, path_to
from trtspec.engine import Output
from trtspec.prompts import Prompt

RECIPE = """\
version: 1
name: tiny
model: {{source: model}}
backend: {{kind: embedded, dtype: {dtype}, threads: 1}}
speculation: {speculation}
limits: {{max_batch_size: 8, max_input_tokens: 128, max_seq_tokens: 256, max_num_tokens: 128}}
gates: {gates}
"""
NGRAM = "{kind: ngram, num_draft_tokens: 3, min_ngram: 1}"


def build_tiny(
    folder: Path, *, dtype: str = "float32", speculation: str = NGRAM, gates: str = "{}", seed: int = 0
) -> Artifact:
    """An unquantized engine in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        make_tiny_model(folder / "model", seed=seed)
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(dtype=dtype, speculation=speculation, gates=gates))
    return open_artifact(build(recipe, folder / "engines").folder)


def repetitive_prompts(count: int = 6) -> list[Prompt]:
    """Prompts in which prompt lookup finds something."""
    chance = random.Random(3)
    prompts = []
    for number in range(count):
        phrase = [chance.randrange(10, 250) for _ in range(4)]
        prompts.append(Prompt(f"p{number}", tuple(phrase * (3 + number % 3))))
    return prompts


def write_jsonl(path: Path, values: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def changes_one_token(request_id: str) -> Callable[[Output], Output]:
    """The third output of one request has another first token."""
    seen = 0

    def change(output: Output) -> Output:
        nonlocal seen
        if output.request_id != request_id or not output.new_tokens:
            return output
        seen += 1
        if seen != 3:
            return output
        first, *rest = output.new_tokens
        return dataclasses.replace(output, new_tokens=((first + 1) % 256, *rest))

    return change


def claims_everything_accepted(output: Output) -> Output:
    return dataclasses.replace(output, accepted=output.drafted)


def keeps_near_misses(nats: float, chance: float = 1.0) -> Callable[..., Any]:
    """An acceptance like ``exact`` that also keeps drafts up to ``nats`` below the best token, or a share
    ``chance`` of them. It looks better by every measure but losslessness: more is accepted, it is faster, and
    the text stays plausible."""
    coin = random.Random(5)

    def careless(draft: Draft, law: TargetLaw, draw: Draw) -> Accepted:
        below = children(draft)
        row = 0
        while True:
            token = law.sample(row, draw)
            logits = law.logits[row]
            kept = [
                node
                for node in below[row]
                if draft.tokens[node] == token
                or (float(logits.max() - logits[draft.tokens[node]]) <= nats and coin.random() < chance)
            ]
            if not kept:
                return Accepted(path_to(draft, row - 1), token)
            row = kept[0] + 1

    return careless
