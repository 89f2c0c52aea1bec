"""Building: only what changed, nothing half done, whatever kills it.

One file, because every test drives the same build of the same tiny model, and each in another way.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import make_tiny_model

from trtspec import artifact, plan
from trtspec.build import Built, build
from trtspec.errors import InputError, MissingError
from trtspec.process import ChildFailed
from trtspec.recipe_file import parse_recipe

PLAIN = """\
version: 1
name: tiny
model: {source: model}
backend: {kind: embedded, dtype: float32}
speculation: {kind: ngram}
limits: {max_batch_size: 4, max_input_tokens: 128, max_seq_tokens: 256, max_num_tokens: 64}
"""
QUANTIZED = PLAIN + (
    "quantization: {kind: w4a16_awq, group_size: 32, kv_cache: fp8, "
    "calibration: {num_samples: 2, max_tokens: 64}}\n"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture
def recipe(tmp_path: Path, model: Path) -> Path:
    """A recipe beside its own copy of the model, in a folder whose name is awkward."""
    folder = tmp_path / "mein Modell é"
    folder.mkdir()
    shutil.copytree(model, folder / "model")
    path = folder / "recipe.yaml"
    path.write_text(PLAIN)
    return path


def run(recipe: Path, **options: bool) -> tuple[Built, list[str]]:
    said: list[str] = []
    return build(recipe, recipe.parent / "engines", say=said.append, **options), said


def leftovers(recipe: Path) -> list[str]:
    """What a build left beside the engine."""
    names = (path.name for path in (recipe.parent / "engines").iterdir())
    return sorted(name for name in names if name.startswith("."))


# --------------------------------------------------------------------------- a build


def test_a_build_gives_a_sealed_engine(recipe: Path):
    built, _ = run(recipe)
    opened = artifact.open_artifact(built.folder, check_hashes=True)
    assert built.folder == recipe.parent / "engines" / "tiny"
    assert (built.folder / "recipe.yaml").read_bytes() == recipe.read_bytes()
    assert opened.manifest.target == "baseline"
    assert not (built.folder / "target").exists()
    assert [step.name for step in opened.manifest.steps] == ["import", "check"]
    assert leftovers(recipe) == []
    for path in opened.baseline_dir.iterdir():
        source = recipe.parent / "model" / path.name
        assert path.read_bytes() == source.read_bytes()
        assert path.stat().st_ino == source.stat().st_ino


def test_symbolic_links_are_followed(recipe: Path):
    """As in a hub cache, whose snapshots link into blobs: an engine must not point out of itself."""
    weights = recipe.parent / "model" / "model.safetensors"
    weights.rename(recipe.parent / "blob")
    weights.symlink_to(recipe.parent / "blob")
    built, _ = run(recipe)
    inside = built.folder / "baseline" / "model.safetensors"
    assert not inside.is_symlink()
    shutil.rmtree(recipe.parent / "model")
    (recipe.parent / "blob").unlink()
    artifact.open_artifact(built.folder, check_hashes=True)


def test_an_unchanged_rebuild_does_nothing_and_reads_no_weights(recipe: Path, monkeypatch):
    first, _ = run(recipe)
    before = (first.folder / "manifest.json").stat()
    read = []
    real = artifact.file_sha256
    monkeypatch.setattr(artifact, "file_sha256", lambda path: read.append(path.name) or real(path))
    again, said = run(recipe)
    assert again.up_to_date
    assert said == []
    assert read == ["recipe.yaml"]
    assert (first.folder / "manifest.json").stat().st_ino == before.st_ino


def time_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_the_command_line_is_quick_when_nothing_changed(recipe: Path):
    run(recipe)
    code = (
        "import sys; from trtspec.cli import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules, 'torch was imported'; sys.exit(code)"
    )
    argv = [sys.executable, "-c", code, "build", str(recipe), "-o", str(recipe.parent / "engines")]
    times = []
    for _ in range(3):
        began = time_of_children()  # of the processor: others may keep it busy
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        times.append(time_of_children() - began)
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith("is up to date\n")
    assert min(times) < 1.0


@pytest.mark.parametrize(
    "change", ["gates: {min_speedup: 1.1}", "description: other words", "# only a comment"]
)
def test_a_change_that_touches_no_weights_reseals(recipe: Path, change: str):
    run(recipe)
    recipe.write_text(PLAIN + change + "\n")
    built, _ = run(recipe)
    assert not built.up_to_date
    assert (built.folder / "recipe.yaml").read_text() == PLAIN + change + "\n"
    artifact.open_artifact(built.folder, check_hashes=True)


def test_a_changed_source_is_built_again(recipe: Path):
    first, _ = run(recipe)
    shutil.rmtree(recipe.parent / "model")
    make_tiny_model(recipe.parent / "model", seed=1)
    second, _ = run(recipe)
    assert not second.up_to_date
    assert second.manifest.source.digest != first.manifest.source.digest
    weights = second.folder / "baseline" / "model.safetensors"
    assert weights.read_bytes() == (recipe.parent / "model" / "model.safetensors").read_bytes()


def test_a_touched_source_is_read_again_but_not_built(recipe: Path):
    """A new time with the old content: the hash decides."""
    run(recipe)
    os.utime(recipe.parent / "model" / "config.json")
    again, _ = run(recipe)
    assert again.up_to_date


def test_damage_is_repaired(recipe: Path):
    built, _ = run(recipe)
    (built.folder / "baseline" / "config.json").unlink()
    repaired, said = run(recipe)
    assert not repaired.up_to_date
    assert "config.json: missing from the sealed engine" in said[0]
    artifact.open_artifact(built.folder, check_hashes=True)


def test_same_size_tampering_is_found_with_check(recipe: Path):
    built, _ = run(recipe)
    config = built.folder / "baseline" / "config.json"
    content = config.read_bytes()
    config.unlink()  # not through the hard link: the source stays as it is
    config.write_bytes(content.replace(b"llama", b"lamla"))
    assert run(recipe)[0].up_to_date
    repaired, said = run(recipe, check=True)
    assert not repaired.up_to_date
    assert "same size, other content" in said[0]
    assert config.read_bytes() == content


def test_force_does_it_again(recipe: Path):
    first, _ = run(recipe)
    inode = (first.folder / "manifest.json").stat().st_ino
    again, _ = run(recipe, force=True)
    assert not again.up_to_date
    assert again.reused == ()
    assert (again.folder / "manifest.json").stat().st_ino != inode


def test_notes_beside_an_engine_survive_a_rebuild(recipe: Path):
    built, _ = run(recipe)
    (built.folder / "report.json").write_text("mine")
    run(recipe, force=True)
    assert (built.folder / "report.json").read_text() == "mine"


# --------------------------------------------------------------------------- refusals


def test_a_folder_that_is_no_engine_is_never_replaced(recipe: Path):
    folder = recipe.parent / "engines" / "tiny"
    folder.mkdir(parents=True)
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="exists and is not an engine"):
        run(recipe)
    assert (folder / "thesis.tex").read_text() == "years of work"


def test_a_quantized_source_is_refused(recipe: Path):
    (recipe.parent / "model" / "hf_quant_config.json").write_text(
        json.dumps(
            {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": {"quant_algo": "FP8"}}
        )
    )
    with pytest.raises(InputError, match="quantized already"):
        run(recipe)


def test_broken_weights_are_refused_before_anything_is_written(recipe: Path):
    (recipe.parent / "model" / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 269060552\n"
    )
    with pytest.raises(InputError):
        run(recipe)
    assert not (recipe.parent / "engines").exists()


def test_a_gpu_backend_is_an_honest_no():
    recipe = parse_recipe("version: 1\nname: x\nmodel: {source: m}\nbackend: {kind: tensorrt}\n")
    with pytest.raises(MissingError, match="an engine is made by trtllm-build"):
        plan.refuse_unsupported(recipe)


@pytest.mark.parametrize(
    ("extra", "key"),
    [
        ("quantization: {kind: nvfp4}", "quantization.kind"),
        ("parallel: {tp: 2}", "parallel"),
    ],
)
def test_what_the_embedded_engine_does_not_run_yet_is_one_clear_line(recipe: Path, extra: str, key: str):
    text = PLAIN.replace("speculation: {kind: ngram}\n", "") if "speculation" in extra else PLAIN
    recipe.write_text(text + extra + "\n")
    with pytest.raises(InputError) as caught:
        run(recipe)
    assert len(str(caught.value).splitlines()) == 1
    assert key in str(caught.value)


# --------------------------------------------------------------------------- planning


def test_the_plan_is_pure_and_its_digests_depend_on_what_matters(tmp_path: Path):
    source = artifact.Source(path="/m", digest="s", files={})

    def steps(text: str, **changes: object) -> dict[str, str]:
        recipe = parse_recipe(text)
        given = {
            "source": source,
            "calibration_digest": "c",
            "quantization_json": recipe.quantization.model_dump_json(),
            "tools": {"torch": "2"},
            "work": tmp_path / "work",
            **changes,
        }
        return {step.name: step.digest for step in plan.plan_for(recipe, **given)}

    base = steps(QUANTIZED)
    assert set(base) == {"import", "quantize", "check"}
    assert set(steps(PLAIN)) == {"import", "check"}
    assert steps(QUANTIZED + "gates: {min_speedup: 2.0}\n") == base
    assert steps(QUANTIZED, work=tmp_path / "elsewhere") == base
    for other in (
        steps(QUANTIZED.replace("num_samples: 2", "num_samples: 3")),
        steps(QUANTIZED, calibration_digest="d"),
        steps(QUANTIZED, tools={"torch": "3"}),
    ):
        assert other["quantize"] != base["quantize"]
        assert other["import"] == base["import"]
    moved = steps(QUANTIZED, source=artifact.Source(path="/m", digest="t", files={}))
    assert all(moved[name] != base[name] for name in base)
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_shows_the_commands_and_writes_nothing(recipe: Path):
    recipe.write_text(QUANTIZED)
    argv = [sys.executable, "-m", "trtspec", "build", str(recipe), "-o", str(recipe.parent / "engines")]
    done = subprocess.run([*argv, "--dry-run", "--json"], capture_output=True, text=True, check=True)
    shown = json.loads(done.stdout)
    by_name = {step["name"]: step for step in shown["steps"]}
    assert by_name["import"]["argv"] == []
    assert by_name["quantize"]["argv"][1:3] == ["-m", "trtspec.quantize"]
    quantization = json.loads(by_name["quantize"]["argv"][-1])
    assert quantization["group_size"] == 32
    assert not (recipe.parent / "engines").exists()
    text = subprocess.run([*argv, "--dry-run"], capture_output=True, text=True, check=True).stdout
    assert "-m trtspec.quantize" in text
    assert "(done by trtspec build itself)" in text


# --------------------------------------------------------------------------- interruptions


def test_a_swap_that_was_cut_in_two_is_undone(recipe: Path):
    built, _ = run(recipe)
    built.folder.rename(recipe.parent / "engines" / ".tiny.old")
    again, said = run(recipe)
    assert again.up_to_date
    assert any("found an interrupted swap" in line for line in said)
    assert leftovers(recipe) == []


def test_a_finished_step_of_an_interrupted_build_is_used(recipe: Path):
    """As if killed between the import and the seal."""
    built, _ = run(recipe)
    work = recipe.parent / "engines" / ".tiny.building"
    record = next(step for step in built.manifest.steps if step.name == "import")
    built.folder.rename(work)
    (work / "manifest.json").unlink()
    (work / ".steps").mkdir()
    sizes = {path.name: path.stat().st_size for path in (work / "baseline").iterdir()}
    step_file = work / ".steps" / "import.json"
    step_file.write_text(json.dumps({"record": record.model_dump(mode="json"), "sizes": sizes}))
    again, said = run(recipe)
    assert "found an interrupted build: re-using its finished step import" in said
    assert again.reused == ("import",)
    artifact.open_artifact(again.folder, check_hashes=True)
    assert leftovers(recipe) == []


@pytest.mark.parametrize("damage", ["no record", "half a record", "other inputs", "half an output"])
def test_an_unfinished_step_is_not_used(recipe: Path, damage: str):
    built, _ = run(recipe)
    work = recipe.parent / "engines" / ".tiny.building"
    record = next(step for step in built.manifest.steps if step.name == "import").model_dump(mode="json")
    built.folder.rename(work)
    (work / "manifest.json").unlink()
    (work / ".steps").mkdir()
    sizes = {path.name: path.stat().st_size for path in (work / "baseline").iterdir()}
    if damage == "other inputs":
        record["digest"] = "0"
    if damage == "half an output":
        sizes["model.safetensors"] += 1
    text = json.dumps({"record": record, "sizes": sizes})
    if damage != "no record":
        (work / ".steps" / "import.json").write_text(text[:40] if damage == "half a record" else text)
    again, said = run(recipe)
    assert any("found an interrupted build" in line and "starting it again" in line for line in said)
    assert again.reused == ()
    artifact.open_artifact(again.folder, check_hashes=True)


def cli(recipe: Path, *options: str) -> list[str]:
    engines = str(recipe.parent / "engines")
    return [sys.executable, "-m", "trtspec", "build", str(recipe), "-o", engines, *options]


def test_two_builds_of_one_name_do_not_collide(recipe: Path):
    children = [
        subprocess.Popen(cli(recipe, "--force"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(3)
    ]
    outputs = [child.communicate(timeout=60)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0, 0], outputs
    artifact.open_artifact(recipe.parent / "engines" / "tiny", check_hashes=True)
    assert leftovers(recipe) == []


def test_a_full_disk_is_one_line_and_no_engine(recipe: Path):
    """No file may grow beyond 4 kB: the copy of the weights fails as on a full disk."""
    shutil.rmtree(recipe.parent / "engines", ignore_errors=True)
    other = Path("/dev/shm") / f"trtspec-test-{os.getpid()}"
    if not other.parent.is_dir() or other.parent.stat().st_dev == recipe.stat().st_dev:
        pytest.skip("needs a second file system, so that the import has to copy")
    argv = [sys.executable, "-m", "trtspec", "build", str(recipe), "-o", str(other)]
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
        )
        assert done.returncode == 3, done.stderr
        last = done.stderr.strip().splitlines()[-1]
        assert "no space left on the disk" in last
        assert not (other / "tiny").exists()
        assert [entry.state for entry in artifact.list_artifacts(other)] == ["unfinished"]
        again = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert again.returncode == 0, again.stderr
        assert "step import was not finished, starting it again" in again.stderr
        artifact.open_artifact(other / "tiny", check_hashes=True)
    finally:
        shutil.rmtree(other, ignore_errors=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission_is_one_line(recipe: Path):
    engines = recipe.parent / "engines"
    engines.mkdir(mode=0o500)
    with pytest.raises(MissingError, match="Permission denied"):
        run(recipe)


@pytest.mark.parametrize(
    ("fault", "error", "kept"),
    [
        ("raise InputError('bad data')", InputError, False),
        ("raise GateFailed('scales are missing')", ChildFailed, False),
        ("raise MissingError('no memory')", MissingError, False),
        ("raise RuntimeError('crash')", ChildFailed, True),
    ],
)
def test_a_step_that_fails_leaves_only_what_the_next_build_can_use(
    recipe: Path, fault: str, error: type[Exception], kept: bool, monkeypatch: pytest.MonkeyPatch
):
    """The child is a real process with the exit codes of a quantizing one."""
    recipe.write_text(QUANTIZED)
    code = (
        "import sys; from trtspec.errors import *\n"
        f"try:\n {fault}\n"
        "except TrtspecError as error:\n print(f'error: {error}', file=sys.stderr); sys.exit(error.exit_code)"
    )
    planned = plan.make_plan

    def with_fault(*arguments, **options):
        made = planned(*arguments, **options)
        steps = [replace(s, argv=(sys.executable, "-c", code)) if s.argv else s for s in made.steps]
        return replace(made, steps=tuple(steps))

    monkeypatch.setattr("trtspec.build.make_plan", with_fault)
    with pytest.raises(error) as caught:
        run(recipe)
    assert leftovers(recipe) == ([".tiny.building"] if kept else [])
    assert (artifact.list_artifacts(recipe.parent / "engines") == []) != kept
    hopeless = "the same recipe and model will be refused again; change what is named above, then build. "
    assert (hopeless in str(caught.value)) == ("InputError" in fault or "GateFailed" in fault)
    monkeypatch.undo()
    recipe.write_text(PLAIN)
    run(recipe)
    assert leftovers(recipe) == []


def test_a_refusal_before_any_work_leaves_no_trace(recipe: Path):
    recipe.write_text(QUANTIZED.replace("group_size: 32", "group_size: 128"))
    with pytest.raises(InputError, match="128 does not divide the 64 inputs"):
        run(recipe)
    assert not (recipe.parent / "engines").exists()


# --------------------------------------------------------------------------- quantizing for real


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Path, list[str]]:
    """A build that was killed with SIGKILL while it quantized, run again: its recipe and what it said."""
    folder = tmp_path_factory.mktemp("quantized")
    shutil.copytree(model, folder / "model")
    recipe = folder / "recipe.yaml"
    recipe.write_text(QUANTIZED)
    work = folder / "engines" / ".tiny.building"
    child = subprocess.Popen(cli(recipe), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (work / ".steps" / "import.json").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.5)
    assert child.poll() is None
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not (folder / "engines" / "tiny").exists()
    said: list[str] = []
    build(recipe, folder / "engines", say=said.append)
    return recipe, said


@pytest.mark.slow
def test_a_killed_build_goes_on_where_it_stopped(interrupted: tuple[Path, list[str]]):
    recipe, said = interrupted
    assert "found an interrupted build: re-using its finished step import" in said
    assert "found an interrupted build: step quantize was not finished, starting it again" in said
    opened = artifact.open_artifact(recipe.parent / "engines" / "tiny", check_hashes=True)
    assert opened.target_dir.name == "target"
    assert (opened.target_dir / "quantization_report.json").is_file()
    assert (opened.target_dir / "tokenizer.json").is_file()
    assert leftovers(recipe) == []


@pytest.mark.slow
def test_quantized_weights_are_used_again_when_only_gates_change(interrupted: tuple[Path, list[str]]):
    recipe, _ = interrupted
    target = recipe.parent / "engines" / "tiny" / "target"
    before = {path.name: path.stat().st_ino for path in target.iterdir()}
    recipe.write_text(
        QUANTIZED.replace("{kind: ngram}", "{kind: none}") + "gates: {max_perplexity_ratio: 1.1}\n"
    )
    built, said = run(recipe)
    assert "quantize" in built.reused
    assert any("re-using the output of the engine that is there" in line for line in said)
    assert {path.name: path.stat().st_ino for path in target.iterdir()} == before
    assert artifact.open_artifact(built.folder, check_hashes=True).recipe.gates.max_perplexity_ratio == 1.1


@pytest.mark.slow
def test_rotten_weights_are_not_used_again(interrupted: tuple[Path, list[str]], monkeypatch):
    recipe, _ = interrupted
    folder = recipe.parent / "engines" / "tiny"
    weights = folder / "target" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    recipe.write_text(QUANTIZED + "gates: {min_speedup: 1.2}\n")
    monkeypatch.setattr("trtspec.build.process.run", lambda *_, **__: pytest.fail("quantizing again"))
    with pytest.raises(pytest.fail.Exception, match="quantizing again"):
        run(recipe)
    assert weights.read_bytes() != content
    assert folder.is_dir()
