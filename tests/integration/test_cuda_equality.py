"""The GPU gives the bits of the CPU reference. Needs an NVIDIA GPU and the extra `cuda`."""

from typing import Any

import numpy as np
import pytest

from isobatch_kernels.cpu_backend import CpuBackend, CpuLimits
from isobatch_kernels.cuda.create import create_cuda_backend, cuda_is_available
from isobatch_kernels.cuda.driver import DriverDevice
from isobatch_kernels.cuda.self_test import linear_differences
from isobatch_kernels.cuda_backend import CudaBackend, CudaLimits
from isobatch_kernels.self_test import _steps, tiny_program
from tests.support.cuda_launches import launch_differences

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not cuda_is_available(), reason="no NVIDIA GPU with cuda-bindings"),
]
FORMATS = [
    *((4, 64, 64), (4, 32, 32), (4, 128, 64), (4, 16, 32), (8, 32, 32)),
    *((8, 64, 64), (8, 16, 32), (2, 64, 32), (5, 32, 32)),
]
FIELDS = [
    *("logits", "argmax_ids", "max_logits", "normalizers", "quantile_ids", "top_k_starts"),
    *("top_k_ids", "top_k_logits", "top_k_weights", "non_finite_ops"),
]


def test_linear_layers() -> None:
    """Rows with outliers, values near every floor, and one row that is not finite."""
    device = DriverDevice()
    try:
        assert list(linear_differences(device, FORMATS)) == []
    finally:
        device.close()


def test_launches_of_every_kind() -> None:
    """Blocks and clusters, tiles and rings of every size, as the clock may choose them."""
    device = DriverDevice()
    try:
        count, differences = launch_differences(device, 19, 9990, seed=3)
        assert count > 20
        assert differences == []
    finally:
        device.close()


def test_a_whole_program() -> None:
    """A prefill of two rows, then a decode step three times: launched, recorded, replayed."""
    program = tiny_program(np.random.default_rng(1))
    cpu = CpuBackend(program, CpuLimits(40, 16, 4, 600), unit="reference")
    gpu = CudaBackend(program, CudaLimits(40, 16, 4, 600), DriverDevice())
    steps = list(_steps(np.random.default_rng(2)))
    for step in [*steps, *[steps[-1]] * 5]:
        expected, got = cpu.run(step), gpu.run(step)
        for name in FIELDS:
            a: Any = np.asarray(getattr(expected, name))
            b: Any = np.asarray(getattr(got, name))
            assert a.tobytes() == b.tobytes(), name
    for block in range(40):
        assert cpu.read_block(block).tobytes() == gpu.read_block(block).tobytes()
    gpu.zero_blocks(np.array([3, 5], np.int32))
    assert not gpu.read_block(3).any()
    gpu.write_block(3, cpu.read_block(0))
    assert gpu.read_block(3).tobytes() == cpu.read_block(0).tobytes()
    gpu.close()


def test_the_self_test_passes() -> None:
    """What every start does."""
    backend = create_cuda_backend(
        tiny_program(np.random.default_rng(1)), CudaLimits(40, 16, 4, 600)
    )
    assert backend.tested_cases > 1
    backend.close()
