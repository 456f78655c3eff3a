"""Quantised activations and the kernels that make them (quantize.metal, norm.metal)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from isobatch_kernels.metal.launch import GROUP, MINIMUM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch_kernels.metal.arrays import LibraryArray
    from isobatch_kernels.metal.launch import Launcher

_BLOCKS_PER_GROUP = 8  # one simdgroup makes one block


@dataclass(frozen=True, slots=True)
class ActivationLayout:
    """How a buffer is quantised."""

    width: int
    block: int  # 32 or 64
    sum_block: int  # elements under one sum: 16, or `block`

    @property
    def blocks(self) -> int:
        """Blocks of a row; the last may be shorter and is padded with zeros."""
        return -(-self.width // self.block)


@dataclass(frozen=True, slots=True)
class Activations:
    """Quantised rows on the device."""

    q: LibraryArray  # (rows, blocks*block) float16 integers
    d: LibraryArray  # (rows*blocks,) float32
    s: LibraryArray  # (rows*blocks*block/sum_block,) float32
    rows: int
    layout: ActivationLayout


@dataclass(frozen=True, slots=True)
class NormWeight:
    """An RMS norm on the device."""

    weight: LibraryArray  # (width,) float32
    width: int
    epsilon: float

    def constants(self, launcher: Launcher) -> LibraryArray:
        """fl(1/width) and epsilon."""
        return launcher.constants(float(np.float32(1) / np.float32(self.width)), self.epsilon)


def _run(
    launcher: Launcher,
    name: str,
    inputs: Sequence[LibraryArray],
    rows: int,
    layout: ActivationLayout,
    groups: int,
) -> Activations:
    blocks = rows * layout.blocks
    sums = blocks * (layout.block // layout.sum_block)
    q, d, s = launcher.run(
        name,
        inputs,
        [
            ((rows, layout.blocks * layout.block), "float16"),
            ((max(MINIMUM, blocks),), "float32"),
            ((max(MINIMUM, sums),), "float32"),
        ],
        (groups, rows, 1),
        template=[("A", layout.block), ("SB", layout.sum_block)],
    )
    return Activations(q, d, s, rows, layout)


def quantize(
    launcher: Launcher, x: LibraryArray, rows: int, layout: ActivationLayout
) -> Activations:
    """Rows of x (rows, width) as 12-bit integers."""
    sizes = launcher.numbers(layout.width, layout.blocks)
    groups = -(-layout.blocks // _BLOCKS_PER_GROUP)
    return _run(launcher, "quantize", [x, sizes], rows, layout, groups)


def gate_quantize(
    launcher: Launcher, gate_up: LibraryArray, rows: int, layout: ActivationLayout
) -> Activations:
    """silu(gate)*up of gate_up (rows, 2*width), quantised."""
    sizes = launcher.numbers(layout.width, layout.blocks)
    groups = -(-layout.blocks // _BLOCKS_PER_GROUP)
    return _run(launcher, "gate_quantize", [gate_up, sizes], rows, layout, groups)


def gate(launcher: Launcher, gate_up: LibraryArray, rows: int, width: int) -> LibraryArray:
    """silu(gate)*up of gate_up (rows, 2*width), fp32."""
    grid = (-(-width // GROUP), rows, 1)
    sizes = launcher.numbers(width)
    return launcher.run("gate", [gate_up, sizes], [((rows, width), "float32")], grid)[0]


def norm_quantize(
    launcher: Launcher,
    x: LibraryArray,
    norm: NormWeight,
    row_ids: LibraryArray,
    rows: int,
    layout: ActivationLayout,
) -> Activations:
    """RMS norm of the rows of x that row_ids names, quantised."""
    sizes = launcher.numbers(layout.width, layout.blocks)
    inputs = [x, norm.weight, row_ids, sizes, norm.constants(launcher)]
    return _run(launcher, "norm_quantize", inputs, rows, layout, 1)


def norm_rows(
    launcher: Launcher, x: LibraryArray, norm: NormWeight, row_ids: LibraryArray, rows: int
) -> LibraryArray:
    """RMS norm of the rows of x that row_ids names, fp32."""
    inputs = [x, norm.weight, row_ids, launcher.numbers(norm.width), norm.constants(launcher)]
    return launcher.run("norm", inputs, [((rows, norm.width), "float32")], (1, rows, 1))[0]


def find_non_finite(launcher: Launcher, x: LibraryArray, rows: int, width: int) -> LibraryArray:
    """A flag for each row of x: 1 where a value is not finite (numerics.md section 0)."""
    output = [((max(MINIMUM, rows),), "uint32")]
    inputs = [x, launcher.numbers(width)]
    return launcher.run("find_non_finite", inputs, output, (1, rows, 1), threads=32)[0]
