"""Memory that steps work in: named, kept between steps, and grown when a step needs more."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from isobatch_kernels.cuda.device import Device

SLOTS = 2  # steps that may be under way at once


def power_of_two(value: int) -> int:
    """The smallest that is at least `value`, and 1."""
    return 1 << max(0, value - 1).bit_length()


class Scratch:
    """Buffers by name. What outgrew its buffer is freed only when no step can use it any more."""

    def __init__(self, device: Device) -> None:
        """Allocates nothing yet."""
        self._device = device
        self._held: dict[str, tuple[int, int]] = {}  # address, bytes
        self._pinned: dict[str, npt.NDArray[np.int32]] = {}
        self._retired: list[tuple[int, Callable[[], None]]] = []  # step, how to free
        self._steps = 0
        self.generation = 0  # changes when an address does

    def next_step(self) -> None:
        """A step begins: frees what the step before the last one may have used."""
        self._steps += 1
        while self._retired and self._retired[0][0] + SLOTS < self._steps:
            self._retired.pop(0)[1]()

    def get(self, name: str, size: int) -> int:
        """Address of at least `size` bytes; contents are lost when it grows."""
        address, held = self._held.get(name, (0, 0))
        if held >= size:
            return address
        if address:
            self._retired.append((self._steps, partial(self._device.free, address)))
        size = -(-size // 256) * 256
        address = self._device.allocate(size)
        self._held[name] = (address, size)
        self.generation += 1
        return address

    def zeros(self, name: str, size: int) -> int:
        """As `get`, of zeros; what uses it leaves zeros behind."""
        generation = self.generation
        address = self.get(name, size)
        if generation != self.generation:
            self._device.clear(address, self._held[name][1])
        return address

    def pinned(self, name: str, words: int) -> npt.NDArray[np.int32]:
        """Memory of the host, of at least so many words; contents are lost when it grows."""
        array = self._pinned.get(name)
        if array is not None and len(array) >= words:
            return array
        if array is not None:
            self._retired.append((self._steps, partial(self._device.free_pinned, array)))
        array = self._device.pinned(power_of_two(max(words, 1024)))
        self._pinned[name] = array
        self.generation += 1
        return array

    def close(self) -> None:
        """Frees everything."""
        for array in self._pinned.values():
            self._device.free_pinned(array)
        for address, _ in self._held.values():
            self._device.free(address)
        for _, free in self._retired:
            free()
        self._pinned.clear()
        self._held.clear()
        self._retired.clear()
