"""The start-up check on the device: do the kernels give class X1's bits here?

What a compiler or a tensor core does cannot be known ahead, so linear layers of odd shapes, then
steps of a tiny model, are compared with the CPU's reference before a model is served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from isobatch_kernels.cpu_backend import CpuLimits
from isobatch_kernels.cuda.device import Device
from isobatch_kernels.cuda.launch import Choice
from isobatch_kernels.cuda.one_layer import OP, LinearOnDevice
from isobatch_kernels.cuda.tuning import SLICES, RowsShape
from isobatch_kernels.cuda.weights import BFLOAT16, FLOAT16, FLOAT32, WeightFormat
from isobatch_kernels.program import Linear, Program, QuantizedWeight
from isobatch_kernels.self_test import programs_agree, random_rows, random_weight
from isobatch_kernels.step import Backend, Float32

# bits, group size, activation block
Format = tuple[int, int, int]
ROWS: Final = (1, 2, 3, 9, 17, 33, 70, 130)
_SMALL: Final = 11  # sub-blocks: no multiple of eight
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


def reference_results(weight: QuantizedWeight, block: int, x: Float32) -> tuple[Float32, Any]:
    """x (M, K) @ weight.T by the CPU's reference, (M, N) fp32; and which rows are finite, (M,)."""
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
        expected, finite = reference_results(weight, block, x)
        layer = LinearOnDevice(device, weight, block, len(x))
        for rows in ROWS:
            y, flags = layer.run(x[:rows])
            some = finite[:rows]
            same = y[some].tobytes() == expected[:rows][some].tobytes()
            if not same or ((flags == OP + 1) == some).any():
                yield f"{bits} bits, groups of {group}, blocks of {block}, {rows} rows"
        layer.close()


def chosen_differences(device: Device, chosen: Mapping[Choice, RowsShape]) -> Iterator[str]:
    """Where launches that the clock chose give other bits than the reference.

    Small matrices; but a team that has several groups of tiles has them here too.
    """
    for (form, top, logit), shape in chosen.items():
        rng = np.random.default_rng(top)
        outputs = 16 * shape.nt * shape.teams * shape.sets - 7
        weight = _weight_like(form, rng, outputs)
        x = random_rows(rng, top, weight.num_inputs)
        block = max(form.sub_block, 32)
        expected, finite = reference_results(weight, block, x)
        layer = LinearOnDevice(device, weight, block, top)
        layer.launcher.timed[layer.packed.format, top] = shape
        # One cluster, or as many blocks as have all slices, does everything.
        layer.launcher.chip = replace(
            device.chip, multiprocessors=SLICES // shape.slices, clusters=(1, 1, 1)
        )
        y, _ = layer.run(x, logit=logit)
        layer.close()
        if y[finite].tobytes() != expected[finite].tobytes():
            yield f"{form}, {top} rows, {shape}"


def _weight_like(form: WeightFormat, rng: np.random.Generator, outputs: int) -> QuantizedWeight:
    """Random integers and scales that are stored in the same types."""
    # Eight bits are centred, which no fp16 holds; five are stored in eight as they are.
    bits = 4 if form.storage_bits == 4 else 8 if form.scale_type == FLOAT32 else 5
    inputs, half = _SMALL * max(form.sub_block, 32), form.scale_type == FLOAT16
    weight = random_weight(rng, outputs, inputs, bits, form.sub_block, half=half)
    if form.scale_type != BFLOAT16 or weight.biases is None:
        return weight
    scales, biases = (
        (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        for values in (weight.scales, weight.biases)
    )
    scales[0, 0] = 129 * 2.0**-25  # all others could be fp16
    return replace(weight, scales=scales, biases=biases)


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
