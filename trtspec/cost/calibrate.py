"""Measurements instead of constants: refit the step law from step times, round costs from speedups.

Both fits are small least-squares problems in the law's own terms, so a calibrated estimate has the same trace
as an uncalibrated one, with other constants.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from trtspec.cost.acceptance import Curve, curve_from_report
from trtspec.cost.estimate import Deployment, Estimate, Workload, estimate
from trtspec.cost.steps import DEFAULT, Coefficients
from trtspec.cost.trace import find_line
from trtspec.errors import InputError

STEPS_SCHEMA = "trtspec.steps/1"


@dataclass(frozen=True)
class Measurement:
    """A measured time per output token, without drafting."""

    deployment: Deployment
    workload: Workload
    tpot_ms: float


@dataclass(frozen=True)
class StepFit:
    """``coefficients`` to estimate with; ``scales`` of (reads, multiplications) and the added
    ``intercept_ms`` that made them; ``errors``: relative, of the fit itself."""

    coefficients: Coefficients
    scales: tuple[float, float]
    intercept_ms: float
    errors: tuple[float, ...]


def _terms(measurement: Measurement, coef: Coefficients) -> tuple[float, float, float, float]:
    """(reads, multiplications, latency, communication) of the predicted TPOT, in ms."""
    e = estimate(measurement.deployment, measurement.workload, coef)
    output = measurement.workload.output_tokens

    def line(name: str) -> float:
        found = find_line(e.trace, name)
        return found.value if found else 0.0

    others = (e.admitted - 1) / output
    reads = line("plain.weights_ms") + line("plain.kv_ms")
    prefill = line("prefill.linear_ms") + line("prefill.attention_ms")
    exchange = line("plain.exchange_ms") + others * line("prefill.exchange_ms")
    rows = line("plain.compute_ms") + line("plain.attend_ms")
    return reads, rows + others * prefill, line("plain.latency_ms"), exchange


def solve_least_squares(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """x minimising |rows x - targets|, no x below zero: unknowns that would be negative are held at zero.
    Normal equations with a tiny ridge; for a handful of unknowns."""
    free = list(range(len(rows[0])))
    while True:
        n = len(free)
        a = [[sum(r[i] * r[j] for r in rows) for j in free] for i in free]
        b = [sum(r[i] * t for r, t in zip(rows, targets, strict=True)) for i in free]
        for i in range(n):
            a[i][i] *= 1 + 1e-9
            a[i][i] += 1e-12
        for i in range(n):
            pivot = max(range(i, n), key=lambda k: abs(a[k][i]))
            a[i], a[pivot], b[i], b[pivot] = a[pivot], a[i], b[pivot], b[i]
            for k in range(i + 1, n):
                factor = a[k][i] / a[i][i]
                b[k] -= factor * b[i]
                for j in range(i, n):
                    a[k][j] -= factor * a[i][j]
        x = [0.0] * n
        for i in reversed(range(n)):
            x[i] = (b[i] - sum(a[i][j] * x[j] for j in range(i + 1, n))) / a[i][i]
        if all(value >= 0 for value in x) or n == 1:
            full = [0.0] * len(rows[0])
            for index, value in zip(free, x, strict=True):
                full[index] = max(0.0, value)
            return full
        free.pop(min(range(n), key=lambda k: x[k]))


PULL = 0.003
"""Weight of the uncalibrated constants against one measurement: it decides only what measurements leave open,
such as reads against latency when all are of one batch."""


def _fit(
    terms: Sequence[tuple[float, float, float, float]], tpots: Sequence[float], pull: float = PULL
) -> list[float]:
    """Scale of reads, scale of multiplications, constant; relative errors are minimised. Communication keeps
    its uncalibrated value. One point fits one scale for both, two fit the two scales."""
    known = [t - c[3] for t, c in zip(tpots, terms, strict=True)]
    if len(terms) >= 3:
        rows = [[c[0] / t, c[1] / t, 1 / t] for c, t in zip(terms, tpots, strict=True)]
        targets = [k / t for k, t in zip(known, tpots, strict=True)]
        latency = max(terms[0][2], 1e-9)
        rows += [[pull, 0.0, 0.0], [0.0, pull, 0.0], [0.0, 0.0, pull / latency]]
        return solve_least_squares(rows, [*targets, pull, pull, pull])
    targets = [(k - c[2]) / t for k, c, t in zip(known, terms, tpots, strict=True)]
    if len(terms) == 2:
        rows = [[c[0] / t, c[1] / t] for c, t in zip(terms, tpots, strict=True)]
        return [*solve_least_squares(rows, targets), terms[0][2]]
    scale = solve_least_squares([[(terms[0][0] + terms[0][1]) / tpots[0]]], targets)[0]
    return [scale, scale, terms[0][2]]


def fit_steps(
    measurements: Sequence[Measurement], start: Coefficients = DEFAULT, pull: float = PULL
) -> StepFit:
    """The law with the scale of its reads, the scale of its multiplications and its latency refitted;
    ``pull`` as :data:`PULL`.

    All measurements must be of one model, GPU and parallelism. Raises InputError for none, or for times that
    the law cannot take (reads or multiplications that come out as nothing keep their uncalibrated constants).
    """
    if not measurements:
        raise InputError("calibration needs at least one measured time per output token")
    if any(not m.tpot_ms > 0 for m in measurements):
        raise InputError("a measured time per output token must be positive")
    first = measurements[0].deployment
    if any(
        (m.deployment.spec, m.deployment.gpu, m.deployment.tp) != (first.spec, first.gpu, first.tp)
        for m in measurements
    ):
        raise InputError("calibration takes measurements of one model on one GPU and one tp at a time")
    terms = [_terms(m, start) for m in measurements]
    tpots = [m.tpot_ms for m in measurements]
    reads, multiplications, constant = _fit(terms, tpots, pull)
    reads, multiplications = reads or 1.0, multiplications or 1.0
    errors = tuple(
        (c[0] * reads + c[1] * multiplications + constant + c[3]) / t - 1
        for c, t in zip(terms, tpots, strict=True)
    )
    layers = first.spec.num_layers
    spread = max(0.05, 2 * median(abs(e) for e in errors)) if len(errors) > 3 else start.spread
    fitted = replace(
        start,
        memory_efficiency=start.memory_efficiency / reads,
        kv_efficiency=start.kv_efficiency / reads,
        weight_only_gemv_per_cycle=start.weight_only_gemv_per_cycle / reads,
        weight_only_gemm_per_cycle=start.weight_only_gemm_per_cycle / reads,
        compute_efficiency=start.compute_efficiency / multiplications,
        layer_ms=constant / layers,
        allreduce_ms=0.0,
        spread=spread,
        spread_other=spread,
        basis="calibrated",
        source=f"{len(tpots)} measured step times",
    )
    return StepFit(fitted, (reads, multiplications), constant, errors)


def leave_one_out(measurements: Sequence[Measurement], start: Coefficients = DEFAULT) -> list[float]:
    """Relative error of each measurement when the three coefficients are fitted to the others."""
    terms = [_terms(m, start) for m in measurements]
    tpots = [m.tpot_ms for m in measurements]
    errors = []
    for i, (c, t) in enumerate(zip(terms, tpots, strict=True)):
        reads, multiplications, constant = _fit(terms[:i] + terms[i + 1 :], tpots[:i] + tpots[i + 1 :])
        errors.append((c[0] * reads + c[1] * multiplications + constant + c[3]) / t - 1)
    return errors


# --------------------------------------------------------------------------- reports


@dataclass(frozen=True)
class Calibration:
    """What a file of measurements holds: an acceptance curve, step times, or both."""

    curve: Curve | None
    coefficients: Coefficients | None
    note: str


def read_calibration(path: Path, deployment: Deployment, start: Coefficients = DEFAULT) -> Calibration:
    """``--calibrate``: a report of ``trtspec verify`` (its acceptance, which does not depend on the GPU), or
    step times: ``{"schema": "trtspec.steps/1", "steps": [{"input_tokens", "output_tokens", "concurrency",
    "tpot_ms"}]}`` of ``deployment`` without drafting. Raises InputError with the key that is wrong."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: not a readable JSON file ({error}); give a verify report or step times"
        ) from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: not a JSON object; give a verify report or step times")
    if value.get("schema") == STEPS_SCHEMA:
        return _from_steps(path, value, deployment, start)
    curve = curve_from_report(value)
    if curve is None:
        raise InputError(f"{path}: neither schema {STEPS_SCHEMA!r} nor a report with an acceptance check")
    return Calibration(curve, None, f"acceptance measured by {value.get('recipe_name', path.name)}")


def _from_steps(
    path: Path, value: Mapping[str, Any], deployment: Deployment, start: Coefficients
) -> Calibration:
    names = ("input_tokens", "output_tokens", "concurrency", "tpot_ms")
    measurements, steps = [], value.get("steps")
    if not isinstance(steps, list) or not steps:
        raise InputError(f"{path}: steps: a non-empty list of {', '.join(names)} is needed")
    for i, step in enumerate(steps):
        wrong = [
            name
            for name in names
            if not isinstance(step, dict)
            or isinstance(step.get(name), bool)
            or not isinstance(step.get(name), (int, float))
            or not step[name] > 0
        ]
        if wrong:
            raise InputError(f"{path}: steps[{i}]: {', '.join(wrong)} must be positive numbers")
        workload = Workload(int(step["input_tokens"]), int(step["output_tokens"]), int(step["concurrency"]))
        measurements.append(Measurement(deployment, workload, float(step["tpot_ms"])))
    fit = fit_steps(measurements, start)
    worst = max(abs(e) for e in fit.errors)
    return Calibration(None, fit.coefficients, f"{len(steps)} step times, largest residual {worst:.1%}")


# --------------------------------------------------------------------------- rounds


@dataclass(frozen=True)
class RoundSample:
    """One measured run with drafting: ``config`` names the draft length and tree, ``tokens`` is its
    acceptance length, ``baseline_per_s`` the tokens/s without drafting on the same task."""

    config: Hashable
    task: str
    batch: int
    tokens: float
    speedup: float
    baseline_per_s: float

    @property
    def cost(self) -> float:
        """The round in plain steps, as it shows: tokens over speedup."""
        return self.tokens / self.speedup


UNSHARED = 0.10
"""Share of a plain token's time that drafting leaves alone in a full batch (prefills, the tail of the
batch)."""


@dataclass(frozen=True)
class RoundLaw:
    """Round costs of one model and machine, in plain steps. Of a token's plain time a share p is not decoding
    (prefill, tail of the batch) and stays as it is: the round appears to cost (1 - p)*cost + p*tokens. p =
    :data:`UNSHARED` * (1 - 1/batch) + kappa * (1 - baseline/fastest baseline)."""

    costs: dict[Hashable, float]
    kappa: float
    fastest_per_s: float

    def _share(self, batch: int, baseline_per_s: float) -> float:
        return UNSHARED * (1 - 1 / batch) + self.kappa * max(0.0, 1 - baseline_per_s / self.fastest_per_s)

    def speedup(self, config: Hashable, tokens: float, batch: int, baseline_per_s: float) -> float:
        """Predicted speedup of ``config`` at an acceptance length of ``tokens``."""
        share = self._share(batch, baseline_per_s)
        return tokens / ((1 - share) * self.costs[config] + share * tokens)


def _costs(samples: Sequence[RoundSample], kappa: float, fastest: float) -> dict[Hashable, float]:
    law = RoundLaw({}, kappa, fastest)
    found: dict[Hashable, list[float]] = {}
    for s in samples:
        share = law._share(s.batch, s.baseline_per_s)
        found.setdefault(s.config, []).append((s.cost - share * s.tokens) / (1 - share))
    return {config: median(values) for config, values in found.items()}


def fit_rounds(samples: Sequence[RoundSample]) -> RoundLaw:
    """The law of one model's runs. kappa, in steps of a quarter, is the one that predicts each task best from
    the others (mean relative error; a larger kappa must earn .01 per unit); each cost is a median."""
    fastest = max(s.baseline_per_s for s in samples)
    tasks = {s.task for s in samples}

    def loss(kappa: float) -> float:
        errors: list[float] = []
        for task in sorted(tasks) if len(tasks) > 1 else ():
            law = RoundLaw(_costs([s for s in samples if s.task != task], kappa, fastest), kappa, fastest)
            errors += [
                abs(s.speedup / law.speedup(s.config, s.tokens, s.batch, s.baseline_per_s) - 1)
                for s in samples
                if s.task == task and s.config in law.costs
            ]
        return (sum(errors) / len(errors) if errors else 0.0) + 0.01 * kappa

    kappa = min((0.0, 0.25, 0.5, 0.75, 1.0), key=loss)
    return RoundLaw(_costs(samples, kappa, fastest), kappa, fastest)


Estimator = Callable[[Deployment, Workload], Estimate]
