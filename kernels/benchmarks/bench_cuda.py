"""Measures the CUDA backend on one NVIDIA GPU, against MLX and mlx-lm; needs no network.

python -m benchmarks.bench_cuda --output docs/measurements/cuda.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.cuda_models import QWEN_05B, QWEN_7B, ModelShape
from benchmarks.cuda_steps import compare_with_cpu, measure_steps
from benchmarks.cuda_table import (
    ROWS,
    measure_launches,
    measure_linear,
    measure_step_linears,
)
from benchmarks.cuda_timer import copy_bandwidth
from isobatch_kernels.cuda.driver import DriverDevice, cuda_error
from isobatch_kernels.cuda.tuning import FEW_ROWS, ROW_TOPS

PARTS = ("equality", "step_linears", "steps", "linears", "launches")
STEP_ROWS = (1, 2, 3, 4, 5, 8, 16, 32, 64)
_PACKAGES = ("cuda-bindings", "nvidia-cuda-nvrtc", "mlx", "mlx-cuda-13", "mlx-lm", "numpy")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"


def _environment(device: DriverDevice) -> dict[str, Any]:
    driver = Path("/proc/driver/nvidia/version")
    return {
        "device": device.name,
        "multiprocessors": device.chip.multiprocessors,
        "driver": driver.read_text().splitlines()[0] if driver.exists() else "unknown",
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
    }


class Report:
    """What was measured, written again after every row."""

    def __init__(self, path: Path) -> None:
        """Writes to `path`."""
        self.values: dict[str, Any] = {}
        self._path = path

    def put(self, name: str, value: Any) -> None:
        """One value."""
        self.values[name] = value
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self.values, indent=1) + "\n", encoding="utf-8")
        print(name, value[-1] if isinstance(value, list) else value, flush=True)

    def rows(self, name: str, rows: Callable[[], Iterable[dict[str, Any]]]) -> None:
        """Rows as they come; what breaks ends its own part alone."""
        found: list[dict[str, Any]] = []
        try:
            for row in rows():
                found.append(row)
                self.put(name, found)
        except Exception:
            self.put(f"{name}, broken", traceback.format_exc().splitlines())


def main() -> int:
    """Runs the parts asked for and writes one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("cuda.json"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS[:-1]))
    parser.add_argument("--shapes", nargs="+", choices=("0.5B", "7B"), default=["7B", "0.5B"])
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--step-rows", nargs="+", type=int, default=list(STEP_ROWS))
    parser.add_argument("--no-peer", action="store_true", help="without MLX and mlx-lm")
    arguments = parser.parse_args()
    missing = cuda_error()
    if missing is not None:
        print(f"[bench_cuda] an NVIDIA GPU is needed, got {missing}")
        return 1
    peer = not arguments.no_peer and importlib.util.find_spec("mlx_lm") is not None
    shapes = [shape for shape in (QWEN_7B, QWEN_05B) if shape.name in arguments.shapes]
    device, report = DriverDevice(), Report(arguments.output)
    report.put("environment", _environment(device))
    rates = copy_bandwidth(device)
    report.put("copies_gb_s", rates)
    report.put("copy_gb_s", max(rates.values()))
    for part in arguments.parts:
        for shape in shapes:
            _run_part(part, shape, device, report, arguments, peer=peer)
    return 0


def _run_part(
    part: str,
    shape: ModelShape,
    device: DriverDevice,
    report: Report,
    arguments: argparse.Namespace,
    *,
    peer: bool,
) -> None:
    if part == "equality":
        report.rows(f"equality of {shape.name}", lambda: [compare_with_cpu(shape, 2)])
    elif part == "step_linears":
        copy = report.values["copy_gb_s"]
        few = [rows for rows in arguments.step_rows if rows <= FEW_ROWS]
        report.rows(
            f"linears of a step of {shape.name}",
            lambda: measure_step_linears(device, shape, few, copy),
        )
    elif part == "steps":
        report.rows(
            f"steps of {shape.name}", lambda: measure_steps(shape, arguments.step_rows, peer=peer)
        )
    elif part == "launches":
        tops = [top for top in ROW_TOPS if top in arguments.step_rows]
        for name, (inputs, outputs) in shape.linear_shapes.items():
            report.rows(
                f"launches of {name} of {shape.name}",
                partial(measure_launches, device, inputs, outputs, tops),
            )
    else:
        for name, (inputs, outputs) in shape.linear_shapes.items():
            report.rows(
                f"{name} of {shape.name}",
                lambda i=inputs, o=outputs: measure_linear(  # type: ignore[misc]
                    device, i, o, arguments.rows, peer=peer
                ),
            )


if __name__ == "__main__":
    sys.exit(main())
