"""One executor as an instrument: sequences, and steps whose rows the experiment chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from scheduler_service.core.batch import SequenceOpening, TokenRow, TokenRowBatch, WantedPosition
from scheduler_service.core.params import SamplingParams
from scheduler_service.core.request import RequestId, SequenceId
from scheduler_service.sampling.request import WantedStatistics
from scheduler_service.sampling.statistics import Statistic
from scheduler_service.wire import executor as wire
from scheduler_service.wire import trace as wire_trace

if TYPE_CHECKING:
    from scheduler_service.executor_client import ExecutorSession
    from scheduler_service.tracing.model import KvBlock

_GREEDY: Final = SamplingParams()
_QUESTION: Final = WantedStatistics(Statistic.ARGMAX | Statistic.TOP_K | Statistic.DIGEST, top_k=2)
_PLAIN_QUESTION: Final = WantedStatistics(Statistic.ARGMAX)


class StepError(Exception):
    """A step gave no answer that an experiment can use."""


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence's tokens in one step, from the position after those it has."""

    sequence_id: int
    token_ids: tuple[int, ...]
    wants_all: bool = False  # else the last token alone


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a wanted position gave."""

    token_id: int
    digest: bytes  # of the logits
    top_ids: tuple[int, ...]
    top_logits: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """A computed step."""

    outcomes: tuple[tuple[Outcome, ...], ...]  # by row
    seconds: float  # inside the executor
    linear_paths: tuple[str, ...]  # kernel paths that linear layers took


class BenchExecutor:
    """Steps of one session. Sequences are numbered from 1 and start empty."""

    def __init__(self, session: ExecutorSession) -> None:
        self._session = session
        self._model = session.description.capabilities.model
        self._num_steps = 0
        self._next_sequence = 1
        self._positions: dict[int, int] = {}
        self._released: list[SequenceId] = []

    @property
    def numeric_class(self) -> str:
        """The executor's numeric class id."""
        return self._model.numeric_class

    @property
    def vocab_size(self) -> int:
        """Ids of the vocabulary."""
        return self._model.vocab_size

    async def open(self) -> int:
        """Open a sequence under a salt of its own, so that it starts without a cached prefix."""
        sequence_id = self._next_sequence
        self._next_sequence += 1
        opening = SequenceOpening(
            RequestId(str(sequence_id)),
            SequenceId(sequence_id),
            0,
            self._model.model_id,
            f"lab {sequence_id}",
            (),
        )
        await self._session.write(wire.open_sequences([opening]))
        await self._session.read()
        self._positions[sequence_id] = 0
        return sequence_id

    def release(self, sequence_id: int) -> None:
        """Give a sequence back with the next step."""
        del self._positions[sequence_id]
        self._released.append(SequenceId(sequence_id))

    def rewind(self, sequence_id: int, num_tokens: int) -> None:
        """Let the last tokens of a sequence go: its next row is computed in their place."""
        self._positions[sequence_id] -= num_tokens

    async def step(self, rows: Sequence[Row], *, wants_digests: bool = True) -> Step:
        """Compute one step of these rows. Raises StepError where it cannot be used."""
        self._num_steps += 1
        batch = TokenRowBatch(
            self._num_steps,
            self._model.model_id,
            tuple(self._token_row(row) for row in rows),
            tuple(self._released),
        )
        self._released.clear()
        question = _QUESTION if wants_digests else _PLAIN_QUESTION
        wanted = [question for row in batch.rows for _ in row.wanted]
        await self._session.write(wire.step(batch, wanted))
        response = await self._session.read()
        reply = wire.read_step(response, batch, wanted, self.vocab_size, wants_paths=True)
        answer = reply.answer
        if answer is None:
            raise StepError(f"[lab] {len(rows)} rows must fit the cache, got no capacity")
        errors = [error for error in answer.row_errors if error]
        if errors:
            raise StepError(errors[0])
        found = iter(zip(answer.statistics, answer.digests, strict=True))
        outcomes = []
        for row in batch.rows:
            self._positions[row.sequence_id] += len(row.token_ids)
            parts = [next(found) for _ in row.wanted]
            outcomes.append(
                tuple(
                    Outcome(
                        int(one.argmax_id),
                        digest,
                        () if one.top_k_ids is None else tuple(map(int, one.top_k_ids)),
                        () if one.top_k_logits is None else tuple(map(float, one.top_k_logits)),
                    )
                    for one, digest in parts
                )
            )
        paths = tuple(sorted({path.path for path in answer.kernel_paths if path.op == "linear"}))
        return Step(tuple(outcomes), reply.executor_seconds, paths)

    async def kv_digests(self, sequence_id: int) -> tuple[bytes, ...]:
        """Return a digest of the keys and values of each position of a sequence.

        Empty where the executor does not tell.
        """
        piece = await self._session.provenance_piece(sequence_id, 0, 0, include_digests=True)
        blocks: list[KvBlock] = [] if piece is None else wire_trace.read_kv(piece)
        return tuple(digest for block in blocks for digest in block.digests)

    def _token_row(self, row: Row) -> TokenRow:
        start, count = self._positions[row.sequence_id], len(row.token_ids)
        offsets = range(count) if row.wants_all else range(count - 1, count)
        wanted = tuple(WantedPosition(at, start + at + 1, _GREEDY) for at in offsets)
        return TokenRow(
            RequestId(str(row.sequence_id)),
            SequenceId(row.sequence_id),
            0,
            row.token_ids,
            start,
            wanted,
        )
