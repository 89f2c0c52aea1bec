"""Tiny engines built by the real build, and ways of breaking an engine that verification must notice."""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tiny import make_tiny_model

from trtspec.artifact import Artifact, open_artifact
from trtspec.build import build
from trtspec.embedded.acceptance import Accepted
from trtspec.embedded.sampling import Draw, TargetLaw
from trtspec.embedded.tree import Draft, children, path_to
from trtspec.engine import Engine, EngineStats, Output
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


class Broken:
    """An engine with a fault in front of it: ``change_output`` and ``change_stats`` see everything."""

    def __init__(
        self,
        engine: Engine,
        *,
        change_output: Callable[[Output], Output] = lambda output: output,
        change_stats: Callable[[EngineStats], EngineStats] = lambda stats: stats,
        delay_s: float = 0.0,
    ) -> None:
        self._engine = engine
        self._change_output = change_output
        self._change_stats = change_stats
        self._delay_s = delay_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> list[Output]:
        if self._delay_s:  # sleeping 0 s gives the processor away too
            time.sleep(self._delay_s)
        return [self._change_output(output) for output in self._engine.step()]

    def stats(self) -> EngineStats:
        return self._change_stats(self._engine.stats())


def drops_the_last_token(output: Output) -> Output:
    if output.finish_reason is None:
        return output
    return dataclasses.replace(output, new_tokens=output.new_tokens[:-1])


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


def counts_double(stats: EngineStats) -> EngineStats:
    return dataclasses.replace(stats, generated_tokens=2 * stats.generated_tokens)


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
