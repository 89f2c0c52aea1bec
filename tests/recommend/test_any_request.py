"""Random scenarios, models, boards, backends, heads: a lawful recipe or a refusal, never a crash."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from recommend_cases import broken_laws, draft_of

from trtspec.errors import InconclusiveError, InputError
from trtspec.hardware import all_gpus
from trtspec.known_models import find_model, known_models
from trtspec.recommend import recommend
from trtspec.recommend.heads import Heads
from trtspec.scenario import Scenario

TASKS = ("chat", "code", "math", "qa", "rag", "summarization", "translation")


def _scenario(rng: random.Random) -> Scenario:
    return Scenario(
        task=rng.choice(TASKS),  # type: ignore[arg-type]
        input_tokens=int(2 ** rng.uniform(4, 15)),
        output_tokens=int(2 ** rng.uniform(2, 11)),
        concurrency=int(2 ** rng.uniform(0, 9)),
        temperature=rng.choice([0.0, 0.0, 0.7, 1.0, 2.0]),
        copy_fraction=rng.choice([None, 0.0, 0.1, 0.5, 0.9, 1.0]),
        fidelity=rng.choice(["exact", "distribution", "approximate"]),  # type: ignore[arg-type]
        memory=rng.choice(["normal", "tight"]),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("seed", range(3))
def test_anything_that_is_asked(seed: int) -> None:
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    for _ in range(80):
        work, model = _scenario(rng), find_model(rng.choice(known_models()).id)
        board: Any = rng.choice([None, *all_gpus()])
        backend: Any = rng.choice([None, None, "pytorch", "tensorrt", "embedded"]) if board else None
        heads = rng.choice(
            [
                None,
                None,
                Heads("h", "medusa", None, 4, 1),
                Heads("h", "eagle", None),
                Heads("h", "eagle3", None),
            ]
        )
        weights = rng.choice([None] * 5 + ["fp8", "w4a16_awq", "none", "nvfp4"])
        asked = (work, model.source, board and board.name, backend, heads and heads.method, weights)
        count = rng.choice([1, 1, 2, 3, 4, 8])
        try:
            found = recommend(
                work,
                model,
                board,
                count=count,
                backend=backend,
                heads=heads,
                draft=draft_of(model),
                weights=weights,
            )
        except (InputError, InconclusiveError):
            seen["refused"] += 1
            continue
        assert list(broken_laws(found, heads="h")) == [], asked
        assert weights is None or found.recipe.quantization.kind == weights
        seen["recommended"] += 1
    assert seen["recommended"] > 30
    assert seen["refused"] > 5
