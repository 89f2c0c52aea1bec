"""An engine folder opens only when it is what was sealed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from trtspec import artifact, user_files
from trtspec.errors import InputError
from trtspec.recipe_file import load_recipe, recipe_digest

RECIPE = """\
version: 1
name: tiny
model: {source: model}
backend: {kind: embedded, dtype: float32}
speculation: {kind: ngram}
"""


def sealed(folder: Path, target: str = "target") -> Path:
    """A sealed engine with made-up weights: opening an engine never reads them."""
    for part in ("baseline", "target"):
        (folder / part).mkdir(parents=True)
        (folder / part / "config.json").write_text("{}")
        (folder / part / "model.safetensors").write_bytes(os.urandom(4096))
    (folder / "recipe.yaml").write_text(RECIPE)
    files = [folder / "baseline" / "config.json", folder / "baseline" / "model.safetensors"]
    manifest = artifact.Manifest(
        name="tiny",
        created=artifact.utc_now(),
        recipe_digest=recipe_digest(load_recipe(folder / "recipe.yaml")),
        source=artifact.hash_source(folder / "baseline", files),
        calibration_digest=None,
        target=target,
        tools=artifact.tool_versions(),
        machine=artifact.machine_summary(),
        steps=(),
    )
    artifact.seal(folder, manifest)
    return folder


@pytest.fixture(params=["tiny", "a b", "Größe 模型 é", "-x"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return sealed(tmp_path / request.param)


def problems(folder: Path, **options: bool) -> str:
    with pytest.raises(InputError) as caught:
        artifact.open_artifact(folder, **options)
    return str(caught.value)


def test_what_was_sealed_opens(engine: Path):
    opened = artifact.open_artifact(engine, check_hashes=True)
    assert opened.recipe.name == "tiny"
    assert opened.target_dir == engine / "target"
    assert opened.baseline_dir == engine / "baseline"
    assert opened.size_bytes == sum(path.stat().st_size for path in artifact.sealed_files(engine))
    assert set(opened.manifest.files) == {
        "recipe.yaml",
        "baseline/config.json",
        "baseline/model.safetensors",
        "target/config.json",
        "target/model.safetensors",
    }
    assert opened.manifest.tools["torch"] != "not installed"
    assert opened.manifest.machine["cores"] >= 1


def test_a_moved_engine_still_opens(engine: Path, tmp_path: Path):
    moved = tmp_path / "elsewhere"
    engine.rename(moved)
    assert artifact.open_artifact(moved, check_hashes=True).target_dir == moved / "target"


def test_the_target_may_be_the_baseline(tmp_path: Path):
    opened = artifact.open_artifact(sealed(tmp_path / "x", target="baseline"))
    assert opened.target_dir == opened.baseline_dir


def test_every_kind_of_tampering_is_found(engine: Path):
    """Each alteration beside the check that must catch it; undone, the engine opens again."""
    weights = engine / "target" / "model.safetensors"
    content = weights.read_bytes()

    weights.write_bytes(content[:-1])
    assert "4,095 bytes, sealed 4,096" in problems(engine)
    weights.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    artifact.open_artifact(engine)  # names and sizes agree: only reading everything can tell
    assert "same size, other content" in problems(engine, check_hashes=True)
    weights.unlink()
    assert "missing from the sealed engine" in problems(engine)
    weights.write_bytes(content)
    artifact.open_artifact(engine, check_hashes=True)

    extra = engine / "target" / "hf_quant_config.json"
    extra.write_text("{}")
    assert "added after the engine was sealed" in problems(engine)
    extra.unlink()

    recipe = engine / "recipe.yaml"
    recipe.write_text(RECIPE.replace("float32", "float64"))
    assert "recipe.yaml: changed since the engine was sealed" in problems(engine)
    recipe.write_text(RECIPE)
    (engine / "report.json").write_text("{}")
    (engine / "target" / ".DS_Store").write_text("")
    artifact.open_artifact(engine, check_hashes=True)


def test_all_problems_at_once(engine: Path):
    (engine / "target" / "config.json").unlink()
    (engine / "baseline" / "model.safetensors").write_bytes(b"")
    assert len(problems(engine).splitlines()) == 2


def test_an_unfinished_build_is_not_an_engine(engine: Path):
    (engine / "manifest.json").unlink()
    assert "was not finished (no manifest.json); run trtspec build again" in problems(engine)


def test_other_folders_are_not_engines(tmp_path: Path):
    assert "not an engine (no manifest.json)" in problems(tmp_path)
    assert "does not exist" in problems(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    assert "is not a folder" in problems(tmp_path / "file")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "manifest version None"),
        (b"{}", "manifest version None"),
        (b'{"schema": "trtspec.manifest/2"}', "manifest version 'trtspec.manifest/2' is not one"),
        (b'{"schema": "trtspec.manifest/1"}', "Field required"),
    ],
)
def test_damaged_manifests(engine: Path, content: bytes, message: str):
    (engine / "manifest.json").write_bytes(content)
    assert message in problems(engine)


def test_a_manifest_cannot_name_files_outside(engine: Path):
    manifest = json.loads((engine / "manifest.json").read_text())
    manifest["files"]["../outside"] = {"size": 0, "sha256": ""}
    (engine.parent / "outside").write_text("")
    (engine / "manifest.json").write_text(json.dumps(manifest))
    assert "outside" in problems(engine)


def test_unchanged_source_files_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    weights.write_bytes(b"w" * 100)
    config.write_text("{}")
    first = artifact.hash_source(tmp_path, [weights, config])

    config.write_text("[]")
    read = []
    real = artifact.file_sha256
    monkeypatch.setattr(artifact, "file_sha256", lambda path: read.append(path.name) or real(path))
    second = artifact.hash_source(tmp_path, [weights, config], first)
    assert read == ["config.json"]
    assert second.digest != first.digest
    assert second.digest == artifact.hash_source(tmp_path, [config, weights]).digest


def test_source_digest_depends_on_names_and_contents(tmp_path: Path):
    (tmp_path / "a.json").write_text("1")
    (tmp_path / "b.json").write_text("2")
    both = [tmp_path / "a.json", tmp_path / "b.json"]
    before = artifact.hash_source(tmp_path, both).digest
    (tmp_path / "a.json").write_text("2")
    (tmp_path / "b.json").write_text("1")
    assert artifact.hash_source(tmp_path, both).digest != before


def test_a_failed_write_leaves_the_old_content(tmp_path: Path):
    path = tmp_path / "file"
    user_files.write_atomic(path, b"old")
    with pytest.raises(TypeError):
        user_files.write_atomic(path, "not bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"schema": ' + b"1" * 5000 + b"}",
        b'{"schema": "\\ud800"}',
        b'{"schema": "' + b"x" * 5000 + b'"}',
        "folder",
        "pipe",
        {"created": "yesterday"},
        {"created": "2026-01-01T00:00:00"},
        {"files": {"x" * 5000: {"size": 1, "sha256": ""}}},
        {"files": {"a\0b": {"size": 1, "sha256": ""}}},
        {"files": {"": {"size": 1, "sha256": ""}}},
    ],
    ids=lambda value: str(value)[:30],
)
def test_one_damaged_engine_is_one_line_and_hides_no_other(tmp_path: Path, content: Any):
    good = sealed(tmp_path / "good")
    bad = sealed(tmp_path / "bad")
    path = bad / "manifest.json"
    if isinstance(content, dict):
        path.write_text(json.dumps({**json.loads(path.read_text()), **content}))
    else:
        path.unlink()
        if content == "folder":
            path.mkdir()
        elif content == "pipe":
            os.mkfifo(path)
        else:
            path.write_bytes(content)
    assert str(bad) in problems(bad)
    listed = artifact.list_artifacts(tmp_path)
    assert [(entry.folder, entry.state) for entry in listed] == [(bad, "damaged"), (good, "sealed")]
    assert "\n" not in listed[0].problem
    assert len(listed[0].problem) < 1000


def test_a_list_of_a_file_is_no_empty_list(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is not a folder"):
        artifact.list_artifacts(tmp_path / "file")
    assert artifact.list_artifacts(tmp_path / "nothing yet") == []
