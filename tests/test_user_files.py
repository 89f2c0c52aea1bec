"""Whatever a path leads to, it becomes one line that names it; what is no file is never replaced."""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from trtspec.errors import InputError, MissingError, TrtspecError
from trtspec.user_files import (
    explain_os_error,
    is_plain_name,
    parse_json,
    read_user_bytes,
    read_user_json,
    read_user_text,
    user_path,
    write_atomic,
    write_user_file,
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty path"),
        ("a\0b", "NUL"),
        ("~nosuchuser/x", "~nosuchuser/x: a user nosuchuser is not known"),
        ("a/" + "b" * 256 + "/c", "256 bytes, a name has at most 255"),
        ("é" * 200, "400 bytes"),
        ("a/" * 2048 + "b", "at most 4095 bytes"),
    ],
)
def test_paths_that_no_file_can_have(text: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        user_path(text)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 500


def test_home_is_expanded_and_the_rest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert user_path("~/x") == Path("/home/me/x")
    assert user_path("./~nosuchuser") == Path("~nosuchuser")
    assert user_path("b" * 255) == Path("b" * 255)


@pytest.mark.parametrize("name", ["", ".", "..", "/etc/passwd", "../x", "a/b", "a\0b", "x" * 256])
def test_names_that_leave_a_folder(name: str) -> None:
    assert not is_plain_name(name)
    assert is_plain_name("model-00001-of-00002.safetensors")


def fifo(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "no such file"),
        (fifo, "is not a regular file"),
        (unix_socket, "is not a regular file"),
        (Path.mkdir, "is a folder"),
        (loop, "circle"),
        (lambda path: path.symlink_to("nowhere"), "no such file"),
        (lambda path: path.write_bytes(b"\xff{}"), "not UTF-8"),
        (lambda path: path.write_bytes(b"[" * 200_000), "nested too deeply"),
        (lambda path: path.write_bytes(b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}"), "nested too deeply"),
        (lambda path: path.write_bytes(b"1" * 5000), "thousands of digits"),
        (lambda path: path.write_bytes(b'["\\ud800"]'), "surrogate"),
        (lambda path: path.write_bytes(b'["\xed\xa0\x80"]'), "not UTF-8"),
        (lambda path: path.write_bytes(b"{"), "is not JSON"),
        (lambda path: path.write_bytes(b" " * 1001), "are read"),
    ],
)
def test_reading_what_is_no_json_file(tmp_path: Path, make: Callable[[Path], None], says: str) -> None:
    path = tmp_path / "value.json"
    make(path)
    with pytest.raises(InputError) as caught:
        read_user_json(path, max_bytes=1000 if says == "are read" else 1_000_000)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_reading_what_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    path.write_bytes('\ufeff{"a": "\\ud83d\\ude00", "b": 1e5}'.encode())
    assert read_user_json(path) == {"a": "\N{GRINNING FACE}", "b": 1e5}
    assert read_user_bytes(path).startswith(b"\xef\xbb\xbf")
    assert read_user_text(path).endswith("}")
    assert parse_json('"\N{GRINNING FACE}"') == "\N{GRINNING FACE}"


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, MissingError),
        (errno.EROFS, MissingError),
        (errno.EACCES, MissingError),
        (errno.ENAMETOOLONG, InputError),
        (errno.ENOTDIR, InputError),
        (errno.ENOENT, InputError),
    ],
)
def test_every_os_error_is_bad_input_or_a_lack(number: int, kind: type[TrtspecError]) -> None:
    error = explain_os_error(OSError(number, os.strerror(number), "/some/where"))
    assert type(error) is kind
    assert str(error).startswith("/some/where: ")


# --------------------------------------------------------------------------- writing


def test_a_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to("real")
    write_atomic(link, b"new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert sorted(os.listdir(tmp_path)) == ["link", "real"]


def test_a_link_to_nothing_yet_makes_its_target(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("real")
    write_atomic(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_a_pipe_is_written_into_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    write_atomic(pipe, b"x" * 200_000)
    reader.join(10)
    assert got == [b"x" * 200_000]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_folder_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="is a folder"):
        write_user_file(tmp_path / "folder", b"x")
    assert os.listdir(tmp_path) == ["folder"]


def test_without_overwrite_whatever_has_the_name_stays(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(InputError, match="exists"):
        write_user_file(tmp_path / "link", b"x", overwrite=False)
    assert os.listdir(tmp_path) == ["link"]
    write_user_file(tmp_path / "new", b"x", overwrite=False)
    assert (tmp_path / "new").read_bytes() == b"x"


def test_the_longest_name_can_be_written(tmp_path: Path) -> None:
    write_atomic(tmp_path / ("n" * 255), b"x")
    assert os.listdir(tmp_path) == ["n" * 255]


@pytest.mark.parametrize("path", ["file/x", "nowhere/x", "n" * 256])
def test_places_that_cannot_be_written(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError) as caught:
        write_user_file(tmp_path / path, b"x")
    assert str(caught.value).startswith(str(tmp_path))
    assert os.listdir(tmp_path) == ["file"]
