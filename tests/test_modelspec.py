"""Reading checkpoints without torch: facts, refusals, damaged weight files, and where models are found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from tiny import ARCHITECTURES, Family, make_tiny_model

from trtspec.errors import InputError, MissingError
from trtspec.model_source import SAMPLE_NAMES, cache_folder, find_model, resolve_model
from trtspec.modelspec import check_weight_files, expected_tensors, read_modelspec
from trtspec.tensor_headers import read_tensor_headers

FAMILIES: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", tokenizer=False)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        if value is DELETE:
            config.pop(key, None)
        else:
            config[key] = value
    path.write_text(json.dumps(config))


DELETE = object()


def problems_of(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_modelspec(folder)
    return str(caught.value)


# ------------------------------------------------------------------ facts


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tie", [False, True])
def test_facts_of_every_family(tmp_path: Path, family: Family, tie: bool) -> None:
    make_tiny_model(tmp_path, family, tie=tie, hidden=96, heads=6, kv_heads=3, layers=3, tokenizer=False)
    spec = read_modelspec(tmp_path)
    assert (spec.architecture, spec.family) == (ARCHITECTURES[family], family)
    assert (spec.num_layers, spec.hidden_size, spec.intermediate_size) == (3, 96, 192)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (6, 3, 16)
    assert spec.tie_embeddings is tie
    assert spec.qkv_bias is (family == "qwen2")
    assert spec.qk_norm is (family == "qwen3")
    assert spec.eos_token_ids == (2,)
    assert (spec.quant, spec.sliding_window, spec.rope_scaling) == (None, None, None)
    assert check_weight_files(tmp_path) == []
    headers, _ = read_tensor_headers(tmp_path)
    assert expected_tensors(spec)[0] == {name: header.shape for name, header in headers.items()}


def test_both_generations_of_rope_keys_mean_the_same(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    old = make_tiny_model(tmp_path / "old", rope_theta=5e5, rope_scaling=scaling, tokenizer=False)
    new = make_tiny_model(
        tmp_path / "new", rope_theta=5e5, rope_scaling=scaling, rope_parameters_key=True, tokenizer=False
    )
    assert read_modelspec(old) == read_modelspec(new)
    assert read_modelspec(new).rope_theta == 5e5
    edit_config(new, rope_theta=1e4)
    assert "contradicts rope_parameters.rope_theta" in problems_of(new)


def test_eos_ids_come_from_both_files(folder: Path) -> None:
    edit_config(folder, eos_token_id=[7, 2])
    (folder / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert read_modelspec(folder).eos_token_ids == (2, 5, 7)


def test_qwen_window_is_off_unless_used(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "qwen2", config_overrides={"sliding_window": 64}, tokenizer=False)
    assert read_modelspec(folder).sliding_window is None
    edit_config(folder, use_sliding_window=True)
    assert "use_sliding_window" in problems_of(folder)
    edit_config(folder, sliding_window=4096)
    assert read_modelspec(folder).sliding_window is None, "a window beyond max_position_embeddings"


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "architectures: ['MixtralForCausalLM'] is not supported"),
        ({"architectures": DELETE}, "one of LlamaForCausalLM, MistralForCausalLM"),
        ({"hidden_size": DELETE}, "hidden_size: missing"),
        ({"hidden_size": "64"}, "hidden_size: '64' is not an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: 0 is not an integer of at least 1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide num_attention_heads 4"),
        ({"head_dim": 15}, "head_dim: 15 is odd"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported; only 'silu'"),
        ({"attention_bias": True}, "attention_bias: True is not supported"),
        ({"mlp_bias": True}, "mlp_bias: True is not supported"),
        ({"rms_norm_eps": -1}, "rms_norm_eps: -1 is not a number from 1e-12 to 1"),
        ({"rope_theta": "big"}, "rope_theta: 'big' is not a number from 1 to"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "one of default, linear, llama3, yarn"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: None is not a number from 1 to 1e+06"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "rope_scaling.low_freq_factor"),
        ({"rope_scaling": 3}, "rope_scaling: 3 is not a mapping"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not supported"),
        ({"eos_token_id": "</s>"}, "eos_token_id: '</s>' is not a token id"),
        ({"eos_token_id": 320}, "eos_token_id: 320 is not a token of this model, which has 320"),
        (
            {"eos_token_id": 10**30},
            "eos_token_id: 1000000000000000000000000000000 is not a token of this model",
        ),
        ({"num_hidden_layers": 10_000_000}, "num_hidden_layers: 10000000 exceeds 1000"),
        ({"vocab_size": 10**4000}, "vocab_size: an enormous number exceeds"),
        ({"num_attention_heads": 10**30}, "num_attention_heads: 1000000000000000000000000000000 exceeds"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings: 'false' is not true or false"),
        ({"torch_dtype": {"a": 1}}, "torch_dtype: {'a': 1} is not supported; one of float64"),
        ({"dtype": "int4"}, "dtype: 'int4' is not supported"),
        ({"rope_theta": 1e-300}, "rope_theta: 1e-300 is not a number from 1 to"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1e-300}}, "rope_scaling.factor: 1e-300 is not"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": "x"}},
            "rope_scaling.beta_fast: 'x'",
        ),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope_scaling.rope_type: ['yarn'] is not supported"),
        ({"architectures": ["x" * 5000]}, "architectures: ['xxx"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq' cannot be run"),
        ({"quantization_config": {"quant_method": "modelopt"}}, "hf_quant_config.json is missing"),
    ],
    # Without addresses, which differ from process to process: all of them must find the same tests.
    ids=lambda value: str(value).replace(str(DELETE), "missing")[:40],
)
def test_bad_configs_are_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    edit_config(folder, **changes)
    text = problems_of(folder)
    assert message in text
    assert str(folder / "config.json") in text
    assert len(text) < 1000


@pytest.mark.parametrize(
    "raw", [b"[" * 200_000, b'{"a": "\\ud800"}', b'{"vocab_size": ' + b"1" * 5000 + b"}"]
)
def test_json_that_breaks_its_readers_is_refused(folder: Path, raw: bytes) -> None:
    for name in ("config.json", "generation_config.json", "hf_quant_config.json"):
        before = (folder / name).read_bytes() if (folder / name).exists() else None
        (folder / name).write_bytes(raw)
        assert f"{name}: is not JSON: " in problems_of(folder)
        if before is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(before)


def test_a_claim_of_layers_costs_no_memory(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=10_000_000)
    tracemalloc.start()
    assert "exceeds 1000" in problems_of(folder)
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()


@pytest.mark.parametrize("producer", [7, "modelopt", [], {"name": 1}])
def test_an_odd_producer_is_only_a_name(folder: Path, producer: Any) -> None:
    value = {"producer": producer, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}
    (folder / "hf_quant_config.json").write_text(json.dumps(value))
    quant = read_modelspec(folder).quant
    assert quant is not None
    assert quant.producer == ("1" if isinstance(producer, dict) else "unknown")


def test_all_problems_come_at_once(folder: Path) -> None:
    edit_config(folder, hidden_act="gelu", mlp_bias=True, vocab_size=-1, rope_scaling={"rope_type": "su"})
    text = problems_of(folder)
    for key in ("hidden_act", "mlp_bias", "vocab_size", "rope_scaling.rope_type"):
        assert f": {key}: " in text
    assert len(text.splitlines()) == 4


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_algo": "NVFP4"}, "'NVFP4' is not supported; one of FP8,"),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}, "quantization.kv_cache_quant_algo"),
        ({"quant_algo": "W4A16_AWQ", "group_size": 0}, "group_size: 0 is not an integer"),
        ({"quant_algo": "W4A16_AWQ"}, "no 4-bit weight to infer it from"),
        ({"quant_algo": "W4A16_AWQ", "group_size": 32, "has_zero_point": True}, "zero points"),
        ({"quant_algo": "FP8", "exclude_modules": "lm_head"}, "not a list of module name patterns"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_quantization_is_refused(folder: Path, quantization: dict[str, Any], message: str) -> None:
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    text = problems_of(folder)
    assert message in text
    assert "hf_quant_config.json" in text


def test_missing_folder_and_config(tmp_path: Path) -> None:
    assert "no such folder" in problems_of(tmp_path / "nowhere")
    assert "not a Hugging Face checkpoint" in problems_of(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in problems_of(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "holds a list" in problems_of(tmp_path)


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads"])
@pytest.mark.parametrize("value", [None, 0, "4", [64]])
def test_a_missing_size_is_one_problem(folder: Path, key: str, value: Any) -> None:
    """What is put in its place is not compared with the other sizes."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value, "head_dim": None}))
    problems = problems_of(folder).splitlines()
    assert len(problems) == 1, problems
    assert f"config.json: {key}: " in problems[0]


# ------------------------------------------------------------------ weight files


def weight_problems(folder: Path) -> str:
    return "\n".join(str(problem) for problem in check_weight_files(folder))


def test_a_path_that_safetensors_cannot_open(folder: Path) -> None:
    assert weight_problems(folder) == ""
    moved = folder.rename(folder.with_name(os.fsdecode(b"m\xff")))
    assert "the path is not UTF-8" in weight_problems(moved)


def test_git_lfs_pointers(folder: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (folder / "model.safetensors").write_bytes(pointer)
    assert "git lfs pull" in weight_problems(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, 5000, -1])
def test_truncated_files_at_any_place(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    text = weight_problems(folder)
    assert str(path) in text
    assert "download or export it again" in text


def test_files_that_are_too_long_or_malformed(folder: Path) -> None:
    path = folder / "model.safetensors"
    good = path.read_bytes()
    path.write_bytes(good + b"x")
    assert "longer than its header says" in weight_problems(folder)
    path.write_bytes(good[:8] + b"[" + good[9:])
    assert "malformed" in weight_problems(folder)


def header_and_data(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_tensors(path: Path, header: Any, data: bytes) -> None:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


def test_tensors_must_tile_the_data(folder: Path) -> None:
    path = folder / "model.safetensors"
    header, data = header_and_data(path)
    write_tensors(path, header, data)
    assert weight_problems(folder) == ""
    first, second = (f"model.layers.{i}.mlp.up_proj.weight" for i in range(2))
    shared = {**header, second: {**header[second], "data_offsets": header[first]["data_offsets"]}}
    write_tensors(path, shared, data)
    assert "overlaps" in weight_problems(folder)
    gap = {
        name: {**value, "data_offsets": [offset + 16 for offset in value["data_offsets"]]}
        for name, value in header.items()
        if name != "__metadata__"
    }
    write_tensors(path, gap, b"\0" * 16 + data)
    assert "16 bytes before" in weight_problems(folder)


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 100_000,
        b'{"\\ud800": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}',
        {"x": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}},
        {"x": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}},
        {"x": {"dtype": "F32", "shape": [1] * 100_000, "data_offsets": [0, 4]}},
        {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}},
        {"x": 1},
    ],
    ids=lambda value: str(value)[:30],
)
def test_odd_headers_are_malformed(folder: Path, header: Any) -> None:
    write_tensors(folder / "model.safetensors", header, b"\0" * 4)
    assert "malformed" in weight_problems(folder)


@pytest.mark.parametrize(
    ("make", "says"),
    [(os.mkfifo, "is not a regular file"), (os.mkdir, "is a folder"), (lambda path: None, "no weights")],
)
def test_weights_that_are_no_file(folder: Path, make: Any, says: str) -> None:
    (folder / "model.safetensors").unlink()
    make(folder / "model.safetensors")
    assert says in weight_problems(folder)


@pytest.mark.parametrize("name", ["/etc/passwd", "../x.safetensors", "a/b", "a\0b", "", "x" * 300])
def test_an_index_may_not_leave_its_folder(tmp_path: Path, name: str) -> None:
    folder = make_tiny_model(tmp_path, shards=2, tokenizer=False)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["x"] = name
    path.write_text(json.dumps(index))
    text = weight_problems(folder)
    assert "is not the name of a file in this folder" in text
    assert len(text.splitlines()) == 1


def test_missing_and_misplaced_shards(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, shards=3, tokenizer=False)
    assert check_weight_files(folder) == []
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors: missing" in weight_problems(folder)
    first, third = (folder / f"model-0000{i}-of-00003.safetensors" for i in (1, 3))
    (folder / "model-00002-of-00003.safetensors").write_bytes(first.read_bytes())
    third.write_bytes(first.read_bytes())
    assert "where the index puts it" in weight_problems(folder)


def test_pickled_weights_are_refused_with_a_remedy(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "convert them to safetensors" in weight_problems(folder)
    (folder / "pytorch_model.bin").unlink()
    assert "no weights" in weight_problems(folder)


def test_tensors_that_do_not_fit_the_config(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=3)
    text = weight_problems(folder)
    assert "model.layers.2.self_attn.q_proj.weight: missing" in text
    assert "more tensors are missing" in text
    edit_config(folder, num_hidden_layers=1)
    assert "model.layers.1.mlp.up_proj.weight: not a tensor of LlamaForCausalLM" in weight_problems(folder)
    edit_config(folder, num_hidden_layers=2, intermediate_size=256)
    assert "mlp.up_proj.weight: shape [128, 64]; config.json implies [256, 64]" in weight_problems(folder)


def test_biases_without_the_architecture_for_them_are_not_ignored(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "qwen2", tokenizer=False)
    edit_config(folder, architectures=["LlamaForCausalLM"])
    assert "q_proj.bias: not a tensor of LlamaForCausalLM" in weight_problems(folder)


# ------------------------------------------------------------------ where models are


def test_folders_are_relative_to_the_recipe(folder: Path) -> None:
    assert resolve_model("model", folder.parent) == folder
    assert resolve_model(str(folder), Path("/elsewhere")) == folder
    with pytest.raises(InputError, match="a revision is only for hub ids"):
        resolve_model("model", folder.parent, "main")
    with pytest.raises(InputError, match="no such folder"):
        resolve_model("./absent", folder.parent)
    with pytest.raises(InputError, match="is a file; give the folder"):
        resolve_model("model/config.json", folder.parent)


def test_samples_live_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path))
    name = SAMPLE_NAMES[0]
    with pytest.raises(MissingError, match=f"run: trtspec fetch {name}"):
        resolve_model(f"sample:{name}", Path())
    assert find_model(f"sample:{name}", Path()) is None
    made = make_tiny_model(tmp_path / "models" / name, tokenizer=False)
    assert resolve_model(f"sample:{name}", Path()) == made
    assert find_model(f"sample:{name}", Path()) == made
    for wrong in (f"../models/{name}", "smollm2-135m", ""):
        with pytest.raises(InputError, match=f"no such sample; allowed: sample:{name}"):
            resolve_model(f"sample:{wrong}", Path())


def test_the_hub_cache_is_read_by_names_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert find_model("org/name", Path()) is None
    stored = tmp_path / "models--org--name"
    made = make_tiny_model(stored / "snapshots" / "c0ffee", tokenizer=False)
    assert find_model("org/name", Path()) is None, "no branch points at it"
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("c0ffee")
    assert find_model("org/name", Path()) == made
    assert find_model("org/name", Path(), "c0ffee") == made
    assert find_model("org/name", Path(), "v2") is None
    for odd in ("\0", "x" * 5000, "~nobody-here/x", "org/../name"):
        assert find_model(odd, Path()) is None


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRTSPEC_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path.home() / ".cache" / "trtspec"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/trtspec")
    monkeypatch.setenv("TRTSPEC_CACHE", "/y")
    assert cache_folder() == Path("/y")


def test_hub_ids_use_the_local_cache_only(tmp_path: Path) -> None:
    """In a fresh process: the hub library reads its cache folder when imported."""
    hub = tmp_path / "hub"
    repo = hub / "models--org--name"
    snapshot = repo / "snapshots" / "0123456789012345678901234567890123456789"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(snapshot.name)
    make_tiny_model(snapshot, tokenizer=False)
    code = (
        "from pathlib import Path; from trtspec.model_source import resolve_model\n"
        "print(resolve_model('org/name', Path()))\n"
        "try: resolve_model('org/other', Path())\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    environment = {"HF_HUB_CACHE": str(hub), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    lines = run.stdout.splitlines()
    assert lines[0] == str(snapshot), run.stderr
    assert lines[1].startswith("MissingError org/other: not in the hub's local cache")
    assert "TRTSPEC_ALLOW_NETWORK=1" in lines[1]


def test_no_torch_is_imported() -> None:
    code = "import sys, trtspec.modelspec, trtspec.model_source; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
