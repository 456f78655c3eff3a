"""What one step may compute, and how running requests share it.

Requests with one token to compute go first, so a long prompt never holds the others' streams; one
token is kept for the leader (see `precedence`), so it always advances. What is left goes to longer
rows by class and arrival, in chunks. Paused requests have no rows.
"""

from __future__ import annotations

from scheduler_service.core.precedence import leader, service_order
from scheduler_service.core.request import Request, RequestId
from scheduler_service.core.state import SchedulerState


class StepBudget:
    """Tokens that one step may still compute.

    Attributes:
        shares: Tokens of each running request's row, before capacity.
    """

    __slots__ = ("_chunk", "_num_left", "shares")

    def __init__(self, state: SchedulerState) -> None:
        """Give the running requests their shares."""
        self._num_left = state.limits.max_num_batched_tokens
        self._chunk = state.limits.max_prefill_chunk
        self.shares: dict[RequestId, int] = {}
        long: list[Request] = []
        first = leader(state)
        num_kept = int(first is not None)
        for request in service_order(state):
            if request.num_uncomputed_tokens > 1:
                long.append(request)
            elif request is first or self._num_left > num_kept:
                num_kept = 0 if request is first else num_kept
                self.shares[request.request_id] = 1
                self._num_left -= 1
        for request in long:
            num_kept = 0 if request is first else num_kept
            num_new = self.take(request.num_uncomputed_tokens, num_kept)
            if num_new:
                self.shares[request.request_id] = num_new

    @property
    def is_spent(self) -> bool:
        """True when nobody else gets a row."""
        return self._num_left <= 0

    def take(self, num_tokens: int, num_kept: int = 0) -> int:
        """Return how many of a request's uncomputed tokens its row gets, and count them.

        `num_kept` tokens of the step are left to others.
        """
        num_new = max(0, min(num_tokens, self._chunk, self._num_left - num_kept))
        self._num_left -= num_new
        return num_new
