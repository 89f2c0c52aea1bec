"""How a server ends, well or badly, and what is left; and servers in folders with odd names."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("tritonclient.grpc")

from servers import (
    MODEL,
    TRTSPEC,
    Server,
    build_tiny,
    damage,
    free_ports,
    port_options,
    run_cli,
    running_stream,
    start_server,
    wait_until,
)

from trtspec.errors import MissingError
from trtspec.serve.client import Finished, generate
from trtspec.serve.preflight import find_installation
from trtspec.serve.protocol import Generate

pytestmark = pytest.mark.triton

PORT_FIELDS = ("http", "grpc", "metrics")

try:
    find_installation()
except MissingError as missing:
    pytest.skip(str(missing), allow_module_level=True)


@pytest.fixture
def own_server(tiny_engine: Path, tmp_path: Path) -> Iterator[Server]:
    running = start_server(tiny_engine, tmp_path)
    yield running
    running.end()


def test_sigterm_lets_a_live_stream_finish(own_server: Server) -> None:
    # Short enough to end in time on a busy machine.
    with running_stream(own_server.grpc, max_tokens=1000) as received:
        own_server.popen.send_signal(signal.SIGTERM)
        own_server.wait_for_output("stopping")
        time.sleep(0.2)
        with pytest.raises(MissingError, match=r"is stopping|nothing answers|went away"):
            generate(own_server.grpc, MODEL, Generate("Hello"))
        assert wait_until(lambda: isinstance(received[-1], Finished)), received[-1]
    assert received[-1].text == "".join(received[:-1])
    output = own_server.rest_of_output()
    assert own_server.popen.returncode == 0, output
    assert own_server.leftovers() == []
    assert "Segmentation" not in own_server.log.read_text()


def test_another_server_takes_nothing_from_a_running_one(own_server: Server, tiny_engine: Path) -> None:
    """Neither by the same ports nor by the same ready file; the end of the first one removes it."""
    taken = [int(str(own_server.ready[name]).rsplit(":")[-1].split("/")[0]) for name in PORT_FIELDS]
    before = own_server.ready_file.read_bytes()
    for ports, reason in ((taken, "cannot be used"), (free_ports(3), "a server that is running")):
        options = [*port_options(ports), "--ready-file", str(own_server.ready_file)]
        result = run_cli("serve", str(tiny_engine), *options)
        assert reason in result.stderr
        assert own_server.ready_file.read_bytes() == before
    own_server.end()
    assert own_server.popen.returncode == 0
    assert not own_server.ready_file.exists()


@pytest.mark.parametrize("option", ["--log", "--ready-file"])
def test_what_cannot_be_written_is_found_before_the_start(
    tiny_engine: Path, tmp_path: Path, option: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", ".", "no/such"):
        options = [*port_options(free_ports(3)), option, str(tmp_path / name)]
        result = run_cli("serve", str(tiny_engine), *options, timeout=120)
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr.splitlines()[-1].startswith(f"error: {(tmp_path / name)}: ")
    assert (tmp_path / "pipe").is_fifo()
    same = run_cli("serve", str(tiny_engine), "--log", str(tmp_path / "a"), "--ready-file", f"{tmp_path}/./a")
    assert same.returncode == 2
    assert "name the same file" in same.stderr


def test_a_dead_model_process_ends_the_server_quickly(own_server: Server) -> None:
    with running_stream(own_server.grpc) as received:
        os.kill(own_server.stub(), signal.SIGKILL)
        output, _ = own_server.popen.communicate(timeout=90)
    assert own_server.popen.returncode == 3
    assert "the model's process died" in output
    assert isinstance(received[-1], MissingError)
    assert own_server.leftovers() == []


def test_a_killed_supervisor_leaves_nothing_behind(own_server: Server) -> None:
    with running_stream(own_server.grpc) as received:
        own_server.popen.kill()
        own_server.popen.wait()
        assert wait_until(lambda: own_server.leftovers() == []), own_server.leftovers()
        assert wait_until(lambda: not own_server.ready_file.exists())
    assert isinstance(received[-1], MissingError)


def test_a_second_signal_stops_at_once(own_server: Server) -> None:
    with running_stream(own_server.grpc) as received:
        own_server.popen.send_signal(signal.SIGINT)
        own_server.wait_for_output("stopping")
        own_server.popen.send_signal(signal.SIGINT)
        output = own_server.rest_of_output()
    assert own_server.popen.returncode == 3
    assert "requests in flight were cut off" in output
    assert isinstance(received[-1], MissingError)
    assert own_server.leftovers() == []


@pytest.mark.parametrize("taken", [0, 1, 2], ids=["http", "grpc", "metrics"])
def test_a_taken_port_is_reported_before_anything_starts(tiny_engine: Path, taken: int) -> None:
    ports = free_ports(3)
    with contextlib.closing(socket.create_server(("127.0.0.1", ports[taken]))):
        result = run_cli("serve", str(tiny_engine), *port_options(ports))
    name = ("http", "grpc", "metrics")[taken]
    assert result.returncode == 3
    assert f"{name} port 127.0.0.1:{ports[taken]} cannot be used" in result.stderr
    assert f"--{name}-port" in result.stderr


@pytest.mark.parametrize("host", ["", "nosuch.invalid", "::1", "192.0.2.1"])
def test_a_wrong_host_is_told_once(tiny_engine: Path, host: str) -> None:
    result = run_cli("serve", str(tiny_engine), *port_options(free_ports(3)), "--host", host)
    assert (result.returncode, result.stderr.count("error: ")) == (2, 1)
    assert "use 127.0.0.1" in result.stderr


def test_a_model_that_does_not_come_up_in_time_is_stopped(tiny_engine: Path) -> None:
    # torch alone takes longer than a second to import.
    options = [*port_options(free_ports(3)), "--start-timeout", "1"]
    child = subprocess.Popen(
        [*TRTSPEC, "serve", str(tiny_engine), *options], stderr=subprocess.PIPE, text=True
    )
    _, errors = child.communicate(timeout=120)
    assert child.returncode == 3
    message, *lines = errors[errors.index("the model was not loaded after 1 s") :].splitlines()
    assert message.endswith("Last lines of server and model:")
    assert lines
    assert not list(Path("/dev/shm").glob(f"trtspec-{child.pid}-*"))


def test_a_failing_engine_answers_with_errors_and_ends_the_server(tmp_path: Path) -> None:
    """A prompt with one character of this model breaks the step it is in."""
    engine = build_tiny(tmp_path, poison="~")
    own = start_server(engine, tmp_path)
    with running_stream(own.grpc) as received:
        with pytest.raises(MissingError, match="the engine failed"):
            generate(own.grpc, MODEL, Generate("a~b"))
        output, _ = own.popen.communicate(timeout=90)
    assert own.popen.returncode == 3
    assert "the engine failed" in str(received[-1])
    assert "Traceback" not in str(received[-1])
    assert "the engine failed" in output
    assert own.leftovers() == []


def test_an_engine_that_cannot_be_loaded_is_explained(tiny_engine: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_engine, broken)
    damage(broken)
    result = run_cli("serve", str(broken), *port_options(free_ports(3)))
    assert result.returncode == 2
    assert "the model could not be loaded: " in result.stderr
    assert "Traceback" not in result.stderr
    assert ".py(" not in result.stderr


# --------------------------------------------------------------------------- names beyond ASCII


def test_no_name_has_to_be_plain(tmp_path: Path) -> None:
    """Engine, a file in it, temporary folder, caches and environment: each with space, CJK and emoji."""
    odd = tmp_path / "引擎 🙂 é"
    odd.mkdir()
    engine = build_tiny(odd, extra_file="说明 🙂.txt")
    (odd / "environment").symlink_to(sys.prefix)
    python = odd / "environment" / "bin" / Path(sys.executable).name
    environment = {"TMPDIR": str(odd), "HOME": str(odd), "TRTSPEC_CACHE": str(odd / "cache")}
    own = start_server(engine, odd, python=str(python), environment=environment)
    try:
        assert own.generate(text_input="你好 🙂", sampling_param_max_tokens=2)[1]["text_output"].startswith(
            "你好 🙂"
        )
    finally:
        own.end()
    assert (own.popen.returncode, own.leftovers()) == (0, [])


def test_an_engine_with_an_odd_name_that_cannot_be_loaded_is_explained(tmp_path: Path) -> None:
    """The text of the failure names the folder that was given, not the one that the model sees."""
    engine = build_tiny(tmp_path / "引擎 🙂", extra_file="说明.txt")
    damage(engine)
    result = run_cli("serve", str(engine), *port_options(free_ports(3)))
    assert result.returncode == 2
    assert f"the model could not be loaded: {engine}" in result.stderr
