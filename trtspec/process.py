"""Child processes: the only place that starts any.

Every child gets its own session, so a Ctrl-C at the terminal reaches only this process, which then ends
the child's whole group. Every child also gets Linux's parent-death signal, so it does not outlive this
process even when this process is killed with SIGKILL. The signal is bound to the *thread* that started
the child: start children from a thread that lives as long as they do.

The parent-death signal is set by a tiny Python program that then becomes the real one (``exec``), not by
a function between fork and exec: that would run Python code in a forked copy of a threaded process,
which may deadlock.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from trtspec.errors import (
    EXIT_BAD_INPUT,
    EXIT_BUG,
    EXIT_MISSING,
    InputError,
    MissingError,
    Problem,
    TrtspecError,
)
from trtspec.user_files import explain_os_error, shown_path

TAIL_LINES = 30
_MAX_LINE = 100_000
"""Characters: a line that does not end must not fill the memory; its pieces count as lines."""
_GRACE_S = 2.0
_BECOME = """\
import ctypes, os, sys
parent, has_ctype, argv = int(sys.argv[1]), sys.argv[2] == "1", sys.argv[3:]
PR_SET_PDEATHSIG, SIGKILL = 1, 9
if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) != 0:
    sys.exit("prctl(PR_SET_PDEATHSIG) failed")
if os.getppid() != parent:
    sys.exit("the parent died first")
if not has_ctype:  # Python itself sets it in the C locale (PEP 538)
    os.environ.pop("LC_CTYPE", None)
os.execv(argv[0], argv)
"""
_GUARD = """\
import glob, os, shutil, signal, sys
group, marked, mark, paths = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]
for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(signum, signal.SIG_IGN)
if sys.stdin.buffer.read() == b"":
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
    for pattern in paths:
        for path in glob.glob(pattern):
            try:
                shutil.rmtree(path, ignore_errors=True) if os.path.isdir(path) else os.unlink(path)
            except OSError:
                pass
    try:
        if os.path.isfile(marked):
            with open(marked, "rb") as file:
                content = file.read(1000000)
            if os.fsencode(mark) in content:
                os.unlink(marked)
    except OSError:
        pass
"""


class ChildFailed(MissingError):
    """A child ended badly for a reason of its own. ``returncode`` is its exit code (-N: signal N),
    ``tail`` the last lines that it wrote."""

    def __init__(self, message: str, returncode: int | None, tail: Sequence[str]) -> None:
        super().__init__("\n".join([message, *(f"  | {line}" for line in tail)]))
        if returncode == EXIT_BUG:
            self.exit_code = EXIT_BUG
        self.returncode = returncode
        self.tail = tuple(tail)


@dataclass(frozen=True)
class Progress:
    """``done`` of ``total`` units of ``step``."""

    step: str
    done: int
    total: int


def parse_progress(line: str) -> Progress | None:
    """The progress that a child reports in ``line``, None if it is any other line.

    A progress line is one JSON object: ``{"progress": {"step": str, "done": int, "total": int}}``.
    """
    if not line.startswith('{"progress"'):
        return None
    try:
        value = json.loads(line)["progress"]
        return Progress(str(value["step"]), int(value["done"]), int(value["total"]))
    except (ValueError, TypeError, KeyError):
        return None


class Child:
    """A running child, leader of its own session and process group."""

    def __init__(self, popen: subprocess.Popen[str], name: str) -> None:
        self._popen = popen
        self._returncode: int | None = None
        self.name = name

    @property
    def pid(self) -> int:
        """Also the id of its process group."""
        return self._popen.pid

    def poll(self) -> int | None:
        """Its exit code (-N: ended by signal N), None while it runs."""
        return self._popen.poll()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Its exit code, or None if it still runs after ``timeout_s``."""
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        """Ask it (not its group) to end: SIGTERM."""
        self._popen.terminate()

    def kill_group(self) -> None:
        """SIGKILL to the whole group, also to members that outlived the leader; waits for the leader."""
        _kill_group(self.pid, signal.SIGKILL)
        self._popen.wait()


class Guard:
    """A process that outlives this one, to clean up after it if it dies without :meth:`release`."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen

    def release(self) -> None:
        """Nothing is left to clean up."""
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.write(b"done")
            self._popen.stdin.close()
        self._popen.wait()


def run(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    log: Path | None = None,
    on_line: Callable[[str], None] | None = None,
    timeout_s: float | None = None,
    foreign: bool = False,
) -> None:
    """Run ``argv`` to its end; return only if it exits with 0.

    stdout and stderr come merged, line by line: each goes to ``on_line``, and all but progress lines
    (:func:`parse_progress`) to the end of the file ``log``. ``env`` replaces the environment.

    Raises InputError or MissingError with the child's own words when it exits with trtspec's code for
    them (not of a ``foreign`` program, whose codes mean something else), MissingError when the program does
    not exist, ChildFailed otherwise (also after ``timeout_s``).
    On any exception, Ctrl-C included, the whole group is ended before the exception goes on.
    """
    name = _name(argv)
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        log_file = stack.enter_context(open_log(log)) if log else None
        problem: list[BaseException] = []
        heard = 0
        left = threading.Event()

        def read(output: IO[str]) -> None:
            nonlocal heard
            for raw in iter(lambda: output.readline(_MAX_LINE), ""):
                if left.is_set():
                    return
                heard += 1
                line = raw.rstrip("\n")
                if parse_progress(line) is None:
                    tail.append(line)
                    if log_file:
                        log_file.write(line + "\n")
                        log_file.flush()
                if on_line and not problem:
                    try:
                        on_line(line)
                    except BaseException as error:  # the caller's own error: raised in the caller's thread
                        problem.append(error)

        popen: subprocess.Popen[str] | None = None
        reader: threading.Thread | None = None
        try:
            with _interrupts_deferred():
                if env is None:
                    # Or a Python child's stdout would come after its stderr, whatever was said first.
                    env = {"PYTHONUNBUFFERED": "1", **os.environ}
                popen = _popen(argv, env=env, cwd=cwd, output=subprocess.PIPE)
                assert popen.stdout is not None
                reader = threading.Thread(
                    target=read, args=(popen.stdout,), name=f"output of {name}", daemon=True
                )
                reader.start()
            while not _has_ended(popen.pid):
                if problem:
                    raise problem[0]
                if deadline is not None and time.monotonic() > deadline:
                    raise ChildFailed(f"{name}: not done after {timeout_s:g} s; stopped", None, tail)
                time.sleep(0.01)
        except BaseException:
            if popen is not None:
                _end_group(popen)
            raise
        finally:
            if popen is not None and reader is not None:
                # The leader is not reaped yet, so its group id cannot belong to anyone else. Members that
                # outlived it would hold the pipe open for ever.
                _kill_group(popen.pid, signal.SIGKILL)
                popen.wait()
                before = -1
                while reader.is_alive() and heard != before:
                    before = heard
                    reader.join(_GRACE_S)
                left.set()
                assert popen.stdout is not None
                # One that left the group (setsid) holds the pipe as long as it lives: it is not waited for.
                if not reader.is_alive():
                    popen.stdout.close()
    if problem:
        raise problem[0]
    if popen.returncode != 0:
        raise _failure(name, popen.returncode, tail, foreign)


def start(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    log: Path | None = None,
    inherit: bool = False,
) -> Child:
    """Start ``argv`` and return at once.

    Its stdout and stderr go to the end of the file ``log``; without one they are dropped, or with
    ``inherit`` shared with this process. Raises MissingError when the program does not exist, and what
    :func:`open_log` does, before anything starts.
    """
    if log is None:
        return Child(
            _popen(argv, env=env, cwd=cwd, output=None if inherit else subprocess.DEVNULL), _name(argv)
        )
    with open_log(log) as file:
        return Child(_popen(argv, env=env, cwd=cwd, output=file), _name(argv))


def guard(child: Child, paths: Sequence[str], marked: tuple[Path, str] | None = None) -> Guard:
    """Watch over ``child`` from outside: if this process dies, kill the child's group and delete ``paths``.

    ``paths`` are glob patterns of files and folders; ``marked`` is one more file, which is deleted only if it
    then holds that text. The parent-death signal alone is not enough for a
    child with children of its own: theirs is not set, or bound to a thread that ended.
    """
    argv = [sys.executable, "-I", "-S", "-c", _GUARD, str(child.pid), *_marked(marked), *paths]
    return Guard(
        subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
    )


def _marked(marked: tuple[Path, str] | None) -> tuple[str, str]:
    return ("", "") if marked is None else (os.path.abspath(marked[0]), marked[1])


def open_log(path: Path) -> IO[str]:
    """The file ``path``, to append text to. InputError for what is no regular file (a named pipe, which is
    not waited for, or a device), MissingError when the machine does not let it be written."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise InputError(Problem("is not a regular file; a log needs one", file=shown_path(path)))
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
        return open(os.open(path, flags, 0o666), "a", encoding="utf-8")
    except OSError as error:
        raise explain_os_error(error, path) from None


def _popen(
    argv: Sequence[str], *, env: Mapping[str, str] | None, cwd: Path | None, output: int | IO[str] | None
) -> subprocess.Popen[str]:
    environment = os.environ if env is None else env
    path = environment.get("PATH", os.defpath)
    program = shutil.which(argv[0], path=path)
    if program is None:
        raise MissingError(f"{argv[0]}: no such program (searched {path})")
    has_ctype = "1" if "LC_CTYPE" in environment else "0"
    become = [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid()), has_ctype]
    return subprocess.Popen(
        [*become, os.path.abspath(program), *argv[1:]],
        env=None if env is None else dict(env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Let a Ctrl-C, SIGTERM or SIGHUP that this process handles wait: between the birth of a child and the
    moment its caller holds it, the exception would leave a child that nobody ends."""
    handlers: dict[int, Callable[[int, FrameType | None], object]] = {}
    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before = signal.getsignal(signum)
            if callable(before):
                handlers[signum] = before
    received: list[tuple[int, FrameType | None]] = []
    for number in handlers:
        signal.signal(number, lambda number, frame: received.append((number, frame)))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if received:
            handlers[received[0][0]](*received[0])


def _name(argv: Sequence[str]) -> str:
    if len(argv) > 2 and argv[1] == "-m":
        return argv[2]
    return Path(argv[0]).name


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end_group(popen: subprocess.Popen[str]) -> None:
    _kill_group(popen.pid, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline and not _has_ended(popen.pid):
        time.sleep(0.01)


def _kill_group(group: int, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signum)


def as_child(work: Callable[[], None], *, no_memory: str) -> int:
    """The other end of :func:`run`: do ``work``, tell an error as :func:`run` reads it, return the exit code.

    ``no_memory`` says what to do when memory runs out. A bug keeps its traceback and ends with EXIT_BUG.
    """
    try:
        work()
    except TrtspecError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        lacks = explain_os_error(error)
        print(f"error: {lacks}", file=sys.stderr)
        return lacks.exit_code
    except MemoryError:
        print(f"error: {no_memory}", file=sys.stderr)
        return EXIT_MISSING
    except Exception:
        traceback.print_exc()
        return EXIT_BUG
    except KeyboardInterrupt:
        print("error: interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


def _failure(name: str, returncode: int, tail: Sequence[str], foreign: bool) -> InputError | MissingError:
    lines = [line for line in tail if line.strip()]
    message = "" if foreign else _own_words(lines)
    if returncode == EXIT_BAD_INPUT and message:
        return InputError(message)
    if returncode == EXIT_MISSING and message:
        return MissingError(message)
    more = "its last lines:" if lines else "it said nothing"
    if returncode == EXIT_BUG and not foreign:
        return ChildFailed(f"{name}: this is a bug; {more}", returncode, lines)
    if returncode >= 0:
        return ChildFailed(f"{name}: ended with exit code {returncode}; {more}", returncode, lines)
    ended_by = signal.Signals(-returncode).name
    hint = " (often: out of memory)" if -returncode == signal.SIGKILL else ""
    return ChildFailed(f"{name}: ended by {ended_by}{hint}; {more}", returncode, lines)


def _own_words(lines: Sequence[str]) -> str:
    """What a child of ours told its user: everything from its last ``error:`` line on."""
    for first in range(len(lines) - 1, -1, -1):
        if lines[first].lower().startswith("error:"):
            rest = [lines[first][len("error:") :].strip(), *lines[first + 1 :]]
            return "\n".join(rest)
    return "\n".join(lines[-5:])
