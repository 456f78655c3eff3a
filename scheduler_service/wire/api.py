"""The public contract: requests to checked values, events to messages."""

import math
import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isobatch.scheduler.v1 import sampling_pb2
from isobatch.scheduler.v1 import scheduler_service_pb2 as pb
from scheduler_service.core import FinishReason, Priority, Request, SamplingParams
from scheduler_service.errors import InvalidRequestError
from scheduler_service.samples import MAX_SAMPLES
from scheduler_service.streams import Delta, Ending
from scheduler_service.text.chat_template import ChatTurn
from scheduler_service.tracing.model import TraceHeader
from scheduler_service.wire.capabilities import Capabilities

# What goes on to the executor for every row must fit its messages for all rows together: biases
# travel with every step, and a salt whenever a sequence is opened.
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_COALESCE_MS = 50
MAX_ID_LENGTH = 128
MAX_SALT_LENGTH = 256
MAX_CHAT_MESSAGES = 10_000
MAX_LOGIT_BIASES = 1024
# Beyond any context; the core clips it to what the context leaves.
_UNLIMITED_TOKENS = 2**31 - 1

_REASONS: Mapping[FinishReason, sampling_pb2.FinishReason] = {
    FinishReason.STOP: sampling_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: sampling_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: sampling_pb2.FINISH_REASON_CANCELLED,
}

_PRIORITIES: Mapping[pb.Priority, Priority] = {
    pb.PRIORITY_UNSPECIFIED: Priority.NORMAL,
    pb.PRIORITY_INTERACTIVE: Priority.INTERACTIVE,
    pb.PRIORITY_NORMAL: Priority.NORMAL,
    pb.PRIORITY_BATCH: Priority.BATCH,
}

Prompt = str | tuple[int, ...] | tuple[ChatTurn, ...]


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """A checked GenerateRequest, its prompt apart."""

    request_id: str
    params: SamplingParams
    max_tokens: int
    stops: tuple[str, ...]
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    include_special_tokens: bool
    cache_salt: str
    coalesce_seconds: float
    return_logits_digests: bool
    trace: bool
    trace_kv: bool
    priority: Priority
    # Empty where the caller names nobody.
    client_id: str
    num_samples: int
    disable_speculation: bool


def _check(holds: bool, field: str, rule: str, got: object) -> None:
    if not holds:
        raise InvalidRequestError(f"[generate] {field} {rule}, got {got!r}", field=field)


def read_generate(request: pb.GenerateRequest, vocab_size: int) -> GenerateOptions:
    """Check everything about a request but its prompt and the ranges of its sampling.

    Those ranges are checked by `sampling.validate`. Raises InvalidRequestError.
    """
    stopping = request.stopping
    max_tokens = stopping.max_tokens if stopping.HasField("max_tokens") else _UNLIMITED_TOKENS
    _check(max_tokens >= 1, "stopping.max_tokens", "must be at least 1", max_tokens)
    _check(
        len(stopping.stop) <= MAX_STOP_STRINGS,
        "stopping.stop", f"must have at most {MAX_STOP_STRINGS} strings", len(stopping.stop),
    )  # fmt: skip
    for index, stop in enumerate(stopping.stop):
        _check(bool(stop), f"stopping.stop[{index}]", "must not be empty", stop)
        _check(
            len(stop) <= MAX_STOP_LENGTH, f"stopping.stop[{index}]",
            f"must have at most {MAX_STOP_LENGTH} characters", len(stop),
        )  # fmt: skip
    for index, token_id in enumerate(stopping.stop_token_ids):
        _check(token_id < vocab_size, f"stopping.stop_token_ids[{index}]",
               f"must be below {vocab_size}", token_id)  # fmt: skip
    _check(request.coalesce_ms <= MAX_COALESCE_MS, "coalesce_ms",
           f"must be at most {MAX_COALESCE_MS}", request.coalesce_ms)  # fmt: skip
    _check(len(request.request_id) <= MAX_ID_LENGTH, "request_id",
           f"must have at most {MAX_ID_LENGTH} characters", len(request.request_id))  # fmt: skip
    _check(len(request.cache_salt) <= MAX_SALT_LENGTH, "cache_salt",
           f"must have at most {MAX_SALT_LENGTH} characters", len(request.cache_salt))  # fmt: skip
    _check(len(request.client_id) <= MAX_ID_LENGTH, "client_id",
           f"must have at most {MAX_ID_LENGTH} characters", len(request.client_id))  # fmt: skip
    _check(request.num_samples <= MAX_SAMPLES, "num_samples",
           f"must be at most {MAX_SAMPLES}", request.num_samples)  # fmt: skip
    is_traced = request.trace or request.trace_kv
    _check(request.num_samples <= 1 or not is_traced, "num_samples",
           "must be 1 in a request that is traced", request.num_samples)  # fmt: skip
    return GenerateOptions(
        request_id=request.request_id or str(uuid.uuid4()),
        params=read_sampling(request.sampling),
        max_tokens=max_tokens,
        stops=tuple(stopping.stop),
        stop_token_ids=frozenset(stopping.stop_token_ids),
        ignore_eos=stopping.ignore_eos,
        include_special_tokens=request.include_special_tokens,
        cache_salt=request.cache_salt,
        coalesce_seconds=request.coalesce_ms / 1000,
        return_logits_digests=request.return_logits_digests,
        trace=request.trace,
        trace_kv=request.trace_kv,
        priority=_read_priority(request.priority),
        client_id=request.client_id,
        num_samples=request.num_samples or 1,
        disable_speculation=request.disable_speculation,
    )


def _read_priority(priority: pb.Priority) -> Priority:
    _check(priority in _PRIORITIES, "priority", "must be a class of the contract", int(priority))
    return _PRIORITIES[priority]


def client_key(options: GenerateOptions, peer: str) -> str:
    """Return whose share a request takes from: the named client, the tenant or the connection."""
    if options.client_id:
        return f"client {options.client_id}"
    if options.cache_salt:
        return f"salt {options.cache_salt}"
    return f"peer {peer}"


def read_sampling(sampling: sampling_pb2.SamplingParams) -> SamplingParams:
    """Return sampling parameters with defaults in place of unset fields.

    An unset field reads as 0, which is the default of all but top_p and seed. A seed that is
    not given is drawn here, from the operating system.
    """
    _check(len(sampling.logit_bias) <= MAX_LOGIT_BIASES, "sampling.logit_bias",
           f"must have at most {MAX_LOGIT_BIASES} ids", len(sampling.logit_bias))  # fmt: skip
    bias = sorted(sampling.logit_bias.items())
    for token_id, value in bias:
        # abs(NaN) > 100 is false: say it here in words of our own.
        _check(not math.isnan(value), f"sampling.logit_bias[{token_id}]", "must be a number", value)
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        min_p=sampling.min_p,
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(64),
        logit_bias=tuple(bias),
    )


def read_prompt(request: pb.GenerateRequest | pb.TokenizeRequest, vocab_size: int) -> Prompt:
    """Return the prompt as text, token ids or a conversation; raises InvalidRequestError."""
    kind = request.WhichOneof("prompt")
    if kind == "text":
        _check(bool(request.text), "text", "must not be empty", request.text)
        return request.text
    if kind == "chat":
        count = len(request.chat.messages)
        _check(count <= MAX_CHAT_MESSAGES, "chat",
               f"must have at most {MAX_CHAT_MESSAGES} messages", count)  # fmt: skip
        return tuple(ChatTurn(each.role, each.content) for each in request.chat.messages)
    if kind == "token_ids" and isinstance(request, pb.GenerateRequest):
        ids = tuple(request.token_ids.ids)
        _check(bool(ids), "token_ids", "must not be empty", ids)
        largest = max(ids)
        _check(largest < vocab_size, "token_ids", f"must be below {vocab_size}", largest)
        return ids
    raise InvalidRequestError(
        "[generate] prompt must be given as text, token ids or a conversation, got none",
        field="prompt",
    )


def accepted(
    request: Request, numeric_class: str, trace: bytes = b"", *, num_samples: int = 1
) -> pb.GenerateResponse:
    """Return the first message of a stream."""
    return pb.GenerateResponse(
        accepted=pb.Accepted(
            request_id=request.public_id,
            model=request.model,
            num_prompt_tokens=len(request.prompt_token_ids),
            seed=request.params.seed,
            max_tokens=request.max_tokens,
            numeric_class=numeric_class,
            num_samples=num_samples,
            trace=trace,
        )
    )


def delta(value: Delta, trace: bytes = b"", *, sample_index: int = 0) -> pb.GenerateResponse:
    """Return the message of new tokens of a sample."""
    return pb.GenerateResponse(
        sample_index=sample_index,
        delta=pb.TokenDelta(
            start_index=value.start_index,
            token_ids=value.token_ids,
            text=value.text,
            logits_digests=value.digests,
            trace=trace,
        ),
    )


def finished(
    request: Request,
    ending: Ending,
    *,
    admitted_at: float | None,
    first_token_at: float | None,
    trace: bytes = b"",
    sample_index: int = 0,
) -> pb.GenerateResponse:
    """Return the last message of a sample; times are monotonic seconds."""

    def since_arrival(time: float | None) -> int:
        return 0 if time is None else max(0, round((time - request.arrival) * 1e9))

    return pb.GenerateResponse(
        sample_index=sample_index,
        finished=pb.Finished(
            reason=_REASONS[ending.reason],
            text=ending.text,
            stop_string=ending.stop_string,
            stop_token_id=ending.stop_token_id,
            usage=pb.Usage(
                num_prompt_tokens=len(request.prompt_token_ids),
                num_cached_tokens=request.num_cached_prompt_tokens,
                num_generated_tokens=len(request.output_token_ids),
                num_draft_tokens=request.num_draft_tokens,
                num_accepted_draft_tokens=request.num_accepted_draft_tokens,
            ),
            timings=pb.RequestTimings(
                queue_ns=since_arrival(admitted_at),
                time_to_first_token_ns=since_arrival(first_token_at),
                total_ns=since_arrival(ending.time),
            ),
            num_preemptions=request.num_preemptions,
            trace=trace,
        ),
    )


def trace_header(
    request: Request, options: GenerateOptions, capabilities: Capabilities, arrival_unix_ns: int
) -> TraceHeader:
    """Return what a trace says of its request, once that is queued."""
    model = capabilities.model
    return TraceHeader(
        request_id=request.public_id,
        arrival_unix_ns=arrival_unix_ns,
        model=model.model_id,
        weights_digest=model.weights_digest,
        numeric_class=model.numeric_class,
        kv_class=model.kv_class,
        device=capabilities.device,
        block_size=model.block_size,
        prompt_token_ids=request.prompt_token_ids,
        sampling=request.params,
        max_tokens=request.max_tokens,
        stop=options.stops,
        stop_token_ids=tuple(sorted(options.stop_token_ids)),
        ignore_eos=options.ignore_eos,
        include_special_tokens=options.include_special_tokens,
        has_kv_digests=options.trace_kv,
    )


def model_info(capabilities: Capabilities, *, has_chat_template: bool) -> pb.ModelInfo:
    """Return the description of a model."""
    model = capabilities.model
    return pb.ModelInfo(
        model=model.model_id,
        architecture=model.architecture,
        context_length=model.context_length,
        vocab_size=model.vocab_size,
        numeric_class=model.numeric_class,
        weights_digest=model.weights_digest,
        device=capabilities.device,
        num_parameters=model.num_parameters,
        has_chat_template=has_chat_template,
    )


def tokenized(token_ids: Sequence[int], rendered: str) -> pb.TokenizeResponse:
    """Return the ids of a prompt."""
    return pb.TokenizeResponse(token_ids=token_ids, rendered=rendered)
