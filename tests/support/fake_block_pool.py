"""A synchronous stand-in for the executor: it owns blocks and knows contexts only from its rows.

It checks the contract harder than a real executor would: every row continues its sequence, every
release names an open sequence once, and the pool is counted after every single row.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from scheduler_service.core import RequestId, SampledRow, SequenceId, TokenRowBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

VOCAB_SIZE = 13


def next_token(token_ids: Sequence[int]) -> int:
    """Return the toy model's token, which depends on the whole context and on its order."""
    return zlib.crc32(bytes(token_ids)) % VOCAB_SIZE


def solo_run(
    prompt: Sequence[int], max_tokens: int, stop_token_ids: frozenset[int] = frozenset()
) -> list[int]:
    """Return the tokens of a request that runs alone, computed without any scheduler."""
    known = list(prompt)
    output: list[int] = []
    while len(output) < max_tokens:
        output.append(next_token(known))
        known.append(output[-1])
        if output[-1] in stop_token_ids:
            break
    return output


class FakeBlockPool:
    """Runs batches against a pool of `num_blocks` blocks.

    Attributes:
        tokens: Cached tokens of each open sequence.
        num_computed_tokens: Tokens computed since the start.
    """

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._last_step_id = 0
        self._generations: dict[SequenceId, int] = {}
        self.tokens: dict[SequenceId, list[int]] = {}
        self.num_computed_tokens = 0

    def restart(self) -> None:
        """Lose everything, as a new process would."""
        self._last_step_id = 0
        self._generations.clear()
        self.tokens.clear()

    def run(
        self, batch: TokenRowBatch, *, refuse: bool = False
    ) -> dict[RequestId, SampledRow] | None:
        """Run a batch; None means NO_CAPACITY, which also happens where the rows do not fit."""
        assert batch.step_id == self._last_step_id + 1, "step ids rise by one"
        self._last_step_id = batch.step_id
        for opening in batch.openings:
            known = self._generations.get(opening.sequence_id, -1)
            assert opening.generation > known, "a generation is opened once"
            assert opening.sequence_id not in self.tokens, "opened while another one is open"
            self._generations[opening.sequence_id] = opening.generation
            self.tokens[opening.sequence_id] = []
        for sequence_id in batch.released_sequence_ids:
            assert sequence_id in self.tokens, "released twice or never opened"
            del self.tokens[sequence_id]
        if refuse or not self._fits(batch):
            return None
        sampled: dict[RequestId, SampledRow] = {}
        for row in batch.rows:
            cached = self.tokens[row.sequence_id]
            assert self._generations[row.sequence_id] == row.generation, "a stale generation"
            assert len(cached) == row.start_position, "a row continues its sequence"
            for offset, token_id in enumerate(row.token_ids):
                cached.append(token_id)
                if offset in {wanted.offset for wanted in row.wanted}:
                    sampled[row.request_id] = SampledRow(next_token(cached))
            assert self._num_used() <= self._num_blocks, "the pool holds after every row"
            self.num_computed_tokens += len(row.token_ids)
        return sampled

    def _num_used(self) -> int:
        return sum(-(-len(cached) // self._block_size) for cached in self.tokens.values())

    def _fits(self, batch: TokenRowBatch) -> bool:
        lengths = {sequence_id: len(cached) for sequence_id, cached in self.tokens.items()}
        for row in batch.rows:
            lengths[row.sequence_id] += len(row.token_ids)
        needed = sum(-(-length // self._block_size) for length in lengths.values())
        return needed <= self._num_blocks
