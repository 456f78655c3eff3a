"""Makes kernels of a factory on first use, and runs them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch_kernels.metal.source import load_kernels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch_kernels.metal.arrays import ArrayLibrary, Kernel, KernelFactory, LibraryArray

GROUP = 256  # threads of a threadgroup, at most
MINIMUM = 8  # MLX passes smaller arrays in another address space, which changes the kernel's text


@dataclass(slots=True)
class Launcher:
    """Runs kernels by name and counts them."""

    factory: KernelFactory
    arrays: ArrayLibrary
    _kernels: dict[str, Kernel] = field(default_factory=dict)
    _constants: dict[tuple[float, ...], LibraryArray] = field(default_factory=dict)
    dispatches: int = 0

    def numbers(self, *values: int) -> LibraryArray:
        """Sizes for a kernel, kept on the device: they repeat from step to step."""
        return self._kept(np.array([*values, *[0] * (MINIMUM - len(values))], np.int32))

    def constants(self, *values: float) -> LibraryArray:
        """fp32 constants for a kernel, kept like sizes."""
        return self._kept(np.array([*values, *[0.0] * (MINIMUM - len(values))], np.float32))

    def _kept(self, values: np.ndarray[Any, Any]) -> LibraryArray:
        key = (float(values.dtype.num), *(float(v) for v in values))
        if key not in self._constants:
            if len(self._constants) > 4096:
                self._constants.clear()
            self._constants[key] = self.arrays.array(values)
        return self._constants[key]

    def upload(self, values: np.ndarray[Any, Any]) -> LibraryArray:
        """A flat copy on the device, padded with zeros to the least size."""
        flat = np.ascontiguousarray(values).reshape(-1)
        if flat.size < MINIMUM:
            flat = np.concatenate([flat, np.zeros(MINIMUM - flat.size, flat.dtype)])
        return self.arrays.array(flat)

    def run(
        self,
        name: str,
        inputs: Sequence[LibraryArray],
        outputs: Sequence[tuple[tuple[int, ...], str]],
        grid: tuple[int, int, int],
        threads: int = GROUP,
        template: Sequence[tuple[str, Any]] | None = None,
    ) -> list[LibraryArray]:
        """Runs a kernel on `grid` threadgroups of `threads` threads each."""
        if name not in self._kernels:
            source = load_kernels()[name]
            self._kernels[name] = self.factory(
                name=f"isobatch_{name}",
                input_names=list(source.inputs),
                output_names=list(source.outputs),
                source=source.body,
                header=source.header,
                compile_options={"math_mode": "safe"},
            )
        for label, array in zip(load_kernels()[name].inputs, inputs, strict=True):
            if array.size < MINIMUM:
                raise ValueError(
                    f"[metal] input {label} of {name} must have at least {MINIMUM} elements, "
                    f"got {array.size}"
                )
        self.dispatches += 1
        return list(
            self._kernels[name](
                inputs=inputs,
                template=template,
                grid=(grid[0] * threads, grid[1], grid[2]),
                threadgroup=(threads, 1, 1),
                output_shapes=[shape for shape, _ in outputs],
                output_dtypes=[self.arrays.dtype(dtype) for _, dtype in outputs],
            )
        )
