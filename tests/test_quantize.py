"""Quantization with ModelOpt: every format, read back from disk, on tiny random models.

The law of a round trip: each exported code is the nearest to the (AWQ-scaled) source weight, that is,
the dequantized weight is within half a quantization step of it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file
from tiny import make_tiny_model
from torch import Tensor

from trtspec.embedded.kvstore import KvStore
from trtspec.embedded.scoring import score_text
from trtspec.embedded.weights import load_model
from trtspec.engine import Scores
from trtspec.errors import GateFailed, InputError
from trtspec.modelspec import linear_modules, read_modelspec
from trtspec.quantize import Report, checks, quantize, read_report, readback
from trtspec.quantize.finish import portable_config
from trtspec.recipe import Quantization

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp8": ({"family": "llama", "tie": True}, {"kind": "fp8", "kv_cache": "fp8"}),
    "fp8_head": (
        {"family": "llama", "shards": 2},
        {"kind": "fp8", "lm_head": True, "exclude": ["model.layers.0.*", "*.down_proj"]},
    ),
    "w4a16": (
        {"family": "qwen3", "rope_parameters_key": True},
        {"kind": "w4a16_awq", "group_size": 32, "kv_cache": "int8"},
    ),
    "w4a16_part": (
        {"family": "llama"},
        {"kind": "w4a16_awq", "group_size": 64, "kv_cache": "fp8", "exclude": ["*.self_attn.[qkv]_proj"]},
    ),
    "w4a8": (
        {"family": "mistral", "hidden": 128},
        {"kind": "w4a8_awq", "group_size": 128, "kv_cache": "fp8"},
    ),
    "w8a8": ({"family": "qwen2"}, {"kind": "w8a8_sq", "alpha": 0.7}),
    "kv_fp8": ({"family": "llama", "dtype": "float16"}, {"kind": "none", "kv_cache": "fp8"}),
    "kv_int8": (
        {
            "family": "llama",
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
        {"kind": "none", "kv_cache": "int8"},
    ),
}
WEIGHTS = [name for name in CASES if not name.startswith("kv_")]
ALGOS = {
    "fp8": "FP8",
    "w4a16_awq": "W4A16_AWQ",
    "w4a8_awq": "W4A8_AWQ",
    "w8a8_sq": "W8A8_SQ_PER_CHANNEL",
    "none": None,
}


def parse(value: dict[str, Any]) -> Quantization:
    adapter: TypeAdapter[Quantization] = TypeAdapter(Quantization)
    return adapter.validate_json(json.dumps({"calibration": {"num_samples": 3, "max_tokens": 256}} | value))


@dataclass(frozen=True)
class Run:
    source: Path
    out: Path
    quantization: Quantization
    report: Report
    progress: list[tuple[str, int, int]]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Run of a case by name, each done once."""
    done: dict[str, Run] = {}

    def run(name: str) -> Run:
        if name not in done:
            folder = tmp_path_factory.mktemp(name)
            model, value = CASES[name]
            source = make_tiny_model(folder / "source", **{"dtype": "bfloat16", "seed": 3, **model})
            progress: list[tuple[str, int, int]] = []
            report = quantize(
                source, folder / "out", parse(value), progress=lambda *step: progress.append(step)
            )
            done[name] = Run(source, folder / "out", parse(value), report, progress)
        return done[name]

    return run


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest, runs: Callable[[str], Run]) -> Run:
    return runs(request.param)


def quantized_modules(run: Run) -> list[str]:
    return [layer.module for layer in run.report.layers]


# --------------------------------------------------------------------------- the round trip


@pytest.mark.parametrize("name", WEIGHTS)
def test_every_code_is_the_nearest(name: str, runs: Callable[[str], Run]) -> None:
    run = runs(name)
    source, export = load_all(run.source), load_all(run.out)
    assert quantized_modules(run)
    for module in quantized_modules(run):
        assert readback.fraction_misrounded(source, export, module) == 0, module
        broken = dict(export)
        broken[f"{module}.weight_scale"] = export[f"{module}.weight_scale"] * 1.1
        assert readback.fraction_misrounded(source, broken, module) > 0, "the law must notice a wrong scale"
        if export[f"{module}.weight"].dtype == torch.uint8:
            packed = export[f"{module}.weight"]
            broken = {**export, f"{module}.weight": (packed >> 4) | (packed << 4)}
            assert readback.fraction_misrounded(source, broken, module) > 0, (
                "the law must notice swapped nibbles"
            )


def load_all(folder: Path) -> dict[str, Tensor]:
    return {k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()}


def test_the_engine_reads_what_was_checked(runs: Callable[[str], Run], tmp_path: Path) -> None:
    """The engine's own loader, on the export, computes what :mod:`readback` says it stands for."""
    run = runs("w4a16")
    effective = tmp_path / "effective"
    shutil.copytree(run.source, effective)
    tensors = {name: tensor.float() for name, tensor in load_all(run.source).items()}
    export = load_all(run.out)
    for module in quantized_modules(run):
        tensors[f"{module}.weight"] = readback.effective_weight(tensors, export, module)
    save_file(tensors, effective / "model.safetensors", metadata={"format": "pt"})
    tokens = list(range(3, 120, 2))
    of_export, of_effective, of_source = (
        score(folder, tokens).logprobs for folder in (run.out, effective, run.source)
    )
    assert of_export == pytest.approx(of_effective, abs=1e-4)
    assert of_export != pytest.approx(of_source, abs=1e-2), "quantization must be visible"


def score(folder: Path, tokens: list[int]) -> Scores:
    spec, cpu = read_modelspec(folder), torch.device("cpu")
    model = load_model(folder, spec, dtype=torch.float64, device=cpu)

    def new_store(num_slots: int) -> KvStore:
        return KvStore(spec, num_slots, dtype=torch.float64, kv_format="none", scales=None, device=cpu)

    return score_text(model, new_store, tokens, 64)


def test_unpack_takes_the_low_nibble_for_even_rows_and_signs_it() -> None:
    packed = torch.tensor([[0x80, 0x7F], [0x1E, 0x09]], dtype=torch.uint8)
    assert readback.unpack_int4(packed).tolist() == [[0, -1], [-8, 7], [-2, -7], [1, 0]]


def test_unquantized_weights_keep_their_dtype_and_bits(case: Run) -> None:
    source, export = load_all(case.source), load_all(case.out)
    folds = case.quantization.kind.endswith("_awq")
    for name, tensor in source.items():
        if name.removesuffix(".weight") in quantized_modules(case):
            continue
        assert export[name].dtype == tensor.dtype
        if not (folds and name.endswith("layernorm.weight")):
            assert torch.equal(export[name], tensor), name
    for name, tensor in export.items():
        if name.endswith("pre_quant_scale"):
            assert tensor.dtype == torch.bfloat16


def test_the_selection_is_what_was_asked_for(runs: Callable[[str], Run]) -> None:
    head = runs("fp8_head")
    modules = quantized_modules(head)
    assert "lm_head" in modules
    assert not any(".layers.0." in module or module.endswith("down_proj") for module in modules)
    assert len(modules) == 7
    attention = runs("w4a16_part")
    assert not any(module.endswith(("q_proj", "k_proj", "v_proj")) for module in quantized_modules(attention))
    assert "lm_head" in runs("w8a8").report.unquantized
    assert len(quantized_modules(runs("w8a8"))) == 14
    assert quantized_modules(runs("kv_int8")) == []


def test_int8_kv_scales_cover_the_calibrated_range(runs: Callable[[str], Run]) -> None:
    """Both KV formats are calibrated on the same tokens of the same model: 127 s_int8 = 448 s_fp8."""
    run = runs("kv_int8")
    fp8 = quantize(
        run.source,
        run.out.parent / "as_fp8",
        parse({"kind": "none", "kv_cache": "fp8"}),
    )
    assert len(fp8.kv_layers) == len(run.report.kv_layers) == 2
    for ours, theirs in zip(run.report.kv_layers, fp8.kv_layers, strict=True):
        assert ours.k_scale * 127 == pytest.approx(theirs.k_scale * 448, rel=1e-5)
        assert ours.v_scale * 127 == pytest.approx(theirs.v_scale * 448, rel=1e-5)
    assert any("trtspec's own" in note for note in run.report.notes)
    assert not fp8.notes


# --------------------------------------------------------------------------- what the folder says


def test_configs_name_the_formats(case: Run) -> None:
    spec = read_modelspec(case.out)
    assert spec.quant is not None
    assert spec.quant.algo == ALGOS[case.quantization.kind] == case.report.quant_algo
    kv = case.quantization.kv_cache
    assert spec.quant.kv_algo == (None if kv == "none" else kv.upper())
    assert spec.quant.group_size == getattr(case.quantization, "group_size", None)
    config = json.loads((case.out / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "modelopt"
    assert config["rope_parameters"]["rope_theta"] == config["rope_theta"] == spec.rope_theta
    assert config["dtype"] == config["torch_dtype"]


def test_transformers_reads_the_source_model_from_the_config(case: Run) -> None:
    from transformers import AutoConfig

    before, after = AutoConfig.from_pretrained(case.source), AutoConfig.from_pretrained(case.out)
    for key in ("rope_parameters", "vocab_size", "eos_token_id", "tie_word_embeddings", "dtype"):
        assert getattr(after, key) == getattr(before, key), key


def test_portable_config_keeps_rope_scaling_under_both_names(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    old = make_tiny_model(tmp_path / "old", rope_scaling=scaling, rope_theta=500000.0)
    new = make_tiny_model(
        tmp_path / "new", rope_scaling=scaling, rope_theta=500000.0, rope_parameters_key=True
    )
    for folder in (old, new):
        config = portable_config(json.loads((folder / "config.json").read_text()), read_modelspec(folder))
        assert config["rope_theta"] == 500000.0
        assert config["rope_scaling"] == scaling
        assert config["rope_parameters"] == {**scaling, "rope_theta": 500000.0}


def test_report(case: Run) -> None:
    assert read_report(case.out) == case.report
    assert case.report.bytes_after == sum(path.stat().st_size for path in case.out.glob("*.safetensors"))
    for layer in case.report.layers:
        assert layer.bytes_after < layer.bytes_before
        assert layer.sqnr_db is not None
        assert layer.misrounded == 0
        low, high = {"int4": (12, 30), "int8": (25, 60), "fp8": (28, 34)}[layer.format.split()[0]]
        assert low < layer.sqnr_db < high, layer
    assert case.report.load_dtype == "float32"
    assert not case.report.warnings
    assert set(case.report.checks) >= {"scales", "selection", "config", "copied_files", "fidelity"}
    with pytest.raises(InputError, match=r"quantization_report\.json: no such file"):
        read_report(case.source)


def test_progress(case: Run) -> None:
    steps = list(dict.fromkeys(step for step, _, _ in case.progress))
    search = ["search"] if case.quantization.kind.endswith("_awq") else []
    assert steps == ["load", "calibrate", *search, "export", "check"]
    for step in steps:
        counts = [(done, total) for name, done, total in case.progress if name == step]
        total = counts[0][1]
        assert counts == [(done, total) for done in range(total + 1)]


def test_same_input_same_bytes(runs: Callable[[str], Run]) -> None:
    run = runs("fp8")
    quantize(run.source, run.out.parent / "again", run.quantization)
    again = (run.out.parent / "again" / "model.safetensors").read_bytes()
    assert again == (run.out / "model.safetensors").read_bytes()


# --------------------------------------------------------------------------- planted defects


def all_checks(run: Run, out: Path) -> list[str]:
    """What the checks find in ``out``, as the product runs them."""
    spec, kind, kv = read_modelspec(run.source), run.quantization.kind, run.quantization.kv_cache
    modules = quantized_modules(run)
    with readback.open_tensors(run.source) as source, readback.open_tensors(out) as export:
        found = {
            "weight_files": lambda: checks.weight_files(out),
            "scales": lambda: checks.scales(export, modules, kind, kv, spec.num_layers),
            "selection": lambda: checks.selection(export, modules),
            "unquantized_weights": lambda: checks.unquantized_weights(source, export, modules, kind),
            "fidelity": lambda: checks.fidelity(readback.layer_reports(spec, source, export), "float32"),
            "excluded_modules": lambda: checks.excluded_modules(out, linear_modules(spec), modules),
            "config": lambda: checks.config(run.source, out, kind, kv),
            "copied_files": lambda: checks.copied_files(run.source, out),
        }
        return [f"{name}: {problem}" for name, check in found.items() for problem in check()]


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def fill(suffix: str, value: float, count: int = 10**6) -> Callable[[Path], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(suffix)][:count]:
            tensors[name] = torch.full_like(tensors[name], value)

    return lambda folder: edit_tensors(folder, change)


def drop(name: str) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, lambda tensors: tensors.pop(name))


def scale_up(name: str, factor: float = 1.25) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, lambda t: t.update({name: t[name] * factor}))


def config_key(key: str, value: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", lambda config: config.update({key: value}))


def quant_key(key: str, value: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(
        folder / "hf_quant_config.json", lambda config: config["quantization"].update({key: value})
    )


def quantize_embedding(folder: Path) -> None:
    name = "model.embed_tokens.weight"
    edit_tensors(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))


L0 = "model.layers.0"
DEFECTS: list[tuple[str, str, Callable[[Path], None], str]] = [
    ("zero scale", "w4a16", fill("mlp.up_proj.weight_scale", 0.0, 1), "scales:.*is not positive"),
    ("negative scale", "fp8", fill(".input_scale", -1.0, 1), "scales:.*is not positive"),
    ("infinite scale", "fp8", fill(".input_scale", float("inf"), 1), "scales:.*is not finite"),
    ("nan KV scale", "w4a16", fill(".k_scale", float("nan"), 1), "scales:.*k_scale is not finite"),
    ("uncalibrated", "fp8", fill(".input_scale", 1.0), "scales: every input_scale is exactly 1.0"),
    ("KV scales 1", "kv_fp8", fill(".v_scale", 1.0), "scales: every v_scale is exactly 1.0"),
    ("no input scale", "w8a8", drop(f"{L0}.mlp.up_proj.input_scale"), "scales: 1 scales are missing"),
    ("no KV scale", "fp8", drop(f"{L0}.self_attn.k_proj.k_scale"), "scales: 1 scales are missing"),
    ("quantized embedding", "kv_int8", quantize_embedding, "model.embed_tokens must never be quantized"),
    ("changed norm", "w8a8", scale_up("model.norm.weight"), "model.norm.weight changed although"),
    ("changed layernorm", "fp8", scale_up(f"{L0}.input_layernorm.weight"), "layernorm.weight changed"),
    ("changed bias", "w8a8", scale_up(f"{L0}.self_attn.q_proj.bias"), "q_proj.bias changed"),
    ("unfolded norm", "w4a16", fill(f"{L0}.input_layernorm.weight", 1.0), "fidelity:.*not the nearest"),
    ("lost tensor", "w8a8", drop("lm_head.weight"), "weight_files:.*lm_head.weight"),
    ("rope theta", "fp8", config_key("rope_theta", 1e6), "config:.*rope_theta"),
    (
        "rope of 4 only",
        "kv_int8",
        lambda folder: edit_json(folder / "config.json", lambda config: config.pop("rope_parameters")),
        "config: config.json: rope_parameters",
    ),
    (
        "rope of 5 only",
        "kv_int8",
        lambda folder: edit_json(folder / "config.json", lambda config: config.pop("rope_scaling")),
        "config: config.json: rope_scaling is 'default'",
    ),
    ("tie flag", "w8a8", config_key("tie_word_embeddings", True), "config:.*tie_embeddings is True"),
    ("eos", "kv_fp8", config_key("max_position_embeddings", 77), "config:.*max_positions is 77, was 512"),
    ("dtype", "fp8", config_key("torch_dtype", "float32"), "config:.*torch_dtype"),
    ("kv algo", "w4a16", quant_key("kv_cache_quant_algo", "FP8"), "config:.*says W4A16_AWQ with KV FP8"),
    ("excludes too little", "w8a8", quant_key("exclude_modules", []), "exclude_modules lacks lm_head"),
    (
        "excludes too much",
        "w8a8",
        quant_key("exclude_modules", ["lm_head", "*k_proj"]),
        "exclude_modules leaves out model.layers.0.self_attn.k_proj",
    ),
    (
        "no tokenizer",
        "fp8",
        lambda folder: (folder / "tokenizer.json").unlink(),
        "copied_files: tokenizer.json is missing",
    ),
    (
        "other template",
        "fp8",
        lambda folder: edit_json(folder / "tokenizer_config.json", lambda c: c.update(chat_template="x")),
        "copied_files: tokenizer_config.json differs",
    ),
]


@pytest.mark.parametrize(("name", "plant", "expected"), [d[1:] for d in DEFECTS], ids=[d[0] for d in DEFECTS])
def test_planted_defects_are_found(
    name: str, plant: Callable[[Path], None], expected: str, runs: Callable[[str], Run], tmp_path: Path
) -> None:
    run = runs(name)
    out = tmp_path / "out"
    shutil.copytree(run.out, out)
    assert all_checks(run, out) == []
    plant(out)
    found = safely(lambda: all_checks(run, out))
    assert any(re.search(expected, line) for line in found), found


def safely(action: Callable[[], list[str]]) -> list[str]:
    try:
        return action()
    except InputError as error:
        return [f"config: {problem}" for problem in error.problems]


def test_failed_checks_are_raised_together() -> None:
    with pytest.raises(GateFailed, match="not usable and was removed:\na: one\nb: two\nb: three"):
        checks.run({"a": lambda: ["one"], "b": lambda: ["two", "three"], "c": list})
    assert checks.run({"c": list}) == ["c"]
