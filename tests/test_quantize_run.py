"""A run of quantization from outside: interrupted, killed, short of memory, noisy."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file
from tiny import make_tiny_model

from trtspec import process
from trtspec.errors import InputError, MissingError
from trtspec.quantize import preflight, ptq, quantize, read_report
from trtspec.recipe import Quantization


def parse(value: dict[str, Any]) -> Quantization:
    adapter: TypeAdapter[Quantization] = TypeAdapter(Quantization)
    return adapter.validate_json(json.dumps({"calibration": {"num_samples": 3, "max_tokens": 256}} | value))


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source", dtype="bfloat16")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"NaN or infinity \(model.layers.1.mlp.up_proj.weight\)"):
        quantize(source, tmp_path / "out", parse({"kind": "fp8"}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_interruption_leaves_nothing(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source", dtype="bfloat16")

    def stop(step: str, done: int, total: int) -> None:
        if step == "export":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(source, tmp_path / "out", parse({"kind": "fp8"}), progress=stop)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_kill_in_the_middle_then_again(tmp_path: Path) -> None:
    source, out = make_tiny_model(tmp_path / "source", dtype="bfloat16"), tmp_path / "out"
    wanted = parse({"kind": "fp8", "kv_cache": "fp8"})
    argv = [sys.executable, "-m", "trtspec.quantize", "--model", str(source), "--out", str(out)]
    log = tmp_path / "log"
    child = process.start([*argv, "--quantization", wanted.model_dump_json()], log=log)
    deadline = time.monotonic() + 60
    while not (log.exists() and '"calibrate"' in log.read_text()):
        assert time.monotonic() < deadline
        assert child.poll() is None, log.read_text()
        time.sleep(0.005)
    child.kill_group()
    partials = list(tmp_path.glob("out.partial-*"))
    said: list[str] = []
    if out.exists():  # it was faster than the signal; nothing to clean up then
        shutil.rmtree(out)
    else:
        assert [path.name for path in partials] == [f"out.partial-{child.pid}"]
    quantize(source, out, wanted, say=said.append)
    assert read_report(out).quant_algo == "FP8"
    assert not list(tmp_path.glob("out.partial-*"))
    for partial in partials:
        assert said[0] == f"found {partial}: left by an interrupted run; removing it and starting over"


def test_noise_goes_to_the_log_and_warnings_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ptq.quiet(tmp_path / "log") as found:
        print("Inserted 56 quantizers")
        print("Loading weights", file=sys.stderr)
        warnings.warn("`torch_dtype` is deprecated! Use `dtype` instead!", stacklevel=1)
        logging.getLogger("modelopt.torch.export").warning("Large KV activations detected.")
        logging.getLogger("modelopt.torch.export").warning("Large KV activations detected.")
        warnings.warn("awq_lite: Disabling for x, quantizing with max calibration.", stacklevel=1)
    assert found == [
        "Large KV activations detected.",
        "awq_lite: Disabling for x, quantizing with max calibration.",
    ]
    log = (tmp_path / "log").read_text()
    assert all(text in log for text in ("Inserted 56", "Loading weights", "torch_dtype", "Large KV"))
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_memory_decides_the_loading_dtype(tmp_path: Path) -> None:
    source, wanted = make_tiny_model(tmp_path / "source", dtype="bfloat16"), parse({"kind": "fp8"})
    found = preflight.check(source, tmp_path / "out", wanted, "cpu")
    wide = preflight.estimate_memory_bytes(found.spec, wanted, found.rows, 4)
    narrow = preflight.estimate_memory_bytes(found.spec, wanted, found.rows, 2)
    choose = preflight.choose_load_dtype
    assert choose(found.spec, wanted, found.rows, None) == ("float32", [])
    assert choose(found.spec, wanted, found.rows, wide) == ("float32", [])
    dtype, notes = choose(found.spec, wanted, found.rows, wide - 1)
    assert dtype == "bfloat16"
    assert "float32 would need" in notes[0]
    with pytest.raises(MissingError, match="of memory are needed"):
        choose(found.spec, wanted, found.rows, narrow - 1)
