"""Between the SDK's values and the messages of the contract: the only module that knows both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from google.protobuf.message import Message

from isobatch.scheduler.v1 import sampling_pb2, scheduler_service_pb2
from scheduler_service import message_size
from scheduler_service.client._errors import (
    ErrorDetails,
    FieldViolation,
    InvalidRequestError,
    ProtocolError,
)
from scheduler_service.client._models import (
    Accepted,
    ChatMessage,
    Event,
    Finished,
    FinishReason,
    GenerationParams,
    ModelInfo,
    Priority,
    Prompt,
    Stats,
    Timings,
    TokenEvent,
    Tokenization,
    Usage,
)

_FINISH_REASONS: Final[Mapping[int, FinishReason]] = {
    sampling_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    sampling_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    sampling_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
}

_PRIORITIES: Final[Mapping[Priority, scheduler_service_pb2.Priority]] = {
    Priority.INTERACTIVE: scheduler_service_pb2.PRIORITY_INTERACTIVE,
    Priority.NORMAL: scheduler_service_pb2.PRIORITY_NORMAL,
    Priority.BATCH: scheduler_service_pb2.PRIORITY_BATCH,
}

_SAMPLING_FIELDS: Final = ("temperature", "top_k", "top_p", "min_p", "seed")


def generate_request(
    prompt: Prompt, params: GenerationParams, *, model: str, request_id: str
) -> scheduler_service_pb2.GenerateRequest:
    """Return the message for a prompt.

    Raises InvalidRequestError for values that the message cannot carry, such as a negative top_k,
    and for a message that is too large; what it can carry is the server's to judge.
    """
    request = scheduler_service_pb2.GenerateRequest()
    _set(request, "request_id", request_id)
    _set(request, "model", model)
    _check_prompt("generate", prompt)
    if isinstance(prompt, str):
        _set(request, "text", prompt)
    elif any(isinstance(item, ChatMessage) for item in prompt):
        _set_chat(request.chat, prompt)
    else:
        request.token_ids.SetInParent()
        _extend(request.token_ids, "ids", prompt, "token_ids")
    for name in _SAMPLING_FIELDS:
        value = getattr(params, name)
        if value is not None:
            _set(request.sampling, name, value, f"sampling.{name}")
    if not isinstance(params.logit_bias, Mapping):
        raise _invalid("sampling.logit_bias", "must be a mapping", params.logit_bias)
    for token_id, bias in params.logit_bias.items():
        _put(request.sampling.logit_bias, token_id, bias, "sampling.logit_bias")
    if params.max_tokens is not None:
        _set(request.stopping, "max_tokens", params.max_tokens, "stopping.max_tokens")
    _extend(request.stopping, "stop", params.stop, "stopping.stop")
    _extend(request.stopping, "stop_token_ids", params.stop_token_ids, "stopping.stop_token_ids")
    _set(request.stopping, "ignore_eos", params.ignore_eos, "stopping.ignore_eos")
    for name in (
        "include_special_tokens",
        "cache_salt",
        "coalesce_ms",
        "return_logits_digests",
        "trace",
        "trace_kv",
        "disable_speculation",
    ):
        _set(request, name, getattr(params, name))
    if params.n != 1:
        _set(request, "num_samples", params.n, "n")
        if params.n < 1:
            raise _invalid("n", "must be at least 1", params.n)
    _set(request, "client_id", params.client_id)
    if params.priority is not None:
        request.priority = _priority(params.priority)
    _check_size("generate", request)
    return request


def _check_prompt(op: str, prompt: object) -> None:
    # Bytes are numbers to Python, and no token ids.
    if isinstance(prompt, bytes | bytearray | memoryview) or not isinstance(prompt, Iterable):
        raise InvalidRequestError(
            f"[{op}] prompt must be text, messages or token ids, got {type(prompt).__name__}"
        )


def _check_size(op: str, request: Message) -> None:
    if why := message_size.too_large(op, request.ByteSize()):
        raise InvalidRequestError(why, ErrorDetails(reason=message_size.REASON))


def _priority(value: str) -> scheduler_service_pb2.Priority:
    try:
        return _PRIORITIES[Priority(value)]
    except ValueError:
        rule = f"must be one of {', '.join(Priority)}"
        raise _invalid("priority", rule, value) from None


def tokenize_request(prompt: Prompt, *, model: str) -> scheduler_service_pb2.TokenizeRequest:
    """Return the message that asks for the ids of a text or a conversation.

    Raises InvalidRequestError as `generate_request` does.
    """
    request = scheduler_service_pb2.TokenizeRequest()
    _set(request, "model", model)
    _check_prompt("tokenize", prompt)
    if isinstance(prompt, str):
        _set(request, "text", prompt)
    else:
        _set_chat(request.chat, prompt)
    _check_size("tokenize", request)
    return request


def cancel_request(request_id: str) -> scheduler_service_pb2.CancelRequest:
    """Return the message that ends a request; raises InvalidRequestError for what is no id."""
    request = scheduler_service_pb2.CancelRequest()
    _set(request, "request_id", request_id)
    return request


def event(response: scheduler_service_pb2.GenerateResponse) -> Event | None:
    """Return the event in a message of a stream, or None for a kind that a newer server added."""
    kind = response.WhichOneof("event")
    if kind == "delta":
        delta = response.delta
        return TokenEvent(
            start_index=delta.start_index,
            token_ids=tuple(delta.token_ids),
            text=delta.text,
            logits_digests=tuple(delta.logits_digests),
            trace=delta.trace,
            sample_index=response.sample_index,
        )
    if kind == "accepted":
        accepted = response.accepted
        return Accepted(
            request_id=accepted.request_id,
            model=accepted.model,
            num_prompt_tokens=accepted.num_prompt_tokens,
            seed=accepted.seed,
            max_tokens=accepted.max_tokens,
            numeric_class=accepted.numeric_class,
            trace=accepted.trace,
            num_samples=max(1, accepted.num_samples),  # 0 from a server that knows of none
        )
    if kind == "finished":
        return _finished(response.finished, response.sample_index)
    return None


def model_infos(response: scheduler_service_pb2.ListModelsResponse) -> tuple[ModelInfo, ...]:
    """Return the models of an answer, the default first."""
    return tuple(
        ModelInfo(
            model=each.model,
            architecture=each.architecture,
            context_length=each.context_length,
            vocab_size=each.vocab_size,
            numeric_class=each.numeric_class,
            weights_digest=each.weights_digest,
            device=each.device,
            num_parameters=each.num_parameters,
            has_chat_template=each.has_chat_template,
        )
        for each in response.models
    )


def tokenization(response: scheduler_service_pb2.TokenizeResponse) -> Tokenization:
    """Return the ids of an answer."""
    return Tokenization(token_ids=tuple(response.token_ids), rendered=response.rendered)


def stats(response: scheduler_service_pb2.GetStatsResponse) -> Stats:
    """Return the counts of an answer."""
    return Stats(
        num_running=response.num_running,
        num_waiting=response.num_waiting,
        num_steps=response.num_steps,
        num_generated_tokens=response.num_generated_tokens,
        num_prompt_tokens=response.num_prompt_tokens,
        num_preemptions=response.num_preemptions,
        num_executor_reconnects=response.num_executor_reconnects,
        total_blocks=response.total_blocks,
        free_blocks=response.free_blocks,
        executor_connected=response.executor_connected,
        num_waiting_interactive=response.num_waiting_interactive,
        num_waiting_normal=response.num_waiting_normal,
        num_waiting_batch=response.num_waiting_batch,
        num_waiting_tokens=response.num_waiting_tokens,
        num_paused=response.num_paused,
        num_draft_tokens=response.num_draft_tokens,
        num_accepted_draft_tokens=response.num_accepted_draft_tokens,
    )


def _finished(finished: scheduler_service_pb2.Finished, sample_index: int) -> Finished:
    reason = _FINISH_REASONS.get(finished.reason)
    if reason is None:
        raise ProtocolError(
            f"[generate] a finish reason must be one this client knows, got {finished.reason}"
        )
    usage, timings = finished.usage, finished.timings
    has_stop_token = finished.HasField("stop_token_id")
    return Finished(
        reason=reason,
        text=finished.text,
        stop_string=finished.stop_string or None,
        stop_token_id=finished.stop_token_id if has_stop_token else None,
        usage=Usage(
            num_prompt_tokens=usage.num_prompt_tokens,
            num_cached_tokens=usage.num_cached_tokens,
            num_generated_tokens=usage.num_generated_tokens,
            num_draft_tokens=usage.num_draft_tokens,
            num_accepted_draft_tokens=usage.num_accepted_draft_tokens,
        ),
        timings=Timings(
            queue_seconds=timings.queue_ns / 1e9,
            time_to_first_token_seconds=timings.time_to_first_token_ns / 1e9,
            total_seconds=timings.total_ns / 1e9,
        ),
        num_preemptions=finished.num_preemptions,
        trace=finished.trace,
        sample_index=sample_index,
    )


def _set_chat(chat: scheduler_service_pb2.Chat, prompt: Any) -> None:
    chat.SetInParent()
    for index, item in enumerate(prompt):
        if not isinstance(item, ChatMessage):
            raise _invalid(f"chat.messages[{index}]", "must be a ChatMessage", item)
        message = chat.messages.add()
        _set(message, "role", item.role, f"chat.messages[{index}].role")
        _set(message, "content", item.content, f"chat.messages[{index}].content")


def _set(message: Message, name: str, value: Any, path: str = "") -> None:
    try:
        setattr(message, name, value)
    except (TypeError, ValueError, OverflowError) as error:
        raise _invalid(path or name, _rule(error), value) from error


def _extend(message: Message, name: str, values: Any, path: str) -> None:
    if isinstance(values, str):
        # A string is a sequence of strings: ("stop") would silently mean four stop strings.
        raise _invalid(path, "must be a sequence", values)
    try:
        getattr(message, name).extend(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise _invalid(path, _rule(error), values) from error


def _put(container: Any, key: Any, value: Any, path: str) -> None:
    try:
        container[key] = value
    except (TypeError, ValueError, OverflowError) as error:
        raise _invalid(path, _rule(error), {key: value}) from error


def _rule(error: Exception) -> str:
    if isinstance(error, UnicodeEncodeError):
        return "must be text that UTF-8 can hold"
    return f"must fit the contract ({error})"


def _invalid(path: str, rule: str, value: object) -> InvalidRequestError:
    shown = repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return InvalidRequestError(
        f"[generate] {path} {rule}, got {shown}",
        ErrorDetails(reason="INVALID_PARAMETER", violations=(FieldViolation(path, rule),)),
    )
