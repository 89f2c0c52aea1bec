"""A built engine on disk: sealed last, opened only when it is what was sealed.

    engines/NAME/
    ├── manifest.json   written last; without it the folder is not an engine
    ├── recipe.yaml     the exact bytes the build read
    ├── baseline/       the 16-bit source checkpoint (hard links, else copies)
    ├── target/         what the engine loads; absent when nothing is quantized
    │   └── quantization_report.json   what quantization did to each layer
    ├── draft/          the draft model; only when the recipe drafts with one
    ├── heads/          the trained draft heads; only when the recipe drafts with some
    ├── trtllm/         TensorRT-LLM's options and Triton repository; only for GPU backends
    ├── built/          what trtllm-build made: engine/, draft_engine/; only for backend tensorrt
    └── corpus/         the store of a corpus for n-gram drafting; only when the recipe names one

Sizes and names are checked on every opening (they cost a ``stat`` each); contents on request, because
reading gigabytes to answer ``trtspec list`` would be silly. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from trtspec.errors import InputError, Problem, TrtspecError
from trtspec.recipe import Recipe
from trtspec.recipe_file import load_recipe, recipe_digest
from trtspec.user_files import is_plain_name, read_user_json, shown_path, sync_folder, write_atomic

SCHEMA = "trtspec.manifest/1"
MANIFEST_FILE = "manifest.json"
RECIPE_FILE = "recipe.yaml"
TARGET_DIR = "target"
BASELINE_DIR = "baseline"
DRAFT_DIR = "draft"
HEADS_DIR = "heads"
CORPUS_DIR = "corpus"
TRTLLM_DIR = "trtllm"
BUILT_DIR = "built"
MODEL_DIRS = (BASELINE_DIR, TARGET_DIR, DRAFT_DIR, HEADS_DIR, CORPUS_DIR, TRTLLM_DIR, BUILT_DIR)
"""Folders of an engine that a build makes and an engine loads from."""
REPORT_FILE = "quantization_report.json"

_CHUNK_BYTES = 1 << 20


class _Mapping(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Stamp(_Mapping):
    """What the file system says about a file; while it is unchanged the content is taken as unchanged."""

    size: int
    mtime_ns: int
    inode: int


class SourceFile(Stamp):
    sha256: str


class Source(_Mapping):
    """The checkpoint that was built from, and a cache of its files' hashes."""

    path: str
    """Folder at the time of the build (a note; the engine does not need it any more)."""
    digest: str
    """sha256 over the sorted names and hashes of the files below."""
    files: dict[str, SourceFile]


class FileRecord(_Mapping):
    size: int
    sha256: str


class StepRecord(_Mapping):
    """One step of the build: what ran, on what inputs, for how long."""

    name: str
    argv: tuple[str, ...]
    """The command; empty for a step done in the building process."""
    digest: str
    """Of everything the step's output depends on; equal digests may share the output."""
    seconds: float
    reused: bool = False
    """The output was taken from an earlier build; ``seconds`` is what it took then."""


class Manifest(_Mapping):
    schema_: Literal["trtspec.manifest/1"] = Field(default="trtspec.manifest/1", alias="schema")
    name: str
    created: str
    """UTC, ISO 8601."""

    @field_validator("created")
    @classmethod
    def _is_a_time(cls, value: str) -> str:
        try:
            time = datetime.fromisoformat(value)
        except ValueError:
            time = None
        if time is None or time.tzinfo is None:
            raise ValueError("not a time with its zone, as 2026-01-31T12:00:00+00:00")
        return value

    recipe_digest: str
    """Of the parsed recipe: comments and layout do not count."""
    source: Source
    calibration_digest: str | None
    """sha256 of the file of calibration texts; None when nothing was calibrated. (The digest in the
    quantization report is of the rows of token ids that were made from it.)"""
    target: Literal["target", "baseline"]
    """The folder the engine loads; ``baseline`` when the recipe quantizes neither weights nor KV cache."""
    draft_source: Source | None = None
    """The checkpoint of the draft model, for recipes that draft with one."""
    tools: dict[str, str]
    machine: dict[str, str | int]
    steps: tuple[StepRecord, ...]
    files: dict[str, FileRecord] = {}
    """Every file of the folder but the manifest, by its path with ``/``; filled by :func:`seal`."""


@dataclass(frozen=True)
class Artifact:
    """An engine folder whose manifest, recipe and files agree."""

    folder: Path
    recipe: Recipe
    manifest: Manifest
    target_dir: Path
    baseline_dir: Path
    draft_dir: Path | None = None
    """The draft model; None when the recipe drafts without one."""
    heads_dir: Path | None = None
    """The trained draft heads; None when the recipe drafts without any."""
    corpus_dir: Path | None = None
    """The store of the corpus; None when the recipe names none."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all sealed files; hard links count in full."""
        return sum(record.size for record in self.manifest.files.values())


# --------------------------------------------------------------------------- hashing


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def json_digest(value: object) -> str:
    """sha256 of a JSON value in its canonical form (sorted keys, no spaces)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def stamp(path: Path) -> Stamp:
    """Size, modification time and inode of the file a path leads to (links followed)."""
    status = path.stat()
    return Stamp(size=status.st_size, mtime_ns=status.st_mtime_ns, inode=status.st_ino)


def is_unchanged(folder: Path, files: Iterable[Path], known: Source) -> bool:
    """Whether ``folder`` holds exactly the files of ``known``, all with the same stamp."""
    names = {path.relative_to(folder).as_posix(): path for path in files}
    return names.keys() == known.files.keys() and all(
        stamp(path) == Stamp(**known.files[name].model_dump(exclude={"sha256"}))
        for name, path in names.items()
    )


def hash_source(folder: Path, files: Iterable[Path], known: Source | None = None) -> Source:
    """Hash the checkpoint ``files`` of ``folder``, reading only those whose stamp is not in ``known``."""
    hashed: dict[str, SourceFile] = {}
    for path in sorted(files):
        name = path.relative_to(folder).as_posix()
        now = stamp(path)
        before = known.files.get(name) if known else None
        if before is not None and Stamp(**before.model_dump(exclude={"sha256"})) == now:
            hashed[name] = before
        else:
            hashed[name] = SourceFile(**now.model_dump(), sha256=file_sha256(path))
    digest = json_digest({name: record.sha256 for name, record in hashed.items()})
    return Source(path=str(folder), digest=digest, files=hashed)


# --------------------------------------------------------------------------- facts for the manifest


def tool_versions() -> dict[str, str]:
    """Versions of everything whose change may change a build; read from package metadata, not imported."""
    versions = {"python": platform.python_version()}
    for key, package in (
        ("trtspec", "trtspec"),
        ("torch", "torch"),
        ("modelopt", "nvidia-modelopt"),
        ("transformers", "transformers"),
    ):
        try:
            versions[key] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[key] = "not installed"
    return versions


def machine_summary() -> dict[str, str | int]:
    """This machine in a few words: system, architecture, processor, cores, memory."""
    summary: dict[str, str | int] = {
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "processor": _processor_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    }
    if sys.platform != "win32":
        summary["memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return summary


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


# --------------------------------------------------------------------------- sealing


def sync_files(folder: Path) -> None:
    """Make a whole tree durable: every file's content, then every folder's names."""
    for root, _, names in os.walk(folder):
        for name in names:
            with (Path(root) / name).open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(root))


def sealed_files(folder: Path) -> list[Path]:
    """The files a manifest covers: all but itself and hidden ones (``.DS_Store`` and the like), sorted."""
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(root) / name for name in names if not name.startswith(".")]
    return sorted(path for path in found if path != folder / MANIFEST_FILE)


def seal(folder: Path, manifest: Manifest, known: Mapping[Path, str] | None = None) -> Manifest:
    """Make ``folder`` an engine: hash and sync all files, then write the manifest, last and atomically.

    ``known`` gives sha256 of files (paths under ``folder``) whose content was hashed already. Returns the
    manifest with its ``files``. Raises OSError (disk full, no permission) with the folder still unsealed.
    """
    known = known or {}
    sync_files(folder)
    files = {
        path.relative_to(folder).as_posix(): FileRecord(
            size=path.stat().st_size, sha256=known.get(path) or file_sha256(path)
        )
        for path in sealed_files(folder)
    }
    sealed = manifest.model_copy(update={"files": files})
    text = sealed.model_dump_json(by_alias=True, indent=1) + "\n"
    write_atomic(folder / MANIFEST_FILE, text.encode())
    return sealed


def utc_now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


# --------------------------------------------------------------------------- opening


def read_manifest(folder: Path) -> Manifest:
    """The manifest of an engine folder, files unchecked. Raises InputError as :func:`open_artifact`."""
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise InputError(
            Problem(f"{what}; name an engine folder that 'trtspec build' made", file=str(folder))
        )
    path = folder / MANIFEST_FILE
    if not path.exists():
        if (folder / RECIPE_FILE).exists() or (folder / BASELINE_DIR).exists():
            message = "the build of this engine was not finished (no manifest.json); run trtspec build again"
        else:
            message = "not an engine (no manifest.json); name a folder that 'trtspec build' made"
        raise InputError(Problem(message, file=str(folder)))
    try:
        raw: Any = read_user_json(path)
    except InputError as error:
        message = f"{error.problems[0].message}; the engine is damaged, run trtspec build --force"
        raise InputError(Problem(message, file=str(path))) from None
    version = raw.get("schema") if isinstance(raw, dict) else None
    if version != SCHEMA:
        message = (
            f"manifest version {shown_path(repr(version))} is not one this trtspec reads ({SCHEMA}); "
            "build the engine again, or use the trtspec that built it"
        )
        raise InputError(Problem(message, file=str(path)))
    try:
        return Manifest.model_validate(raw)
    except ValidationError as error:
        problems = [
            Problem(
                f"{item['msg']}; the manifest was edited or damaged, run trtspec build --force",
                file=str(path),
                key=".".join(str(part) for part in item["loc"]),
            )
            for item in error.errors()
        ]
        raise InputError(problems) from None


def open_artifact(folder: Path, *, check_hashes: bool = False) -> Artifact:
    """The engine in ``folder``, if it is sealed and unchanged since.

    Always checked: the manifest, that recipe.yaml is byte for byte the sealed one, and the name and
    size of every file. With ``check_hashes`` also every file's content (reads everything).
    Raises InputError with every difference found.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    problems = file_problems(folder, manifest, check_hashes=check_hashes)
    if problems:
        raise InputError(problems)
    recipe = load_recipe(folder / RECIPE_FILE)
    if recipe_digest(recipe) != manifest.recipe_digest:
        message = "reads differently under this trtspec than when it was sealed; run trtspec build again"
        raise InputError(Problem(message, file=str(folder / RECIPE_FILE)))
    return Artifact(
        folder=folder,
        recipe=recipe,
        manifest=manifest,
        target_dir=folder / manifest.target,
        baseline_dir=folder / BASELINE_DIR,
        draft_dir=_if_sealed(folder, DRAFT_DIR, manifest),
        heads_dir=_if_sealed(folder, HEADS_DIR, manifest),
        corpus_dir=_if_sealed(folder, CORPUS_DIR, manifest),
    )


def _if_sealed(folder: Path, name: str, manifest: Manifest) -> Path | None:
    """The folder ``name`` of the engine, if it was sealed with one."""
    return folder / name if any(file.startswith(f"{name}/") for file in manifest.files) else None


def file_problems(
    folder: Path,
    manifest: Manifest,
    *,
    check_hashes: bool,
    progress: Callable[[int, int], None] | None = None,
) -> list[Problem]:
    """How the files of ``folder`` differ from the sealed ones; ``progress(done, total)`` counts bytes."""
    problems: list[Problem] = []
    total = sum(record.size for record in manifest.files.values())
    done = 0

    def report(name: str, found: str) -> None:
        remedy = (
            "edit your own recipe and run trtspec build with it"
            if name == RECIPE_FILE
            else "run trtspec build --force"
        )
        problems.append(Problem(f"{found}; {remedy}", file=str(folder / name)))

    for name, record in manifest.files.items():
        path = folder / name
        if not all(map(is_plain_name, name.split("/"))):
            report(shown_path(name), "the manifest names no file of the engine")
        elif not path.is_file():
            report(name, "missing from the sealed engine")
        elif (size := path.stat().st_size) != record.size:
            report(name, f"changed since the engine was sealed ({size:,} bytes, sealed {record.size:,})")
        elif (check_hashes or name == RECIPE_FILE) and file_sha256(path) != record.sha256:
            report(name, "changed since the engine was sealed (same size, other content)")
        done += record.size
        if progress is not None:
            progress(done, total)
    if RECIPE_FILE not in manifest.files:
        report(RECIPE_FILE, "not listed in the manifest")
    known = set(manifest.files)
    for path in sealed_files(folder):
        name = path.relative_to(folder).as_posix()
        # A file added to a checkpoint can change how it loads; elsewhere it is somebody's note.
        if name not in known and name.split("/")[0] in MODEL_DIRS:
            report(name, "added after the engine was sealed")
    return problems


# --------------------------------------------------------------------------- listing


@dataclass(frozen=True)
class EngineEntry:
    """One folder among the built engines; ``artifact`` is None unless its state is sealed."""

    folder: Path
    state: Literal["sealed", "unfinished", "damaged"]
    artifact: Artifact | None = None
    problem: str = ""


def list_artifacts(engines_dir: Path) -> list[EngineEntry]:
    """Every engine in ``engines_dir`` by name, unfinished and damaged ones too; no other folders. A folder
    that is not there yet has none; InputError for what is no folder, MissingError without permission."""
    if engines_dir.exists() and not engines_dir.is_dir():
        raise InputError(Problem("is not a folder; name a folder of engines", file=str(engines_dir)))
    entries = []
    for folder in sorted(engines_dir.iterdir()) if engines_dir.is_dir() else []:
        if not folder.is_dir() or folder.name.startswith("."):
            if folder.name.startswith(".") and folder.name.endswith(".building"):
                message = (
                    "a build that runs now, was interrupted or crashed; trtspec build with its recipe goes "
                    f"on where it stopped; or delete {shlex.quote(str(folder))}"
                )
                name = folder.name[1 : -len(".building")]
                entries.append(EngineEntry(engines_dir / name, "unfinished", problem=message))
            continue
        try:
            entries.append(EngineEntry(folder, "sealed", open_artifact(folder)))
        except (TrtspecError, OSError) as error:
            # Whatever one engine's state, the others are listed.
            if (folder / MANIFEST_FILE).exists():
                entries.append(EngineEntry(folder, "damaged", problem=str(error).split("\n")[0]))
            elif (folder / RECIPE_FILE).exists():
                entries.append(EngineEntry(folder, "unfinished", problem=str(error).split("\n")[0]))
    return entries
