"""The CUDA kernels' own text, run on the CPU, gives the reference's bits. No GPU is needed."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from isobatch_kernels import cuda_backend
from isobatch_kernels.cpu_backend import CpuBackend, CpuLimits
from isobatch_kernels.cuda.device import Chip
from isobatch_kernels.cuda.one_layer import LinearOnDevice
from isobatch_kernels.cuda.self_test import reference_results
from isobatch_kernels.cuda.tuning import RowsShape, for_rows, rows_top
from isobatch_kernels.program import Program, QuantizedWeight
from isobatch_kernels.self_test import random_rows, random_weight, tiny_program
from isobatch_kernels.step import Float32, Stat, StepInput
from tests.cuda_on_cpu.emulated_device import COMPILER, EmulatedDevice, shared_folder

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(COMPILER is None, reason="no clang++ on this machine"),
]
FORMATS = [
    *((4, 64, 64, 3), (4, 32, 32, 9), (4, 16, 32, 2), (8, 32, 32, 17), (8, 64, 64, 1)),
    *((3, 64, 32, 33), (4, 128, 64, 40), (4, 64, 64, 65), (4, 16, 32, 130), (8, 32, 32, 133)),
]
FIELDS = [
    *("logits", "argmax_ids", "max_logits", "normalizers", "quantile_ids", "top_k_starts"),
    *("top_k_ids", "top_k_logits", "top_k_weights", "non_finite_ops"),
]


@pytest.fixture
def device(tmp_path_factory: pytest.TempPathFactory) -> EmulatedDevice:
    """A device whose kernels are compiled once for all tests."""
    return EmulatedDevice(shared_folder(tmp_path_factory.getbasetemp()))


@pytest.fixture
def older_device(tmp_path_factory: pytest.TempPathFactory) -> EmulatedDevice:
    """The same of compute capability 8.0."""
    return EmulatedDevice(shared_folder(tmp_path_factory.getbasetemp()), capability=80)


@pytest.mark.parametrize(("bits", "group", "block", "rows"), FORMATS)
def test_linear_layers(
    bits: int, group: int, block: int, rows: int, device: EmulatedDevice
) -> None:
    """Few rows and many, with outliers, values near every floor, and one row that is not finite.

    Many on a chip so small that its blocks have large tiles.
    """
    if rows > 65:
        device.chip = Chip(1, 227 * 1024, (0, 0, 0))
    rng = np.random.default_rng(bits * 100 + group)
    weight = random_weight(rng, 50, group * int(rng.integers(1, 6)), bits, group, half=True)
    x = random_rows(rng, rows, weight.num_inputs)
    kernel = "linear_rows" if rows <= 65 else "linear_tiles"
    _run_in_every_way(LinearOnDevice(device, weight, block, rows), kernel, weight, x, block)
    device.close()


# nt, mt, slices, cluster, teams, deep, stages
SHARES = [
    *((1, 1, 8, 1, 1, 2, 3), (2, 1, 8, 1, 2, 1, 4), (1, 1, 1, 1, 7, 2, 3), (2, 1, 2, 1, 3, 1, 4)),
    *((1, 2, 8, 1, 1, 2, 3), (2, 2, 4, 1, 1, 2, 2), (1, 4, 1, 1, 4, 2, 3), (2, 8, 2, 1, 2, 1, 4)),
    *((1, 1, 4, 2, 2, 2, 3), (1, 1, 1, 8, 5, 1, 4), (1, 2, 4, 2, 2, 2, 3), (2, 2, 2, 4, 1, 7, 2)),
    *((1, 2, 1, 8, 4, 2, 3), (1, 8, 1, 8, 2, 2, 3), (2, 4, 2, 4, 1, 1, 8)),
]


@pytest.mark.parametrize(
    ("share", "sub_blocks"), [*((s, 5) for s in SHARES), *((s, 19) for s in SHARES[::3])]
)
def test_every_way_to_share_out_slices_and_tiles(
    share: tuple[int, int, int, int, int, int, int], sub_blocks: int, device: EmulatedDevice
) -> None:
    """Slices of a block, a cluster or apart, and empty slices too."""
    _check_share(share, sub_blocks, device)


@pytest.mark.parametrize("share", [SHARES[i] for i in (0, 2, 5)])
def test_shares_without_a_copy_engine(
    share: tuple[int, int, int, int, int, int, int], older_device: EmulatedDevice
) -> None:
    """All lanes copy, and all arrive at the barriers."""
    _check_share(share, 19, older_device)


def test_many_rows_without_a_copy_engine(older_device: EmulatedDevice) -> None:
    """Copies in groups, of which some are still under way when one is waited for."""
    older_device.chip = replace(older_device.chip, multiprocessors=1)
    rng = np.random.default_rng(8)
    weight = random_weight(rng, 50, 64 * 9, 4, 64, half=True)
    x = random_rows(rng, 71, weight.num_inputs)
    layer = LinearOnDevice(older_device, weight, 64, len(x))
    _run_in_every_way(layer, "linear_tiles", weight, x)
    older_device.close()


def _check_share(
    share: tuple[int, int, int, int, int, int, int], sub_blocks: int, device: EmulatedDevice
) -> None:
    """On a chip so small that every team has several groups of tiles."""
    nt, mt, slices, cluster, teams, deep, stages = share
    device.chip = Chip(8 // slices, 227 * 1024, (1, 1, 1))
    rng = np.random.default_rng(sub_blocks)
    weight = random_weight(rng, 150, 64 * sub_blocks, 4, 64, half=True)
    rows = 8 * mt - 5
    x = random_rows(rng, rows, weight.num_inputs)
    layer = LinearOnDevice(device, weight, 64, rows)
    held = 8 if mt > 1 else 4
    sizes = (nt, mt, held, slices, cluster, teams, 1, deep, stages, 1)
    like = RowsShape(*sizes, (1, 1, 1), 0)
    assert for_rows(rows, layer.packed, like, device.chip).sets == 2
    layer.launcher.timed[layer.packed.format, rows_top(rows)] = like
    _run_in_every_way(layer, "linear_rows", weight, x)
    device.close()


def _run_in_every_way(
    layer: LinearOnDevice, kernel: str, weight: QuantizedWeight, x: Float32, block: int = 64
) -> None:
    """Copies end late, at once, and at random; counters that begin at zero must be so again."""
    expected, finite = reference_results(weight, block, x)
    device: Any = layer.device
    for _ in range(3):
        device.launched.clear()
        got, flags = layer.run(x)
        assert kernel in device.launched
        assert got[finite].tobytes() == expected[finite].tobytes()
        assert ((flags == 4) == ~finite).all()
    layer.close()


def _step(lengths: list[int], positions: list[int], seed: int) -> StepInput:
    rng = np.random.default_rng(seed)
    rows, tokens = len(lengths), sum(lengths)
    spans = zip(positions, lengths, strict=True)
    return StepInput(
        token_ids=rng.integers(0, 1100, tokens, dtype=np.int32),
        positions=np.concatenate([np.arange(p, p + n, dtype=np.int32) for p, n in spans]),
        query_start_loc=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        block_tables=np.arange(rows * 20, dtype=np.int32).reshape(rows, 20)[:, ::-1].copy(),
        wanted=(np.cumsum(lengths) - 1).astype(np.int32),
        statistics=np.full(
            rows, Stat.TOP_K | Stat.NORMALIZER | Stat.QUANTILE | Stat.ARGMAX, np.uint32
        ),
        top_k=np.arange(5, 5 + rows, dtype=np.int32),
        inverse_temperatures=np.full(rows, 0.05, np.float32),
        quantiles=rng.random(rows).astype(np.float32),
        edit_starts=np.array([0] + [2] * rows, np.int32),
        edit_ids=np.array([3, 3], np.int32),
        edit_values=np.array([-2.5, 1e-30], np.float32),
    )


@pytest.fixture(scope="module")
def program() -> Program:
    """The self-test's two layers; one of them sees a window of 40 keys."""
    return tiny_program(np.random.default_rng(1))


def test_a_whole_backend(program: Program, device: EmulatedDevice) -> None:
    """A long row and a short one, then single tokens, one of them over two chunks.

    On a chip so small that the first step has more rows than it has multiprocessors.
    """
    device.chip = replace(device.chip, multiprocessors=8)
    cpu = CpuBackend(program, CpuLimits(40, 16, 4, 300, num_threads=1), unit="reference")
    gpu = cuda_backend.CudaBackend(program, cuda_backend.CudaLimits(40, 16, 4, 300), device)
    far = replace(_step([1, 1], [270, 3], 5))
    for step in (_step([9, 3], [0, 0], 3), _step([1, 1], [9, 3], 4), far):
        expected, got = cpu.run(step), gpu.run(step)
        for name in FIELDS:
            a: Any = np.asarray(getattr(expected, name))
            b: Any = np.asarray(getattr(got, name))
            assert a.tobytes() == b.tobytes(), name
    for block in range(40):
        assert cpu.read_block(block).tobytes() == gpu.read_block(block).tobytes()
    kept = gpu.read_block(19)
    gpu.zero_blocks(np.array([19, 2], np.int32))
    assert not gpu.read_block(19).any()
    gpu.write_block(19, kept)
    assert gpu.read_block(19).tobytes() == kept.tobytes()
    assert not gpu.read_block(2).any()
    assert gpu.read_block(39).any()
    gpu.close()
    with pytest.raises(ValueError, match="got a closed one"):
        gpu.run(far)
