"""The GPU table: every row is sane and sourced, names are found whatever their spelling, none is guessed."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from trtspec.errors import InputError
from trtspec.hardware import RATES, all_gpus, find_gpu


@pytest.mark.parametrize("name", ["H100-SXM", "h100_sxm", "NVIDIA H100 SXM", "h100", "H100-SXM5"])
def test_a_name_is_found_whatever_its_spelling(name: str) -> None:
    assert find_gpu(name).name == "H100-SXM"


def test_every_board_is_found_by_its_name_and_aliases() -> None:
    for gpu in all_gpus():
        assert {find_gpu(name).name for name in (gpu.name, gpu.name.lower(), *gpu.aliases)} == {gpu.name}


def test_an_ambiguous_name_lists_the_boards() -> None:
    with pytest.raises(InputError, match="A100-PCIe-80G or A100-SXM-80G"):
        find_gpu("a100")


@pytest.mark.parametrize("name", ["", "V100", "H1000", "gpu", "L44"])
def test_an_unknown_name_is_refused_with_what_is_known(name: str) -> None:
    with pytest.raises(InputError, match="not in the table") as error:
        find_gpu(name)
    assert "H100-SXM" in str(error.value)


def test_rows_are_sane() -> None:
    names = [gpu.name for gpu in all_gpus()]
    assert len(set(names)) == len(names) >= 17
    for gpu in all_gpus():
        assert 8e9 <= gpu.memory_bytes <= 400e9, gpu.name
        assert 2e11 <= gpu.bandwidth_bytes_per_s <= 1e13, gpu.name
        assert set(gpu.flops) == set(RATES), gpu.name
        assert gpu.source, gpu.name
        assert gpu.link_bytes_per_s >= gpu.pcie_bytes_per_s, gpu.name
        if gpu.sm < 89:
            assert gpu.flops["fp8"] is None, f"{gpu.name}: FP8 units came with sm89"
        if gpu.sm < 100:
            assert gpu.flops["fp4"] is None, f"{gpu.name}: FP4 units came with sm100"


def _bytes(text: str) -> float:
    for unit, size in (("GiB", 2.0**30), ("MiB", 2.0**20), ("GB", 1e9), ("e9B", 1e9)):
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * size
    raise AssertionError(text)


def test_rows_agree_with_the_published_table(shared_data: Path) -> None:
    with (shared_data / "oracles" / "gpu_specs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 17
    for row in rows:
        gpu = find_gpu(row["name"])
        assert gpu.sm == int(row["sm"])
        assert gpu.memory_bytes == pytest.approx(_bytes(row["mem_gb"]))
        assert gpu.bandwidth_bytes_per_s == pytest.approx(float(row["mem_bw_GBps"]) * 1e9)
        columns = ("bf16_dense_TFLOPS", "int8_dense_TOPS", "fp8_dense_TFLOPS", "fp4_dense_TFLOPS")
        for rate, column in zip(RATES, columns, strict=True):
            expected = float(row[column]) * 1e12 if row[column] else None
            assert gpu.flops[rate] == (pytest.approx(expected) if expected else None), (gpu.name, rate)
