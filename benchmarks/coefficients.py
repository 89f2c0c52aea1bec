"""Where the constants of the step-time law come from: python -m benchmarks.coefficients [--data DIR]

One non-negative least-squares fit of the law's seven constants to the TPOT rows (relative errors), on all
rows and on each system alone; a fit on one system is also tried on the others, whose rows it has not
seen.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from benchmarks.backtest import DEFAULT_DATA, silicon_measurements
from benchmarks.scores import percentile
from trtspec.cost.calibrate import Measurement, solve_least_squares
from trtspec.cost.estimate import estimate
from trtspec.cost.steps import DEFAULT
from trtspec.cost.trace import find_line

UNIT = replace(
    DEFAULT, memory_efficiency=1.0, kv_efficiency=1.0, compute_efficiency=1.0, link_efficiency=1.0,
    layer_ms=1.0, allreduce_ms=0.0, prefill_sync_ms=0.0,
)  # fmt: skip
NAMES = (
    "memory_efficiency", "kv_efficiency", "compute_efficiency", "link_efficiency", "layer_ms", "allreduce_ms",
    "prefill_sync_ms",
)  # fmt: skip


def terms(m: Measurement) -> list[float]:
    """The law's terms of one row, with every constant at one."""
    e = estimate(m.deployment, m.workload, UNIT)

    def line(name: str) -> float:
        found = find_line(e.trace, name)
        return found.value if found else 0.0

    others = (e.admitted - 1) / m.workload.output_tokens
    layers, doublings = m.deployment.spec.num_layers, m.deployment.tp.bit_length() - 1
    rows = line("plain.compute_ms") + line("plain.attend_ms")
    prefill = line("prefill.linear_ms") + line("prefill.attention_ms")
    return [
        line("plain.weights_ms"),
        line("plain.kv_ms"),
        rows + others * prefill,
        line("plain.exchange_ms") + others * line("prefill.exchange_ms"),
        float(layers),
        float(layers * doublings),
        others * layers * doublings,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit the constants of the step-time law.")
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA)
    groups, _ = silicon_measurements(parser.parse_args().data)
    named = {" ".join(key): rows for key, rows in sorted(groups.items())}
    tables = {name: [(terms(m), m.tpot_ms) for m in rows] for name, rows in named.items()}
    tables["all"] = [row for rows in list(tables.values()) for row in rows]
    for name, rows in tables.items():
        x = solve_least_squares([[f / t for f in features] for features, t in rows], [1.0] * len(rows))
        shown = [f"{1 / v:.3f}" if i < 4 and v else f"{v:.4f}" for i, v in enumerate(x)]
        print(f"fitted to {name}: " + ", ".join(f"{n} {v}" for n, v in zip(NAMES, shown, strict=True)))
        for other, seen in tables.items():
            errors = [abs(sum(a * b for a, b in zip(x, f, strict=True)) / t - 1) for f, t in seen]
            middle, high = percentile(errors, 0.5), percentile(errors, 0.9)
            print(f"    on {other:42} n {len(errors):4}  median {middle:6.2%}  p90 {high:6.2%}")


if __name__ == "__main__":
    main()
