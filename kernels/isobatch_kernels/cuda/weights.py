"""Repacks weights once, at load, into the layouts of weights.cu and dense.cu (on the device)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np

from isobatch_kernels.program import Array, DenseType, DenseWeight, QuantizedWeight

TILE: Final = 16  # outputs of a tile
DENSE_TILE: Final = 32
_FLOOR: Final = 2.0**-24
_LARGEST_SCALE: Final = 2.0**100  # 4-bit scales are multiplied by 2^24
_OUTPUTS_AT_ONCE: Final = 8192
FLOAT16, BFLOAT16, FLOAT32 = 0, 1, 2  # the kernels' ST


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A quantised matrix on the device with what its kernels are compiled for."""

    words: mx.array  # (tiles, sub-blocks * words of a record) uint32
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


@dataclass(frozen=True, slots=True, eq=False)
class PackedDense:
    """A 16-bit matrix on the device."""

    values: mx.array  # (tiles, K, 32) float16 or bfloat16
    num_outputs: int
    num_inputs: int

    @property
    def is_bfloat(self) -> bool:
        """Whether values are bfloat16."""
        return bool(self.values.dtype == mx.bfloat16)


def unpack(packed: Array | mx.array, bits: int) -> mx.array:
    """The integers of rows of an MLX bit stream, (N, K) uint8."""
    if bits in (4, 8):
        words = packed if isinstance(packed, mx.array) else mx.array(np.ascontiguousarray(packed))
        shifts = mx.arange(0, 32, bits, dtype=mx.uint32)
        values = (words[..., None] >> shifts) & mx.array((1 << bits) - 1, dtype=mx.uint32)
        return values.astype(mx.uint8).reshape(words.shape[0], -1)
    data = np.ascontiguousarray(np.asarray(packed)).view(np.uint8)
    stream = np.unpackbits(data, axis=1, bitorder="little").reshape(data.shape[0], -1, bits)
    return mx.array((stream * (1 << np.arange(bits)).astype(np.uint8)).sum(axis=2, dtype=np.uint8))


def affine(weight: QuantizedWeight) -> tuple[mx.array, mx.array]:
    """Scales and biases as the contract uses them, fp32 (N, K/G): floors, 8 bits re-centred."""
    scales = _floored(_float32(weight.scales))
    biases = mx.zeros_like(scales) if weight.biases is None else _floored(_float32(weight.biases))
    if weight.bits == 8:
        # 128*scale is exact, so two roundings are those of fma.
        biases = _floored(scales * 128 + biases)
    return scales, biases


def pack_quantized(weights: Sequence[QuantizedWeight], sub_block: int) -> PackedWeight:
    """Merges matrices of equal format along N.

    Raises:
        ValueError: a scale is too large to be a weight's.
    """
    first = weights[0]
    pairs = [affine(weight) for weight in weights]
    scales = mx.concatenate([scale for scale, _ in pairs])
    biases = mx.concatenate([bias for _, bias in pairs])
    largest = float(mx.abs(scales).max())
    if not largest < _LARGEST_SCALE:
        raise ValueError(f"[cuda] scales must be finite and below 2^100, got {largest}")
    scale_type = _narrowest(scales, biases)
    storage = 4 if first.bits <= 4 else 8
    repeat = first.group_size // sub_block
    parts, done = [], 0
    for weight in weights:
        for begin in range(0, weight.num_outputs, _OUTPUTS_AT_ONCE):
            # Only the last part of a matrix is padded, and only the last matrix may need it.
            rows = unpack(weight.packed[begin : begin + _OUTPUTS_AT_ONCE], weight.bits)
            parts.append(rows + 128 if storage == 8 and weight.bits < 8 else rows)
    records = []
    if any(part.shape[0] % TILE for part in parts[:-1]):
        parts = [mx.concatenate(parts)]
    for part in parts:
        count = part.shape[0]
        span = slice(done, done + count)
        quants = _quant_words(_padded(part), storage, sub_block)
        affines = _affine_words(_padded(scales[span]), _padded(biases[span]), scale_type)
        records.append(mx.concatenate([quants, mx.repeat(affines, repeat, axis=1)], axis=2))
        mx.eval(records[-1])
        done += count
    words = mx.concatenate(records)
    words = mx.contiguous(words.reshape(words.shape[0], -1))
    mx.eval(words)
    return PackedWeight(words, storage, sub_block, scale_type, done, first.num_inputs)


def pack_dense(weights: Sequence[DenseWeight]) -> PackedDense:
    """Merges matrices of one type along N."""
    rows = mx.array(np.ascontiguousarray(np.concatenate([np.asarray(w.values) for w in weights])))
    if weights[0].dtype is DenseType.BFLOAT16:
        rows = rows.view(mx.bfloat16)
    count, inputs = rows.shape
    tiles = -(-count // DENSE_TILE)
    padded = mx.pad(rows, [(0, tiles * DENSE_TILE - count), (0, 0)])
    values = mx.contiguous(padded.reshape(tiles, DENSE_TILE, inputs).transpose(0, 2, 1))
    mx.eval(values)
    return PackedDense(values, count, inputs)


def _float32(values: Any) -> mx.array:
    array = values if isinstance(values, mx.array) else mx.array(np.ascontiguousarray(values))
    return array.astype(mx.float32)


def _floored(values: mx.array) -> mx.array:
    return mx.where(mx.abs(values) < _FLOOR, mx.array(0.0, dtype=mx.float32), values)


def _narrowest(scales: mx.array, biases: mx.array) -> int:
    for kind, dtype in ((FLOAT16, mx.float16), (BFLOAT16, mx.bfloat16)):
        if all(
            bool((values.astype(dtype).astype(mx.float32) == values).all())
            for values in (scales, biases)
        ):
            return kind
    return FLOAT32


def _padded(rows: mx.array) -> mx.array:
    extra = -rows.shape[0] % TILE
    return mx.pad(rows, [(0, extra), (0, 0)]) if extra else rows


def _quant_words(values: mx.array, storage: int, b: int) -> mx.array:
    """(16*tiles, K) uint8 to (tiles, K/b, words) uint32."""
    tiles, inputs = values.shape[0] // TILE, values.shape[1]
    mmas = b // 16
    # tile, half h, g, sub-block, t, MMA, e
    cut = values.reshape(tiles, 2, 8, inputs // b, 4, mmas, 4)

    def part(h: int, e: int) -> mx.array:
        # tile, sub-block, g, t, MMA
        return cut[:, h, :, :, :, :, e].transpose(0, 2, 1, 3, 4).astype(mx.uint32)

    if storage == 4:
        words = mx.zeros((tiles, inputs // b, 8, 4, mmas), dtype=mx.uint32)
        for h in range(2):
            for e in range(4):
                nibble = (e & 1) * 4 + (e >> 1) + 2 * h
                words = words | (part(h, e) << mx.array(4 * nibble, dtype=mx.uint32))
        lane_words = mmas
    else:
        halves = []
        for h in range(2):
            half = part(h, 0)
            for e in range(1, 4):
                half = half | (part(h, e) << mx.array(8 * e, dtype=mx.uint32))
            halves.append(half)
        words = mx.stack(halves, axis=-1)
        lane_words = 2 * mmas
    piece = min(lane_words, 4)
    by_lane = words.reshape(tiles, inputs // b, 32, lane_words // piece, piece)
    return by_lane.transpose(0, 1, 3, 2, 4).reshape(tiles, inputs // b, 32 * lane_words)


def _affine_words(scales: mx.array, biases: mx.array, scale_type: int) -> mx.array:
    """(16*tiles, groups) fp32 to (tiles, groups, 16 or 32) uint32: pairs of outputs g and g+8."""
    tiles, groups = scales.shape[0] // TILE, scales.shape[1]

    def ordered(values: mx.array) -> mx.array:
        return values.reshape(tiles, 2, 8, groups).transpose(0, 3, 2, 1)  # tile, group, g, h

    if scale_type == FLOAT32:
        both = mx.stack([ordered(scales), ordered(biases)], axis=-1)
        return mx.contiguous(both).view(mx.uint32).reshape(tiles, groups, 32)
    dtype = mx.float16 if scale_type == FLOAT16 else mx.bfloat16
    low, high = (
        mx.contiguous(ordered(values).astype(dtype)).view(mx.uint16).astype(mx.uint32)
        for values in (scales, biases)
    )
    return (low | (high << mx.array(16, dtype=mx.uint32))).reshape(tiles, groups, 16)
