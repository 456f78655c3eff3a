"""Spans through OpenTelemetry. The one module that imports it; see spans.py.

A request's span has the children `queue`, `prefill`, `decode` and `finish`, from its arrival to
the moment its last message was taken. They are made when the request is over, from times that its
stream holds anyway, so nothing is done for a token or, unless asked for, for a step.

Names of attributes follow OpenTelemetry's conventions for generative AI where they have one
(https://opentelemetry.io/docs/specs/semconv/gen-ai/), which are not stable yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from scheduler_service.core import RequestId, TokenRowBatch
from scheduler_service.phase_times import PhaseTimes
from scheduler_service.spans import Metadata
from scheduler_service.streams import TokenStream

_SECOND = 1_000_000_000
_CLOSE_SECONDS = 3.0
_FAILED = trace.Status(trace.StatusCode.ERROR)


@dataclass(slots=True)
class _Live:
    """A request whose span is open."""

    stream: TokenStream
    span: trace.Span
    # Unix time less monotonic time, nanoseconds.
    offset_ns: int


class OtelSpans:
    """Implements spans.Spans over a tracer provider."""

    def __init__(
        self,
        provider: TracerProvider,
        step_every: int,
        clock: Callable[[], float],
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        """Give spans to `provider`; one of `step_every` steps is kept, none for 0.

        `clock` gives monotonic seconds and must be the engine's own; `give_up` ends an export
        that runs.
        """
        self._give_up = give_up
        self._provider = provider
        self._tracer = provider.get_tracer("isobatch.scheduler")
        self._propagator = TraceContextTextMapPropagator()
        self._step_every = step_every
        self._clock = clock
        self._live: dict[RequestId, _Live] = {}

    def begin(
        self, stream: TokenStream, metadata: Metadata, numeric_class: str
    ) -> Callable[[], None]:
        """Begin the span of a request; return what ends it."""
        request = stream.request
        offset_ns = self._offset_ns()
        span = self._tracer.start_span(
            "generate",
            context=self._context(metadata),
            kind=trace.SpanKind.SERVER,
            start_time=_ns(request.arrival, offset_ns),
            attributes={
                "gen_ai.operation.name": "generate",
                "gen_ai.request.model": request.model,
                "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
                "isobatch.numeric_class": numeric_class,
                "isobatch.request_id": request.request_id,
            },
        )
        live = self._live[request.request_id] = _Live(stream, span, offset_ns)
        return lambda: self._end(live)

    def refuse(self, metadata: Metadata, arrival: float, model: str, reason: str) -> None:
        """Make the span of a request that was refused."""
        offset_ns = self._offset_ns()
        span = self._tracer.start_span(
            "generate",
            context=self._context(metadata),
            kind=trace.SpanKind.SERVER,
            start_time=_ns(arrival, offset_ns),
            attributes={
                "gen_ai.operation.name": "generate",
                "gen_ai.request.model": model,
                "error.type": reason,
            },
        )
        span.set_status(_FAILED)
        span.end(_ns(self._clock(), offset_ns))

    def step(self, batch: TokenRowBatch, times: PhaseTimes, executor_seconds: float) -> None:
        """Make the span of each `step_every`-th step, with links to its requests."""
        if not self._step_every or batch.step_id % self._step_every:
            return
        offset_ns = self._offset_ns()
        live = (self._live.get(row.request_id) for row in batch.rows)
        attributes: dict[str, int | float] = {
            "isobatch.step_id": batch.step_id,
            "isobatch.rows": len(batch.rows),
            "isobatch.tokens": batch.num_tokens,
        }
        for phase, seconds in times.phases(executor_seconds).items():
            attributes[f"isobatch.{phase}_seconds"] = seconds
        span = self._tracer.start_span(
            "step",
            # A step is nobody's child: it serves many requests.
            context=trace.set_span_in_context(trace.INVALID_SPAN),
            links=[trace.Link(each.span.get_span_context()) for each in live if each is not None],
            start_time=_ns(times.started, offset_ns),
            attributes=attributes,
        )
        span.end(_ns(times.applied, offset_ns))

    def close(self) -> None:
        """Send what is left, for as long as that may hold a service that stops."""
        timer = threading.Timer(_CLOSE_SECONDS, self._give_up)
        timer.start()
        self._provider.shutdown()
        timer.cancel()

    def _end(self, live: _Live) -> None:
        stream, request = live.stream, live.stream.request
        # A request that came after it may have the same id.
        if self._live.get(request.request_id) is live:
            del self._live[request.request_id]
        over = self._clock()
        if live.span.is_recording():
            self._phases(live, over)
            live.span.set_attributes(
                {
                    "gen_ai.usage.output_tokens": len(request.output_token_ids),
                    "isobatch.cached_tokens": request.num_cached_tokens,
                    "isobatch.preemptions": request.num_preemptions,
                }
            )
            if stream.error is not None:
                live.span.set_attribute("error.type", stream.error.reason)
                live.span.set_status(_FAILED)
            elif stream.ending is not None:
                reason = stream.ending.reason.value
                live.span.set_attribute("gen_ai.response.finish_reasons", (reason,))
        live.span.end(_ns(over, live.offset_ns))

    def _phases(self, live: _Live, over: float) -> None:
        stream = live.stream
        ended = over if stream.ending is None else stream.ending.time
        borders = [
            ("queue", stream.request.arrival),
            ("prefill", stream.admitted_at),
            ("decode", stream.first_token_at),
            ("finish", None if stream.ending is None else ended),
        ]
        happened = [(name, at) for name, at in borders if at is not None]
        context = trace.set_span_in_context(live.span)
        ends = [at for _, at in happened[1:]] + [over]
        for (name, started), stopped in zip(happened, ends, strict=True):
            child = self._tracer.start_span(
                name, context=context, start_time=_ns(started, live.offset_ns)
            )
            child.end(_ns(stopped, live.offset_ns))

    def _context(self, metadata: Metadata) -> Context:
        carrier = {key: value for key, value in metadata if isinstance(value, str)}
        # An empty context of its own, so that nothing of this process becomes a parent.
        return self._propagator.extract(carrier, context=Context())

    def _offset_ns(self) -> int:
        # Taken anew for each span: the computer's clock may have been set.
        return time.time_ns() - round(self._clock() * _SECOND)


def _ns(seconds: float, offset_ns: int) -> int:
    return round(seconds * _SECOND) + offset_ns


def exporting_spans(
    endpoint: str, step_every: int, version: str, clock: Callable[[], float]
) -> OtelSpans:
    """Return spans that go to `endpoint`, or for an empty one where the variables say.

    Sampling, headers, timeouts and attributes of the resource are those of OpenTelemetry's
    variables (OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS, OTEL_RESOURCE_ATTRIBUTES, ...).
    """
    own = Resource.create({"service.name": "isobatch-scheduler", "service.version": version})
    provider = TracerProvider(
        # What the variables say wins.
        resource=own.merge(OTELResourceDetector().detect()),
        shutdown_on_exit=False,
    )
    exporter = OTLPSpanExporter(endpoint=endpoint or None)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return OtelSpans(provider, step_every, clock, exporter.shutdown)
