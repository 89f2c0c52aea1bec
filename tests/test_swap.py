"""A build never deletes what no build made, and a refused build writes nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import make_tiny_model

from trtspec.build import build
from trtspec.errors import InputError, MissingError

RECIPE = """\
version: 1
name: chat
model: {source: model}
backend: {kind: embedded, dtype: float32}
limits: {max_batch_size: 4, max_input_tokens: 128, max_seq_tokens: 256, max_num_tokens: 64}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture
def recipe(tmp_path: Path, model: Path) -> Path:
    shutil.copytree(model, tmp_path / "model")
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def tree(folder: Path) -> dict[str, bytes | str]:
    return {
        path.relative_to(folder).as_posix(): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


@pytest.mark.parametrize("name", ["recipe.yaml", "manifest.json", "baseline/x", ".hidden"])
@pytest.mark.parametrize("force", [False, True])
def test_a_folder_that_only_resembles_an_engine_stays(recipe: Path, name: str, force: bool) -> None:
    folder = recipe.parent / "engines" / "chat"
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text(RECIPE if name == "recipe.yaml" else '{"schema": "mine/1"}')
    (folder / "thesis.txt").write_text("years of work")
    before = tree(recipe.parent / "engines")
    with pytest.raises(InputError, match="exists and is not an engine; move it away"):
        build(recipe, recipe.parent / "engines", force=force)
    assert tree(recipe.parent / "engines") == before


def test_everything_beside_the_sealed_files_survives(recipe: Path) -> None:
    folder = build(recipe, recipe.parent / "engines").folder
    (folder / "notes" / "deep").mkdir(parents=True)
    (folder / "notes" / "deep" / "a.txt").write_text("a")
    (folder / "notes" / ".b").write_text("b")
    (folder / ".hidden").write_text("c")
    (folder / "link").symlink_to("nowhere")
    mine = {name: value for name, value in tree(folder).items() if name.startswith(("notes", ".hid", "link"))}
    said: list[str] = []
    for _ in range(2):
        build(recipe, recipe.parent / "engines", force=True, say=said.append)
    assert mine.items() <= tree(folder).items()
    assert os.listdir(recipe.parent / "engines") == ["chat"]
    assert not any("kept as" in line for line in said)


def broken_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


def nested_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("[" * 100_000)


def no_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def manifest_folder(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").mkdir()


@pytest.mark.parametrize("damage", [broken_manifest, nested_manifest, no_manifest, manifest_folder])
def test_a_damaged_engine_is_built_anew_with_its_notes(recipe: Path, damage: Callable[[Path], None]) -> None:
    folder = build(recipe, recipe.parent / "engines").folder
    (folder / "notes.txt").write_text("mine")
    damage(folder)
    built = build(recipe, recipe.parent / "engines")
    assert not built.up_to_date
    assert (folder / "notes.txt").read_text() == "mine"
    assert os.listdir(recipe.parent / "engines") == ["chat"]


@pytest.mark.parametrize("name", ["recipe.yaml", "baseline/notes.txt", "baseline/.hidden", "pipe"])
def test_what_cannot_be_carried_over_keeps_the_old_folder(recipe: Path, name: str) -> None:
    folder = build(recipe, recipe.parent / "engines").folder
    path = folder / name
    if name == "pipe":
        os.mkfifo(path)
    else:
        path.write_text(RECIPE + "# edited here by hand\n")
    said: list[str] = []
    build(recipe, recipe.parent / "engines", force=True, say=said.append)
    aside = recipe.parent / "engines" / "chat.replaced-1"
    assert f"({name}); it is kept as {aside}" in said[-1]
    assert os.path.lexists(aside / name)
    assert sorted(os.listdir(recipe.parent / "engines")) == ["chat", "chat.replaced-1"]


def test_an_old_engine_that_was_left_is_looked_at_too(recipe: Path) -> None:
    folder = build(recipe, recipe.parent / "engines").folder
    old = folder.with_name(".chat.old")
    shutil.copytree(folder, old)
    (old / "baseline" / "notes.txt").write_text("mine")
    build(recipe, recipe.parent / "engines")
    assert (folder.with_name("chat.replaced-1") / "baseline" / "notes.txt").read_text() == "mine"
    assert not old.exists()


# --------------------------------------------------------------------------- refusals


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


BAD_MODELS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no tokenizer": (lambda m: (m / "tokenizer.json").unlink(), "tokenizer.json: not found"),
    "broken template": (
        lambda m: edit(m / "tokenizer_config.json", chat_template="{{ 1 // 0 }}"),
        "chat template: ",
    ),
    "layers": (lambda m: edit(m / "config.json", num_hidden_layers=10**7), "exceeds 1000"),
    "positions": (lambda m: edit(m / "config.json", max_position_embeddings=8), "limits.max_seq_tokens"),
    "pipe": (
        lambda m: ((m / "model.safetensors").unlink(), os.mkfifo(m / "model.safetensors")),
        "is not a regular file",
    ),
    "nested": (lambda m: (m / "config.json").write_text("[" * 100_000), "nested too deeply"),
}


@pytest.mark.parametrize("name", list(BAD_MODELS))
def test_a_model_that_cannot_be_served_is_not_built(recipe: Path, name: str) -> None:
    damage, says = BAD_MODELS[name]
    damage(recipe.parent / "model")
    with pytest.raises(InputError) as caught:
        build(recipe, recipe.parent / "engines")
    assert says in str(caught.value)
    assert not (recipe.parent / "engines").exists()


def test_weights_that_are_no_numbers_are_not_sealed(recipe: Path) -> None:
    path = recipe.parent / "model" / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[:-4] + b"\x00\x00\xc0\x7f")
    with pytest.raises(InputError, match="holds NaN or infinity"):
        build(recipe, recipe.parent / "engines")
    assert os.listdir(recipe.parent / "engines") == []


CALIBRATIONS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda path: None, "no such file"),
    "folder": (os.mkdir, "is a folder"),
    "pipe": (os.mkfifo, "is not a regular file"),
    "nested": (lambda path: path.write_text("[" * 100_000), "nested too deeply"),
    "surrogate": (lambda path: path.write_text('{"text": "\\ud800"}'), "surrogate"),
    "not text": (lambda path: path.write_text('{"text": 1}'), '"text" must be a string'),
}


@pytest.mark.parametrize("name", list(CALIBRATIONS))
def test_calibration_data_is_read_before_anything_is_made(recipe: Path, name: str) -> None:
    make, says = CALIBRATIONS[name]
    make(recipe.parent / "texts.jsonl")
    recipe.write_text(RECIPE + "quantization: {kind: fp8, calibration: {data: texts.jsonl}}\n")
    with pytest.raises(InputError) as caught:
        build(recipe, recipe.parent / "engines")
    assert says in str(caught.value)
    assert "quantization.calibration.data" in str(caught.value)
    assert not (recipe.parent / "engines").exists()


@pytest.mark.parametrize("source", ["~nosuchuser/x", "x" * 300, "x/" * 3000, "loop"])
def test_a_source_that_no_file_system_has(recipe: Path, source: str) -> None:
    (recipe.parent / "loop").symlink_to("loop")
    recipe.write_text(RECIPE.replace("source: model", f"source: {source}"))
    with pytest.raises(InputError) as caught:
        build(recipe, recipe.parent / "engines")
    assert len(str(caught.value)) < 2000
    assert not (recipe.parent / "engines").exists()


@pytest.mark.parametrize("place", ["file", "file/x", "dangling", "n" * 300])
def test_engines_folders_that_cannot_be(recipe: Path, place: str) -> None:
    (recipe.parent / "file").write_text("mine")
    (recipe.parent / "dangling").symlink_to("/proc/nowhere/x")
    before = sorted(os.listdir(recipe.parent))
    with pytest.raises((InputError, MissingError, OSError)):
        build(recipe, recipe.parent / place)
    assert sorted(os.listdir(recipe.parent)) == before
