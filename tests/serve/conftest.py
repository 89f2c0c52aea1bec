"""A tiny engine, built for real, and a server of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

RECIPE = """\
version: 1
name: tiny
model: {source: model}
backend: {kind: embedded, dtype: float32, threads: 1}
speculation: {kind: ngram, num_draft_tokens: 4}
limits: {max_batch_size: 16, max_input_tokens: 256, max_seq_tokens: 4096, max_num_tokens: 256}
serving: {model_name: tiny_llm, max_queue_requests: 4, default_max_tokens: 24}
"""


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a sealed engine: 2 layers, random weights, float32, n-gram drafting."""
    pytest.importorskip("torch")
    from tiny import make_tiny_model

    from trtspec.build import build

    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_model(folder / "model", max_positions=4096)
    (folder / "recipe.yaml").write_text(RECIPE)
    return build(folder / "recipe.yaml", folder / "engines").folder


@pytest.fixture(scope="module")
def server(tiny_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """One server that the tests of a module share; each must leave it idle."""
    from servers import start_server

    running = start_server(tiny_engine, tmp_path_factory.mktemp("server"))
    yield running
    running.end()
