"""Closed, full and undecodable streams, odd paths and signals end in one line and the promised exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")  # only ever written into

needs_full = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")


def trtspec(arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A shell runs it: streams are closed and redirected as people do."""
    return subprocess.run(
        ["bash", "-c", f"{sys.executable} -m trtspec {arguments}"],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        cwd=cwd,
        timeout=60,
        env={**os.environ, **environment},
    )


STREAMS = [
    # arguments, exit code, what stderr says
    ("list >&-", 0, ""),
    ("list <&-", 0, ""),
    ("list 2>&-", 0, None),
    ("list <&- >&- 2>&-", 0, None),
    ("lint nowhere.yaml >&-", 2, ""),
    ("build nowhere.yaml 2>&-", 2, None),
    ("build nowhere.yaml --json >&-", 2, ""),
]
FULL_STREAMS = [
    ("list > /dev/full", 3, "error: standard output: no space left on device; free some space"),
    ("list --json > /dev/full", 3, "error: standard output: no space left on device"),
    ("build nowhere.yaml --json > /dev/full", 2, "nowhere.yaml"),
    ("build nowhere.yaml 2> /dev/full", 2, None),
    ("list --nope 2> /dev/full", 2, None),
    ("schema > /dev/full", 3, "standard output"),
    ("init -o full.yaml > /dev/full", 3, "standard output"),
]


@pytest.mark.parametrize(("arguments", "code", "says"), STREAMS)
def test_closed_streams(tmp_path: Path, arguments: str, code: int, says: str | None) -> None:
    done = trtspec(arguments, tmp_path)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert "this is a bug" not in done.stderr
    if says is not None:
        assert says in done.stderr
    assert os.listdir(tmp_path) == []


@needs_full
@pytest.mark.parametrize(("arguments", "code", "says"), FULL_STREAMS)
def test_full_streams(tmp_path: Path, arguments: str, code: int, says: str | None) -> None:
    done = trtspec(arguments, tmp_path)
    assert done.returncode == code
    assert "Traceback" not in done.stderr + done.stdout
    assert "Exception ignored" not in done.stderr
    if says is not None:
        assert says in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("build $(printf 'n%.0s' {1..300}).yaml", "305 bytes"),
        ("build ~nosuchuser/x.yaml", "a user nosuchuser is not known"),
        ("build ''", "empty path"),
        ("list -o ''", "No such option"),
        ("list --engines-dir ''", "empty path"),
        ("list --engines-dir file", "is not a folder"),
        ("list --engines-dir '~nosuchuser'", "a user nosuchuser is not known"),
        ("inspect $(printf 'n%.0s' {1..300})", "too long"),
        ("inspect file/x", "x"),
        ("schema -o '~nosuchuser/x'", "a user nosuchuser is not known"),
        ("schema -o file/x", "is a file, not a folder"),
        ("schema -o .", "is a folder"),
        ("init -o file/x", "is a file, not a folder"),
        ("init -o '~nosuchuser/x'", "a user nosuchuser is not known"),
        ("init -o file", "exists"),
        ("fetch --wheel nowhere.whl", "no such file"),
        ("quantize --model '' --format fp8 -o q", "empty path"),
        ("quantize --model file --format fp8 -o '~nosuchuser/q'", "a user nosuchuser is not known"),
        ("quantize --model file --format fp8 -o file", "exists and is not a folder"),
        ("quantize --model . --format fp8 -o file/q", ""),
        ("quantize --model . --format fp8 -o $(printf 'n%.0s' {1..300})", "too long"),
        ("quantize --model . --format fp8 -o q --calibration '~nosuchuser/x'", "a user nosuchuser"),
        ("$(printf '\\xff\\xfe')", "no verb"),
    ],
)
def test_odd_paths_are_bad_input(tmp_path: Path, arguments: str, says: str) -> None:
    (tmp_path / "file").write_text("mine")
    done = trtspec(arguments, tmp_path)
    assert (done.returncode, says in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr) < 2000
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


def test_a_current_folder_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    done = subprocess.run(
        ["bash", "-c", f"rmdir ../gone; {sys.executable} -m trtspec doctor"],
        capture_output=True, text=True, check=False, cwd=tmp_path / "gone", timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    said = "error: the current folder does not exist any more; cd to one that does\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_a_cache_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    wheel = tmp_path / "x.whl"
    wheel.write_bytes(b"")
    done = trtspec("fetch --wheel x.whl", tmp_path, TRTSPEC_CACHE=str(tmp_path / "file"))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_what_leads_elsewhere_is_written_there(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("real.json")
    assert trtspec("schema -o link", tmp_path).returncode == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real.json").stat().st_size > 1000
    os.mkfifo(tmp_path / "pipe")
    done = trtspec("schema -o pipe & cat pipe", tmp_path)
    assert done.stdout == (tmp_path / "real.json").read_text()
    assert (tmp_path / "pipe").is_fifo()


SLEEPER = """
import sys, time
from pathlib import Path
from trtspec.cli import cli, main
from trtspec.folders import new_folder
@cli.command("sleep")
def sleep():
    with new_folder(Path("out")) as partial:
        print("ready", flush=True)
        time.sleep(60)
import trtspec.cli
trtspec.cli.COMMANDS["sleep"] = ("__main__:sleep", "")
sys.exit(main(["sleep"]))
"""


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]
)
def test_a_signal_leaves_nothing_behind(tmp_path: Path, signum: signal.Signals, code: int) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", SLEEPER],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A suite under nohup, or in the background of a shell, ignores some of them, and children would too.
        preexec_fn=lambda: signal.signal(signum, signal.SIG_DFL),
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    assert len(os.listdir(tmp_path)) == 1
    child.send_signal(signum)
    _, error = child.communicate(timeout=30)
    assert (child.returncode, error.strip()) == (code, "interrupted")
    assert os.listdir(tmp_path) == []


def test_nohup_stays_nohup(tmp_path: Path) -> None:
    child = subprocess.Popen(
        ["nohup", sys.executable, "-c", SLEEPER.replace("60", "0.5")],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGHUP)
    assert child.wait(30) == 0
    child.stdout.close()
    assert os.listdir(tmp_path) == ["out"]


def test_an_interrupt_during_the_imports_is_no_traceback(tmp_path: Path) -> None:
    code = (
        "import trtspec.__main__ as m, sys\nclass F:\n def find_spec(self, *a):\n  raise KeyboardInterrupt\n"
    )
    code += "sys.meta_path.insert(0, F())\nsys.exit(m.run())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_a_child_with_a_bug_is_a_bug(tmp_path: Path) -> None:
    from trtspec import process
    from trtspec.errors import EXIT_BUG, MissingError

    with pytest.raises(process.ChildFailed, match="this is a bug") as caught:
        process.run([sys.executable, "-c", f"print('last words'); raise SystemExit({EXIT_BUG})"])
    assert caught.value.exit_code == EXIT_BUG
    assert "last words" in str(caught.value)
    with pytest.raises(process.ChildFailed) as caught:
        process.run([sys.executable, "-c", "raise SystemExit(9)"])
    assert caught.value.exit_code == MissingError.exit_code
