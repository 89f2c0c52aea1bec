"""Quantized weights: every form against a float64 reference made without the package's own code."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from batches import chain_batch
from tiny import make_tiny_model
from tiny_quantized import ALGOS, GROUP, make_quantized_model, quantize_weight, round_to_e4m3
from torch import Tensor

from trtspec.embedded import layers
from trtspec.embedded.kvstore import KvStore
from trtspec.embedded.layers import QuantizedWeight
from trtspec.embedded.weights import load_model
from trtspec.errors import InputError
from trtspec.modelspec import read_modelspec

CPU = torch.device("cpu")
IN, OUT = 128, 96
INPUT_SCALE = {"FP8": 0.015, "W4A8_AWQ": 0.015, "W8A8_SQ_PER_CHANNEL": 0.03}
ROWS = (1, 3, 17, 80)  # 80 rows are beyond every switch from packed kernels to decoding


def logits_of(folder: Path, dtype: torch.dtype = torch.float64, kv_format: str = "none") -> Tensor:
    spec = read_modelspec(folder)
    model = load_model(folder, spec, dtype=dtype, device=CPU)
    store = KvStore(spec, 64, dtype=dtype, kv_format=kv_format, scales=model.kv_scales)
    return model.forward(chain_batch(list(range(20, 60))), store)[0]


# ------------------------------------------------------------------ one linear


def example(algo: str, *, smooth: bool) -> tuple[QuantizedWeight, Tensor]:
    """(the stored weight, its value in float64)."""
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(OUT, IN, generator=generator) * torch.rand(OUT, 1, generator=generator)
    tensors, value = quantize_weight(weight, algo)
    scale = tensors["weight_scale"].double()
    scale = scale.reshape(OUT, -1) if scale.numel() > 1 else scale.reshape(1, 1).expand(OUT, 1)
    stored = QuantizedWeight(
        algo=algo,
        codes=tensors["weight"],
        scale=scale,
        scale_2=float(tensors["weight_scale_2"]) if "weight_scale_2" in tensors else None,
        input_scale=INPUT_SCALE.get(algo),
        # Powers of two: multiplying by them rounds nothing, so the input codes are the reference's.
        pre_quant_scale=(
            2.0 ** torch.randint(-1, 2, (IN,), generator=generator).double() if smooth else None
        ),
    )
    return stored, value


def reference(stored: QuantizedWeight, value: Tensor, x: Tensor) -> Tensor:
    """The format's own arithmetic in float64: smooth, round the input, multiply."""
    x = x.double() if stored.pre_quant_scale is None else x.double() * stored.pre_quant_scale
    if stored.algo == "FP8_PER_CHANNEL_PER_TOKEN":
        scale = x.abs().amax(1, keepdim=True) / 448
        x = round_to_e4m3(x / scale) * scale
    elif stored.algo == "W8A8_SQ_PER_CHANNEL":
        x = (x / stored.input_scale).round().clamp(-128, 127) * stored.input_scale
    elif stored.input_scale is not None:
        x = round_to_e4m3(x / stored.input_scale) * stored.input_scale
    return x @ value.t()


def error_of(form: Callable[[Tensor], Tensor], stored: QuantizedWeight, value: Tensor, rows: int) -> float:
    x = torch.randn(rows, IN, generator=torch.Generator().manual_seed(rows)).to(torch.bfloat16)
    wanted = reference(stored, value, x)
    return float((form(x).double() - wanted).norm() / wanted.norm())


# bfloat16 results carry 2^-9 of rounding each; scales in bfloat16 (4-bit) as much again.
BF16_ERROR = 4e-3


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("algo", ALGOS)
def test_bfloat16_forms_compute_the_stored_weight(algo: str, smooth: bool, rows: int) -> None:
    stored, value = example(algo, smooth=smooth)
    form = layers.quantized(stored, None, torch.bfloat16, CPU)
    assert not isinstance(form, layers.DequantizedLinear)
    assert error_of(form, stored, value, rows) < BF16_ERROR


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("algo", ["W4A16_AWQ", "W8A16"])
def test_a_dequantized_copy_is_the_same_weight(algo: str, rows: int) -> None:
    stored, value = example(algo, smooth=True)
    form = layers.quantized(stored, None, torch.bfloat16, CPU, dequantized_copy=True)
    plain = layers.quantized(stored, None, torch.bfloat16, CPU)
    assert error_of(form, stored, value, rows) < BF16_ERROR
    x = torch.randn(rows, IN, generator=torch.Generator().manual_seed(rows)).to(torch.bfloat16)
    if rows == 1:
        assert torch.equal(form(x), plain(x)), "few rows run from the codes in both"
    if rows > layers.INT4_FEW_ROWS:  # one product of the same numbers, in another order
        torch.testing.assert_close(form(x), plain(x), rtol=2**-7, atol=2**-6)
    assert form.few_rows < plain.few_rows
    # The other form's codes and copy are not kept.
    assert getattr(form, "_blocks", []) == []
    assert plain._copy is None


def test_the_copy_answers_for_many_rows_only() -> None:
    """A copy that holds another weight shows from the switch on, and not before."""
    stored, value = example("W4A16_AWQ", smooth=False)
    form = layers.quantized(stored, None, torch.bfloat16, CPU, dequantized_copy=True)
    form._copy = layers.dense(value.to(torch.bfloat16).flip(0).contiguous())
    assert error_of(form, stored, value, layers.INT4_FEW_ROWS_BESIDE_COPY) < BF16_ERROR
    assert error_of(form, stored, value, layers.INT4_FEW_ROWS_BESIDE_COPY + 1) > 10 * BF16_ERROR


@pytest.mark.parametrize("outputs", [48, 4176])
def test_nibbles_decode_to_the_very_weights(outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """4176 outputs are blocks of several sizes."""
    generator = torch.Generator().manual_seed(outputs)
    weight, scale = (
        torch.randint(-8, 8, (outputs, IN), generator=generator),
        torch.rand(outputs, IN // GROUP, generator=generator),
    )
    packed = ((weight[0::2] & 15) | (weight[1::2] & 15) << 4).to(torch.uint8)
    stored = QuantizedWeight("W4A16_AWQ", packed, scale.double())
    wanted = weight.to(torch.bfloat16) * scale.to(torch.bfloat16).repeat_interleave(GROUP, 1)
    monkeypatch.setattr(layers, "DECODED_BYTES", 2**18)
    form = layers.Int4Linear(stored, None)
    assert (len(form._blocks) > 1) == (outputs > 1000)
    form.few_rows = 0
    identity = torch.eye(IN, dtype=torch.bfloat16)
    assert torch.equal(form(identity).t(), wanted)
    swapped = layers.Int4Linear(replace(stored, codes=(packed << 4) | (packed >> 4)), None)
    swapped.few_rows = 0
    assert not torch.equal(swapped(identity).t(), wanted)


def test_weights_packed_in_parts_are_packed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = torch.randint(0, 256, (168, IN), dtype=torch.uint8)  # 336 outputs: five parts and a rest
    stored = QuantizedWeight("W4A16_AWQ", codes, torch.ones(336, IN // GROUP).double())
    whole = layers.Int4Linear(stored, None)._packed
    monkeypatch.setattr(layers, "PACKED_OUTPUTS", 64)
    assert torch.equal(layers.Int4Linear(stored, None)._packed, whole)
    monkeypatch.setattr(layers, "PACKED_OUTPUTS", 48)
    assert not torch.equal(layers.Int4Linear(stored, None)._packed, whole), "parts that cut a run must fail"


@pytest.mark.parametrize("rows", [1, 7, layers.DOUBLED_ROWS, layers.DOUBLED_ROWS + 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_norms_of_few_rows_are_the_norm(dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    # A mean far from 0, which a layer norm of the plain row would take away.
    x = (torch.randn(rows, 3, 96, generator=generator) + 2).to(dtype)
    weight = torch.randn(96, generator=generator).to(dtype)
    wide = x.double()
    wanted = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()
    error = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-6, torch.float64: 1e-12}[dtype]
    normed = layers.RmsNorm(weight, 1e-5)(x)
    assert (normed.dtype, normed.is_contiguous()) == (dtype, True)
    torch.testing.assert_close(normed.double(), wanted, rtol=error, atol=error / 10)
    centred = torch.layer_norm(x, (96,), weight, None, 1e-5).double()
    assert float((centred - wanted).abs().max()) > 0.1, "a layer norm of the row itself must fail"


@pytest.mark.parametrize("algo", ALGOS)
def test_dequantized_forms_are_exact_in_float64(algo: str) -> None:
    stored, value = example(algo, smooth=True)
    assert torch.equal(layers.dequantize(stored), value)
    form = layers.quantized(stored, None, torch.float64, CPU)
    # The reference and the form may round an input to different codes only at exact ties.
    x = torch.randn(9, IN, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    torch.testing.assert_close(form(x), reference(stored, value, x), rtol=0, atol=1e-12)


def swapped_nibbles(stored: QuantizedWeight) -> QuantizedWeight:
    codes = stored.codes
    return replace(stored, codes=(codes << 4) | (codes >> 4))


def reversed_groups(stored: QuantizedWeight) -> QuantizedWeight:
    return replace(stored, scale=stored.scale.flip(1))


def unsmoothed(stored: QuantizedWeight) -> QuantizedWeight:
    return replace(stored, pre_quant_scale=None)


def saturating_input(stored: QuantizedWeight) -> QuantizedWeight:
    assert stored.input_scale is not None
    return replace(stored, input_scale=stored.input_scale / 16)


def shifted_rows(stored: QuantizedWeight) -> QuantizedWeight:
    return replace(stored, scale=stored.scale.roll(1, 0))


@pytest.mark.parametrize(
    ("algo", "broken"),
    [
        ("W4A16_AWQ", swapped_nibbles),
        ("W4A8_AWQ", swapped_nibbles),
        ("W4A16_AWQ", reversed_groups),
        ("W4A8_AWQ", reversed_groups),
        ("W4A16_AWQ", unsmoothed),
        ("W4A8_AWQ", unsmoothed),
        ("W8A8_SQ_PER_CHANNEL", unsmoothed),
        ("W8A8_SQ_PER_CHANNEL", saturating_input),
        ("FP8", saturating_input),
        ("W8A16", shifted_rows),
        ("FP8_PER_CHANNEL_PER_TOKEN", shifted_rows),
    ],
)
@pytest.mark.parametrize("rows", [1, 80])
def test_the_check_catches_a_misread_weight(
    algo: str, broken: Callable[[QuantizedWeight], QuantizedWeight], rows: int
) -> None:
    stored, value = example(algo, smooth=True)
    form = layers.quantized(broken(stored), None, torch.bfloat16, CPU)
    assert error_of(form, stored, value, rows) > 2 * BF16_ERROR


@pytest.mark.parametrize("rows", ROWS)
def test_int8_sums_are_exact_integers(rows: int) -> None:
    """Extreme codes: saturating 16-bit intermediate sums, as some int8 instructions have, would show."""
    codes = torch.full((OUT, 512), 127, dtype=torch.int8)
    codes[1::2] = -128
    stored = QuantizedWeight("W8A8_SQ_PER_CHANNEL", codes, torch.ones(OUT, 1).double(), input_scale=1.0)
    form = layers.Int8Linear(stored, None)
    x = torch.full((rows, 512), 127.0, dtype=torch.float32)
    x[:, ::3] = -128.0
    assert torch.equal(form(x).double(), x.double() @ codes.double().t())


def test_joined_weights_equal_the_parts_side_by_side() -> None:
    for algo in ALGOS:
        stored, value = example(algo, smooth=True)
        joined = layers.join([stored, stored])
        assert joined is not None
        assert torch.equal(layers.dequantize(joined), torch.cat([value, value]))
        assert stored.pre_quant_scale is not None
        other = replace(stored, pre_quant_scale=stored.pre_quant_scale * 2)
        assert layers.join([stored, other]) is None, "different inputs must not be joined"


@pytest.mark.parametrize("algo", ALGOS)
def test_bias_is_added_in_every_form(algo: str) -> None:
    stored, _ = example(algo, smooth=False)
    bias = torch.linspace(-2, 2, OUT)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        with_bias = layers.quantized(stored, bias.to(dtype), dtype, CPU)
        without = layers.quantized(stored, None, dtype, CPU)
        for rows in (2, 80):
            x = torch.randn(rows, IN, generator=torch.Generator().manual_seed(1)).to(dtype)
            plain = without(x).double()
            rounding = 2**-7 if dtype == torch.bfloat16 else 1e-6
            torch.testing.assert_close(
                with_bias(x).double(),
                plain + bias.to(dtype).double(),
                rtol=0,
                atol=rounding * float(plain.abs().max()),
            )


# ------------------------------------------------------------------ whole checkpoints


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("algo", ["W4A16_AWQ", "W8A16"])
def test_weight_only_exports_equal_their_plain_twin(tmp_path: Path, algo: str, family: str) -> None:
    export, plain = make_quantized_model(tmp_path, algo, family=family)
    torch.testing.assert_close(logits_of(export), logits_of(plain), rtol=0, atol=1e-9)


@pytest.mark.parametrize("algo", ALGOS)
def test_bfloat16_execution_stays_near_the_reference_form(tmp_path: Path, algo: str) -> None:
    export, _ = make_quantized_model(tmp_path, algo)
    exact = logits_of(export)
    fast = logits_of(export, torch.bfloat16).double()
    # Random tiny models amplify rounding; a misread weight gives errors near 1.4 (unrelated logits).
    assert float((fast - exact).norm() / exact.norm()) < 0.12


def test_smoothing_that_differs_between_q_k_v_is_applied_to_each(tmp_path: Path) -> None:
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    export, plain = make_quantized_model(tmp_path, "W4A16_AWQ", pre_quant=names)
    torch.testing.assert_close(logits_of(export), logits_of(plain), rtol=0, atol=1e-9)


def test_excluded_modules_stay_plain(tmp_path: Path) -> None:
    exclude = ("lm_head", "model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj")
    export, plain = make_quantized_model(tmp_path, "W4A16_AWQ", exclude=exclude)
    torch.testing.assert_close(logits_of(export), logits_of(plain), rtol=0, atol=1e-9)


def test_group_size_is_inferred_where_the_export_omits_it(tmp_path: Path) -> None:
    export, plain = make_quantized_model(tmp_path, "W4A16_AWQ", write_group_size=False)
    quant = read_modelspec(export).quant
    assert quant is not None
    assert quant.group_size == GROUP
    torch.testing.assert_close(logits_of(export), logits_of(plain), rtol=0, atol=1e-9)


def test_kv_scales_are_read_and_used(tmp_path: Path) -> None:
    export, _ = make_quantized_model(tmp_path, "W8A16", kv_algo="FP8")
    spec = read_modelspec(export)
    model = load_model(export, spec, dtype=torch.float64, device=CPU)
    assert model.kv_scales is not None
    wanted = ((0.03, 0.02), (0.04, 0.03))
    for pair, expected in zip(model.kv_scales, wanted, strict=True):
        assert pair == pytest.approx(expected, rel=1e-6)
    exact = logits_of(export)
    good = float((logits_of(export, kv_format="fp8") - exact).norm() / exact.norm())
    lost = KvStore(spec, 64, dtype=torch.float64, kv_format="fp8", scales=[(1e-4, 1e-4)] * 2)
    bad_logits = model.forward(chain_batch(list(range(20, 60))), lost)[0]
    assert good < 0.15
    assert float((bad_logits - exact).norm() / exact.norm()) > 3 * good


# ------------------------------------------------------------------ refusals


def refusal(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        load_model(folder, read_modelspec(folder), dtype=torch.float32, device=CPU)
    return str(caught.value)


def test_all_damage_is_reported_at_once(tmp_path: Path) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.input_layernorm.weight"][3] = math.nan
        tensors["model.embed_tokens.weight"][5, 5] = math.inf
        tensors["model.layers.1.mlp.up_proj.weight_scale"][0] = -1.0
        tensors["model.layers.1.mlp.down_proj.weight_scale"][0] = math.nan

    export, _ = make_quantized_model(tmp_path, "W8A16", edit=damage)
    message = refusal(export)
    for name in ("layers.0.input_layernorm.weight", "embed_tokens.weight", "up_proj.weight_scale"):
        assert name in message
    assert "down_proj.weight_scale" in message
    assert "NaN" in message


@pytest.mark.parametrize("algo", ["FP8", "W4A16_AWQ", "W8A8_SQ_PER_CHANNEL"])
def test_missing_scales_are_refused(tmp_path: Path, algo: str) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.0.mlp.up_proj.weight_scale"]

    export, _ = make_quantized_model(tmp_path, algo, edit=drop)
    assert "model.layers.0.mlp.up_proj.weight_scale: missing" in refusal(export)


@pytest.mark.parametrize("kind", ["weight_scale", "input_scale"])
def test_placeholder_scales_are_refused(tmp_path: Path, kind: str) -> None:
    def forget(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if name.endswith("." + kind):
                tensors[name] = torch.ones_like(tensors[name])

    export, _ = make_quantized_model(tmp_path, "FP8", edit=forget)
    assert f"every {kind} is exactly 1.0" in refusal(export)


def test_fp8_nan_codes_are_refused(tmp_path: Path) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"].view(torch.uint8)[2, 2] = 0xFF

    export, _ = make_quantized_model(tmp_path, "FP8", edit=damage)
    assert "model.layers.0.mlp.up_proj.weight: holds NaN" in refusal(export)


def test_codes_of_another_format_are_refused(tmp_path: Path) -> None:
    def mistype(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].float()

    export, _ = make_quantized_model(tmp_path, "W8A16", edit=mistype)
    assert "stored as F32; I8 is needed" in refusal(export)


def test_half_of_the_kv_scales_is_refused(tmp_path: Path) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.1.self_attn.v_proj.v_scale"]

    export, _ = make_quantized_model(tmp_path, "W8A16", kv_algo="FP8", edit=drop)
    assert "model.layers.1.self_attn.v_proj.v_scale: missing" in refusal(export)


def test_weights_do_not_depend_on_the_file_after_loading(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, dtype="float64", tokenizer=False)
    spec = read_modelspec(folder)
    model = load_model(folder, spec, dtype=torch.float64, device=CPU)
    batch = chain_batch(list(range(10, 20)))
    before = model.forward(batch, KvStore(spec, 16, dtype=torch.float64))[0]
    path = folder / "model.safetensors"
    path.write_bytes(bytes(path.stat().st_size))  # same file, same size, zeros
    after = model.forward(batch, KvStore(spec, 16, dtype=torch.float64))[0]
    assert torch.equal(before, after)
