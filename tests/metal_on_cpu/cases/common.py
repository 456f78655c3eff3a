"""What the cases share: launchers, the native reference, and equality of bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from isobatch_kernels.metal.launch import Launcher
from tests.metal_on_cpu.harness.arrays import NumpyArrays
from tests.metal_on_cpu.harness.kernel import EmulatedKernelFactory

Float32 = npt.NDArray[np.float32]


def native() -> Any:
    """The native module, whose reference defines class X1; skips, saying why, without it."""
    return pytest.importorskip(
        "isobatch_kernels._cpu", reason="the native module, which holds the reference, is not built"
    )


def launcher_of(factory: EmulatedKernelFactory) -> Launcher:
    """A launcher over numpy arrays."""
    return Launcher(factory, NumpyArrays())


def assert_same_bits(got: npt.NDArray[Any], expected: npt.NDArray[Any], what: str = "") -> None:
    """Equality of bits, with the first difference in the message."""
    assert got.shape == expected.shape, (what, got.shape, expected.shape)
    assert got.dtype == expected.dtype, (what, got.dtype, expected.dtype)
    if got.tobytes() == expected.tobytes():
        return
    kind = f"u{got.dtype.itemsize}"
    at = np.argwhere(
        np.ascontiguousarray(got).view(kind) != np.ascontiguousarray(expected).view(kind)
    )
    first = tuple(int(i) for i in at[0])
    raise AssertionError(
        f"{what}: {len(at)} differ, first at {first}: {got[first]} != {expected[first]}"
    )


def wild_rows(rng: np.random.Generator, rows: int, width: int) -> Float32:
    """Finite rows with outliers and blocks near every floor, subnormals included."""
    x = rng.standard_normal((rows, width)).astype(np.float32)
    x[rng.random(x.shape) < 0.01] *= np.float32(3000)
    factors = np.array([1, 1, 1, 0, 2.0**-40, 2.0**-39, 1e-40, 2.0**-61, 2.0**80], np.float32)
    for start in range(0, width, 32):
        x[:, start : start + 32] *= rng.choice(factors, (rows, 1))
    return x


def quantized(x: Float32, block: int) -> tuple[npt.NDArray[np.int16], Float32]:
    """q (M, K) and d (M, blocks) of finite rows by the reference."""
    reference = native().reference
    q = np.zeros(x.shape, np.int16)
    d = np.zeros((len(x), -(-x.shape[1] // block)), np.float32)
    for row in range(len(x)):
        assert reference.quantize(x[row], block, q[row], d[row])
    return q, d
