"""The decision is made on float32 logits, though the product of the head is one of 16 bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import make_tiny_model
from torch import Tensor

from trtspec.embedded.model import SHARP_LOGITS, Decoder, largest
from trtspec.embedded.weights import load_model
from trtspec.modelspec import read_modelspec

ROWS = torch.randn(24, 64, generator=torch.Generator().manual_seed(3)) * 2


@pytest.fixture(scope="module", params=["tied", "untied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, vocab=4000, dtype="bfloat16", tie=request.param == "tied", tokenizer=False)
    return load_model(folder, read_modelspec(folder), dtype=torch.bfloat16, device=torch.device("cpu"))


def exact(model: Decoder, x: Tensor) -> Tensor:
    wide = x.double()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + model.spec.rms_norm_eps)
    assert model.output_rows is not None
    return (normed * model.final_norm.double()) @ model.output_rows.double().t()


def error_of_the_best(logits: Tensor, wanted: Tensor) -> float:
    assert logits.dtype == torch.float32
    best = wanted.topk(4, -1).indices
    return float((logits.double() - wanted).gather(1, best).abs().max())


def test_the_best_logits_are_right_to_float32(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    x = ROWS.bfloat16()
    wanted = exact(model, x)
    assert error_of_the_best(model.logits(x), wanted) < 1e-5
    assert torch.equal(model.logits(x).argmax(-1), wanted.argmax(-1))
    monkeypatch.setattr(model, "output_rows", None)
    assert error_of_the_best(model.logits(x), wanted) > 1e-2, "what the head alone gives must fail"


def test_a_row_does_not_depend_on_the_rows_beside_it(model: Decoder) -> None:
    x = ROWS.bfloat16()
    together = model.logits(x)
    for i in range(len(x)):
        alone = model.logits(x[i : i + 1])[0]
        best = together[i].topk(SHARP_LOGITS // 2).indices
        assert torch.equal(alone[best], together[i, best])


def test_wide_dtypes_are_left_alone(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, tokenizer=False)
    for dtype in (torch.float32, torch.float64):
        model = load_model(folder, read_modelspec(folder), dtype=dtype, device=torch.device("cpu"))
        logits = model.logits(ROWS.to(dtype))
        assert logits.dtype == dtype
        assert model.output_rows is None or dtype != torch.bfloat16
    assert len(model.logits(ROWS[:0].to(dtype))) == 0


def test_no_rows_and_a_small_vocabulary(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, vocab=SHARP_LOGITS - 3, dtype="bfloat16", tokenizer=False)
    model = load_model(folder, read_modelspec(folder), dtype=torch.bfloat16, device=torch.device("cpu"))
    assert model.logits(ROWS[:0].bfloat16()).shape == (0, SHARP_LOGITS - 3)
    x = ROWS.bfloat16()
    assert error_of_the_best(model.logits(x), exact(model, x)) < 1e-5


@pytest.mark.parametrize("size", [49152, 4096, 64 * 2 * SHARP_LOGITS, 64 * 31, 4095, SHARP_LOGITS])
def test_the_largest_are_found_wherever_they_stand(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    values = torch.randn(9, size, generator=generator)
    # All in one stretch, all in one column, at both ends: what a search by maxima could miss.
    values[0, :SHARP_LOGITS] += 9
    values[1, :: max(1, size // 64)] += 9
    values[2, -SHARP_LOGITS:] += 9
    assert torch.equal(largest(values, SHARP_LOGITS), values.topk(SHARP_LOGITS, -1).indices)


def test_a_search_by_the_maxima_alone_would_miss_some() -> None:
    values = torch.randn(1, 49152, generator=torch.Generator().manual_seed(0))
    values[0, ::768] += 9
    one_a_column = values.view(1, 64, 768).max(1)
    found = one_a_column.values.topk(SHARP_LOGITS).values.sort().values
    assert not torch.equal(found, values.topk(SHARP_LOGITS).values.sort().values)
