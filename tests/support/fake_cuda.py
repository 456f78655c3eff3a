"""Stands in for cuda.bindings.driver: counts what is made and freed, and runs nothing."""

from __future__ import annotations

import ctypes
from collections import Counter
from types import SimpleNamespace
from typing import Any

SUCCESS = SimpleNamespace(value=0, name="CUDA_SUCCESS")


class FakeDriver:
    """Functions of the driver by name; `errors` names those that fail."""

    CU_MEMHOSTALLOC_DEVICEMAP = 2
    CU_MEMHOSTALLOC_PORTABLE = 1

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.errors: set[str] = set()
        self.live: dict[int, Any] = {}
        self.launches: list[tuple[tuple[int, int, int], int, int]] = []
        self.arguments: list[bytes] = []
        self.CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
        self.CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
        self.CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)
        self.CUlaunchConfig = SimpleNamespace
        self.CUlaunchAttribute = SimpleNamespace
        self.CUlaunchAttributeValue = lambda: SimpleNamespace(clusterDim=SimpleNamespace())
        self.CUlaunchAttributeID = SimpleNamespace(
            CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION=4,
            CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6,
        )
        self.CUfunction_attribute = SimpleNamespace(
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8
        )
        values = {
            "MULTIPROCESSOR_COUNT": 132,
            "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
            "COMPUTE_CAPABILITY_MAJOR": 9,
            "COMPUTE_CAPABILITY_MINOR": 0,
        }
        self.CUdevice_attribute = SimpleNamespace(
            **{f"CU_DEVICE_ATTRIBUTE_{name}": value for name, value in values.items()}
        )

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *arguments: self._call(name, *arguments)

    def _call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        self.calls[name] += 1
        if name in self.errors:
            return (SimpleNamespace(value=1, name="CUDA_ERROR_UNKNOWN"), 0)
        if name in ("cuMemAlloc", "cuMemHostAlloc"):
            memory = ctypes.create_string_buffer(arguments[0])
            self.live[ctypes.addressof(memory)] = memory
            return SUCCESS, ctypes.addressof(memory)
        if name in ("cuMemFree", "cuMemFreeHost"):
            del self.live[arguments[0]]
            return (SUCCESS,)
        if name in ("cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync"):
            to, source, size, _ = arguments
            ctypes.memmove(to, source, size)
            return (SUCCESS,)
        if name == "cuLaunchKernelEx":
            config = arguments[0]
            grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
            self.launches.append((grid, config.blockDimX, config.numAttrs))
            return (SUCCESS,)
        if name == "cuDeviceGetAttribute":
            return SUCCESS, arguments[0]
        if name == "cuDeviceGetName":
            return SUCCESS, b"a fake\0\0"
        if name == "cuEventElapsedTime":
            return SUCCESS, float(len(self.launches))  # later graphs are slower
        if name == "cuOccupancyMaxActiveClusters":
            (attribute,) = arguments[1].attrs
            return SUCCESS, 132 // attribute.value.clusterDim.z
        if name == "cuDeviceGetCount":
            return SUCCESS, 1
        return SUCCESS, name
