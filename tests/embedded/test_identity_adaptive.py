"""Adaptive drafting changes no token: every drafter, whatever the clock says, under small pages and chunks,
prefix hits, batch neighbours that sample, and preemption. In float64. The shapes that the other identity
tests draft in chains or trees only are here too, without adapting."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_identity import SAMPLED
from test_random_walk import HEADS, KINDS, SOUND, Timed
from tiny_engine import expected, tiny_engine, workload
from tiny_heads import answer, drafter_of, heads_engine, heads_folder, target

from trtspec.embedded.drafters.adaptive import AdaptiveDrafter
from trtspec.embedded.drafters.lookahead import LookaheadDrafter
from trtspec.embedded.engine import EmbeddedEngine
from trtspec.embedded.opening import _drafter
from trtspec.engine import EngineStats, Sampling, generate
from trtspec.recipe import Recipe

OTHER_SHAPES = ("eagle-chain", "eagle3-static")


def run(kind: str, drafter: Any, **options: Any) -> EngineStats:
    heads = kind in HEADS or kind in OTHER_SHAPES
    told = answer if heads else functools.partial(expected, "llama")
    make: Callable[..., EmbeddedEngine] = heads_engine if heads else tiny_engine
    engine = make(drafter=drafter, **options)
    base = [
        replace(one, sampling=SAMPLED if at % 3 == 0 else Sampling()) for at, one in enumerate(workload())
    ]
    for turn in ("a", "b"):  # the second finds all prompts in the cache
        requests = [replace(one, id=f"{turn}{one.id}") for one in base]
        for completion, one in zip(generate(engine, requests), base, strict=True):
            assert completion.tokens == told(one), completion.request_id
        engine.check_integrity()
    check = getattr(drafter, "check_integrity", None) or getattr(drafter.inner, "check_integrity", None)
    if check is not None:
        check()
    assert engine.stats().pages_held == 0
    return engine.stats()


GRID = [
    {"page_tokens": 1, "rows": 17, "prefix_cache": True},
    {"page_tokens": 16, "rows": 1024, "prefix_cache": True},
    {"page_tokens": 4, "rows": 64, "prefix_cache": False, "kv_tokens": 120},
]


@pytest.mark.parametrize("options", GRID, ids=["small", "large", "preempted"])
@pytest.mark.parametrize("kind", [*KINDS, *OTHER_SHAPES])
def test_tokens_are_the_references(kind: str, options: dict[str, Any]) -> None:
    inner = drafter_of(kind) if kind in OTHER_SHAPES else SOUND[kind]()
    windows = inner if isinstance(inner, LookaheadDrafter) else None
    costly = "ngram" not in kind and kind != "lookahead"
    drafter = Timed(inner, random.Random(kind), costly=costly, windows=windows)
    stats = run(kind, drafter, **options)
    assert stats.drafted_tokens > 20
    assert (stats.preemptions > 0) == ("kv_tokens" in options)
    assert (stats.prefix_hit_tokens > 100) == options["prefix_cache"]


@pytest.mark.parametrize("options", GRID, ids=["small", "large", "preempted"])
@pytest.mark.parametrize("kind", OTHER_SHAPES)
def test_other_shapes_as_configured(kind: str, options: dict[str, Any]) -> None:
    inner = drafter_of(kind)
    inner.inner = inner
    assert run(kind, inner, **options).accepted_tokens > 20


@pytest.mark.parametrize(
    "speculation",
    [
        {"kind": "ngram", "branches": 3},
        {"kind": "lookahead"},
        {"kind": "medusa", "heads": "medusa"},
        {"kind": "medusa", "heads": "hydra"},
        {"kind": "eagle", "heads": "eagle"},
        {"kind": "eagle3", "heads": "eagle3"},
    ],
    ids=lambda found: found.get("heads", found["kind"]),
)
def test_a_recipe_makes_every_drafter_adaptive(speculation: dict[str, Any], tmp_path: Path) -> None:
    def opened(adaptive: bool) -> Any:
        recipe = Recipe.model_validate(
            {
                "version": 1, "name": "x", "model": {"source": "x"}, "backend": {"kind": "embedded"},
                "speculation": {**speculation, "adaptive": adaptive},
            }
        )  # fmt: skip
        folder = heads_folder(speculation["heads"]) if "heads" in speculation else None
        return _drafter(recipe, target(), 300, None, folder, None)

    plain, adaptive = opened(False), opened(True)
    assert isinstance(adaptive, AdaptiveDrafter)
    assert type(adaptive.inner) is type(plain)
    assert adaptive.hidden_layers == plain.hidden_layers
