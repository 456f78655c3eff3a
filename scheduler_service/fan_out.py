"""Events of the core to streams and numbers."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import assert_never

from scheduler_service import logs
from scheduler_service.core import (
    Event,
    FinishReason,
    RequestAdmitted,
    RequestFinished,
    RequestId,
    RequestPreempted,
    SchedulerState,
    TokenEmitted,
    cut_output,
    finish_by_stop_string,
)
from scheduler_service.errors import DeadlineError, InternalError, SlowReaderError
from scheduler_service.metrics import ModelMetrics, Outcome, PreemptionReason, PromptSource
from scheduler_service.slow_readers import SlowReaders
from scheduler_service.streams import TokenStream

_LOG = logs.get_logger(__name__)
_OUTCOMES = {
    FinishReason.STOP: Outcome.STOP,
    FinishReason.LENGTH: Outcome.LENGTH,
    FinishReason.CANCELLED: Outcome.CANCELLED,
    FinishReason.DEADLINE: Outcome.DEADLINE,
    FinishReason.ERROR: Outcome.ERROR,
}


@dataclass(slots=True)
class Totals:
    """Counts since the start of the process."""

    num_steps: int = 0
    num_generated_tokens: int = 0
    num_prompt_tokens: int = 0
    num_preemptions: int = 0
    num_executor_reconnects: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0


class FanOut:
    """Holds the streams of live requests and the events that have not reached them yet.

    Events are queued by `add` and given out by `dispatch`, so that the step loop can write the
    next step to the executor first.
    """

    def __init__(
        self,
        totals: Totals,
        slow_readers: SlowReaders,
        on_end: Callable[[RequestId, str], None] = lambda *_: None,
    ) -> None:
        """Count what passes by in `totals`; call `on_end` with each request that ends, and how.

        `slow_readers` pauses streams that fall behind.
        """
        self.slow_readers = slow_readers
        self.streams: dict[RequestId, TokenStream] = {}
        # Live requests that want digests of their logits.
        self.digest_ids: set[RequestId] = set()
        self._totals = totals
        self._on_end = on_end
        self._events: deque[Event] = deque()
        # Of tokens that are queued, in order.
        self._digests: dict[RequestId, deque[bytes]] = {}

    @property
    def num_kept_digests(self) -> int:
        """Digests whose tokens have not been given out."""
        return sum(map(len, self._digests.values()))

    @property
    def has_events(self) -> bool:
        """True while `dispatch` would do something."""
        return bool(self._events)

    def open(self, stream: TokenStream) -> None:
        """Take a stream whose request was just submitted."""
        self.streams[stream.request.request_id] = stream
        if stream.wants_digests:
            self.digest_ids.add(stream.request.request_id)

    def add(
        self,
        events: Iterable[Event],
        digests: Mapping[RequestId, Sequence[bytes]] = MappingProxyType({}),
    ) -> None:
        """Queue events; `digests` belong to the tokens among them, in order."""
        left = {request_id: iter(each) for request_id, each in digests.items()}
        for event in events:
            self._events.append(event)
            # A request that ended while its step ran has no token for its digests.
            if (
                isinstance(event, TokenEmitted)
                and event.request_id in left
                and event.request_id in self.streams
            ):
                kept = self._digests.setdefault(event.request_id, deque())
                kept.append(next(left[event.request_id]))

    def dispatch(
        self,
        state: SchedulerState,
        metrics: ModelMetrics,
        now: float,
    ) -> None:
        """Give out all queued events at monotonic time `now`.

        A stop string that completes here ends its request in `state`; a row of it that is in
        flight is ignored when it comes back.
        """
        while self._events:
            event = self._events.popleft()
            stream = self.streams.get(event.request_id)
            if stream is None:
                continue
            match event:
                case TokenEmitted():
                    self._token(event, stream, state, metrics, now)
                case RequestAdmitted():
                    if not event.is_readmission:
                        stream.admitted_at = now
                        metrics.queue_time.observe(event.queue_seconds)
                    metrics.prompt_tokens[PromptSource.PREFIX_MEMORY].inc(event.num_cached_tokens)
                case RequestPreempted():
                    self._totals.num_preemptions += 1
                    metrics.preemptions[PreemptionReason(event.reason.value)].inc()
                case RequestFinished():
                    self._finish(event, stream, metrics, now)
                case _:
                    assert_never(event)

    def _token(
        self,
        event: TokenEmitted,
        stream: TokenStream,
        state: SchedulerState,
        metrics: ModelMetrics,
        now: float,
    ) -> None:
        if stream.has_stopped:
            # The step drew more tokens than the text needed.
            return
        exemplar = metrics.exemplar(event.request_id)
        if stream.last_token_at is None:
            metrics.time_to_first_token.observe(now - stream.request.arrival, exemplar)
        else:
            metrics.inter_token_latency.observe(now - stream.last_token_at, exemplar)
        self._totals.num_generated_tokens += 1
        metrics.generated_tokens.inc()
        digests = self._digests.get(event.request_id)
        digest = digests.popleft() if digests else None
        if stream.push_token(event.token_id, now, digest):
            # The answer comes in front of other requests' events, which it does not concern.
            self._events.extendleft(finish_by_stop_string(state, event.request_id))
            cut_output(stream.request, event.index + 1)
        self.slow_readers.check(state, event.request_id, stream.num_pending, now)

    def _finish(
        self, event: RequestFinished, stream: TokenStream, metrics: ModelMetrics, now: float
    ) -> None:
        del self.streams[event.request_id]
        self.digest_ids.discard(event.request_id)
        self._digests.pop(event.request_id, None)
        self.slow_readers.forget(event.request_id)
        if event.reason is FinishReason.DEADLINE:
            stream.fail(DeadlineError())
        elif event.reason is FinishReason.ERROR:
            stream.fail(InternalError(event.detail, reason="REQUEST_FAILED"))
        else:
            stream.finish(event.reason, now, event.stop_token_id)
        outcome = _OUTCOMES[event.reason]
        if stream.ending is not None:
            outcome = _OUTCOMES[stream.ending.reason]
        elif event.reason is FinishReason.CANCELLED:
            # The stream was failed first, and the request cancelled because of it.
            is_reader = isinstance(stream.error, SlowReaderError)
            outcome = Outcome.CANCELLED if is_reader else Outcome.ERROR
        self._on_end(event.request_id, outcome.value)
        metrics.requests[outcome].inc()
        seconds = now - stream.request.arrival
        metrics.request_duration.observe(seconds, metrics.exemplar(event.request_id))
        _LOG.info(
            "request_finished",
            request_id=stream.request.request_id,
            outcome=outcome.value,
            prompt_tokens=len(stream.request.prompt_token_ids),
            generated_tokens=len(stream.request.output_token_ids),
            seconds=round(seconds, 3),
        )
