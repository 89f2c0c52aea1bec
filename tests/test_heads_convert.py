"""``draft convert``: there and back the same bits, each layout as its tool reads it, refusals by name."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from head_layouts import (
    BASE,
    DRAFTED,
    HIDDEN,
    LAYOUTS,
    VOCAB,
    Config,
    Tensors,
    draft_ids,
    make_target,
    write_layout,
)
from safetensors.torch import load_file
from torch import Tensor

from trtspec.cli import main
from trtspec.draft.convert import Made, plan_conversion, write_conversion
from trtspec.embedded.eagle_heads import load_eagle
from trtspec.embedded.heads import load_medusa
from trtspec.embedded.weights import load_model
from trtspec.errors import InputError, MissingError
from trtspec.heads_check import Target, check_heads, read_target
from trtspec.heads_layout import RECORD, Layout

WRITABLE: dict[str, tuple[Layout, ...]] = {
    "medusa": ("original", "tensorrt"),
    "eagle": ("original", "tensorrt", "speculators"),
    "eagle3": ("original", "tensorrt", "modelopt", "speculators", "specforge"),
}
PAIRS = [
    (f"{kind}_{one}", other)
    for kind, layouts in WRITABLE.items()
    for one, other in itertools.product(layouts, repeat=2)
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return read_target(make_target(tmp_path_factory.mktemp("model") / "tiny-chat"))


def convert(folder: Path, layout: Layout, target: Target | None, out: Path) -> Path:
    write_conversion(plan_conversion(folder, layout, target), out)
    return out


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """By the libraries that the tools use, not by our reader."""
    found: dict[str, Tensor] = {}
    for path in folder.iterdir():
        if path.suffix == ".safetensors":
            found |= load_file(path)
        elif path.suffix in (".pt", ".bin"):
            found |= torch.load(path, weights_only=True)
    return found


def same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        one.dtype == right[name].dtype
        and one.shape == right[name].shape
        and torch.equal(one.contiguous().view(torch.uint8), right[name].contiguous().view(torch.uint8))
        for name, one in left.items()
    )


# --------------------------------------------------------------------------- there and back


@pytest.mark.parametrize(("name", "other"), PAIRS)
def test_there_and_back_the_same_bits(tmp_path: Path, name: str, other: Layout, target: Target) -> None:
    kind, own = name.split("_")
    first = write_layout(tmp_path / "first", name)
    middle = convert(first, other, target, tmp_path / "middle")
    found = check_heads(middle, target)
    assert (found.problems, found.warnings) == ((), ())
    assert found.heads is not None
    assert (found.heads.kind, found.heads.layout) == (kind, other)
    last = convert(middle, own, target, tmp_path / "last")  # type: ignore[arg-type]
    assert same_bits(tensors_of(first), tensors_of(last))
    assert {path.name for path in first.iterdir()} == {path.name for path in last.iterdir()}
    again = convert(last, other, target, tmp_path / "again")
    assert same_bits(tensors_of(middle), tensors_of(again))
    assert json.loads((middle / "config.json").read_text()) == json.loads((again / "config.json").read_text())


def test_the_comparison_sees_a_single_bit() -> None:
    left = {"a": torch.ones(4, 4, dtype=torch.bfloat16), "d2t": torch.arange(4)}
    right = {name: value.clone() for name, value in left.items()}
    assert same_bits(left, right)
    right["a"].view(torch.int16)[2, 1] ^= 1
    assert not same_bits(left, right)
    assert not same_bits(left, {"a": left["a"]})
    assert not same_bits({"a": torch.tensor([0.0])}, {"a": torch.tensor([-0.0])})
    assert not same_bits({"a": torch.zeros(2, 3)}, {"a": torch.zeros(3, 2)})


@pytest.mark.parametrize(("name", "other"), PAIRS)
def test_a_conversion_is_what_the_tool_itself_writes(
    tmp_path: Path, name: str, other: Layout, target: Target
) -> None:
    """The same heads, written by head_layouts.py in the other layout: names, dtypes, bits."""
    kind = name.split("_")[0]
    made = tensors_of(convert(write_layout(tmp_path / "first", name), other, target, tmp_path / "made"))
    wanted = tensors_of(write_layout(tmp_path / "wanted", f"{kind}_{other}"))
    for extra in ("embed_tokens.weight",):  # speculators write the target's, which others leave to it
        made.pop(extra, None)
        wanted.pop(extra, None)
    assert same_bits(made, wanted)


def test_medusa_heads_come_out_of_modelopts_whole_model(tmp_path: Path, target: Target) -> None:
    wanted = tensors_of(write_layout(tmp_path / "wanted", "medusa_tensorrt"))
    for name in ("medusa_modelopt", "medusa_modelopt_export"):
        out = convert(write_layout(tmp_path / name, name), "tensorrt", target, tmp_path / f"{name}-out")
        assert same_bits(tensors_of(out), wanted)
        assert json.loads((out / "config.json").read_text()) == {
            "medusa_num_heads": 3,
            "medusa_num_layers": 1,
            "base_model_name_or_path": str(target.folder),
        }
        assert check_heads(out, target).runs_on == ("embedded", "tensorrt")


# --------------------------------------------------------------------------- what each tool looks for


def test_configs_say_what_each_tool_reads(tmp_path: Path, target: Target) -> None:
    first = write_layout(tmp_path / "first", "eagle3_speculators")
    configs = {
        layout: json.loads((convert(first, layout, target, tmp_path / layout) / "config.json").read_text())
        for layout in WRITABLE["eagle3"]
    }
    # TensorRT-LLM takes it for EAGLE-3 by draft_vocab_size and puts EAGLE3 before the architecture.
    assert configs["tensorrt"]["architectures"] == ["LlamaForCausalLM"]
    assert configs["tensorrt"]["torch_dtype"] == "bfloat16"
    assert configs["modelopt"]["architectures"] == ["LlamaForCausalLMEagle3"]
    assert configs["modelopt"]["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert "eagle_config" not in configs["original"]
    for layout in ("tensorrt", "original", "modelopt", "specforge"):
        assert configs[layout]["draft_vocab_size"] == DRAFTED
        assert configs[layout]["hidden_size"] == HIDDEN
        assert configs[layout]["rope_theta"] == 50000.0
        assert configs[layout]["base_model_name_or_path"] == BASE
        assert (
            not {"speculators_config", "transformer_layer_config", "speculators_model_type"}
            & configs[layout].keys()
        )
    back = configs["speculators"]
    assert back["speculators_config"]["verifier"]["name_or_path"] == BASE
    assert back["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert back["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert back["transformer_layer_config"]["vocab_size"] == VOCAB
    assert "draft_vocab_size" not in back["transformer_layer_config"]


@pytest.mark.parametrize("name", ["eagle_speculators", "eagle3_speculators", "eagle3_original"])
def test_the_engine_loads_the_same_head_from_both(tmp_path: Path, name: str, target: Target) -> None:
    model = load_model(target.folder, target.spec, dtype=torch.float32, device=torch.device("cpu"))
    kind: Any = name.split("_")[0]
    first = write_layout(tmp_path / "first", name)
    one = load_eagle(first, kind, model)
    other = load_eagle(convert(first, "tensorrt", target, tmp_path / "out"), kind, model)
    x = torch.randn(3, 2 * HIDDEN if kind == "eagle" else 3 * HIDDEN)
    assert torch.equal(one.fc(x), other.fc(x))
    assert (one.hidden_layers, one.spec) == (other.hidden_layers, other.spec)
    if kind == "eagle3":
        assert one.token_ids is not None
        assert other.token_ids is not None
        assert torch.equal(one.token_ids, draft_ids())
        assert torch.equal(other.token_ids, draft_ids())


# --------------------------------------------------------------------------- what is added, what is refused


def test_heads_that_use_the_targets_projection_get_a_copy(tmp_path: Path, target: Target) -> None:
    def bare(tensors: Tensors, config: Config) -> None:
        for name in [name for name in tensors if name.endswith(("1.weight", "linear.bias"))]:
            del tensors[name]

    folder = write_layout(tmp_path / "bare", "medusa_tensorrt", bare)
    with pytest.raises(InputError, match=r"use the target's output projection.*name the target: --model DIR"):
        plan_conversion(folder, "tensorrt", None)
    out = convert(folder, "tensorrt", target, tmp_path / "out")
    made = tensors_of(out)
    output = load_file(target.folder / "model.safetensors")["lm_head.weight"]
    for head in range(3):
        assert torch.equal(made[f"{head}.1.weight"], output)
        assert not made[f"{head}.0.linear.bias"].any()
    assert check_heads(out, target).runs_on == ("embedded", "tensorrt")
    model = load_model(target.folder, target.spec, dtype=torch.float32, device=torch.device("cpu"))
    x = torch.randn(2, HIDDEN)
    left, right = (load_medusa(path, model) for path in (folder, out))
    for one, other in zip(left.heads, right.heads, strict=True):
        torch.testing.assert_close(one.lm_head(x), other.lm_head(x))


def test_a_head_that_drafts_everything_gets_and_loses_its_maps(tmp_path: Path, target: Target) -> None:
    def everything(tensors: Tensors, config: Config) -> None:
        tensors["lm_head.weight"] = torch.zeros(VOCAB, HIDDEN, dtype=torch.bfloat16)
        tensors.pop("d2t")
        config["draft_vocab_size"] = VOCAB

    first = write_layout(tmp_path / "first", "eagle3_modelopt", everything)
    out = convert(first, "original", target, tmp_path / "out")
    made = tensors_of(out)
    assert not made["d2t"].any()
    assert made["t2d"].all()
    assert same_bits(tensors_of(convert(out, "modelopt", target, tmp_path / "back")), tensors_of(first))


REFUSED = [
    ("medusa_tensorrt", "modelopt", {}, "ModelOpt keeps Medusa heads inside the whole model"),
    ("medusa_tensorrt", "speculators", {}, "no Medusa heads that vLLM loads"),
    ("medusa_tensorrt", "specforge", {}, "SpecForge has no Medusa heads"),
    ("eagle_tensorrt", "modelopt", {}, "ModelOpt 0.47 has no EAGLE-1/2"),
    ("eagle_tensorrt", "specforge", {}, "SpecForge has no EAGLE-1/2"),
    ("eagle3_speculators", "tensorrt", {"norm_before_residual": True}, "norm_before_residual: cannot be"),
    (
        "eagle3_speculators", "original", {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
        "always takes the layers 2, N / 2 and N - 3",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "layout", "config", "message"), REFUSED)
def test_what_a_layout_cannot_say_is_refused(
    tmp_path: Path, name: str, layout: Layout, config: Config, message: str, target: Target
) -> None:
    folder = write_layout(tmp_path / "heads", name, lambda tensors, found: found.update(config))
    with pytest.raises(InputError) as error:
        plan_conversion(folder, layout, target)
    assert message in str(error.value)
    assert f"cannot be written in the layout {layout}" in str(error.value)


def test_layers_are_not_taken_for_the_default_ones_unseen(tmp_path: Path) -> None:
    folder = write_layout(tmp_path / "heads", "eagle3_modelopt")
    with pytest.raises(InputError, match="--model tells whether these are the default layers"):
        plan_conversion(folder, "original", None)
    with pytest.raises(InputError, match="no base model is named"):
        plan_conversion(folder, "speculators", None)


def test_heads_that_are_damaged_are_not_converted(tmp_path: Path, target: Target) -> None:
    def damage(tensors: Tensors, config: Config) -> None:
        tensors["d2t"] = tensors["d2t"] + VOCAB
        tensors["extra"] = torch.zeros(1)

    with pytest.raises(InputError) as error:
        plan_conversion(write_layout(tmp_path, "eagle3_modelopt", damage), "original", target)
    assert "map outside" in str(error.value)
    assert "extra: no part" in str(error.value)


# --------------------------------------------------------------------------- writing


class Unreadable(Made):
    def read(self) -> bytes:
        raise OSError(28, "No space left on device")


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, target: Target) -> None:
    folder = write_layout(tmp_path / "heads", "eagle3_original")
    conversion = plan_conversion(folder, "tensorrt", target)
    broken = {**conversion.tensors, "norm.weight": Unreadable("BF16", (HIDDEN,), bytes(2 * HIDDEN))}
    with pytest.raises(MissingError, match="no space left"):
        write_conversion(replace(conversion, tensors=broken), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["heads"]


def test_the_record_of_the_training_goes_with_the_heads(tmp_path: Path, target: Target) -> None:
    folder = write_layout(tmp_path / "heads", "eagle3_modelopt")
    (folder / RECORD).write_text(json.dumps({"schema": "trtspec.heads/1", "kind": "eagle3", "seed": 7}))
    (folder / "LICENSE").write_text("as it is")
    out = convert(folder, "tensorrt", target, tmp_path / "out")
    record = json.loads((out / RECORD).read_text())
    assert (record["seed"], record["converted_from"]["layout"]) == (7, "modelopt")
    assert (out / "LICENSE").read_text() == "as it is"
    assert check_heads(out, target).problems == ()
    (out / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert "model.safetensors was changed" in str(check_heads(out, target).problems)


def test_the_command(tmp_path: Path, target: Target, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = write_layout(tmp_path / "heads", "eagle3_original"), tmp_path / "out"
    arguments = ["draft", "convert", str(folder), "-o", str(out), "--to", "modelopt"]
    assert main([*arguments, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert not out.exists()
    assert said.startswith(
        f"would write {out}: config.json and model.safetensors, layout modelopt (14 tensors"
    )
    assert "  midlayer.mlp.up_proj.weight -> layers.0.mlp.up_proj.weight" in said
    assert "  left out t2d" in said
    assert main(arguments) == 0
    capsys.readouterr()
    assert main(arguments) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert main([*arguments, "--force", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["trtspec"]["schema"] == "trtspec.draft-convert/1"
    assert (value["from"], value["to"], value["left_out"]) == ("original", "modelopt", ["t2d"])
    assert main(["draft", "check", str(out), "--model", str(target.folder)]) == 0


def test_every_layout_is_written_or_refused() -> None:
    """No layout of head_layouts.py is forgotten here."""
    own = {f"{kind}_{layout}" for kind, layouts in WRITABLE.items() for layout in layouts}
    assert own | {"medusa_modelopt", "medusa_modelopt_export"} == set(LAYOUTS)
