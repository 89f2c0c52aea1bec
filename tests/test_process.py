"""Laws of child processes: nothing outlives a failure, and the reason reaches the caller."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from trtspec import process
from trtspec.errors import InputError, MissingError

PYTHON = sys.executable


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


FAMILY = """
import subprocess, sys, time
grandchild = subprocess.Popen(["sleep", "60"])
open(sys.argv[1], "w").write(f"{{grandchild.pid}}\\n")
{then}
"""


def read_pid(path: Path) -> int:
    assert wait_until(lambda: path.exists() and path.read_text().endswith("\n"))
    return int(path.read_text())


def test_lines_go_to_the_callback_and_all_but_progress_to_the_log(tmp_path: Path) -> None:
    lines: list[str] = []
    code = (
        'import sys; print(\'{"progress": {"step": "s", "done": 1, "total": 2}}\', flush=True);'
        "print('out', flush=True); print('err', file=sys.stderr); sys.stdout.buffer.write(b'\\xff\\n')"
    )
    process.run([PYTHON, "-c", code], log=tmp_path / "log", on_line=lines.append)
    assert sorted(lines[1:]) == ["err", "out", "�"]
    assert process.parse_progress(lines[0]) == process.Progress("s", 1, 2)
    assert sorted((tmp_path / "log").read_text().splitlines()) == ["err", "out", "�"]


@pytest.mark.parametrize(
    "line", ["", "done", '{"progress": 3}', '{"progress": {"step": "a"}}', '{"progress": {"step": 1,', "{}"]
)
def test_other_lines_are_no_progress(line: str) -> None:
    assert process.parse_progress(line) is None


def test_the_environment_is_exactly_the_one_given() -> None:
    lines: list[str] = []
    process.run(["env"], env={"PATH": os.defpath, "ONLY": "1"}, on_line=lines.append)
    assert set(lines) == {f"PATH={os.defpath}", "ONLY=1"}


def test_working_folder(tmp_path: Path) -> None:
    lines: list[str] = []
    process.run(["pwd", "-P"], cwd=tmp_path, on_line=lines.append)
    assert lines == [str(tmp_path.resolve())]


def test_a_child_that_said_nothing_is_not_quoted() -> None:
    with pytest.raises(process.ChildFailed) as caught:
        process.run([PYTHON, "-c", "raise SystemExit(9)"])
    assert str(caught.value).endswith("ended with exit code 9; it said nothing")


def test_failure_carries_code_and_last_lines() -> None:
    with pytest.raises(process.ChildFailed) as caught:
        process.run([PYTHON, "-c", "for i in range(100): print('line', i)\nraise SystemExit(7)"])
    assert caught.value.returncode == 7
    assert caught.value.exit_code == 3
    assert caught.value.tail[-1] == "line 99"
    assert len(caught.value.tail) == process.TAIL_LINES
    assert "line 99" in str(caught.value)


def test_death_by_signal_names_it() -> None:
    with pytest.raises(process.ChildFailed, match=r"SIGKILL.*out of memory") as caught:
        process.run([PYTHON, "-c", "import os; os.kill(os.getpid(), 9)"])
    assert caught.value.returncode == -signal.SIGKILL


@pytest.mark.parametrize(("code", "kind"), [(2, InputError), (3, MissingError)])
def test_our_own_exit_codes_come_back_as_our_own_errors(code: int, kind: type[Exception]) -> None:
    program = (
        f"import sys; print('x'); print('error: recipe: 40 is too many', file=sys.stderr); sys.exit({code})"
    )
    with pytest.raises(kind) as caught:
        process.run([PYTHON, "-c", program])
    assert type(caught.value) is kind
    assert str(caught.value) == "recipe: 40 is too many"


def test_the_exit_codes_of_other_programs_are_their_own() -> None:
    """The broken variant reads a judge's code 3 as ours: the error was its last line alone."""
    with pytest.raises(process.ChildFailed, match="ended with exit code 3"):
        process.run([PYTHON, "-c", "import sys; print(1); sys.exit(3)"], foreign=True)


def test_a_line_that_does_not_end_comes_in_pieces() -> None:
    """Read whole, it filled the memory until the system killed this process."""
    pieces: list[int] = []
    program = "import sys; sys.stdout.write('1' * 1000001)"
    process.run([PYTHON, "-c", program], on_line=lambda line: pieces.append(len(line)))
    assert sum(pieces) == 1_000_001
    assert max(pieces) <= 100_000


def test_missing_program() -> None:
    with pytest.raises(MissingError, match="no-such-program: no such program"):
        process.run(["no-such-program"])


def test_time_limit_ends_the_whole_group(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with pytest.raises(process.ChildFailed, match=r"not done after 3 s"):
        process.run([PYTHON, "-c", FAMILY.format(then="time.sleep(600)"), str(pid_file)], timeout_s=3)
    assert wait_until(lambda: not alive(read_pid(pid_file)))


def test_a_grandchild_that_holds_the_pipe_does_not_hang_the_caller(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    started = time.monotonic()
    process.run([PYTHON, "-c", FAMILY.format(then=""), str(pid_file)])
    assert time.monotonic() - started < 60
    assert wait_until(lambda: not alive(read_pid(pid_file)))


def test_a_grandchild_that_left_the_group_does_not_hang_the_caller(tmp_path: Path) -> None:
    """A daemon, with the pipe and a session of its own: what was said before is there, and nobody waits."""
    code = (
        "import os, sys, time\n"
        "print('said', flush=True)\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "    time.sleep(50)\n"
        "    print('late', flush=True)\n"
        f"while not os.path.exists({str(tmp_path / 'pid')!r}): time.sleep(0.01)\n"
    )
    lines: list[str] = []
    began = time.monotonic()
    process.run([PYTHON, "-c", code], on_line=lines.append, log=tmp_path / "log")
    assert time.monotonic() - began < 40
    assert lines == ["said"]
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_an_error_of_the_callback_ends_the_group_and_reaches_the_caller(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"

    def refuse(line: str) -> None:
        raise RuntimeError(line)

    program = FAMILY.format(then="print('hello', flush=True); time.sleep(600)")
    with pytest.raises(RuntimeError, match="hello"):
        process.run([PYTHON, "-c", program, str(pid_file)], on_line=refuse)
    assert wait_until(lambda: not alive(read_pid(pid_file)))


def test_ctrl_c_ends_the_whole_group(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"

    def interrupt() -> None:
        read_pid(pid_file)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        process.run([PYTHON, "-c", FAMILY.format(then="time.sleep(600)"), str(pid_file)])
    assert wait_until(lambda: not alive(read_pid(pid_file)))


def running_with(word: str) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if word.encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                    found.append(int(name))
    return found


def start_and_run(timer: threading.Timer, word: str) -> None:
    timer.start()
    process.run(["sleep", word])


def interrupted_runs_that_leave_a_child(times: int) -> int:
    """Ctrl-C at moments spread over the first 20 ms, while the child is being born."""
    leaving = 0
    for index in range(times):
        word = f"60.{os.getpid()}{index:04d}"
        timer = threading.Timer(0.02 * index / times, os.kill, (os.getpid(), signal.SIGINT))
        try:
            start_and_run(timer, word)
        except KeyboardInterrupt:
            wrong = False
        except BaseException:
            wrong = True
        else:
            pytest.fail("the interrupt was lost")
        time.sleep(0.05)
        left = running_with(word)
        leaving += wrong or bool(left)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return leaving


def test_ctrl_c_at_any_moment_leaves_no_child() -> None:
    assert interrupted_runs_that_leave_a_child(20) == 0


def test_the_check_above_sees_a_child_born_during_the_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_interrupts_deferred", contextlib.nullcontext)
    assert any(interrupted_runs_that_leave_a_child(60) for _ in range(5))


def test_a_started_child_has_its_own_group(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    child = process.start([PYTHON, "-c", FAMILY.format(then="time.sleep(600)"), str(pid_file)])
    grandchild = read_pid(pid_file)
    assert child.poll() is None
    assert os.getpgid(grandchild) == child.pid != os.getpgid(0)
    assert child.wait(0.01) is None
    child.kill_group()
    assert child.poll() == -signal.SIGKILL
    assert wait_until(lambda: not alive(grandchild))


def test_a_terminated_child_keeps_its_exit_code(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = process.start(
        ["sh", "-c", "trap 'echo bye; exit 5' TERM; echo hi; while :; do sleep 0.05; done"], log=log
    )
    assert wait_until(lambda: log.exists() and log.read_text() == "hi\n")
    child.terminate()
    assert child.wait(60) == 5
    assert log.read_text() == "hi\nbye\n"


def test_a_log_that_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    ran = tmp_path / "ran"
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb"):  # also when somebody reads it
        for log in (pipe, tmp_path, tmp_path / "no" / "log"):
            for begin in (process.start, process.run):
                with pytest.raises(InputError, match=f"^{log}: "):
                    begin(["touch", str(ran)], log=log)
    with pytest.raises(InputError, match="is not a regular file"):
        process.start(["touch", str(ran)], log=pipe)
    assert not ran.exists()


SUPERVISOR = """
import sys, time
from pathlib import Path
from trtspec import process
child = process.start([sys.executable, "-c", {family!r}, sys.argv[1] + "/grandchild"])
while not Path(sys.argv[1] + "/grandchild").exists(): time.sleep(0.01)
if {guarded}:
    Path(sys.argv[1] + "/left-1").write_text("x")
    Path(sys.argv[1] + "/left-2").mkdir()
    Path(sys.argv[1] + "/mine").write_text("made by A")
    Path(sys.argv[1] + "/other").write_text("made by B")
    guard = process.guard(child, [sys.argv[1] + "/left-*"], (Path(sys.argv[1] + "/mine"), "by A"))
    guard2 = process.guard(child, [], (Path(sys.argv[1] + "/other"), "by A"))
open(sys.argv[1] + "/child", "w").write(f"{{child.pid}}\\n")
if {released}:
    child.kill_group()
    guard.release()
    guard2.release()
    sys.exit()
time.sleep(600)
"""


@pytest.mark.parametrize("guarded", [False, True])
def test_death_of_the_parent(tmp_path: Path, guarded: bool) -> None:
    """The child dies with its parent either way; the grandchild and the files only go with a guard."""
    family = FAMILY.format(then="time.sleep(600)")
    program = SUPERVISOR.format(family=family, guarded=guarded, released=False)
    parent = subprocess.Popen([PYTHON, "-c", program, str(tmp_path)])
    child, grandchild = read_pid(tmp_path / "child"), read_pid(tmp_path / "grandchild")
    try:
        assert alive(child)
        assert alive(grandchild)
        parent.kill()
        parent.wait()
        assert wait_until(lambda: not alive(child))
        if guarded:
            assert wait_until(lambda: not alive(grandchild))
            assert wait_until(lambda: not list(tmp_path.glob("left-*")))
            assert wait_until(lambda: not (tmp_path / "mine").exists())
            assert (tmp_path / "other").exists()
        else:
            assert alive(grandchild)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(grandchild, signal.SIGKILL)


def test_a_released_guard_deletes_nothing(tmp_path: Path) -> None:
    program = SUPERVISOR.format(family=FAMILY.format(then="time.sleep(600)"), guarded=True, released=True)
    subprocess.run([PYTHON, "-c", program, str(tmp_path)], check=True, timeout=120)
    assert len(list(tmp_path.glob("left-*"))) == 2
    assert wait_until(lambda: not alive(read_pid(tmp_path / "grandchild")))


@pytest.mark.parametrize(
    ("failure", "code", "said"),
    [
        (InputError("bad"), 2, "error: bad"),
        (MissingError("lacks"), 3, "error: lacks"),
        (OSError(28, "No space left on device"), 3, "error: "),
        (MemoryError(), 3, "error: buy more"),
        (ZeroDivisionError(), 70, "Traceback"),
        (KeyboardInterrupt(), 130, "error: interrupted"),
        (None, 0, ""),
    ],
)
def test_a_child_ends_as_its_parent_reads_it(
    failure: BaseException | None, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> None:
        if failure is not None:
            raise failure

    assert process.as_child(work, no_memory="buy more") == code
    assert capsys.readouterr().err.startswith(said)
