"""A device without a GPU: kernels compiled by clang, memory of the host, graphs as lists."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from isobatch_kernels.cuda.device import Argument, Blocks, Chip, KernelKey
from isobatch_kernels.cuda.source import load_kernels

COMPILER = next((name for name in map(shutil.which, ("clang++-19", "clang++")) if name), None)
_HERE = Path(__file__).parent
# kMostBlocks, kMostThreads and kStack of cuda_threads.h.
_MOST_BLOCKS, _MOST_THREADS, _STACK = 8, 1024, 64 * 1024
_LAUNCH = """
static void** arguments;
template <class... A, int... I>
void call_with(void (*kernel)(A...), std::integer_sequence<int, I...>) {
  kernel(*(A*)arguments[I]...);
}
template <class... A>
void call(void (*kernel)(A...)) {
  call_with(kernel, std::make_integer_sequence<int, sizeof...(A)>());
}
extern "C" int launch(const int* blocks, int threads, int memory, int cluster, char* stacks,
                      int launches, void** a) {
  arguments = a;
  return run_blocks(blocks, threads, memory, cluster, stacks, launches, [] { call(%s); });
}
"""


@functools.cache
def _compiled(key: KernelKey, capability: int, folder: Path) -> ctypes.CDLL:
    assert COMPILER is not None
    body = load_kernels()[key.name].body(dict(key.constants))
    source = f'#include "cuda_shim.h"\n{body}{_LAUNCH % key.name}'
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    stem = folder / f"{key.name}-{capability}-{digest}"
    library = stem.with_suffix(".so")
    if library.exists():
        return ctypes.CDLL(str(library))
    # Other processes may want the same one at the same time.
    own = stem.with_name(f"{stem.name}-{os.getpid()}")
    own.with_suffix(".cpp").write_text(source, encoding="utf-8")
    options = ["-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-ffp-contract=off", "-pthread"]
    options.append(f"-DCAPABILITY={capability}")
    files = ["-o", str(own.with_suffix(".so")), str(own.with_suffix(".cpp"))]
    command = [COMPILER, *options, f"-I{_HERE}", *files]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[:3000]
    own.with_suffix(".so").replace(library)
    return ctypes.CDLL(str(library))


@functools.cache
def _stacks() -> npt.NDArray[np.uint8]:
    """Of the threads of one cluster, for all kernels: pages that none touches take no memory."""
    return np.empty(_MOST_BLOCKS * _MOST_THREADS * _STACK, np.uint8)


def shared_folder(base: Path) -> Path:
    """A folder for compiled kernels below pytest's base folder, for all of its processes."""
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cuda"
    folder.mkdir(exist_ok=True)
    return folder


class EmulatedDevice:
    """Implements `device.Device`; new memory holds bytes of ones."""

    name = "a CPU in place of a GPU"
    chip = Chip(132, 227 * 1024, (66, 32, 16))

    def __init__(self, folder: Path, capability: int = 90) -> None:
        """Compiled kernels are kept in `folder`; a `capability` of 80 is a GPU without clusters."""
        self._folder = folder
        self._capability = capability
        if capability < 90:
            self.chip = replace(self.chip, clusters=(0, 0, 0))
        self._memory: dict[int, npt.NDArray[Any]] = {}
        self._recording: list[Callable[[], None]] | None = None
        self._launches: Counter[KernelKey] = Counter()
        self.launched: list[str] = []
        self.graphs = 0

    def enter(self) -> None:
        """There is one thread."""

    def allocate(self, size: int) -> int:
        """With 16 bytes of alignment, as the kernels' loads need."""
        whole = np.full(size + 256, 0xFF, np.uint8)
        skip = -whole.ctypes.data % 256
        address = int(whole.ctypes.data) + skip
        self._memory[address] = whole
        return address

    def free(self, address: int) -> None:
        """What was allocated, once."""
        del self._memory[address]

    def pinned(self, size: int) -> npt.NDArray[np.int32]:
        """Ordinary memory."""
        array = np.full(size, -1, np.int32)
        self._memory[array.ctypes.data] = array
        return array

    def free_pinned(self, array: npt.NDArray[np.int32]) -> None:
        """What was allocated, once."""
        del self._memory[array.ctypes.data]

    def upload(self, address: int, array: npt.NDArray[Any]) -> None:
        """A copy."""
        assert array.flags.c_contiguous
        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def download(self, address: int, array: npt.NDArray[Any]) -> None:
        """A copy."""
        assert array.flags.c_contiguous
        ctypes.memmove(array.ctypes.data, address, array.nbytes)

    def clear(self, address: int, size: int) -> None:
        """Zeros."""
        ctypes.memset(address, 0, size)

    def compile(self, keys: Sequence[KernelKey]) -> None:
        """Only what is launched is compiled: this compiler is slow."""

    def launch(
        self,
        key: KernelKey,
        blocks: Blocks,
        threads: int,
        arguments: Sequence[Argument],
        *,
        early: bool,
    ) -> None:
        """Runs every block, or records it."""
        if self._recording is not None:
            self._recording.append(partial(self._run, key, blocks, threads, tuple(arguments)))
        else:
            self._run(key, blocks, threads, arguments)

    def _run(
        self, key: KernelKey, blocks: Blocks, threads: int, arguments: Sequence[Argument]
    ) -> None:
        self.launched.append(key.name)
        values = [
            ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int64(value)
            for value in arguments
        ]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        grid = (ctypes.c_int * 3)(*blocks)
        assert blocks[2] % key.cluster == 0
        assert key.cluster == 1 or self._capability >= 90
        kernel = _compiled(key, self._capability, self._folder)
        stacks = ctypes.c_void_p(_stacks().ctypes.data)
        launches = self._launches[key]
        self._launches[key] += 1
        sizes = (threads, key.shared_memory, key.cluster)
        result = kernel.launch(grid, *sizes, stacks, launches, pointers)
        assert result != 1, f"{key}: a barrier that not every thread reaches"
        assert result != 2, f"{key}: shared memory past what was asked for is written"
        assert result != 3, f"{key}: a copy is empty or not in pieces of 16 bytes"
        assert result != 4, f"{key}: a block ends before its copies, or sums that are left in it"

    def begin_recording(self) -> None:
        """Launches go to a list."""
        assert self._recording is None
        self._recording = []

    def end_recording(self) -> Any:
        """The list."""
        graph, self._recording = self._recording, None
        self.graphs += 1
        return graph

    def replay(self, graph: Any) -> None:
        """Runs what was recorded."""
        for run in graph:
            run()

    def seconds(self, graph: Any) -> float:
        """Nothing is timed here: the longer list takes longer."""
        return float(len(graph))

    def drop(self, graph: Any) -> None:
        """Counts."""
        self.graphs -= 1

    def mark(self, slot: int) -> None:
        """Everything is done already."""

    def wait_for(self, slot: int) -> None:
        """Everything is done already."""

    def synchronize(self) -> None:
        """Everything is done already."""

    def close(self) -> None:
        """Nothing may be left."""
        assert not self._memory
        assert not self.graphs
