"""Times launches on the GPU by its own events around the replays of a recorded graph."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from isobatch_kernels.cuda.compiler import compile_text
from isobatch_kernels.cuda.driver import DriverDevice


def _driver() -> Any:
    return importlib.import_module("cuda.bindings.driver")


def _call(name: str, *arguments: Any) -> Any:
    error, *results = getattr(_driver(), name)(*arguments)
    if error.value:
        raise RuntimeError(f"[bench] {name} must succeed, got {error.name}")
    return results[0] if results else None


def graph_seconds(device: DriverDevice, launch: Callable[[], None], repeats: int = 7) -> float:
    """Median seconds of what `launch` launches, replayed as one graph."""
    launch()
    device.synchronize()
    device.begin_recording()
    launch()
    graph = device.end_recording()
    first, last = _call("cuEventCreate", 0), _call("cuEventCreate", 0)
    times = []
    for _ in range(repeats + 2):
        _call("cuEventRecord", first, device.stream)
        device.replay(graph)
        _call("cuEventRecord", last, device.stream)
        _call("cuEventSynchronize", last)
        times.append(_call("cuEventElapsedTime", first, last) / 1e3)
    device.drop(graph)
    return float(np.median(times[2:]))


_COPY: Final = """
extern "C" __global__ void __launch_bounds__(512) copy(const uint4* from, uint4* to) {
  const size_t at = (size_t)blockIdx.x * 2048 + threadIdx.x;
  uint4 v[4];
  for (int i = 0; i < 4; i++) v[i] = from[at + 512 * i];
  for (int i = 0; i < 4; i++) to[at + 512 * i] = v[i];
}
"""


def copy_bandwidth(device: DriverDevice, size: int = 1 << 32) -> dict[str, int]:
    """GB/s of copies on the device, bytes read and written both counted: the driver's and ours."""
    source, to = device.allocate(size), device.allocate(size)
    device.clear(source, size)
    cubin = compile_text("copy", _COPY, device.capability)
    module = _call("cuModuleLoadData", cubin)
    function = _call("cuModuleGetFunction", module, b"copy")
    blocks = size // (16 * 2048)

    def by_driver() -> None:
        _call("cuMemcpyDtoDAsync", to, source, size, device.stream)

    def by_kernel() -> None:
        pointers = ((source, to), (ctypes.c_void_p, ctypes.c_void_p))
        grid = (blocks, 1, 1, 512, 1, 1)
        _call("cuLaunchKernel", function, *grid, 0, device.stream, pointers, 0)

    rates = {
        name: round(2 * size / graph_seconds(device, copy) / 1e9)
        for name, copy in (("driver", by_driver), ("kernel", by_kernel))
    }
    _call("cuModuleUnload", module)
    device.free(source)
    device.free(to)
    return rates
