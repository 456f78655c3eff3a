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


class ChosenTokens:
    """The tokens that a computed step chose, by wanted position."""

    def __init__(self, request: StepRequest, results: StepResults) -> None:
        self.step_id = request.step_id
        self._request = request
        self._results = results
        # Taken apart when the first is asked for.
        self._ids: list[int | None] | None = None

    def of(self, step_id: int, wanted_index: int) -> int | None:
        """Return the token; -1 where its row was not finite, None where none was chosen."""
        if step_id != self.step_id:
            return None
        if self._ids is None:
            self._ids = _chosen_ids(self._request, self._results)
        return self._ids[wanted_index] if 0 <= wanted_index < len(self._ids) else None


def _chosen_ids(request: StepRequest, results: StepResults) -> list[int | None]:
    ids: list[int | None] = [
        # Draws win over the argmax: who asks for both samples and reports.
        (quantile_id if quantile_id >= 0 else argmax_id) if asked & _CHOOSES else None
        for asked, quantile_id, argmax_id in zip(
            request.statistics.tolist(),
            results.quantile_ids.tolist(),
            results.argmax_ids.tolist(),
            strict=True,
        )
    ]
    if results.non_finite_details:
        rows = np.searchsorted(np.cumsum(request.num_tokens), request.wanted, side="right")
        for index in np.flatnonzero(results.row_outcomes[rows] == _NON_FINITE).tolist():
            ids[index] = None if ids[index] is None else -1
    return ids


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
    is_single = len(token_ids) == len(request.num_tokens)
    starts = None if is_single else _starts(request).tolist()
    poisoned: list[int] = []
    for row, (kind, step_id, index) in enumerate(
        zip(
            request.sources.tolist(),
            request.source_steps.tolist(),
            request.source_wanted.tolist(),
            strict=True,
        )
    ):
        if kind != _STEP_OUTPUT:
            continue
        if step_id in refused:
            raise SourceNotComputedError
        token = chosen(step_id, index)
        if token is None:
            raise _unknown(step_id, index)
        if token < 0:
            poisoned.append(row)
        token_ids[row if starts is None else starts[row]] = max(token, 0)
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
