"""Files and paths that a user names: read without hanging, written without replacing what is no file.

A path in a recipe, an option or somebody's model folder can lead to anything: a named pipe that blocks the
reader, a device, a folder, a name longer than the file system takes, JSON nested deeper than the stack.
Whatever it is, it becomes an InputError or MissingError that names it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import Any

from trtspec.errors import InputError, MissingError, Problem, TrtspecError

MAX_JSON_BYTES = 256_000_000
"""The largest tokenizer.json files have a tenth of it."""
MAX_JSON_DEPTH = 100
"""Levels of lists and objects in each other. The parser takes ten times that, code that walks the value does
not; nothing that is read here has more than ten."""

_MACHINE_LACKS = frozenset(
    getattr(errno, name)
    for name in (
        "ENOSPC", "EDQUOT", "EFBIG", "EACCES", "EPERM", "EROFS", "EMFILE", "ENFILE", "ENOMEM", "EIO", "EBUSY",
        "ETXTBSY", "EAGAIN", "ENOLCK", "ESTALE", "EADDRINUSE", "ECONNREFUSED", "ETIMEDOUT",
    )
)  # fmt: skip
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")
_REMEDIES = {
    errno.ENOSPC: "free some space or name another place",
    errno.EDQUOT: "free some space or name another place",
    errno.EROFS: "name another place",
    errno.EACCES: "give permission or name another place",
    errno.EPERM: "give permission or name another place",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EISDIR: "is a folder; name a file",
    errno.ELOOP: "symbolic links go round in a circle; remove one",
    errno.ENOENT: "check the path",
    errno.EEXIST: "something else has this name; move it away or name another place",
}


def explain_os_error(error: OSError, path: object = None) -> TrtspecError:
    """What the operating system refused, as the error to raise for it: MissingError for what the machine
    lacks (space, permission, memory ...), else InputError. ``path`` is what the user named; without it
    the message names what ``error`` does."""
    # After a rename the second name is the one that was asked for.
    place = shown_path(path or error.filename2 or error.filename or "")
    why = error.strerror or str(error) or type(error).__name__
    remedy = _REMEDIES.get(error.errno or 0)
    message = f"{why[0].lower()}{why[1:]}" + (f"; {remedy}" if remedy else "")
    problem = Problem(message, file=place or None)
    return MissingError(str(problem)) if error.errno in _MACHINE_LACKS else InputError(problem)


def shown_path(path: object) -> str:
    """A path for a message: undecodable bytes and control characters escaped, cut in the middle."""
    text = os.fsdecode(path) if isinstance(path, bytes) else str(path)
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return text if len(text) <= 300 else f"{text[:140]}...{text[-140:]}"


_BREAKS = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
"""What moves a terminal's cursor, breaks a line, turns the direction of writing or is no character."""


def is_one_line(text: str) -> bool:
    """Whether ``text`` is shown as it is: no control characters, line breaks, bidirectional marks."""
    return _BREAKS.search(text) is None


def visible(text: str) -> str:
    """``text`` with everything escaped that is not shown as it is (:func:`is_one_line`): what a model, a
    program or a file said must not move the cursor, forge a line or turn the text around it."""
    return _BREAKS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


# --------------------------------------------------------------------------- paths


def user_path(text: str | os.PathLike[str]) -> Path:
    """The path that a user wrote, ``~`` and ``~name`` expanded. InputError for one that no file can have."""
    raw = os.fspath(text)
    if not raw:
        raise InputError("an empty path; name a file or folder")
    if "\0" in raw:
        raise InputError(f"{shown_path(raw)}: the path holds a NUL character; remove it")
    try:
        path = Path(raw).expanduser() if raw.startswith("~") else Path(raw)
    except RuntimeError:
        name = raw.split("/", 1)[0]
        home = "the home folder" if name == "~" else f"a user {name[1:]}"
        raise InputError(
            f"{shown_path(raw)}: {home} is not known here; write the path out, or ./{name} for a folder "
            "of that name"
        ) from None
    longest = max((len(os.fsencode(part)) for part in path.parts), default=0)
    if longest > 255 or len(os.fsencode(path)) > 4095:
        limit = f"{longest} bytes, a name has at most 255" if longest > 255 else "at most 4095 bytes"
        raise InputError(f"{shown_path(raw)}: the path is too long ({limit}); use a shorter name")
    return path


def is_plain_name(name: str) -> bool:
    """Whether ``name`` names a file directly in a folder: not empty, no ``/``, no ``..``, not too long."""
    return (
        bool(name)
        and name not in (".", "..")
        and "/" not in name
        and "\0" not in name
        and len(os.fsencode(name)) <= 255
    )


# --------------------------------------------------------------------------- reading


def open_user_file(path: Path) -> int:
    """A descriptor for reading the regular file ``path``; the caller closes it. InputError for anything else
    (a missing file, a folder, a named pipe, which is not waited for), MissingError without permission."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise InputError(Problem("no such file", file=shown_path(path))) from None
    except ValueError:
        raise InputError(Problem("holds a NUL character", file=shown_path(path))) from None
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise InputError(Problem("is not a regular file", file=shown_path(path))) from None
        raise explain_os_error(error, path) from None
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    what = "is a folder; a file is needed" if stat.S_ISDIR(mode) else "is not a regular file"
    raise InputError(Problem(what, file=shown_path(path)))


def read_user_bytes(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """The content of a regular file; errors as :func:`open_user_file`, InputError above ``max_bytes``."""
    with open(open_user_file(path), "rb") as file:
        try:
            size = os.fstat(file.fileno()).st_size
            if size > max_bytes:
                message = f"has {size / 1e6:,.0f} MB; at most {max_bytes / 1e6:,.0f} MB are read"
                raise InputError(Problem(message, file=shown_path(path)))
            return file.read(min(size + 65_536, max_bytes))  # files of /proc have no size
        except OSError as error:
            raise explain_os_error(error, path) from None


def read_user_text(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> str:
    """The text of a UTF-8 file; errors as :func:`read_user_bytes`."""
    try:
        return read_user_bytes(path, max_bytes=max_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"is not UTF-8: byte 0x{error.object[error.start]:02x} at {error.start}; save it as UTF-8"
        raise InputError(Problem(message, file=shown_path(path))) from None


def parse_json(raw: str | bytes) -> Any:
    """The value of a JSON text. ValueError, with a short reason, for everything that is none, is nested too
    deeply, has a number of thousands of digits or text that no file can hold (half of a surrogate pair)."""
    try:
        text = raw if isinstance(raw, str) else raw.decode("utf-8-sig")
        value = json.loads(text)
        if text.count("[") + text.count("{") > MAX_JSON_DEPTH and _is_deeper(value, MAX_JSON_DEPTH):
            raise RecursionError
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("text with half of a surrogate pair (\\ud800 to \\udfff)") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"byte 0x{error.object[error.start]:02x} at {error.start} is not UTF-8") from None
    except json.JSONDecodeError:
        raise
    except ValueError:
        raise ValueError("a number with thousands of digits") from None


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether lists and objects lie in each other more than ``depth`` levels deep."""
    level = [value]
    for _ in range(depth + 1):
        inner = [
            one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)
        ]
        if not inner:
            return False
        level = [one for each in inner for one in each]
    return True


def read_user_json(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The value in a JSON file; InputError if it cannot be read or is no JSON, MissingError without
    permission."""
    raw = read_user_bytes(path, max_bytes=max_bytes)
    try:
        return parse_json(raw)
    except ValueError as error:
        raise InputError(Problem(f"is not JSON: {error}", file=shown_path(path))) from None


# --------------------------------------------------------------------------- writing


def write_atomic(path: Path, content: bytes, *, overwrite: bool = True) -> None:
    """Write a file so that after a crash it holds the old or the new content, never a part.

    A symbolic link is followed: what it leads to is written, the link stays. A device or a pipe is written
    into, never replaced. Without ``overwrite`` anything that exists under the name is a FileExistsError,
    decided by the file system. Raises OSError.
    """
    path = Path(path)
    if overwrite:
        if _is_special(path):
            with open(path, "wb", buffering=0) as stream:
                rest = memoryview(content)
                while rest:
                    rest = rest[stream.write(rest) :]
            return
        path = _replaceable(path)
    descriptor, temporary = _temporary_beside(path)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, _mode_of(path))
        if overwrite:
            os.replace(temporary, path)
        else:
            os.link(temporary, path)
            os.unlink(temporary)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
    sync_folder(path.parent)


def _replaceable(path: Path) -> Path:
    """What ``path`` leads to, for a file to be put there; IsADirectoryError if that is a folder."""
    path = Path(os.path.realpath(path))
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    return path


def _temporary_beside(path: Path) -> tuple[int, str]:
    """A new file in the same folder, open. Not named after ``path``: that may be as long as a name can be."""
    return tempfile.mkstemp(prefix=".trtspec-", suffix=".tmp", dir=path.parent)


def _is_special(path: Path) -> bool:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _mode_of(path: Path) -> int:
    """Permissions of the file that is replaced, else those of a new file."""
    try:
        return stat.S_IMODE(os.stat(path).st_mode)
    except OSError:
        umask = os.umask(0)
        os.umask(umask)
        return 0o666 & ~umask


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_user_file(path: Path, content: bytes, *, overwrite: bool = True) -> None:
    """:func:`write_atomic` for a file that a user named; its errors as InputError or MissingError."""
    try:
        write_atomic(path, content, overwrite=overwrite)
    except FileExistsError:
        message = "exists; choose another name, or --force to overwrite"
        raise InputError(Problem(message, file=shown_path(path))) from None
    except OSError as error:
        raise explain_os_error(error, path) from None


def check_writable(path: Path) -> None:
    """Raise what :func:`write_user_file` would raise for ``path``, before minutes of work; writes nothing."""
    try:
        if _is_special(path):
            return
        descriptor, temporary = _temporary_beside(_replaceable(path))
        os.close(descriptor)
        os.unlink(temporary)
    except OSError as error:
        raise explain_os_error(error, path) from None
