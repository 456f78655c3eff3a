"""Which tokens the next step computes.

Policy, in order:
- The request that waits first may take the place of paused and lower ones (see `victims`).
- Running and waiting requests share the step as `step_budget` says: single tokens first, then
  prompts in chunks, within the tokens of a step and the time that others' streams may be held.
- A row takes as many tokens as its blocks allow. Where not one fits, what waiting requests keep
  of the prefix cache is given back, and then the running request that is least worth keeping is
  preempted; where the row is that request's, it waits for a later step.
- A waiting request that was opened (see `openings`) is admitted if it fits and gets a share, in
  the order of the queue (see `queues`).
- What is then left of the tokens of a step goes to drafted ones, behind rows of one token. They
  never take the spare block of a running request.

Cost: O(running + waiting + tokens of the rows).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from types import MappingProxyType

from scheduler_service.core.batch import TokenRow, TokenRowBatch, WantedPosition
from scheduler_service.core.capacity import BlockBudget
from scheduler_service.core.events import (
    Event,
    PreemptionReason,
    RequestAdmitted,
    RequestPreempted,
)
from scheduler_service.core.lifecycle import close, last_holder, preempt
from scheduler_service.core.openings import MAX_LOOKAHEAD, Admissions, block_budget
from scheduler_service.core.precedence import keep_order
from scheduler_service.core.request import Request, RequestId, RequestInput, RequestStatus
from scheduler_service.core.state import SchedulerState
from scheduler_service.core.step_budget import StepLoad, share_step
from scheduler_service.core.victims import give_way


def plan(
    state: SchedulerState,
    now: float,
    drafts: Mapping[RequestId, tuple[int, ...]] = MappingProxyType({}),
) -> TokenRowBatch | None:
    """Return the next batch, or None when there is nothing to do.

    The caller runs the batch and then calls `apply` or `capacity_refused` with it (or
    `executor_restarted`). While it is in flight, `plan_ahead` may plan one more. A batch without
    rows only gives sequences back and is run like any other.

    Args:
        state: Changed: requests are admitted and preempted.
        now: Monotonic time in seconds; ageing needs it.
        drafts: Drafted tokens for requests with one token to compute; what does not fit is cut.

    Raises:
        AssertionError: A batch is in flight.
    """
    if state.in_flight is not None:
        raise AssertionError(f"[plan] no step may be in flight, got {state.in_flight.step_id}")
    state.now = max(state.now, now)
    events: list[Event] = [*give_way(state, now)]
    blocks = block_budget(state)
    admissions = Admissions(state, blocks) if len(state.waiting) else None
    candidates = _candidates(state, admissions, now, in_order=bool(events))
    shares = share_step(state, candidates)
    rows = _rows_of_running(state, shares.num_tokens, blocks, events)
    # What was just taken for growth is not given to somebody else.
    if admissions is not None and not any(_is_for_growth(each) for each in events):
        for index, request in enumerate(candidates):
            num_new = shares.num_tokens.get(request.request_id, 0)
            if not num_new or not request.is_opened:
                continue
            if index and not admissions.admit(request):
                break
            _admit(state, request, now, events)
            blocks.grow(request.num_computed_tokens, num_new)
            rows.append(_row(request, num_new))
    load = _load(state, rows, events)
    if drafts:
        _add_drafts(state, rows, drafts, blocks, load, shares.bound_seconds)
    if not rows and not state.to_release:
        return None
    state.step_id += 1
    batch = TokenRowBatch(
        step_id=state.step_id,
        model=state.model,
        rows=tuple(rows),
        released_sequence_ids=tuple(state.to_release),
        events=tuple(events),
        predicted_seconds=load.seconds(),
        bound_seconds=shares.bound_seconds,
    )
    state.to_release.clear()
    state.num_blocks_to_release = 0
    state.in_flight = batch
    return batch


def _rows_of_running(
    state: SchedulerState,
    shares: Mapping[RequestId, int],
    blocks: BlockBudget,
    events: list[Event],
) -> list[TokenRow]:
    """Return the rows that fit, preempting from the end where an earlier row needs blocks."""
    # Where all rows certainly fit, which is nearly always, nobody asks who is worth keeping.
    most = sum(shares.values()) // state.limits.block_size + len(shares)
    is_tight = most > blocks.num_spare
    rows: list[TokenRow] = []
    if not is_tight:
        for request in state.running.values():
            if share := shares.get(request.request_id, 0):
                blocks.grow(request.num_computed_tokens, share, request.num_held_tokens)
                rows.append(_row(request, share))
        return rows
    order = keep_order(state)
    index = 0
    while index < len(order):
        request = order[index]
        index += 1
        share = shares.get(request.request_id, 0)
        if share == 0:
            continue
        num_computed, num_held = request.num_computed_tokens, request.num_held_tokens
        while not (num_new := blocks.num_fitting(num_computed, share, num_held)):
            if (holder := last_holder(state)) is not None:
                blocks.give_back(close(state, holder))
                state.may_open_early = False
            elif len(order) > index:
                victim = order.pop()
                blocks.give_back(victim.num_held_tokens)
                events.append(preempt(state, victim, PreemptionReason.CAPACITY))
            else:
                break
        if not num_new and len(order) == 1:
            # Alone, it has the whole pool: a ceiling below that would stop it for ever.
            state.block_ceiling = state.limits.num_blocks
            blocks = block_budget(state)
            num_new = blocks.num_fitting(num_computed, share, num_held)
        if num_new:
            blocks.grow(num_computed, num_new, num_held)
            rows.append(_row(request, num_new))
    return rows


def _candidates(
    state: SchedulerState, admissions: Admissions | None, now: float, *, in_order: bool
) -> list[Request]:
    """Return the opened requests that may be admitted, in order; none if the first has no room.

    With `in_order` nobody passes one that is not opened yet: others have just given way to it.
    """
    candidates: list[Request] = []
    if admissions is None:
        return candidates
    released = set(state.to_release)
    num_slots = min(state.limits.max_num_seqs - len(state.running), MAX_LOOKAHEAD)
    for request in islice(state.waiting.ordered(now), max(0, num_slots)):
        # A release names a sequence without its generation, so a sequence never comes back in
        # the very batch that gives it back.
        if request.sequence_id in released:
            break
        if not request.is_opened:
            if in_order and request.prefix_wait is None:
                break
            continue
        if not candidates and not admissions.admit(request):
            if not state.running:
                _make_room(state, request)
            break
        candidates.append(request)
    return candidates


def _admit(state: SchedulerState, request: Request, now: float, events: list[Event]) -> None:
    """Move a waiting request to the running set."""
    was_preempted = request.status is RequestStatus.PREEMPTED
    state.waiting.admit(request, now)
    if not was_preempted:
        state.service_rate.record_admission(
            request.arrival, now, request.num_tokens, request.num_cached_tokens
        )
    state.running[request.request_id] = request
    request.apply_input(RequestInput.ADMIT)
    if not was_preempted:
        request.num_cached_prompt_tokens = request.num_cached_tokens
    events.append(
        RequestAdmitted(
            request_id=request.request_id,
            queue_seconds=now - request.arrival,
            is_readmission=was_preempted,
            num_cached_tokens=request.num_cached_tokens,
        )
    )


def _make_room(state: SchedulerState, request: Request) -> None:
    """Give back what stops a request from running although nobody else does.

    It is admitted in a later step, once these blocks are free.
    """
    state.block_ceiling = state.limits.num_blocks
    for other in state.waiting:
        if other is not request and other.num_computed_tokens:
            close(state, other)


def _is_for_growth(event: Event) -> bool:
    return isinstance(event, RequestPreempted) and event.reason is PreemptionReason.CAPACITY


def _load(state: SchedulerState, rows: Iterable[TokenRow], events: Iterable[Event]) -> StepLoad:
    """Return what the step costs by the cost curve.

    As in `share_step`, the first row of a request is part of a prompt, however short.
    """
    load = StepLoad(state.limits.cost_curve)
    new = {event.request_id for event in events if isinstance(event, RequestAdmitted)}
    for row in rows:
        num_tokens = len(row.token_ids)
        if num_tokens == len(row.wanted) and row.request_id not in new:
            load.num_decode_rows += num_tokens
            load.num_positions += num_tokens * row.start_position
        else:
            load.add_prompt(num_tokens, row.start_position)
    return load


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


def _add_drafts(
    state: SchedulerState,
    rows: list[TokenRow],
    drafts: Mapping[RequestId, tuple[int, ...]],
    blocks: BlockBudget,
    load: StepLoad,
    bound: float,
) -> None:
    """Give rows of one known token as many of their drafted tokens as there is room for.

    Beside prompts, that is room in the bound too. Without any, the drafts' own gain decides.
    """
    num_left = state.limits.max_num_batched_tokens - sum(len(row.token_ids) for row in rows)
    for index, row in enumerate(rows):
        drafted = drafts.get(row.request_id, ())
        if not drafted or not row.wanted or len(row.token_ids) > 1:
            continue
        request = state.running[row.request_id]
        end = row.start_position + 1
        num_held = max(end, request.num_held_tokens)
        most = min(
            len(drafted),
            num_left,
            state.limits.max_prefill_chunk - 1,
            # The step draws one token more than it accepts.
            request.max_tokens - len(request.output_token_ids) - 1,
        )
        count = min(most, blocks.num_fitting(end, most, num_held, len(state.running)))
        load.add_drafts(max(0, count), row.start_position)
        while count > 0 and load.num_prompt_tokens and load.seconds() > bound:
            load.add_drafts(-1, row.start_position)
            count -= 1
        if count < 1:
            continue
        num_left -= count
        blocks.grow(end, count, num_held)
        params = row.wanted[0].params
        rows[index] = row._replace(
            token_ids=row.token_ids + drafted[:count],
            wanted=tuple(WantedPosition(i, end + i, params) for i in range(count + 1)),
            num_draft_tokens=count,
        )
