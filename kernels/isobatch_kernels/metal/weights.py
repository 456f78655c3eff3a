"""Repacks quantised weights once, at load, into the layout of weights.metal."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from isobatch_kernels.program import DenseType, DenseWeight, QuantizedWeight

if TYPE_CHECKING:
    from collections.abc import Sequence

UInt32 = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float32]
TILE = 32  # outputs of a tile
_FLOOR = np.float32(2.0**-24)
_ROWS_AT_A_TIME = 4096
# Where the weights of a word go: places of weight 0, 1, 2, ..
_PLACES = {4: (0, 4, 1, 5, 2, 6, 3, 7), 8: (0, 2, 1, 3)}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Merged quantised matrices, ready for the kernels (numpy; the backend moves them)."""

    packed: UInt32  # (tiles * units * 32 * 4,)
    scales: npt.NDArray[np.generic]  # (tiles * groups * 32,) float16, float32 or uint16 (bfloat16)
    biases: npt.NDArray[np.generic]  # like scales; float32 for 8 bits
    bits: int  # of storage: 4 or 8
    centred: bool
    group_size: int
    num_outputs: int
    num_inputs: int
    tiles: int

    def without_arrays(self) -> PackedWeight:
        """The sizes alone."""
        none = np.zeros(0, np.uint32)
        return replace(self, packed=none, scales=none, biases=none)


@dataclass(frozen=True, slots=True)
class PackedDense:
    """Merged 16-bit matrices in the layout of dense.metal."""

    values: npt.NDArray[np.generic]  # (tiles * ceil(K/8) * 32 * 8,) float16, or uint16 (bfloat16)
    bfloat: bool
    num_outputs: int
    num_inputs: int
    tiles: int


def unpack(weight: QuantizedWeight) -> npt.NDArray[np.uint8]:
    """The integers of a weight as stored, (N, K)."""
    rows, bits = weight.packed, weight.bits
    data = np.ascontiguousarray(rows).view(np.uint8)
    if bits == 8:
        return data
    if bits == 4:
        out = np.empty((data.shape[0], data.shape[1] * 2), np.uint8)
        out[:, 0::2] = data & 15
        out[:, 1::2] = data >> 4
        return out
    stream = np.unpackbits(data, axis=1, bitorder="little")
    digits = stream.reshape(data.shape[0], -1, bits)
    powers = (1 << np.arange(bits)).astype(np.uint8)
    return np.asarray((digits * powers).sum(axis=2), np.uint8)


def _words(weight: QuantizedWeight, bits: int) -> UInt32:
    """(N, ceil(K*bits/128)*4) words with weights at the kernels' places."""
    per_word = 32 // bits
    words = -(-weight.num_inputs * bits // 128) * 4
    out = np.zeros((weight.num_outputs, words), np.uint32)
    for begin in range(0, weight.num_outputs, _ROWS_AT_A_TIME):
        part = QuantizedWeight(
            packed=weight.packed[begin : begin + _ROWS_AT_A_TIME],
            scales=weight.scales,
            biases=None,
            bits=weight.bits,
            group_size=weight.group_size,
        )
        values = unpack(part)
        padded = np.zeros((values.shape[0], words * per_word), np.uint8)
        padded[:, : values.shape[1]] = values
        for i, place in enumerate(_PLACES[bits]):
            column = padded[:, i::per_word].astype(np.uint32)
            out[begin : begin + _ROWS_AT_A_TIME] |= column << np.uint32(place * bits)
    return out


def _by_tile(rows: npt.NDArray[np.generic], unit: int) -> npt.NDArray[np.generic]:
    """(N, C) to (tiles, C/unit, 32, unit), flat, zero past N."""
    tiles = -(-rows.shape[0] // TILE)
    padded = np.zeros((tiles * TILE, rows.shape[1]), rows.dtype)
    padded[: rows.shape[0]] = rows
    cut = padded.reshape(tiles, TILE, rows.shape[1] // unit, unit).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(cut).reshape(-1)


def _floored(values: Floats) -> Floats:
    """Magnitudes below 2^-24 become +0 (numerics.md section 1)."""
    return np.where(np.abs(values) < _FLOOR, np.float32(0), values).astype(np.float32)


def affine(weight: QuantizedWeight) -> tuple[Floats, Floats]:
    """Scales and biases as the contract uses them, (N, K/G): floors applied, 8 bits re-centred."""
    scales = _floored(weight.scales.astype(np.float32))
    stored = np.zeros_like(scales) if weight.biases is None else weight.biases.astype(np.float32)
    biases = _floored(stored)
    if weight.bits == 8:
        # 128*scale is exact, so one addition rounds as fma does.
        biases = _floored(np.float32(128) * scales + biases)
    return scales, biases


def _narrowest(values: Floats, half: bool) -> npt.NDArray[np.generic]:
    """float16 where that was stored, bfloat16 bits where they hold every value, else float32."""
    if half:
        return values.astype(np.float16)
    bits = np.ascontiguousarray(values).view(np.uint32)
    if not (bits & 0xFFFF).any():
        return (bits >> 16).astype(np.uint16)
    return values


def _format_of(weight: QuantizedWeight) -> tuple[int, bool, int, str]:
    bits = 4 if weight.bits <= 4 else 8
    return bits, weight.bits == 8, weight.group_size, weight.scales.dtype.name


def pack_quantized(weights: Sequence[QuantizedWeight]) -> list[PackedWeight]:
    """Merges neighbours of equal format along N; usually one matrix comes out."""
    packed = []
    for (bits, centred, group, scale_type), same in groupby(weights, key=_format_of):
        members = list(same)
        words = np.concatenate([_words(w, bits) for w in members])
        pairs = [affine(w) for w in members]
        scales = np.concatenate([scale for scale, _ in pairs])
        biases = np.concatenate([bias for _, bias in pairs])
        half = scale_type == "float16"
        packed.append(
            PackedWeight(
                packed=_by_tile(words, 4).astype(np.uint32),
                scales=_by_tile(_narrowest(scales, half), 1),
                biases=_by_tile(_narrowest(biases, half and not centred), 1),
                bits=bits,
                centred=centred,
                group_size=group,
                num_outputs=len(words),
                num_inputs=members[0].num_inputs,
                tiles=-(-len(words) // TILE),
            )
        )
    return packed


def pack_dense(weights: Sequence[DenseWeight]) -> list[PackedDense]:
    """Merges neighbours of equal type along N."""
    packed = []
    for dtype, same in groupby(weights, key=lambda w: w.dtype):
        rows = np.concatenate([w.values for w in same])
        padded = np.zeros((rows.shape[0], -(-rows.shape[1] // 8) * 8), rows.dtype)
        padded[:, : rows.shape[1]] = rows
        packed.append(
            PackedDense(
                values=_by_tile(padded, 8),
                bfloat=dtype is DenseType.BFLOAT16,
                num_outputs=rows.shape[0],
                num_inputs=rows.shape[1],
                tiles=-(-rows.shape[0] // TILE),
            )
        )
    return packed
