"""trtspec bench engine: a real run on a tiny engine, and how rows come out of rounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import make_tiny_model

from trtspec import bench
from trtspec.artifact import open_artifact
from trtspec.cli import main

RECIPE = """version: 1
name: tiny
model: {source: ./model}
backend: {kind: embedded, dtype: bfloat16, threads: 1}
speculation: {kind: ngram, num_draft_tokens: 3, min_ngram: 1}
limits: {max_batch_size: 4, max_input_tokens: 400, max_seq_tokens: 500, max_num_tokens: 512}
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    make_tiny_model(folder / "model", dtype="bfloat16")
    (folder / "r.yaml").write_text(RECIPE)
    assert main(["build", str(folder / "r.yaml"), "-o", str(folder)]) == 0
    return folder / "tiny"


@pytest.mark.slow
def test_a_run_has_a_row_for_every_peer(engine: Path, tmp_path: Path) -> None:
    found, drawn = tmp_path / "rows.json", tmp_path / "rows.svg"
    argv = ["bench", "engine", "--quick", str(engine), "--json", str(found), "--svg", str(drawn)]
    assert main(argv) == 0
    data = json.loads(found.read_text())
    assert {"command", "OMP_NUM_THREADS", "OMP_WAIT_POLICY"} <= set(data)
    rows = data["rows"]
    assert {row["peer"] for row in rows} >= {
        "same without speculation",
        "transformers generate",
        "memory bandwidth",
    }
    for row in rows:
        assert {"peer", "workload", "batch", "precision", "ratio", "interval", "goal"} <= set(row)
        if row["ratio"] is None:
            assert row["note"], "a peer that did not run says why"
        else:
            assert row["interval"][0] <= row["ratio"] <= row["interval"][1]
    assert drawn.read_text().startswith("<svg")


class Fixed:
    """Stands where a process would: its peer and nothing else."""

    def __init__(self, peer: bench.Peer) -> None:
        self.peer = peer


def test_ratios_are_taken_within_a_round(engine: Path) -> None:
    own, other = (bench.Peer(name, "engine", {}, "bf16", goals={1: 2.0}) for name in ("own", "other"))
    # The machine slows down fivefold in the second round, for both: the ratio is 3 all the same.
    answers = {
        "own": [{"tokens": 30, "seconds": s} for s in (1.0, 5.0, 1.0)],
        "other": [{"tokens": 30, "seconds": s} for s in (3.0, 15.0, 3.3)],
    }
    running = [Fixed(own), Fixed(other)]
    (row,) = bench.rows_of(open_artifact(engine), running, "chat", 1, answers)  # type: ignore[arg-type]
    assert row.ratio == pytest.approx(3.0)
    assert row.interval == pytest.approx((3.0, 3.3))
    assert (row.engine_tokens_per_s, row.peer_tokens_per_s, row.goal) == (
        30.0,
        pytest.approx(9.09, 1e-3),
        2.0,
    )
    answers["other"][1] = {"error": "it ended: out of memory"}
    (row,) = bench.rows_of(open_artifact(engine), running, "chat", 1, answers)  # type: ignore[arg-type]
    assert (row.ratio, row.note) == (None, "it ended: out of memory")


def test_an_engine_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "engine"]) == 3
    (tmp_path / "r.yaml").write_text(RECIPE)
    assert main(["bench", "engine", "r.yaml"]) == 3
    assert main(["bench", "engine", "absent"]) == 2
