"""A request's trace as plain values. Field meanings are those of isobatch.trace.v1."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_service.core.params import SamplingParams

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class KernelPath:
    """One kernel path of a step."""

    op: str
    path: str
    unit: str
    dispatches: int


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """What was asked, and of whom: enough to run the request again."""

    request_id: str
    arrival_unix_ns: int
    model: str
    weights_digest: str
    numeric_class: str
    kv_class: str
    device: str
    block_size: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    stop: tuple[str, ...] = ()
    # Those that the request named; the model's own are the model's.
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_special_tokens: bool = False
    has_kv_digests: bool = False


@dataclass(frozen=True, slots=True)
class TraceToken:
    """One token of the output, and the logits that it was drawn from."""

    position: int
    token_id: int
    logits_digest: bytes
    top_ids: tuple[int, ...]
    top_logits: tuple[float, ...]

    @property
    def margin(self) -> float | None:
        """The largest logit less the next; None where there is one alone."""
        return self.top_logits[0] - self.top_logits[1] if len(self.top_logits) > 1 else None


@dataclass(frozen=True, slots=True)
class TraceStep:
    """One step with a token row of the request. Times are nanoseconds."""

    step_id: int
    generation: int
    start_position: int
    num_row_tokens: int
    num_step_tokens: int
    num_step_rows: int
    num_wanted: int
    max_neighbour_tokens: int
    kernel_paths: tuple[KernelPath, ...]
    start_ns: int
    duration_ns: int
    executor_ns: int
    tokens: tuple[TraceToken, ...] = ()

    @property
    def num_neighbours(self) -> int:
        """Token rows of others."""
        return self.num_step_rows - 1


@dataclass(frozen=True, slots=True)
class KvStep:
    """A step that wrote to the cache, as the executor remembers it."""

    step_id: int
    num_tokens: int
    num_wanted: int
    kernel_paths: tuple[KernelPath, ...]
    # One for each token row; empty when the executor no longer knew.
    sequence_hashes: tuple[int, ...]
    row_num_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KvBlock:
    """A block of the request's cache when it was given back."""

    generation: int
    block_index: int
    writer_hash: int
    first_step_id: int
    last_step_id: int
    min_step_tokens: int
    max_step_tokens: int
    # For each computed position: its step, where known, and its digest, where asked.
    steps: tuple[KvStep | None, ...]
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class TraceEnd:
    """How the request ended."""

    outcome: str
    num_tokens: int
    logits_digest: bytes
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole trace, or the part that was written."""

    header: TraceHeader
    steps: tuple[TraceStep, ...] = ()
    blocks: tuple[KvBlock, ...] = ()
    end: TraceEnd | None = None

    @property
    def tokens(self) -> tuple[tuple[TraceToken, TraceStep], ...]:
        """The output: each token with its step."""
        tokens = [(token, step) for step in self.steps for token in step.tokens]
        # A stop string may have come before the last token of its step.
        return tuple(tokens if self.end is None else tokens[: self.end.num_tokens])


def chained(digest: bytes, digests: Iterable[bytes]) -> bytes:
    """Return the running digest after more: BLAKE2b (16 bytes) of the one before and the next."""
    for each in digests:
        digest = hashlib.blake2b(digest + each, digest_size=DIGEST_BYTES).digest()
    return digest


NO_DIGEST = bytes(DIGEST_BYTES)
"""A running digest at its start."""
