"""The file that says a server is ready: it exists while that server is, and belongs to it alone.

Whoever waits for the file must not find one of a server that is gone, and no server may take away another's,
or a file that is none of ours.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtspec.errors import InputError, Problem
from trtspec.user_files import check_writable, explain_os_error, parse_json, shown_path, write_user_file

_MAX_BYTES = 1_000_000


def claim(path: Path) -> Path:
    """Make sure that ``path`` can be written and remove what a killed server left there; return the file
    behind symbolic links.

    Raises InputError when something else is there, a ready file of a running server included, and
    MissingError when the machine does not let it be written.
    """
    resolved = Path(os.path.realpath(path))
    check_writable(resolved)
    try:
        if not os.path.lexists(resolved):
            return resolved
        if not resolved.is_file():
            raise _refusal(path, "is not a regular file; name another place")
        content = resolved.read_bytes() if resolved.stat().st_size <= _MAX_BYTES else b"too long"
        if content:
            server_id = _server_id(content)
            if server_id is None:
                raise _refusal(path, "exists and is no ready file; move it away or name another place")
            if _is_running(server_id):
                raise _refusal(path, "belongs to a server that is running; stop it or name another place")
        resolved.unlink(missing_ok=True)
    except OSError as error:
        raise explain_os_error(error, path) from None
    return resolved


def write(path: Path, fields: Mapping[str, Any]) -> None:
    """Write ``fields``, which hold the ``server_id``, as JSON."""
    write_user_file(path, (json.dumps(fields, indent=2) + "\n").encode())


def withdraw(path: Path, server_id: str) -> None:
    """Remove the file if it is this server's."""
    try:
        if (
            path.is_file()
            and path.stat().st_size <= _MAX_BYTES
            and _server_id(path.read_bytes()) == server_id
        ):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise explain_os_error(error, path) from None


def _refusal(path: Path, message: str) -> InputError:
    return InputError(Problem(message, file=shown_path(path)))


def _server_id(content: bytes) -> str | None:
    try:
        found = parse_json(content)
    except ValueError:
        return None
    name = found.get("server_id") if isinstance(found, dict) else None
    return name if isinstance(name, str) and name.startswith("trtspec-") else None


def _is_running(server_id: str) -> bool:
    """Whether a server was started under this name: it is in its command line."""
    wanted = f"--id={server_id}".encode()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if wanted in Path("/proc", name, "cmdline").read_bytes().split(b"\0"):
                    return True
            except OSError:
                continue  # it has ended
    return False
