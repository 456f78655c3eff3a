"""Measures the CUDA backend on one NVIDIA GPU, against MLX and mlx-lm; needs no network.

python kernels/benchmarks/bench_cuda.py --output docs/measurements/cuda.json
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx

from benchmarks.cuda_models import QWEN_05B, QWEN_7B
from benchmarks.cuda_steps import compare_with_cpu, measure_steps
from benchmarks.cuda_table import ROWS, copy_bandwidth, measure_linear
from isobatch_kernels.cuda_backend import cuda_available

_DEVICE = ("device_name", "architecture", "total_memory")
PARTS = ("equality", "steps", "linears")
STEP_ROWS = (1, 2, 3, 4, 5, 8, 16, 32, 64)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"


def _environment() -> dict[str, Any]:
    driver = Path("/proc/driver/nvidia/version")
    return {
        "device": {name: str(mx.device_info()[name]) for name in _DEVICE},
        "driver": driver.read_text().splitlines()[0] if driver.exists() else "unknown",
        "python": platform.python_version(),
        **{name: _version(name) for name in ("mlx", "mlx-cuda-13", "mlx-lm", "numpy")},
    }


def main() -> int:
    """Runs the parts asked for and writes one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("cuda.json"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--shapes", nargs="+", choices=("0.5B", "7B"), default=["7B", "0.5B"])
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--step-rows", nargs="+", type=int, default=list(STEP_ROWS))
    arguments = parser.parse_args()
    if not cuda_available():
        print("[bench_cuda] an NVIDIA GPU and MLX's CUDA build are needed, got none")
        return 1
    shapes = [shape for shape in (QWEN_7B, QWEN_05B) if shape.name in arguments.shapes]
    report: dict[str, Any] = {"environment": _environment()}

    def save() -> None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    print(report["environment"], flush=True)

    def keep(name: str, rows: Iterable[dict[str, Any]]) -> None:
        for row in rows:
            report.setdefault(name, []).append(row)
            print(name, row, flush=True)
            save()

    if "equality" in arguments.parts:
        keep("equality", (compare_with_cpu(shape, 2) for shape in shapes))
    report["copy_gb_s"] = round(copy_bandwidth())
    print("copy GB/s", report["copy_gb_s"], flush=True)
    for shape in shapes if "steps" in arguments.parts else ():
        keep(f"steps of {shape.name}", measure_steps(shape, arguments.step_rows))
        mx.clear_cache()
    for shape in shapes if "linears" in arguments.parts else ():
        for name, (inputs, outputs) in shape.linear_shapes.items():
            keep(f"{name} of {shape.name}", measure_linear(inputs, outputs, arguments.rows))
            mx.clear_cache()
    save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
