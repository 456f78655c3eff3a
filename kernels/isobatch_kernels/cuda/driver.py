"""An NVIDIA GPU through the driver and NVRTC (package cuda-bindings)."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from isobatch_kernels.cuda.compiler import compile_kernel, compile_text
from isobatch_kernels.cuda.device import Argument, Blocks, Chip, KernelKey

_OLDEST: Final = 80  # compute capability 8.0: asynchronous copies and warp reductions
_EARLY_FROM: Final = 90  # launches that begin before the one in front of them has ended
_CLUSTERS_FROM: Final = 90  # blocks that reach each other's shared memory
_CLUSTERS: Final = (2, 4, 8)
_DEFAULT_SHARED_MEMORY: Final = 48 * 1024
_COMPILERS: Final = min(32, os.cpu_count() or 1)
_RUNS: Final = 5  # of a graph that is timed, after one that is not


@functools.cache
def _driver() -> Any:
    return importlib.import_module("cuda.bindings.driver")


def _call(name: str, *arguments: Any) -> Any:
    """Calls a function of the driver; raises RuntimeError for its errors."""
    error, *results = getattr(_driver(), name)(*arguments)
    if error.value:
        raise RuntimeError(f"[cuda] {name} must succeed, got {error.name}")
    return results[0] if len(results) == 1 else None


def cuda_error() -> str | None:
    """Why no NVIDIA GPU can be used; None where one can."""
    try:
        _call("cuInit", 0)
        if _call("cuDeviceGetCount") < 1:
            return "no NVIDIA GPU"
        capability = _capability(_call("cuDeviceGet", 0))
    except ImportError:
        return "no package cuda-bindings (the extra `cuda`)"
    except RuntimeError as error:  # no driver, or one that fails
        return str(error).splitlines()[0]
    return None if capability >= _OLDEST else f"compute capability {capability / 10}"


def _attribute(device: Any, name: str) -> int:
    kind = getattr(_driver().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(_call("cuDeviceGetAttribute", kind, device))


def _capability(device: Any) -> int:
    major, minor = (_attribute(device, f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
    return 10 * major + minor


class DriverDevice:
    """The first GPU; implements `device.Device`."""

    def __init__(self) -> None:
        """Opens the device.

        Raises:
            RuntimeError: there is none, or it is too old.
        """
        missing = cuda_error()
        if missing is not None:
            raise RuntimeError(f"[cuda] backend cuda needs an NVIDIA GPU, got {missing}")
        driver = _driver()
        self._device = _call("cuDeviceGet", 0)
        self._context = _call("cuDevicePrimaryCtxRetain", self._device)
        self.enter()
        self.capability = _capability(self._device)
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._stream = _call("cuStreamCreate", flags)
        self._copies = _call("cuStreamCreate", flags)
        timing = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self._events = [_call("cuEventCreate", timing) for _ in range(2)]
        self._clock = [_call("cuEventCreate", 0) for _ in range(2)]
        self._kernels: dict[KernelKey, Any] = {}
        self._modules: list[Any] = []
        self._config = driver.CUlaunchConfig()
        self._config.hStream = self._stream
        self._attributes: dict[tuple[bool, int], list[Any]] = {}
        self._chip = Chip(
            _attribute(self._device, "MULTIPROCESSOR_COUNT"),
            _attribute(self._device, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            self._clusters(),
        )
        self._words = (ctypes.c_uint64 * 24)()
        first, size = ctypes.addressof(self._words), ctypes.sizeof(ctypes.c_uint64)
        self._pointers = (ctypes.c_void_p * 24)(*(first + size * i for i in range(24)))

    @property
    def name(self) -> str:
        """The GPU in words."""
        return str(_call("cuDeviceGetName", 256, self._device).split(b"\0")[0].decode())

    @property
    def chip(self) -> Chip:
        """Sizes."""
        return self._chip

    @property
    def stream(self) -> Any:
        """Where the work goes, for measurements."""
        return self._stream

    def enter(self) -> None:
        """Makes the device the calling thread's."""
        _call("cuCtxSetCurrent", self._context)

    def _clusters(self) -> tuple[int, int, int]:
        """How many clusters of 2, 4, 8 of the largest blocks run at a time."""
        if self.capability < _CLUSTERS_FROM:
            return 0, 0, 0
        memory = _attribute(self._device, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        key = KernelKey("probe", (), memory)
        text = 'extern "C" __global__ void probe() {}'
        self._load(key, compile_text(key.name, text, self.capability))
        counts = []
        for size in _CLUSTERS:
            config = _driver().CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = 1, 1, size
            config.blockDimX, config.blockDimY, config.blockDimZ = 32, 1, 1
            config.sharedMemBytes = memory
            config.hStream = self._stream
            config.attrs = self._launch_attributes(early=False, cluster=size)
            config.numAttrs = 1
            function = self._kernels[key]
            counts.append(int(_call("cuOccupancyMaxActiveClusters", function, config)))
        return counts[0], counts[1], counts[2]

    def _launch_attributes(self, *, early: bool, cluster: int) -> list[Any]:
        known = self._attributes.get((early, cluster))
        if known is not None:
            return known
        driver, wanted = _driver(), []
        names = driver.CUlaunchAttributeID
        if early:
            value = driver.CUlaunchAttributeValue()
            value.programmaticStreamSerializationAllowed = 1
            wanted.append((names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, value))
        if cluster > 1:
            value = driver.CUlaunchAttributeValue()
            size = value.clusterDim
            size.x, size.y, size.z = 1, 1, cluster
            wanted.append((names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value))
        made = []
        for name, value in wanted:
            attribute = driver.CUlaunchAttribute()
            attribute.id, attribute.value = name, value
            made.append(attribute)
        self._attributes[early, cluster] = made
        return made

    # ------------------------------------------------------------------ memory

    def allocate(self, size: int) -> int:
        """Plain device memory."""
        try:
            return int(_call("cuMemAlloc", max(size, 1)))
        except RuntimeError as error:
            raise MemoryError(f"[cuda] {size} bytes must fit the GPU, got {error}") from error

    def free(self, address: int) -> None:
        """Waits for the work that may use it."""
        self.synchronize()
        _call("cuMemFree", address)

    def pinned(self, size: int) -> npt.NDArray[np.int32]:
        """Page-locked, mapped at the same address."""
        flags = _driver().CU_MEMHOSTALLOC_DEVICEMAP | _driver().CU_MEMHOSTALLOC_PORTABLE
        address = int(_call("cuMemHostAlloc", 4 * size, flags))
        memory = (ctypes.c_int32 * size).from_address(address)
        return np.ctypeslib.as_array(memory)

    def free_pinned(self, array: npt.NDArray[np.int32]) -> None:
        """Waits for the work that may use it."""
        self.synchronize()
        _call("cuMemFreeHost", array.ctypes.data)

    def upload(self, address: int, array: npt.NDArray[Any]) -> None:
        """From ordinary memory, in order with the work."""
        if array.nbytes:
            _call("cuMemcpyHtoDAsync", address, array.ctypes.data, array.nbytes, self._stream)
            self.synchronize()

    def download(self, address: int, array: npt.NDArray[Any]) -> None:
        """On a stream of its own, so that a step in flight is not waited for."""
        if array.nbytes:
            _call("cuMemcpyDtoHAsync", array.ctypes.data, address, array.nbytes, self._copies)
            _call("cuStreamSynchronize", self._copies)

    def clear(self, address: int, size: int) -> None:
        """In order with the work."""
        _call("cuMemsetD8Async", address, 0, size, self._stream)

    # ------------------------------------------------------------------ kernels

    def compile(self, keys: Sequence[KernelKey]) -> None:
        """NVRTC in several threads; what was compiled before comes from disk."""
        missing = [key for key in dict.fromkeys(keys) if key not in self._kernels]
        if len(missing) == 1:
            self._load(missing[0], compile_kernel(missing[0], self.capability))
        elif missing:
            with ThreadPoolExecutor(_COMPILERS) as pool:
                compiled = pool.map(lambda key: compile_kernel(key, self.capability), missing)
                for key, cubin in zip(missing, compiled, strict=True):
                    self._load(key, cubin)

    def _load(self, key: KernelKey, cubin: bytes) -> None:
        module = _call("cuModuleLoadData", cubin)
        self._modules.append(module)
        function = _call("cuModuleGetFunction", module, key.name.encode())
        if key.shared_memory > _DEFAULT_SHARED_MEMORY // 2:  # with room for a kernel's own arrays
            attribute = _driver().CUfunction_attribute
            largest = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _call("cuFuncSetAttribute", function, largest, key.shared_memory)
        self._kernels[key] = function

    def launch(
        self,
        key: KernelKey,
        blocks: Blocks,
        threads: int,
        arguments: Sequence[Argument],
        *,
        early: bool,
    ) -> None:
        """Arguments lie side by side in 8 bytes each."""
        function = self._kernels.get(key)
        if function is None:
            self.compile([key])
            function = self._kernels[key]
        for i, argument in enumerate(arguments):
            self._words[i] = _bits(argument) if isinstance(argument, float) else argument
        config = self._config
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = key.shared_memory
        attributes = self._launch_attributes(
            early=early and self.capability >= _EARLY_FROM, cluster=key.cluster
        )
        config.attrs = attributes
        config.numAttrs = len(attributes)
        error = _driver().cuLaunchKernelEx(config, function, ctypes.addressof(self._pointers), 0)[0]
        if error.value:
            raise RuntimeError(f"[cuda] kernel {key.name} must start, got {error.name}")

    # ------------------------------------------------------------------ graphs and order

    def begin_recording(self) -> None:
        """Relaxed: other threads and allocations are not disturbed."""
        mode = _driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        _call("cuStreamBeginCapture", self._stream, mode)

    def end_recording(self) -> Any:
        """An executable graph."""
        graph = _call("cuStreamEndCapture", self._stream)
        try:
            return _call("cuGraphInstantiate", graph, 0)
        finally:
            _call("cuGraphDestroy", graph)

    def replay(self, graph: Any) -> None:
        """One launch for all."""
        _call("cuGraphLaunch", graph, self._stream)

    def seconds(self, graph: Any) -> float:
        """Between two events."""
        begin, end = self._clock
        times = []
        for _ in range(_RUNS + 1):
            _call("cuEventRecord", begin, self._stream)
            self.replay(graph)
            _call("cuEventRecord", end, self._stream)
            _call("cuEventSynchronize", end)
            times.append(_call("cuEventElapsedTime", begin, end) / 1e3)
        return float(sorted(times[1:])[_RUNS // 2])

    def drop(self, graph: Any) -> None:
        """A running one is freed when it ends."""
        _call("cuGraphExecDestroy", graph)

    def mark(self, slot: int) -> None:
        """An event behind the work so far."""
        _call("cuEventRecord", self._events[slot], self._stream)

    def wait_for(self, slot: int) -> None:
        """Other threads of Python run meanwhile."""
        _call("cuEventSynchronize", self._events[slot])

    def synchronize(self) -> None:
        """Waits for the stream."""
        _call("cuStreamSynchronize", self._stream)

    def close(self) -> None:
        """Kernels, streams and the context; memory is its owners'."""
        self.synchronize()
        for event in [*self._events, *self._clock]:
            _call("cuEventDestroy", event)
        for module in self._modules:
            _call("cuModuleUnload", module)
        self._kernels.clear()
        self._modules.clear()
        for stream in (self._stream, self._copies):
            _call("cuStreamDestroy", stream)
        _call("cuDevicePrimaryCtxRelease", self._device)


def _bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])
