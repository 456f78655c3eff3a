"""Planning one step while the one before it is still computed.

The tokens that the step in flight will choose are not known yet, so rows name them by their place
in that step, and the executor fills them in. This is done only where it certainly is what `plan`
would do once the answer is there, but for requests that then turn out to have ended: their rows
are computed in vain and ignored. So:

- Every row of the step in flight must have its last position wanted, and a token that the executor
  itself can tell (see `is_chosen`); its drafts or a full row of its logits would have to be looked
  at first.
- Nobody may wait for a place or for the rest of a prompt: they would wait a step longer.
- Blocks for both steps must be there by the counts that are known now.
- A request that ends with the step in flight by its number of tokens gets no row.
"""

from __future__ import annotations

from collections.abc import Callable

from scheduler_service.core.batch import (
    TokenRow,
    TokenRowBatch,
    TokenSource,
    TokenSourceKind,
    WantedPosition,
)
from scheduler_service.core.openings import block_budget
from scheduler_service.core.params import SamplingParams
from scheduler_service.core.request import Request
from scheduler_service.core.state import SchedulerState
from scheduler_service.core.step_budget import StepLoad

_UNKNOWN_TOKEN = (0,)


def may_plan_ahead(state: SchedulerState, is_chosen: Callable[[SamplingParams], bool]) -> bool:
    """Return whether steps of these requests can be planned ahead, as far as that can be told now.

    Where this is False, `plan_ahead` returns None.
    """
    return not any(not request.is_paused for request in state.waiting) and all(
        request.is_paused or is_chosen(request.params) for request in state.running.values()
    )


def plan_ahead(
    state: SchedulerState, is_chosen: Callable[[SamplingParams], bool]
) -> TokenRowBatch | None:
    """Return the batch that follows the one in flight, or None where that must be answered first.

    The caller runs it like any other; the batch in flight is applied first. Its tokens are to be
    drawn as `SamplingParams` say, so that none of them is in doubt: `is_chosen` tells whether the
    executor itself chooses the token that they give.

    Args:
        state: Changed: what was to be given back goes with the batch.
        is_chosen: Whether a token drawn by these parameters is the executor's own choice.

    Raises:
        AssertionError: No batch is in flight, or two are.
    """
    before = state.in_flight
    if before is None or state.ahead is not None:
        raise AssertionError("[plan_ahead] one step must be in flight, got none or two")
    if any(not request.is_paused for request in state.waiting):
        return None
    rows = _rows(state, before, is_chosen)
    if not rows:
        return None
    load = StepLoad(state.limits.cost_curve)
    load.num_decode_rows = len(rows)
    load.num_positions = sum(row.start_position for row in rows)
    state.step_id += 1
    batch = TokenRowBatch(
        step_id=state.step_id,
        model=state.model,
        rows=tuple(rows),
        released_sequence_ids=tuple(state.to_release),
        predicted_seconds=load.seconds(),
    )
    state.to_release.clear()
    state.num_blocks_to_release = 0
    state.ahead = batch
    return batch


def _rows(
    state: SchedulerState, before: TokenRowBatch, is_chosen: Callable[[SamplingParams], bool]
) -> list[TokenRow] | None:
    """Return a row for each request of the step in flight that goes on; None where one cannot."""
    blocks = block_budget(state)
    going: list[tuple[int, TokenRow, Request]] = []
    num_running = 0
    for index, row in enumerate(before.rows):
        if len(row.wanted) != 1 or not is_chosen(row.wanted[0].params):
            return None
        request = state.request_of(row)
        if request is None:
            # It has ended since. What it still takes is given back with this batch.
            blocks.grow(row.start_position, len(row.token_ids))
            continue
        if request.num_computed_tokens != row.start_position:
            # The step before that one was refused, so it will not run either.
            return None
        blocks.grow(row.start_position, len(row.token_ids), request.num_held_tokens)
        if request.is_paused:
            continue
        num_running += 1
        if len(request.output_token_ids) + 1 < request.max_tokens:
            going.append((index, row, request))
    if num_running < sum(not request.is_paused for request in state.running.values()):
        return None
    rows: list[TokenRow] = []
    for index, row, request in going:
        start = row.start_position + len(row.token_ids)
        num_held = max(start, request.num_held_tokens)
        if blocks.num_fitting(start, 1, num_held) < 1:
            return None
        blocks.grow(start, 1, num_held)
        rows.append(
            TokenRow(
                request_id=row.request_id,
                sequence_id=row.sequence_id,
                generation=row.generation,
                token_ids=_UNKNOWN_TOKEN,
                start_position=start,
                wanted=(WantedPosition(0, start + 1, row.wanted[0].params),),
                # One position is wanted of each row, so its index is the row's.
                source=TokenSource(TokenSourceKind.STEP_OUTPUT, before.step_id, index),
            )
        )
    return rows
