"""What a machine can run, judged from what :mod:`trtspec.probes` saw: which backend lacks what, and remedies.

Each :class:`Row` says what was found and, where that is not good, what to do. *lacking*: a backend cannot run
without it. *note*: some recipes or verbs need it. *error*: measurements here would be false. Nothing here
looks at the machine, so that a recorded one is judged like the one at hand.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from trtspec.errors import InputError
from trtspec.hardware import find_gpu
from trtspec.probes import EMBEDDED_PACKAGES, FORCED_ACCEPTANCE, SMI_FIELDS, SMI_OLD_FIELDS, Probes
from trtspec.recipe_facts import BACKEND_VERSIONS
from trtspec.trtllm.facts import VERSIONS, nearest_version
from trtspec.versions import parse_range, parse_version

Backend = Literal["embedded", "pytorch", "tensorrt"]
Status = Literal["ok", "note", "lacking", "error"]
BACKENDS: tuple[Backend, ...] = ("embedded", "pytorch", "tensorrt")
_GPU: tuple[Backend, ...] = ("pytorch", "tensorrt")

GIB = 2**30
_MIN_SM = 80
"""The oldest architecture in TensorRT-LLM's table of hardware (documentation of 1.2.1)."""
_EMBEDDED = {
    "torch": ">=2.9",
    "numpy": ">=1.0",
    "safetensors": ">=0.1",
    "tokenizers": ">=0.21",
    "jinja2": ">=3.1",
}
"""What the embedded engine needs, as in pyproject.toml."""
_MODELOPT, _TRANSFORMERS = ">=0.47,<0.48", ">=4.57,<5.15"
_DISK_BYTES, _SHM_BYTES, _STACK_BYTES, _FILES = 20 * GIB, GIB, 64 * 2**20, 4096


@dataclass(frozen=True)
class Release:
    """What one container of NVIDIA holds; CUDA and driver are those it was built with."""

    tensorrt_llm: str
    cuda: str
    driver: str
    torch: str
    triton: str


KNOWN_GOOD = (
    Release("0.17.0", "12.8", "570.86.10", "2.6.0", "25.01"),
    Release("0.21.0", "12.9", "575.51.03", "2.8.0", "25.08"),
    Release("1.0.0", "12.9", "575.57.08", "2.8.0", "25.10"),
    Release("1.1.0", "13.0", "580.95.05", "2.9.0", "25.12"),
)
"""Triton's published compatibility matrix, rows of the images YY.MM-trtllm-python-py3."""
DRIVER_OF_CUDA = {12: "525", 13: "580"}
"""CUDA major -> oldest driver branch that runs it (CUDA Compatibility, "Minor Version Compatibility")."""


@dataclass(frozen=True)
class Gpu:
    index: str
    name: str
    sm: int | None
    memory_bytes: float | None


@dataclass(frozen=True)
class Row:
    """``needed_by``: the backends that cannot run (lacking) or may care (note); ``remedy``: empty if ok."""

    id: str
    status: Status
    found: str
    needed_by: tuple[Backend, ...] = ()
    remedy: str = ""


@dataclass(frozen=True)
class Report:
    rows: tuple[Row, ...]
    gpus: tuple[Gpu, ...]

    def lacking(self, backend: Backend) -> tuple[Row, ...]:
        """What keeps ``backend`` from running here."""
        return tuple(row for row in self.rows if row.status == "lacking" and backend in row.needed_by)

    @property
    def errors(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.status == "error")

    def ok(self, asked: Backend | None = None) -> bool:
        """Whether the backend asked for (else the embedded one) can run, and no measurement is falsified."""
        return not (self.errors or self.lacking(asked or "embedded"))


def examine(probes: Probes) -> Report:
    """The rows and GPUs of a machine."""
    gpus, driver, smi_problem = read_nvidia_smi(probes.nvidia_smi)
    version = _tensorrt_llm_version(probes)
    rows = [
        _system(probes),
        _driver(probes, driver, smi_problem, version),
        _gpus(probes, gpus),
        _tensorrt_llm(probes, version),
        _trtllm_build(probes, version),
        *_embedded_packages(probes),
        *_quantization(probes),
        _triton(probes),
        _triton_gpu(probes),
        _mpi(probes, gpus),
        _memory(probes),
        _disk(probes),
        _shared_memory(probes),
        _ulimits(probes),
        *_environment(probes),
    ]
    return Report(tuple(rows), gpus)


# --------------------------------------------------------------------------- reading


def read_nvidia_smi(output: str | None) -> tuple[tuple[Gpu, ...], str | None, str | None]:
    """(GPUs, driver version, what is wrong) from the rows of ``nvidia-smi --query-gpu``.

    A row has the fields of :class:`Probes`; one without compute_cap takes it from the table of boards."""
    if output is None:
        return (), None, "nvidia-smi is not on PATH"
    gpus, driver = [], None
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) not in (len(SMI_FIELDS), len(SMI_OLD_FIELDS)) or not cells[0].isdecimal():
            continue
        capability = cells[2] if len(cells) == len(SMI_FIELDS) else ""
        match = re.fullmatch(r"(\d+)\.(\d)", capability)
        sm = int(match.group(1)) * 10 + int(match.group(2)) if match else _sm_of(cells[1])
        memory = float(cells[-2]) * 2**20 if cells[-2].isdecimal() else None
        gpus.append(Gpu(cells[0], cells[1], sm, memory))
        driver = cells[-1] if re.fullmatch(r"\d+(\.\d+)+", cells[-1]) else driver
    if gpus:
        return tuple(gpus), driver, None
    said = " ".join(output.split())[:200] or "nothing"
    return (), None, f"nvidia-smi says: {said}"


def _sm_of(name: str) -> int | None:
    try:
        return find_gpu(name).sm
    except InputError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """``580.95.05`` as (580, 95, 5), for comparing; other text ends it."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def _plain(version: str) -> str:
    """A version without build, post and development suffixes."""
    match = re.match(r"\d{1,4}(\.\d{1,4}){0,2}(rc\d{1,4})?", version)
    return match.group() if match else ""


def _within(version: str, wanted: str) -> bool:
    return bool(_plain(version)) and parse_range(wanted).admits(_plain(version))


def _tensorrt_llm_version(probes: Probes) -> str | None:
    """Version of a TensorRT-LLM that has code; the package of that name on PyPI is a stub without any."""
    found = probes.packages.get("tensorrt-llm") or probes.packages.get("tensorrt_llm")
    return found if found and "llmapi" in probes.tensorrt_llm_names else None


def _release(version: str | None) -> Release | None:
    """The newest known-good row that is not newer than ``version``."""
    if version is None or not _plain(version):
        return None
    wanted = parse_version(_plain(version))
    older = [release for release in KNOWN_GOOD if parse_version(release.tensorrt_llm) <= wanted]
    return older[-1] if older else None


# --------------------------------------------------------------------------- rows


def _system(probes: Probes) -> Row:
    found = f"Python {probes.python}, {probes.platform}"
    if not _within(probes.python, ">=3.10,<3.13"):
        return Row("python", "lacking", found, BACKENDS, "use Python 3.10, 3.11 or 3.12")
    return Row("python", "ok", found)


def _driver(probes: Probes, driver: str | None, problem: str | None, version: str | None) -> Row:
    if driver is None:
        remedy = "a machine with an NVIDIA GPU and its driver; in a container: --gpus all"
        return Row("driver", "lacking", problem or "version not told", _GPU, remedy)
    match = re.search(r"CUDA Version:\s*([\d.]+)", probes.nvidia_smi_banner)
    found = driver + (f", CUDA up to {match.group(1)}" if match else "")
    release = _release(version)
    if release is None:
        oldest = DRIVER_OF_CUDA[12]
        if _numbers(driver) < _numbers(oldest):
            newer = DRIVER_OF_CUDA[13]
            remedy = f"driver {oldest} or newer runs CUDA 12 (TensorRT-LLM up to 1.0), {newer} CUDA 13"
            return Row("driver", "lacking", found, _GPU, remedy)
        if _numbers(driver) < _numbers(DRIVER_OF_CUDA[13]):
            remedy = f"TensorRT-LLM from 1.1 on is built with CUDA 13: driver {DRIVER_OF_CUDA[13]} or newer"
            return Row("driver", "note", found, _GPU, remedy)
        return Row("driver", "ok", found)
    oldest = DRIVER_OF_CUDA[_numbers(release.cuda)[0]]
    nearest = "" if release.tensorrt_llm == _plain(version or "") else ", the nearest that is known,"
    built = f"TensorRT-LLM {release.tensorrt_llm}{nearest} is built with CUDA {release.cuda}"
    if _numbers(driver) < _numbers(oldest):
        return Row("driver", "lacking", found, _GPU, f"{built}: driver {oldest} or newer")
    if _numbers(driver) < _numbers(release.driver):
        remedy = (
            f"{built} and tested with driver {release.driver}; older ones run by minor version compatibility"
        )
        return Row("driver", "note", found, _GPU, remedy)
    return Row("driver", "ok", found)


def _gpus(probes: Probes, gpus: tuple[Gpu, ...]) -> Row:
    visible = probes.environment.get("CUDA_VISIBLE_DEVICES")
    if not gpus:
        return Row("gpu", "lacking", "none", _GPU, "a GPU of sm80 (Ampere) or newer")
    told = []
    for gpu in gpus:
        sm = "architecture not told" if gpu.sm is None else f"sm{gpu.sm}"
        memory = "" if gpu.memory_bytes is None else f", {gpu.memory_bytes / GIB:.0f} GiB"
        told.append(f"{gpu.name} ({sm}{memory})")
    found = "; ".join(f"{told.count(one)} x {one}" for one in dict.fromkeys(told))
    if visible is not None and visible.strip() in ("", "-1"):
        remedy = "CUDA_VISIBLE_DEVICES hides every GPU; unset it"
        return Row("gpu", "lacking", found, _GPU, remedy)
    known = [gpu.sm for gpu in gpus if gpu.sm is not None]
    if known and max(known) < _MIN_SM:
        return Row("gpu", "lacking", found, _GPU, f"TensorRT-LLM wants sm{_MIN_SM} (Ampere) or newer")
    if not known:
        return Row("gpu", "note", found, _GPU, "give lint the board's name: trtspec lint --gpu NAME")
    formats = [name for name, sm in (("FP8", 89), ("NVFP4", 100)) if min(known) < sm]
    if formats:
        remedy = f"no {' and no '.join(formats)} arithmetic; trtspec lint --gpu NAME checks a recipe"
        return Row("gpu", "note", found, _GPU, remedy)
    return Row("gpu", "ok", found)


def _container(kind: Backend) -> str:
    newest = [v for v in VERSIONS if BACKEND_VERSIONS[kind].admits(v) and "rc" not in v][-1]
    return (
        f"NVIDIA's container tensorrt-llm/release:{newest}; trtspec build RECIPE --dry-run prints its script"
    )


def _tensorrt_llm(probes: Probes, version: str | None) -> Row:
    stub = probes.packages.get("tensorrt-llm") or probes.packages.get("tensorrt_llm")
    if version is None:
        found = "not installed"
        if stub:
            found = f"package {stub} without code (a stub, or broken)"
        return Row("tensorrt-llm", "lacking", found, _GPU, f"run in {_container('pytorch')}")
    plain = _plain(version)
    if not plain:
        return Row(
            "tensorrt-llm", "lacking", version[:40], _GPU, f"not a version; run in {_container('pytorch')}"
        )
    known = {parse_version(one) for one in VERSIONS}
    lacking: list[Backend] = [kind for kind in _GPU if not BACKEND_VERSIONS[kind].admits(plain)]
    if len(lacking) == len(_GPU):
        remedy = f"trtspec has {', '.join(f'{kind} for {BACKEND_VERSIONS[kind]}' for kind in _GPU)}"
        return Row("tensorrt-llm", "lacking", version, _GPU, remedy)
    if parse_version(plain) not in known:
        nearest = nearest_version(plain)
        remedy = f"trtspec has no table of its flags and keys; the nearest that has one is {nearest}"
        return Row("tensorrt-llm", "lacking", version, _GPU, remedy)
    if lacking:
        remedy = f"{lacking[0]} needs {BACKEND_VERSIONS[lacking[0]]}: {_container(lacking[0])}"
        return Row("tensorrt-llm", "lacking", version, tuple(lacking), remedy)
    return Row("tensorrt-llm", "ok", version)


def _trtllm_build(probes: Probes, version: str | None) -> Row:
    path = probes.programs.get("trtllm-build")
    if path:
        return Row("trtllm-build", "ok", path)
    remedy = "it comes with TensorRT-LLM up to 1.2.1"
    if version is not None and BACKEND_VERSIONS["tensorrt"].admits(_plain(version) or "0"):
        remedy = "put the environment's bin folder on PATH"
    return Row("trtllm-build", "lacking", "not on PATH", ("tensorrt",), remedy)


def _embedded_packages(probes: Probes) -> list[Row]:
    rows = []
    for name in EMBEDDED_PACKAGES:
        wanted = _EMBEDDED[name]
        found = probes.packages.get(name)
        if found is None or not _within(found, wanted):
            remedy = f"{name} {wanted}; pip install 'trtspec[embedded]'"
            if name == "torch" and "tensorrt-llm" in probes.packages:
                remedy += " in an environment of its own: here it would replace TensorRT-LLM's torch"
            rows.append(Row(name, "lacking", found or "not installed", ("embedded",), remedy))
        elif name == "torch":
            where = (
                "CPU only" if "+cpu" in found else "with CUDA" if "+cu" in found or _has_cuda(probes) else ""
            )
            rows.append(Row(name, "ok", f"{found}{f' ({where})' if where else ''}"))
        else:
            rows.append(Row(name, "ok", found))
    return rows


def _has_cuda(probes: Probes) -> bool:
    return any(name.startswith("nvidia-cuda-runtime") for name in probes.packages)


def _quantization(probes: Probes) -> list[Row]:
    rows = []
    for name, wanted, what in (
        ("nvidia-modelopt", _MODELOPT, "building quantized recipes"),
        ("transformers", _TRANSFORMERS, "calibrating"),
    ):
        found = probes.packages.get(name)
        if found is not None and _within(found, wanted):
            rows.append(Row(name, "ok", found))
        else:
            remedy = f"for {what}: {name} {wanted}; pip install 'trtspec[quantize]'"
            rows.append(Row(name, "note", found or "not installed", BACKENDS, remedy))
    return rows


def _triton(probes: Probes) -> Row:
    found, numpy = probes.packages.get("nvidia-pytriton"), probes.packages.get("numpy", "")
    if probes.platform != "linux x86_64":
        remedy = "nvidia-pytriton is for linux x86_64; verify works without serving"
        return Row("triton (embedded)", "note", found or "not installed", ("embedded",), remedy)
    if found is None:
        remedy = "for trtspec serve: pip install 'trtspec[triton]'"
        return Row("triton (embedded)", "note", "not installed", ("embedded",), remedy)
    if numpy and not _within(numpy, "<2"):
        remedy = f"its server dies with numpy {numpy}: pip install 'numpy<2'"
        return Row("triton (embedded)", "note", f"nvidia-pytriton {found}", ("embedded",), remedy)
    return Row("triton (embedded)", "ok", f"nvidia-pytriton {found}")


def _triton_gpu(probes: Probes) -> Row:
    server = probes.programs.get("tritonserver")
    if server is None:
        remedy = "for trtspec serve: NVIDIA's container tritonserver:YY.MM-trtllm-python-py3"
        return Row("triton (GPU)", "note", "no tritonserver on PATH", _GPU, remedy)
    if "python" not in probes.triton_backends:
        remedy = "the llmapi model needs Triton's python backend; use an image YY.MM-trtllm-python-py3"
        return Row("triton (GPU)", "note", server, _GPU, remedy)
    if "tensorrtllm" not in probes.triton_backends:
        remedy = "engines need the tensorrtllm backend, which images after TensorRT-LLM 1.2 no longer have"
        return Row("triton (GPU)", "note", server, ("tensorrt",), remedy)
    return Row("triton (GPU)", "ok", server)


def _mpi(probes: Probes, gpus: tuple[Gpu, ...]) -> Row:
    path = probes.programs.get("mpirun")
    if path:
        said = probes.mpi.splitlines()[0].strip() if probes.mpi.strip() else path
        return Row("mpi", "ok", said[:80])
    remedy = "tensor and pipeline parallelism are launched by mpirun: openmpi-bin, or NVIDIA's container"
    return Row("mpi", "note", "no mpirun on PATH", _GPU, remedy)


def _memory(probes: Probes) -> Row:
    free = probes.memory_bytes
    if free is None:
        return Row("memory", "note", "not told", (), "the system does not tell how much memory there is")
    found = f"{free / GIB:.1f} GiB available"
    if free < 4 * GIB:
        return Row("memory", "note", found, BACKENDS, "the sample model wants 4 GiB, quantizing 8B about 40")
    return Row("memory", "ok", found)


def _disk(probes: Probes) -> Row:
    free = probes.disk_free_bytes
    if free is None:
        return Row("disk", "note", "not told", (), f"{probes.disk_path} cannot be looked at")
    found = f"{free / GIB:.0f} GiB free at {probes.disk_path}"
    if free < _DISK_BYTES:
        return Row(
            "disk", "note", found, BACKENDS, "an 8B checkpoint, its quantized copy and engine take 40 GiB"
        )
    return Row("disk", "ok", found)


def _shared_memory(probes: Probes) -> Row:
    size = probes.shm_bytes
    if size is None:
        return Row("shared memory", "note", "not told", _GPU, "/dev/shm is not there")
    found = f"{size / GIB:.2f} GiB in /dev/shm"
    if size < _SHM_BYTES:
        remedy = "NCCL and Triton want 1 GiB and more; in a container: --ipc host or --shm-size 1g"
        return Row("shared memory", "note", found, _GPU, remedy)
    return Row("shared memory", "ok", found)


def _ulimits(probes: Probes) -> Row:
    wanted: dict[str, int | None] = {"memlock": None, "stack": _STACK_BYTES, "nofile": _FILES}
    low, told = [], []
    for name, least in wanted.items():
        if name not in probes.limits:
            continue
        value = probes.limits[name]
        told.append(f"{name} {'unlimited' if value is None else value}")
        if value is not None and (least is None or value < least):
            low.append(name)
    found = ", ".join(told) or "not told"
    if low:
        remedy = f"low: {', '.join(low)}; in a container: --ulimit memlock=-1 --ulimit stack={_STACK_BYTES}"
        return Row("ulimits", "note", found, _GPU, remedy)
    return Row("ulimits", "ok", found)


def _environment(probes: Probes) -> list[Row]:
    rows = []
    for name, value in sorted(probes.environment.items()):
        if FORCED_ACCEPTANCE.match(name):
            shown = f"{name}={value[:40]!r}"
            if value.strip().lower() in ("", "0", "0.0", "false"):
                rows.append(Row("forced acceptance", "note", f"{shown} (off)", (), f"unset {name}"))
            else:
                remedy = f"it accepts drafts unseen, so acceptance, speed and text are false; unset {name}"
                rows.append(Row("forced acceptance", "error", shown, BACKENDS, remedy))
    if not rows:
        rows.append(Row("forced acceptance", "ok", "no switch is set"))
    if "TLLM_USE_TRT_ENGINE" in probes.environment:
        remedy = "only TensorRT-LLM 0.21 looks at it; a recipe names its backend"
        rows.append(Row("environment", "note", "TLLM_USE_TRT_ENGINE is set", _GPU, remedy))
    return rows
