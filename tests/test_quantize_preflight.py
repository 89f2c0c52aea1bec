"""What quantization refuses before it loads anything, and the calibration data."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file
from tiny import make_tiny_model

from trtspec import process
from trtspec.errors import InputError, MissingError
from trtspec.quantize import calibration, preflight, quantize, read_report
from trtspec.quantize.__main__ import main
from trtspec.recipe import Calibration, Quantization
from trtspec.text import Tokenizer


def parse(value: dict[str, Any]) -> Quantization:
    adapter: TypeAdapter[Quantization] = TypeAdapter(Quantization)
    return adapter.validate_json(json.dumps(value))


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("good") / "model", dtype="bfloat16", shards=2)


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def write(name: str, content: str | bytes) -> Callable[[Path], object]:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def config(**changes: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def truncate(folder: Path) -> None:
    data = (folder / FIRST).read_bytes()
    (folder / FIRST).write_bytes(data[: len(data) // 2])


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        for name in (FIRST, SECOND):
            values = load_file(folder / name)
            change(values)
            save_file(values, folder / name, metadata={"format": "pt"})

    return apply


def reshape(values: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    if name in values:
        values[name] = values[name][:100].clone()


def to_int8(values: dict[str, torch.Tensor]) -> None:
    for name in values:
        values[name] = values[name].to(torch.int8)


def pretend_quantized(folder: Path) -> None:
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    value = {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": quantization}
    (folder / "hf_quant_config.json").write_text(json.dumps(value))


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 269060552\n"
FP8 = {"kind": "fp8"}
BAD_FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (
        remove("config.json"),
        r"config\.json: missing; the folder is not a Hugging Face checkpoint",
    ),
    "config not JSON": (write("config.json", "{"), r"config\.json: is not JSON"),
    "unknown architecture": (
        config(architectures=["MambaForCausalLM"]),
        r"architectures: \['MambaForCausalLM'\] is not supported; one of LlamaForCausalLM",
    ),
    "lfs pointer": (write(FIRST, LFS), rf"{FIRST}: a git-lfs pointer, not weights; run 'git lfs pull'"),
    "truncated": (truncate, rf"{FIRST}: truncated: \d+ bytes, \d+ expected; download or export it again"),
    "empty file": (write(SECOND, b""), rf"{SECOND}: only 0 bytes, not a safetensors file"),
    "missing shard": (remove(SECOND), rf"{SECOND}: missing; model.safetensors.index.json names it"),
    "no weights": (
        lambda folder: [path.unlink() for path in folder.glob("model*")],
        r"no weights: neither model\.safetensors nor",
    ),
    "no tokenizer": (remove("tokenizer.json"), r"tokenizer\.json: not found; export the model with a fast"),
    "bad tokenizer": (write("tokenizer.json", "{}"), r"tokenizer\.json: not a tokenizer"),
    "wrong shape": (
        tensors(reshape),
        r"model\.layers\.0\.mlp\.up_proj\.weight: shape \[100, 64\]; config\.json implies \[128, 64\]",
    ),
    "integer weights": (tensors(to_int8), r"stored as I8; a checkpoint in F64, F32, F16, BF16 is needed"),
    "already quantized": (pretend_quantized, r"already quantized; start from the 16-bit checkpoint"),
    "already quantized elsewhere": (
        config(quantization_config={"quant_method": "gptq"}),
        r"'gptq' cannot be run: only ModelOpt exports are; start from the 16-bit checkpoint",
    ),
    "small vocabulary": (
        lambda folder: [
            config(vocab_size=300)(folder),
            tensors(
                lambda v: v.update(
                    {n: v[n][:300].clone() for n in v if n in ("lm_head.weight", "model.embed_tokens.weight")}
                )
            )(folder),
        ],
        r"tokenizer\.json: has 320 tokens, the model only 300",
    ),
}


@pytest.mark.parametrize("name", list(BAD_FOLDERS))
def test_bad_model_folders(name: str, good: Path, tmp_path: Path) -> None:
    plant, expected = BAD_FOLDERS[name]
    source = tmp_path / "source"
    shutil.copytree(good, source)
    plant(source)
    with pytest.raises(InputError, match=expected):
        quantize(source, tmp_path / "out", parse(FP8))
    assert [path.name for path in tmp_path.iterdir()] == ["source"], "nothing may be written"


BAD_REQUESTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "group size": (
        {"kind": "w4a16_awq", "group_size": 128},
        InputError,
        r"quantization\.group_size: 128 does not divide the 64 inputs of model\.layers\.0\.self_attn\.q_proj "
        r"\(and 11 more\); use 32 or 64",
    ),
    "nothing to do": ({"kind": "none"}, InputError, "leaves nothing to quantize"),
    "nvfp4": ({"kind": "nvfp4"}, MissingError, r"quantization\.kind: nvfp4 is calibrated on a CUDA GPU only"),
    "nvfp4 KV": (
        {"kind": "fp8", "kv_cache": "nvfp4"},
        MissingError,
        r"quantization\.kv_cache: nvfp4 is calibrated on a CUDA GPU only",
    ),
    "exclude matches nothing": (
        {**FP8, "exclude": ["*.fc1"]},
        InputError,
        r"quantization\.exclude\[0\]: '\*\.fc1' matches no linear layer; names look like",
    ),
    "exclude splits one input": (
        {**FP8, "exclude": ["*.k_proj"]},
        InputError,
        r"leaves only some of q_proj, k_proj, v_proj of layer 0 \(and 1 more\) in 16 bit; they share",
    ),
    "exclude everything": ({**FP8, "exclude": ["*"]}, InputError, "excludes every layer; use kind none"),
    "no data": (
        {**FP8, "calibration": {"data": "/nowhere/texts.jsonl"}},
        InputError,
        r"/nowhere/texts\.jsonl: calibration data cannot be read: no such file",
    ),
}


@pytest.mark.parametrize("name", list(BAD_REQUESTS))
def test_bad_requests(name: str, good: Path, tmp_path: Path) -> None:
    value, error, expected = BAD_REQUESTS[name]
    with pytest.raises(error, match=expected):
        quantize(good, tmp_path / "out", parse(value))
    assert list(tmp_path.iterdir()) == []


def test_group_size_that_no_group_fits(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source", hidden=48, dtype="bfloat16")
    with pytest.raises(InputError, match="exclude those layers or use fp8 or w8a8_sq"):
        quantize(source, tmp_path / "out", parse({"kind": "w4a16_awq", "group_size": 32}))


def test_a_tied_lm_head_cannot_be_quantized(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source", tie=True, dtype="bfloat16")
    with pytest.raises(InputError, match=r"quantization\.lm_head: true, but this model ties its output"):
        quantize(source, tmp_path / "out", parse({**FP8, "lm_head": True}))


def test_all_problems_come_together(good: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(good, source)
    truncate(source)
    remove("tokenizer.json")(source)
    wanted = parse({"kind": "w4a16_awq", "group_size": 128, "exclude": ["*.fc1"]})
    with pytest.raises(InputError) as caught:
        quantize(source, tmp_path / "out", wanted)
    text = str(caught.value)
    for part in ("truncated", "tokenizer.json: not found", "group_size: 128", "exclude[0]: '*.fc1'"):
        assert text.count(part) == 1, text


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder; give a Hugging Face model folder"):
        quantize(tmp_path / "nothing", tmp_path / "out", parse(FP8))


def test_what_is_in_the_way_stays(good: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("mine")
    with pytest.raises(InputError, match="exists and is not empty; give another path or remove it"):
        quantize(good, out, parse(FP8))
    assert (out / "mine").read_text() == "mine"


def test_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"GB of disk are needed while exporting, \d+\.\d\d GB are free"):
        preflight._require_room(tmp_path / "deep" / "out", 10**18)
    preflight._require_room(tmp_path / "deep" / "out", 1000)


def test_importing_costs_no_torch() -> None:
    code = (
        "import sys, trtspec.quantize.__main__\n"
        "found = {'torch', 'transformers', 'modelopt'} & set(sys.modules)\n"
        "sys.exit(str(found) if found else 0)"
    )
    process.run([sys.executable, "-c", code])


# --------------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("{", 2, "error: quantization: not JSON: "),
        ('{"kind": "int3"}', 2, "error: quantization.kind: found 'int3'; allowed: one of none, fp8, "),
        (
            '{"kind": "w4a16_awq", "group_size": 7}',
            2,
            "quantization.group_size: found 7; allowed: one of 32, 64, 128; choose one of them",
        ),
        ('{"kind": "fp8", "alpha": 1.0}', 2, "it belongs to kind: w8a8_sq, not to kind: fp8"),
        ('{"kind": "nvfp4"}', 3, "error: quantization.kind: nvfp4 is calibrated on a CUDA GPU only"),
        ('{"kind": "none"}', 2, "leaves nothing to quantize"),
    ],
)
def test_exit_codes(
    text: str, code: int, message: str, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model", str(good), "--out", str(tmp_path / "out"), "--quantization", text]
    assert main(argv) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("error: ")
    assert list(tmp_path.iterdir()) == []


def test_command(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = '{"kind": "none", "kv_cache": "fp8", "calibration": {"num_samples": 100}}'
    assert main(["--model", str(good), "--out", str(tmp_path / "out"), "--quantization", text]) == 0
    lines = capsys.readouterr().out.splitlines()
    progress = [found for line in lines if (found := process.parse_progress(line))]
    assert progress[0] == process.Progress("load", 0, 1)
    assert progress[-1] == process.Progress("check", 1, 1)
    said = [line for line in lines if not process.parse_progress(line)]
    warning = "calibration: 100 texts asked for (num_samples), builtin has 65; all are used"
    assert said[0] == f"warning: {warning}"
    assert said[1].startswith("16-bit weights, KV cache FP8: weights ")
    assert said[2].startswith("calibrated on 65 texts of builtin: ")
    assert read_report(tmp_path / "out").warnings == [warning]


# --------------------------------------------------------------------------- calibration data


def test_builtin_texts(good: Path) -> None:
    samples = calibration.read_samples("builtin")
    assert len(samples) >= 64
    texts = [
        sample.text or "\n".join(message["content"] for message in sample.messages or ())
        for sample in samples
    ]
    assert max(Counter(texts).values()) == 1
    chinese = sum(any("\u4e00" <= char <= "\u9fff" for char in text) for text in texts)
    code = sum("def " in text or "{\n" in text or "```" in text for text in texts)
    assert chinese >= 10
    assert code >= 10
    assert sum(sample.messages is not None for sample in samples) >= 30
    assert min(map(len, texts)) > 60


def test_every_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    lines = [
        '{"text": "fine"}',
        "not json",
        "",
        '{"text": 3}',
        '{"prompt": "x"}',
        '{"messages": []}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "user", "content": "fine"}]}',
        '{"text": "x", "messages": [{"role": "user", "content": "x"}]}',
    ]
    path.write_text("\n".join(lines))
    with pytest.raises(InputError) as caught:
        calibration.read_samples(str(path))
    assert [problem.line for problem in caught.value.problems] == [2, 4, 5, 6, 7, 9]
    assert f"{path}:2: not JSON" in str(caught.value)
    path.write_text("\n")
    with pytest.raises(InputError, match="no samples"):
        calibration.read_samples(str(path))


@pytest.mark.parametrize("max_tokens", [16, 50, 512, 100_000])
def test_packing_keeps_every_token_in_order_and_pads_nothing(good: Path, max_tokens: int) -> None:
    tokenizer = Tokenizer.load(good)
    samples = calibration.read_samples("builtin")[:5]
    wanted = Calibration(num_samples=5, max_tokens=max_tokens)
    rows = calibration.pack(samples, tokenizer, wanted, max_row_tokens=300)
    length = min(max_tokens, 300)
    assert all(len(row) == length for row in rows.rows[:-1])
    assert calibration.MIN_ROW_TOKENS <= len(rows.rows[-1]) <= length
    encoded = {
        tuple(tokenizer.encode(s.text) if s.text is not None else tokenizer.encode_chat(s.messages or ()))
        for s in samples
    }
    stream = tuple(token for row in rows.rows for token in row)
    dropped = sum(map(len, encoded)) - len(stream)
    assert 0 <= dropped < calibration.MIN_ROW_TOKENS
    while stream:
        text = next(text for text in encoded if stream[: len(text)] == text or text[: len(stream)] == stream)
        encoded.remove(text)
        stream = stream[len(text) :]
    for batch in calibration.batches(rows, max_batch_tokens=700):
        assert len({len(row) for row in batch}) == 1
        assert len(batch) == 1 or sum(map(len, batch)) <= 700
    assert [row for batch in calibration.batches(rows) for row in batch] == list(rows.rows)


def test_the_seed_decides(good: Path) -> None:
    tokenizer, samples = Tokenizer.load(good), calibration.read_samples("builtin")

    def digest(seed: int) -> str:
        wanted = Calibration(num_samples=8, seed=seed)
        return calibration.pack(samples, tokenizer, wanted, max_row_tokens=512).digest

    assert digest(1) == digest(1)
    assert len({digest(seed) for seed in range(5)}) == 5


def test_spread_takes_rows_from_everywhere() -> None:
    rows = calibration.Rows(tuple((n,) * 10 for n in range(100)), 7, "digest")
    assert [row[0] for row in calibration.spread(rows, 40).rows] == [0, 25, 50, 75]
    assert calibration.spread(rows, 10**6).rows == rows.rows
    assert len(calibration.spread(rows, 3).rows) == 1


def test_a_model_without_chat_template_reads_chats_as_text(good: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(good, source)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.load(source)
    samples = [calibration.Sample(None, ({"role": "user", "content": "one two three four five"},))]
    rows = calibration.pack(samples, tokenizer, Calibration(), max_row_tokens=512)
    assert tokenizer.decode(list(rows.rows[0])) == "one two three four five\n\n"


def test_too_little_text(good: Path) -> None:
    samples = [calibration.Sample("a", None)]
    with pytest.raises(InputError, match=r"gives 1 tokens, at least 8 are needed"):
        calibration.pack(samples, Tokenizer.load(good), Calibration(), max_row_tokens=512)
