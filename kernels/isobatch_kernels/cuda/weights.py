"""Repacks weights once, at load, into the layouts of weights.cu and dense.cu (on the device)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from isobatch_kernels.cuda.device import Device, KernelKey
from isobatch_kernels.program import DenseType, DenseWeight, QuantizedWeight

TILE: Final = 16  # outputs of a tile
DENSE_TILE: Final = 32
_FLOOR: Final = 2.0**-24
_LARGEST_SCALE: Final = 2.0**100  # 4-bit scales are multiplied by 2^24
FLOAT16, BFLOAT16, FLOAT32 = 0, 1, 2  # the kernels' ST
Values = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """What the speed of a quantised matrix depends on."""

    storage_bits: int
    sub_block: int
    scale_type: int
    num_outputs: int
    num_inputs: int


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A quantised matrix on the device with what its kernels are compiled for."""

    address: int  # (tiles, sub-blocks, words of a record) uint32
    storage_bits: int  # 4 or 8
    sub_block: int  # 16, 32 or 64
    scale_type: int  # FLOAT16, BFLOAT16 or FLOAT32
    num_outputs: int
    num_inputs: int

    @property
    def tiles(self) -> int:
        """Tiles of 16 outputs."""
        return -(-self.num_outputs // TILE)

    @property
    def record_words(self) -> int:
        """32-bit words of a record."""
        return self.storage_bits * self.sub_block // 2 + (32 if self.scale_type == FLOAT32 else 16)

    @property
    def sub_blocks(self) -> int:
        """Records of a tile."""
        return self.num_inputs // self.sub_block

    @property
    def size(self) -> int:
        """Bytes."""
        return 4 * self.tiles * self.sub_blocks * self.record_words

    @property
    def format(self) -> WeightFormat:
        """Equal for matrices that are equally fast."""
        return WeightFormat(
            *(self.storage_bits, self.sub_block, self.scale_type),
            *(self.num_outputs, self.num_inputs),
        )

    @property
    def constants(self) -> dict[str, int]:
        """What kernels that read it are compiled for."""
        return {"SB": self.storage_bits, "B": self.sub_block, "ST": self.scale_type}


@dataclass(frozen=True, slots=True, eq=False)
class PackedDense:
    """A 16-bit matrix on the device."""

    address: int  # (tiles, K, 32)
    is_bfloat: bool
    num_outputs: int
    num_inputs: int

    @property
    def tiles(self) -> int:
        """Tiles of 32 outputs."""
        return -(-self.num_outputs // DENSE_TILE)

    @property
    def size(self) -> int:
        """Bytes."""
        return 2 * DENSE_TILE * self.tiles * self.num_inputs


def affine(weight: QuantizedWeight) -> tuple[Values, Values]:
    """Scales and biases as the contract uses them, (N, K/G): floors, 8 bits re-centred."""
    if weight.bits < 8 and weight.scales.dtype == np.float16:
        # No fp16 but 0 is below 2^-24.
        halves: Values = np.zeros_like(weight.scales) if weight.biases is None else weight.biases
        if halves.dtype == np.float16:
            return weight.scales, halves
    scales: Values = _floored(np.asarray(weight.scales, dtype=np.float32))
    biases: Values = (
        np.zeros_like(scales)
        if weight.biases is None
        else _floored(np.asarray(weight.biases, dtype=np.float32))
    )
    if weight.bits == 8:
        # 128*scale is exact, so two roundings are those of fma.
        biases = _floored(scales * np.float32(128) + biases)
    return scales, biases


def _floored(values: Values) -> Values:
    return np.where(np.abs(values) < _FLOOR, np.float32(0), values)


def _stored(pairs: Sequence[tuple[Values, Values]]) -> tuple[int, Values, Values]:
    """The narrowest type that holds every scale and bias, and all of them in it."""
    scales, biases = (np.concatenate([pair[i] for pair in pairs]) for i in range(2))
    if scales.dtype == np.float16:
        return FLOAT16, scales, biases
    with np.errstate(over="ignore"):
        halves = [values.astype(np.float16) for values in (scales, biases)]
    exact = zip(halves, (scales, biases), strict=True)
    if all((half.astype(np.float32) == values).all() for half, values in exact):
        return FLOAT16, halves[0], halves[1]
    bits = [np.ascontiguousarray(values).view(np.uint32) for values in (scales, biases)]
    if not any((words & 0xFFFF).any() for words in bits):
        high = [(words >> 16).astype(np.uint16) for words in bits]
        return BFLOAT16, high[0], high[1]
    return FLOAT32, scales, biases


def pack_quantized(
    device: Device, weights: Sequence[QuantizedWeight], sub_block: int
) -> PackedWeight:
    """Merges matrices of equal format along N.

    Raises:
        ValueError: a scale is too large to be a weight's.
    """
    first = weights[0]
    scale_type, scales, biases = _stored([affine(weight) for weight in weights])
    checked = (scales.astype(np.uint32) << 16).view(np.float32) if scale_type == 1 else scales
    largest = float(np.abs(checked).max())
    if not largest < _LARGEST_SCALE:
        raise ValueError(f"[cuda] scales must be finite and below 2^100, got {largest}")
    outputs, inputs = sum(weight.num_outputs for weight in weights), first.num_inputs
    storage = 4 if first.bits <= 4 else 8
    packed = PackedWeight(0, storage, sub_block, scale_type, outputs, inputs)
    address = device.allocate(packed.size)
    sources = [np.ascontiguousarray(weight.packed) for weight in weights]
    with _Uploaded(device, sources, [scales], [biases]) as (integers, scale_at, bias_at):
        constants = {**packed.constants, "BITS": first.bits}
        device.launch(
            KernelKey("pack_quantized", tuple(constants.items()), 0),
            (inputs // sub_block, packed.tiles, 1),
            288,
            [
                *(integers, scale_at, bias_at, address, outputs, inputs),
                *(first.group_size, sources[0].shape[1]),
            ],
            early=False,
        )
        device.synchronize()
    return PackedWeight(address, storage, sub_block, scale_type, outputs, inputs)


def pack_dense(device: Device, weights: Sequence[DenseWeight]) -> PackedDense:
    """Merges matrices of one type along N."""
    outputs, inputs = sum(weight.num_outputs for weight in weights), weights[0].num_inputs
    packed = PackedDense(0, weights[0].dtype is DenseType.BFLOAT16, outputs, inputs)
    address = device.allocate(packed.size)
    sources = [np.ascontiguousarray(weight.values) for weight in weights]
    with _Uploaded(device, sources) as (rows,):
        device.launch(
            KernelKey("pack_dense", (), 0),
            (-(-DENSE_TILE * inputs // 256), packed.tiles, 1),
            256,
            [rows, address, outputs, inputs],
            early=False,
        )
        device.synchronize()
    return PackedDense(address, packed.is_bfloat, outputs, inputs)


class _Uploaded:
    """Arrays on the device for a while, each group of them side by side."""

    def __init__(self, device: Device, *groups: Sequence[Values]) -> None:
        self._device = device
        self._groups = groups
        self._addresses: list[int] = []

    def __enter__(self) -> list[int]:
        for group in self._groups:
            # A stream of bits is read in pairs of words.
            at = self._device.allocate(sum(array.nbytes for array in group) + 4)
            self._addresses.append(at)
            for array in group:
                whole = np.ascontiguousarray(array)
                self._device.upload(at, whole)
                at += whole.nbytes
        return self._addresses

    def __exit__(self, *_: object) -> None:
        for address in self._addresses:
            self._device.free(address)
