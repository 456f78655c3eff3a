"""Launches of linear_rows of every kind, compared with the reference."""

from __future__ import annotations

import random

import numpy as np

from isobatch_kernels.cuda.device import Device
from isobatch_kernels.cuda.one_layer import LinearOnDevice
from isobatch_kernels.cuda.self_test import reference_results
from isobatch_kernels.cuda.tuning import ROW_TOPS, RowsShape, Sizes, all_rows_shapes, rows_top
from isobatch_kernels.self_test import random_rows, random_weight

_SUB_BLOCK = 64


def kinds_of_launches(sizes: Sizes, device: Device, seed: int) -> list[tuple[int, RowsShape]]:
    """For each number of rows a random launch of every kind that the device can hold."""
    chosen = []
    for top in ROW_TOPS:
        shapes = list(all_rows_shapes(top, sizes, device.chip))
        random.Random(seed).shuffle(shapes)
        kinds: dict[tuple[int, ...], RowsShape] = {}
        for shape in shapes:
            kind = (shape.nt, shape.mt, shape.slices, shape.cluster, shape.sets)
            kinds.setdefault(kind, shape)
        chosen += [(top, shape) for shape in kinds.values()]
    return chosen


def launch_differences(
    device: Device, sub_blocks: int, outputs: int, seed: int, times: int = 3
) -> tuple[int, list[str]]:
    """How many launches ran, and those whose results are not the reference's bits."""
    rng = np.random.default_rng(seed)
    weight = random_weight(rng, outputs, _SUB_BLOCK * sub_blocks, 4, _SUB_BLOCK, half=True)
    x = random_rows(rng, ROW_TOPS[-1], weight.num_inputs)
    expected, finite = reference_results(weight, _SUB_BLOCK, x)
    layer = LinearOnDevice(device, weight, _SUB_BLOCK, len(x))
    packed = layer.packed
    sizes = Sizes(packed.tiles, packed.record_words, packed.sub_block, packed.sub_blocks)
    launches = kinds_of_launches(sizes, device, seed)
    differences = []
    for top, shape in launches:
        for rows in sorted({top, top // 2 + 1}):
            layer.launcher.timed[packed.format, rows_top(rows)] = shape
            for _ in range(times):
                y, _ = layer.run(x[:rows])
                if y[finite[:rows]].tobytes() != expected[:rows][finite[:rows]].tobytes():
                    differences.append(f"{rows} rows, {shape}")
    layer.close()
    return len(launches), differences
