"""Kernels that stay nodes of MLX's graph: their values mean nothing, their dependencies are real.

The emulation computes a kernel the moment it is called. What MLX does with a graph that was handed
over and not waited for (which memory it holds, what it may write in place) needs lazy nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from isobatch_kernels.metal.arrays import MlxArrays


def lazy_factory(**_: Any) -> Any:
    """Stands in for `mx.fast.metal_kernel`: outputs are zeros that need all of every input."""

    def call(
        *,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
        **_: Any,
    ) -> list[mx.array]:
        needed = mx.zeros((), mx.bool_)
        for each in inputs:
            needed = mx.logical_or(needed, each.max() != each.max())
        return [
            mx.broadcast_to(needed, shape).astype(dtype)
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]

    return call


class CountingArrays(MlxArrays):
    """MLX's arrays, with a count of what makes the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.waits = 0

    def wait(self, *arrays: Any) -> None:
        """Counts and waits."""
        self.waits += 1
        super().wait(*arrays)

    def numpy(self, array: Any) -> Any:
        """Counts and reads."""
        self.reads += 1
        return super().numpy(array)
