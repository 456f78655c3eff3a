"""What one step may compute, and how running requests share it.

Requests with one token to compute go first, so a long prompt never holds the others' streams; one
token is kept for the oldest request, so it always advances. What is left goes to longer rows, in
order, in chunks.
"""

from __future__ import annotations

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
        num_kept = 0
        for request in state.running.values():
            if request.num_uncomputed_tokens > 1:
                # The oldest request is the first one met.
                num_kept = num_kept or int(not self.shares and not long)
                long.append(request)
            elif self._num_left > num_kept:
                self.shares[request.request_id] = 1
                self._num_left -= 1
        for request in long:
            num_new = self.take(request.num_uncomputed_tokens)
            if num_new == 0:
                break
            self.shares[request.request_id] = num_new

    @property
    def is_spent(self) -> bool:
        """True when nobody else gets a row."""
        return self._num_left <= 0

    def take(self, num_tokens: int) -> int:
        """Return how many of a request's uncomputed tokens its row gets, and count them."""
        num_new = min(num_tokens, self._chunk, self._num_left)
        self._num_left -= num_new
        return num_new
