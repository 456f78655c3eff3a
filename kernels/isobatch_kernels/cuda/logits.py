"""Logits that stay on the device until somebody reads them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from isobatch_kernels.step import Float32


class DeviceLogits:
    """Stands in for an fp32 array (L, vocabulary): reading copies all of it once."""

    def __init__(self, array: mx.array) -> None:
        """`array` is evaluated already."""
        self._array = array
        self._values: Float32 | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """(L, vocabulary)."""
        return tuple(self._array.shape)

    @property
    def dtype(self) -> np.dtype[np.float32]:
        """fp32."""
        return np.dtype(np.float32)

    def __len__(self) -> int:
        """Number of wanted positions."""
        return int(self._array.shape[0])

    def __getitem__(self, index: Any) -> Any:
        """As numpy's."""
        return self._read()[index]

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        """The values."""
        return np.array(self._read(), dtype=dtype, copy=copy)

    def __getattr__(self, name: str) -> Any:
        """Every other attribute of an array."""
        return getattr(self._read(), name)

    def _read(self) -> Float32:
        if self._values is None:
            self._values = np.array(self._array)
        return self._values
