"""The blocks of one sequence, in the order of its positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from executor_service.kv_cache.block_pool import BlockId


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold `num_tokens` positions."""
    return -(-num_tokens // block_size)


class BlockTable:
    """Block ids by block index: position p lives in block p // block_size."""

    __slots__ = ("_blocks", "_row")

    def __init__(self) -> None:
        self._blocks: list[BlockId] = []
        # Grows by doubling, so that a step copies one slice and builds nothing.
        self._row: npt.NDArray[np.int32] = np.empty(8, np.int32)

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def blocks(self) -> Sequence[BlockId]:
        """Block ids, in the order of positions."""
        return self._blocks

    @property
    def row(self) -> npt.NDArray[np.int32]:
        """(num_blocks,) int32: the ids as an array; valid until the table grows."""
        return self._row[: len(self._blocks)]

    def extend(self, blocks: Sequence[BlockId]) -> None:
        """Append blocks for the following positions."""
        start, stop = len(self._blocks), len(self._blocks) + len(blocks)
        if stop > len(self._row):
            grown = np.empty(max(stop, 2 * len(self._row)), np.int32)
            grown[:start] = self._row[:start]
            self._row = grown
        self._row[start:stop] = blocks
        self._blocks.extend(blocks)
