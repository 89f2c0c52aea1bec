"""``draft check``: a good folder of every layout passes, every planted mismatch is named, nothing runs.

The folders are written as the tools write them (head_layouts.py); each mismatch is planted in each layout
that can have it. One file, because good folders and mismatches are
the same table of layouts.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from head_layouts import BASE, DRAFTED, HIDDEN, LAYOUTS, VOCAB, Config, Tensors, make_target, write_layout
from safetensors.torch import save_file

from trtspec.artifact import file_sha256
from trtspec.cli import main
from trtspec.draft.convert import plan_conversion
from trtspec.errors import InputError, Problem
from trtspec.heads_check import HeadsCheck, Target, check_heads, read_target
from trtspec.heads_layout import RECORD

Change = Callable[[Tensors, Config], None]
AUX = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return read_target(make_target(tmp_path_factory.mktemp("model") / "tiny-chat"))


def told(problems: tuple[Problem, ...]) -> str:
    return "\n".join(str(problem) for problem in problems)


# --------------------------------------------------------------------------- good folders

RUNS_ON = {
    "medusa_original": ("embedded", "tensorrt"),
    "medusa_tensorrt": ("embedded", "tensorrt"),
    "medusa_modelopt": ("embedded",),
    "medusa_modelopt_export": ("embedded",),
    "eagle_original": ("embedded", "tensorrt"),
    "eagle_tensorrt": ("embedded", "tensorrt"),
    "eagle_speculators": ("embedded",),
    "eagle3_original": ("embedded", "pytorch"),
    "eagle3_tensorrt": ("embedded", "pytorch"),
    "eagle3_modelopt": ("embedded", "pytorch"),
    "eagle3_specforge": ("embedded", "pytorch"),
    "eagle3_speculators": ("embedded",),
}


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_a_good_folder_of_every_layout_passes(tmp_path: Path, name: str, target: Target) -> None:
    found = check_heads(write_layout(tmp_path / "heads", name), target)
    assert (found.problems, found.warnings) == ((), ())
    kind, layout = name.split("_")[:2]
    assert found.heads is not None
    assert (found.heads.kind, found.heads.layout) == (kind, layout)
    assert found.runs_on == RUNS_ON[name]
    alone = check_heads(tmp_path / "heads", None)
    assert (alone.problems, alone.warnings) == ((), ())


def test_the_base_models_own_tensors_are_no_part_of_the_heads(tmp_path: Path) -> None:
    found = check_heads(write_layout(tmp_path, "medusa_modelopt"), None).heads
    assert found is not None
    assert sorted(found.tensors) == sorted(
        f"{head}.{name}"
        for head in range(3)
        for name in ("0.linear.bias", "0.linear.weight", "lm_head.weight")
    )


# --------------------------------------------------------------------------- planted mismatches


def _layer(config: Config) -> Config:
    """Where a layout keeps the sizes of the decoder layer."""
    inner: Config = config.get("transformer_layer_config", config)
    return inner


def _set(**values: Any) -> Change:
    def change(tensors: Tensors, config: Config) -> None:
        _layer(config).update(values)

    return change


def _without(key: str) -> Change:
    def change(tensors: Tensors, config: Config) -> None:
        del _layer(config)[key]

    return change


def _tensor(ending: str, value: Callable[[torch.Tensor], torch.Tensor | None]) -> Change:
    def change(tensors: Tensors, config: Config) -> None:
        name = next(name for name in tensors if name.endswith(ending))
        new = value(tensors.pop(name))
        if new is not None:
            tensors[name] = new

    return change


def _narrow(tensors: Tensors, config: Config) -> None:
    """Heads of a target of half the hidden size, as their own config.json says too."""
    for name, value in tensors.items():
        if name not in ("d2t", "t2d"):
            tensors[name] = value[tuple(slice(0, max(1, size // 2)) for size in value.shape)].clone()
    for key in ("hidden_size", "intermediate_size"):
        if key in _layer(config):
            _layer(config)[key] //= 2


def _no_second_head(tensors: Tensors, config: Config) -> None:
    for name in [name for name in tensors if name.startswith(("1.", "medusa_heads.1."))]:
        del tensors[name]


def _unchanged(tensors: Tensors, config: Config) -> None:
    pass


def _top(**values: Any) -> Change:
    return lambda tensors, config: config.update(values)


def _shared_token(ids: torch.Tensor) -> torch.Tensor:
    targets = ids + torch.arange(DRAFTED)
    targets[1] = targets[0]
    return targets - torch.arange(DRAFTED)


def _other_mask(mask: torch.Tensor) -> torch.Tensor:
    return mask.roll(1)


EAGLES = tuple(name for name in LAYOUTS if name.startswith("eagle"))
EAGLE3 = tuple(name for name in LAYOUTS if name.startswith("eagle3"))
MEDUSA = tuple(name for name in LAYOUTS if name.startswith("medusa"))
MEDUSA_OWN = ("medusa_original", "medusa_tensorrt")
WITH_MASK = ("eagle3_original", "eagle3_specforge", "eagle3_speculators")

MISMATCHES: dict[str, tuple[tuple[str, ...], Change, str]] = {
    "number of heads": (MEDUSA_OWN, _set(medusa_num_heads=5), "5 heads, the weights have 3"),
    "a head is missing": (MEDUSA, _no_second_head, "heads [0, 2]; they must be numbered from 0 without gaps"),
    "number of blocks": (MEDUSA_OWN, _set(medusa_num_layers=2), "2 layers, head 0 has 1"),
    "number of layers": (EAGLES, _set(num_hidden_layers=2), "2 layers; heads of one layer"),
    "hidden size, Medusa": (MEDUSA, _narrow, f"[{HIDDEN}, {HIDDEN}] is needed"),
    "hidden size, EAGLE": (EAGLES, _set(hidden_size=HIDDEN // 2), "is needed; heads work only with"),
    "vocabulary, Medusa": (
        MEDUSA,
        _tensor("2.1.weight", lambda value: value[:-8].clone()),
        f"shape [{VOCAB - 8}, {HIDDEN}]",
    ),
    "told hidden size": (MEDUSA, _set(hidden_size=HIDDEN + 8), f"hidden_size: {HIDDEN + 8}, the target has"),
    "told vocabulary": (MEDUSA, _set(vocab_size=VOCAB + 8), f"vocab_size: {VOCAB + 8}, the target has"),
    "vocabulary, EAGLE": (EAGLES, _set(vocab_size=VOCAB + 8), f"vocab_size: {VOCAB + 8}, the target"),
    "draft vocabulary": (
        EAGLE3, _top(draft_vocab_size=DRAFTED - 1), f"[{DRAFTED}], [{DRAFTED - 1}] is needed",
    ),
    "map outside": (EAGLE3, _tensor("d2t", lambda ids: ids + VOCAB), "map outside the vocabulary of 320"),
    "map twice": (EAGLE3, _tensor("d2t", _shared_token), "1 draft tokens share a target token"),
    "map of floats": (EAGLE3, _tensor("d2t", lambda ids: ids.float()), "F32 values; allowed: I64, I32"),
    "no map": (EAGLE3, _tensor("d2t", lambda ids: None), f"d2t: missing; [{DRAFTED}] is needed"),
    "two maps": (WITH_MASK, _tensor("t2d", _other_mask), "the maps are of two different heads"),
    "dtype": (tuple(LAYOUTS), _tensor("linear.weight", lambda v: v.to(torch.int8)), "I8 values; allowed"),
    "dtype, EAGLE": (EAGLES, _tensor("up_proj.weight", lambda v: v.to(torch.int8)), "I8 values; allowed"),
    "quantized": (EAGLES, _set(quantization_config={"quant_algo": "FP8"}), "quantized heads are not read"),
    "rope base": (EAGLES, _set(rope_theta=10000.0), "rope_theta: 10000, the target has 50000"),
    "no rope base": (EAGLES, _without("rope_theta"), "missing, which means 10000; the target has 50000"),
    "yarn": (
        EAGLES, _set(rope_scaling={"rope_type": "yarn", "factor": 32.0}),
        "yarn of factor 32.0, the target has none; ModelOpt's exporter writes it unless told otherwise",
    ),
    "rope scaling": (
        EAGLES, _set(rope_scaling={"type": "linear", "factor": 2.0}), "linear of factor 2.0, the target",
    ),
    "fused inputs": (EAGLES, _tensor("fc.weight", lambda v: v[:, 8:].clone()), f"shape [{HIDDEN}, "),
    "inner layers": (
        ("eagle3_speculators",), _top(eagle_aux_hidden_state_layer_ids=[2, 4, 9]),
        "the target of 8 layers has 0 .. 7",
    ),
    "a tensor too many": (
        tuple(LAYOUTS), lambda tensors, config: tensors.update(extra=torch.zeros(2)), "extra: no part of",
    ),
}  # fmt: skip
CASES = [
    pytest.param(layout, change, message, id=f"{layout}: {what}")
    for what, (layouts, change, message) in MISMATCHES.items()
    for layout in layouts
    if not (what == "dtype" and layout not in MEDUSA)
    and not (what == "vocabulary, Medusa" and "export" in layout)
]


@pytest.mark.parametrize(("layout", "change", "message"), CASES)
def test_a_planted_mismatch_is_named(
    tmp_path: Path, layout: str, change: Change, message: str, target: Target
) -> None:
    found = check_heads(write_layout(tmp_path / "heads", layout, change), target)
    assert message in told(found.problems)


def test_all_problems_come_at_once(tmp_path: Path, target: Target) -> None:
    def change(tensors: Tensors, config: Config) -> None:
        for what in ("vocabulary, EAGLE", "map twice", "yarn", "dtype, EAGLE", "a tensor too many"):
            MISMATCHES[what][1](tensors, config)

    said = told(check_heads(write_layout(tmp_path, "eagle3_modelopt", change), target).problems)
    for part in ("vocab_size", "share a target token", "yarn", "I8 values", "extra: no part"):
        assert part in said


@pytest.mark.parametrize("given", ["eagle", "eagle3"])
def test_eagle_is_not_eagle3(tmp_path: Path, given: Any, target: Target) -> None:
    other = "eagle3_modelopt" if given == "eagle" else "eagle_tensorrt"
    found = check_heads(write_layout(tmp_path, other), target, given)
    assert f"these are {other.split('_')[0]} heads; write speculation kind" in told(found.problems)


def test_a_rope_of_their_own_can_be_stated(tmp_path: Path, target: Target) -> None:
    found = check_heads(
        write_layout(tmp_path, "eagle3_modelopt", _set(rope_theta=10000.0, rope_is_own=True)), target
    )
    assert found.problems == ()
    assert "rope_theta: 10000, the target has 50000" in told(found.warnings)


# --------------------------------------------------------------------------- target, tokenizer, record


def test_another_base_model_is_told(tmp_path: Path, target: Target) -> None:
    def change(tensors: Tensors, config: Config) -> None:
        if "speculators_config" in config:
            config["speculators_config"]["verifier"]["name_or_path"] = "someone/other-chat"
        else:
            config["base_model_name_or_path"] = "someone/other-chat"

    for layout in (*MEDUSA_OWN, "eagle_speculators", "eagle3_speculators"):
        folder = write_layout(tmp_path / layout, layout, change)
        # A folder may be called anything: a warning. A hub id is not a matter of taste.
        found = check_heads(folder, target)
        assert found.problems == ()
        assert "for 'someone/other-chat'; the target is tiny-chat" in told(found.warnings)
        known = read_target(target.folder, BASE)
        assert "for 'someone/other-chat'; the target is tiny-chat or someone/tiny-chat" in told(
            check_heads(folder, known).problems
        )
    assert check_heads(write_layout(tmp_path / "same", "medusa_original"), known).problems == ()


def test_another_tokenizer_beside_the_heads_is_named(tmp_path: Path, target: Target) -> None:
    folder = write_layout(tmp_path, "eagle3_speculators")
    tokenizer = json.loads((target.folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, indent=7))  # written in another way
    assert check_heads(folder, target).problems == ()
    vocab = tokenizer["model"]["vocab"]
    first, second = list(vocab)[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "2 tokens are not the target's or have other ids" in told(check_heads(folder, target).problems)


def _record(folder: Path, target: Target, **changes: Any) -> None:
    value = {
        "schema": "trtspec.heads/1",
        "kind": "eagle3",
        "base_model": str(target.folder),
        "base_digest": "b" * 64,
        "tokenizer_digest": file_sha256(target.folder / "tokenizer.json"),
        "target_recipe": None,
        "draft_vocab_size": DRAFTED,
        "files": {name: file_sha256(folder / name) for name in ("config.json", "model.safetensors")},
        **changes,
    }
    (folder / RECORD).write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("changes", "digest", "message"),
    [
        ({}, "b" * 64, ""),
        ({}, None, ""),
        ({"kind": "medusa"}, None, "kind: 'medusa', the weights are eagle3 heads"),
        ({"tokenizer_digest": "0" * 64}, None, "trained with another tokenizer.json"),
        ({}, "c" * 64, "base_digest: the heads were trained for"),
        ({"draft_vocab_size": 10}, None, "draft_vocab_size: 10, the weights draft 200 tokens"),
        (
            {"files": {"model.safetensors": "0" * 64}},
            None,
            "model.safetensors was changed since the training",
        ),
        ({"files": {"../secret": "0" * 64}}, None, ""),
    ],
)
def test_what_the_training_wrote_is_held_against_the_target(
    tmp_path: Path, target: Target, changes: Any, digest: str | None, message: str
) -> None:
    folder = write_layout(tmp_path, "eagle3_modelopt")
    _record(folder, target, **changes)
    said = told(check_heads(folder, read_target(target.folder, None, digest)).problems)
    assert message in said
    assert bool(message) == bool(said)


# --------------------------------------------------------------------------- what keeps a backend away


def obstacles(found: HeadsCheck, backend: Any) -> str:
    return told(found.obstacles[backend])


def test_file_names_that_tensorrt_llm_does_not_find(tmp_path: Path, target: Target) -> None:
    folder = write_layout(tmp_path / "heads", "medusa_tensorrt")
    (folder / "medusa_lm_head.safetensors").rename(folder / "model.safetensors")
    found = check_heads(folder, target)
    assert found.runs_on == ("embedded",)
    wanted = "found: model.safetensors; allowed: medusa_lm_head.pt or medusa_lm_head.safetensors"
    assert wanted in obstacles(found, "tensorrt")
    both = write_layout(write_layout(tmp_path / "both", "medusa_original"), "medusa_tensorrt")
    assert "TensorRT-LLM reads this one, everybody else that" in obstacles(
        check_heads(both, target), "tensorrt"
    )


@pytest.mark.parametrize(
    ("layout", "change", "backend", "message"),
    [
        ("medusa_tensorrt", _without("medusa_num_layers"), "tensorrt", "medusa_num_layers: missing; a whole"),
        ("medusa_tensorrt", _tensor("0.1.weight", lambda v: None), "tensorrt", "heads [0] have no output"),
        ("eagle3_tensorrt", _unchanged, "tensorrt", "runs eagle3 heads on backend pytorch"),
        ("medusa_tensorrt", _unchanged, "pytorch", "runs medusa heads on backend tensorrt only"),
        ("eagle3_speculators", _unchanged, "pytorch", "the layout of speculators"),
        ("eagle3_tensorrt", _top(eagle_config={AUX: [1, 2, 3]}), "pytorch", "sees the layers [1, 2, 3]"),
        (
            "eagle3_speculators", _top(norm_before_residual=True), "embedded",
            "norm_before_residual: true; only heads whose residual is the feature before its norm",
        ),
    ],
)  # fmt: skip
def test_what_keeps_a_backend_away(
    tmp_path: Path, layout: str, change: Change, backend: str, message: str, target: Target
) -> None:
    found = check_heads(write_layout(tmp_path, layout, change), target)
    assert found.problems == ()
    assert message in obstacles(found, backend)


# --------------------------------------------------------------------------- the command


def test_no_torch_and_nothing_runs(tmp_path: Path, target: Target) -> None:
    """Not even for pickled heads."""
    folder = write_layout(tmp_path, "eagle3_original")
    program = (
        "import sys; from trtspec.cli import main; "
        f"code = main(['draft', 'check', {str(folder)!r}, '--model', {str(target.folder)!r}]); "
        "print(code, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 False False"


def run(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["draft", "check", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_on_good_heads(
    tmp_path: Path, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_layout(tmp_path / "heads", "eagle3_modelopt")
    code, out, err = run(folder, "--model", target.folder, capsys=capsys)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"{folder}: EAGLE-3 head, hidden size 64, drafts 200 of 320 tokens, layout modelopt, BF16, 125.5 KiB",
        "fit tiny-chat",
        "  embedded  runs them",
        "  tensorrt  not: TensorRT-LLM runs eagle3 heads on backend pytorch only",
        "  pytorch   finds what it looks for",
    ]
    code, out, _ = run(folder, "--model", target.folder, "--json", capsys=capsys)
    value = json.loads(out)
    assert code == 0
    assert value["trtspec"]["schema"] == "trtspec.draft-check/1"
    assert (value["ok"], value["kind"], value["layout"]) == (True, "eagle3", "modelopt")
    assert value["runs_on"] == ["embedded", "pytorch"]
    assert value["hidden_layers"] == [2, 4, 5]
    code, out, err = run(folder, "--model", target.folder, "--backend", "tensorrt", capsys=capsys)
    assert code == 2
    assert "on backend pytorch only" in err


def test_the_command_on_bad_heads(tmp_path: Path, target: Target, capsys: pytest.CaptureFixture[str]) -> None:
    def change(tensors: Tensors, config: Config) -> None:
        config.update(rope_theta=10000.0, vocab_size=VOCAB + 1)

    folder = write_layout(tmp_path / "heads", "eagle3_modelopt", change)
    code, out, err = run(folder, "--model", target.folder, capsys=capsys)
    assert (code, out) == (2, "")
    assert "rope_theta: 10000, the target has 50000" in err
    assert "vocab_size: 321, the target has 320" in err
    code, out, err = run(folder, "--model", target.folder, "--json", capsys=capsys)
    value = json.loads(out)
    assert (code, value["ok"]) == (2, False)
    assert {"rope_theta", "vocab_size"} <= {problem["key"] for problem in value["problems"]}
    code, _, err = run(tmp_path / "none", "--json", capsys=capsys)
    assert code == 2


def test_warnings_are_errors_where_that_is_wanted(
    tmp_path: Path, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_layout(tmp_path / "heads", "eagle3_modelopt", _set(torch_dtype="float16"))
    code, out, err = run(folder, "--model", target.folder, capsys=capsys)
    assert code == 0
    assert "warning: " in err
    assert "torch_dtype: float16, the weights are BF16" in err
    code, out, err = run(folder, "--model", target.folder, "--strict", capsys=capsys)
    assert (code, out) == (2, "")


# --------------------------------------------------------------------------- folders of anything

ODD: tuple[Any, ...] = (None, True, -1, 0, 2.5, "text", [], [1], {}, {"factor": "x"}, 10**30)


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_a_config_of_anything_is_told_and_never_a_bug(tmp_path: Path, name: str, target: Target) -> None:
    """Each key in turn holds each odd value; check and convert answer with problems or not at all."""
    folder = write_layout(tmp_path, name)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    inner = config.get("transformer_layer_config", {})
    extra = (
        "eagle_config",
        "rope_scaling",
        "rope_parameters",
        "quantization_config",
        "draft_vocab_size",
        AUX,
    )
    places = [(config, key) for key in dict.fromkeys((*config, *extra, "target_hidden_size"))]
    places += [(inner, key) for key in inner]
    for where, key in places:
        before = where.get(key, ...)
        for value in ODD:
            where[key] = value
            path.write_text(json.dumps(config))
            for known in (target, None):
                found = check_heads(folder, known)
                assert all(problem.message for problem in found.problems)
                for layout in ("tensorrt", "speculators", "modelopt"):
                    with contextlib.suppress(InputError):
                        plan_conversion(folder, layout, known)
        if before is ...:
            del where[key]
        else:
            where[key] = before


def test_hydra_heads_are_read_and_run_here_only(tmp_path: Path, target: Target) -> None:
    tensors: Tensors = {}
    for head in range(2):
        for part in ("linear", "res_connection"):
            tensors[f"hydra_mlp.{head}.0.{part}.weight"] = torch.zeros(HIDDEN, HIDDEN * (head + 2)).bfloat16()
        tensors[f"hydra_lm_head.{head}.weight"] = torch.zeros(VOCAB, HIDDEN).bfloat16()
    torch.save(tensors, tmp_path / "hydra_lm_head.pt")
    (tmp_path / "config.json").write_text(json.dumps({"hydra_num_heads": 2, "grounded_heads": True}))
    found = check_heads(tmp_path, target)
    assert found.problems == ()
    assert found.runs_on == ("embedded",)
    with pytest.raises(InputError, match="Hydra heads exist in their authors' layout only"):
        plan_conversion(tmp_path, "tensorrt", target)
    tensors["hydra_mlp.1.0.linear.weight"] = torch.zeros(HIDDEN, HIDDEN).bfloat16()
    torch.save(tensors, tmp_path / "hydra_lm_head.pt")
    assert f"hydra_mlp.1.0.linear.weight: shape [{HIDDEN}, {HIDDEN}]" in told(
        check_heads(tmp_path, target).problems
    )


def test_shards_are_read_through_their_index(tmp_path: Path, target: Target) -> None:
    tensors, config, _ = LAYOUTS["eagle3_modelopt"]()
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for file, held in shards.items():
        save_file({name: tensors[name].contiguous() for name in held}, tmp_path / file)
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = check_heads(tmp_path, target)
    assert found.problems == ()
    assert found.runs_on == ("embedded",)  # TensorRT-LLM's file check asks for one file
    (tmp_path / "model-2.safetensors").unlink()
    assert "model.safetensors.index.json names it" in told(check_heads(tmp_path, target).problems)
