"""Counting blocks of the executor's pool.

The scheduler never sees a block's id. It has two lower bounds of what is left, and counts on the
larger one:
- its own sums: all blocks, less those of each sequence as if nobody shared any;
- the executor's last counts: free and evictable blocks. They count a shared block once, but say
  nothing yet of sequences that are given back with the next batch. Of such a sequence's blocks at
  least those come free that exceed all shared ones.
"""

from __future__ import annotations


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold `num_tokens` positions of one sequence."""
    return -(-num_tokens // block_size)


class BlockBudget:
    """Blocks that rows may still take while one step is planned."""

    __slots__ = ("_block_size", "_counted", "_num_shared", "_summed")

    def __init__(
        self, block_size: int, summed: int, counted: int | None = None, num_shared: int = 0
    ) -> None:
        """Start from the spare blocks by own sums and by the executor's counts (None: unknown).

        `num_shared` is the executor's count of blocks with more than one holder.
        """
        self._block_size = block_size
        self._summed = summed
        self._counted = summed if counted is None else counted
        self._num_shared = num_shared if counted is not None else 0

    @property
    def num_spare(self) -> int:
        """Blocks that are certainly left; below 0 when a ceiling was lowered under what is held."""
        return max(self._summed, self._counted)

    def give_back(self, num_tokens: int) -> None:
        """Count on what comes free when a sequence of `num_tokens` positions is given back."""
        num_blocks = blocks_for(num_tokens, self._block_size)
        self._summed += num_blocks
        self._counted += max(0, num_blocks - self._num_shared)

    def num_fitting(
        self, num_tokens: int, num_more: int, num_held: int = 0, num_kept: int = 0
    ) -> int:
        """Return how many of `num_more` positions a sequence of `num_tokens` can still get.

        It has blocks for `num_held` positions, where these are more; `num_kept` spare blocks are
        for others.
        """
        num_blocks = blocks_for(max(num_tokens, num_held), self._block_size)
        num_blocks += max(0, self.num_spare - num_kept)
        return min(num_more, num_blocks * self._block_size - num_tokens)

    def grow(self, num_tokens: int, num_more: int, num_held: int = 0) -> None:
        """Count the growth of a sequence of `num_tokens` by `num_more` positions.

        It has blocks for `num_held` positions, where these are more.
        """
        size, end = self._block_size, num_tokens + num_more
        held = blocks_for(max(num_tokens, num_held), size)
        # Seldom, from one token to the next.
        if end > held * size:
            self.take(blocks_for(end, size) - held)

    def take(self, num_blocks: int) -> None:
        """Count blocks as taken."""
        self._summed -= num_blocks
        self._counted -= num_blocks
