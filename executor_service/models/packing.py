"""Makes quantised matrices agree in bits and group size, so that they can be merged along N.

Both changes keep every weight's value: an integer of fewer bits is an integer of 8 bits, and the
scale of a group is the scale of its parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from executor_service.errors import ModelError
from isobatch_kernels.program import DenseWeight, QuantizedWeight

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from isobatch_kernels.program import Array, Weight


def unpack(weight: QuantizedWeight) -> npt.NDArray[np.uint8]:
    """Return the integers of a matrix, (N, K) uint8, from the little-endian bit stream along K."""
    bits = weight.bits
    raw = np.ascontiguousarray(weight.packed).view(np.uint8)
    if bits == 8:
        return raw
    if bits == 4:
        return np.stack([raw & 15, raw >> 4], axis=-1).reshape(len(raw), -1)
    stream = np.unpackbits(raw, axis=1, bitorder="little").reshape(len(raw), -1, bits)
    return np.packbits(stream, axis=2, bitorder="little").reshape(len(raw), -1)


def merged(name: str, weights: Sequence[Weight]) -> tuple[Weight, ...]:
    """Return matrices of equal K in one format, ready to be merged along N.

    Raises ModelError when dense and quantised matrices, or two dense types, meet.
    """
    dense = [weight for weight in weights if isinstance(weight, DenseWeight)]
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if len({weight.dtype for weight in dense}) + bool(quantized) > 1:
        raise ModelError(
            f"[model] {name} must be all quantised or all of one dense type, "
            f"got {[type(weight).__name__ for weight in weights]}"
        )
    if not quantized:
        return tuple(weights)
    formats = {weight.bits for weight in quantized}
    bits = quantized[0].bits if len(formats) == 1 else 8
    group_size = min(weight.group_size for weight in quantized)
    return tuple(_converted(weight, bits, group_size) for weight in quantized)


def _converted(weight: QuantizedWeight, bits: int, group_size: int) -> QuantizedWeight:
    if (weight.bits, weight.group_size) == (bits, group_size):
        return weight
    packed = weight.packed
    if bits != weight.bits:
        packed = np.ascontiguousarray(unpack(weight)).view(np.uint32)
    repeats = weight.group_size // group_size

    def spread(values: Array) -> Array:
        return np.repeat(values, repeats, axis=1)

    biases = None if weight.biases is None else spread(weight.biases)
    return QuantizedWeight(packed, spread(weight.scales), biases, bits, group_size)
