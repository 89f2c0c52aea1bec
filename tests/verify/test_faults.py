"""The self-test: every fault is caught by a check of the protocol, and nothing else is."""

from __future__ import annotations

import dataclasses
import json

import pytest

from trtspec.cli import main
from trtspec.verify import faults
from trtspec.verify.gates import Check, Verdict

FAULTS = (
    "biased residual",
    "accept always",
    "typical acceptance labelled strict",
    "stale KV after a rejection",
    "wrong tree mask",
    "wrong positions in a branch",
    "head of another model",
    "early stop",
    "temperature ignored",
    "dropped last token",
    "KV scales of 1.0",
    "quantized lm_head",
    "inflated token counter",
    "sleep in the baseline",
)
CHECKS = {"sampled", "sampling_parameters", "lossless", "acceptance", "quality", "speedup"}
"""Of what ``trtspec verify`` runs."""


@pytest.fixture(scope="module")
def found() -> faults.SelfTest:
    return faults.self_test(faults.SMALL)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught(found, fault):
    planted = next(one for one in found.faults if one.fault == fault)
    assert planted.caught, planted
    assert planted.by in CHECKS
    assert planted.verdict in ("FAIL", "ERROR")
    assert planted.sound in ("PASS", "MEASURED")


def test_nothing_is_left_out(found):
    assert tuple(one.fault for one in found.faults) == FAULTS
    assert found.passed


def test_the_command_writes_what_it_found(found, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(faults, "self_test", lambda on_fault: found)
    path = tmp_path / "self-test.json"
    assert main(["verify", "--self-test", "--json", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "14 of 14 faults caught" in shown
    assert "seeded runs of at most 6,000 draws" in shown
    value = json.loads(path.read_text())
    assert all({"fault", "caught", "by"} <= set(one) for one in value["faults"])
    assert main(["verify", "--self-test", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == value
    missed = dataclasses.replace(found, faults=(dataclasses.replace(found.faults[0], caught=False),))
    monkeypatch.setattr(faults, "self_test", lambda on_fault: missed)
    assert main(["verify", "--self-test"]) == 1


def test_a_check_that_always_fails_catches_nothing(monkeypatch):
    """Nor does one that never does."""

    def with_verdict(verdict: Verdict) -> faults.SelfTest:
        check = Check("x", verdict, "", True)
        monkeypatch.setattr(faults, "_trials", lambda size: [("fault", lambda: check, lambda: check)])
        return faults.self_test(dataclasses.replace(faults.SMALL, runs=1, null_runs=1))

    for verdict in Verdict:
        assert not with_verdict(verdict).faults[0].caught
