"""The SDK of isobatch: `Client` for threads, `AsyncClient` for asyncio.

    from scheduler_service.client import Client, GenerationParams

    with Client() as client:
        for event in client.generate("The sky is", GenerationParams(max_tokens=32)):
            print(event.text, end="", flush=True)

Importing it loads gRPC, protobuf and the standard library, and nothing of the engines.
"""

from scheduler_service.client._aio import AsyncClient, AsyncGenerationStream
from scheduler_service.client._errors import (
    AbortedError,
    AccessDeniedError,
    AlreadyExistsError,
    ContextLengthError,
    DeadlineError,
    ErrorDetails,
    FieldViolation,
    FirstTokenTimeoutError,
    InvalidRequestError,
    IsobatchError,
    NotFoundError,
    OverloadedError,
    ProtocolError,
    RequestCancelledError,
    ServerError,
    UnavailableError,
)
from scheduler_service.client._models import (
    Accepted,
    ChatMessage,
    Completion,
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
from scheduler_service.client._sync import Client, GenerationStream

__all__ = [
    "AbortedError",
    "Accepted",
    "AccessDeniedError",
    "AlreadyExistsError",
    "AsyncClient",
    "AsyncGenerationStream",
    "ChatMessage",
    "Client",
    "Completion",
    "ContextLengthError",
    "DeadlineError",
    "ErrorDetails",
    "Event",
    "FieldViolation",
    "FinishReason",
    "Finished",
    "FirstTokenTimeoutError",
    "GenerationParams",
    "GenerationStream",
    "InvalidRequestError",
    "IsobatchError",
    "ModelInfo",
    "NotFoundError",
    "OverloadedError",
    "Priority",
    "Prompt",
    "ProtocolError",
    "RequestCancelledError",
    "ServerError",
    "Stats",
    "Timings",
    "TokenEvent",
    "Tokenization",
    "UnavailableError",
    "Usage",
]
