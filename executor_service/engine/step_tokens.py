"""Where a step's tokens come from: its own message, or what the step before it chose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from executor_service.engine.step_request import RowOutcome, Source
from executor_service.errors import InvalidStepError
from isobatch_kernels.step import Stat

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from executor_service.engine.step_request import Int32, StepRequest, StepResults

    # Takes a step id and a wanted position; gives the token that was chosen there, -1 where that
    # row was not finite, None where nothing is known of it.
    Chosen = Callable[[int, int], int | None]

_STEP_OUTPUT = int(Source.STEP_OUTPUT)
_NON_FINITE = np.uint8(RowOutcome.NON_FINITE)
_CHOOSES = int(Stat.ARGMAX | Stat.QUANTILE)


def chosen_token(request: StepRequest, results: StepResults, wanted_index: int) -> int | None:
    """Return the token that a computed step chose at a wanted position.

    -1 where that row was not finite; None when the step chose nothing there.
    """
    if not 0 <= wanted_index < len(request.wanted):
        return None
    if not int(request.statistics[wanted_index]) & _CHOOSES:
        return None
    row = np.searchsorted(np.cumsum(request.num_tokens), request.wanted[wanted_index], side="right")
    if results.row_outcomes[row] == _NON_FINITE:
        return -1
    # Draws win over the argmax: who asks for both samples and reports.
    quantile_id = int(results.quantile_ids[wanted_index])
    return quantile_id if quantile_id >= 0 else int(results.argmax_ids[wanted_index])


class SourceNotComputedError(Exception):
    """A row takes its token from a step that did not run: the answer says so, nobody failed."""


def has_sources(request: StepRequest) -> bool:
    """Return whether some row takes its token from a step."""
    return _STEP_OUTPUT in request.sources.tobytes()


def check_sources(request: StepRequest, before: StepRequest) -> None:
    """Check that the step ahead, which is in flight, chooses all the tokens that are named.

    Raises InvalidStepError.
    """
    for row in _rows(request):
        step_id, index = int(request.source_steps[row]), int(request.source_wanted[row])
        if (
            step_id != before.step_id
            or not 0 <= index < len(before.wanted)
            or not int(before.statistics[index]) & _CHOOSES
        ):
            raise _unknown(step_id, index)


def backend_sources(request: StepRequest) -> Int32:
    """Return (T,) the wanted positions of the step ahead, -1 for literal tokens."""
    sources = np.full(len(request.token_ids), -1, np.int32)
    rows = _rows(request)
    sources[_starts(request)[rows]] = request.source_wanted[rows]
    return sources


def with_outputs(
    request: StepRequest, chosen: Chosen, refused: Collection[int] = ()
) -> tuple[Int32, list[int]]:
    """Return (T,) ids with outputs filled in, and the rows whose source is not finite.

    `refused` are the ids of steps that did not run. Raises SourceNotComputedError for one of them,
    InvalidStepError for a token that is not known.
    """
    token_ids = request.token_ids.copy()
    starts = _starts(request)
    poisoned: list[int] = []
    for row in _rows(request).tolist():
        step_id, index = int(request.source_steps[row]), int(request.source_wanted[row])
        if step_id in refused:
            raise SourceNotComputedError
        token = chosen(step_id, index)
        if token is None:
            raise _unknown(step_id, index)
        if token < 0:
            poisoned.append(row)
        token_ids[starts[row]] = max(token, 0)
    return token_ids, poisoned


def _rows(request: StepRequest) -> Int32:
    return np.flatnonzero(request.sources == _STEP_OUTPUT).astype(np.int32)


def _starts(request: StepRequest) -> Int32:
    return np.asarray(np.cumsum(request.num_tokens) - request.num_tokens, np.int32)


def _unknown(step_id: int, index: int) -> InvalidStepError:
    return InvalidStepError(
        "row_source_steps",
        "must name a token that the last computed step chose",
        f"step {step_id}, wanted position {index}",
    )
