"""What there is on this machine, as plain text and numbers: :func:`collect` looks and judges nothing.

Nothing heavy is imported: packages are read from their metadata, programs are only asked for their version.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trtspec import process
from trtspec.available_memory import available_memory_bytes
from trtspec.errors import TrtspecError

SMI_FIELDS = ("index", "name", "compute_cap", "memory.total", "driver_version")
SMI_OLD_FIELDS = ("index", "name", "memory.total", "driver_version")
"""Drivers before about 510 know no compute_cap."""
_TIMEOUT_S = 15.0
FORCED_ACCEPTANCE = re.compile(r"(TLLM|TRTLLM|SGLANG|VLLM)_.*(FORCE|SIMULATE)\w*ACC")
"""TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS (TensorRT-LLM), SGLANG_SIMULATE_ACC_LEN (SGLang) and kin: the
engine reports, and emits, drafts as accepted that the target never judged."""
EMBEDDED_PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "jinja2")
_OTHER_PACKAGES = (
    "nvidia-modelopt",
    "transformers",
    "nvidia-pytriton",
    "tensorrt-llm",
    "nvidia-cuda-runtime",
    "nvidia-cuda-runtime-cu12",
    "nvidia-cuda-runtime-cu13",
)


@dataclass(frozen=True)
class Probes:
    """What was seen. Texts are as the program or file gave them; None or an absent key: not there."""

    platform: str
    """``linux x86_64``."""
    python: str
    nvidia_smi: str | None = None
    """Rows of ``--query-gpu`` (index, name, compute_cap, memory.total, driver_version; older drivers without
    compute_cap) as CSV without header and units; what it said instead if it failed."""
    nvidia_smi_banner: str = ""
    """Its first lines without arguments: they name the CUDA version of the driver."""
    memory_bytes: int | None = None
    """What this process may still take."""
    environment: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    """Distribution -> version."""
    tensorrt_llm_names: tuple[str, ...] = ()
    """Names in the folder of the importable package ``tensorrt_llm``."""
    programs: Mapping[str, str] = field(default_factory=dict)
    """Program -> path."""
    mpi: str = ""
    """What ``mpirun --version`` says."""
    triton_backends: tuple[str, ...] = ()
    """Folders of ``/opt/tritonserver/backends``."""
    disk_free_bytes: int | None = None
    disk_path: str = "."
    shm_bytes: int | None = None
    limits: Mapping[str, int | None] = field(default_factory=dict)
    """Soft limits of memlock, stack (bytes) and nofile; None: unlimited."""


def collect(path: Path = Path(".")) -> Probes:
    """This machine. ``path``: the place whose disk counts. Of programs nvidia-smi and mpirun are started."""
    programs = {}
    for name in ("nvidia-smi", "trtllm-build", "trtllm-serve", "tritonserver", "mpirun", "nvcc"):
        if found := shutil.which(name):
            programs[name] = found
    # Inside NVIDIA's images tritonserver is not always on PATH.
    if "tritonserver" not in programs and os.access("/opt/tritonserver/bin/tritonserver", os.X_OK):
        programs["tritonserver"] = "/opt/tritonserver/bin/tritonserver"
    rows = None
    if "nvidia-smi" in programs:
        rows = _query(programs["nvidia-smi"], SMI_FIELDS)
        if "not a valid field" in rows:
            rows = _query(programs["nvidia-smi"], SMI_OLD_FIELDS)
    banner = _output([programs["nvidia-smi"]]) if "nvidia-smi" in programs else ""
    return Probes(
        platform=f"{sys.platform} {platform.machine()}",
        python=platform.python_version(),
        nvidia_smi=rows,
        nvidia_smi_banner="\n".join(banner.splitlines()[:5]),
        memory_bytes=available_memory_bytes(),
        environment={k: v for k, v in os.environ.items() if _is_told(k)},
        packages=_installed(),
        tensorrt_llm_names=_package_names("tensorrt_llm"),
        programs=programs,
        mpi=_output([programs["mpirun"], "--version"]) if "mpirun" in programs else "",
        triton_backends=_names(Path("/opt/tritonserver/backends")),
        disk_free_bytes=_free(path),
        disk_path=str(path.resolve()),
        shm_bytes=_total(Path("/dev/shm")),
        limits=_limits(),
    )


def _is_told(name: str) -> bool:
    """Only what is judged is taken from the environment: a report must not carry secrets."""
    return bool(FORCED_ACCEPTANCE.match(name)) or name in ("CUDA_VISIBLE_DEVICES", "TLLM_USE_TRT_ENGINE")


def _query(program: str, fields: tuple[str, ...]) -> str:
    return _output([program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"])


def _output(argv: list[str]) -> str:
    """What ``argv`` prints, or why it failed."""
    lines: list[str] = []
    try:
        process.run(argv, on_line=lines.append, timeout_s=_TIMEOUT_S)
    except TrtspecError as error:
        return "\n".join(lines) or str(error)
    return "\n".join(lines)


def _installed() -> dict[str, str]:
    found = {}
    for name in (*EMBEDDED_PACKAGES, *_OTHER_PACKAGES):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError, OSError, ValueError):
            found[name] = importlib.metadata.version(name)
    return {name: version for name, version in found.items() if isinstance(version, str)}


def _package_names(name: str) -> tuple[str, ...]:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return ()
    if spec is None or not spec.submodule_search_locations:
        return ()
    return tuple(sorted({one for place in spec.submodule_search_locations for one in _names(Path(place))}))


def _names(folder: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(os.listdir(folder)))
    except OSError:
        return ()


def _free(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _total(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).total
    except OSError:
        return None


def _limits() -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for name, number in (
        ("memlock", resource.RLIMIT_MEMLOCK),
        ("stack", resource.RLIMIT_STACK),
        ("nofile", resource.RLIMIT_NOFILE),
    ):
        soft = resource.getrlimit(number)[0]
        found[name] = None if soft == resource.RLIM_INFINITY else soft
    return found
