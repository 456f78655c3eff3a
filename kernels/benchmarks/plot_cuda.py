"""Draws what bench_cuda measured: the linear layers of a shape, and whole steps, by rows.

python -m benchmarks.plot_cuda docs/measurements/cuda_h200.json docs/images/cuda_h200.svg
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

_LAYERS = ("qkv", "o", "gate_up", "down")


def main() -> int:
    """Reads the measurements and writes one picture."""
    source, target = map(Path, sys.argv[1:])
    report: dict[str, Any] = json.loads(source.read_text(encoding="utf-8"))
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for colour, name in enumerate(_LAYERS):
        rows = report[f"{name} of 7B"]
        for key, style in (("ours_us", "-"), ("mlx_us", ":")):
            times = [min(row[key]) for row in rows]
            left.plot([row["rows"] for row in rows], times, style, color=f"C{colour}")
        left.plot([], [], color=f"C{colour}", label=name)
    left.plot([], [], "k-", label="isobatch")
    left.plot([], [], "k:", label="mx.quantized_matmul")
    left.set(title="Linear layers, 7B-shaped", ylabel="microseconds a launch")
    for colour, name in enumerate(("7B", "0.5B")):
        steps = [row for row in report[f"steps of {name}"] if row["what"] == "decode at 512"]
        steps.sort(key=lambda row: int(row["rows"]))
        for key, style, who in (("ours", "-", "isobatch"), ("mlx_lm", ":", "mlx-lm")):
            times = [row[f"{key}_median_ms"] for row in steps]
            rows = [row["rows"] for row in steps]
            right.plot(rows, times, style, color=f"C{colour}", label=f"{who}, {name}-shaped")
    right.set(title="Whole decode steps, context 512", ylabel="milliseconds a step")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel="rows")
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(f"{report['environment']['device']}, 4 bits in groups of 64")
    figure.tight_layout()
    figure.savefig(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
