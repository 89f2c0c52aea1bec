"""The supervisor of one Triton server: start, readiness, watching, draining, and leaving nothing behind.

Processes: this one, the server (own session), the server's stub that runs the model, and a guard that
cleans up if this one is killed. What the server does not notice is watched here: a dead stub (the server
stays "ready" and lets its clients hang), someone else's server on the same port, a metrics listener that
never came up, a model that never finishes loading.
"""

from __future__ import annotations

import contextlib
import glob
import http.client
import json
import os
import re
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from trtspec import process
from trtspec.artifact import Artifact
from trtspec.backends import gpu_backend_message
from trtspec.errors import InputError, MissingError, TrtspecError
from trtspec.recipe import EmbeddedBackend
from trtspec.recipe_facts import describe_acceptance
from trtspec.serve.preflight import (
    Addresses,
    Installation,
    base_environment,
    check,
    find_installation,
    python_files,
    python_links,
)
from trtspec.serve.ready_file import claim, withdraw, write
from trtspec.serve.repository import render

EXIT_TIMEOUT_S = 10
"""How long requests may go on after the first signal to stop."""
START_TIMEOUT_S = 300.0
_METRICS_TIMEOUT_S = 20.0
_LOAD_FAILURE_S = 5.0
"""How long the server may take to end after its model has: it says why better than we can."""
_POLL_S = 0.05
_TAIL_BYTES = 20_000
_TAIL_LINES = 12
_LINE_CHARS = 200
_SHM = "/dev/shm"
_ENGINE_LINK = "engine"
_NO_OUTPUT = "  (it has written nothing yet)"


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before anything is started."""

    files: dict[str, bytes]
    """The model repository (below ``models``) and what Python needs, by path below ``runtime``."""
    links: dict[str, Path]
    """Symbolic links below ``runtime``: the engine (``engine``), and Python (see ``python_links``)."""
    argv: tuple[str, ...]
    environment: dict[str, str]
    addresses: Addresses
    model_name: str
    server_id: str
    """Name that the server gives itself, and prefix of its shared memory."""


class _Stop(Exception):
    """A signal asked for the end."""


def make_plan(
    artifact: Artifact, addresses: Addresses, installation: Installation, runtime: Path, server_id: str
) -> Plan:
    """The repository, command and environment that serve ``artifact``; pure but for what is installed.

    Raises MissingError for a recipe whose backend this machine cannot serve.
    """
    recipe = artifact.recipe
    backend = recipe.backend
    if not isinstance(backend, EmbeddedBackend):
        raise MissingError(gpu_backend_message(backend.kind))
    argv = (
        str(installation.server),
        f"--id={server_id}",
        f"--model-repository={runtime / 'models'}",
        f"--backend-directory={runtime / 'backends'}",
        "--disable-auto-complete-config",
        f"--http-address={addresses.host}",
        f"--http-port={addresses.http_port}",
        f"--grpc-address={addresses.host}",
        f"--grpc-port={addresses.grpc_port}",
        f"--metrics-address={addresses.host}",
        f"--metrics-port={addresses.metrics_port}",
        "--allow-gpu-metrics=false",
        f"--backend-config=python,shm-region-prefix-name={server_id}",
        f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
    )
    repository = render(
        recipe.serving.model_name,
        runtime / _ENGINE_LINK,
        recipe.name,
        artifact.manifest.recipe_digest,
        describe_acceptance(recipe),
    )
    return Plan(
        files={
            **{f"models/{name}": content for name, content in repository.items()},
            **python_files(runtime),
        },
        links={_ENGINE_LINK: artifact.folder.resolve(), **python_links()},
        argv=argv,
        environment=base_environment(backend.threads, runtime),
        addresses=addresses,
        model_name=recipe.serving.model_name,
        server_id=server_id,
    )


def new_server_id() -> str:
    """Unique among the servers of this machine; ends so that no id is the beginning of another."""
    return f"trtspec-{os.getpid()}-{secrets.token_hex(4)}-"


def serve(
    artifact: Artifact,
    addresses: Addresses,
    *,
    on_ready: Callable[[Plan], Mapping[str, Any]],
    say: Callable[[str], None],
    log: Path | None = None,
    ready_file: Path | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
) -> None:
    """Serve ``artifact`` until SIGINT or SIGTERM; must run in the main thread.

    ``on_ready`` is called once, when server, model and metrics answer; what it raises ends the server,
    what it returns (with the ``server_id``) is written to ``ready_file``, which is removed with the server.
    The first signal lets requests in flight finish (up to EXIT_TIMEOUT_S), the second ends them. Returns
    after an orderly end. Raises MissingError when this machine lacks something, when the server or the
    model ends by itself, or when requests had to be cut off; InputError when the model refuses the engine.
    ``log`` gets all output of server and model; without it, it is kept until the end only.
    """
    installation = find_installation()
    server_id = new_server_id()
    with stop_signals() as signals, runtime_folder() as runtime:
        plan = make_plan(artifact, addresses, installation, runtime, server_id)
        check(installation, addresses, plan.environment)
        _lay_out(runtime, plan, installation)
        if ready_file is not None:
            ready_file = claim(ready_file)
        log = log or runtime / "server.log"
        log_start = log.stat().st_size if log.exists() else 0
        server = process.start(plan.argv, env=plan.environment, cwd=runtime, log=log)
        marked = None if ready_file is None else (ready_file, server_id)
        guard = process.guard(server, [_shm_pattern(server_id), str(runtime)], marked)
        supervisor = _Supervisor(server, plan, runtime, log, log_start, signals, say)
        try:
            supervisor.wait_until_ready(start_timeout_s)
            fields = on_ready(plan)
            if ready_file is not None:
                write(ready_file, fields)
            supervisor.watch()
        except _Stop:
            supervisor.drain()
        finally:
            server.kill_group()
            for path in glob.glob(_shm_pattern(server_id)):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
            try:
                if ready_file is not None:
                    withdraw(ready_file, server_id)
            finally:
                guard.release()


class _Supervisor:
    def __init__(
        self,
        server: process.Child,
        plan: Plan,
        runtime: Path,
        log: Path,
        log_start: int,
        signals: list[int],
        say: Callable[[str], None],
    ) -> None:
        self._server = server
        self._plan = plan
        self._runtime = runtime
        self._log = log
        self._log_start = log_start
        self._signals = signals
        self._say = say
        self._stub: _Process | None = None

    def wait_until_ready(self, timeout_s: float) -> None:
        """Return when our own server, its model and its metrics answer."""
        deadline = time.monotonic() + timeout_s
        has_had_model, model_seen = False, time.monotonic()
        http_address = (self._plan.addresses.reachable_host, self._plan.addresses.http_port)
        while True:
            self._check_signals()
            if self._server.poll() is not None:
                raise self._start_failure()
            # The server waits for ever for a stub that died before it said a word.
            if _find_stub(self._server.pid) is not None:
                has_had_model, model_seen = True, time.monotonic()
            elif has_had_model and time.monotonic() > model_seen + _LOAD_FAILURE_S:
                if load_failure(self._text()) is not None:
                    raise self._start_failure()
                raise MissingError(
                    "the model's process ended while it was loading; last lines of server and model:\n"
                    f"{self._tail()}"
                )
            if time.monotonic() > deadline:
                raise MissingError(
                    f"the model was not loaded after {timeout_s:g} s; stopped (a longer --start-timeout may "
                    f"help). Last lines of server and model:\n{self._tail()}"
                )
            body = http_get(http_address, "/v2")
            if (
                body is not None
                and self._is_ours(body)
                and http_get(http_address, "/v2/health/ready") is not None
            ):
                break
            time.sleep(_POLL_S)
        self._wait_for_metrics()
        self._stub = _find_stub(self._server.pid)
        if self._stub is None:
            raise MissingError(f"the model's process is gone; the last lines of its log:\n{self._tail()}")

    def watch(self) -> None:
        """Return never; raise _Stop on a signal, MissingError when server or model ended."""
        assert self._stub is not None
        while True:
            self._check_signals()
            if self._server.poll() is not None:
                raise MissingError(
                    f"the server ended by itself (exit code {self._server.poll()}); "
                    f"its last lines:\n{self._tail()}"
                )
            if not self._stub.is_alive():
                said = re.search(r"^trtspec: (the engine failed .*?);", self._text(), re.MULTILINE)
                reason = said.group(1) if said else "the model's process died (often: out of memory)"
                raise MissingError(
                    f"{reason}; the server was stopped, because it would have let its clients hang. "
                    f"Last lines of the log:\n{self._tail()}"
                )
            time.sleep(_POLL_S)

    def drain(self) -> None:
        """Let the requests in flight finish."""
        # Before the user is told: the next signal may come as soon as that is read.
        seen = len(self._signals)
        self._say(f"stopping: requests in flight may finish ({EXIT_TIMEOUT_S} s); again to stop at once")
        self._server.terminate()
        # The server's own limit comes first; this one is for a server that hangs in its exit.
        deadline = time.monotonic() + EXIT_TIMEOUT_S + 10
        while self._server.poll() is None:
            if len(self._signals) > seen:
                raise MissingError("stopped at once; requests in flight were cut off")
            if time.monotonic() > deadline:
                raise MissingError("the server did not stop by itself; killed")
            if self._stub is not None and not self._stub.is_alive() and self._server.wait(5.0) is None:
                raise MissingError(
                    "the model's process died while requests were in flight; they were cut off"
                )
            time.sleep(_POLL_S)
        if self._stub is not None and self._server.poll() != 0:
            raise MissingError(f"requests still ran after {EXIT_TIMEOUT_S} s and were cut off")

    def _check_signals(self) -> None:
        if self._signals:
            raise _Stop

    def _is_ours(self, body: bytes) -> bool:
        try:
            name = json.loads(body).get("name")
        except (ValueError, AttributeError):
            name = None
        if name == self._plan.server_id:
            return True
        addresses = self._plan.addresses
        raise MissingError(
            f"another server answers on {addresses.reachable_host}:{addresses.http_port} ({name!r}); "
            "stop it or give --http-port"
        )

    def _wait_for_metrics(self) -> None:
        address = (self._plan.addresses.reachable_host, self._plan.addresses.metrics_port)
        deadline = time.monotonic() + _METRICS_TIMEOUT_S
        while time.monotonic() < deadline:
            self._check_signals()
            body = http_get(address, "/metrics")
            if body is not None and b"trtspec_requests_running" in body:
                return
            time.sleep(_POLL_S)
        raise MissingError(
            f"the metrics port {address[0]}:{address[1]} does not answer with this server's metrics; "
            "stop what uses it or give --metrics-port"
        )

    def _start_failure(self) -> TrtspecError:
        text = self._text()
        failure = load_failure(text)
        if failure is not None:
            kind, reason = failure
            error = InputError if kind == "InputError" else MissingError
            return error(f"the model could not be loaded: {reason}")
        for line in text.splitlines():
            if "failed to start" in line and "service" in line:
                return MissingError(line[line.index("failed to start") :].strip())
        return MissingError(
            f"the server ended with exit code {self._server.poll()} before it was ready; its last lines:\n"
            f"{self._tail()}"
        )

    def _text(self) -> str:
        with self._log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
        # The model knows its engine by the link; the user does not.
        return text.replace(str(self._runtime / _ENGINE_LINK), str(self._plan.links[_ENGINE_LINK]))

    def _tail(self) -> str:
        written = [line for line in self._text().splitlines() if line.strip()]
        # Rather noise than nothing: it shows how far the server came.
        lines = [line for line in written if not _NOISE.match(line)] or written[-3:]
        return "\n".join(f"  {line[:_LINE_CHARS]}" for line in lines[-_TAIL_LINES:]) or _NO_OUTPUT


_NOISE = re.compile(r"[+|]|I\d{4} |.*(pinned_memory_manager|CudaDriverHelper|initialize NVML|DCGM)")
"""Lines that say nothing about a failure: tables, information, and complaints about the missing GPU."""


def load_failure(log: str) -> tuple[str, str] | None:
    """(exception, its message) of the ``initialize`` that failed, from the server's log; None if none did.

    The server writes it in one line, line ends escaped, followed by the places it passed through.
    """
    match = re.search(r"failed to load '[^']*' version \d+: \w+: (.*)", log)
    if match is None:
        return None
    text = (
        match.group(1)
        .removesuffix('"')
        .split("\\n\\nAt:")[0]
        .replace("\\n", "\n")
        .replace('\\"', '"')
        .strip()
    )
    kind, separator, message = text.partition(": ")
    return (kind, message) if separator and kind.isidentifier() else ("", text)


# --------------------------------------------------------------------------- pieces


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """The SIGINT and SIGTERM that came since; they do nothing else meanwhile."""
    received: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        received.append(signum)

    before = {signum: signal.signal(signum, note) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def runtime_folder() -> Iterator[Path]:
    """A new folder whose name every program can work with; deleted at the end."""
    folder = Path(tempfile.mkdtemp(prefix="trtspec-serve-", dir=plain_temp_folder()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def plain_temp_folder() -> str:
    """The folder for temporary files, or another one if its name has a space or a letter beyond ASCII.

    The server starts the model by an unquoted shell command, and the model's Python cannot open such a name.
    """
    for folder in (tempfile.gettempdir(), "/tmp", "/var/tmp", _SHM):
        if re.fullmatch(r"[A-Za-z0-9_./+-]+", folder) and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise MissingError(
        f"TMPDIR: {tempfile.gettempdir()} has a character that the server cannot work with, and /tmp "
        "cannot be written; set TMPDIR to a folder named in plain ASCII without spaces"
    )


def _lay_out(runtime: Path, plan: Plan, installation: Installation) -> None:
    """Write the repository, and a backend folder of links: the stub is searched beside the backend."""
    for name, content in plan.files.items():
        path = runtime / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for name, target in plan.links.items():
        (runtime / name).parent.mkdir(exist_ok=True)
        (runtime / name).symlink_to(target)
    backend = runtime / "backends" / "python"
    backend.mkdir(parents=True)
    for path in (*installation.backend.iterdir(), installation.stub):
        if path.is_file():
            (backend / path.name).symlink_to(path)


def _shm_pattern(server_id: str) -> str:
    return f"{_SHM}/{glob.escape(server_id)}*"


def http_get(address: tuple[str, int], path: str) -> bytes | None:
    """The body of a 200 answer, else None."""
    connection = http.client.HTTPConnection(*address, timeout=2.0)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
        return body if response.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


@dataclass(frozen=True)
class _Process:
    """A process that is no child of ours; its start time tells it from a later one with the same id."""

    pid: int
    start_ticks: str

    def is_alive(self) -> bool:
        fields = _stat(self.pid)
        return fields is not None and fields[0] != "Z" and fields[19] == self.start_ticks


def _find_stub(server_pid: int) -> _Process | None:
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        fields = _stat(int(name))
        if fields is not None and int(fields[1]) == server_pid and fields[0] != "Z":
            return _Process(int(name), fields[19])
    return None


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the command's name: state, parent, ..., start time (index 19)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rsplit(")", 1)[1].split()
