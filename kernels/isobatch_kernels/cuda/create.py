"""Makes the CUDA backend on this machine's first GPU: self-tested and compiled."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from isobatch_kernels.cpu_units import native_module_error
from isobatch_kernels.cuda.driver import DriverDevice, cuda_error
from isobatch_kernels.cuda_backend import CudaBackend, CudaLimits

if TYPE_CHECKING:
    from isobatch_kernels.cpu_backend import CpuLimits
    from isobatch_kernels.program import Program

_log = logging.getLogger(__name__)


def cuda_is_available() -> bool:
    """Whether the package cuda-bindings and an NVIDIA GPU are here."""
    return cuda_error() is None


def create_cuda_backend(program: Program, limits: CudaLimits) -> CudaBackend:
    """A backend whose kernels were compared with the contract on this GPU.

    Raises:
        RuntimeError: no GPU, or the kernels give other bits.
        ValueError: the program is malformed.
    """
    begin = time.perf_counter()
    cases = 0
    if native_module_error() is None:  # the native module has the reference
        cases = _check(program)
    tested = time.perf_counter()
    backend = CudaBackend(program, limits, DriverDevice(), timed=True)
    backend.tested_cases = cases
    _log.info(
        "CUDA kernels self-tested in %.1f s; weights packed and kernels compiled in %.1f s",
        tested - begin,
        time.perf_counter() - tested,
    )
    return backend


def _check(program: Program) -> int:
    from isobatch_kernels.cuda import self_test

    def make(tiny: Program, sizes: CpuLimits) -> CudaBackend:
        few = CudaLimits(
            sizes.num_blocks, sizes.block_size, sizes.max_num_seqs, sizes.max_num_batched_tokens
        )
        return CudaBackend(tiny, few, DriverDevice())

    device = DriverDevice()
    try:
        return self_test.check(device, self_test.formats_of(program), make)
    finally:
        device.close()
