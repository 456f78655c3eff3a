"""Every linear layer of SmolLM2-135M by itself, beside what one core can do at most.

Run: python kernels/benchmarks/bench_tensors.py [--units vnni] [--rows 1,4,16] [--json PATH]

One thread. A call quantises its rows and multiplies; calls go through so many copies of a tensor
that each finds its weights in no cache. The limits are measured in the same rounds by limits.cpp,
compiled here with the system's compiler: bytes read in a second, and products of two bytes summed
in a second. A product with a 12-bit activation takes two such products, with 8 bits one. "limit"
is the larger of the two times that the limits give, and the share is limit over time: 1 is perfect.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks.bench_linear import HIDDEN, INNER, QKV, VOCAB, weight
from isobatch_kernels import _cpu
from isobatch_kernels.dispatch import available_units

# Name: outputs, inputs, bits.
TENSORS: Final = {
    "qkv": (QKV, HIDDEN, 4),
    "o": (HIDDEN, HIDDEN, 4),
    "gate, up": (2 * INNER, HIDDEN, 4),
    "down": (HIDDEN, INNER, 4),
    "head": (VOCAB, HIDDEN, 8),
}
COLD_MEGABYTES: Final = 100
BLOCK: Final = 32


@dataclass(frozen=True, slots=True)
class Tensor:
    """Copies of one linear layer, and what a call of it reads and multiplies."""

    name: str
    copies: list[_cpu.LinearLayer]
    inputs: int
    outputs: int
    megabytes: float
    activation_bits: int

    def seconds(self, rows: int) -> float:
        """The median time of a call over all copies, one after the other, rows of fp32."""
        x = np.random.default_rng(rows).standard_normal((rows, self.inputs)).astype(np.float32)
        y = np.empty((rows, self.outputs), np.float32)
        finite = np.empty(rows, np.bool_)
        times = []
        for layer in self.copies:
            start = time.perf_counter()
            layer.forward(x, y, finite)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def limit(self, rows: int, read: float, multiply: float) -> float:
        """The least seconds of a call by bytes read and billions of products in a second."""
        products = self.outputs * self.inputs * rows * (2 if self.activation_bits > 8 else 1)
        arithmetic = products / (multiply * 1e9) if multiply else 0.0
        return max(self.megabytes * 1e6 / (read * 1e9), arithmetic)


def tensors(unit: str, activation_bits: int) -> list[Tensor]:
    """Every tensor, in so many copies that all together are larger than the caches."""
    found = []
    rng = np.random.default_rng(0)
    for name, (outputs, inputs, bits) in TENSORS.items():
        source = weight(rng, outputs, inputs, bits)
        arrays: list[npt.NDArray[Any] | None] = [source.packed, source.scales, source.biases]
        megabytes = sum(each.nbytes for each in arrays if each is not None) / 1e6
        copies = [
            _cpu.LinearLayer.quantized(
                unit, source.packed, source.scales, source.biases, bits, 32, BLOCK, activation_bits
            )
            for _ in range(max(3, int(COLD_MEGABYTES / megabytes)))
        ]
        found.append(Tensor(name, copies, inputs, outputs, megabytes, activation_bits))
    return found


def compiled_limits(folder: Path) -> Path:
    """Builds limits.cpp for this processor."""
    program = folder / "limits"
    source = Path(__file__).with_name("limits.cpp")
    subprocess.run(["c++", "-O3", "-march=native", "-o", program, source], check=True)
    return program


def measure_limits(program: Path) -> tuple[float, float]:
    """GB read in a second, and billions of summed products of bytes in a second."""
    command = [str(program), str(COLD_MEGABYTES), "0.2"]
    line = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    read, multiply = line.split()
    return float(read), float(multiply)


def main() -> None:
    """Measures in rounds, limits included, and prints medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--units", default=available_units()[0])
    parser.add_argument("--rows", default="1,2,4,8,16,64")
    parser.add_argument("--activations", default="12,8", help="bits")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cells = [
        (unit, bits, tensor, rows)
        for unit in args.units.split(",")
        for bits in map(int, args.activations.split(","))
        for tensor in tensors(unit, bits)
        for rows in map(int, args.rows.split(","))
    ]
    times: list[list[float]] = [[] for _ in cells]
    limits: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        program = compiled_limits(Path(folder))
        for _ in range(args.rounds):
            limits.append(measure_limits(program))
            for (_, _, tensor, rows), found in zip(cells, times, strict=True):
                found.append(tensor.seconds(rows))
            limits.append(measure_limits(program))
    read = statistics.median(each for each, _ in limits)
    multiply = statistics.median(each for _, each in limits)
    print(f"limits: {read:.1f} GB/s read, {multiply:.0f} G products of bytes a second")
    print("unit bits tensor rows | us median (best) | limit us | share of the limit | GB/s")
    report = []
    for (unit, bits, tensor, rows), found in zip(cells, times, strict=True):
        middle, best = statistics.median(found), min(found)
        limit = tensor.limit(rows, read, multiply)
        rate = tensor.megabytes / 1e3 / middle
        print(
            f"{unit:6} {bits:2} {tensor.name:9} {rows:3} | "
            f"{middle * 1e6:8.1f} ({best * 1e6:8.1f}) | {limit * 1e6:8.1f} | "
            f"{limit / middle:.2f} | {rate:.1f}"
        )
        report.append(
            {"unit": unit, "activation_bits": bits, "tensor": tensor.name, "rows": rows,
             "seconds": found, "limit_seconds": limit}
        )  # fmt: skip
    if args.json:
        document = {"limits": limits, "cells": report}
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
