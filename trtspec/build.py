"""From recipe to engine: run the planned steps, seal the folder, swap it in.

The work is done in ``engines/.NAME.building`` under a lock. A finished step leaves a record of the digest
of its inputs there, written last, so that a build that was killed goes on where it stopped and a step
whose inputs changed is done again. ``engines/NAME`` is replaced only by a sealed engine.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

from trtspec import artifact, process, swap
from trtspec.artifact import (
    DRAFT_DIR,
    MANIFEST_FILE,
    MODEL_DIRS,
    RECIPE_FILE,
    TARGET_DIR,
    TRTLLM_DIR,
    Manifest,
    Source,
    StepRecord,
)
from trtspec.errors import EXIT_GATE_FAILED, InputError, MissingError, Problem
from trtspec.model_check import check_weight_values
from trtspec.modelspec import check_weight_files, read_modelspec
from trtspec.plan import (
    ENGINE_SCRIPT,
    ENGINES_DIR,
    LOG_FILE,
    SOURCE_RECORD,
    STEPS_DIR,
    Plan,
    Step,
    make_plan,
)
from trtspec.plan_inputs import Say
from trtspec.quantize.calibration import plain_texts
from trtspec.recipe_facts import Fidelity, fidelity
from trtspec.recipe_file import recipe_digest
from trtspec.user_files import explain_os_error, sync_folder, write_atomic

_NO_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS)

# Two spinning OpenMP threads on a shared machine can be 15 times slower than two that wait.
CHILD_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1", **os.environ}

OnProgress = Callable[[process.Progress], None]


@dataclass(frozen=True)
class Built:
    """What a build came to."""

    folder: Path
    manifest: Manifest
    up_to_date: bool
    """Nothing had to be done."""
    reused: tuple[str, ...]
    """Steps whose output came from an earlier build."""
    seconds: float
    warnings: tuple[str, ...] = ()
    """What quantizing did not do as asked, such as fewer calibration texts than wanted."""
    fidelity: Fidelity = "strict"
    """What the recipe's acceptance does to sampled output."""


def build(
    recipe_path: Path,
    engines_dir: Path = ENGINES_DIR,
    *,
    force: bool = False,
    check: bool = False,
    version: str | None = None,
    say: Say = lambda line: None,
    on_progress: OnProgress = lambda progress: None,
) -> Built:
    """Make ``engines_dir/NAME`` the sealed engine of the recipe; do only what its inputs ask for.

    ``force``: do every step again. ``check``: read all files of an existing engine to see whether they are
    still what was sealed, instead of trusting names and sizes. ``version``: as in :func:`make_plan`. ``say``
    gets lines about what was found and is done, ``on_progress`` the progress of the running step.

    Raises InputError, MissingError (no space, no permission, a tool that is not installed) or
    process.ChildFailed; ``engines_dir/NAME`` is then what it was before.
    """
    began = time.monotonic()
    plan = make_plan(recipe_path, engines_dir, version=version, say=say)
    with _explained(plan):
        engines_dir.mkdir(parents=True, exist_ok=True)
        with _only_builder(plan, say):
            swap.recover(plan.folder, say)
            swap.refuse_foreign(plan.folder)
            previous = None if force else _previous(plan, check, say)
            if previous is not None and _is_current(plan, previous):
                seconds = time.monotonic() - began
                return Built(plan.folder, previous, True, (), seconds, _warnings(plan), fidelity(plan.recipe))
            if force and plan.work.exists():
                shutil.rmtree(plan.work)
            with _tidied(plan):
                records, known = _run_steps(plan, previous, say, on_progress)
            manifest = _seal(plan, records, known)
            swap.swap_in(plan.work, plan.folder, say)
    reused = tuple(record.name for record in records if record.reused)
    seconds = time.monotonic() - began
    return Built(plan.folder, manifest, False, reused, seconds, _warnings(plan), fidelity(plan.recipe))


def _warnings(plan: Plan) -> tuple[str, ...]:
    folder = plan.folder / plan.target
    from trtspec.quantize.report import read_report  # the package costs time that an idle build has not

    return tuple(read_report(folder).warnings) if (folder / artifact.REPORT_FILE).is_file() else ()


def foresee(plan: Plan) -> tuple[str, ...]:
    """The steps whose output a build would take over from the engine that is there; all of them when it is
    up to date. Writes nothing; an interrupted build's steps are not looked at."""
    previous = _previous(plan, False, lambda line: None)
    if previous is None:
        return ()
    if _is_current(plan, previous):
        return tuple(step.name for step in plan.steps)
    recorded = {step.name: step.digest for step in previous.steps}
    same = [step for step in plan.steps if step.output is not None and recorded.get(step.name) == step.digest]
    return tuple(step.name for step in same if step.name not in plan.imports)


@contextlib.contextmanager
def _explained(plan: Plan) -> Iterator[None]:
    """Turn what the disk refuses into one line that says what to do."""
    try:
        yield
    except OSError as error:
        where = error.filename or plan.work
        if error.errno in swap.NO_SPACE:
            raise MissingError(_no_space_message(plan)) from None
        if error.errno in _NO_PERMISSION:
            message = f"{where}: {error.strerror}; give permission, or choose another --engines-dir"
            raise MissingError(message) from None
        raise explain_os_error(error, error.filename or where) from None
    except process.ChildFailed as error:
        if any(os.strerror(errno.ENOSPC) in line for line in error.tail):
            raise MissingError(_no_space_message(plan)) from None
        raise


@contextlib.contextmanager
def _tidied(plan: Plan) -> Iterator[None]:
    """After a failed step keep the work folder only where the next build can use something of it.

    A refusal (bad input, a failed check of the export) comes again however often the build is run, so
    it says that and leaves nothing. A lack of this machine leaves nothing unless weights were quantized.
    A child that crashed leaves its log, and a full disk or an interruption what was done so far.
    """
    try:
        yield
    except InputError as error:
        shutil.rmtree(plan.work, ignore_errors=True)
        raise InputError([*error.problems, Problem(_HOPELESS)]) from None
    except process.ChildFailed as error:
        # A Python traceback ends with 1 too; it is no verdict.
        if error.returncode != EXIT_GATE_FAILED or not any(line.startswith("error: ") for line in error.tail):
            raise
        shutil.rmtree(plan.work, ignore_errors=True)
        message = str(error).split("\n")[0]
        raise process.ChildFailed(f"{message}; {_HOPELESS}", error.returncode, error.tail) from None
    except MissingError:
        if not (plan.work / TARGET_DIR).exists():
            shutil.rmtree(plan.work, ignore_errors=True)
        raise


_HOPELESS = (
    "the same recipe and model will be refused again; change what is named above, then build. "
    "Nothing was left behind"
)


def _no_space_message(plan: Plan) -> str:
    engines_dir = plan.folder.parent
    size = sum(file.size for file in plan.source.files.values())
    free = shutil.disk_usage(engines_dir).free if engines_dir.is_dir() else 0
    return (
        f"{engines_dir}: no space left on the disk ({free / 1e6:,.0f} MB free; this build wants up to "
        f"{2 * size / 1e6:,.0f} MB); free some, or choose another --engines-dir, and run the build again"
    )


@contextlib.contextmanager
def _only_builder(plan: Plan, say: Say) -> Iterator[None]:
    """Hold the lock of one engine name; it vanishes with this process, however that ends.

    The file is removed under the lock, so whoever got the lock of a removed file opens the path again."""
    path = plan.folder.parent / f".{plan.recipe.name}.lock"
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
                say(f"another build of {plan.recipe.name} is running (process {holder}); waiting for it")
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not _is_at(descriptor, path):
                continue
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return
        finally:
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _previous(plan: Plan, check: bool, say: Say) -> Manifest | None:
    """The manifest of the engine that is there, if it is whole; says why when it is not."""
    if not plan.folder.is_dir() or not any(plan.folder.iterdir()):
        return None
    try:
        manifest = artifact.read_manifest(plan.folder)
        problems = artifact.file_problems(plan.folder, manifest, check_hashes=check)
        if problems:
            raise InputError(problems)
    except InputError as error:
        first, more = error.problems[0], len(error.problems) - 1
        others = f" (and {more} more)" if more else ""
        say(
            f"the engine that is there cannot be re-used: {first.file}: {first.message.split(';')[0]}{others}"
        )
        return None
    return manifest


def _is_current(plan: Plan, manifest: Manifest) -> bool:
    recorded = {step.name: step.digest for step in manifest.steps}
    planned = {step.name: step.digest for step in plan.steps}
    sealed = manifest.files.get(RECIPE_FILE)
    recipe_sha256 = hashlib.sha256(plan.recipe_bytes).hexdigest()
    return recorded == planned and sealed is not None and sealed.sha256 == recipe_sha256


def _run_steps(
    plan: Plan, previous: Manifest | None, say: Say, on_progress: OnProgress
) -> tuple[list[StepRecord], dict[Path, str]]:
    """Do, or take over, every step; returns their records and the file hashes known by then."""
    interrupted = plan.work.exists()
    (plan.work / STEPS_DIR).mkdir(parents=True, exist_ok=True)
    (plan.work / MANIFEST_FILE).unlink(missing_ok=True)
    write_atomic(plan.work / STEPS_DIR / SOURCE_RECORD, plan.source.model_dump_json(by_alias=True).encode())
    known: dict[Path, str] = {}
    for step in plan.steps:
        if step.name in plan.imports and step.output is not None:
            files = plan.imports[step.name][1].files
            known |= {step.output / name: record.sha256 for name, record in files.items()}
    records = []
    for step in plan.steps:
        record = None
        if step.output is not None:
            if interrupted:
                record = _finished_before(plan, step, say)
            if record is None and previous is not None and not _is_cheap(plan, step):
                record = _taken_over(plan, step, previous, known, say)
        if record is None:
            say(f"{step.name}: {step.what}")
            record = _do(plan, step, on_progress)
        records.append(record)
    wanted = {step.output for step in plan.steps}
    for name in MODEL_DIRS:
        if plan.work / name not in wanted and (plan.work / name).exists():
            shutil.rmtree(plan.work / name)
    return records, known


def _finished_before(plan: Plan, step: Step, say: Say) -> StepRecord | None:
    """The record of a step that an interrupted build finished on the same inputs."""
    path = plan.work / STEPS_DIR / f"{step.name}.json"
    assert step.output is not None
    try:
        value = json.loads(path.read_bytes())
        record = StepRecord.model_validate(value["record"])
        sizes: dict[str, int] = value["sizes"]
    except FileNotFoundError:
        say(f"found an interrupted build: step {step.name} was not finished, starting it again")
        return None
    except (ValueError, KeyError, TypeError):
        say(f"found an interrupted build: the record of step {step.name} is damaged, starting it again")
        return None
    if record.digest != step.digest:
        say(f"found an interrupted build: the inputs of step {step.name} changed, starting it again")
        return None
    if sizes != _sizes(step.output):
        say(f"found an interrupted build: the output of step {step.name} is not whole, starting it again")
        return None
    say(f"found an interrupted build: re-using its finished step {step.name}")
    return record.model_copy(update={"reused": True})


def _is_cheap(plan: Plan, step: Step) -> bool:
    """Importing by hard link costs less than checking what is there."""
    if step.name not in plan.imports:
        return False
    return plan.imports[step.name][0].stat().st_dev == plan.work.stat().st_dev


def _taken_over(
    plan: Plan, step: Step, previous: Manifest, known: dict[Path, str], say: Say
) -> StepRecord | None:
    """Hard link a step's output from the engine that is there, when its inputs are the same."""
    assert step.output is not None
    record = next((record for record in previous.steps if record.name == step.name), None)
    if record is None or record.digest != step.digest:
        return None
    prefix = f"{step.output.name}/"
    names = [name for name in previous.files if name.startswith(prefix)]
    hashes: dict[Path, str] = {}
    for name in names:
        # Content, not only size: a bit that rotted would be sealed as if it had been built.
        if artifact.file_sha256(plan.folder / name) != previous.files[name].sha256:
            say(f"{plan.folder / name} changed since it was sealed; doing step {step.name} again")
            return None
        hashes[plan.work / name] = previous.files[name].sha256
    _remove_output(step.output)
    for name in names:
        (plan.work / name).parent.mkdir(parents=True, exist_ok=True)
        swap.link_or_copy(plan.folder / name, plan.work / name)
    known.update(hashes)
    record = record.model_copy(update={"reused": True})
    _record_step(plan, step, record)
    say(f"{step.name}: re-using the output of the engine that is there (same inputs)")
    return record


def _do(plan: Plan, step: Step, on_progress: OnProgress) -> StepRecord:
    began = time.monotonic()
    if step.output is not None:
        _remove_output(step.output)
    match step.name:
        case name if name in plan.imports:
            assert step.output is not None
            _import(*plan.imports[name], step.output)
        case "quantize" | "quantize-draft" | "corpus":
            _run_child(plan, step, on_progress)
        case "engine":
            _build_engine(plan, step, on_progress)
        case "render":
            _write_rendered(plan)
        case "check":
            _check_models(plan)
        case _:
            raise ValueError(step.name)
    record = StepRecord(
        name=step.name,
        argv=step.argv,
        digest=step.digest,
        seconds=round(time.monotonic() - began, 3),
    )
    if step.output is not None:
        _record_step(plan, step, record)
    return record


def _remove_output(output: Path) -> None:
    for path in (output, *output.parent.glob(f"{output.name}.partial*")):
        if path.exists():
            shutil.rmtree(path)


def _record_step(plan: Plan, step: Step, record: StepRecord) -> None:
    """Last of a step: its output is durable before the record that says so exists."""
    assert step.output is not None
    artifact.sync_files(step.output)
    sync_folder(plan.work)
    content = {"record": record.model_dump(mode="json"), "sizes": _sizes(step.output)}
    write_atomic(plan.work / STEPS_DIR / f"{step.name}.json", json.dumps(content).encode())


def _sizes(folder: Path) -> dict[str, int]:
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size for path in artifact.sealed_files(folder)
    }


def _import(folder: Path, source: Source, output: Path) -> None:
    output.mkdir(parents=True)
    for name in source.files:
        swap.link_or_copy(folder / name, output / name)


def _build_engine(plan: Plan, step: Step, on_progress: OnProgress) -> None:
    """Run the engine's script; its checkpoints and texts are of no use once the engine is there."""
    assert plan.engine is not None
    assert step.output is not None
    texts = step.output / "texts"
    texts.mkdir(parents=True)
    if plan.engine.calibration is not None:
        rows = [json.dumps({"text": text}) + "\n" for text in plain_texts(plan.engine.calibration)]
        (texts / "train.jsonl").write_text("".join(rows), encoding="utf-8")
    (plan.work / ENGINE_SCRIPT).write_text(plan.engine.script, encoding="utf-8")
    _run_child(plan, step, on_progress)
    for name in ("target", "draft", "texts"):
        shutil.rmtree(step.output / name, ignore_errors=True)


def _write_rendered(plan: Plan) -> None:
    assert plan.rendered is not None
    for name, text in plan.rendered.items():
        path = plan.work / TRTLLM_DIR / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _run_child(plan: Plan, step: Step, on_progress: OnProgress) -> None:
    def on_line(line: str) -> None:
        progress = process.parse_progress(line)
        if progress is not None:
            on_progress(progress)

    process.run(step.argv, env=CHILD_ENVIRONMENT, log=plan.work / LOG_FILE, on_line=on_line)


def _check_models(plan: Plan) -> None:
    """What quantizing must not change, compared with the sources; InputError with all differences."""
    problems = _changes(plan.source_dir, plan.source, plan.work / plan.target)
    if plan.draft is not None and plan.engine is None:
        problems += _changes(plan.draft.folder, plan.draft.source, plan.work / DRAFT_DIR)
    if problems:
        raise InputError(problems)


def _changes(source_dir: Path, files: Source, folder: Path) -> list[Problem]:
    problems = list(check_weight_files(folder)) or check_weight_values(folder)
    source, target = read_modelspec(source_dir), read_modelspec(folder)
    kept = replace(target, quant=source.quant, dtype=source.dtype)
    for name in (field.name for field in fields(source)):
        before, after = getattr(source, name), getattr(kept, name)
        if before != after:
            message = f"{name}: {after!r} where the source has {before!r}; quantizing must not change it"
            problems.append(Problem(message, file=str(folder / "config.json")))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if name in files.files and not (folder / name).is_file():
            problems.append(Problem("missing after quantizing", file=str(folder / name)))
    return problems


def _seal(plan: Plan, records: list[StepRecord], known: dict[Path, str]) -> Manifest:
    (plan.work / RECIPE_FILE).write_bytes(plan.recipe_bytes)
    manifest = Manifest(
        name=plan.recipe.name,
        created=artifact.utc_now(),
        recipe_digest=recipe_digest(plan.recipe),
        source=plan.source,
        draft_source=plan.draft.source if plan.draft else None,
        calibration_digest=plan.calibration_digest,
        target="target" if plan.target == TARGET_DIR else "baseline",
        tools=dict(plan.tools),
        machine=artifact.machine_summary(),
        steps=tuple(records),
    )
    return artifact.seal(plan.work, manifest, known)
