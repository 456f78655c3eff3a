"""Runs a compiled kernel over numpy arrays."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.metal_on_cpu.harness.compiler import runtime
from tests.metal_on_cpu.harness.errors import MetalError

FORWARD, REVERSE, RANDOM = 0, 1, 2


class _Options(ctypes.Structure):
    _fields_ = [
        ("check", ctypes.c_int32),
        ("order", ctypes.c_int32),
        ("flush_subnormals", ctypes.c_int32),
        ("seed", ctypes.c_uint32),
    ]


class _Counts(ctypes.Structure):
    _fields_ = [
        ("switches", ctypes.c_uint64),
        ("simdgroup_ops", ctypes.c_uint64),
        ("barriers", ctypes.c_uint64),
        ("threadgroup_bytes", ctypes.c_uint64),
    ]


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How a launch is scheduled and judged."""

    order: int = FORWARD  # of groups, simdgroups and lanes
    seed: int = 1
    sum_order: int = 0  # 0..3, see shim/emulation/simdgroup.h
    flush_subnormals: bool = False
    check: bool = False


@dataclass(slots=True)
class LaunchStats:
    """What a launch did."""

    seconds: float = 0.0
    switches: int = 0
    simdgroup_ops: int = 0
    barriers: int = 0
    threadgroup_bytes: int = 0
    threads_per_group: int = 0
    unwritten_bytes: dict[str, int] = field(default_factory=dict)  # by output; check mode only


@dataclass(frozen=True, slots=True)
class Binding:
    """One buffer argument; a writable array is filled in place."""

    name: str
    array: npt.NDArray[Any]
    writable: bool


def launch(
    entry: Any,
    bindings: Sequence[Binding],
    grid: Sequence[int],
    threadgroup: Sequence[int],
    options: LaunchOptions,
) -> LaunchStats:
    """Runs `grid` threads in groups of `threadgroup`; raises MetalError for whatever went wrong."""
    if min(*grid, *threadgroup) < 1:
        raise MetalError(
            f"[launch] sizes must be positive, got {tuple(grid)}, {tuple(threadgroup)}"
        )
    library = runtime()
    library.emu_buffers_clear()
    pointers = (ctypes.c_void_p * (len(bindings) + 1))()
    for i, binding in enumerate(bindings):
        array = np.ascontiguousarray(binding.array)
        align = 16 if array.nbytes % 16 == 0 else array.dtype.itemsize
        pointers[i] = library.emu_buffer_add(
            array.nbytes, align, int(binding.writable), binding.name.encode()
        )
        ctypes.memmove(pointers[i] or 0, array.ctypes.data, array.nbytes)
    library.emu_buffers_seal(int(options.check))
    ctypes.c_int.in_dll(library, "emu_sum_order").value = options.sum_order
    native = _Options(
        int(options.check), options.order, int(options.flush_subnormals), options.seed & 0xFFFFFFFF
    )
    counts, error = _Counts(), ctypes.create_string_buffer(1024)
    begin = time.perf_counter()
    failed = library.emu_run(
        entry,
        pointers,
        (ctypes.c_uint * 3)(*grid),
        (ctypes.c_uint * 3)(*threadgroup),
        ctypes.byref(native),
        ctypes.byref(counts),
        error,
        ctypes.c_size_t(len(error)),
    )
    seconds = time.perf_counter() - begin
    stats = LaunchStats(
        seconds=seconds,
        switches=counts.switches,
        simdgroup_ops=counts.simdgroup_ops,
        barriers=counts.barriers,
        threadgroup_bytes=counts.threadgroup_bytes,
        threads_per_group=int(np.prod(np.minimum(threadgroup, grid))),
    )
    for i, binding in enumerate(bindings):
        if binding.writable:
            ctypes.memmove(binding.array.ctypes.data, pointers[i] or 0, binding.array.nbytes)
            if options.check:
                stats.unwritten_bytes[binding.name] = library.emu_unwritten(i)
    library.emu_buffers_clear()
    if failed:
        raise MetalError(f"[launch] {error.value.decode()}")
    return stats
