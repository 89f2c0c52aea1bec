"""Chunks that attend block by block, held to the definition in float64."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from tiny import make_tiny_model
from torch import Tensor

from trtspec.embedded import attention
from trtspec.embedded.attention import BLOCK_ROWS, BLOCKED_FROM, attend, plan_attention
from trtspec.embedded.batch import SequenceRows, StepBatch
from trtspec.embedded.kvstore import KvFormat, KvStore
from trtspec.modelspec import ModelSpec, read_modelspec

# (context, rows): a whole prompt, a chunk behind a context, a decode row, few rows, one block and a row more.
SEQUENCES = ((0, 150), (203, BLOCKED_FROM), (77, 1), (30, 20), (5, BLOCK_ROWS + 1))
SLOTS = sum(context + rows for context, rows in SEQUENCES)


@pytest.fixture(scope="module", params=[1, 2, 6])
def spec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    folder: Path = make_tiny_model(tmp_path_factory.mktemp("attention"), tokenizer=False)
    changes = {"num_layers": 1, "num_heads": 6, "num_kv_heads": request.param, "head_dim": 16}
    return dataclasses.replace(read_modelspec(folder), **changes)


def deviation(spec: ModelSpec, kv_format: KvFormat = "none", scattered: bool = True) -> float:
    """The greatest difference of an attended bfloat16 row from the same in float64."""
    generator = torch.Generator().manual_seed(0)
    free = torch.randperm(SLOTS, generator=generator) if scattered else torch.arange(SLOTS)
    store = KvStore(spec, SLOTS, dtype=torch.bfloat16, kv_format=kv_format, scales=[(0.02, 0.03)])
    kv = torch.randn(SLOTS, 2 * spec.num_kv_heads, spec.head_dim, generator=generator).bfloat16()
    store.write_both(0, torch.arange(SLOTS), kv)
    sequences, slots, positions = [], [], []
    first = taken = 0
    for context, rows in SEQUENCES:
        own = free[taken : taken + context + rows]
        sequences.append(SequenceRows(first, rows, context=own[:context]))
        slots.append(own[context:])
        positions.append(torch.arange(context, context + rows))
        first, taken = first + rows, taken + context + rows
    batch = StepBatch(
        torch.zeros(first, dtype=torch.int64),
        torch.cat(positions),
        torch.cat(slots),
        tuple(sequences),
        torch.arange(first),
    )
    q = 2 * torch.randn(first, spec.num_heads, spec.head_dim, generator=generator).bfloat16()
    got = attend(q, 0, store, plan_attention(batch, spec, torch.bfloat16, torch.float32))
    assert got.dtype == torch.bfloat16
    wanted = torch.cat(
        [defined(q[s.first : s.first + s.count], s, batch.slots, store, spec) for s in sequences]
    )
    return float((got.double() - wanted).abs().max())


def defined(q: Tensor, sequence: SequenceRows, slots: Tensor, store: KvStore, spec: ModelSpec) -> Tensor:
    own = torch.cat((sequence.context, slots[sequence.first : sequence.first + sequence.count]))
    k_factor, v_factor = store.read_factors[0]
    k, v = store.read_unscaled(0, own, torch.float64)
    queries = spec.num_heads // spec.num_kv_heads
    k = (k * k_factor).repeat_interleave(queries, 1)
    v = (v * v_factor).repeat_interleave(queries, 1)
    scores = torch.einsum("rhd,khd->hrk", q.double(), k) / math.sqrt(spec.head_dim)
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu_(1 + len(sequence.context))
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("hrk,khd->rhd", weights, v).flatten(1)


@pytest.mark.parametrize("kv_format", ["none", "fp8", "int8"])
@pytest.mark.parametrize("scattered", [True, False])
def test_every_kind_of_rows_attends_by_the_definition(
    spec: ModelSpec, kv_format: KvFormat, scattered: bool
) -> None:
    # Weights of torch's kernel for few rows, and outputs, are rounded to bfloat16.
    assert deviation(spec, kv_format, scattered) < 0.04


def test_blocks_of_any_size_are_the_same_law(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    for rows, scores in ((32, 2**18), (50, 2**18), (1000, 2**30), (1000, 1)):
        monkeypatch.setattr(attention, "BLOCK_ROWS", rows)
        monkeypatch.setattr(attention, "BLOCK_SCORES", scores)
        assert deviation(spec) < 0.04


def test_the_check_catches_a_row_that_sees_the_next(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = attention._causal_blocks

    def one_too_far(q: Tensor, k: Tensor, v: Tensor, *factors: float) -> Tensor:
        # The last row's query answers for the row before it.
        shifted = torch.cat((q[:-2], q[-2:-1], q[-2:-1]))
        out = blocks(shifted, k, v, *factors)
        return torch.cat((out[:-2], out[-1:], out[-1:]))

    monkeypatch.setattr(attention, "_causal_blocks", one_too_far)
    assert deviation(spec) > 0.1
