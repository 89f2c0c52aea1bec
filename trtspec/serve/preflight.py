"""What this machine must have to run Triton without a container, checked before anything starts.

The server is the ``tritonserver`` binary inside the nvidia-pytriton wheel. Each check exists because the
server itself does not notice: it hangs for ever when the stub lacks a library, turns ready and dies at the
first request with numpy 2, and stays ready without metrics when that port is taken.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import site
import socket
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trtspec import process
from trtspec.errors import InputError, MissingError, Problem, TrtspecError
from trtspec.user_files import shown_path

DISTRIBUTION = "nvidia-pytriton"
_INSTALL = "pip install 'trtspec[triton]'"
_SHM_BYTES = 8 << 20
_LIBRARY = "libtriton_python.so"
_UTILS = "triton_python_backend_utils.py"
_STUB = "triton_python_backend_stub"


@dataclass(frozen=True)
class Addresses:
    """Where the server listens. ``host`` is an address of this machine; 0.0.0.0 is all of them."""

    host: str
    http_port: int
    grpc_port: int
    metrics_port: int

    @property
    def reachable_host(self) -> str:
        """The host that a client on this machine uses."""
        return "127.0.0.1" if self.host in ("0.0.0.0", "") else self.host

    @property
    def is_public(self) -> bool:
        """Whether other machines may reach it."""
        return self.host != "localhost" and not self.host.startswith("127.")

    def ports(self) -> dict[str, int]:
        return {"http": self.http_port, "grpc": self.grpc_port, "metrics": self.metrics_port}


@dataclass(frozen=True)
class Installation:
    """The files of the wheel that are used."""

    server: Path
    backend: Path
    """Folder with the Python backend's library and utilities."""
    stub: Path
    """The process that runs the model, built for this Python."""


def find_installation() -> Installation:
    """The server in this environment. Raises MissingError; nothing of the wheel is imported."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise MissingError(
            f"the Triton server of {DISTRIBUTION} runs on Linux x86_64, this is {sys.platform} "
            f"{platform.machine()}; serve inside NVIDIA's container or use trtspec verify without serving"
        )
    try:
        distribution = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise MissingError(
            f"package {DISTRIBUTION} (it holds the Triton server) is missing; {_INSTALL}"
        ) from None
    root = Path(str(distribution.locate_file("pytriton/tritonserver")))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = Installation(
        server=root / "bin" / "tritonserver",
        backend=root / "backends" / "python",
        stub=root / "python_backend_stubs" / version / _STUB,
    )
    missing = [
        path
        for path in (found.server, found.backend / _LIBRARY, found.backend / _UTILS, found.stub)
        if not path.is_file()
    ]
    if found.stub in missing and len(missing) == 1:
        stubs = sorted(path.parent.name for path in root.glob(f"python_backend_stubs/*/{_STUB}"))
        raise MissingError(
            f"{DISTRIBUTION} {distribution.version} has no stub for Python {version} "
            f"(it has {', '.join(stubs)}); use one of those"
        )
    if missing:
        raise MissingError(
            f"{DISTRIBUTION} {distribution.version} lacks {missing[0].name}; install nvidia-pytriton 0.7.0"
        )
    return found


def resolve_host(host: str) -> str:
    """The IPv4 address of ``host``: the server takes neither names nor IPv6. Raises InputError."""
    message = "is neither an IPv4 address nor a name of one"
    try:
        # Through ASCII, so that what no name can be does not reach the resolver.
        found = (
            socket.getaddrinfo(host.encode("idna"), None, socket.AF_INET, socket.SOCK_STREAM) if host else []
        )
    except (OSError, ValueError):
        found = []
        if ":" in host:
            message = "is not IPv4, and the server takes only that"
    if not found:
        message += "; use 127.0.0.1, or 0.0.0.0 for all addresses of this machine"
        raise InputError(Problem(f"{shown_path(host) or 'an empty name'} {message}", key="host"))
    return str(found[0][4][0])


def check(installation: Installation, addresses: Addresses, environment: dict[str, str]) -> None:
    """Raise MissingError with everything that would keep the server from working here, InputError for a
    host that is not this machine's."""
    if problem := host_problem(addresses.host):
        raise InputError(Problem(problem, key="host"))
    problems = [numpy_problem(_version("numpy"))]
    problems += [library_problem(path, environment) for path in (installation.server, installation.stub)]
    problems += port_problems(addresses)
    problems.append(_shared_memory_problem())
    if not (Path(sys.prefix) / "bin" / "python3").exists():
        problems.append(
            f"{Path(sys.prefix) / 'bin'} has no python3, by which the model finds its packages; "
            "make a virtual environment and install trtspec there"
        )
    problems += pth_problems(Path(folder) for folder in site.getsitepackages())
    found = [problem for problem in problems if problem]
    if found:
        raise MissingError("\n".join(found))


def numpy_problem(version: str | None) -> str | None:
    """Why the stub cannot work with this numpy (it was built with pybind11 2.10)."""
    if version is None:
        return f"package numpy is missing; {_INSTALL}"
    if int(version.split(".")[0]) >= 2:
        return (
            f"numpy {version}: the Triton server of {DISTRIBUTION} 0.7.0 dies at the first request with "
            "numpy 2; pip install 'numpy<2'"
        )
    return None


def library_problem(program: Path, environment: dict[str, str]) -> str | None:
    """Which shared libraries ``program`` would not find."""
    lines: list[str] = []
    try:
        process.run(["ldd", str(program)], env=environment, on_line=lines.append, timeout_s=20)
    except TrtspecError as error:
        return f"{program.name}: ldd cannot read it: {str(error).splitlines()[0]}"
    missing = [line.split("=>")[0].strip() for line in lines if "not found" in line]
    if not missing:
        return None
    hint = ""
    if any(name.startswith("libpython") for name in missing):
        hint = "; this Python was built without --enable-shared: use one that has its libpython"
    return f"{program.name} needs {', '.join(missing)}, not found on this machine{hint}"


def pth_problems(folders: Iterable[Path]) -> list[str]:
    """Path files (of packages installed from elsewhere) that the model's Python, which knows only ASCII,
    ends on: they name a folder with another letter."""
    return [
        f"{path} names a folder with a letter beyond ASCII, at which the model's process ends; install that "
        "package from a folder with a plain name, or without -e"
        for folder in folders
        for path in sorted(folder.glob("*.pth"))
        if not path.read_bytes().isascii()
    ]


def host_problem(host: str) -> str | None:
    """Why nothing can listen on the address ``host``, whatever the port."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            return (
                f"{host} cannot be listened on ({error.strerror}); use 127.0.0.1, or 0.0.0.0 for all "
                "addresses of this machine"
            )
    return None


def port_problems(addresses: Addresses) -> list[str]:
    """Ports that cannot be listened on, each with what to do."""
    problems = []
    ports = addresses.ports()
    if len(set(ports.values())) != len(ports):
        problems.append(
            f"the ports must differ: {', '.join(f'{name} {port}' for name, port in ports.items())}"
        )
    for name, port in ports.items():
        with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((addresses.host, port))
            except OSError as error:
                problems.append(
                    f"{name} port {addresses.host}:{port} cannot be used ({error.strerror}); "
                    f"stop what uses it or give --{name}-port"
                )
    return problems


def python_links() -> dict[str, Path]:
    """Links by which the model's process reaches Python and packages, by name in the runtime folder.

    That process embeds a Python with ASCII as file system encoding (whatever the locale says): it ends when
    a folder of Python itself has another character in its name, and cannot open one that has. So it sees
    plain names only: a virtual environment of links (with :func:`python_files`) to this one.
    """
    prefix, package_parent = Path(sys.prefix), Path(__file__).resolve().parents[2]
    links = {f"python/{name}": prefix / name for name in ("bin", "lib", "lib64") if (prefix / name).exists()}
    links["python-home"] = Path(sys.base_prefix)
    if package_parent.name not in ("site-packages", "dist-packages"):
        links["package"] = package_parent
    return links


def python_files(runtime: Path) -> dict[str, bytes]:
    """The files beside the links of :func:`python_links`: pyvenv.cfg, if this Python has one."""
    try:
        text = (Path(sys.prefix) / "pyvenv.cfg").read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    wanted = [
        line for line in text.splitlines() if line.startswith(("include-system-site-packages", "version"))
    ]
    lines = [f"home = {runtime / 'python-home' / 'bin'}", *wanted]
    return {"python/pyvenv.cfg": "".join(f"{line}\n" for line in lines).encode()}


def base_environment(threads: int | None, runtime: Path) -> dict[str, str]:
    """The environment of server and model, built from nothing: what works must not depend on the shell.

    The stub takes the first python3 on PATH for its packages (the links of :func:`python_links` below
    ``runtime``), and libpython from LD_LIBRARY_PATH. OpenMP settings must be there before torch is loaded;
    spinning threads cost a factor of 15 on busy cores.
    """
    environment = {
        "PATH": os.pathsep.join([str(runtime / "python" / "bin"), "/usr/bin", "/bin"]),
        "PYTHONHOME": str(runtime / "python-home"),
        "TMPDIR": str(runtime.parent),
        "LD_LIBRARY_PATH": str(sysconfig.get_config_var("LIBDIR")),
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": str(threads or os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))),
        "HF_HUB_OFFLINE": "1",
    }
    for name in ("HOME", "TRTSPEC_CACHE", "XDG_CACHE_HOME", "CUDA_VISIBLE_DEVICES"):
        if name in os.environ:
            environment[name] = os.environ[name]
    if "package" in python_links():
        environment["PYTHONPATH"] = str(runtime / "package")
    return environment


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _shared_memory_problem() -> str | None:
    try:
        free = os.statvfs("/dev/shm")
    except OSError:
        return "/dev/shm is missing; server and model exchange requests through it"
    free_bytes = free.f_bavail * free.f_frsize
    if free_bytes < _SHM_BYTES:
        return (
            f"/dev/shm has {free_bytes >> 20} MB free, {_SHM_BYTES >> 20} MB are needed (docker: --shm-size)"
        )
    return None
