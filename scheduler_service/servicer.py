"""The public service: translates calls to the engine and back. No policy."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias, cast

import grpc

from isobatch.scheduler.v1 import scheduler_service_pb2 as pb
from isobatch.scheduler.v1 import scheduler_service_pb2_grpc as pb_grpc
from scheduler_service import logs
from scheduler_service.core import InvalidParameterError, Priority, Request, RequestId
from scheduler_service.engine import Engine, ServedModel
from scheduler_service.errors import InvalidRequestError, NotServingError, ServiceError, from_core
from scheduler_service.live_calls import LiveCalls
from scheduler_service.metrics import Outcome, RefusalReason, SchedulerMetrics
from scheduler_service.samples import SampleStreams, sample_id, sample_params
from scheduler_service.sampling import validate
from scheduler_service.spans import Metadata, Spans
from scheduler_service.step_loop import Clock
from scheduler_service.streams import TokenStream
from scheduler_service.text.errors import PromptError
from scheduler_service.text.tokenizer import Tokenizer
from scheduler_service.tracing.folder import TraceFolder
from scheduler_service.tracing.recorder import Recorder
from scheduler_service.wire import api

_LOG = logs.get_logger(__name__)
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"  # generic in the stubs alone
# Shorter prompts are encoded at once: a thread costs more than they do.
_THREAD_CHARACTERS = 2000
# What a turn costs besides its words, in characters.
_TURN_CHARACTERS = 50


class SchedulerServicer(pb_grpc.SchedulerServiceServicer):
    """Implements isobatch.scheduler.v1.SchedulerService; errors are mapped by the interceptor."""

    def __init__(
        self,
        engine: Engine,
        metrics: SchedulerMetrics,
        calls: LiveCalls | None = None,
        clock: Clock = time.monotonic,
        *,
        log_prompts: bool = False,
        spans: Spans | None = None,
        traces: TraceFolder | None = None,
    ) -> None:
        """Serve `engine`; `clock` gives monotonic seconds and must be the engine's own.

        `calls` counts the calls that stream an answer.
        With `log_prompts`, the log holds the text of each prompt. `spans` take notes of requests.
        `traces` keeps the traces that requests ask for.
        """
        self._calls = LiveCalls() if calls is None else calls
        self._traces = traces
        self._spans = spans
        self._log_prompts = log_prompts
        self._engine = engine
        self._metrics = metrics
        self._clock = clock

    async def Generate(
        self, request: pb.GenerateRequest, context: _Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Stream Accepted, TokenDelta..., and a Finished for each sample."""
        arrival = self._clock()
        self._calls.enter(context)
        # The stubs leave out that there may be no deadline.
        remaining = cast("float | None", context.time_remaining())
        model = self._engine.model(request.model)
        try:
            options, streams = await self._prepare(request, model, context.peer())
        except ServiceError as error:
            self._count_rejected(model)
            self._trace_refused(context, arrival, model, error)
            raise
        live = streams[0].request
        logs.bind(request_id=live.public_id)
        if self._log_prompts:
            text = model.tokenizer.decode(live.prompt_token_ids)
            _LOG.info("request_accepted", prompt=text)
        for stream in streams:
            stream.request.arrival = arrival
            stream.request.deadline = None if remaining is None else arrival + remaining
        if self._engine.model(request.model) is not model:
            raise NotServingError("[scheduler] the model changed while the prompt was encoded")
        try:
            model.loop.requests.submit(*streams)
        except ServiceError as error:
            self._trace_refused(context, arrival, model, error)
            raise
        end_spans = [self._begin_span(context, stream, model) for stream in streams]

        def leave(_: _Context) -> None:
            # With live requests only when the client left or its deadline passed.
            for stream in streams:
                if not stream.is_over:
                    model.loop.requests.cancel(stream.request.request_id)
            for end_span in end_spans:
                if end_span is not None:
                    end_span()

        # Not `finally`: a generator that is never resumed would be closed only when collected.
        context.add_done_callback(leave)  # type: ignore[arg-type]  # not a protocol in the stubs
        recorder = streams[0].recorder
        if recorder is not None:
            # Before any step: nothing was awaited since the request was queued.
            save = None if self._traces is None else self._traces.save
            recorder.begin(
                api.trace_header(live, options, model.capabilities, time.time_ns()), save
            )
        numeric_class = model.capabilities.model.numeric_class
        yield api.accepted(live, numeric_class, streams[0].take_trace(), num_samples=len(streams))
        async for index, delta in SampleStreams(streams).parts(options.coalesce_seconds):
            stream = streams[index]
            if delta is not None:
                yield api.delta(delta, stream.take_trace(), sample_index=index)
            elif stream.ending is not None:
                if recorder is not None:
                    await recorder.closed.wait()
                yield api.finished(
                    stream.request,
                    stream.ending,
                    admitted_at=stream.admitted_at,
                    first_token_at=stream.first_token_at,
                    trace=stream.take_trace(),
                    sample_index=index,
                )

    async def _prepare(
        self, request: pb.GenerateRequest, model: ServedModel, peer: str
    ) -> tuple[api.GenerateOptions, list[TokenStream]]:
        """Return the checked options and an outbox for each sample."""
        capabilities = model.capabilities.model
        options = api.read_generate(request, capabilities.vocab_size)
        try:
            validate(options.params, capabilities.vocab_size)
        except InvalidParameterError as error:
            raise from_core(error) from error
        prompt = api.read_prompt(request, capabilities.vocab_size)
        token_ids, _ = await _encode(model, prompt)
        eos = frozenset[int]() if options.ignore_eos else model.tokenizer.eos_token_ids
        request_id, prompt_token_ids = RequestId(options.request_id), tuple(token_ids)
        streams = []
        for index in range(options.num_samples):
            live = Request(
                request_id=sample_id(request_id, index),
                prompt_token_ids=prompt_token_ids,
                params=sample_params(options.params, index),
                max_tokens=options.max_tokens,
                model=capabilities.model_id,
                cache_salt=options.cache_salt,
                stop_token_ids=options.stop_token_ids | eos,
                priority=options.priority,
                client_id=api.client_key(options, peer),
                group_id=request_id,
                takes_drafts=not options.disable_speculation,
            )
            detokenizer = model.tokenizer.detokenizer(
                include_special_tokens=options.include_special_tokens
            )
            stream = TokenStream(
                live, detokenizer, options.stops, wants_digests=options.return_logits_digests
            )
            if options.trace or options.trace_kv:
                stream.recorder = Recorder(live, wants_kv_digests=options.trace_kv)
            streams.append(stream)
        return options, streams

    def _begin_span(
        self, context: _Context, stream: TokenStream, model: ServedModel
    ) -> Callable[[], None] | None:
        if self._spans is None:
            return None
        numeric_class = model.capabilities.model.numeric_class
        return self._spans.begin(stream, _metadata(context), numeric_class)

    def _trace_refused(
        self, context: _Context, arrival: float, model: ServedModel, error: ServiceError
    ) -> None:
        if self._spans is not None:
            name = model.capabilities.model.model_id
            self._spans.refuse(_metadata(context), arrival, name, error.reason)

    def _count_rejected(self, model: ServedModel) -> None:
        instruments = self._metrics.for_model(model.capabilities.model.model_id)
        instruments.requests[Outcome.REJECTED].inc()
        instruments.refusals[RefusalReason.INVALID].inc()

    async def Cancel(self, request: pb.CancelRequest, context: _Context) -> pb.CancelResponse:
        """End a request by id."""
        return pb.CancelResponse(was_live=self._engine.cancel(RequestId(request.request_id)))

    async def ListModels(
        self, request: pb.ListModelsRequest, context: _Context
    ) -> pb.ListModelsResponse:
        """List the models; empty before the executor is ready."""
        served = self._engine.served
        if served is None:
            return pb.ListModelsResponse()
        info = api.model_info(
            served.capabilities, has_chat_template=served.tokenizer.has_chat_template
        )
        return pb.ListModelsResponse(models=[info])

    async def Tokenize(self, request: pb.TokenizeRequest, context: _Context) -> pb.TokenizeResponse:
        """Encode a prompt as Generate would."""
        model = self._engine.model(request.model)
        prompt = api.read_prompt(request, model.capabilities.model.vocab_size)
        return api.tokenized(*await _encode(model, prompt))

    async def GetStats(self, request: pb.GetStatsRequest, context: _Context) -> pb.GetStatsResponse:
        """Return counts of the live state."""
        totals = self._engine.totals
        response = pb.GetStatsResponse(
            num_steps=totals.num_steps,
            num_generated_tokens=totals.num_generated_tokens,
            num_prompt_tokens=totals.num_prompt_tokens,
            num_preemptions=totals.num_preemptions,
            num_executor_reconnects=totals.num_executor_reconnects,
            executor_connected=self._engine.is_connected,
            num_draft_tokens=totals.num_draft_tokens,
            num_accepted_draft_tokens=totals.num_accepted_draft_tokens,
        )
        if self._engine.served is not None:
            state = self._engine.served.loop.state
            response.num_running = len(state.running)
            response.num_waiting = len(state.waiting)
            counts = state.waiting.num_by_priority()
            response.num_waiting_interactive = counts[Priority.INTERACTIVE]
            response.num_waiting_normal = counts[Priority.NORMAL]
            response.num_waiting_batch = counts[Priority.BATCH]
            response.num_waiting_tokens = state.waiting.num_tokens
            response.num_paused = len(self._engine.served.loop.fan_out.slow_readers)
            response.total_blocks = response.free_blocks = state.limits.num_blocks
            if state.kv_counts is not None:
                response.total_blocks = state.kv_counts.total
                # Nobody uses what only the prefix index holds: it makes room on demand.
                response.free_blocks = state.kv_counts.free + state.kv_counts.evictable
        return response


def _metadata(context: _Context) -> Metadata:
    return [(key, value) for key, value in context.invocation_metadata() or ()]


async def _encode(model: ServedModel, prompt: api.Prompt) -> tuple[list[int], str]:
    """Return (ids, rendered conversation or empty); raises InvalidRequestError."""
    field = "text" if isinstance(prompt, str) else "chat"
    try:
        ids, rendered = await _encode_any(model.tokenizer, prompt)
    except PromptError as error:
        raise InvalidRequestError(str(error), field=field, reason="INVALID_PROMPT") from error
    # Some tokenizers have tokens that their model has no embedding for.
    vocab_size = model.capabilities.model.vocab_size
    largest = max(ids, default=0)
    if largest >= vocab_size:
        raise InvalidRequestError(
            f"[tokenizer] {field} must encode to ids below {vocab_size}, got {largest}",
            field=field,
            reason="INVALID_PROMPT",
        )
    return ids, rendered


async def _encode_any(tokenizer: Tokenizer, prompt: api.Prompt) -> tuple[list[int], str]:
    if isinstance(prompt, str):
        if len(prompt) < _THREAD_CHARACTERS:
            return tokenizer.encode_text(prompt), ""
        return await asyncio.to_thread(tokenizer.encode_text, prompt), ""
    turns = [each for each in prompt if not isinstance(each, int)]
    if len(turns) < len(prompt):
        return [each for each in prompt if isinstance(each, int)], ""
    if sum(_TURN_CHARACTERS + len(turn.content) for turn in turns) < _THREAD_CHARACTERS:
        return tokenizer.encode_chat(turns)
    return await asyncio.to_thread(tokenizer.encode_chat, turns)
