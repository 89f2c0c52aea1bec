"""A folder appears whole or not at all, whatever kills its writer."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import pytest

from trtspec import process
from trtspec.errors import InputError
from trtspec.folders import MARK, check_new_folder, new_folder

WRITER = """
import sys, time
from pathlib import Path
from trtspec.folders import new_folder
with new_folder(Path(sys.argv[1])) as partial:
    (partial / "half").write_text("x")
    time.sleep(60)
"""


def start_writer(out: Path) -> process.Child:
    child = process.start([sys.executable, "-c", WRITER, str(out)])
    deadline = time.monotonic() + 20
    while not list(out.parent.glob("*.partial-*/half")):
        assert time.monotonic() < deadline
        assert child.poll() is None
        time.sleep(0.02)
    return child


def test_appears_at_the_end_with_everything(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with new_folder(out) as partial:
        (partial / "sub").mkdir()
        (partial / "sub" / "file").write_text("content")
        assert not out.exists()
    assert (out / "sub" / "file").read_text() == "content"
    assert os.listdir(out.parent) == ["out"]


@pytest.mark.parametrize("exception", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_nothing(tmp_path: Path, exception: type[BaseException]) -> None:
    def write() -> None:
        with new_folder(tmp_path / "out") as partial:
            (partial / "file").write_text("content")
            raise exception

    with pytest.raises(exception):
        write()
    assert os.listdir(tmp_path) == []


def test_kill_leaves_a_partial_folder_that_the_next_run_names_and_removes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    start_writer(out).kill_group()
    assert not out.exists()
    (partial,) = tmp_path.iterdir()
    said: list[str] = []
    with new_folder(out, say=said.append) as fresh:
        (fresh / "file").write_text("content")
    assert said == [f"found {partial}: left by an interrupted run; removing it and starting over"]
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(out) == ["file"]


def test_a_living_writer_is_not_disturbed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    child = start_writer(out)
    try:
        expected = pytest.raises(
            InputError, match=r"another process is writing it now \(in out.partial-\d+\)"
        )
        with expected, new_folder(out):
            pytest.fail("must not start")
        assert list(tmp_path.glob("out.partial-*/half")), "the other run's files must stay"
    finally:
        child.kill_group()


def test_the_same_process_cannot_write_twice(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with new_folder(out), pytest.raises(InputError, match="writing it"), new_folder(out):
        pytest.fail("must not start")
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("what", ["file", "full folder", "link"])
def test_what_exists_is_kept(tmp_path: Path, what: str) -> None:
    out = tmp_path / "out"
    if what == "file":
        out.write_text("mine")
    elif what == "link":
        out.symlink_to(tmp_path / "nowhere")
    else:
        out.mkdir()
        (out / "mine").write_text("mine")
    with pytest.raises(InputError, match="give another path or remove it"), new_folder(out):
        pytest.fail("must not start")
    assert os.listdir(tmp_path) == ["out"]


def test_an_empty_folder_may_be_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with new_folder(tmp_path / "out") as partial:
        (partial / "file").write_text("content")
    assert os.listdir(tmp_path / "out") == ["file"]


def test_partials_of_other_names_stay(tmp_path: Path) -> None:
    for name in ("a[b].partial-1", "ab.partial-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MARK).touch()
    with new_folder(tmp_path / "a[b]"):
        pass
    assert sorted(os.listdir(tmp_path)) == ["a[b]", "ab.partial-1"]


def test_what_only_looks_like_a_partial_stays(tmp_path: Path) -> None:
    mine = ["out.partial-thesis", "out.partial-2024-notes", "out.partial-7"]
    for name in mine:
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("mine")
    (tmp_path / "out.partial-thesis" / MARK).touch()
    (tmp_path / "out.partial-8").write_text("mine")
    (tmp_path / "out.partial-9").symlink_to("out.partial-7")
    said: list[str] = []
    with new_folder(tmp_path / "out", say=said.append):
        pass
    assert said == []
    assert sorted(os.listdir(tmp_path)) == sorted([*mine, "out", "out.partial-8", "out.partial-9"])
    assert all((tmp_path / name / "mine").is_file() for name in mine)


def test_replacing_keeps_the_old_folder_until_the_new_one_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("old")

    def write(fail: bool) -> None:
        with new_folder(out, replace=True) as partial:
            (partial / "new").write_text("new")
            assert (out / "old").is_file()
            if fail:
                raise ValueError

    with pytest.raises(ValueError):
        write(fail=True)
    assert (out / "old").is_file()
    write(fail=False)
    assert os.listdir(out) == ["new"]
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("path", ["file/out", "file/deep/out", "n" * 250, "link/out"])
def test_places_where_no_folder_can_be(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("link")
    with pytest.raises(InputError) as caught, new_folder(tmp_path / path):
        pytest.fail("must not start")
    assert str(caught.value).startswith(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


def test_a_folder_that_cannot_be_is_told_before_the_work(tmp_path: Path) -> None:
    """What :func:`check_new_folder` refuses :func:`new_folder` refuses, and the other way round."""
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    (tmp_path / "empty").mkdir()
    for name, good in (
        ("new", True), ("a/b/c", True), ("empty", True), ("full", False), ("file", False), ("file/x", False),
        ("x" * 300, False),
    ):  # fmt: skip
        before = sorted(tmp_path.iterdir())
        with contextlib.nullcontext() if good else pytest.raises(InputError):
            check_new_folder(tmp_path / name)
        assert sorted(tmp_path.iterdir()) == before
        with contextlib.nullcontext() if good else pytest.raises(InputError), new_folder(tmp_path / name):
            pass
