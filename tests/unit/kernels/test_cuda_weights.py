"""Packing for the tensor cores: every integer and affine pair is where the kernels look for it."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from isobatch_kernels.cuda.device import Chip
from isobatch_kernels.cuda.tuning import (
    Sizes,
    all_rows_shapes,
    choose_rows,
    choose_share,
    choose_tiles,
    takes_rows,
)
from isobatch_kernels.cuda.weights import affine, pack_dense, pack_quantized
from isobatch_kernels.program import DenseType, DenseWeight, QuantizedWeight
from isobatch_kernels.self_test import random_weight
from tests.cuda_on_cpu.emulated_device import COMPILER, EmulatedDevice, shared_folder

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(COMPILER is None, reason="no clang++ on this machine"),
]
OLDER = Chip(108, 163 * 1024)  # without clusters
CHIP = Chip(132, 227 * 1024, (66, 30, 15))

FORMATS = [
    *((4, 64, 64, True), (4, 32, 32, False), (4, 16, 16, True), (3, 64, 32, True)),
    *((5, 32, 32, False), (8, 32, 32, True), (8, 64, 64, False)),
]


@pytest.fixture
def device(tmp_path_factory: pytest.TempPathFactory) -> EmulatedDevice:
    """A device whose kernels are compiled once for all tests."""
    return EmulatedDevice(shared_folder(tmp_path_factory.getbasetemp()))


def _packed(device: EmulatedDevice, weights: list[QuantizedWeight], b: int) -> tuple[Any, Any]:
    """The packed weight and its records (tiles, sub-blocks, words)."""
    packed = pack_quantized(device, weights, b)
    records = np.empty((packed.tiles, packed.num_inputs // b, packed.record_words), np.uint32)
    assert records.nbytes == packed.size
    device.download(packed.address, records)
    device.free(packed.address)
    device.close()
    return packed, records


def _unpacked(weight: QuantizedWeight) -> Any:
    """The integers of MLX's bit stream, (N, K)."""
    data = np.ascontiguousarray(weight.packed).view(np.uint8)
    stream = np.unpackbits(data, axis=1, bitorder="little")
    bits = stream.reshape(len(data), -1, weight.bits).astype(int)
    return (bits << np.arange(weight.bits)).sum(axis=2)


def _integers(records: np.ndarray, storage: int, b: int, n: int) -> list[int]:
    """Output n's integers as weights.cu places them, from (tiles, sub-blocks, words)."""
    mmas = b // 16
    lane_words = mmas if storage == 4 else 2 * mmas
    piece = min(lane_words, 4)
    found = []
    for record in records[n // 16]:
        for k in range(b):
            lane = n % 8 * 4 + k // (b // 4)
            mma, e = k % (b // 4) // 4, k % 4
            half = n // 8 % 2
            i = mma if storage == 4 else 2 * mma + half
            word = int(record[(i // piece * 32 + lane) * piece + i % piece])
            if storage == 4:
                found.append(word >> (4 * ((e & 1) * 4 + (e >> 1) + 2 * half)) & 15)
            else:
                found.append((word >> (8 * e) & 255) - 128)
    return found


@pytest.mark.parametrize(("bits", "group", "b", "half"), FORMATS)
def test_every_integer_has_its_place(
    bits: int, group: int, b: int, half: bool, device: EmulatedDevice
) -> None:
    """Two merged matrices, the first of which does not fill its last tile."""
    rng = np.random.default_rng(bits * 1000 + group)
    weights = [random_weight(rng, count, 3 * group, bits, group, half=half) for count in (21, 8)]
    packed, records = _packed(device, weights, b)
    blocks = packed.num_inputs // b
    expected = np.concatenate([_unpacked(weight) for weight in weights])
    if bits == 8:
        expected -= 128
    scales, biases = (np.concatenate([affine(w)[i] for w in weights]) for i in range(2))
    quant_words = 32 * (b // 16) * (1 if packed.storage_bits == 4 else 2)
    for n in range(29):
        assert _integers(records, packed.storage_bits, b, n) == expected[n].tolist()
        for j in range(blocks):
            pairs = records[n // 16, j, quant_words:]
            at = n % 8 * 2 + n // 8 % 2
            if packed.scale_type == 2:
                pair = pairs.view(np.float32)[2 * at : 2 * at + 2]
            elif packed.scale_type == 0:
                pair = pairs[at : at + 1].view(np.float16).astype(np.float32)
            else:
                pair = (pairs[at] << np.array([16, 0], np.uint32)).view(np.float32)
                pair[1] = np.uint32(pairs[at] & 0xFFFF0000).view(np.float32)
            assert pair.tolist() == [scales[n, j * b // group], biases[n, j * b // group]]


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_past_the_last_output_are_zero(bits: int, device: EmulatedDevice) -> None:
    """They are computed, and must not meet anything odd."""
    weight = random_weight(np.random.default_rng(1), 3, 64, bits, 64, half=True)
    _, records = _packed(device, [weight], 64)
    assert _integers(records, bits, 64, 5) == [0] * 64


def test_eight_bits_are_centred() -> None:
    """bias + 128*scale, and floors below 2^-24."""
    weight = QuantizedWeight(
        np.zeros((1, 8), np.uint32),
        np.array([[2.0**-25]], np.float32),
        np.array([[0.5]], np.float32),
        8,
        32,
    )
    assert [part.tolist() for part in affine(weight)] == [[[0.0]], [[0.5]]]
    weight = QuantizedWeight(
        weight.packed, np.array([[0.25]], np.float32), np.array([[0.5]], np.float32), 8, 32
    )
    assert affine(weight)[1].tolist() == [[32.5]]


def test_absurd_scales_are_refused(device: EmulatedDevice) -> None:
    """2^24 must fit on top of them."""
    weight = QuantizedWeight(
        np.zeros((1, 4), np.uint32), np.array([[2.0**110]], np.float32), None, 4, 32
    )
    with pytest.raises(ValueError, match="below 2\\^100"):
        pack_quantized(device, [weight], 32)


@pytest.mark.parametrize("dtype", list(DenseType))
def test_dense_matrices_lie_in_tiles_of_32(dtype: DenseType, device: EmulatedDevice) -> None:
    """[tile][input][output], zero past the last output."""
    values = np.arange(35 * 6, dtype=np.float16).reshape(35, 6)
    packed = pack_dense(device, [DenseWeight(values[:20], dtype), DenseWeight(values[20:], dtype)])
    assert packed.is_bfloat == (dtype is DenseType.BFLOAT16)
    out = np.empty((2, 6, 32), np.float16)
    assert out.nbytes == packed.size
    device.download(packed.address, out)
    device.free(packed.address)
    assert out[0].T.tolist() == values[:32].tolist()
    assert out[1, 4, 2] == values[34, 4]
    assert not out[1, :, 3:].any()
    device.close()


@pytest.mark.parametrize("outputs", [40, 896, 3584, 37888, 152064])
@pytest.mark.parametrize("chip", [CHIP, OLDER])
def test_launches_cover_all_outputs_and_fit(outputs: int, chip: Chip) -> None:
    """Whatever the tuning says, shared memory must hold it, and equal kernels have equal sizes."""
    weight = Sizes(-(-outputs // 16), 144, 64, 56)
    seen: dict[tuple[int, ...], int] = {}
    for rows in (*range(1, 65), 65, 97, 128):
        assert takes_rows(rows, weight, chip) == (rows <= 64 or outputs < 4000)
        shape = choose_rows(rows, weight, chip)
        assert shape is not None
        assert shape.blocks[0] * 8 * shape.mt >= rows
        assert shape.blocks[2] * shape.slices == 8
        blocks = math.prod(shape.blocks)
        assert blocks <= max(chip.multiprocessors * shape.resident, 8 * shape.blocks[0])
        assert shape.held >= min(rows, 8)
        assert shape.threads <= 1024
        assert shape.shared_memory <= chip.shared_memory
        key = (*dataclasses.astuple(shape)[:-2],)
        assert seen.setdefault(key, shape.shared_memory) == shape.shared_memory
    for rows in (1, 65, 500, 2048):
        tiles = choose_tiles(rows, weight, chip)
        assert tiles.blocks[0] * 32 * tiles.parts >= rows
        assert tiles.blocks[1] * 8 >= weight.tiles
        assert tiles.stages >= 2
        assert tiles.threads <= 1024
        assert tiles.shared_memory <= 226 * 1024


def test_few_blocks_of_attention_have_few_heads() -> None:
    """And many have all that share keys and values."""
    assert choose_share(7, 4, CHIP) == 1
    assert choose_share(7, 4000, CHIP) == 7
    assert choose_share(1, 4, CHIP) == 1


@pytest.mark.parametrize("chip", [CHIP, OLDER])
@pytest.mark.parametrize("tiles", [1, 13, 288])
def test_every_block_has_tiles(tiles: int, chip: Chip) -> None:
    """A block of linear_rows that had none would end while its rows still come."""
    shapes = list(all_rows_shapes(16, Sizes(tiles, 144, 64, 56), chip))
    assert shapes
    for shape in shapes:
        assert (shape.blocks[1] - 1) * shape.teams < -(-tiles // shape.nt), shape
