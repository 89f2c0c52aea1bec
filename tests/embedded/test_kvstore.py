"""The KV store: exact codes, correct rounding, copies, and no leaks between slots."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import make_tiny_model
from tiny_quantized import round_to_e4m3
from torch import Tensor

from trtspec.embedded.kvstore import KvStore, decode_e4m3, encode_e4m3, kv_bytes_per_slot
from trtspec.errors import InputError
from trtspec.modelspec import ModelSpec, read_modelspec

SCALES = [(0.03, 0.02), (0.05, 0.01)]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    folder: Path = tmp_path_factory.mktemp("kv")
    return read_modelspec(make_tiny_model(folder, tokenizer=False))


def some_kv(spec: ModelSpec, rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, spec.num_kv_heads, spec.head_dim, generator=generator).to(dtype)


ALL_CODES = torch.arange(256, dtype=torch.uint8)
FINITE = (ALL_CODES & 0x7F) != 0x7F


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_e4m3_code_decodes_exactly(dtype: torch.dtype) -> None:
    wanted = ALL_CODES.view(torch.float8_e4m3fn).double()[FINITE]
    decoded = decode_e4m3(ALL_CODES.view(torch.int8), dtype)[FINITE].double() * 256
    assert torch.equal(decoded, wanted)
    assert torch.equal(decoded.signbit(), wanted.signbit()), "minus zero keeps its sign"


def test_the_exactness_check_catches_a_forgotten_sign_fix() -> None:
    """Without clearing the copied sign bit, negative values are wrong."""
    wanted = ALL_CODES.view(torch.float8_e4m3fn).double()[FINITE]
    bits = (ALL_CODES.view(torch.int8).to(torch.int16) << 7).view(torch.float16)
    assert not torch.equal(bits.double()[FINITE] * 256, wanted)


def test_e4m3_rounds_to_nearest_even_and_saturates() -> None:
    grid = ALL_CODES[FINITE].view(torch.float8_e4m3fn).double()
    values = torch.cat(
        [grid, (grid[:-1] + grid[1:]) / 2, grid * 1.001, torch.tensor([1e9, -1e9, 449.0, 464.0])]
    )
    encoded = decode_e4m3(encode_e4m3(values.float()), torch.float64) * 256
    assert torch.equal(encoded, round_to_e4m3(values.float()))
    assert float(encoded.abs().max()) == 448.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kv_format", ["none", "fp8", "int8"])
def test_what_is_read_is_what_the_format_keeps(spec: ModelSpec, kv_format: str, dtype: torch.dtype) -> None:
    store = KvStore(spec, 32, dtype=dtype, kv_format=kv_format, scales=SCALES)
    slots = torch.tensor([7, 0, 31, 12])
    for layer in range(2):
        k, v = some_kv(spec, 4, layer, dtype), some_kv(spec, 4, 10 + layer, dtype)
        store.write(layer, slots, k, v)
        for got, value, scale in zip(store.read(layer, slots), (k, v), SCALES[layer], strict=True):
            if kv_format == "none":
                assert torch.equal(got, value)
                continue
            wide = value.double() / scale if dtype == torch.float64 else (value.float() / scale).double()
            codes = round_to_e4m3(wide) if kv_format == "fp8" else wide.round().clamp(-127, 127)
            exact = codes * scale
            rounding = {torch.bfloat16: 2**-8, torch.float32: 2**-22, torch.float64: 1e-15}[dtype]
            torch.testing.assert_close(got.double(), exact, rtol=rounding, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kv_format", ["none", "fp8", "int8"])
def test_side_by_side_is_written_as_apart(spec: ModelSpec, kv_format: str, dtype: torch.dtype) -> None:
    stores = [KvStore(spec, 32, dtype=dtype, kv_format=kv_format, scales=SCALES) for _ in range(2)]
    slots = torch.tensor([3, 30, 11])
    k, v = some_kv(spec, 3, 1, dtype), some_kv(spec, 3, 2, dtype)
    stores[0].write(1, slots, k, v)
    stores[1].write_both(1, slots, torch.cat((k, v), 1))
    assert torch.equal(stores[0]._all, stores[1]._all)
    stores[1].write_both(1, slots, torch.cat((v, k), 1))
    assert not torch.equal(stores[0]._all, stores[1]._all), "keys come first"


@pytest.mark.parametrize("kv_format", ["none", "fp8", "int8"])
def test_a_run_of_slots_reads_as_its_numbers_do(spec: ModelSpec, kv_format: str) -> None:
    store = KvStore(spec, 16, dtype=torch.bfloat16, kv_format=kv_format, scales=SCALES)
    store.write(1, torch.arange(16), *(some_kv(spec, 16, i, torch.bfloat16) for i in range(2)))
    for dtype in (torch.bfloat16, torch.float32):
        run = store.read_unscaled(1, slice(3, 9), dtype)
        picked = store.read_unscaled(1, torch.arange(3, 9), dtype)
        assert all(torch.equal(a, b) and a.dtype == dtype for a, b in zip(run, picked, strict=True))


@pytest.mark.parametrize("kv_format", ["none", "fp8", "int8"])
def test_bytes_are_what_is_allocated(spec: ModelSpec, kv_format: str) -> None:
    store = KvStore(spec, 10, dtype=torch.bfloat16, kv_format=kv_format, scales=SCALES)
    assert store.bytes_per_slot == kv_bytes_per_slot(spec, torch.bfloat16, kv_format)
    assert store.bytes_per_slot * 10 == store._all.numel() * store._all.element_size()


@pytest.mark.parametrize("kv_format", ["none", "fp8", "int8"])
def test_copy_moves_all_layers_and_may_overlap(spec: ModelSpec, kv_format: str) -> None:
    store = KvStore(spec, 16, dtype=torch.float32, kv_format=kv_format, scales=SCALES)
    everything = torch.arange(16)
    for layer in range(2):
        store.write(layer, everything, some_kv(spec, 16, layer), some_kv(spec, 16, 5 + layer))
    before = [store.read(layer, everything) for layer in range(2)]
    store.copy(torch.tensor([0, 1, 2]), torch.tensor([1, 2, 9]))
    source = everything.clone()
    source[[1, 2, 9]] = torch.tensor([0, 1, 2])
    for layer in range(2):
        for old, new in zip(before[layer], store.read(layer, everything), strict=True):
            assert torch.equal(new, old[source])


def test_unwritten_slots_read_as_zeros(spec: ModelSpec) -> None:
    for kv_format in ("none", "fp8", "int8"):
        store = KvStore(spec, 8, dtype=torch.float32, kv_format=kv_format, scales=SCALES)
        for tensor in store.read(1, torch.arange(8)):
            assert not tensor.any()


def test_int8_without_scales_is_refused(spec: ModelSpec) -> None:
    with pytest.raises(InputError, match="k_scale"):
        KvStore(spec, 8, dtype=torch.float32, kv_format="int8", scales=None)
    with pytest.raises(InputError, match="1 pairs"):
        KvStore(spec, 8, dtype=torch.float32, kv_format="fp8", scales=SCALES[:1])
