"""Calibration finds the constants that made the measurements, and refuses what it cannot use."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import DRAFTING, spec

from trtspec.cost.calibrate import (
    Measurement,
    RoundSample,
    fit_rounds,
    fit_steps,
    leave_one_out,
    read_calibration,
    solve_least_squares,
)
from trtspec.cost.estimate import Deployment, Workload, estimate
from trtspec.cost.steps import DEFAULT, Coefficients
from trtspec.errors import InputError
from trtspec.hardware import find_gpu

PLAIN = Deployment(spec("8B"), find_gpu("H100"))
WORK = [Workload(i, o, b) for i, o, b in ((128, 64, 1), (1024, 128, 8), (2048, 256, 32), (4096, 512, 16))]


def measured(truth: Coefficients, deployment: Deployment = PLAIN) -> list[Measurement]:
    return [Measurement(deployment, w, estimate(deployment, w, truth).tpot_ms) for w in WORK]


@settings(max_examples=20, deadline=None)
@given(st.floats(0.5, 1.0), st.floats(0.4, 1.0), st.floats(0.01, 0.2))
def test_it_finds_the_constants_behind_exact_times(memory: float, compute: float, layer_ms: float) -> None:
    truth = replace(
        DEFAULT,
        memory_efficiency=DEFAULT.memory_efficiency * memory,
        kv_efficiency=DEFAULT.kv_efficiency * memory,
        compute_efficiency=compute,
        layer_ms=layer_ms,
    )  # fmt: skip
    fit = fit_steps(measured(truth), pull=0.0)
    assert max(map(abs, fit.errors)) < 1e-6
    assert fit.coefficients.memory_efficiency == pytest.approx(truth.memory_efficiency, rel=1e-4)
    assert fit.coefficients.compute_efficiency == pytest.approx(truth.compute_efficiency, rel=1e-4)
    assert fit.coefficients.layer_ms == pytest.approx(layer_ms, rel=1e-4)
    again = estimate(PLAIN, WORK[2], fit.coefficients)
    assert again.tpot_ms == pytest.approx(estimate(PLAIN, WORK[2], truth).tpot_ms, rel=1e-5)
    assert again.basis == "calibrated"
    assert max(map(abs, fit_steps(measured(truth)).errors)) < 0.01


def test_what_measurements_leave_open_stays_uncalibrated() -> None:
    """At one batch and context, reads and latency cannot be told apart: neither may run away."""
    rows = [Measurement(PLAIN, Workload(1024, 512, b), t) for b, t in ((1, 6.5), (2, 6.4), (4, 6.7))]
    fit = fit_steps(rows, pull=0.05)
    assert fit.coefficients.memory_efficiency == pytest.approx(DEFAULT.memory_efficiency, rel=0.1)
    assert fit.coefficients.layer_ms == pytest.approx(DEFAULT.layer_ms, rel=0.25)
    loose = fit_steps(rows, pull=0.0).coefficients
    assert abs(loose.layer_ms / DEFAULT.layer_ms - 1) > abs(fit.coefficients.layer_ms / DEFAULT.layer_ms - 1)


def test_one_time_scales_the_law() -> None:
    slower = [replace(m, tpot_ms=1.5 * m.tpot_ms) for m in measured(DEFAULT)[:1]]
    fit = fit_steps(slower)
    assert estimate(PLAIN, WORK[0], fit.coefficients).tpot_ms == pytest.approx(slower[0].tpot_ms, rel=1e-6)
    assert fit.scales[0] > 1


def test_leave_one_out_does_not_see_the_row() -> None:
    rows = measured(DEFAULT)
    rows[0] = replace(rows[0], tpot_ms=3 * rows[0].tpot_ms)
    assert abs(leave_one_out(rows)[0]) > 0.5
    assert max(map(abs, leave_one_out(measured(DEFAULT)))) < 1e-6


def test_least_squares_holds_negative_unknowns_at_zero() -> None:
    assert solve_least_squares([[1, 0], [0, 1]], [2, -3]) == pytest.approx([2, 0], abs=1e-8)
    assert solve_least_squares([[1, 1], [1, 2], [1, 3]], [3, 5, 7]) == pytest.approx([1, 2], rel=1e-5)


def write(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value))
    return path


def test_files(tmp_path: Path) -> None:
    steps = [
        {"input_tokens": m.workload.input_tokens, "output_tokens": m.workload.output_tokens,
         "concurrency": m.workload.concurrency, "tpot_ms": m.tpot_ms * 1.3}
        for m in measured(DEFAULT)
    ]  # fmt: skip
    found = read_calibration(write(tmp_path / "s.json", {"schema": "trtspec.steps/1", "steps": steps}), PLAIN)
    assert found.coefficients is not None
    assert found.curve is None
    for m in measured(DEFAULT):
        tpot = estimate(PLAIN, m.workload, found.coefficients).tpot_ms
        assert tpot == pytest.approx(1.3 * m.tpot_ms, rel=0.02)
    report = {"recipe_name": "r", "checks": [
        {"name": "acceptance", "evidence": {"steps_by_tokens_emitted": {"1": 10, "2": 30}}}]}  # fmt: skip
    found = read_calibration(write(tmp_path / "r.json", report), PLAIN)
    assert found.curve is not None
    assert found.curve.conditional == (0.75,)
    drafted = replace(PLAIN, speculation=DRAFTING["eagle3"], acceptance_curve=found.curve)
    assert not any("tables" in text for text in estimate(drafted, WORK[0]).assumptions)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"schema": "trtspec.steps/1", "steps": []}, "non-empty list"),
        ({"schema": "trtspec.steps/1", "steps": [{"input_tokens": 1}]}, "steps\\[0\\]: output_tokens"),
        ({"schema": "trtspec.steps/1", "steps": [
            {"input_tokens": 1, "output_tokens": 1, "concurrency": True, "tpot_ms": 0}]},
         "concurrency, tpot_ms"),
        ({"checks": []}, "neither schema"),
        ([1], "not a JSON object"),
    ],
)  # fmt: skip
def test_bad_files_are_refused(tmp_path: Path, value: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_calibration(write(tmp_path / "x.json", value), PLAIN)
    with pytest.raises(InputError, match="not a readable JSON"):
        read_calibration(tmp_path / "absent.json", PLAIN)


def test_measurements_of_two_machines_are_refused() -> None:
    other = replace(PLAIN, gpu=find_gpu("H200"))
    with pytest.raises(InputError, match="one model on one GPU"):
        fit_steps([*measured(DEFAULT), *measured(DEFAULT, other)])
    with pytest.raises(InputError, match="at least one"):
        fit_steps([])
    with pytest.raises(InputError, match="positive"):
        fit_steps([replace(measured(DEFAULT)[0], tpot_ms=0.0)])


def samples(kappa: float) -> list[RoundSample]:
    """Runs made by the law itself: rounds of 1.2 and 1.5 plain steps, a task whose baseline is slowed."""
    out = []
    for task, baseline in (("a", 100.0), ("b", 90.0), ("c", 60.0)):
        share = 0.10 * 7 / 8 + kappa * (1 - baseline / 100)
        for config, cost in (("short", 1.2), ("long", 1.5)):
            for tokens in (2.0, 3.0):
                shown = (1 - share) * cost + share * tokens
                out.append(RoundSample(config, task, 8, tokens, tokens / shown, baseline))
    return out


@pytest.mark.parametrize("kappa", [0.0, 0.5, 1.0])
def test_rounds_made_by_the_law_are_found_again(kappa: float) -> None:
    law = fit_rounds(samples(kappa))
    assert law.kappa == kappa
    assert law.costs == pytest.approx({"short": 1.2, "long": 1.5})
    for s in samples(kappa):
        assert law.speedup(s.config, s.tokens, s.batch, s.baseline_per_s) == pytest.approx(s.speedup)
