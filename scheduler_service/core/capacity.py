"""Counting blocks of the executor's pool.

The scheduler never sees a block's id: it counts what its sequences need at most. Under prefix
sharing the executor may hold fewer, which is the safe side.
"""

from __future__ import annotations


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold `num_tokens` positions of one sequence."""
    return -(-num_tokens // block_size)


class BlockBudget:
    """Blocks in use while one step is planned.

    Attributes:
        ceiling: Most blocks that may be in use.
        num_used: Blocks in use, growth of the planned rows included.
    """

    __slots__ = ("_block_size", "ceiling", "num_used")

    def __init__(self, block_size: int, ceiling: int) -> None:
        self._block_size = block_size
        self.ceiling = ceiling
        self.num_used = 0

    def hold(self, num_tokens: int) -> None:
        """Count the blocks of a sequence that already has `num_tokens` positions."""
        self.num_used += blocks_for(num_tokens, self._block_size)

    def give_back(self, num_tokens: int) -> None:
        """Stop counting the blocks of such a sequence."""
        self.num_used -= blocks_for(num_tokens, self._block_size)

    def num_fitting(self, num_tokens: int, num_more: int) -> int:
        """Return how many of `num_more` positions a sequence of `num_tokens` can still get."""
        spare = self.ceiling - self.num_used
        room = (blocks_for(num_tokens, self._block_size) + spare) * self._block_size - num_tokens
        return max(0, min(num_more, room))

    def grow(self, num_tokens: int, num_more: int) -> None:
        """Count the growth of a sequence of `num_tokens` by `num_more` positions."""
        self.num_used += blocks_for(num_tokens + num_more, self._block_size) - blocks_for(
            num_tokens, self._block_size
        )
