"""Short ways to make core objects and to drive the core by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_service.core import (
    Event,
    Limits,
    Priority,
    Request,
    RequestFinished,
    RequestId,
    SampledRow,
    SamplingParams,
    SchedulerState,
    SequenceOpened,
    SequenceOpening,
    TokenRowBatch,
    apply,
    opened,
    openings,
    plan,
    submit,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def make_limits(
    *,
    tokens: int = 64,
    seqs: int = 8,
    waiting: int = 16,
    block_size: int = 4,
    blocks: int = 32,
    context: int = 128,
    chunk: int = 64,
    waiting_tokens: int = 1_000_000,
    aging: float = 30.0,
) -> Limits:
    """Return limits; everything is roomy unless named."""
    return Limits(
        max_num_batched_tokens=tokens,
        max_num_seqs=seqs,
        max_num_waiting=waiting,
        block_size=block_size,
        num_blocks=blocks,
        context_length=context,
        max_prefill_chunk=chunk,
        max_waiting_tokens=waiting_tokens,
        aging_seconds=aging,
    )


def make_request(
    name: str,
    prompt: int | Sequence[int] = 4,
    max_tokens: int = 4,
    *,
    stop: frozenset[int] = frozenset(),
    deadline: float | None = None,
    arrival: float = 0.0,
    salt: str | None = None,
    priority: Priority = Priority.NORMAL,
    client: str = "",
) -> Request:
    """Return a request with the prompt 0, 1, 2, ... of the given length, or the given prompt.

    Without a salt of its own it shares its prefix with nobody.
    """
    token_ids = tuple(range(prompt)) if isinstance(prompt, int) else tuple(prompt)
    return Request(
        request_id=RequestId(name),
        prompt_token_ids=token_ids,
        params=SamplingParams(),
        max_tokens=max_tokens,
        cache_salt=name if salt is None else salt,
        stop_token_ids=stop,
        deadline=deadline,
        arrival=arrival,
        priority=priority,
        client_id=client,
    )


def state_with(limits: Limits, *requests: Request) -> SchedulerState:
    """Return a state with these requests submitted in order."""
    state = SchedulerState(limits)
    for request in requests:
        submit(state, request)
    return state


def open_waiting(
    state: SchedulerState, cached: Mapping[str, int] | None = None, now: float = 0.0
) -> list[SequenceOpening]:
    """Open whoever is about to be admitted, with these numbers of cached tokens by request."""
    found: list[SequenceOpening] = []
    while new := openings(state, now):
        found += new
        opened(
            state,
            [
                SequenceOpened(
                    each.request_id,
                    each.sequence_id,
                    each.generation,
                    (cached or {}).get(each.request_id, 0),
                )
                for each in new
            ],
        )
    return found


def must_plan(
    state: SchedulerState, now: float = 0.0, cached: Mapping[str, int] | None = None
) -> TokenRowBatch:
    """Open requests and plan a batch, which must exist."""
    open_waiting(state, cached, now)
    batch = plan(state, now)
    assert batch is not None
    state.check_invariants()
    return batch


def answer(batch: TokenRowBatch, token_id: int = 99) -> dict[RequestId, SampledRow]:
    """Return the same token for each row that wants one."""
    return {row.request_id: SampledRow(token_id) for row in batch.rows if row.wanted}


def run_step(state: SchedulerState, token_id: int = 99) -> tuple[TokenRowBatch, list[Event]]:
    """Plan a batch and apply the same token to each row that wants one."""
    batch = must_plan(state)
    events = apply(state, batch, answer(batch, token_id))
    state.check_invariants()
    return batch, events


def shape(batch: TokenRowBatch) -> dict[str, tuple[int, int]]:
    """Return (start position, number of tokens) of each row, by request."""
    return {row.request_id: (row.start_position, len(row.token_ids)) for row in batch.rows}


def finished(events: Sequence[Event]) -> dict[str, RequestFinished]:
    """Return the ends among the events, by request."""
    return {event.request_id: event for event in events if isinstance(event, RequestFinished)}
