"""Logits that stay on the device until somebody reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from isobatch_kernels.step import Float32


class DeviceLogits:
    """Stands in for an fp32 array (L, vocabulary): reading copies all of it once."""

    def __init__(self, shape: tuple[int, int], copy: Callable[[Float32], None]) -> None:
        """`copy` fills an array with the values, or raises where they are gone."""
        self._shape = shape
        self._copy = copy
        self._values: Float32 | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """(L, vocabulary)."""
        return self._shape

    @property
    def dtype(self) -> np.dtype[np.float32]:
        """fp32."""
        return np.dtype(np.float32)

    def __len__(self) -> int:
        """Number of wanted positions."""
        return self._shape[0]

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
            values = np.empty(self._shape, dtype=np.float32)
            self._copy(values)
            self._values = values
        return self._values
