"""The GPU gives the bits of the CPU reference. Needs an NVIDIA GPU and MLX for CUDA."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from isobatch_kernels import _cpu
from isobatch_kernels.cpu_backend import CpuBackend, CpuLimits
from isobatch_kernels.cuda.launch import Launcher
from isobatch_kernels.cuda.weights import pack_quantized
from isobatch_kernels.cuda_backend import CudaBackend, CudaLimits
from isobatch_kernels.self_test import _steps, random_rows, random_weight, tiny_program

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not mx.cuda.is_available(), reason="no NVIDIA GPU with MLX for CUDA"),
]
ROWS = (1, 3, 9, 17, 33, 70)
FORMATS = [
    *((4, 64, 64), (4, 32, 32), (4, 128, 64), (4, 16, 32), (8, 32, 32)),
    *((8, 64, 64), (8, 16, 32), (2, 64, 32), (5, 32, 32)),
]
FIELDS = [
    *("logits", "argmax_ids", "max_logits", "normalizers", "quantile_ids", "top_k_starts"),
    *("top_k_ids", "top_k_logits", "top_k_weights", "non_finite_ops"),
]


@pytest.mark.parametrize(("bits", "group", "block"), FORMATS)
def test_linear_layers(bits: int, group: int, block: int) -> None:
    """Rows with outliers, values near every floor, and one row that is not finite."""
    rng = np.random.default_rng(bits * 100 + group)
    weight = random_weight(rng, 50, group * int(rng.integers(1, 8)), bits, group, half=True)
    x = random_rows(rng, max(ROWS), weight.num_inputs)
    layer = _cpu.LinearLayer.quantized(
        "reference", weight.packed, weight.scales, weight.biases, bits, group, block
    )
    expected = np.empty((len(x), 50), np.float32)
    finite = np.empty(len(x), np.bool_)
    layer.forward(x, expected, finite)
    launcher = Launcher(4, 2, 24)
    b = min(group, block)
    packed = pack_quantized([weight], b)
    for rows in ROWS:
        flags = mx.array(np.full(rows, 0xFFFFFFFF, np.uint32))
        activations = launcher.quantize(mx.array(x[:rows]), block, b < block, flags, 3)
        got = np.array(launcher.linear(activations, packed, None, None))
        keep = finite[:rows]
        assert got[keep].tobytes() == expected[:rows][keep].tobytes()
        assert ((np.array(flags) == 4) == ~keep).all()


def test_a_whole_program() -> None:
    """A prefill of two rows, then a decode step: results and the cache."""
    program = tiny_program(np.random.default_rng(1))
    cpu = CpuBackend(program, CpuLimits(40, 16, 4, 600), unit="reference")
    gpu = CudaBackend(program, CudaLimits(40, 16, 4, 600))
    for step in _steps(np.random.default_rng(2)):
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
