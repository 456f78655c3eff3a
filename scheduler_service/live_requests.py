"""The live requests of one model as other tasks see them: they come, are cancelled, end.

Everything here is synchronous and runs on the event loop, so it may happen at any `await` of the
step loop; the core allows for that.
"""

import math
import sys
from collections.abc import Callable
from functools import partial

from scheduler_service.core import (
    CoreError,
    Limits,
    RequestId,
    SchedulerState,
    cancel,
    executor_restarted,
    expire,
    submit,
)
from scheduler_service.errors import ServiceError, SlowReaderError, from_core
from scheduler_service.fan_out import FanOut, Totals
from scheduler_service.metrics import ModelMetrics, Outcome
from scheduler_service.queue_metrics import refusal_reason, update_gauges
from scheduler_service.slow_readers import SlowReaders
from scheduler_service.streams import TokenStream
from scheduler_service.tracing.tracer import Tracer

# A deadline that is this near has passed: the two processes' clocks and timers are not one.
_DEADLINE_SLACK_SECONDS = 0.02


class LiveRequests:
    """Requests of one model, their streams, and the way of events to these."""

    def __init__(
        self,
        limits: Limits,
        model_id: str,
        metrics: ModelMetrics,
        totals: Totals,
        clock: Callable[[], float],
        *,
        wake: Callable[[], None],
        before_events: Callable[[], None],
        slow_readers: SlowReaders | None = None,
    ) -> None:
        """Schedule requests of `model_id` within `limits`; `clock` gives monotonic seconds.

        `wake` is called when there may be something to plan, `before_events` before events are
        given out. `slow_readers` pauses requests that get too far ahead of their clients; None
        pauses nobody.
        """
        self.state = SchedulerState(limits, model=model_id)
        self.tracer = Tracer(metrics.trace_bytes.inc)
        if slow_readers is None:
            slow_readers = SlowReaders(sys.maxsize, math.inf)
        self.fan_out = FanOut(totals, slow_readers, self.tracer.end)
        self._metrics = metrics
        self._clock = clock
        self._wake = wake
        self._before_events = before_events

    def submit(self, *streams: TokenStream) -> None:
        """Queue the requests of a call; raises ServiceError when the core refuses them."""
        if any(stream.request.request_id in self.fan_out.streams for stream in streams):
            # Whoever had this id may have ended without having been told, and events know
            # requests by their ids alone.
            self.dispatch()
        try:
            submit(self.state, *(stream.request for stream in streams))
        except CoreError as error:
            self._metrics.requests[Outcome.REJECTED].inc()
            self._metrics.refusals[refusal_reason(error)].inc()
            raise from_core(error) from error
        for stream in streams:
            self.fan_out.open(stream)
            if stream.recorder is not None:
                self.tracer.open(stream.recorder)
            stream.on_drained = partial(self._drained, stream.request.request_id)
        self.update_gauges()
        self._wake()

    def cancel(self, request_id: RequestId) -> bool:
        """End a request; return whether it was live."""
        request = self.state.requests.get(request_id)
        if request is None:
            return False
        deadline, now = request.deadline, self._clock()
        if deadline is not None and now >= deadline - _DEADLINE_SLACK_SECONDS:
            self.fan_out.add(expire(self.state, deadline))
        else:
            self.fan_out.add(cancel(self.state, request_id))
        self.dispatch()
        self._wake()
        return True

    def cancel_group(self, group_id: RequestId) -> bool:
        """End all samples of a call; return whether one was live."""
        requests = self.state.requests.values()
        samples = [each.request_id for each in requests if each.group_id == group_id]
        for request_id in samples:
            self.cancel(request_id)
        return bool(samples)

    def give_up(self, make_error: Callable[[], ServiceError]) -> None:
        """End every live request with an error."""
        self.dispatch()
        for request_id in list(self.state.requests):
            self.fan_out.streams[request_id].fail(make_error())
            self.fan_out.add(cancel(self.state, request_id))
        self.dispatch()

    def expire(self, now: float) -> None:
        """End the requests whose deadline has passed or whose reader was away for too long.

        They are told by the next `dispatch`.
        """
        self.fan_out.add(expire(self.state, now))
        slow_readers = self.fan_out.slow_readers
        for request_id in slow_readers.overdue(now):
            self.fan_out.streams[request_id].fail(SlowReaderError(slow_readers.limit_seconds))
            self.fan_out.add(cancel(self.state, request_id))

    def restart(self, limits: Limits) -> None:
        """Prepare for an executor that has lost all cached state and has these limits."""
        self.dispatch()
        self.fan_out.add(executor_restarted(self.state, limits))
        self.dispatch()

    def dispatch(self) -> None:
        """Give out all events that are queued."""
        self._before_events()
        self.fan_out.dispatch(self.state, self._metrics, self._clock())
        self.update_gauges()

    def update_gauges(self) -> None:
        """Put what is live now in the metrics."""
        update_gauges(self._metrics, self.state, len(self.fan_out.slow_readers))

    def _drained(self, request_id: RequestId) -> None:
        if self.fan_out.slow_readers.drained(self.state, request_id):
            self._wake()
