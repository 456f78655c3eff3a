"""A report on this Mac's Metal kernels, to paste into an issue.

`isobatch doctor --metal` runs this module in a process of its own. It says which kernel paths give
the contract's bits, what memory bandwidth a copy reaches, and how long the linear layers of a 7B
model take by rows. Exit codes: 0 every path is right, 1 a path is wrong, 3 no Metal device.
"""

from __future__ import annotations

import platform
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from isobatch_kernels.metal import activations as act
from isobatch_kernels.metal import linear as lin
from isobatch_kernels.metal import weights as packing
from isobatch_kernels.metal.arrays import MlxArrays
from isobatch_kernels.metal.create import metal_is_available, mlx_kernel_factory
from isobatch_kernels.metal.launch import Launcher
from isobatch_kernels.metal.self_test import Format, compare
from isobatch_kernels.program import QuantizedWeight

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from isobatch_kernels.metal.arrays import LibraryArray

EXIT_WRONG, EXIT_NO_DEVICE = 1, 3
ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """A linear layer of the model in the table, and how often a step runs it."""

    name: str
    outputs: int
    inputs: int
    times: int


# Qwen2.5-7B with q|k|v and gate|up merged; 4-bit groups of 64.
MODEL = (
    LayerShape("qkv", 4608, 3584, 28),
    LayerShape("o", 3584, 3584, 28),
    LayerShape("gate_up", 37888, 3584, 28),
    LayerShape("down", 3584, 18944, 28),
    LayerShape("head", 152064, 3584, 1),
)


@dataclass(frozen=True, slots=True)
class RowTime:
    """Time of the model's linear layers for a row count."""

    rows: int
    path: str
    seconds: float


def seconds_of(run: Callable[[], LibraryArray], launcher: Launcher, repeats: int) -> float:
    """Best time of a few runs, each waited for."""
    launcher.arrays.wait(run())
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        launcher.arrays.wait(run())
        best = min(best, time.perf_counter() - begin)
    return best


def _random_layer(launcher: Launcher, shape: LayerShape) -> lin.DeviceWeight:
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 2**32, (shape.outputs, shape.inputs // 8), dtype=np.uint32)
    scales = np.full((shape.outputs, shape.inputs // 64), 0.01, np.float16)
    weight = QuantizedWeight(packed, scales, scales, 4, 64)
    return lin.to_device(launcher.arrays, packing.pack_quantized([weight])[0])


def time_rows(
    launcher: Launcher,
    profile: lin.LinearProfile,
    model: Sequence[LayerShape] = MODEL,
    rows: Sequence[int] = ROWS,
    repeats: int = 5,
) -> list[RowTime]:
    """Times the model's layers one by one and adds them up."""
    totals = dict.fromkeys(rows, 0.0)
    for shape in model:
        device = _random_layer(launcher, shape)
        for count in rows:
            values = np.ones((count, shape.inputs), np.float32)
            layout = act.ActivationLayout(shape.inputs, 64, 64)
            x = act.quantize(launcher, launcher.arrays.array(values), count, layout)
            path, tile = profile.choose(count)

            def run(
                path: str = path,
                tile: int = tile,
                x: act.Activations = x,
                w: lin.DeviceWeight = device,
            ) -> LibraryArray:
                return lin.quantized_linear(launcher, path, tile, x, w, lin.Epilogue())

            totals[count] += shape.times * seconds_of(run, launcher, repeats)
    return [RowTime(count, profile.choose(count)[0], totals[count]) for count in rows]


def self_test_lines(
    launcher: Launcher, profile: lin.LinearProfile, formats: set[Format] | None = None
) -> tuple[list[str], bool]:
    """One line a kernel path, and whether all are right."""
    equal: Counter[str] = Counter()
    total: Counter[str] = Counter()
    first: dict[str, str] = {}
    for result in compare(launcher, profile, formats):
        total[result.path] += 1
        equal[result.path] += result.equal
        if not result.equal:
            first.setdefault(result.path, f"; first: {result.shape}, {result.rows} rows")
    lines = [
        f"- {path}: {equal[path]} of {total[path]} shapes equal the contract{first.get(path, '')}"
        for path in sorted(total)
    ]
    return lines, not first


def table(times: Sequence[RowTime], model: Sequence[LayerShape] = MODEL) -> list[str]:
    """Rows by throughput: the linear layers of a step alone, attention and dispatch left out."""
    weights = sum(s.outputs * s.inputs * s.times for s in model)
    lines = ["| rows | kernel | ms a step | tokens/s | GB/s |", "|---|---|---|---|---|"]
    for t in times:
        lines.append(
            f"| {t.rows} | {t.path} | {t.seconds * 1e3:.1f} | {t.rows / t.seconds:.1f} "
            f"| {weights * 0.5625 / t.seconds / 1e9:.0f} |"
        )
    return lines


def _copy_bandwidth() -> float:
    """Bytes read and written a second by adding one to 256 MB of fp32."""
    import mlx.core as mx

    x = mx.zeros((64 << 20,), mx.float32)
    mx.eval(x)
    best = float("inf")
    for _ in range(6):
        begin = time.perf_counter()
        mx.eval(x + 1)
        best = min(best, time.perf_counter() - begin)
    return 2 * (256 << 20) / best


def main() -> int:
    """Prints the report."""
    if not metal_is_available():
        print("No Metal device: MLX is not installed or has none here.", file=sys.stderr)
        return EXIT_NO_DEVICE
    from importlib.metadata import version

    import mlx.core as mx

    mx.set_default_device(mx.gpu)
    launcher, profile = Launcher(mlx_kernel_factory(), MlxArrays()), lin.LinearProfile()
    print("# Metal report\n")
    print(
        f"- macOS {platform.mac_ver()[0]}, MLX {version('mlx')}, Python {platform.python_version()}"
    )
    info = mx.device_info()
    print(*(f"- {key}: {info[key]}" for key in sorted(info)), sep="\n")
    print(f"- copy bandwidth: {_copy_bandwidth() / 1e9:.0f} GB/s\n\n## Self-test\n")
    lines, right = self_test_lines(launcher, profile)
    print(*lines, sep="\n")
    print("\n## Linear layers of a 7B model, 4-bit groups of 64\n")
    print(*table(time_rows(launcher, profile)), sep="\n")
    return 0 if right else EXIT_WRONG


if __name__ == "__main__":
    sys.exit(main())
