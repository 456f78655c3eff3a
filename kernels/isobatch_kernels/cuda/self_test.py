"""The start-up check on the device: do the kernels give class X1's bits here?

What a compiler or a tensor core does cannot be known ahead, so linear layers of odd shapes, then
steps of a tiny model, are compared with the CPU's reference before a model is served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

from isobatch_kernels.cpu_backend import CpuLimits
from isobatch_kernels.cuda.device import Device
from isobatch_kernels.cuda.one_layer import OP, LinearOnDevice
from isobatch_kernels.program import Linear, Program, QuantizedWeight
from isobatch_kernels.self_test import programs_agree, random_rows, random_weight
from isobatch_kernels.step import Backend, Float32

# bits, group size, activation block
Format = tuple[int, int, int]
ROWS: Final = (1, 2, 3, 9, 17, 33, 70)
_OUTPUTS: Final = 50


def formats_of(program: Program) -> list[Format]:
    """Formats of the program's quantised layers."""
    blocks = {b.name: b.activation_block for b in program.buffers}
    return sorted(
        {
            (w.bits, w.group_size, blocks[op.x])
            for op in program.ops
            if isinstance(op, Linear)
            for w in op.weights
            if isinstance(w, QuantizedWeight)
        }
    )


def _reference(weight: QuantizedWeight, block: int, x: Float32) -> tuple[Float32, Any]:
    from isobatch_kernels import _cpu  # the native module may be missing

    layer = _cpu.LinearLayer.quantized(
        "reference",
        weight.packed,
        weight.scales,
        weight.biases,
        weight.bits,
        weight.group_size,
        block,
    )
    y, finite = np.empty((len(x), weight.num_outputs), np.float32), np.empty(len(x), np.bool_)
    layer.forward(x, y, finite)
    return y, finite


def linear_differences(device: Device, formats: list[Format]) -> Iterator[str]:
    """Where a linear layer gives other bits than the reference."""
    for bits, group, block in formats:
        rng = np.random.default_rng(bits * 100 + group)
        inputs = group * int(rng.integers(9, 14))  # no multiple of eight sub-blocks
        weight = random_weight(rng, _OUTPUTS, inputs, bits, group, half=True)
        x = random_rows(rng, max(ROWS), inputs)
        expected, finite = _reference(weight, block, x)
        layer = LinearOnDevice(device, weight, block, len(x))
        for rows in ROWS:
            y, flags = layer.run(x[:rows])
            some = finite[:rows]
            same = y[some].tobytes() == expected[:rows][some].tobytes()
            if not same or ((flags == OP + 1) == some).any():
                yield f"{bits} bits, groups of {group}, blocks of {block}, {rows} rows"
        layer.close()


def check(device: Device, formats: list[Format], make: Callable[[Program, CpuLimits], Any]) -> int:
    """Runs both comparisons; `make` makes a backend on a device of its own.

    Returns:
        The number of comparisons.

    Raises:
        RuntimeError: one bit differs.
    """
    for difference in linear_differences(device, formats):
        raise RuntimeError(f"[cuda] linear layers must equal the contract, got {difference}")
    made: list[Backend] = []

    def make_one(program: Program, limits: CpuLimits) -> Backend:
        made.append(make(program, limits))
        return made[-1]

    try:
        if not programs_agree(np.random.default_rng(1), make_one):
            raise RuntimeError("[cuda] a tiny model must equal the contract, got other bits")
    finally:
        for backend in made:
            backend.close()
    return len(formats) * len(ROWS) + 1
