"""A folder that appears whole or not at all.

Work goes on in ``OUT.partial-PID`` beside ``OUT`` and is renamed at the end, so a reader of ``OUT`` never
sees half of it, whatever kills the writer. The writer holds a lock (``flock``) on the partial folder
itself: it vanishes with the process, so the next run can tell what was left behind from what is being
written now without trusting process ids, and no lock file remains. A mark in the partial folder says that it
is ours: somebody's own folder of such a name is never removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trtspec.errors import InputError
from trtspec.user_files import explain_os_error, shown_path, sync_folder

MARK = ".trtspec-partial"
"""The file that marks a partial folder as ours; it is taken out when the folder is renamed."""


@contextlib.contextmanager
def new_folder(
    out: Path, *, replace: bool = False, say: Callable[[str], None] = lambda line: None
) -> Iterator[Path]:
    """Yield a folder (empty but for the hidden :data:`MARK`) that becomes ``out`` when the block ends without
    an exception.

    Partial folders of runs that died are removed first, each with a line to ``say``. An exception
    (Ctrl-C included) removes the partial folder. With ``replace`` a folder ``out`` is given up for the new
    one, but not before that is complete. Raises InputError when ``out`` already exists and is not an empty
    folder, when a living process is writing the same ``out``, or for a path that cannot be; MissingError
    when the disk or a permission does not allow it.
    """
    try:
        if not replace:
            refuse_existing(out)
        out.parent.mkdir(parents=True, exist_ok=True)
        remove_partials(out, say=say)
        partial, lock = _locked_partial(out)
    except OSError as error:
        raise explain_os_error(error) from None
    try:
        yield partial
        _flush(partial)
        _rename(partial, out, replace=replace)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)
    sync_folder(out.parent)


def refuse_existing(out: Path) -> None:
    """Raise InputError unless ``out`` is free: absent, or an empty folder."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise InputError(f"{out}: exists and is not a folder; give another path or remove it")
    if out.is_dir() and any(out.iterdir()):
        raise InputError(f"{out}: exists and is not empty; give another path or remove it")


def check_new_folder(out: Path) -> None:
    """Raise what :func:`new_folder` would raise for ``out``, before minutes of work; leaves nothing."""
    whole = Path(os.path.abspath(out))
    try:
        refuse_existing(out)
        os.rmdir(tempfile.mkdtemp(prefix=".trtspec-", dir=next(one for one in whole.parents if one.exists())))
    except OSError as error:
        raise explain_os_error(error, out) from None


def refuse_replacing(out: Path, made_here: Callable[[str], bool], *, spare: Sequence[Path] = ()) -> None:
    """Raise InputError unless ``out`` may be given up for a new folder.

    It may if it is free, or holds nothing but files whose names ``made_here`` knows as those of such a
    folder; a folder of somebody's own (notes, a model) is never given up. ``spare`` are folders that the
    work reads or writes: ``out`` may be none of them, lie in none and hold none.
    """
    whole = out.resolve()
    for folder in spare:
        other = folder.resolve()
        if whole == other or whole in other.parents or other in whole.parents:
            raise InputError(f"{out}: overlaps {folder}, which is needed itself; name another folder")
    if not out.is_dir() or out.is_symlink():
        refuse_existing(out)
        return
    foreign = sorted(path.name for path in out.iterdir() if not (path.is_file() and made_here(path.name)))
    if foreign:
        raise InputError(
            f"{out}: holds {shown_path(foreign[0])}, which no such folder holds, so it is not replaced; "
            "give another path or remove it"
        )


def remove_partials(out: Path, *, say: Callable[[str], None]) -> None:
    """Remove what interrupted runs for ``out`` left; InputError if one of them still runs.

    Ours are folders ``OUT.partial-NUMBER`` with our mark, and nothing else."""
    ours = re.compile(rf"{re.escape(out.name)}\.partial-\d+(-old)?")
    if not out.parent.is_dir():
        return
    for name in sorted(os.listdir(out.parent)):
        partial = out.parent / name
        if not ours.fullmatch(name):
            continue
        try:
            lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # gone, a file, a link, not readable: none of our folders
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"{out}: another process is writing it now (in {partial.name}); wait for it, or stop it"
            ) from None
        else:
            if (partial / MARK).is_file():
                say(f"found {partial}: left by an interrupted run; removing it and starting over")
                shutil.rmtree(partial, ignore_errors=True)
        finally:
            os.close(lock)


def _locked_partial(out: Path) -> tuple[Path, int]:
    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    try:
        partial.mkdir()
    except FileExistsError:
        raise InputError(
            f"{out}: {partial.name} is in the way: this process is writing it, or it is not ours; "
            "move it away"
        ) from None
    lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    # Without the mark nobody takes the folder for a dead run's, and with it the lock is held already.
    fcntl.flock(lock, fcntl.LOCK_EX)
    (partial / MARK).touch()
    return partial, lock


def _rename(partial: Path, out: Path, *, replace: bool) -> None:
    old = partial.with_name(f"{partial.name}-old")
    try:
        if replace and out.is_dir():
            (out / MARK).touch()  # if we are killed from here on, the next run removes it
            os.rename(out, old)
        os.rename(partial, out)
    except OSError as error:
        if replace:
            raise explain_os_error(error, out) from None
        refuse_existing(out)
        raise InputError(f"{out}: cannot be created by renaming {partial.name}: {error}") from error
    (out / MARK).unlink(missing_ok=True)
    if replace:
        shutil.rmtree(old, ignore_errors=True)


def _flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            _sync(path)
    sync_folder(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """One JSON file of a folder that is being made: what is made durable is the folder as a whole."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
