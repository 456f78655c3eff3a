"""A report on this Mac's Metal kernels, to paste into an issue.

`isobatch doctor --metal` runs this module in a process of its own. It says which kernel paths give
the contract's bits, what memory bandwidth a copy reaches, and how long the linear layers of a 7B
model take by rows. Exit codes: 0 every path is right, 1 a path is wrong, 3 no Metal device.
"""

from __future__ import annotations

import itertools
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
from isobatch_kernels.metal.create import (
    check_whole_steps,
    metal_is_available,
    mlx_kernel_factory,
)
from isobatch_kernels.metal.launch import Launcher
from isobatch_kernels.metal.self_test import Format, compare
from isobatch_kernels.program import QuantizedWeight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from isobatch_kernels.metal.arrays import ArrayLibrary, KernelFactory, LibraryArray

EXIT_WRONG, EXIT_NO_DEVICE = 1, 3
COLD_BYTES = 96 << 20  # more than last caches hold
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
    seconds: float  # with the default kernel and tile
    best_seconds: float  # with the fastest ones of each layer
    best: tuple[str, ...]  # those: "layer kernel:tile", where they are not the default


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


def _inputs(launcher: Launcher, shape: LayerShape, rows: int) -> act.Activations:
    values = np.ones((rows, shape.inputs), np.float32)
    layout = act.ActivationLayout(shape.inputs, 64, 64)
    return act.quantize(launcher, launcher.arrays.array(values), rows, layout)


def time_rows(
    launcher: Launcher,
    profile: lin.LinearProfile,
    model: Sequence[LayerShape] = MODEL,
    rows: Sequence[int] = ROWS,
    repeats: int = 5,
) -> list[RowTime]:
    """Times the model's layers one by one, with every kernel and tile, and adds them up."""
    default, best = dict.fromkeys(rows, 0.0), dict.fromkeys(rows, 0.0)
    names: dict[int, list[str]] = {count: [] for count in rows}
    for shape in model:
        # Small layers take turns with copies, or they would stay in the GPU's last cache.
        copies = max(1, min(8, COLD_BYTES // (shape.outputs * shape.inputs)))
        layer = _random_layer(launcher, shape)
        devices = itertools.cycle([layer, *(_random_layer(launcher, shape) for _ in range(copies))])
        for count in rows:
            x = _inputs(launcher, shape, count)
            times: dict[str, float] = {}
            for path, tile in profile.ways(count):

                def run(
                    path: str = path,
                    tile: int = tile,
                    x: act.Activations = x,
                    layers: Iterator[lin.DeviceWeight] = devices,
                ) -> LibraryArray:
                    after = lin.Epilogue()
                    return lin.quantized_linear(launcher, path, tile, x, next(layers), after)

                times[f"{path}:{tile}"] = seconds_of(run, launcher, repeats)
            first, fastest = next(iter(times)), min(times, key=times.__getitem__)
            default[count] += shape.times * times[first]
            best[count] += shape.times * times[fastest]
            if fastest != first:
                names[count].append(f"{shape.name} {fastest}")
    return [
        RowTime(count, profile.choose(count)[0], default[count], best[count], tuple(names[count]))
        for count in rows
    ]


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
    lines = [
        "| rows | kernel | ms a step | tokens/s | GB/s | fastest, ms | where it is another |",
        "|---|---|---|---|---|---|---|",
    ]
    for t in times:
        lines.append(
            f"| {t.rows} | {t.path} | {t.seconds * 1e3:.1f} | {t.rows / t.seconds:.1f} "
            f"| {weights * 0.5625 / t.seconds / 1e9:.0f} | {t.best_seconds * 1e3:.1f} "
            f"| {', '.join(t.best) or '-'} |"
        )
    return lines


def whole_step_line(factory: KernelFactory, arrays: ArrayLibrary) -> tuple[str, bool]:
    """What comparing steps of a tiny model found, and whether every kernel is right."""
    try:
        compared, use_split = check_whole_steps(factory, arrays, lin.LinearProfile())
    except RuntimeError as error:
        return f"- whole steps: {error}", False
    if not compared:
        return "- whole steps: not compared, the native module is missing", True
    if not use_split:
        return "- whole steps: equal the contract without attention_decode alone", False
    return "- whole steps: equal the contract", True


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
    line, steps_right = whole_step_line(mlx_kernel_factory(), launcher.arrays)
    print(*lines, line, sep="\n")
    print("\n## Linear layers of a 7B model, 4-bit groups of 64\n")
    print(*table(time_rows(launcher, profile)), sep="\n")
    return 0 if right and steps_right else EXIT_WRONG


if __name__ == "__main__":
    sys.exit(main())
