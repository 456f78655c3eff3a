"""The linear kernels alone, on weights that are not in the cache, beside MLX's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from benchmarks.cuda_models import ModelShape, random_weight
from benchmarks.cuda_timer import graph_seconds
from isobatch_kernels.cuda.device import Device
from isobatch_kernels.cuda.driver import DriverDevice
from isobatch_kernels.cuda.one_layer import LinearOnDevice
from isobatch_kernels.cuda.scratch import Scratch
from isobatch_kernels.cuda.timing import Case, LinearUse, RowsTimer
from isobatch_kernels.cuda.tuning import MOST_ROWS

ROWS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 512)
_COLD_BYTES: Final = 250e6
_BLOCK: Final = 64


def _layers(device: Device, inputs: int, outputs: int, most_rows: int) -> list[LinearOnDevice]:
    """The same weight so many times that none stays in the cache."""
    weight = random_weight(np.random.default_rng(inputs + outputs), outputs, inputs)
    count = int(np.clip(_COLD_BYTES / (inputs * outputs * 0.5625), 2, 24))
    return [LinearOnDevice(device, weight, _BLOCK, most_rows) for _ in range(count)]


def _choose_sizes(device: Device, layers: Sequence[LinearOnDevice]) -> None:
    """Tile sizes by the clock, as a backend chooses them."""
    scratch, first = Scratch(device), layers[0].launcher
    use = LinearUse(tuple(layer.packed for layer in layers), logit=False)
    RowsTimer(device, first, scratch).choose([use], MOST_ROWS)
    scratch.close()
    for layer in layers:
        layer.launcher.timed = first.timed


def _launch_all(layers: Sequence[LinearOnDevice], rows: int) -> None:
    for layer in layers:
        _launch(layer, rows)


def _launch(layer: LinearOnDevice, rows: int) -> None:
    layer.launcher.linear(layer.activations(rows), layer.packed, layer.output())


def measure_linear(
    device: DriverDevice, inputs: int, outputs: int, rows: Sequence[int], *, peer: bool
) -> Iterator[dict[str, Any]]:
    """Microseconds of one launch by rows, and elements of row 0 that are not those of 1 row."""
    layers = _layers(device, inputs, outputs, max(rows))
    x = np.random.default_rng(1).standard_normal((max(rows), inputs)).astype(np.float32)
    source = random_weight(np.random.default_rng(inputs + outputs), outputs, inputs)
    _choose_sizes(device, layers)
    size = layers[0].packed.size
    products: Any = None
    if peer:
        from benchmarks.cuda_peer import PeerProducts

        products = PeerProducts(source, len(layers))
    first: tuple[Any, Any] | None = None
    for count in rows:
        for layer in layers:
            y, _ = layer.run(x[:count])
        launches = 48 if count <= 64 else 12

        def ours(launches: int = launches, count: int = count) -> None:
            for i in range(launches):
                _launch(layers[i % len(layers)], count)

        row: dict[str, Any] = {"inputs": inputs, "outputs": outputs, "rows": count}
        mine: list[float] = []
        theirs: list[float] = []
        their_row: Any = None
        for _ in range(2):
            mine.append(graph_seconds(device, ours) / launches)
            if peer:
                seconds, their_row = products.seconds(x, count, launches)
                theirs.append(seconds)
        first = first or (y[0], their_row)
        row["ours_us"] = [round(value * 1e6, 1) for value in mine]
        row["ours_gb_s"] = round(size / min(mine) / 1e9)
        row["ours_differing"] = int((y[0].view(np.uint32) != first[0].view(np.uint32)).sum())
        if peer:
            row["mlx_us"] = [round(value * 1e6, 1) for value in theirs]
            row["mlx_differing"] = int((their_row != first[1]).sum())
        yield row
    for layer in layers:
        layer.close()


def measure_step_linears(
    device: DriverDevice, shape: ModelShape, rows: Sequence[int], copy_gb_s: float
) -> Iterator[dict[str, Any]]:
    """All linear layers of a step, one after the other in one graph, against the bandwidth."""
    most = max(rows)
    layers: dict[str, list[LinearOnDevice]] = {}
    for name, (inputs, outputs) in shape.linear_shapes.items():
        weight = random_weight(np.random.default_rng(1), outputs, inputs)
        count = 1 if name == "head" else shape.layers
        layers[name] = [LinearOnDevice(device, weight, _BLOCK, most) for _ in range(count)]
    rng = np.random.default_rng(2)
    for name, some in layers.items():
        x = rng.standard_normal((most, shape.linear_shapes[name][0])).astype(np.float32)
        for layer in some:
            layer.run(x)
        _choose_sizes(device, some)
    size = shape.layers * sum(
        some[0].packed.size for name, some in layers.items() if name != "head"
    )
    size += layers["head"][0].packed.size
    for count in rows:

        def step(count: int = count) -> None:
            for i in range(shape.layers):
                for name in ("qkv", "o", "gate_up", "down"):
                    _launch(layers[name][i], count)
            _launch(layers["head"][0], count)

        alone = {
            name: graph_seconds(device, partial(_launch_all, some, count)) / len(some)
            for name, some in layers.items()
        }
        seconds = graph_seconds(device, step)
        gb_s = size / seconds / 1e9
        yield {
            "rows": count,
            "bytes": size,
            "ms": round(seconds * 1e3, 3),
            "gb_s": round(gb_s),
            "share_of_copy": round(gb_s / copy_gb_s, 3),
            "alone_us": {name: round(value * 1e6, 2) for name, value in alone.items()},
        }
    for some in layers.values():
        for layer in some:
            layer.close()


def measure_launches(
    device: Device, inputs: int, outputs: int, tops: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """What the choice of sizes sees: the fastest launch of every kind, in microseconds."""
    layers, scratch = _layers(device, inputs, outputs, max(tops)), Scratch(device)
    use = LinearUse(tuple(layer.packed for layer in layers), logit=False)
    for top in tops:
        case = Case(use, top)
        RowsTimer(device, layers[0].launcher, scratch).measure([case])
        kinds: dict[str, dict[str, Any]] = {}
        for shape in case.best(len(case.timed)):
            kind = f"{shape.nt} by {shape.mt} tiles, {shape.slices} slices in {shape.cluster}"
            sizes = {name: getattr(shape, name) for name in ("teams", "deep", "stages", "resident")}
            kinds.setdefault(kind, {"us": round(case.timed[shape] * 1e6, 2), **sizes})
        yield {"inputs": inputs, "outputs": outputs, "rows": top, "kinds": kinds}
    scratch.close()
    for layer in layers:
        layer.close()
