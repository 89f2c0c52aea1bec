"""The back-tests of the cost model as a test: every goal, on whatever part of the data is there."""

from __future__ import annotations

import csv
import importlib
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

REPO = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def backtest() -> ModuleType:
    sys.path.insert(0, str(REPO))
    try:
        return importlib.import_module("benchmarks.backtest")
    finally:
        sys.path.remove(str(REPO))


def test_every_goal_is_met(backtest: ModuleType, shared_data: Path) -> None:
    rows = backtest.run(shared_data)
    missed = [row for row in rows if row.ok is False]
    assert not missed, backtest.render(missed)
    judged = [row for row in rows if row.ok is not None]
    assert len(judged) >= 18
    assert {"SpecBundle", "InferenceX", "docs/math.md"} <= {row.source for row in judged}


def test_a_wrong_law_is_seen(
    backtest: ModuleType, shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the prefills of others TPOT comes out far too low."""
    original = backtest.estimate

    def decode_only(deployment, workload):
        e = original(deployment, workload)
        return replace(e, tpot_ms=e.plain_step_ms)

    monkeypatch.setattr(backtest, "estimate", decode_only)
    rows = backtest.silicon(shared_data)
    assert any(row.ok is False for row in rows if "uncalibrated" in row.what)


def test_a_planted_impossible_row_is_flagged(backtest: ModuleType, shared_data: Path, tmp_path: Path) -> None:
    oracles = tmp_path / "oracles"
    oracles.mkdir()
    with (shared_data / "oracles" / "specbundle_rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    rows[3]["speedup"] = str(float(rows[3]["accept_length"]) + 0.1)
    with (oracles / "specbundle_rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    (flags,) = [row for row in backtest.specbundle(tmp_path) if "flag" in row.what]
    assert flags.ok is False


def test_absent_sources_are_skipped_and_said(
    backtest: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = backtest.run(tmp_path)
    assert {row.source for row in rows} >= {"docs/math.md"}
    assert all(row.ok is not False for row in rows)
    assert "skipped" in capsys.readouterr().err


def test_the_command_prints_the_table_and_writes_json(
    backtest: ModuleType, shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    shutil.copytree(shared_data / "oracles", tmp_path / "oracles")
    target = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["backtest", "--data", str(tmp_path), "--json", str(target)])
    assert backtest.main() == 0
    out = capsys.readouterr().out
    assert "leave one out" in out
    assert "MISSED" not in out
    written = json.loads(target.read_text())
    assert {row["source"] for row in written} == {row.source for row in backtest.run(tmp_path)}
