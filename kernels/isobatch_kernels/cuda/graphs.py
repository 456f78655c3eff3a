"""Recorded launches of step shapes that came before, the least recently used dropped."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Final

from isobatch_kernels.cuda.device import Device

KEPT: Final = 128
_SEEN: Final = 1024


class Graphs:
    """Runs launches, and from a shape's second time on replays them as one graph."""

    def __init__(self, device: Device, kept: int = KEPT) -> None:
        """Keeps at most so many graphs."""
        self._device = device
        self._kept = kept
        self._graphs: OrderedDict[Hashable, Any] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._generation = 0
        self.recorded = 0
        self.replayed = 0

    def __len__(self) -> int:
        """Graphs kept."""
        return len(self._graphs)

    def run(self, shape: Hashable, generation: int, launch: Callable[[], None]) -> None:
        """Does what `launch` does, whose launches depend on the shape and the generation alone."""
        if generation != self._generation:
            self.clear()
            self._generation = generation
        graph = self._graphs.get(shape)
        if graph is None:
            if shape not in self._seen:
                self._remember(shape)
                launch()
                return
            graph = self._record(shape, launch)
        self._graphs.move_to_end(shape)
        self.replayed += 1
        self._device.replay(graph)

    def clear(self) -> None:
        """Drops every graph."""
        while self._graphs:
            self._device.drop(self._graphs.popitem()[1])

    def _remember(self, shape: Hashable) -> None:
        self._seen[shape] = None
        if len(self._seen) > _SEEN:
            self._seen.popitem(last=False)

    def _record(self, shape: Hashable, launch: Callable[[], None]) -> Any:
        self._device.begin_recording()
        try:
            launch()
        except BaseException:
            self._device.drop(self._device.end_recording())
            raise
        graph = self._device.end_recording()
        self._graphs[shape] = graph
        self.recorded += 1
        if len(self._graphs) > self._kept:
            self._device.drop(self._graphs.popitem(last=False)[1])
        return graph
