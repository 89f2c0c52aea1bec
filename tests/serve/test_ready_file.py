"""The ready file: of one running server, and of nobody else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trtspec.errors import InputError
from trtspec.serve.ready_file import claim, withdraw, write

FIELDS = {"pid": 1, "server_id": "trtspec-1-abcd-"}


def test_what_a_killed_server_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    for left in (b"", None):
        path.write_bytes(left) if left is not None else write(path, FIELDS)
        assert claim(path) == path
        assert not path.exists()
    assert claim(path) == path


@pytest.mark.parametrize(
    "content", [b"thesis", b"{}", b"[1]", b'{"server_id": 5}', b"[" * 100_000, b"\xff", b"x" * 2_000_000]
)
def test_a_file_of_somebody_else_stays(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ready.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"ready\.json: exists and is no ready file"):
        claim(path)
    withdraw(path, "trtspec-1-abcd-")
    assert path.read_bytes() == content


def test_the_file_of_a_running_server_stays(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    write(path, FIELDS)
    program = [sys.executable, "-c", "print(flush=True); input()", f"--id={FIELDS['server_id']}"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.read(1)
        with pytest.raises(InputError, match="belongs to a server that is running"):
            claim(path)
        server.communicate(b"\n")
    assert path.exists()
    claim(path)
    assert not path.exists()


def test_only_its_own_server_withdraws_it(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    write(path, FIELDS)
    withdraw(path, "trtspec-2-abcd-")
    assert path.exists()
    withdraw(path, "trtspec-1-abcd-")
    assert not path.exists()
    withdraw(path, "trtspec-1-abcd-")


def test_links_are_followed_and_stay(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    resolved = claim(link)
    write(resolved, FIELDS)
    assert (link.is_symlink(), (tmp_path / "target").is_file()) == (True, True)
    withdraw(resolved, "trtspec-1-abcd-")
    assert (link.is_symlink(), (tmp_path / "target").exists()) == (True, False)


def test_what_is_no_file_is_neither_written_nor_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, reason in (
        ("pipe", "is not a regular file"),
        (".", "is a folder"),
        ("no/ready.json", "no such file or directory"),
        ("pipe/ready.json", "a part of the path is a file"),
    ):
        with pytest.raises(InputError, match=reason):
            claim(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
