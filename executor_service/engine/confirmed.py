"""Which positions of a step's rows stay as they are.

A row that verifies a draft asks for statistics after its first token and after each token of the
draft; the tokens behind its first wanted position may turn out wrong and be taken back. A row that
asks for nothing, or for its last position alone, is a piece of a known text.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from executor_service.engine.step_request import StepRequest


def confirmed_ends(request: StepRequest, ends: list[int]) -> list[int]:
    """Return for each row the end of the positions that will not be taken back.

    `ends` are the rows' ends; positions are absolute. What lies before a row's start is confirmed
    by the row itself.
    """
    num_tokens = request.num_tokens.tolist()
    if len(request.token_ids) == len(num_tokens):  # one token a row
        return ends
    wanted = request.wanted.tolist()
    confirmed = []
    row_start = 0
    for end, count in zip(ends, num_tokens, strict=True):
        first = bisect_left(wanted, row_start)
        row_start += count
        is_asked = first < len(wanted) and wanted[first] < row_start
        confirmed.append(end - (row_start - 1 - wanted[first]) if is_asked else end)
    return confirmed
