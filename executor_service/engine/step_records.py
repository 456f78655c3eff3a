"""What is written down of a computed step: poisoned state, shared blocks, provenance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from executor_service.engine.confirmed import confirmed_ends
from executor_service.engine.provenance_report import step_handle
from executor_service.engine.step_request import RowOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor_service.engine.open_sequences import SequenceState
    from executor_service.engine.step_request import Int32, StepRequest, StepResults
    from executor_service.kv_cache.manager import KvCacheManager

_TOKEN_BYTES = 4  # int32


def taint(rows: list[SequenceState], results: StepResults, poisoned: Sequence[int]) -> StepResults:
    """Mark sequences that are not finite; rows on top of such state stay non-finite.

    `poisoned` are the rows whose token was chosen by a row that was not finite.
    """
    tainted = bool(results.non_finite_details or poisoned)
    if not (tainted or any(sequence.non_finite_detail for sequence in rows)):
        return results
    details = iter(results.non_finite_details)
    found = [
        next(details) if outcome == RowOutcome.NON_FINITE else ""
        for outcome in results.row_outcomes
    ]
    for row, sequence in enumerate(rows):
        if row in poisoned:
            found[row] = found[row] or "the step that chose this row's token"
        sequence.non_finite_detail = sequence.non_finite_detail or found[row]
        found[row] = sequence.non_finite_detail
    return results.with_details(found)


def share(
    cache: KvCacheManager,
    request: StepRequest,
    rows: list[SequenceState],
    ends: list[int],
    token_ids: Int32,
) -> None:
    """Tell the cache which tokens each row has written, so that full blocks can be shared."""
    raw = token_ids.astype("<i4", copy=False).tobytes()
    written = cache.written
    stop = 0
    for sequence_id, sequence, start, end, confirmed in zip(
        request.sequence_ids.tolist(),
        rows,
        request.start_positions.tolist(),
        ends,
        confirmed_ends(request, ends),
        strict=True,
    ):
        first, stop = stop, stop + _TOKEN_BYTES * (end - start)
        if sequence.non_finite_detail:
            cache.stop_sharing(sequence_id)
        else:
            sequence.num_fixed_tokens = written(sequence_id, start, raw[first:stop], confirmed)


def record_provenance(
    cache: KvCacheManager, request: StepRequest, tables: Int32, results: StepResults
) -> int:
    """Record who wrote what, and return the handle of the step where it was asked for."""
    serial = cache.provenance.record(
        request.step_id,
        request.sequence_ids,
        request.start_positions,
        request.num_tokens,
        tables,
        len(request.token_ids),
        len(request.wanted),
        results.paths,
    )
    return step_handle(serial) if request.record_provenance else 0
