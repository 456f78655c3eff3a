"""A synchronous stand-in for the executor: it owns blocks and knows contexts only from its rows.

It checks the contract harder than a real executor would: a sequence is opened before its rows and
given back before it is opened again, and every row continues it.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from scheduler_service.core import (
    LITERAL,
    RequestId,
    SampledRow,
    SequenceId,
    SequenceOpened,
    SequenceOpening,
    TokenRowBatch,
)
from tests.support.fake_prefix_cache import FakePrefixCache

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
        cache: Blocks and tokens of open sequences.
        num_computed_tokens: Tokens computed since the start.
        num_cached_tokens: Tokens found in the cache since the start.
    """

    def __init__(self, block_size: int, num_blocks: int, *, shares: bool = True) -> None:
        """Start empty; with `shares` False no prefix is ever found."""
        self._last_step_id = 0
        self._generations: dict[SequenceId, int] = {}
        self.cache = FakePrefixCache(block_size, num_blocks, shares)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        # Of the last batch, by wanted position; None where it did not run.
        self._chosen: list[int] | None = None
        self.has_source = True

    def restart(self) -> None:
        """Lose everything, as a new process would."""
        self._last_step_id = 0
        self._chosen = None
        self._generations.clear()
        self.cache.clear()

    def open(
        self, openings: Sequence[SequenceOpening], most: int | None = None
    ) -> list[SequenceOpened]:
        """Open sequences, each with at most `most` cached tokens; a repeat changes nothing."""
        return [self._open(opening, most) for opening in openings]

    def _open(self, opening: SequenceOpening, most: int | None) -> SequenceOpened:
        name, generation = opening.sequence_id, opening.generation
        known = self._generations.get(name, -1)
        assert generation >= known, "a generation is never opened after a later one"
        if generation > known or name not in self.cache:
            assert generation > known, "opened again after it was given back"
            assert name not in self.cache, "opened while another generation is open"
            self._generations[name] = generation
            allowed = opening.max_cached_tokens
            self.num_cached_tokens += self.cache.open(
                name, opening.cache_salt, opening.token_ids,
                allowed if most is None else min(most, allowed),
            )  # fmt: skip
        num_cached = len(self.cache.tokens(name))
        return SequenceOpened(opening.request_id, name, generation, num_cached)

    def run(
        self, batch: TokenRowBatch, *, refuse: bool = False
    ) -> dict[RequestId, SampledRow] | None:
        """Run a batch; None means NO_CAPACITY, which also happens where the rows do not fit.

        None as well where a row takes its token from a batch that did not run; `has_source` is
        then False.
        """
        assert batch.step_id == self._last_step_id + 1, "step ids rise by one"
        self._last_step_id = batch.step_id
        assert len(set(batch.released_sequence_ids)) == len(batch.released_sequence_ids)
        for sequence_id in batch.released_sequence_ids:
            self.cache.release(sequence_id)
        chosen, self._chosen = self._chosen, None
        sources = [row for row in batch.rows if row.source != LITERAL]
        self.has_source = not sources or chosen is not None
        if not self.has_source:
            return None
        for row in batch.rows:
            assert row.sequence_id in self.cache, "opened first"
            assert self._generations[row.sequence_id] == row.generation, "a stale generation"
            cached = self.cache.tokens(row.sequence_id)
            assert len(cached) == row.start_position, "a row continues its sequence"
        new_tokens = {int(row.sequence_id): row.token_ids for row in batch.rows}
        for row in sources:
            assert row.source.step_id == batch.step_id - 1, "the step before"
            assert row.token_ids == (0,), "one token, which is not known"
            assert chosen is not None
            new_tokens[int(row.sequence_id)] = (chosen[row.source.wanted_index],)
        num_drafts = {int(row.sequence_id): row.num_draft_tokens for row in batch.rows}
        if refuse or not self.cache.grow(new_tokens, num_drafts):
            return None
        sampled: dict[RequestId, SampledRow] = {}
        self._chosen = []
        for row in batch.rows:
            cached = self.cache.tokens(row.sequence_id)
            drawn: list[int] = []
            for wanted in row.wanted:
                context = cached[: row.start_position + wanted.offset + 1]
                drawn.append(next_token(context))
                self._chosen.append(drawn[-1])
                if drawn != list(row.draft_token_ids[: len(drawn)]):
                    break
            if drawn:
                sampled[row.request_id] = SampledRow(drawn[-1], None, tuple(drawn[:-1]))
                num_refused = row.num_draft_tokens - len(drawn) + 1
                self.cache.take_back(row.sequence_id, len(cached) - num_refused)
            self.num_computed_tokens += len(row.token_ids)
        return sampled
