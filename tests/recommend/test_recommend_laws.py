"""The checker of the laws notices each way a tree could go wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from recommend_cases import broken_laws, chosen

from trtspec.recipe import Eagle3Speculation, MedusaSpeculation, TypicalAcceptance, W4A16AwqQuantization
from trtspec.recommend import Recommendation

GOOD = [
    ("interactive", "8B", "H100-SXM"),
    ("high-throughput", "8B", "L40S"),
    ("zero-tolerance", "8B", "H100-SXM"),
]


@pytest.mark.parametrize("case", GOOD)
def test_good_ones_pass(case: tuple[str, str, str]) -> None:
    assert list(broken_laws(chosen(*case))) == []


def _with(found: Recommendation, **changes: Any) -> Recommendation:
    return replace(found, recipe=found.recipe.model_copy(update=changes))


def _laws(found: Recommendation) -> set[str]:
    return set(broken_laws(found))


def test_a_tree_that_recommends_4_bit_weights_at_batch_64() -> None:
    busy = chosen("high-throughput", "8B", "H100-SXM")
    assert busy.recipe.limits.max_batch_size == 64
    broken = _with(busy, quantization=W4A16AwqQuantization(kind="w4a16_awq"))
    assert "weight-only 4 bit at a batch of 8 or more" in _laws(broken)


def test_a_tree_that_combines_what_loses_attention_kernels() -> None:
    one = chosen("interactive", "8B", "H100-SXM")
    broken = _with(one, quantization=W4A16AwqQuantization(kind="w4a16_awq", kv_cache="fp8"))
    assert {"does not lint clean", "4-bit weights with an 8-bit cache lose paged attention"} <= _laws(broken)


def test_a_tree_that_credits_the_first_token() -> None:
    one = chosen("interactive", "8B", "H100-SXM")
    assert one.estimate is not None
    faster = replace(one.estimate, ttft_ms=one.estimate.ttft_ms / one.estimate.speedup)
    assert "credits the time to the first token to drafting" in _laws(replace(one, estimate=faster))


def test_a_tree_that_invents_a_head() -> None:
    one = chosen("interactive", "8B", "H100-SXM")
    broken = _with(one, speculation=Eagle3Speculation(kind="eagle3", heads="somebody/eagle3"))
    assert "invents a trained head" in _laws(broken)
    assert "invents a trained head" not in set(broken_laws(broken, heads="somebody/eagle3"))


def test_a_tree_that_ignores_the_backend() -> None:
    one = chosen("interactive", "8B", "H100-SXM")
    broken = _with(one, speculation=MedusaSpeculation(kind="medusa", heads="x"))
    assert "a method that the backend lacks" in _laws(broken)


def test_a_tree_that_quantizes_before_the_gate() -> None:
    strict = chosen("zero-tolerance", "8B", "H100-SXM")
    broken = _with(strict, quantization=W4A16AwqQuantization(kind="w4a16_awq"))
    assert "quantizes weights without a passed gate" in _laws(broken)
    cache = strict.recipe.quantization.model_copy(update={"kv_cache": "fp8"})
    assert "quantizes the KV cache without a flag" in _laws(_with(strict, quantization=cache))


def test_a_tree_that_accepts_approximately() -> None:
    strict = chosen("zero-tolerance", "8B", "H100-SXM")
    assert "accepts approximately" in _laws(_with(strict, acceptance=TypicalAcceptance(kind="typical")))


def test_a_tree_that_drafts_above_the_break_even() -> None:
    one = chosen("interactive", "8B", "H100-SXM")
    assert one.estimate is not None
    assert one.plain is not None
    slower = replace(one.estimate, tpot_ms=one.plain.tpot_ms * 1.2)
    assert "drafts above its break-even" in _laws(replace(one, estimate=slower))


def test_a_tree_that_overfills_the_memory() -> None:
    busy = chosen("high-throughput", "8B", "L40S")
    limits = busy.recipe.limits.model_copy(update={"max_batch_size": 4096, "max_num_tokens": 8192})
    assert "does not fit its own batch" in _laws(_with(busy, limits=limits))


def test_a_tree_without_reasons() -> None:
    one = chosen("interactive", "8B", "H100-SXM")
    silent = replace(one, because=(replace(one.because[0], because=""),))
    assert "a step without a reason" in _laws(silent)
