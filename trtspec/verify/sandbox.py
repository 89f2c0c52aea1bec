"""Code that a model wrote, run in a child process with limits.

What holds it: a process of its own in a new folder that is deleted afterwards, an environment without the
user's variables, limits of the kernel (processor time, memory, file size, open files, processes, no core
file), a deadline, output that goes to a limited file, and, where the kernel lets an ordinary user make them,
namespaces of its own: no network interface, no other process to signal. What does not: it runs as this user
(as nobody, if this is root), can read this user's files and write where its user may. It keeps accidents in;
run models that you do not trust in a container besides.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import tempfile
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trtspec import process
from trtspec.errors import TrtspecError

# The kernel limits the number of processes of every user but root. So where this runs as root, the program
# runs as "nobody", which keeps one capability (2, CAP_DAC_READ_SEARCH): to read, as root's Python may lie in
# root's home.
_BOOTSTRAP = """\
import os, resource, runpy, sys
mark, seconds, memory, size, processes = sys.argv[1], *map(int, sys.argv[2:6])
limits = {
    resource.RLIMIT_CPU: seconds, resource.RLIMIT_AS: memory, resource.RLIMIT_FSIZE: size,
    resource.RLIMIT_NOFILE: 64, resource.RLIMIT_NPROC: processes, resource.RLIMIT_CORE: 0,
}
report = os.dup(1)
os.set_inheritable(report, False)
out = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
os.dup2(out, 1)
os.dup2(out, 2)
for limit, value in limits.items():
    hard = resource.getrlimit(limit)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))
if os.geteuid() == 0:
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(8, 1, 0, 0, 0):  # PR_SET_KEEPCAPS
        raise OSError(ctypes.get_errno(), "prctl")
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    version = (ctypes.c_uint32 * 2)(0x20080522, 0)
    kept = (ctypes.c_uint32 * 6)(1 << 2, 1 << 2, 0, 0, 0, 0)
    if libc.capset(version, kept):
        raise OSError(ctypes.get_errno(), "capset")
sys.argv = ["program.py"]
try:
    runpy.run_path("program.py", run_name="__main__")
except BaseException as error:
    os.write(report, f"{type(error).__name__}: {error}"[:500].replace("\\n", " ").encode(errors="replace"))
    os._exit(1)
os.write(report, mark.encode())
os._exit(0)
"""


@dataclass(frozen=True)
class Limits:
    seconds: float = 10.0
    """Of the clock; of the processor, rounded up."""
    memory_bytes: int = 1 << 30
    """Of address space."""
    file_bytes: int = 10_000_000
    """Of each file, its output included."""
    processes: int = 256
    """Of this user, all together; of "nobody", if this user is root."""


@dataclass(frozen=True)
class Outcome:
    """``why``: the error, "" if the program ran to its end."""

    passed: bool
    why: str = ""


_NOBODY = 65534


@functools.cache
def isolated() -> bool:
    """Whether this machine lets a program be started without a network and without other processes
    (unshare, user namespaces)."""
    try:
        process.run([*_ALONE, "true"], timeout_s=10)
    except TrtspecError:
        return False
    return True


_ALONE = (
    "unshare",
    *(() if os.geteuid() == 0 else ("--map-root-user",)),
    "--net",
    "--pid",
    "--fork",
    "--kill-child",
)


def run_code(program: str, limits: Limits = Limits()) -> Outcome:
    """Run the Python ``program``; it passes if it runs to its last line without an exception.

    One that ends by itself before that (sys.exit, os._exit) does not pass. Never raises for what the program
    does; raises OSError where no temporary folder can be made.
    """
    with _scratch_folder() as name:
        folder = Path(name)
        (folder / "program.py").write_bytes(program.encode(errors="replace"))
        (folder / "bootstrap.py").write_text(_BOOTSTRAP)
        if os.geteuid() == 0:
            os.chown(folder, _NOBODY, _NOBODY)
        mark = uuid.uuid4().hex
        numbers = (int(limits.seconds + 1), limits.memory_bytes, limits.file_bytes, limits.processes)
        python = [sys.executable, "-I", "-B", "bootstrap.py", mark, *map(str, numbers)]
        unshare = shutil.which(_ALONE[0])
        alone = [unshare, *_ALONE[1:]] if unshare is not None and isolated() else []
        environment = {
            "PATH": os.defpath,
            "HOME": name,
            "TMPDIR": name,
            "LC_ALL": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
        }
        said: deque[str] = deque(maxlen=process.TAIL_LINES)  # a program may print without end
        try:
            process.run(
                [*alone, *python], env=environment, cwd=folder, timeout_s=limits.seconds, on_line=said.append
            )
        except TrtspecError as error:
            # What unshare says when it is ended with its child is not the program's own.
            own = [line for line in said if line != mark and not line.startswith("unshare: ")]
            return Outcome(False, _why(own, error))
        if list(said) == [mark]:
            return Outcome(True)
        return Outcome(False, "it ended before its last line")


@contextlib.contextmanager
def _scratch_folder() -> Iterator[str]:
    """A new folder that is deleted whatever a program has made of it."""
    held = tempfile.TemporaryDirectory(prefix="trtspec-code-")
    try:
        yield held.name
    finally:
        try:
            held.cleanup()
        except (RecursionError, OSError):  # folders nested deeper than Python's stack
            with contextlib.suppress(TrtspecError):
                process.run(["rm", "-rf", "--", held.name], timeout_s=60)


def _why(said: Sequence[str], error: TrtspecError) -> str:
    if said:
        return said[-1]
    lines = str(error).splitlines()
    return lines[0].partition(": ")[2] or lines[0] if lines else type(error).__name__
