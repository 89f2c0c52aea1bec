"""Time of one linear by weight format and number of rows: ``python -m benchmarks.kernels [--threads N]``.

Medians of the calling thread's own CPU time when one thread runs (so that neighbours cost less), wall time
otherwise, in microseconds. Weights are cycled through more memory than the caches hold, as in a decode step.
The switch points in ``trtspec/embedded/layers.py`` come from here: the row count where "decoded", or "copy"
(a dequantized copy beside the codes), first beats "packed" for the same format.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from trtspec.embedded import layers
from trtspec.embedded.layers import QuantizedWeight

SHAPES = ((576, 960), (576, 3072), (1536, 576), (2048, 8192))
"""(in, out): SmolLM2-135M's fused q/k/v, gate/up and down, and a 1B model's feed-forward."""
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 128, 512)
GROUP = 64
CYCLED_BYTES = 64 * 2**20


def quantized_weight(algo: str, inputs: int, outputs: int) -> QuantizedWeight:
    if algo == "W4A16_AWQ":
        codes = torch.randint(0, 256, (outputs // 2, inputs), dtype=torch.uint8)
        return QuantizedWeight(algo, codes, torch.rand(outputs, inputs // GROUP).double())
    if algo == "FP8":
        codes = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
    else:
        codes = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    input_scale = None if algo == "W8A16" else 0.05
    return QuantizedWeight(algo, codes, torch.rand(outputs, 1).double(), input_scale=input_scale)


def forms(inputs: int, outputs: int) -> dict[str, Callable[[], Callable[[Tensor], Tensor]]]:
    """Name -> maker of one linear; "packed", "decoded" and "copy" are the three ways of the same weight."""

    def make(algo: str, few_rows: int | None = None, copy: bool = False) -> Callable[[], layers.Linear]:
        def made() -> layers.Linear:
            weight = quantized_weight(algo, inputs, outputs)
            cpu = torch.device("cpu")
            linear = layers.quantized(weight, None, torch.bfloat16, cpu, dequantized_copy=copy)
            if isinstance(linear, layers.Int4Linear | layers.Int8WeightLinear) and few_rows is not None:
                linear.few_rows = few_rows
            return linear

        return made

    always = 10**9

    return {
        "bf16 F.linear": lambda: layers.DenseLinear(torch.randn(outputs, inputs).bfloat16()),
        "bf16 packed": lambda: layers.dense(torch.randn(outputs, inputs).bfloat16()),
        "int4 packed": make("W4A16_AWQ", always),
        "int4 decoded": make("W4A16_AWQ", 0),
        "int4 copy": make("W4A16_AWQ", 0, True),
        "int8 packed": make("W8A16", always),
        "int8 decoded": make("W8A16", 0),
        "int8 copy": make("W8A16", 0, True),
        "w8a8": make("W8A8_SQ_PER_CHANNEL"),
        "fp8": make("FP8"),
        "fp32 F.linear": lambda: layers.DenseLinear(torch.randn(outputs, inputs)),
    }


def median_us(linears: Iterator[Callable[[Tensor], Tensor]], x: Tensor, clock: Callable[[], float]) -> float:
    for _ in range(2):
        next(linears)(x)
    times: list[float] = []
    while len(times) < 7 or (sum(times) < 0.05 and len(times) < 100):
        linear = next(linears)
        start = clock()
        linear(x)
        times.append(clock() - start)
    return statistics.median(times) * 1e6


def measure(inputs: int, outputs: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Form -> microseconds for each of :data:`ROWS`."""
    copies = max(2, CYCLED_BYTES // (2 * inputs * outputs))
    result = {}
    for name, maker in forms(inputs, outputs).items():
        linears = itertools.cycle([maker() for _ in range(copies)])
        dtype = torch.float32 if name.startswith("fp32") else torch.bfloat16
        inputs_by_rows = [torch.randn(rows, inputs, dtype=dtype) for rows in ROWS]
        result[name] = [median_us(linears, x, clock) for x in inputs_by_rows]
    return result


def first_win(packed: list[float], decoded: list[float]) -> str:
    for rows, a, b in zip(ROWS, packed, decoded, strict=True):
        if b < a:
            return str(rows)
    return f"> {ROWS[-1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    threads = parser.parse_args().threads
    torch.set_num_threads(threads)
    clock = time.thread_time if threads == 1 else time.perf_counter
    kind = "thread CPU time" if threads == 1 else "wall time"
    print(
        f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {threads} threads, ", end=""
    )
    print(f"OMP_WAIT_POLICY {os.environ.get('OMP_WAIT_POLICY', 'unset')}; median us, {kind}")
    with torch.inference_mode():
        for inputs, outputs in SHAPES:
            times = measure(inputs, outputs, clock)
            print(f"\n{inputs} x {outputs}".ljust(16) + "".join(f"{rows:>8}" for rows in ROWS))
            for name, row_times in times.items():
                print(f"{name:15}" + "".join(f"{value:8.0f}" for value in row_times))
            for name in ("int4", "int8"):
                for other in ("decoded", "copy"):
                    at = first_win(times[f"{name} packed"], times[f"{name} {other}"])
                    print(f"{name}: {other} wins from {at} rows")


if __name__ == "__main__":
    main()
