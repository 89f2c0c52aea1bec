"""Headers of pickled weights: the values are where they say, and nothing of a file is executed."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from trtspec.pickled_headers import read_pickled_headers

TENSORS = {
    "plain": torch.randn(5, 7, 3),
    "turned": torch.randn(5, 7, 3).transpose(0, 2),
    "cut": torch.randn(5, 7, 3)[1:3, 2:5],
    "repeated": torch.randn(4, 1).expand(4, 6),
    "ids": torch.arange(9),
    "half": torch.randn(4, 6).half().T,
    "brain": torch.randn(3).bfloat16(),
    "one": torch.tensor([3.0]),
    "none": torch.zeros(0, 4),
    "mask": torch.tensor([True, False, True]),
}


def test_the_values_are_where_a_header_says(tmp_path: Path) -> None:
    torch.save({**TENSORS, "parameter": torch.nn.Parameter(torch.ones(2))}, tmp_path / "heads.pt")
    headers, problem = read_pickled_headers(tmp_path / "heads.pt")
    assert problem is None
    assert headers.keys() == {*TENSORS, "parameter"}
    for name, value in TENSORS.items():
        assert headers[name].shape == tuple(value.shape)
        assert headers[name].read() == value.contiguous().view(torch.uint8).numpy().tobytes()
    assert {name for name, header in headers.items() if header.strides is not None} == {
        "turned", "cut", "repeated", "half",
    }  # fmt: skip


def test_tensors_of_one_storage_are_found_at_their_own_places(tmp_path: Path) -> None:
    both = torch.arange(12.0)
    torch.save({"a": both[:6], "b": both[6:]}, tmp_path / "heads.pt")
    headers, _ = read_pickled_headers(tmp_path / "heads.pt")
    assert headers["b"].start == headers["a"].start + 24
    assert headers["a"].read() != headers["b"].read()


class Harm:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return print, ("run",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git-lfs pointer"),
        (b"\x80\x02}q\x00.", "not a file that torch.save makes"),
        (b"PK\x03\x04 torn", "not a plain mapping"),
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "medusa_lm_head.pt"
    file.write_bytes(content)
    headers, problem = read_pickled_headers(file)
    assert not headers
    assert message in (problem or "")


@pytest.mark.parametrize("value", [Harm(), {"weight": Harm()}, [1, 2], {"weight": 1}])
def test_a_pickle_runs_nothing(tmp_path: Path, value: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "medusa_lm_head.pt"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(value))
    headers, problem = read_pickled_headers(file)
    assert not headers
    assert "not a plain mapping" in (problem or "")
    assert capsys.readouterr().out == ""


def test_an_unrestricted_reader_would_run_it(capsys: pytest.CaptureFixture[str]) -> None:
    pickle.loads(pickle.dumps(Harm()))
    assert capsys.readouterr().out == "run\n"


def test_a_storage_that_is_too_short_or_compressed_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(64)}, tmp_path / "good.pt")
    for name, method, cut in (("short.pt", zipfile.ZIP_STORED, 8), ("packed.pt", zipfile.ZIP_DEFLATED, None)):
        with zipfile.ZipFile(tmp_path / "good.pt") as old, zipfile.ZipFile(tmp_path / name, "w") as new:
            for member in old.namelist():
                content = old.read(member)
                is_value = "/data/" in member
                new.writestr(member, content[:cut] if is_value else content, compress_type=method)
        headers, problem = read_pickled_headers(tmp_path / name)
        assert not headers
        assert ("beyond the end" if cut else "compressed") in (problem or "")
