"""The doctor's verdicts on recorded machines, and its table on this one."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from trtspec.cli import main
from trtspec.doctor import BACKENDS, KNOWN_GOOD, Backend, Report, Row, examine, read_nvidia_smi
from trtspec.probes import Probes, collect
from trtspec.trtllm.facts import VERSIONS

BANNER = """\
Mon Jun 16 10:12:44 2025
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI {driver}             Driver Version: {driver}     CUDA Version: {cuda}     |
|-----------------------------------------+------------------------+----------------------+
"""
H100 = "0, NVIDIA H100 80GB HBM3, 9.0, 81559, {driver}\n1, NVIDIA H100 80GB HBM3, 9.0, 81559, {driver}\n"
PACKAGES = {
    "torch": "2.9.0+cu130", "numpy": "1.26.4", "safetensors": "0.5.3", "tokenizers": "0.22.1",
    "jinja2": "3.1.6", "nvidia-modelopt": "0.47.0", "transformers": "4.57.1", "nvidia-pytriton": "0.7.0",
}  # fmt: skip
CONTAINER = Probes(
    platform="linux x86_64",
    python="3.12.3",
    nvidia_smi=H100.format(driver="580.95.05"),
    nvidia_smi_banner=BANNER.format(driver="580.95.05", cuda="13.0"),
    memory_bytes=2_048_000_000_000,
    packages={**PACKAGES, "tensorrt-llm": "1.2.1"},
    tensorrt_llm_names=("__init__.py", "_torch", "libs", "llmapi"),
    programs={
        "nvidia-smi": "/usr/bin/nvidia-smi", "trtllm-build": "/usr/local/bin/trtllm-build",
        "tritonserver": "/opt/tritonserver/bin/tritonserver", "mpirun": "/usr/local/mpi/bin/mpirun",
    },
    mpi="mpirun (Open MPI) 4.1.7rc1\n\nReport bugs to http://www.open-mpi.org/community/help/\n",
    triton_backends=("identity", "python", "tensorrtllm"),
    disk_free_bytes=900 * 2**30,
    disk_path="/models",
    shm_bytes=64 * 2**30,
    limits={"memlock": None, "stack": 67108864, "nofile": 1048576},
)  # fmt: skip
"""A container of TensorRT-LLM 1.2.1 on two H100: nothing is lacking."""


def row(report: Report, name: str) -> Row:
    return next(one for one in report.rows if one.id == name)


def can_run(report: Report) -> set[Backend]:
    return {backend for backend in BACKENDS if not report.lacking(backend)}


def test_a_complete_machine_lacks_nothing() -> None:
    report = examine(CONTAINER)
    assert can_run(report) == set(BACKENDS)
    assert report.errors == ()
    assert row(report, "gpu").found == "2 x NVIDIA H100 80GB HBM3 (sm90, 80 GiB)"
    assert row(report, "driver").found == "580.95.05, CUDA up to 13.0"
    assert {one.id for one in report.rows if one.status != "ok"} == {"gpu"}  # sm90 has no NVFP4
    assert "NVFP4" in row(report, "gpu").remedy


def test_rows_are_unique_and_each_that_is_not_ok_says_what_to_do() -> None:
    for probes in (CONTAINER, Probes(platform="darwin arm64", python="3.9.1"), collect()):
        rows = examine(probes).rows
        assert len({one.id for one in rows}) == len(rows)
        for one in rows:
            assert bool(one.remedy) == (one.status != "ok"), one
            assert one.status != "lacking" or one.needed_by, one


@pytest.mark.parametrize(
    ("driver", "version", "status"),
    [
        ("470.57.02", "0.17.0", "lacking"),
        ("535.183.01", "0.17.0", "note"),
        ("570.86.10", "0.17.0", "ok"),
        ("535.183.01", "1.1.0", "lacking"),  # CUDA 13 does not run on it
        ("580.65.06", "1.1.0", "note"),
        ("580.95.05", "1.1.0", "ok"),
        ("570.133.20", "1.2.1", "lacking"),
        ("590.44.01", "1.4.0rc4", "ok"),
    ],
)
def test_the_driver_is_judged_by_the_cuda_of_the_version(driver: str, version: str, status: str) -> None:
    probes = replace(
        CONTAINER,
        nvidia_smi=H100.format(driver=driver),
        nvidia_smi_banner=BANNER.format(driver=driver, cuda="13.0"),
        packages={**PACKAGES, "tensorrt-llm": version},
    )
    found = row(examine(probes), "driver")
    assert (found.status, found.found.split(",")[0]) == (status, driver)


def test_without_tensorrt_llm_both_drivers_are_told_what_they_run() -> None:
    for driver, status in (("515.65.01", "lacking"), ("535.183.01", "note"), ("580.95.05", "ok")):
        probes = replace(CONTAINER, packages=PACKAGES, nvidia_smi=H100.format(driver=driver))
        assert row(examine(probes), "driver").status == status


def test_an_old_driver_without_compute_cap_gets_it_from_the_table_of_boards() -> None:
    old = "0, NVIDIA H100 80GB HBM3, 81559, 470.57.02\n1, Tesla K80, 11441, 470.57.02\n"
    gpus, driver, problem = read_nvidia_smi(old)
    assert [(gpu.name, gpu.sm) for gpu in gpus] == [("NVIDIA H100 80GB HBM3", 90), ("Tesla K80", None)]
    assert (driver, problem) == ("470.57.02", None)


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (None, "not on PATH"),
        ("No devices were found\n", "No devices were found"),
        (
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that "
            "the latest NVIDIA driver is installed and running.\n",
            "couldn't communicate",
        ),
        (
            "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 550.54\n",
            "mismatch",
        ),
        ("", "nothing"),
        ("a,b,c,d,e\n,,,,\n" + "\0" * 50, "nvidia-smi says"),
    ],
)
def test_what_nvidia_smi_says_instead_is_passed_on(said: str | None, problem: str) -> None:
    report = examine(replace(CONTAINER, nvidia_smi=said))
    assert problem in row(report, "driver").found
    assert can_run(report) == {"embedded"}
    assert report.ok()
    assert not report.ok("pytorch")


def test_values_that_a_gpu_does_not_tell_are_not_invented() -> None:
    gpus, driver, _ = read_nvidia_smi("0, NVIDIA GB10, [N/A], [N/A], [Unknown Error]\n")
    assert (gpus[0].sm, gpus[0].memory_bytes, driver) == (None, None, None)
    report = examine(replace(CONTAINER, nvidia_smi="0, NVIDIA GB10, 12.1, [N/A], 580.95.05\n"))
    assert row(report, "gpu").found == "1 x NVIDIA GB10 (sm121)"


def test_a_gpu_that_is_too_old_or_hidden_does_not_count() -> None:
    old = replace(CONTAINER, nvidia_smi="0, Tesla T4, 7.5, 15360, 580.95.05\n")
    assert can_run(examine(old)) == {"embedded"}
    assert "sm80" in row(examine(old), "gpu").remedy
    for value in ("", "-1"):
        hidden = replace(CONTAINER, environment={"CUDA_VISIBLE_DEVICES": value})
        assert "unset it" in row(examine(hidden), "gpu").remedy
        assert can_run(examine(hidden)) == {"embedded"}
    assert can_run(examine(replace(CONTAINER, environment={"CUDA_VISIBLE_DEVICES": "0"}))) == set(BACKENDS)


def test_the_stub_of_that_name_is_not_tensorrt_llm() -> None:
    stub = replace(CONTAINER, tensorrt_llm_names=("__init__.py",))
    assert can_run(examine(stub)) == {"embedded"}
    assert "stub" in row(examine(stub), "tensorrt-llm").found
    assert can_run(examine(replace(CONTAINER, tensorrt_llm_names=()))) == {"embedded"}


@pytest.mark.parametrize(
    ("version", "runs"),
    [
        ("0.17.0.post1", {"tensorrt"}),
        ("0.21.0", {"tensorrt"}),
        ("1.2.1", {"tensorrt", "pytorch"}),
        ("1.4.0rc4", {"pytorch"}),
        ("1.2.0", set()),  # no table: refused, with the nearest
        ("0.9.0", set()),
        ("banana", set()),
    ],
)
def test_the_version_decides_which_backend(version: str, runs: set[Backend]) -> None:
    report = examine(replace(CONTAINER, packages={**PACKAGES, "tensorrt-llm": version}))
    assert can_run(report) - {"embedded"} == runs
    if version == "1.2.0":
        assert "nearest" in row(report, "tensorrt-llm").remedy


def test_engines_need_their_builder() -> None:
    programs = {name: path for name, path in CONTAINER.programs.items() if name != "trtllm-build"}
    assert can_run(examine(replace(CONTAINER, programs=programs))) == {"embedded", "pytorch"}


@pytest.mark.parametrize("package", ["torch", "numpy", "safetensors", "tokenizers", "jinja2"])
def test_the_embedded_backend_needs_its_packages(package: str) -> None:
    fewer = {name: version for name, version in CONTAINER.packages.items() if name != package}
    report = examine(replace(CONTAINER, packages=fewer))
    assert can_run(report) == {"pytorch", "tensorrt"}
    assert not report.ok()
    assert report.ok("pytorch")


def test_an_older_torch_in_a_container_is_not_to_be_replaced() -> None:
    packages = {**CONTAINER.packages, "torch": "2.8.0a0+5228986c39.nv25.6"}
    found = row(examine(replace(CONTAINER, packages=packages)), "torch")
    assert (found.status, found.found) == ("lacking", "2.8.0a0+5228986c39.nv25.6")
    assert "environment of its own" in found.remedy


@pytest.mark.parametrize(
    ("change", "name", "said"),
    [
        ({"packages": {**PACKAGES, "nvidia-modelopt": "0.33.1"}}, "nvidia-modelopt", ">=0.47,<0.48"),
        ({"packages": {**PACKAGES, "transformers": "4.40.0"}}, "transformers", "trtspec[quantize]"),
        ({"packages": {**PACKAGES, "numpy": "2.2.0"}}, "triton (embedded)", "numpy<2"),
        ({"platform": "linux aarch64"}, "triton (embedded)", "x86_64"),
        ({"triton_backends": ("python",)}, "triton (GPU)", "tensorrtllm backend"),
        ({"triton_backends": ()}, "triton (GPU)", "python backend"),
        ({"programs": {}}, "mpi", "openmpi"),
        ({"memory_bytes": 2_048_000_000}, "memory", "4 GiB"),
        ({"memory_bytes": None}, "memory", "does not tell"),
        ({"disk_free_bytes": 5 * 2**30}, "disk", "40 GiB"),
        ({"disk_free_bytes": None}, "disk", "looked at"),
        ({"shm_bytes": 64 * 2**20}, "shared memory", "--shm-size"),
        ({"limits": {"memlock": 65536, "stack": 8388608}}, "ulimits", "memlock, stack"),
        ({"environment": {"TLLM_USE_TRT_ENGINE": "1"}}, "environment", "0.21"),
    ],
)
def test_what_is_short_is_a_note_with_its_remedy(change: dict[str, object], name: str, said: str) -> None:
    report = examine(replace(CONTAINER, **change))  # type: ignore[arg-type]
    found = row(report, name)
    assert found.status == "note"
    assert said in found.remedy
    assert report.ok()


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", "3", "error"),
        ("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", "1.78", "error"),
        ("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", "0", "note"),
        ("SGLANG_SIMULATE_ACC_LEN", "2", "error"),
        ("TLLM_LOG_LEVEL", "debug", "ok"),
    ],
)
def test_a_switch_that_forces_acceptance_is_an_error(name: str, value: str, status: str) -> None:
    report = examine(replace(CONTAINER, environment={name: value}))
    assert row(report, "forced acceptance").status == status
    assert report.ok("pytorch") == (status != "error")
    assert report.ok() == (status != "error")


def test_known_good_rows_are_versions_with_a_table_and_ascend() -> None:
    versions = [release.tensorrt_llm for release in KNOWN_GOOD]
    assert versions == [version for version in VERSIONS if version in versions]
    assert len(set(versions)) == len(KNOWN_GOOD)


# --------------------------------------------------------------------------- this machine


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_programs_are_asked_and_an_old_one_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(
        tmp_path,
        "nvidia-smi",
        'case "$1" in\n*compute_cap*) echo \'Field "compute_cap" is not a valid field to query.\'; exit 2;;\n'
        "--query*) echo '0, NVIDIA L4, 23034, 470.57.02';;\n"
        "*) echo; echo '| NVIDIA-SMI 470.57.02  Driver Version: 470.57.02  CUDA Version: 11.4 |';;\nesac\n",
    )
    program(tmp_path, "mpirun", "echo 'mpirun (Open MPI) 4.1.4'\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", "2")
    monkeypatch.setenv("SOME_TOKEN", "secret")
    probes = collect(tmp_path)
    report = examine(probes)
    assert row(report, "gpu").found == "1 x NVIDIA L4 (sm89, 22 GiB)"
    assert row(report, "driver").found == "470.57.02, CUDA up to 11.4"
    assert row(report, "mpi").found == "mpirun (Open MPI) 4.1.4"
    assert probes.environment == {"TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS": "2"}
    assert main(["doctor"]) == 3


def test_a_program_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "nvidia-smi", "echo 'Failed to initialize NVML: Unknown Error'; exit 255\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert "Unknown Error" in row(examine(collect(tmp_path)), "driver").found


def test_the_table_and_the_json_agree(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", raising=False)
    report = examine(collect())
    code = main(["doctor"])
    text = capsys.readouterr().out
    assert code == (0 if report.ok() else 3)
    assert "\x1b" not in text
    assert all(one.id in text for one in report.rows)
    assert main(["doctor", "--json", "--backend", "tensorrt"]) == (0 if report.ok("tensorrt") else 3)
    data = json.loads(capsys.readouterr().out)
    assert data["trtspec"]["schema"] == "trtspec.doctor/1"
    assert [one["id"] for one in data["rows"]] == [one.id for one in report.rows]
    told = {one["backend"]: one["can_run"] for one in data["backends"]}
    assert told == {backend: not report.lacking(backend) for backend in BACKENDS}
    assert main(["doctor", "--backend", "banana"]) == 2
