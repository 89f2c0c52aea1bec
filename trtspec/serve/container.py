"""Serving an engine of TensorRT-LLM where both it and Triton are: inside NVIDIA's container.

What starts is the script that the engine was sealed with (:mod:`trtspec.trtllm.launch`), from a copy in which
the paths below :data:`~trtspec.gpu_plan.ENGINE_MOUNT` name the engine's own folder. It checks version and
engine, and becomes the server. Never run against NVIDIA's server by its authors: ``tests/gpu`` does.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trtspec import process
from trtspec.artifact import TRTLLM_DIR, Artifact
from trtspec.errors import InputError, MissingError, Problem
from trtspec.gpu_plan import ENGINE_MOUNT
from trtspec.serve.launch import http_get, runtime_folder, stop_signals
from trtspec.serve.ready_file import claim, withdraw, write
from trtspec.trtllm.launch import LAUNCH_FILE
from trtspec.trtllm.opening import installed

SERVER = "/opt/tritonserver/bin/tritonserver"
START_TIMEOUT_S = 1800.0
"""Of large models: weights are read, graphs captured, engines deserialized."""
EXIT_TIMEOUT_S = 40.0
"""Triton's own limit for requests in flight is 30 s."""
_POLL_S = 0.2
_TAIL_BYTES, _TAIL_LINES = 20_000, 12


def server_here(version: str) -> str:
    """The tritonserver that can serve an engine rendered for ``version`` here. MissingError: what lacks."""
    found = installed()
    if found != version and os.environ.get("TENSORRT_LLM_VERSION") != found:
        raise MissingError(
            f"its files are for TensorRT-LLM {version}, here is {found}: trtspec build RECIPE --tensorrt-llm "
            f"{found}, or set TENSORRT_LLM_VERSION={found} to go on all the same"
        )
    path = os.environ.get("TRITONSERVER") or shutil.which("tritonserver") or SERVER
    if not os.access(path, os.X_OK):
        raise MissingError(f"no tritonserver on PATH, nor {SERVER}; set TRITONSERVER")
    return path


def lay_out(artifact: Artifact, folder: Path) -> Path:
    """Copy the engine's Triton files to ``folder``, with the engine's own paths; the script that serves."""
    home = str(artifact.folder.resolve())
    if not re.fullmatch(r"[\w./+-]+", home, re.ASCII):
        message = "has a character that does not go unquoted into Triton's files; move the engine"
        raise InputError(Problem(message, file=home))
    prefix = f"{TRTLLM_DIR}/"
    # Only where a path begins: "/engine/" also is in the middle of some.
    mounted = re.compile(rf"(?<![\w./+-]){re.escape(ENGINE_MOUNT)}/")
    for name in artifact.manifest.files:
        if name.startswith((f"{prefix}triton/", f"{prefix}{LAUNCH_FILE}")):
            text = (artifact.folder / name).read_text("utf-8")
            path = folder / name.removeprefix(prefix)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(mounted.sub(lambda _: f"{home}/", text), "utf-8")
    return folder / LAUNCH_FILE


def serve_here(
    artifact: Artifact,
    server: str,
    *,
    on_ready: Callable[[], Mapping[str, Any]],
    say: Callable[[str], None],
    log: Path | None = None,
    ready_file: Path | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
) -> None:
    """Serve ``artifact`` until SIGINT or SIGTERM; must run in the main thread.

    ``on_ready``, ``log`` and ``ready_file`` as in :func:`trtspec.serve.launch.serve`; ``server``: of
    :func:`server_here`. Raises MissingError when the server does not start, or ends by itself.
    """
    serving = artifact.recipe.serving
    address = ("127.0.0.1" if serving.host == "0.0.0.0" else serving.host, serving.http_port)
    if http_get(address, "/v2/health/live") is not None:
        raise MissingError(f"another server answers on {address[0]}:{address[1]}; stop it")
    with stop_signals() as signals, runtime_folder() as runtime:
        script = lay_out(artifact, runtime / "served")
        (runtime / "repository").mkdir()
        if ready_file is not None:
            ready_file = claim(ready_file)
        log = log or runtime / "server.log"
        environment = {**os.environ, "TRITONSERVER": server, "MODEL_REPO": str(runtime / "repository")}
        child = process.start(["bash", str(script)], env=environment, cwd=runtime, log=log)
        mark = f"trtspec-{os.getpid()}-{child.pid}"
        guard = process.guard(child, [str(runtime)], None if ready_file is None else (ready_file, mark))
        try:
            if not _wait(child, address, signals, log, start_timeout_s):
                return
            fields = {**on_ready(), "server_id": mark}
            if ready_file is not None:
                write(ready_file, fields)
            while not signals:
                if child.poll() is not None:
                    raise MissingError(f"the server ended by itself; its last lines:\n{_tail(log)}")
                time.sleep(_POLL_S)
            say(f"stopping: requests in flight may finish ({EXIT_TIMEOUT_S:.0f} s)")
            child.terminate()
            if child.wait(EXIT_TIMEOUT_S) is None:
                raise MissingError("the server did not stop by itself; killed")
        finally:
            child.kill_group()
            try:
                if ready_file is not None:
                    withdraw(ready_file, mark)
            finally:
                guard.release()


def _wait(
    child: process.Child, address: tuple[str, int], signals: list[int], log: Path, timeout_s: float
) -> bool:
    """Whether the server is ready; False when a signal came first."""
    deadline = time.monotonic() + timeout_s
    while not signals:
        if child.poll() is not None:
            raise MissingError(
                f"the server ended with exit code {child.poll()} before it was ready; its last lines:\n"
                f"{_tail(log)}"
            )
        if http_get(address, "/v2/health/ready") is not None:
            return True
        if time.monotonic() > deadline:
            raise MissingError(
                f"the model was not loaded after {timeout_s:g} s (--start-timeout); its last lines:\n"
                f"{_tail(log)}"
            )
        time.sleep(_POLL_S)
    return False


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        lines = [line for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return "\n".join(f"  {line[:200]}" for line in lines[-_TAIL_LINES:]) or "  (it has written nothing yet)"
