"""Real servers on free ports, and what is left of them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec.serve.client import stream
from trtspec.serve.protocol import Generate

RECIPE = """\
version: 1
name: tiny
model: {source: model}
backend: {kind: embedded, dtype: float32, threads: 1}
speculation: {kind: ngram, num_draft_tokens: 4}
limits: {max_batch_size: 16, max_input_tokens: 256, max_seq_tokens: 8192, max_num_tokens: 256}
serving: {model_name: tiny_llm, max_queue_requests: 4, default_max_tokens: 24}
"""

MODEL = "tiny_llm"
LONG = 7000
"""Tokens of a request that is still running when a test does something to it."""

TRTSPEC = [sys.executable, "-c", "import sys; from trtspec.cli import main; sys.exit(main())"]


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(contextlib.closing(socket.socket())) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def port_options(ports: list[int]) -> list[str]:
    names = ("--http-port", "--grpc-port", "--metrics-port")
    return [word for name, port in zip(names, ports, strict=True) for word in (name, str(port))]


def run_cli(
    *arguments: str, stdin: str | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TRTSPEC, *arguments], input=stdin, capture_output=True, encoding="utf-8", timeout=timeout
    )


@dataclass
class Server:
    """A running ``trtspec serve``; ``ready`` is what it wrote when it was ready."""

    popen: subprocess.Popen[str]
    ready: dict[str, Any]
    log: Path
    ready_file: Path

    @property
    def grpc(self) -> str:
        return str(self.ready["grpc"])

    def get(self, path: str, *, port_of: str = "http") -> str:
        return _http(self._address(port_of), "GET", path)[1]

    def post(self, path: str, body: bytes | dict[str, Any], timeout_s: float = 120) -> tuple[int, str]:
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        return _http(self._address("http"), "POST", path, data, timeout_s)

    def generate(self, **fields: Any) -> tuple[int, dict[str, Any]]:
        status, body = self.post("/v2/models/tiny_llm/generate", fields)
        return status, json.loads(body)

    def metric(self, name: str) -> float:
        for line in self.get("/metrics", port_of="metrics").splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
        raise AssertionError(f"no metric {name}")

    def settle(self) -> None:
        """Wait until no request is open and its last tokens are counted: counters follow every 50 ms."""
        seen: list[str] = []

        def is_still() -> bool:
            lines = self.get("/metrics", port_of="metrics").splitlines()
            seen.append("\n".join(line for line in lines if line.startswith("trtspec_")))
            idle = self.metric("trtspec_requests_running") == self.metric("trtspec_requests_waiting") == 0
            if not (idle and seen[-2:-1] == seen[-1:]):
                time.sleep(0.2)
                return False
            return True

        assert wait_until(is_still), seen[-1]

    def wait_for_output(self, word: str) -> None:
        """Read what ``trtspec serve`` prints, up to the line with ``word``."""
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            if word in line:
                return
        raise AssertionError(f"ended without {word!r}")

    def rest_of_output(self) -> str:
        """Wait for the end."""
        assert self.popen.stdout is not None
        output = self.popen.stdout.read()
        self.popen.wait(90)
        return output

    def stub(self) -> int:
        """Process id of the model's process."""
        (server,) = [pid for pid in _processes_with(self.ready["server_id"]) if _name(pid) == "tritonserver"]
        (stub,) = [pid for pid in _all_pids() if _parent(pid) == server]
        return stub

    def leftovers(self) -> list[str]:
        """Processes and shared memory of this server that still exist."""
        server_id = self.ready["server_id"]
        files = [str(path) for path in Path("/dev/shm").glob(f"{server_id}*")]
        return files + [f"{pid} {_name(pid)}" for pid in _processes_with(server_id)]

    def _address(self, name: str) -> str:
        return str(self.ready[name]).removeprefix("http://").removesuffix("/metrics")

    def end(self) -> None:
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
            try:
                self.popen.wait(90)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait()


def build_tiny(folder: Path, poison: str | None = None, extra_file: str | None = None) -> Path:
    """Folder of a sealed engine: 2 layers, random weights, float32, n-gram drafting, no EOS token, so that
    an answer is as long as it was asked to be. A prompt with the character ``poison`` makes logits NaN;
    ``extra_file`` is one more file in the model's folder."""
    from tiny import make_tiny_model

    from trtspec.build import build

    model = make_tiny_model(folder / "model", max_positions=8192)
    for name, key in (
        ("generation_config", "eos_token_id"),
        ("config", "eos_token_id"),
        ("tokenizer_config", "eos_token"),
    ):
        path = model / f"{name}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), key: None}))
    if poison is not None:
        _poison(model, poison)
    if extra_file is not None:
        (model / extra_file).write_text("for readers only")
    (folder / "recipe.yaml").write_text(RECIPE)
    return build(folder / "recipe.yaml", folder / "engines").folder


def _poison(model: Path, character: str) -> None:
    """Let only this character's embedding reach dimension 0, which queries and keys blow up: their product
    overflows, and softmax makes it NaN."""
    from safetensors.torch import load_file, save_file

    from trtspec.text import Tokenizer

    (token,) = Tokenizer.load(model).encode(character)
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][:, 0] = 0
    weights["model.embed_tokens.weight"][token, 0] = 1
    for projection in ("q_proj", "k_proj"):
        weights[f"model.layers.0.self_attn.{projection}.weight"][:, 0] = 1e25
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def start_server(
    engine: Path, folder: Path, *, python: str = sys.executable, environment: dict[str, str] | None = None
) -> Server:
    ready_file, log = folder / "ready.json", folder / "server.log"
    for _ in range(3):
        ready_file.unlink(missing_ok=True)
        popen = subprocess.Popen(
            [
                *(python, *TRTSPEC[1:], "serve", str(engine), *port_options(free_ports(3))),
                *("--ready-file", str(ready_file), "--log", str(log)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            env={**os.environ, **(environment or {})},
        )
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and popen.poll() is None and not ready_file.exists():
            time.sleep(0.02)
        if popen.poll() is None and ready_file.exists():
            return Server(popen, json.loads(ready_file.read_text(encoding="utf-8")), log, ready_file)
        popen.kill()
        output = popen.communicate()[0]
        # Somebody else may take a port between its choice and its use.
        if "cannot be used" not in output and "already in use" not in output:
            break
    raise AssertionError(f"not ready:\n{output}\n{log.read_text() if log.exists() else ''}")


def _http(
    address: str, method: str, path: str, body: bytes | None = None, timeout_s: float = 120
) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, timeout=timeout_s)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _name(int(name)) is not None]


def _name(pid: int) -> str | None:
    """The program of a living process; None if it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    name, fields = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
    return None if fields[0] == "Z" else name


def _parent(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return -1
    return int(text[text.rindex(")") + 2 :].split()[1])


def _processes_with(text: str) -> list[int]:
    found = []
    for pid in _all_pids():
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            if text in command:
                found.append(pid)
    return found


# --------------------------------------------------------------------------- clients


@contextlib.contextmanager
def running_stream(url: str, *, request_id: str = "", max_tokens: int = LONG) -> Iterator[list[Any]]:
    """A request on another thread; yields what it received, the end or an error last."""
    received: list[Any] = []
    request = Generate("Hello", max_tokens=max_tokens, temperature=1.5, seed=1)

    def read() -> None:
        try:
            for item in stream(url, MODEL, request, request_id=request_id, idle_timeout_s=120):
                received.append(item)
        except Exception as error:
            received.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert wait_until(lambda: len(received) > 3), received
    yield received
    thread.join(120)
    assert not thread.is_alive()


def sse(body: str) -> list[dict[str, Any]]:
    return [json.loads(line[len("data: ") :]) for line in body.splitlines() if line.startswith("data: ")]


def damage(engine: Path) -> None:
    """Let the configuration name a layer more than there are weights of; only loading can notice."""
    config = next(engine.glob("*/config.json"))
    text = config.read_text()
    changed = text.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3')
    assert changed != text
    config.unlink()
    config.write_text(changed)
