"""A folder that appears whole or not at all.

Work goes on in ``OUT.partial-PID`` beside ``OUT`` and is renamed at the end, so a reader of ``OUT`` never
sees half of it, whatever kills the writer. The writer holds a lock (``flock``) on the partial folder
itself: it vanishes with the process, so the next run can tell what was left behind from what is being
written now without trusting process ids, and no lock file remains.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from trtspec.errors import InputError


@contextlib.contextmanager
def new_folder(out: Path, *, say: Callable[[str], None] = lambda line: None) -> Iterator[Path]:
    """Yield an empty folder that becomes ``out`` when the block ends without an exception.

    Partial folders of runs that died are removed first, each with a line to ``say``. An exception
    (Ctrl-C included) removes the partial folder. Raises InputError when ``out`` already exists and is
    not an empty folder, or when a living process is writing the same ``out``.
    """
    refuse_existing(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    remove_partials(out, say=say)
    partial, lock = _locked_partial(out)
    try:
        yield partial
        _flush(partial)
        try:
            os.rename(partial, out)
        except OSError as error:
            refuse_existing(out)
            raise InputError(f"{out}: cannot be created by renaming {partial.name}: {error}") from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)
    _sync(out.parent)


def refuse_existing(out: Path) -> None:
    """Raise InputError unless ``out`` is free: absent, or an empty folder."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise InputError(f"{out}: exists and is not a folder; give another path or remove it")
    if out.is_dir() and any(out.iterdir()):
        raise InputError(f"{out}: exists and is not empty; give another path or remove it")


def remove_partials(out: Path, *, say: Callable[[str], None]) -> None:
    """Remove what interrupted runs for ``out`` left; InputError if one of them still runs."""
    for partial in sorted(out.parent.glob(f"{_escape(out.name)}.partial-*")):
        try:
            lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        except NotADirectoryError:
            say(f"found {partial}: a stray file of an interrupted run; removing it")
            partial.unlink(missing_ok=True)
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"{out}: another process is writing it now (in {partial.name}); wait for it, or stop it"
            ) from None
        else:
            say(f"found {partial}: left by an interrupted run; removing it and starting over")
            shutil.rmtree(partial, ignore_errors=True)
        finally:
            os.close(lock)


def _locked_partial(out: Path) -> tuple[Path, int]:
    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    while True:
        try:
            partial.mkdir()
            lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        except FileExistsError:
            raise InputError(f"{out}: this process is already writing it (in {partial.name})") from None
        except FileNotFoundError:
            continue
        except OSError as error:
            raise InputError(f"{partial}: cannot be created: {error.strerror}") from error
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Between mkdir and flock another run may have taken the folder for a dead one and removed it.
        try:
            if os.path.samestat(os.fstat(lock), os.stat(partial)):
                return partial, lock
        except FileNotFoundError:
            pass
        os.close(lock)


def _flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _escape(name: str) -> str:
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)
