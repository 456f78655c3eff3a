"""A step as the engine sees it, and its answer.

Plain arrays: generated messages stop at `wire`. S is the number of token rows, T the number of
tokens, L the number of wanted positions; a step without rows only gives sequences back.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor_service.kv_cache.manager import KvOccupancy
    from isobatch_kernels.step import PathCount

Int32 = npt.NDArray[np.int32]
UInt8 = npt.NDArray[np.uint8]
UInt32 = npt.NDArray[np.uint32]
UInt64 = npt.NDArray[np.uint64]
Float32 = npt.NDArray[np.float32]


MAX_STEPS_IN_FLIGHT: Final = 2
"""Steps that may be begun and not finished, and answers that are kept for repeated steps."""


class Source(enum.IntEnum):
    """Where a row's tokens come from; values are those of the contract's TokenSource."""

    LITERAL = 1
    STEP_OUTPUT = 2


class Outcome(enum.IntEnum):
    """Whether a step ran; values are those of the contract's StepOutcome."""

    COMPUTED = 1
    NO_CAPACITY = 2
    SOURCE_NOT_COMPUTED = 3


class RowOutcome(enum.IntEnum):
    """How a row ended; values are those of the contract's RowOutcome."""

    COMPUTED = 1
    NON_FINITE = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step may hold."""

    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    context_length: int
    max_top_k: int


@dataclass(frozen=True, slots=True, eq=False)
class StepRequest:
    """One step, decoded; lengths agree, values are checked by `StepChecker`."""

    step_id: int
    model_id: str
    released: UInt64  # (num_released,)
    sequence_ids: UInt64  # (S,)
    generations: UInt32  # (S,)
    start_positions: Int32  # (S,)
    num_tokens: Int32  # (S,)
    sources: UInt8  # (S,) Source
    source_steps: UInt64  # (S,)
    source_wanted: Int32  # (S,)
    token_ids: Int32  # (T,)
    wanted: Int32  # (L,)
    statistics: UInt32  # (L,) Stat bits
    top_k: Int32  # (L,)
    inverse_temperatures: Float32  # (L,)
    quantiles: Float32  # (L,)
    named_starts: Int32  # (L + 1,)
    named_ids: Int32
    edit_starts: Int32  # (L + 1,)
    edit_ids: Int32
    edit_values: Float32
    record_provenance: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class StepAnswer:
    """The answer to a step. Arrays are copies: they outlive the next step."""

    step_id: int
    outcome: Outcome
    occupancy: KvOccupancy
    queue_ns: int = 0
    prepare_ns: int = 0
    results: StepResults | None = None  # None unless rows were computed
    provenance_handle: int = 0
    # `time.perf_counter_ns` from which on its time counts: at its arrival, or when the step ahead
    # of it was done.
    since_ns: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class StepResults:
    """What a step computed."""

    row_outcomes: UInt8  # (S,) RowOutcome
    non_finite_details: tuple[str, ...]  # one for each NON_FINITE row
    argmax_ids: Int32  # (L,) -1 where not asked
    max_logits: Float32  # (L,)
    quantile_ids: Int32  # (L,) -1 where not asked
    normalizers: Float32  # (L,) 0 where not asked
    top_k_starts: Int32  # (L + 1,)
    top_k_ids: Int32
    top_k_logits: Float32
    top_k_weights: Float32
    named_logits: Float32  # (num_named,)
    digests: bytes  # L * 16, or empty when none was asked
    forward_ns: int
    statistics_ns: int
    paths: Sequence[PathCount]

    def with_details(self, details: Sequence[str]) -> StepResults:
        """Return these results with the given details, one a row; empty means finite."""
        outcomes = np.asarray(
            [RowOutcome.NON_FINITE if detail else RowOutcome.COMPUTED for detail in details],
            np.uint8,
        )
        named = tuple(detail for detail in details if detail)
        return replace(self, row_outcomes=outcomes, non_finite_details=named)
