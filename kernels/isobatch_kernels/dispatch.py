"""Which backend and which instruction set run a program."""

from __future__ import annotations

import logging
import os

from isobatch_kernels import _cpu
from isobatch_kernels.cpu_backend import CpuBackend, CpuLimits
from isobatch_kernels.program import Program
from isobatch_kernels.self_test import first_difference
from isobatch_kernels.step import Backend

# Fastest first. Each must give the reference's bits; a unit that does not is passed over.
FAST_UNITS = ("vnni", "avx2", "neon", "scalar")
UNITS = (*FAST_UNITS, "reference")
UNIT_VARIABLE = "ISOBATCH_CPU_UNIT"
BACKENDS = ("auto", "cpu", "cuda")

_log = logging.getLogger(__name__)


def available_units() -> tuple[str, ...]:
    """Units that this processor and build have, fastest first, the reference last."""
    return tuple(unit for unit in UNITS if _cpu.unit_available(unit))


def choose_unit(unit: str = "auto") -> str:
    """The unit to use: the one named, or the fastest that passes the self-test.

    The environment's ISOBATCH_CPU_UNIT stands in for "auto".

    Raises:
        ValueError: no such unit, or not on this machine.
        RuntimeError: no unit gives the reference's bits.
    """
    if unit == "auto":
        unit = os.environ.get(UNIT_VARIABLE, "auto") or "auto"
    if unit != "auto":
        if unit not in available_units():
            known = ", ".join(("auto", *available_units()))
            raise ValueError(f"[dispatch] unit must be one of {known}, got {unit!r}")
        return unit
    for candidate in FAST_UNITS:
        if not _cpu.unit_available(candidate):
            continue
        difference = first_difference(candidate)
        if difference is None:
            return candidate
        _log.warning(
            "unit %s differs from the reference (%s); falling back to a slower one",
            candidate,
            difference,
        )
    raise RuntimeError("[dispatch] some unit must equal the reference, got none that does")


def _has_cuda() -> bool:
    """Whether MLX is here with a CUDA device, and nobody asked for a CPU unit by its variable."""
    if os.environ.get(UNIT_VARIABLE, "auto") not in ("", "auto"):
        return False
    try:
        import mlx.core as mx
    except ImportError:
        return False
    return bool(mx.cuda.is_available())


def _cuda_backend(
    program: Program,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> Backend:
    # Imported late: most machines have neither the device nor a reason to load its code.
    from isobatch_kernels.cuda_backend import CudaBackend, CudaLimits

    limits = CudaLimits(num_blocks, block_size, max_num_seqs, max_num_batched_tokens)
    return CudaBackend(program, limits)


def create_backend(
    program: Program,
    *,
    num_blocks: int,
    block_size: int = 16,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    backend: str = "auto",
    unit: str = "auto",
    num_threads: int = 0,
) -> Backend:
    """Builds the backend that runs `program`.

    Args:
        program: the model. Its weights are repacked and may be freed afterwards.
        num_blocks: blocks of the key/value cache.
        block_size: positions of a block; 16.
        max_num_seqs: most token rows of a step.
        max_num_batched_tokens: most tokens of a step.
        backend: "auto", "cpu" or "cuda". "auto" means CUDA where this MLX has a device, else CPU.
        unit: "auto", "reference", "scalar", "avx2", "vnni" or "neon".
        num_threads: threads that share a step; 0 for the number of usable CPUs.

    Raises:
        ValueError: an argument or the program does not fit.
    """
    if backend not in BACKENDS:
        known = ", ".join(BACKENDS)
        raise ValueError(f"[dispatch] backend must be one of {known}, got {backend!r}")
    if block_size != 16:
        raise ValueError(f"[dispatch] block_size must be 16, got {block_size}")
    for name, value in (
        ("num_blocks", num_blocks),
        ("max_num_seqs", max_num_seqs),
        ("max_num_batched_tokens", max_num_batched_tokens),
    ):
        if value < 1:
            raise ValueError(f"[dispatch] {name} must be positive, got {value}")
    if num_threads < 0:
        raise ValueError(f"[dispatch] num_threads must not be negative, got {num_threads}")
    if backend == "cuda" or (backend == "auto" and unit == "auto" and _has_cuda()):
        return _cuda_backend(program, num_blocks, block_size, max_num_seqs, max_num_batched_tokens)
    limits = CpuLimits(num_blocks, block_size, max_num_seqs, max_num_batched_tokens, num_threads)
    return CpuBackend(program, limits, unit=choose_unit(unit))
