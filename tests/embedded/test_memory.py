"""Opening an engine and generating takes its weights once, its KV cache and little more."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny_quantized import GROUP, quantize_weight

from trtspec.model_source import cache_folder

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc/self/status"),
]

ROOM_BYTES = 300 * 10**6

# Prints the growth of the peak over the imports, and what the engine has to hold: KV, and the tensors that
# its linears, norms and tables keep. "waste" holds half a gigabyte more, as a careless loader would.
CHILD = """
import json, sys
import torch
from trtspec.embedded.opening import open_embedded
from trtspec.engine import Request, generate
from trtspec.recipe import Recipe
from pathlib import Path

def peak():  # of this program; ru_maxrss begins with what the parent held
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

recipe = Recipe.model_validate({
    "version": 1, "name": "a", "model": {"source": sys.argv[1]},
    "backend": {"kind": "embedded", "threads": 1, "dequantized_copy": "copy" in sys.argv[2]},
    "limits": {"max_batch_size": 8, "max_input_tokens": 600, "max_seq_tokens": 640, "max_num_tokens": 512},
})
before = peak()
wasted = torch.ones(2**29, dtype=torch.uint8) if "waste" in sys.argv[2] else None
engine = open_embedded(recipe, Path(sys.argv[1]))
generate(engine, [Request("r", tuple(range(500)), 4)])

def tensors(holder, seen):
    for value in vars(holder).values() if hasattr(holder, "__dict__") else holder:
        if isinstance(value, torch.Tensor):
            storage = id(value) if value.is_mkldnn else value.data_ptr()  # oneDNN's have no address
            size = value.numel() * value.element_size()
            seen[storage] = max(size, seen.get(storage, 0))
        elif isinstance(value, (tuple, list)) or type(value).__module__.startswith("trtspec.embedded"):
            tensors(value, seen)
    return seen

held = sum(tensors(engine._model, {}).values())
kv = engine._store._all.numel() * engine._store._all.element_size()
print(json.dumps({"peak": peak() - before, "held": held, "kv": kv}))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sample model in bfloat16 and with 4-bit weights, rounded to nearest."""
    source = cache_folder() / "models" / "smollm2-135m-instruct"
    if not source.is_dir():
        if os.environ.get("TRTSPEC_REQUIRE_MODELS"):
            pytest.fail(f"{source} is missing; run: trtspec fetch")
        pytest.skip(f"{source} is missing; run: trtspec fetch")
    folder = tmp_path_factory.mktemp("w4")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)
    stored = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = weight
            continue
        for suffix, tensor in quantize_weight(weight, "W4A16_AWQ")[0].items():
            stored[f"{name.removesuffix('.weight')}.{suffix}"] = tensor
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    quantization = {
        "quant_algo": "W4A16_AWQ",
        "kv_cache_quant_algo": None,
        "exclude_modules": ["lm_head", "model.embed_tokens"],
        "group_size": GROUP,
        "has_zero_point": False,
        "pre_quant_scale": True,
    }
    report = {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": quantization}
    (folder / "hf_quant_config.json").write_text(json.dumps(report))
    return {"bfloat16": source, "w4a16": folder}


def measured(folder: Path, how: str) -> dict[str, int]:
    run = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), how], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, int] = json.loads(run.stdout)
    return found


@pytest.mark.parametrize(
    ("weights", "how", "held_mb"),
    [("bfloat16", "", 326), ("w4a16", "", 247), ("w4a16", "copy", 407)],
)
def test_memory_peaks_near_what_the_engine_holds(
    folders: dict[str, Path], weights: str, how: str, held_mb: int
) -> None:
    found = measured(folders[weights], how)
    # 135M weights once, the tied head packed beside its embedding, 4-bit scales twice in groups of 32.
    assert found["held"] / 1e6 == pytest.approx(held_mb, rel=0.1)
    assert found["peak"] < found["held"] + found["kv"] + ROOM_BYTES


def test_half_a_gigabyte_more_would_be_noticed(folders: dict[str, Path]) -> None:
    found = measured(folders["w4a16"], "waste")
    assert found["peak"] > found["held"] + found["kv"] + ROOM_BYTES
