"""What the backend needs of a device: memory, kernels, launches that are recorded and replayed.

`driver.DriverDevice` is an NVIDIA GPU. Addresses are plain integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Blocks = tuple[int, int, int]
Argument = int | float  # an address or a 32-bit integer; or an fp32


@dataclass(frozen=True, slots=True)
class Chip:
    """Sizes of a GPU that tile sizes follow."""

    multiprocessors: int
    shared_memory: int  # bytes that one block may have
    clusters: tuple[int, int, int] = (0, 0, 0)  # of 2, 4, 8 blocks as large as that, at a time


@dataclass(frozen=True, slots=True)
class KernelKey:
    """One compiled kernel."""

    name: str
    constants: tuple[tuple[str, int], ...]
    shared_memory: int  # bytes of dynamic shared memory of every launch

    @property
    def cluster(self) -> int:
        """Blocks of a cluster, along z: the constant of that name, 1 without one."""
        return dict(self.constants).get("CLUSTER", 1)


class Device(Protocol):
    """One GPU. All work is done in order, except `download`, which waits for nothing."""

    @property
    def name(self) -> str:
        """The GPU in words."""
        ...

    @property
    def chip(self) -> Chip:
        """Sizes."""
        ...

    def enter(self) -> None:
        """Makes the device the calling thread's; to be called before anything else."""
        ...

    def allocate(self, size: int) -> int:
        """Address of new memory of so many bytes; raises MemoryError."""
        ...

    def free(self, address: int) -> None:
        """Gives memory back once all work is done."""
        ...

    def pinned(self, size: int) -> npt.NDArray[np.int32]:
        """Memory of the host that kernels read and write at the same address, `size` words."""
        ...

    def free_pinned(self, array: npt.NDArray[np.int32]) -> None:
        """Gives it back once all work is done."""
        ...

    def upload(self, address: int, array: npt.NDArray[Any]) -> None:
        """Copies a contiguous array to the device and waits."""
        ...

    def download(self, address: int, array: npt.NDArray[Any]) -> None:
        """Fills a contiguous array; the work that wrote the memory must be done."""
        ...

    def clear(self, address: int, size: int) -> None:
        """Sets bytes to zero."""
        ...

    def compile(self, keys: Sequence[KernelKey]) -> None:
        """Compiles kernels that are not yet; several at a time."""
        ...

    def launch(
        self,
        key: KernelKey,
        blocks: Blocks,
        threads: int,
        arguments: Sequence[Argument],
        *,
        early: bool,
    ) -> None:
        """Launches a kernel; an `early` one may begin before the one in front of it has ended."""
        ...

    def begin_recording(self) -> None:
        """From here on launches are recorded instead of run."""
        ...

    def end_recording(self) -> Any:
        """A graph of what was recorded."""
        ...

    def replay(self, graph: Any) -> None:
        """Runs a graph."""
        ...

    def seconds(self, graph: Any) -> float:
        """How long a graph takes, by the device's clock: the median of a few runs."""
        ...

    def drop(self, graph: Any) -> None:
        """Frees a graph."""
        ...

    def mark(self, slot: int) -> None:
        """Marks the work so far as that of slot 0 or 1."""
        ...

    def wait_for(self, slot: int) -> None:
        """Waits for the work that was last marked for a slot."""
        ...

    def synchronize(self) -> None:
        """Waits for everything; raises RuntimeError where a kernel failed."""
        ...

    def close(self) -> None:
        """Frees what is left."""
        ...
