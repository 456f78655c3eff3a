"""Speed of the float linear kernels beside class X1 and numpy's sgemm, on one thread.

Run: python kernels/benchmarks/bench_float.py [--unit vnni] [--rounds 15] [--json PATH]

numpy multiplies with weights that were dequantised before, so it reads eight times their bytes and
saves decoding. All kernels of a shape and row count are interleaved; the best and the median of
the rounds are printed as billions of additions and multiplications in a second.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when numpy is loaded

import numpy as np

from isobatch_kernels import _cpu
from isobatch_kernels.dispatch import available_units

# (outputs, inputs): SmolLM2-135M's down and gate|up, Qwen2.5-0.5B's gate|up.
SHAPES = ((576, 1536), (3072, 576), (9728, 896))
ROWS = (1, 4, 8, 16, 64, 256)
GROUP = 64


def kernels(unit: str, outputs: int, inputs: int, rows: int) -> dict[str, Callable[[], object]]:
    """The calls to time, by name, on 4-bit weights."""
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 2**32, (outputs, inputs // 8), dtype=np.uint32)
    scales = rng.uniform(0.5, 2, (outputs, inputs // GROUP)).astype(np.float16)
    biases = (-8 * scales).astype(np.float16)
    integers = (packed[:, :, None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15
    widened = [np.repeat(each, GROUP, axis=1).astype(np.float32) for each in (scales, biases)]
    weights = integers.reshape(outputs, inputs).astype(np.float32) * widened[0] + widened[1]
    floats = _cpu.FloatLayer.quantized(unit, packed, scales, biases, 4, GROUP)
    exact = _cpu.LinearLayer.quantized(unit, packed, scales, biases, 4, GROUP, 64)
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    y, finite = np.zeros((rows, outputs), np.float32), np.zeros(rows, np.bool_)
    return {
        "exact": lambda: exact.forward(x, y, finite),
        "gemv": lambda: floats.forward(x, y, finite, gemv=True),
        "gemm": lambda: floats.forward(x, y, finite, gemv=False),
        "sgemm": lambda: np.dot(x, weights.T, out=y),
    }


def cell(unit: str, outputs: int, inputs: int, rows: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round by kernel."""
    calls = kernels(unit, outputs, inputs, rows)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    """Measures every shape and row count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--unit", default=available_units()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: list[dict[str, Any]] = []
    print("outputs inputs rows | G/s best (median): exact, gemv, gemm, sgemm | gemm/sgemm best")
    for outputs, inputs in SHAPES:
        for rows in ROWS:
            seconds = cell(args.unit, outputs, inputs, rows, args.rounds)
            work = 2e-9 * outputs * inputs * rows
            best = {name: work / min(values) for name, values in seconds.items()}
            middle = {name: work / statistics.median(each) for name, each in seconds.items()}
            cells = "  ".join(f"{best[name]:6.1f} ({middle[name]:5.1f})" for name in seconds)
            ratio = best["gemm"] / best["sgemm"]
            print(f"{outputs:7} {inputs:6} {rows:4} | {cells} | {ratio:.2f}")
            found.append({"outputs": outputs, "inputs": inputs, "rows": rows,
                          "best": best, "median": middle})  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps({"unit": args.unit, "gops": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
