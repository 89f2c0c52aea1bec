"""``trtspec draft train`` on a tiny model: the plan, a run, going on, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import make_tiny_model

from trtspec.cli import main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("model"),
        vocab=320,
        hidden=32,
        layers=6,
        heads=4,
        kv_heads=2,
        dtype="bfloat16",
    )


def command(model: Path, folder: Path, *more: str) -> list[str]:
    data = folder / "prompts.jsonl"
    data.write_text("\n".join(json.dumps({"text": f"what is {i} times two"}) for i in range(12)))
    return [
        "draft", "train", "--model", str(model), "--data", str(data), "-o", str(folder / "heads"),
        "--new-tokens", "12", "--epochs", "1", "--rows", "128", "--draft-vocab", "32", *more,
    ]  # fmt: skip


def test_a_dry_run_says_what_would_be_done(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(model, tmp_path, "--kind", "eagle3", "--dry-run")) == 0
    out = capsys.readouterr().out
    assert "would answer the prompts" in out
    assert "would train eagle3 heads" in out
    assert not (tmp_path / "heads.work").exists()


def test_heads_are_trained_and_not_overwritten(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(model, tmp_path, "--kind", "medusa", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trtspec"]["schema"] == "trtspec.draft_train/1"
    assert found["kind"] == "medusa"
    assert len(found["acceptance"]) == 4
    assert (tmp_path / "heads" / "medusa_lm_head.safetensors").is_file()
    assert main(command(model, tmp_path, "--kind", "medusa")) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert main(command(model, tmp_path, "--kind", "medusa", "--force")) == 0
    assert "acceptance length" in capsys.readouterr().out


def test_bad_input_is_named(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = command(model, tmp_path, "--kind", "eagle")
    (tmp_path / "prompts.jsonl").write_text('{"text": "fine"}\n{"prompt": "not"}\n')
    assert main(words) == 2
    assert "prompts.jsonl:2" in capsys.readouterr().err
    assert main([*words, "--target-recipe", str(tmp_path / "none")]) == 2
    assert main(["draft", "train", "--kind", "ngram", "--model", str(model), "-o", str(tmp_path / "h")]) == 2


def test_force_gives_up_heads_and_nothing_else(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The broken variant is a --force that replaces any folder: the target's own, or somebody's notes."""
    weights = (model / "model.safetensors").read_bytes()
    asked = command(model, tmp_path, "--kind", "medusa", "--force")
    assert main([*asked, "-o", str(model)]) == 2
    assert "overlaps" in capsys.readouterr().err
    assert (model / "model.safetensors").read_bytes() == weights
    notes = tmp_path / "heads" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    assert main(asked) == 2
    assert "notes.txt" in capsys.readouterr().err
    assert notes.read_text() == "mine"
    notes.unlink()
    assert main(asked) == 0
    made = (tmp_path / "heads" / "trtspec_heads.json").read_bytes()
    convert = ["draft", "convert", str(tmp_path / "heads"), "--force", "--model", str(model), "-o"]
    for out in (tmp_path / "heads", model, tmp_path):
        assert main([*convert, str(out)]) == 2
    assert (tmp_path / "heads" / "trtspec_heads.json").read_bytes() == made
    for _ in range(2):
        assert main([*convert, str(tmp_path / "converted")]) == 0


@pytest.mark.parametrize(
    "option", ["--temperature", "--epochs", "--learning-rate", "--hard-share", "--max-minutes"]
)
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_numbers_are_finite(option: str, value: str, model: Path, tmp_path: Path) -> None:
    assert main(command(model, tmp_path, "--kind", "medusa", option, value)) == 2
    assert not (tmp_path / "heads.work").exists()


def test_numbers_beyond_the_engine_are_refused_at_once(model: Path, tmp_path: Path) -> None:
    for option, value in (("--new-tokens", "100000000000"), ("--seed", str(2**63)), ("--batch", str(10**12))):
        assert main(command(model, tmp_path, "--kind", "medusa", option, value)) == 2


def test_a_training_that_diverges_is_no_success(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of weights that are not numbers no candidate is before the said token: they looked perfect."""
    asked = command(model, tmp_path, "--kind", "medusa", "--learning-rate", "1e30", "--batch", "4")
    assert main([*asked, "--epochs", "6", "--rows", "64"]) == 2
    assert "not a finite number" in capsys.readouterr().err
    assert not (tmp_path / "heads").exists()


def test_prompts_with_a_byte_order_mark(model: Path, tmp_path: Path) -> None:
    asked = command(model, tmp_path, "--kind", "medusa")
    data = tmp_path / "prompts.jsonl"
    data.write_text("\ufeff" + data.read_text(), encoding="utf-8")
    assert main(asked) == 0
