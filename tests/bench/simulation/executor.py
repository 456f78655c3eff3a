"""The simulated executor: a machine's times, a cache's blocks, answers that were fixed before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from scheduler_service.core import (
    KvCounts,
    RequestId,
    SampledRow,
    SequenceOpened,
    SequenceOpening,
    TokenRowBatch,
)
from tests.bench.simulation.machine import Machine
from tests.bench.simulation.prefix_store import PrefixStore

# Simulated tokens are bytes.
_SAMPLED = tuple(map(SampledRow, range(256)))

Outputs: TypeAlias = Mapping[RequestId, tuple[Sequence[int], int]]


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """What came of a step; `sampled` is None where the cache had no room for it."""

    seconds: float
    sampled: dict[RequestId, SampledRow] | None
    counts: KvCounts


class SimulatedExecutor:
    """Runs batches in no time and says how long they would have taken."""

    def __init__(self, machine: Machine, num_blocks: int, block_size: int) -> None:
        """Start with an empty cache."""
        self._machine = machine
        self.store = PrefixStore(num_blocks, block_size)
        self.num_cached_tokens = 0
        self.num_computed_tokens = 0

    def open(self, openings: Iterable[SequenceOpening]) -> list[SequenceOpened]:
        """Open sequences and say what is cached of them."""
        answers = []
        for each in openings:
            num_cached = self.store.open(each.sequence_id, each.cache_salt, each.token_ids)
            self.num_cached_tokens += num_cached
            answers.append(
                SequenceOpened(each.request_id, each.sequence_id, each.generation, num_cached)
            )
        return answers

    def run(self, batch: TokenRowBatch, outputs: Outputs) -> StepAnswer:
        """Run a batch; `outputs` are each request's answer, and the length of its prompt."""
        self.store.release(batch.released_sequence_ids)
        if not self.store.grow({row.sequence_id: row.token_ids for row in batch.rows}):
            return StepAnswer(0.0, None, self.store.counts())
        sampled = {}
        for row in batch.rows:
            self.num_computed_tokens += len(row.token_ids)
            for wanted in row.wanted:
                tokens, length = outputs[row.request_id]
                sampled[row.request_id] = _SAMPLED[tokens[wanted.drawn_position - length]]
        return StepAnswer(self._machine.step_seconds(batch), sampled, self.store.counts())
