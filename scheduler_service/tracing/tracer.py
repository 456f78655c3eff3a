"""Watches the steps of a step loop for the requests that are traced."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from scheduler_service.core import (
    Event,
    RequestId,
    SequenceId,
    TokenEmitted,
    TokenRow,
    TokenRowBatch,
)
from scheduler_service.tracing.model import TraceStep, TraceToken
from scheduler_service.tracing.recorder import Recorder
from scheduler_service.wire.executor import StepAnswer


class KvTeller(Protocol):
    """Who knows what the executor holds."""

    async def provenance_piece(
        self, sequence_id: int, generation: int, num_positions: int, include_digests: bool
    ) -> bytes | None:
        """Return who wrote the first positions of a sequence's cache, as a piece of a trace.

        None for not known.
        """
        ...


class Tracer:
    """The traced requests of one step loop. While there are none, it costs a look at a dict."""

    def __init__(self, count_bytes: Callable[[int], None]) -> None:
        """Call `count_bytes` with the size of each trace that is closed."""
        self._count_bytes = count_bytes
        self._live: dict[RequestId, Recorder] = {}
        # What the executor holds of them, by sequence; a request keeps its sequence for life.
        self._held: dict[SequenceId, Recorder] = {}

    @property
    def request_ids(self) -> Collection[RequestId]:
        """Live requests that are traced."""
        return self._live.keys()

    @property
    def is_idle(self) -> bool:
        """True while no trace is open."""
        return not self._live and not self._held

    def open(self, recorder: Recorder) -> None:
        """Trace a request that was just submitted."""
        self._live[recorder.request.request_id] = recorder

    def end(self, request_id: RequestId, outcome: str) -> None:
        """Note that a request has ended."""
        recorder = self._live.pop(request_id, None)
        if recorder is not None:
            recorder.end(outcome)
            self._count_if_closed(recorder)

    def wants(self, batch: TokenRowBatch) -> bool:
        """Return whether the batch has a row of a traced request."""
        return bool(self._live) and any(row.request_id in self._live for row in batch.rows)

    def record(
        self,
        batch: TokenRowBatch,
        answer: StepAnswer,
        events: Iterable[Event],
        *,
        written: float,
        answered: float,
        executor_seconds: float,
    ) -> None:
        """Write the step down for each traced request with a row in it.

        `events` are those of folding the answer back: a row's tokens are the first of its wanted
        positions. Times are monotonic seconds.
        """
        emitted: dict[RequestId, list[int]] = {}
        for event in events:
            if isinstance(event, TokenEmitted) and event.request_id in self._live:
                emitted.setdefault(event.request_id, []).append(event.token_id)
        first_wanted = 0
        num_wanted = sum(len(row.wanted) for row in batch.rows)
        for row in batch.rows:
            recorder = self._live.get(row.request_id)
            if recorder is not None:
                token_ids = emitted.get(row.request_id, ())
                request = recorder.request
                self._held[row.sequence_id] = recorder
                recorder.step(
                    TraceStep(
                        step_id=batch.step_id,
                        generation=row.generation,
                        start_position=row.start_position,
                        num_row_tokens=len(row.token_ids),
                        num_step_tokens=batch.num_tokens,
                        num_step_rows=len(batch.rows),
                        num_wanted=num_wanted,
                        max_neighbour_tokens=max(
                            (len(each.token_ids) for each in batch.rows if each is not row),
                            default=0,
                        ),
                        kernel_paths=answer.kernel_paths,
                        start_ns=max(0, round((written - request.arrival) * 1e9)),
                        duration_ns=max(0, round((answered - written) * 1e9)),
                        executor_ns=round(executor_seconds * 1e9),
                        tokens=_tokens(row, first_wanted, token_ids, answer),
                    )
                )
            first_wanted += len(row.wanted)

    async def release(self, sequence_ids: Iterable[SequenceId], session: KvTeller) -> None:
        """Ask who wrote the sequences that the next message gives back, where they are traced."""
        if not self._held:
            return
        for sequence_id in sequence_ids:
            recorder = self._held.pop(sequence_id, None)
            if recorder is not None:
                piece = await session.provenance_piece(
                    sequence_id, recorder.held_generation, recorder.num_held_positions,
                    recorder.wants_kv_digests,
                )  # fmt: skip
                recorder.released(piece)
                self._count_if_closed(recorder)

    def lose(self) -> None:
        """Note that the session is gone, and with it whatever could still be asked."""
        for recorder in self._held.values():
            recorder.released(None)
            self._count_if_closed(recorder)
        self._held.clear()

    def _count_if_closed(self, recorder: Recorder) -> None:
        if recorder.closed.is_set():
            self._count_bytes(recorder.num_bytes)


def _tokens(
    row: TokenRow, first_wanted: int, token_ids: Sequence[int], answer: StepAnswer
) -> tuple[TraceToken, ...]:
    tokens = []
    for number, (position, token_id) in enumerate(zip(row.wanted, token_ids, strict=False)):
        index = first_wanted + number
        found = answer.statistics[index]
        ids, logits = found.top_k_ids, found.top_k_logits
        tokens.append(
            TraceToken(
                position=row.start_position + position.offset,
                token_id=token_id,
                logits_digest=answer.digests[index],
                top_ids=() if ids is None else tuple(ids[:2].tolist()),
                top_logits=() if logits is None else tuple(logits[:2].tolist()),
            )
        )
    return tuple(tokens)
