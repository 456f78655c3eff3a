"""What the Metal backend needs of an array library: MLX on a Mac, a stand-in in tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    NumpyArray = npt.NDArray[Any]

# An array of the library; only the library looks inside.
LibraryArray = Any


class Kernel(Protocol):
    """A kernel as `mx.fast.metal_kernel` makes it."""

    def __call__(
        self,
        *,
        inputs: Sequence[LibraryArray],
        template: Sequence[tuple[str, Any]] | None,
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[Any],
    ) -> Sequence[LibraryArray]:
        """Enqueues or runs the kernel."""
        ...


class KernelFactory(Protocol):
    """`mx.fast.metal_kernel`, or a stand-in with its keywords."""

    def __call__(
        self,
        *,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str,
        compile_options: dict[str, str] | None,
    ) -> Kernel:
        """Makes a kernel; compiles at its first call."""
        ...


class ArrayLibrary(Protocol):
    """Arrays on the device."""

    def dtype(self, name: str) -> Any:
        """The library's dtype for numpy's name of it."""
        ...

    def array(self, values: NumpyArray) -> LibraryArray:
        """A copy on the device."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: str) -> LibraryArray:
        """Zeros on the device."""
        ...

    def scatter_rows(
        self, target: LibraryArray, rows: LibraryArray, values: LibraryArray
    ) -> LibraryArray:
        """target (N, W) with target[rows[i]] = values[i]. May reuse target's memory, which the
        caller then must not use again; rows are distinct."""
        ...

    def join_columns(self, parts: Sequence[LibraryArray]) -> LibraryArray:
        """Joins (M, N_i) arrays along N."""
        ...

    def columns(self, array: LibraryArray, begin: int, end: int) -> LibraryArray:
        """Contiguous copy of columns of an (M, N) array."""
        ...

    def rows(self, array: LibraryArray, begin: int, end: int) -> LibraryArray:
        """Rows of an (N, W) array."""
        ...

    def take_rows(self, array: LibraryArray, rows: LibraryArray) -> LibraryArray:
        """A copy of rows of an (N, W) array."""
        ...

    def start(self, *arrays: LibraryArray) -> None:
        """Hands all of them to the device and returns at once; what they read stays held until
        they have been computed."""
        ...

    def wait(self, *arrays: LibraryArray) -> None:
        """Returns once all of them have been computed: one round trip to the device."""
        ...

    def numpy(self, array: LibraryArray) -> NumpyArray:
        """Waits for the array and gives its values."""
        ...


class MlxArrays:
    """Arrays of MLX. Imported on construction, so that this module loads without it."""

    def __init__(self) -> None:
        import mlx.core as mx

        self._mx: Any = mx

    def dtype(self, name: str) -> Any:
        """The MLX dtype of that name."""
        return getattr(self._mx, name)

    def array(self, values: NumpyArray) -> LibraryArray:
        """A copy on MLX's default device."""
        return self._mx.array(np.ascontiguousarray(values))

    def zeros(self, shape: tuple[int, ...], dtype: str) -> LibraryArray:
        """Zeros, made on the device."""
        return self._mx.zeros(shape, self.dtype(dtype))

    def scatter_rows(
        self, target: LibraryArray, rows: LibraryArray, values: LibraryArray
    ) -> LibraryArray:
        """Assignment by index: MLX writes into `target` itself once nobody else holds it."""
        target[rows] = values
        return target

    def join_columns(self, parts: Sequence[LibraryArray]) -> LibraryArray:
        """Concatenation along the second axis."""
        return self._mx.concatenate(list(parts), axis=1)

    def columns(self, array: LibraryArray, begin: int, end: int) -> LibraryArray:
        """A slice, made contiguous."""
        return self._mx.contiguous(array[:, begin:end])

    def rows(self, array: LibraryArray, begin: int, end: int) -> LibraryArray:
        """A slice."""
        return array[begin:end]

    def take_rows(self, array: LibraryArray, rows: LibraryArray) -> LibraryArray:
        """A gather."""
        return array[rows]

    def start(self, *arrays: LibraryArray) -> None:
        """Evaluates without waiting."""
        self._mx.async_eval(*arrays)

    def wait(self, *arrays: LibraryArray) -> None:
        """Evaluates."""
        self._mx.eval(*arrays)

    def numpy(self, array: LibraryArray) -> NumpyArray:
        """Evaluates and copies."""
        return np.array(array)
