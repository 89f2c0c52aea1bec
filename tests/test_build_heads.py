"""Trained heads built into an engine: checked against the target before any work, linked, sealed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from head_layouts import make_target, write_layout
from safetensors.torch import save_file
from tiny import make_tiny_model

from trtspec import artifact
from trtspec.backends import open_engine
from trtspec.build import Built, build
from trtspec.draft.convert import plan_conversion, write_conversion
from trtspec.engine import Request, generate
from trtspec.errors import InputError
from trtspec.heads_check import read_target
from trtspec.plan_inputs import find_heads, model_files
from trtspec.recipe_file import load_recipe

VOCAB, HIDDEN, LAYERS = 320, 64, 4
RECIPE = """\
version: 1
name: tiny
model: {source: model}
backend: {kind: embedded, dtype: float32}
speculation: SPECULATION
limits: {max_batch_size: 4, max_input_tokens: 128, max_seq_tokens: 256, max_num_tokens: 300}
"""
SPECULATION = {
    "medusa": "{kind: medusa, heads: heads}",
    "medusa with choices": "{kind: medusa, heads: heads, choices: [[0], [1], [0, 0]]}",
    "eagle": "{kind: eagle, heads: heads, depth: 3, top_k: 2, num_draft_tokens: 5}",
    "eagle with choices": "{kind: eagle, heads: heads, depth: 2, choices: [[0], [1], [0, 0]]}",
    "eagle3": "{kind: eagle3, heads: heads, num_draft_tokens: 3}",
    "eagle3 with a tree": "{kind: eagle3, heads: heads, num_draft_tokens: 6, top_k: 2, depth: 3}",
}


def write_heads(folder: Path, kind: str) -> None:
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(3)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    if kind == "medusa":
        config: dict[str, Any] = {"medusa_num_heads": 2, "medusa_num_layers": 1}
        tensors = {f"{head}.0.linear.weight": weight(HIDDEN, HIDDEN) for head in range(2)}
    else:
        third = kind == "eagle3"
        config = {
            "hidden_size": HIDDEN, "intermediate_size": 96, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB, "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "num_hidden_layers": 1,
        }  # fmt: skip
        p, width = "layers.0.", 2 * HIDDEN if third else HIDDEN
        tensors = {
            f"{p}self_attn.q_proj.weight": weight(64, width),
            f"{p}self_attn.k_proj.weight": weight(32, width),
            f"{p}self_attn.v_proj.weight": weight(32, width),
            f"{p}self_attn.o_proj.weight": weight(HIDDEN, 64),
            f"{p}mlp.gate_proj.weight": weight(96, HIDDEN),
            f"{p}mlp.up_proj.weight": weight(96, HIDDEN),
            f"{p}mlp.down_proj.weight": weight(HIDDEN, 96),
            f"{p}post_attention_layernorm.weight": torch.ones(HIDDEN),
            "fc.weight": weight(HIDDEN, (3 if third else 2) * HIDDEN),
        }
        if third:
            config |= {
                "draft_vocab_size": 200,
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
            }
            tensors |= {
                f"{p}input_layernorm.weight": torch.ones(HIDDEN),
                f"{p}hidden_norm.weight": torch.ones(HIDDEN),
                "norm.weight": torch.ones(HIDDEN),
                "lm_head.weight": weight(200, HIDDEN),
                "d2t": torch.arange(200) // 2,
            }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "README.md").write_text("not needed by an engine")
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tiny_model(tmp_path / "model", hidden=HIDDEN, layers=LAYERS, vocab=VOCAB)
    return tmp_path


def run(folder: Path, speculation: str) -> tuple[Built, list[str]]:
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.replace("SPECULATION", speculation))
    said: list[str] = []
    return build(path, folder / "engines", say=said.append), said


@pytest.mark.parametrize("name", list(SPECULATION))
def test_an_engine_drafts_with_its_heads(folder: Path, name: str) -> None:
    write_heads(folder / "heads", name.split()[0])
    built, _ = run(folder, SPECULATION[name])
    assert [step.name for step in built.manifest.steps] == ["import", "import-heads", "check"]
    opened = artifact.open_artifact(built.folder, check_hashes=True)
    assert opened.heads_dir == built.folder / "heads"
    assert sorted(path.name for path in opened.heads_dir.iterdir()) == ["config.json", "model.safetensors"]
    linked = (folder / "heads" / "model.safetensors").stat().st_ino
    assert (opened.heads_dir / "model.safetensors").stat().st_ino == linked
    requests = [Request(f"r{at}", (at + 3, 4, 5), 20) for at in range(4)]
    drafting, plain = open_engine(opened), open_engine(opened, "no_speculation")
    for found, wanted in zip(generate(drafting, requests), generate(plain, requests), strict=True):
        assert found.tokens == wanted.tokens
    assert drafting.stats().drafted_tokens > 30
    assert plain.stats().drafted_tokens == 0
    assert run(folder, SPECULATION[name])[0].up_to_date


def test_changed_heads_are_linked_again(folder: Path) -> None:
    write_heads(folder / "heads", "medusa")
    first, _ = run(folder, SPECULATION["medusa"])
    weights = folder / "heads" / "model.safetensors"
    weights.unlink()
    save_file({f"{head}.0.linear.weight": torch.ones(HIDDEN, HIDDEN) for head in range(2)}, weights)
    second, _ = run(folder, SPECULATION["medusa"])
    assert not second.up_to_date
    assert first.manifest.steps[1].digest != second.manifest.steps[1].digest


def refused(folder: Path, speculation: str, change: Callable[[Path], None]) -> str:
    change(folder / "heads")
    with pytest.raises(InputError) as error:
        run(folder, speculation)
    assert not (folder / "engines" / "tiny").exists()
    return str(error.value)


def test_heads_that_do_not_fit_are_refused_before_any_work(folder: Path) -> None:
    write_heads(folder / "heads", "eagle3")

    def another_target(heads: Path) -> None:
        config = json.loads((heads / "config.json").read_text())
        (heads / "config.json").write_text(
            json.dumps(config | {"vocab_size": VOCAB + 8, "hidden_act": "gelu"})
        )

    told = refused(folder, "{kind: eagle3, heads: heads, quantization: fp8}", another_target)
    assert "vocab_size: 328, the target has 320" in told
    assert "hidden_act: 'gelu' is not supported" in told
    assert (
        "speculation.quantization: fp8: the embedded engine runs trained heads in the backend's dtype" in told
    )
    told = refused(folder, "{kind: medusa, heads: heads}", lambda heads: None)
    assert "these are eagle3 heads; write speculation kind: eagle3" in told
    write_heads(folder / "heads", "medusa")
    told = refused(
        folder, "{kind: medusa, heads: heads, choices: [[0], [0, 0], [0, 0, 0]]}", lambda heads: None
    )
    assert "[0, 0, 0] is 3 deep; the heads draft 2 tokens" in told


def test_what_draft_check_finds_stops_a_build(folder: Path) -> None:
    """Settings that load without an error and only lower the acceptance: the rope, the recorded target."""
    write_heads(folder / "heads", "eagle3")

    def yarn(heads: Path) -> None:
        config = json.loads((heads / "config.json").read_text())
        config["rope_scaling"] = {"rope_type": "yarn", "factor": 32.0}
        (heads / "config.json").write_text(json.dumps(config))
        (heads / "trtspec_heads.json").write_text(json.dumps({"base_model": "m", "base_digest": "0" * 64}))

    told = refused(folder, SPECULATION["eagle3"], yarn)
    assert "rope_scaling: yarn of factor 32.0, the target has none" in told
    assert "base_digest: the heads were trained for 'm', which has other files" in told


def test_a_build_passes_on_the_warnings(folder: Path) -> None:
    write_heads(folder / "heads", "medusa")
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "someone/other"}
    (folder / "heads" / "config.json").write_text(json.dumps(config))
    built, said = run(folder, SPECULATION["medusa"])
    assert not built.up_to_date
    assert [line for line in said if "for 'someone/other'; the target is model" in line]


PYTORCH = """\
version: 1
name: tiny-gpu
model: {source: model}
backend: {kind: pytorch, dtype: bfloat16}
speculation: {kind: eagle3, heads: heads, num_draft_tokens: 3}
limits: {max_batch_size: 4, max_input_tokens: 128, max_seq_tokens: 256, max_num_tokens: 300}
"""


def test_heads_for_tensorrt_llm_are_held_against_what_it_reads(folder: Path) -> None:
    """Layout and target at once, before anything is hashed or rendered."""
    write_layout(
        folder / "heads", "eagle3_speculators", lambda tensors, config: config.update(draft_vocab_size=9)
    )
    make_target(folder / "model")
    (folder / "recipe.yaml").write_text(PYTORCH)
    recipe = load_recipe(folder / "recipe.yaml")
    source = artifact.hash_source(folder / "model", model_files(folder / "model"))
    said: list[str] = []
    with pytest.raises(InputError) as error:
        find_heads(recipe, folder, folder / "model", source, said.append)
    assert "[200], [9] is needed" in str(error.value)
    assert "trtspec draft convert --to tensorrt" in str(error.value)
    assert said == []
    write_layout(folder / "heads", "eagle3_speculators")
    target = read_target(folder / "model")
    write_conversion(plan_conversion(folder / "heads", "tensorrt", target), folder / "heads", replace=True)
    found = find_heads(recipe, folder, folder / "model", source, said.append)
    assert found is not None
    assert sorted(found.source.files) == ["config.json", "model.safetensors"]
