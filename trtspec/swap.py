"""Putting a sealed engine in the place of the one before, without losing what is not ours.

The engine that was there is renamed to ``.NAME.old`` and removed only when every file in it is one that a
build made, or one that was carried over. Anything else (a recipe that somebody edited, notes among the
weights) keeps the folder, under a name that is told.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from trtspec import artifact
from trtspec.artifact import BASELINE_DIR, MANIFEST_FILE, MODEL_DIRS, RECIPE_FILE
from trtspec.errors import InputError, Problem, TrtspecError
from trtspec.plan import LOG_FILE, STEPS_DIR
from trtspec.user_files import read_user_json, sync_folder

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Say = Callable[[str], None]


def refuse_foreign(folder: Path) -> None:
    """Never touch a folder that no build made: a recipe or a manifest of that name does not make it ours."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise InputError(Problem("exists and is not a folder; move it away", file=str(folder)))
    if not folder.is_dir() or not any(folder.iterdir()) or _has_our_manifest(folder):
        return
    # A damaged engine; what in it is not ours is kept by swap_in.
    if (folder / RECIPE_FILE).is_file() and (folder / BASELINE_DIR / "config.json").is_file():
        return
    raise InputError(Problem("exists and is not an engine; move it away", file=str(folder)))


def _has_our_manifest(folder: Path) -> bool:
    try:
        value = read_user_json(folder / MANIFEST_FILE)
    except TrtspecError:
        return False
    schema = value.get("schema") if isinstance(value, dict) else None
    return isinstance(schema, str) and schema.startswith("trtspec.manifest/")


def recover(folder: Path, say: Say) -> None:
    """Finish or undo a swap that was interrupted between its two renames."""
    old = _old(folder)
    if not old.exists():
        return
    if folder.exists():
        _give_up(old, folder, say)
    else:
        say(f"found an interrupted swap: putting {folder} back")
        old.rename(folder)


def swap_in(work: Path, folder: Path, say: Say) -> None:
    """Put the sealed folder ``work`` in place; a reader sees the old engine or the new one. Notes beside the
    old engine's files are in the new one before it is there."""
    old = _old(folder)
    if folder.exists():
        _keep_notes(folder, work)
        folder.rename(old)
    work.rename(folder)
    sync_folder(folder.parent)
    if old.exists():
        _give_up(old, folder, say)
    shutil.rmtree(folder / STEPS_DIR)


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _keep_notes(old: Path, new: Path) -> None:
    """Carry over what somebody put beside the files of an engine (reports, notes, hidden files)."""
    ours = {MANIFEST_FILE, RECIPE_FILE, STEPS_DIR, LOG_FILE, *MODEL_DIRS}
    for path in old.iterdir():
        copy = new / path.name
        if path.name in ours or copy.exists():
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, copy, symlinks=True, copy_function=link_or_copy)
        elif path.is_symlink():
            copy.symlink_to(os.readlink(path))
        elif path.is_file():
            link_or_copy(path, copy)


def _give_up(old: Path, new: Path, say: Say) -> None:
    """Remove the old engine, or keep it aside if it holds what neither a build made nor the new one has."""
    foreign = _foreign(old, new)
    if not foreign:
        shutil.rmtree(old)
        return
    number = 1
    while (aside := new.with_name(f"{new.name}.replaced-{number}")).exists():
        number += 1
    old.rename(aside)
    more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
    say(f"the engine that was there holds what no build made ({foreign[0]}{more}); it is kept as {aside}")


def _foreign(old: Path, new: Path) -> list[str]:
    try:
        sealed = artifact.read_manifest(old).files
    except TrtspecError:
        sealed = {}
    found = []
    for root, folders, names in os.walk(old):
        links = [name for name in folders if (Path(root) / name).is_symlink()]
        for path in (Path(root) / name for name in (*names, *links)):
            name = path.relative_to(old).as_posix()
            top = name.split("/")[0]
            if top in (MANIFEST_FILE, STEPS_DIR, LOG_FILE):
                continue
            # Damaged weights are damage; a recipe that differs from the sealed one is somebody's work.
            if top in MODEL_DIRS and (name in sealed or (new / name).is_file()):
                continue
            if name in sealed and path.is_file() and artifact.file_sha256(path) == sealed[name].sha256:
                continue
            if not _carried_over(path, new / name):
                found.append(name)
    return sorted(found)


def _carried_over(path: Path, copy: Path) -> bool:
    if path.is_symlink():
        return copy.is_symlink() and os.readlink(path) == os.readlink(copy)
    if not copy.is_file() or not path.is_file():
        return False
    return os.path.samefile(path, copy) or artifact.file_sha256(path) == artifact.file_sha256(copy)


def link_or_copy(source: str | Path, destination: str | Path) -> None:
    """Hard link where the file system allows it (no space, no time), else copy. Symbolic links are
    followed: an engine must not point out of itself."""
    real = Path(source).resolve()
    try:
        os.link(real, destination)
    except OSError as error:
        if error.errno in NO_SPACE:
            raise
        shutil.copy2(real, destination)
