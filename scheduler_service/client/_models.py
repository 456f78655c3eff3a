"""Values that the SDK takes and returns. Plain data: nothing here knows gRPC or protobuf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation. `role` is system, user, assistant, or what the template knows."""

    role: str
    content: str


# Plain text; token ids, taken as they are; or a conversation, rendered by the model's template.
Prompt: TypeAlias = str | Sequence[int] | Sequence[ChatMessage]


class Priority(StrEnum):
    """How urgent a request is."""

    INTERACTIVE = "interactive"
    NORMAL = "normal"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """How tokens are drawn and when generation ends. None leaves the server's default.

    The server checks ranges; see `SamplingParams` and `StoppingParams` in the contract.
    """

    max_tokens: int | None = None  # at least 1
    temperature: float | None = None  # at least 0; 0 means greedy
    top_k: int | None = None  # 0 keeps all
    top_p: float | None = None  # share of probability, in (0, 1]
    min_p: float | None = None  # relative to the likeliest token, in [0, 1]
    seed: int | None = None  # uint64; drawn by the server when None
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # by token id
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_special_tokens: bool = False
    cache_salt: str = ""
    coalesce_ms: int = 0  # longest wait of a ready token for others, in milliseconds
    return_logits_digests: bool = False
    trace: bool = False  # the completion then holds an isobatch.trace.v1.Trace
    trace_kv: bool = False  # a trace with digests of the keys and values
    n: int = 1  # samples, at most 16; sample i is the answer to the seed plus i
    priority: Priority | None = None  # the server's default is NORMAL
    client_id: str = ""  # whose share of the server it takes from
    disable_speculation: bool = False  # changes the speed and no token


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of tokens."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_draft_tokens: int = 0  # drafted tokens that were verified
    num_accepted_draft_tokens: int = 0  # of these; each saved a step, up to the text's end


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations as the scheduler saw them, in seconds since it accepted the request."""

    queue_seconds: float
    time_to_first_token_seconds: float
    total_seconds: float


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is queued, and this is what it will use."""

    request_id: str
    model: str
    num_prompt_tokens: int
    seed: int
    max_tokens: int
    numeric_class: str
    trace: bytes = b""  # first piece of the trace, where asked
    num_samples: int = 1

    @property
    def text(self) -> str:
        """Empty: every event has text, so that a caller may simply join them."""
        return ""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """New tokens. `text` may be empty while part of a character or stop string is held back."""

    start_index: int  # index of the first of these tokens in the output
    token_ids: tuple[int, ...]
    text: str
    logits_digests: tuple[bytes, ...] = ()  # 16 bytes a token, where asked
    trace: bytes = b""  # next piece of the trace
    sample_index: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a sample. `text` is what was held back until now."""

    reason: FinishReason
    text: str
    stop_string: str | None
    stop_token_id: int | None
    usage: Usage
    timings: Timings
    num_preemptions: int
    trace: bytes = b""  # last piece of the trace
    sample_index: int = 0


Event: TypeAlias = Accepted | TokenEvent | Finished


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    request_id: str
    model: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_string: str | None
    stop_token_id: int | None
    seed: int
    numeric_class: str
    usage: Usage
    timings: Timings
    num_preemptions: int
    logits_digests: tuple[bytes, ...] = ()
    trace: bytes = b""
    sample_index: int = 0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that the server offers."""

    model: str
    architecture: str
    context_length: int  # tokens of prompt and output together
    vocab_size: int
    numeric_class: str
    weights_digest: str
    device: str
    num_parameters: int
    has_chat_template: bool


@dataclass(frozen=True, slots=True)
class Tokenization:
    """Token ids of a prompt. `rendered` is the text of a conversation after the template."""

    token_ids: tuple[int, ...]
    rendered: str


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts of the server's live state; totals are since its start."""

    num_running: int
    num_waiting: int
    num_steps: int
    num_generated_tokens: int
    num_prompt_tokens: int
    num_preemptions: int
    num_executor_reconnects: int
    total_blocks: int
    free_blocks: int
    executor_connected: bool
    num_waiting_interactive: int = 0
    num_waiting_normal: int = 0
    num_waiting_batch: int = 0
    num_waiting_tokens: int = 0
    num_paused: int = 0  # requests whose clients read slowly
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
