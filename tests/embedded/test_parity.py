"""The decoder against transformers in float64; the laws that paging, chunks, batches and trees must keep."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import Rows, batch_of, chain_batch
from tiny import Family, make_tiny_model
from torch import Tensor

from trtspec.embedded.kvstore import KvStore
from trtspec.embedded.model import Decoder
from trtspec.embedded.weights import load_model
from trtspec.model_source import cache_folder
from trtspec.modelspec import ModelSpec, read_modelspec

FAMILIES: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3")
CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
ROPES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "linear": {"rope_type": "linear", "factor": 2.0},
    "legacy_key": {"type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn_mscale": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.5, "beta_fast": 16, "truncate": False},
    "yarn_attention_factor": {**YARN, "attention_factor": 1.2},
}
TOKENS = torch.randint(0, 320, (90,), generator=torch.Generator().manual_seed(0)).tolist()


def load(folder: Path, dtype: torch.dtype = torch.float64, **spec_changes: Any) -> Decoder:
    spec = dataclasses.replace(read_modelspec(folder), **spec_changes)
    return load_model(folder, spec, dtype=dtype, device=CPU)


def new_store(model: Decoder, slots: int = 128, **options: Any) -> KvStore:
    return KvStore(model.spec, slots, dtype=model.dtype, **options)


def whole(model: Decoder, tokens: list[int]) -> Tensor:
    return model.forward(chain_batch(tokens), new_store(model))[0]


# ------------------------------------------------------------------ transformers


def transformers_states(folder: Path, tokens: list[int]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(logits, hidden states) in float64 throughout: transformers' RMSNorm and eager softmax drop to float32,
    so the norm is replaced by its formula and SDPA is used."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):

            def forward(x: Tensor, norm: Any = module) -> Tensor:
                return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon) * norm.weight

            module.forward = forward
    with torch.no_grad():
        out = model(torch.tensor([tokens]), output_hidden_states=True)
    return out.logits[0], tuple(state[0] for state in out.hidden_states)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_hidden_states_equal_transformers(tmp_path: Path, family: Family, rope: str) -> None:
    window = {"sliding_window": 21} if family == "mistral" and rope != "plain" else {}
    folder = make_tiny_model(
        tmp_path,
        family,
        tie=rope in ("plain", "yarn"),
        hidden=96,
        heads=6,
        kv_heads=2,
        head_dim=32 if family == "qwen3" else None,
        rope_scaling=ROPES[rope],
        rope_parameters_key=rope == "llama3",
        shards=2 if rope == "linear" else 1,
        config_overrides=window,
        tokenizer=False,
    )
    wanted, states = transformers_states(folder, TOKENS)
    model = load(folder)
    logits, hidden = model.forward(chain_batch(TOKENS), new_store(model), hidden_layers=(0, 1, 2))
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-9)
    for i, state in enumerate(states):
        torch.testing.assert_close(hidden[i], state, rtol=0, atol=1e-9)
    if rope != "plain":
        unscaled = whole(load(folder, rope_scaling=None), TOKENS)
        assert float((unscaled - wanted).abs().max()) > 1e-2, "a lost scaling must show"


@pytest.mark.parametrize(
    "change",
    [{"rope_theta": 20000.0}, {"rms_norm_eps": 1e-2}, {"sliding_window": 22}, {"sliding_window": None}],
    ids=str,
)
def test_parity_catches_a_misread_config(tmp_path: Path, change: dict[str, Any]) -> None:
    overrides = {"sliding_window": 21}
    folder = make_tiny_model(tmp_path, "mistral", config_overrides=overrides, tokenizer=False)
    wanted, _ = transformers_states(folder, TOKENS)
    assert float((whole(load(folder), TOKENS) - wanted).abs().max()) < 1e-9
    assert float((whole(load(folder, **change), TOKENS) - wanted).abs().max()) > 1e-4


# ------------------------------------------------------------------ laws of the paged forward


@pytest.fixture(scope="module", params=[*FAMILIES, "mistral_window"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    family, _, window = request.param.partition("_")
    overrides = {"sliding_window": 21} if window else {}
    folder = tmp_path_factory.mktemp("model")
    return load(make_tiny_model(folder, family, config_overrides=overrides, tokenizer=False))


def scattered(count: int, seed: int) -> Tensor:
    return torch.randperm(128, generator=torch.Generator().manual_seed(seed))[:count]


@pytest.mark.parametrize("chunks", [(1,) * 90, (40, 50), (17, 1, 16, 3, 53), (89, 1)], ids=str)
def test_chunks_at_any_slots_equal_one_prefill(model: Decoder, chunks: tuple[int, ...]) -> None:
    store, slots, out, start = new_store(model), scattered(90, 1), [], 0
    for count in chunks:
        rows = Rows(TOKENS[start : start + count], start, slots)
        out.append(model.forward(batch_of(rows), store)[0])
        start += count
    torch.testing.assert_close(torch.cat(out), whole(model, TOKENS), rtol=0, atol=1e-11)


def test_context_order_matters_to_the_check(model: Decoder) -> None:
    store, slots = new_store(model), scattered(90, 1)
    model.forward(batch_of(Rows(TOKENS[:60], 0, slots)), store)
    wrong = slots.clone()
    wrong[:60] = slots[20]  # one token's KV everywhere
    got = model.forward(batch_of(Rows(TOKENS[60:], 60, wrong)), store)[0]
    assert float((got - whole(model, TOKENS)[60:]).abs().max()) > 1e-3


def test_a_batch_of_all_kinds_of_rows_equals_each_alone(model: Decoder) -> None:
    """Long chunks with and without context, decodes and short chunks at short and long contexts."""
    pool = torch.randperm(600, generator=torch.Generator().manual_seed(2))
    shapes = [(0, 30), (40, 1), (5, 4), (0, 1), (33, 25), (61, 16), (12, 1), (80, 5)]
    store = new_store(model, 600)
    parts, wanted = [], []
    for i, (context, count) in enumerate(shapes):
        tokens = TOKENS[i : i + context + count] if i + context + count <= 90 else TOKENS[: context + count]
        slots, pool = pool[: context + count], pool[context + count :]
        if context:
            model.forward(batch_of(Rows(tokens[:context], 0, slots)), store)
        parts.append(Rows(tokens[context:], context, slots))
        wanted.append(whole(model, tokens)[context:])
    got = model.forward(batch_of(*parts), store)[0]
    torch.testing.assert_close(got, torch.cat(wanted), rtol=0, atol=1e-11)


def test_only_the_wanted_logits_come_back(model: Decoder) -> None:
    batch = dataclasses.replace(chain_batch(TOKENS), logit_rows=torch.tensor([3, 40, 89]))
    logits, hidden = model.forward(batch, new_store(model))
    assert hidden == {}
    torch.testing.assert_close(logits, whole(model, TOKENS)[[3, 40, 89]], rtol=0, atol=1e-12)


PARENTS = (-1, -1, 0, 0, 1, 2, 5)  # of draft nodes; row 0 is the current token, row i + 1 node i


def tree_rows(tokens: list[int], start: int, slots: Tensor, *, broken: bool = False) -> Rows:
    count = len(PARENTS) + 1
    mask = torch.eye(count, dtype=torch.bool)
    depth = [0]
    for node, parent in enumerate(PARENTS):
        mask[node + 1] |= mask[parent + 1]
        depth.append(depth[parent + 1] + 1)
    return Rows(tokens, start, slots, None if broken else mask, [start + d for d in depth])


@pytest.mark.parametrize("start", [0, 7, 70])
@pytest.mark.parametrize("neighbour", [False, True])
def test_tree_rows_equal_a_chain_for_each_branch(model: Decoder, start: int, neighbour: bool) -> None:
    drafted = TOKENS[80:88]
    prefix = TOKENS[:start]
    store, slots = new_store(model, 256), scattered(start + 8, 3)
    if start:
        model.forward(batch_of(Rows(prefix, 0, slots)), store)
    others = [Rows(TOKENS[50:52], 0, torch.tensor([200, 201]))] if neighbour else []
    got = model.forward(batch_of(*others, tree_rows(drafted, start, slots)), store)[0][-8:]
    wanted = []
    for row in range(8):
        path, node = [], row
        while node > 0:
            path.append(drafted[node])
            node = PARENTS[node - 1] + 1
        wanted.append(whole(model, [*prefix, drafted[0], *reversed(path)])[-1])
    torch.testing.assert_close(got, torch.stack(wanted), rtol=0, atol=1e-11)
    wrong = model.forward(batch_of(tree_rows(drafted, start, slots, broken=True)), store)[0]
    assert float((wrong - got).abs().max()) > 1e-3, "a lost tree mask must show"


def test_a_neighbours_nan_does_not_spread(model: Decoder) -> None:
    """Padding must not read slots of others: 0 * NaN is NaN."""
    store = new_store(model, 256)
    poison = torch.full((100, model.spec.num_kv_heads, model.spec.head_dim), torch.nan, dtype=torch.float64)
    for layer in range(model.spec.num_layers):
        store.write(layer, torch.arange(100), poison, poison)
    short, long = torch.arange(100, 110), torch.arange(110, 180)
    model.forward(batch_of(Rows(TOKENS[:9], 0, short)), store)
    model.forward(batch_of(Rows(TOKENS[:69], 0, long)), store)
    fresh = torch.arange(200, 203)
    parts = (Rows(TOKENS[9:10], 9, short), Rows(TOKENS[69:70], 69, long), Rows(TOKENS[:3], 0, fresh))
    got = model.forward(batch_of(*parts), store)[0]
    torch.testing.assert_close(got[0], whole(model, TOKENS[:10])[-1], rtol=0, atol=1e-11)
    torch.testing.assert_close(got[1], whole(model, TOKENS[:70])[-1], rtol=0, atol=1e-11)
    sick = model.forward(batch_of(Rows(TOKENS[9:11], 5, torch.arange(7))), store)[0]
    assert sick.isnan().all(), "the poison is real"


@pytest.mark.parametrize("kv_format", ["fp8", "int8"])
def test_quantized_kv_is_the_same_law_for_chunks_and_whole(model: Decoder, kv_format: str) -> None:
    scales = [(0.03, 0.03)] * model.spec.num_layers
    one, many = (new_store(model, kv_format=kv_format, scales=scales) for _ in range(2))
    wanted = model.forward(chain_batch(TOKENS), one)[0]
    slots, out = torch.arange(90), []
    for start, count in ((0, 30), (30, 1), (31, 5), (36, 54)):
        out.append(model.forward(batch_of(Rows(TOKENS[start : start + count], start, slots)), many)[0])
    torch.testing.assert_close(torch.cat(out), wanted, rtol=0, atol=1e-10)
    exact = whole(model, TOKENS)
    assert 1e-4 < float((wanted - exact).norm() / exact.norm()) < 0.5


def test_long_contexts_beyond_one_kernel_block(model: Decoder) -> None:
    """Fully masked blocks of keys come first for windowed rows and last for short neighbours."""
    generator = torch.Generator().manual_seed(4)
    long = torch.randint(0, 320, (400,), generator=generator).tolist() * 2
    spec: ModelSpec = dataclasses.replace(model.spec, max_positions=1024)
    big = Decoder(
        spec,
        embedding=model.embedding,
        layers=model.layers,
        final_norm=model.final_norm,
        lm_head=model.lm_head,
    )
    store = new_store(big, 1024)
    wanted = big.forward(chain_batch(long), store)[0]
    small = torch.arange(900, 903)
    big.forward(batch_of(Rows(TOKENS[:2], 0, small)), store)
    rows = (Rows(long[799:], 799, torch.arange(800)), Rows(TOKENS[2:3], 2, small))
    got = big.forward(batch_of(*rows), store)[0]
    torch.testing.assert_close(got[0], wanted[799], rtol=0, atol=1e-10)
    torch.testing.assert_close(got[1], whole(model, TOKENS[:3])[-1], rtol=0, atol=1e-10)
    chunk = big.forward(batch_of(Rows(long[700:], 700, torch.arange(800))), store)[0]
    torch.testing.assert_close(chunk, wanted[700:], rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_lower_precisions_are_near_float64(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = make_tiny_model(tmp_path, "qwen3", dtype="bfloat16", tokenizer=False)
    exact = whole(load(folder), TOKENS)
    model = load(folder, dtype)
    logits = whole(model, TOKENS)
    assert logits.dtype == torch.float32
    bound = {torch.float16: 1e-2, torch.bfloat16: 8e-2, torch.float32: 1e-5}[dtype]
    assert float((logits.double() - exact).norm() / exact.norm()) < bound


# ------------------------------------------------------------------ the sample model


@pytest.mark.model
def test_the_sample_model_equals_transformers_in_float32() -> None:
    folder = cache_folder() / "models" / "smollm2-135m-instruct"
    if not (folder / "config.json").exists():
        pytest.skip("the sample model is not in the cache; run: trtspec fetch smollm2-135m-instruct")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    text = (
        "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n"
    )
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text * 2).ids
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        wanted = reference(torch.tensor([tokens])).logits[0]
    got = whole(load(folder, torch.float32), tokens)
    assert torch.equal(got.argmax(-1), wanted.argmax(-1))
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-3)
