"""Checkpoints as TensorRT-LLM sees them, and exports that are refused before anyone builds them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trtspec.cli import main
from trtspec.errors import InputError
from trtspec.modelspec import read_modelspec
from trtspec.recipe_file import parse_section
from trtspec.trtllm import export as export_module
from trtspec.trtllm.checkpoint import known_checkpoint, of_spec, read_checkpoint
from trtspec.trtllm.export import EXPORT_RULES, check_export

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "rms_norm_eps": 1e-5,
    "eos_token_id": [1, 2],
    "torch_dtype": "bfloat16",
}
LINEARS = {
    "self_attn.q_proj": (128, 128),
    "self_attn.k_proj": (64, 128),
    "self_attn.v_proj": (64, 128),
    "self_attn.o_proj": (128, 128),
    "mlp.gate_proj": (256, 128),
    "mlp.up_proj": (256, 128),
    "mlp.down_proj": (128, 256),
}
SIZES = {"F8_E4M3": 1, "U8": 1, "I8": 1, "BF16": 2, "F32": 4}
Tensors = dict[str, tuple[str, tuple[int, ...]]]


def plain_tensors() -> Tensors:
    tensors: Tensors = {
        "model.embed_tokens.weight": ("BF16", (512, 128)),
        "model.layers.0.input_layernorm.weight": ("BF16", (128,)),
        "model.layers.0.post_attention_layernorm.weight": ("BF16", (128,)),
        "model.norm.weight": ("BF16", (128,)),
        "lm_head.weight": ("BF16", (512, 128)),
    }
    for name, shape in LINEARS.items():
        tensors[f"model.layers.0.{name}.weight"] = ("BF16", shape)
    return tensors


def quantized_tensors(kind: str) -> Tensors:
    """The layout of ModelOpt's unified export (as its own exports were found to have it)."""
    tensors = plain_tensors()
    for name, (rows, columns) in LINEARS.items():
        module = f"model.layers.0.{name}"
        if kind == "fp8":
            tensors[f"{module}.weight"] = ("F8_E4M3", (rows, columns))
            tensors[f"{module}.weight_scale"] = ("F32", ())
            tensors[f"{module}.input_scale"] = ("F32", ())
        else:
            tensors[f"{module}.weight"] = ("U8", (rows // 2, columns))
            tensors[f"{module}.weight_scale"] = ("F32", (rows, columns // 64))
    for name in ("k_proj.k_scale", "v_proj.v_scale"):
        tensors[f"model.layers.0.self_attn.{name}"] = ("F32", ())
    return tensors


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def write_weights(folder: Path, tensors: Tensors) -> None:
    header, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        end = at + math.prod(shape) * SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    write_json(path, value)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    write_json(folder / "config.json", CONFIG)
    write_json(folder / "tokenizer.json", {})
    write_weights(folder, plain_tensors())
    return folder


def make_export(folder: Path, kind: str = "fp8") -> Path:
    folder.mkdir()
    write_json(folder / "config.json", {**CONFIG, "quantization_config": {"quant_method": "modelopt"}})
    write_json(folder / "tokenizer.json", {})
    quantization: dict[str, Any] = {
        "quant_algo": {"fp8": "FP8", "w4a16_awq": "W4A16_AWQ"}[kind],
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head", "model.embed_tokens"],
    }
    if kind == "w4a16_awq":
        quantization["group_size"] = 64
    write_json(folder / "hf_quant_config.json", {"quantization": quantization})
    write_weights(folder, quantized_tensors(kind))
    return folder


FP8 = parse_section("quantization", {"kind": "fp8", "kv_cache": "fp8"})
AWQ = parse_section("quantization", {"kind": "w4a16_awq", "group_size": 64, "kv_cache": "fp8"})


@pytest.mark.parametrize("kind", ["fp8", "w4a16_awq"])
@pytest.mark.parametrize("backend", ["tensorrt", "pytorch"])
def test_a_good_export_has_no_findings(tmp_path: Path, source: Path, kind: str, backend: Any) -> None:
    folder = make_export(tmp_path / "export", kind)
    asked = {"fp8": FP8, "w4a16_awq": AWQ}[kind]
    found = check_export(folder, source=source, kind=backend, version="1.2.1", asked=asked)
    assert found == []
    assert read_modelspec(folder).quant is not None  # the stricter reader agrees


def _quant(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "hf_quant_config.json", lambda value: change(value["quantization"]))


def _config(**values: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "config.json", lambda value: value.update(values))


def _tensors(change: Callable[[Tensors], object], kind: str = "fp8") -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = quantized_tensors(kind)
        change(tensors)
        write_weights(folder, tensors)

    return damage


def _without(part: str) -> Callable[[Path], None]:
    return _tensors(lambda tensors: [tensors.pop(name) for name in list(tensors) if part in name])


def _pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def _stored(module: str, rows: int) -> Callable[[Path], None]:
    """``module`` quantized too, with its scales."""
    return _tensors(
        lambda tensors: tensors.update(
            {
                f"{module}.weight": ("F8_E4M3", (rows, 128)),
                f"{module}.weight_scale": ("F32", ()),
                f"{module}.input_scale": ("F32", ()),
            }
        )
    )


def _no_kv_scales(folder: Path) -> None:
    kept = {n: t for n, t in quantized_tensors("fp8").items() if not n.endswith(("k_scale", "v_scale"))}
    write_weights(folder, kept)


def _exclude(*patterns: str) -> Callable[[Path], None]:
    return _quant(lambda q: q.update(exclude_modules=list(patterns)))


DAMAGE: list[tuple[str, Callable[[Path], None], str]] = [
    ("trtllm-export-weights", _pointer, "git-lfs pointer"),
    ("trtllm-export-weights", _truncate, "truncated"),
    ("trtllm-export-foreign", lambda folder: (folder / "hf_quant_config.json").unlink(), "ModelOpt"),
    ("trtllm-export-format", _quant(lambda q: q.update(quant_algo="W3A3")), "W3A3 is unknown"),
    ("trtllm-export-format", _quant(lambda q: q.update(quant_algo="W4A8_MXFP4_FP8")), "cannot be built"),
    ("trtllm-export-asked", _quant(lambda q: q.update(kv_cache_quant_algo=None)), "asks for FP8"),
    ("trtllm-export-scales", _without("input_scale"), "without calibration"),
    ("trtllm-export-scales", _without("weight_scale"), "without calibration"),
    ("trtllm-export-kv-scales", _no_kv_scales, "count as 1"),
    ("trtllm-export-excluded", _exclude("model.embed_tokens"), "lm_head is in 16 bit"),
    ("trtllm-export-excluded", _exclude("lm_head", "*.o_proj"), "is quantized and named"),
    ("trtllm-export-router", _stored("model.layers.0.mlp.gate", 8), "router"),
    ("trtllm-export-lm-head", _stored("lm_head", 512), "exclude lm_head"),
    ("trtllm-export-config", _config(rope_scaling=None), "rope_scaling"),
    ("trtllm-export-config", _config(rope_theta=10000.0), "rope_theta"),
    ("trtllm-export-config", _config(max_position_embeddings=256), "max_positions"),
    ("trtllm-export-config", _config(eos_token_id=1), "eos_token_id"),
    ("trtllm-export-config", _config(vocab_size=500), "vocab_size"),
    ("trtllm-export-tokenizer", lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
]


@pytest.mark.parametrize(
    ("rule", "damage", "said"), DAMAGE, ids=[f"{n}-{d[0]}" for n, d in enumerate(DAMAGE)]
)
def test_a_damaged_export_is_told_by_its_rule(
    tmp_path: Path, source: Path, rule: str, damage: Callable[[Path], None], said: str
) -> None:
    folder = make_export(tmp_path / "export")
    damage(folder)
    found = check_export(folder, source=source, kind="tensorrt", version="1.2.1", asked=FP8)
    assert rule in {finding.rule for finding in found}
    assert any(said in str(finding.problem) for finding in found if finding.rule == rule)
    explained = {"trtllm-export-weights": set(EXPORT_RULES)}.get(rule, _together(rule))
    assert {finding.rule for finding in found} <= {rule, *explained}


def _together(rule: str) -> set[str]:
    """Rules that rightly speak of the same damage."""
    return {
        "trtllm-export-foreign": {"trtllm-export-asked"},
        "trtllm-export-format": {"trtllm-export-asked"},
        "trtllm-export-lm-head": {"trtllm-export-excluded"},
    }.get(rule, set())


def test_a_group_size_that_the_weights_do_not_have(tmp_path: Path) -> None:
    folder = make_export(tmp_path / "export", "w4a16_awq")
    _quant(lambda q: q.update(group_size=128))(folder)
    assert {f.rule for f in check_export(folder)} == {"trtllm-export-group"}
    assert {f.rule for f in check_export(folder, asked=AWQ)} == {"trtllm-export-group", "trtllm-export-asked"}


def test_every_export_rule_was_damaged_for_and_a_deaf_one_is_noticed(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {rule for rule, _, _ in DAMAGE} | {"trtllm-export-group"} == set(EXPORT_RULES)
    for number, (rule, damage, _) in enumerate(DAMAGE):
        folder = make_export(tmp_path / str(number))
        damage(folder)
        deaf = {
            id: replace(r, check=lambda case: iter(())) if id == rule else r for id, r in EXPORT_RULES.items()
        }
        monkeypatch.setattr(export_module, "EXPORT_RULES", deaf)
        found = check_export(folder, source=source, kind="tensorrt", version="1.2.1", asked=FP8)
        monkeypatch.undo()
        assert rule not in {finding.rule for finding in found}


def test_lint_holds_an_export_against_its_recipe(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_export(tmp_path / "export")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"version: 1\nname: a\nmodel: {{source: {source}}}\nbackend: {{kind: pytorch}}\n"
        "quantization: {kind: fp8, kv_cache: fp8}\n"
        "limits: {max_input_tokens: 256, max_seq_tokens: 512}\n"
    )
    assert main(["lint", str(recipe), "--export", str(folder)]) == 0, capsys.readouterr()
    _config(rope_scaling=None)(folder)
    assert main(["lint", str(recipe), "--export", str(folder)]) == 2
    assert "rope_scaling: found None; the source has" in capsys.readouterr().out
    assert main(["lint", str(recipe), "--export", str(tmp_path / "nowhere")]) == 2


# --------------------------------------------------------------------------- reading


def test_the_lenient_reader_agrees_with_the_strict_one(source: Path) -> None:
    assert read_checkpoint(source) == of_spec(read_modelspec(source), source)


def test_both_spellings_of_rotary_positions_are_one(source: Path) -> None:
    before = read_checkpoint(source)

    def to_new(config: dict[str, Any]) -> None:
        config["rope_parameters"] = {**config.pop("rope_scaling"), "rope_theta": config.pop("rope_theta")}

    edit(source / "config.json", to_new)
    after = read_checkpoint(source)
    assert (after.rope_theta, after.rope_scaling) == (before.rope_theta, before.rope_scaling)
    edit(source / "config.json", lambda config: config["rope_parameters"].pop("factor"))
    assert read_checkpoint(source).rope_scaling != before.rope_scaling


def test_unknown_architectures_and_nested_configs_are_read(source: Path) -> None:
    def nest(config: dict[str, Any]) -> None:
        text = {key: config.pop(key) for key in list(config) if key != "architectures"}
        config.update(
            architectures=["Gemma3ForConditionalGeneration"], text_config={**text, "num_experts": 8}
        )

    edit(source / "config.json", nest)
    checkpoint = read_checkpoint(source)
    assert (checkpoint.architecture, checkpoint.hidden_size) == ("Gemma3ForConditionalGeneration", 128)
    assert (checkpoint.num_experts, checkpoint.spec) == (8, None)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("config.json", None, "missing"),
        ("config.json", "{", "config.json"),
        ("config.json", "{}", "architectures"),
        ("config.json", '{"architectures": [3]}', "architectures"),
        ("hf_quant_config.json", "{}", "quantization"),
        ("hf_quant_config.json", "[]", "mapping"),
    ],
)
def test_bad_files_are_refused_by_name(source: Path, name: str, text: str | None, said: str) -> None:
    (source / name).unlink(missing_ok=True)
    if text is not None:
        (source / name).write_text(text)
    with pytest.raises(InputError, match=said):
        read_checkpoint(source)


def test_known_models_need_no_folder() -> None:
    known = known_checkpoint("meta-llama/Llama-3.1-8B-Instruct")
    assert known is not None
    assert (known.architecture, known.num_heads, known.num_kv_heads) == ("LlamaForCausalLM", 32, 8)
    assert known_checkpoint("nobody/nothing") is None
