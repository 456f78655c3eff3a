"""Folding a step's answer back into the state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from scheduler_service.core.batch import KvCounts, SampledRow, TokenRow, TokenRowBatch
from scheduler_service.core.capacity import blocks_for
from scheduler_service.core.events import Event, PreemptionReason, TokenEmitted
from scheduler_service.core.lifecycle import close, finish, last_holder, preempt
from scheduler_service.core.pace import Pace
from scheduler_service.core.precedence import keep_order
from scheduler_service.core.request import FinishReason, Request, RequestId, RequestInput
from scheduler_service.core.state import Limits, SchedulerState
from scheduler_service.core.stop import reason_to_stop

MAX_REFUSALS_ALONE: Final = 3
"""Steps in a row that may be refused to a request that runs alone before it ends with ERROR."""


def apply(
    state: SchedulerState, batch: TokenRowBatch, sampled: Mapping[RequestId, SampledRow]
) -> list[Event]:
    """Record a computed step; return the new tokens and ends in row order.

    Rows whose request ended or lost its cached state while the step ran are ignored, and so is
    a whole batch from before `executor_restarted`.

    Args:
        state: Changed.
        batch: The batch that ran.
        sampled: What came of each row that wanted a token or failed. Others may be left out.

    Raises:
        AssertionError: A live row that wanted a token has neither a token nor an error.
    """
    was_in_flight = state.land(batch)
    if was_in_flight:
        state.num_refusals_alone = 0
    events: list[Event] = []
    for row in batch.rows:
        request = state.request_of(row)
        if request is not None:
            _apply_row(state, request, row, sampled.get(row.request_id), events)
        elif was_in_flight:
            state.num_vain_rows += 1
    return events


def _apply_row(
    state: SchedulerState,
    request: Request,
    row: TokenRow,
    sampled: SampledRow | None,
    events: list[Event],
) -> None:
    if sampled is not None and sampled.error is not None:
        if row.num_draft_tokens:
            # The fault may be a drafted token's own: it is computed again without any.
            request.takes_drafts = False
            events.append(preempt(state, request, PreemptionReason.NON_FINITE_DRAFT))
        else:
            events.append(finish(state, request, FinishReason.ERROR, detail=sampled.error))
        return
    end = row.start_position + len(row.token_ids)
    request.num_granted_tokens = max(request.num_granted_tokens, end)
    request.num_computed_tokens = end - row.num_draft_tokens
    if not row.wanted:
        return
    if sampled is None or sampled.token_id is None:
        raise AssertionError(f"[apply] a wanted row must have a token, got none for {row}")
    accepted = sampled.accepted_token_ids
    # What was computed at a drafted token is right as far as it was accepted.
    request.num_computed_tokens += len(accepted)
    request.num_draft_tokens += row.num_draft_tokens
    request.num_accepted_draft_tokens += len(accepted)
    for token_id in (*accepted, sampled.token_id):
        request.apply_input(RequestInput.ADVANCE)
        request.output_token_ids.append(token_id)
        state.waiting.charge_output(request)
        index = len(request.output_token_ids) - 1
        events.append(TokenEmitted(request_id=request.request_id, token_id=token_id, index=index))
        reason = reason_to_stop(request)
        if reason is not None:
            stop_token_id = token_id if reason is FinishReason.STOP else None
            events.append(finish(state, request, reason, stop_token_id=stop_token_id))
            return


def capacity_refused(state: SchedulerState, batch: TokenRowBatch) -> list[Event]:
    """Record that the executor could not grow its pool for the batch and computed nothing.

    Its releases were applied. What waiting requests keep of the prefix cache is given back, the
    running request least worth keeping is preempted, and until a running one ends fewer blocks
    are counted on than this batch needed. A request that runs alone is tried
    again up to MAX_REFUSALS_ALONE times in a row and then ends with ERROR: nobody else holds
    blocks that could come free.
    """
    if not state.land(batch):
        return []
    has_closed = False
    while (holder := last_holder(state)) is not None:
        close(state, holder)
        has_closed = True
    if has_closed:
        state.may_open_early = False
    running = list(state.running.values())
    if not running:
        return []
    if len(running) == 1:
        if has_closed:
            return []
        state.num_refusals_alone += 1
        if state.num_refusals_alone <= MAX_REFUSALS_ALONE:
            return []
        detail = "the executor's block pool cannot hold this request alone"
        return [finish(state, running[0], FinishReason.ERROR, detail=detail)]
    state.block_ceiling = max(1, min(state.block_ceiling, _num_needed(state, batch)) - 1)
    return [preempt(state, keep_order(state)[-1], PreemptionReason.CAPACITY)]


def source_refused(state: SchedulerState, batch: TokenRowBatch) -> None:
    """Record that a batch did not run because the one before it, whose tokens it takes, did not."""
    state.land(batch)


def _num_needed(state: SchedulerState, batch: TokenRowBatch) -> int:
    """Return the blocks that would have been in use, had the batch been computed."""
    size = state.limits.block_size
    growth = 0
    for row in batch.rows:
        request = state.request_of(row)
        if request is not None:
            held = blocks_for(request.num_held_tokens, size)
            end = request.num_computed_tokens + len(row.token_ids)
            growth += max(0, blocks_for(end, size) - held)
    counts = state.kv_counts
    if counts is None:
        return state.num_blocks_held() + growth
    return counts.total - counts.free - counts.evictable + growth


def executor_restarted(state: SchedulerState, limits: Limits | None = None) -> list[Event]:
    """Record that the executor lost every cached state.

    Running requests wait again, in order, to be recomputed; their tokens are kept. Nothing is
    left to release, batches in flight are forgotten, and step ids start again at 1.

    Args:
        state: Changed.
        limits: New bounds, when the new executor has others. A live request that can no longer
            fit ends with ERROR; others have `max_tokens` clipped.
    """
    state.in_flight = state.ahead = None
    state.step_id = 0
    state.num_refusals_alone = 0
    events: list[Event] = [
        preempt(state, request, PreemptionReason.EXECUTOR_RESTART)
        for request in list(state.running.values())
    ]
    for request in state.waiting:
        if request.is_announced:
            close(state, request)
        request.prefix_wait = None
        request.may_wait_for_prefix = True
    state.to_release.clear()
    state.num_blocks_to_release = 0
    state.kv_counts = None
    state.may_open_early = state.shares_prefixes = True
    state.pace = Pace()
    if limits is not None:
        state.limits = limits
        state.waiting.aging_seconds = limits.aging_seconds
        for request in list(state.requests.values()):
            num_left = limits.max_sequence_length - len(request.prompt_token_ids)
            if num_left <= len(request.output_token_ids):
                detail = "the restarted executor's context or block pool is too small"
                events.append(finish(state, request, FinishReason.ERROR, detail=detail))
            else:
                request.max_tokens = min(request.max_tokens, num_left)
    state.block_ceiling = state.limits.num_blocks
    return events


def record_step_seconds(state: SchedulerState, batch: TokenRowBatch, seconds: float) -> None:
    """Record what a computed step really took in the executor, to correct the curve's pace.

    Steps that no curve predicted or in which nobody decoded change nothing.
    """
    num_decoding = sum(len(row.token_ids) == len(row.wanted) for row in batch.rows)
    if batch.predicted_seconds > 0 and seconds > 0 and num_decoding:
        is_mixed = num_decoding < len(batch.rows)
        state.pace.record(seconds / batch.predicted_seconds, is_mixed=is_mixed)


def record_kv_counts(state: SchedulerState, counts: KvCounts) -> None:
    """Keep the executor's own block counts, as of its last answer; all zero means unknown."""
    if counts.total:
        state.kv_counts = counts
