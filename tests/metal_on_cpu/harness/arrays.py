"""Array libraries for the Metal backend under the harness: numpy, and MLX on its CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from isobatch_kernels.metal.arrays import MlxArrays
from tests.metal_on_cpu.harness.kernel import EmulatedKernelFactory

NumpyArray = npt.NDArray[Any]


class NumpyArrays:
    """Plain numpy as the backend's array library."""

    def dtype(self, name: str) -> Any:
        """numpy's dtype."""
        return np.dtype(name)

    def array(self, values: NumpyArray) -> NumpyArray:
        """A copy."""
        return np.array(values, order="C")

    def zeros(self, shape: tuple[int, ...], dtype: str) -> NumpyArray:
        """Zeros."""
        return np.zeros(shape, dtype)

    def scatter_rows(self, target: NumpyArray, rows: NumpyArray, values: NumpyArray) -> NumpyArray:
        """In place."""
        target[rows] = values
        return target

    def join_columns(self, parts: Sequence[NumpyArray]) -> NumpyArray:
        """Concatenation along the second axis."""
        return np.concatenate(parts, axis=1)

    def columns(self, array: NumpyArray, begin: int, end: int) -> NumpyArray:
        """A contiguous copy."""
        return np.ascontiguousarray(array[:, begin:end])

    def rows(self, array: NumpyArray, begin: int, end: int) -> NumpyArray:
        """A view."""
        return array[begin:end]

    def take_rows(self, array: NumpyArray, rows: NumpyArray) -> NumpyArray:
        """A copy."""
        return np.array(array[rows])

    def start(self, *arrays: NumpyArray) -> None:
        """Computed already."""

    def wait(self, *arrays: NumpyArray) -> None:
        """Computed already."""

    def numpy(self, array: NumpyArray) -> NumpyArray:
        """The array itself."""
        return array


class MlxFrontedFactory:
    """The harness behind MLX arrays: inputs come from MLX's CPU and outputs go back there.

    With it the backend runs on its real array library, `MlxArrays`, and only kernels are emulated.
    """

    def __init__(self, inner: EmulatedKernelFactory) -> None:
        self._inner = inner

    def __call__(self, **description: Any) -> Any:
        """A kernel on MLX arrays."""
        kernel = self._inner(**description)

        def call(
            *,
            inputs: Sequence[mx.array],
            template: Sequence[tuple[str, Any]] | None,
            output_dtypes: Sequence[mx.Dtype],
            **launch: Any,
        ) -> list[mx.array]:
            names = [str(d).removeprefix("mlx.core.") for d in output_dtypes]
            outputs = kernel(
                inputs=[np.array(a) for a in inputs],
                template=template,
                output_dtypes=names,
                **launch,
            )
            return [mx.array(o) for o in outputs]

        return call


__all__ = ["MlxArrays", "MlxFrontedFactory", "NumpyArrays"]
