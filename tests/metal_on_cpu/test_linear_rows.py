"""Linear layers for every row count and weight format: the count never changes a row's bits."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from isobatch_kernels.metal import linear as lin
from isobatch_kernels.metal import weights as packing
from tests.metal_on_cpu.cases.common import launcher_of
from tests.metal_on_cpu.cases.linear import (
    FORMATS,
    Format,
    LinearCase,
    make_case,
    make_weight,
    run_case,
)
from tests.metal_on_cpu.harness.kernel import EmulatedKernelFactory

ROWS = (*range(1, 41), 63, 64, 65, 128)
PROFILE = lin.LinearProfile()
FACTORY = EmulatedKernelFactory()


@functools.cache
def layer(f: Format, outputs: int, groups: int) -> LinearCase:
    return make_case(f, outputs, groups, max(ROWS))


@pytest.mark.parametrize("f", FORMATS, ids=str)
def test_every_row_count(f: Format) -> None:
    """Rows 1..40, 63..65 and 128 by the kernel that the profile picks; ragged outputs."""
    case, launcher = layer(f, 41, 9 if f.group_size < 64 else 5), launcher_of(FACTORY)
    for rows in ROWS:
        run_case(launcher, case, rows, *PROFILE.choose(rows))


@pytest.mark.parametrize("f", FORMATS[:2] + FORMATS[5:7], ids=str)
def test_every_kernel_takes_every_row_count(f: Format) -> None:
    """The matrix kernel for few rows and the row kernel for many: the fallbacks of the profile."""
    case, launcher = layer(f, 33, 3), launcher_of(FACTORY)
    for rows in (1, 2, 7, 8, 9, 31, 32, 33, 65):
        for tile in (32, 64):
            run_case(launcher, case, rows, lin.GEMM, tile)
        for tile in (1, 24):
            run_case(launcher, case, rows, lin.GEMV_MULTI, tile)
        for tile in PROFILE.wide_tiles:
            run_case(launcher, case, rows, lin.GEMV_WIDE, tile)


@pytest.mark.parametrize("outputs", [1, 31, 32, 33, 96, 100])
@pytest.mark.parametrize("groups", [1, 2, 7, 8, 16])
def test_ragged_shapes(outputs: int, groups: int) -> None:
    """Outputs around the tile of 32; slices that are empty, single and several blocks long."""
    case, launcher = layer(FORMATS[0], outputs, groups), launcher_of(FACTORY)
    run_case(launcher, case, 1, lin.GEMV, 1)
    run_case(launcher, case, 1, lin.GEMV, 2)
    run_case(launcher, case, 5, lin.GEMV_MULTI, 6)
    run_case(launcher, case, 3, lin.GEMV_WIDE, 4)
    run_case(launcher, case, 9, lin.GEMV_WIDE, 8)
    run_case(launcher, case, 33, lin.GEMM, 32)


def test_profile_covers_every_row_count() -> None:
    """One row goes to gemv, few to the least tile that holds them, many to gemm or its fallback."""
    assert PROFILE.choose(1) == (lin.GEMV, 1)
    assert PROFILE.choose(5) == (lin.GEMV_MULTI, 6)
    assert PROFILE.choose(24) == (lin.GEMV_MULTI, 24)
    assert PROFILE.choose(25) == (lin.GEMM, 32)
    slow = lin.LinearProfile(use_gemv=False, use_gemm=False)
    assert slow.choose(1) == (lin.GEMV_MULTI, 1)
    assert slow.choose(100) == (lin.GEMV_MULTI, 24)


def test_merged_weights_are_one_matrix() -> None:
    """Equal formats are merged along N, others stay apart."""
    rng = np.random.default_rng(0)
    weights = [
        make_weight(rng, n, 128, f) for n, f in ((33, FORMATS[0]), (7, FORMATS[0]), (5, FORMATS[5]))
    ]
    parts = packing.pack_quantized(weights)
    assert [p.num_outputs for p in parts] == [40, 5]
    assert [p.tiles for p in parts] == [2, 1]


@pytest.mark.parametrize("bits", range(2, 9))
def test_unpack(bits: int) -> None:
    """The bit stream along K, little end first."""
    rng = np.random.default_rng(bits)
    values = rng.integers(0, 2**bits, (3, 64)).astype(np.uint8)
    stream = np.zeros((3, 64 * bits), np.uint8)
    for i in range(bits):
        stream[:, i::bits] = values >> i & 1
    packed = np.packbits(stream, axis=1, bitorder="little").view(np.uint32)
    weight = make_weight(rng, 3, 64, Format(bits, 32, 32))
    same = type(weight)(packed, weight.scales, weight.biases, bits, 32)
    assert (packing.unpack(same) == values).all()
