"""Which tokens the next step computes.

Policy, in order:
- Running requests come before waiting ones. Requests with one token to compute go first, so a
  long prompt never holds the others' streams; one token is kept for the oldest request, so it
  always advances. What is left of the step goes to longer rows in order of arrival, in chunks.
- A row takes as many tokens as its blocks allow. Where not one fits, the last running request
  is preempted; where the row is that last request itself, it waits for a later step.
- A waiting request is admitted, in order of arrival, only when all known tokens of all running
  requests and its own fit the pool, with one block to spare for each running one to grow into.
  That keeps preemption rare: on a tight pool the spare block alone saves a third of them.

Cost: O(running + admitted + tokens of the rows).
"""

from __future__ import annotations

from scheduler_service.core.batch import (
    SequenceOpening,
    TokenRow,
    TokenRowBatch,
    WantedPosition,
)
from scheduler_service.core.capacity import BlockBudget, blocks_for
from scheduler_service.core.events import Event, RequestAdmitted
from scheduler_service.core.lifecycle import preempt
from scheduler_service.core.request import Request, RequestId, RequestInput, RequestStatus
from scheduler_service.core.state import SchedulerState


def plan(state: SchedulerState, now: float) -> TokenRowBatch | None:
    """Return the next batch, or None when there is nothing to do.

    The caller runs the batch and then calls `apply` or `capacity_refused` with it (or
    `executor_restarted`); one batch is in flight at a time. A batch without rows only gives
    sequences back and is run like any other.

    Args:
        state: Changed: requests are admitted and preempted.
        now: Monotonic time in seconds; used for the events alone, never for policy.

    Raises:
        AssertionError: A batch is in flight.
    """
    if state.in_flight is not None:
        raise AssertionError(f"[plan] no step may be in flight, got {state.in_flight.step_id}")
    events: list[Event] = []
    shares, num_left = _share_tokens(state)
    rows = _rows_of_running(state, shares, events)
    openings: list[SequenceOpening] = []
    for request, num_new in _admit(state, num_left, now, events):
        openings.append(_opening(request))
        rows.append(_row(request, num_new))
    if not rows and not state.to_release:
        return None
    state.step_id += 1
    batch = TokenRowBatch(
        step_id=state.step_id,
        model=state.model,
        rows=tuple(rows),
        openings=tuple(openings),
        released_sequence_ids=tuple(state.to_release),
        events=tuple(events),
    )
    state.to_release.clear()
    state.in_flight = batch
    return batch


def _share_tokens(state: SchedulerState) -> tuple[dict[RequestId, int], int]:
    """Return the tokens of each running request's row before capacity, and those left over."""
    num_left = state.limits.max_num_batched_tokens
    chunk = state.limits.max_prefill_chunk
    shares: dict[RequestId, int] = {}
    long: list[Request] = []
    num_kept = 0
    for request in state.running.values():
        if request.num_uncomputed_tokens > 1:
            # The oldest request is the first one met.
            num_kept = num_kept or int(not shares and not long)
            long.append(request)
        elif num_left > num_kept:
            shares[request.request_id] = 1
            num_left -= 1
    for request in long:
        num_new = min(request.num_uncomputed_tokens, chunk, num_left)
        if num_new == 0:
            break
        shares[request.request_id] = num_new
        num_left -= num_new
    return shares, num_left


def _rows_of_running(
    state: SchedulerState, shares: dict[RequestId, int], events: list[Event]
) -> list[TokenRow]:
    """Return the rows that fit, preempting from the end where an older row needs blocks."""
    order = list(state.running.values())
    budget = BlockBudget(state.limits.block_size, state.block_ceiling)
    for request in order:
        budget.hold(request.num_computed_tokens)
    rows: list[TokenRow] = []
    index = 0
    while index < len(order):
        request = order[index]
        index += 1
        share = shares.get(request.request_id, 0)
        if share == 0:
            continue
        num_computed = request.num_computed_tokens
        while not (num_new := budget.num_fitting(num_computed, share)) and len(order) > index:
            victim = order.pop()
            budget.give_back(victim.num_computed_tokens)
            events.append(preempt(state, victim))
        if not num_new and len(order) == 1:
            # Alone, it has the whole pool: a ceiling below that would stop it for ever.
            budget.ceiling = state.block_ceiling = state.limits.num_blocks
            num_new = budget.num_fitting(num_computed, share)
        if num_new:
            budget.grow(num_computed, num_new)
            rows.append(_row(request, num_new))
    return rows


def _admit(
    state: SchedulerState, num_left: int, now: float, events: list[Event]
) -> list[tuple[Request, int]]:
    """Move waiting requests to the running set; return them with the tokens of their rows."""
    if not len(state.waiting):
        return []
    limits = state.limits
    num_blocks = sum(blocks_for(r.num_tokens, limits.block_size) for r in state.running.values())
    released = set(state.to_release)
    admitted: list[tuple[Request, int]] = []
    while num_left > 0 and len(state.running) < limits.max_num_seqs:
        request = state.waiting.head()
        # A release names a sequence without its generation, so a sequence never comes back in
        # the very batch that gives it back. Hence nobody is admitted in a step that preempts.
        if request is None or request.sequence_id in released:
            break
        num_blocks += blocks_for(request.num_tokens, limits.block_size)
        if num_blocks + len(state.running) > state.block_ceiling:
            break
        num_new = min(request.num_tokens, limits.max_prefill_chunk, num_left)
        num_left -= num_new
        was_preempted = request.status is RequestStatus.PREEMPTED
        state.waiting.remove(request.request_id)
        state.running[request.request_id] = request
        request.apply_input(RequestInput.ADMIT)
        admitted.append((request, num_new))
        events.append(
            RequestAdmitted(
                request_id=request.request_id,
                queue_seconds=now - request.arrival,
                is_readmission=was_preempted,
            )
        )
    return admitted


def _opening(request: Request) -> SequenceOpening:
    return SequenceOpening(
        request_id=request.request_id,
        sequence_id=request.sequence_id,
        generation=request.generation,
        model=request.model,
        cache_salt=request.cache_salt,
        token_ids=request.tokens(0, request.num_tokens),
    )


def _row(request: Request, num_new: int) -> TokenRow:
    start = request.num_computed_tokens
    stop = start + num_new
    wanted: tuple[WantedPosition, ...] = ()
    if stop == request.num_tokens:
        wanted = (WantedPosition(num_new - 1, stop, request.params),)
    return TokenRow(
        request_id=request.request_id,
        sequence_id=request.sequence_id,
        generation=request.generation,
        token_ids=request.tokens(start, stop),
        start_position=start,
        wanted=wanted,
    )
