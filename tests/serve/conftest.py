"""A tiny engine, built for real, and a server of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import Server, build_tiny, start_server


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a sealed engine; see :func:`servers.build_tiny`."""
    pytest.importorskip("torch")
    return build_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(tiny_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server that the tests of a module share; each must leave it idle."""
    running = start_server(tiny_engine, tmp_path_factory.mktemp("server"))
    yield running
    running.end()
    # After all those streams, finished and broken off: a leaked one would keep the server from ending.
    assert running.popen.returncode == 0
    assert running.leftovers() == []
