"""Requests whose client reads more slowly than they generate.

Such a request is paused: it gets no rows, and its cached state is the first to be taken when room
is needed. Nobody else notices. It goes on as soon as the client has taken what is there; one that
takes nothing for too long ends with an error.
"""

from scheduler_service.core import RequestId, SchedulerState, pause, resume


class SlowReaders:
    """Knows who is paused, and since when."""

    def __init__(self, max_undelivered_tokens: int, limit_seconds: float) -> None:
        """Pause beyond so many undelivered tokens, and give up after `limit_seconds`."""
        self._max_undelivered_tokens = max_undelivered_tokens
        self.limit_seconds = limit_seconds
        # Monotonic times in seconds, the oldest first.
        self._since: dict[RequestId, float] = {}

    def __len__(self) -> int:
        return len(self._since)

    def check(self, state: SchedulerState, request_id: RequestId, pending: int, now: float) -> None:
        """Pause a request that has too many tokens pending at monotonic time `now`."""
        if pending > self._max_undelivered_tokens and request_id not in self._since:
            self._since[request_id] = now
            pause(state, request_id)

    def drained(self, state: SchedulerState, request_id: RequestId) -> bool:
        """Let a request go on whose client has taken everything; return whether it was paused."""
        if self._since.pop(request_id, None) is None:
            return False
        resume(state, request_id)
        return True

    def forget(self, request_id: RequestId) -> None:
        """Drop a request that has ended."""
        self._since.pop(request_id, None)

    def next_time(self) -> float | None:
        """Return the monotonic time at which the next one has to be given up, or None."""
        since = next(iter(self._since.values()), None)
        return None if since is None else since + self.limit_seconds

    def overdue(self, now: float) -> list[RequestId]:
        """Return those that have been paused for too long."""
        return [name for name, since in self._since.items() if since + self.limit_seconds <= now]
