"""A step as the engine sees it, and the rules that every step must keep.

Plain arrays: generated messages stop at `wire`. S is the number of token rows, T the number of
tokens, L the number of wanted positions; a step without rows only gives sequences back.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from executor_service.errors import InvalidStepError
from isobatch_kernels.step import Stat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor_service.kv_cache.manager import KvOccupancy
    from isobatch_kernels.step import PathCount

Int32 = npt.NDArray[np.int32]
UInt8 = npt.NDArray[np.uint8]
UInt32 = npt.NDArray[np.uint32]
UInt64 = npt.NDArray[np.uint64]
Float32 = npt.NDArray[np.float32]

_ALL_STATISTICS = int(
    Stat.ARGMAX | Stat.TOP_K | Stat.NORMALIZER | Stat.QUANTILE | Stat.NAMED | Stat.FULL_ROW
    | Stat.DIGEST
)  # fmt: skip


class Source(enum.IntEnum):
    """Where a row's tokens come from; values are those of the contract's TokenSource."""

    LITERAL = 1
    STEP_OUTPUT = 2


class Outcome(enum.IntEnum):
    """Whether a step ran; values are those of the contract's StepOutcome."""

    COMPUTED = 1
    NO_CAPACITY = 2


class RowOutcome(enum.IntEnum):
    """How a row ended; values are those of the contract's RowOutcome."""

    COMPUTED = 1
    NON_FINITE = 2


# As numpy scalars: members of an enum cost a microsecond each time they are looked up.
_UNKNOWN_STATISTICS = ~np.uint32(_ALL_STATISTICS)
_TOP_K, _NAMED = np.uint32(Stat.TOP_K), np.uint32(Stat.NAMED)
_LITERAL, _STEP_OUTPUT = np.uint8(Source.LITERAL), np.uint8(Source.STEP_OUTPUT)


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
    """One step, decoded; lengths agree, values are checked by `check_step`."""

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


@dataclass(frozen=True, slots=True, eq=False)
class StepAnswer:
    """The answer to a step. Arrays are copies: they outlive the next step."""

    step_id: int
    outcome: Outcome
    occupancy: KvOccupancy
    queue_ns: int = 0
    prepare_ns: int = 0
    results: StepResults | None = None  # None unless rows were computed


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


def check_step(request: StepRequest, limits: Limits) -> None:
    """Raise InvalidStepError naming the first field that breaks a rule. Changes nothing."""
    _check_rows(request, limits)
    _check_sources(request)
    _check_wanted(request, limits)
    _check_ids("named", request.named_starts, request.named_ids, limits)
    _check_ids("edit", request.edit_starts, request.edit_ids, limits)
    if not np.isfinite(request.edit_values).all():
        raise InvalidStepError("edit_values", "must be finite", _first_bad(request.edit_values))
    asked = (request.statistics & _NAMED) != 0
    named = np.diff(request.named_starts) > 0
    if bool(np.any(named & ~asked)):
        raise InvalidStepError("named_ids", "need STATISTIC_NAMED", "ids without it")


def _check_rows(request: StepRequest, limits: Limits) -> None:
    num_rows, num_tokens = len(request.sequence_ids), len(request.token_ids)
    if request.step_id < 1:
        raise InvalidStepError("step_id", "must be at least 1", request.step_id)
    if num_rows > limits.max_num_seqs:
        raise InvalidStepError("rows", f"must be at most {limits.max_num_seqs}", num_rows)
    if num_tokens > limits.max_num_batched_tokens:
        rule = f"must be at most {limits.max_num_batched_tokens}"
        raise InvalidStepError("tokens", rule, num_tokens)
    sequence_ids = set(request.sequence_ids.tolist())
    if len(sequence_ids) != num_rows:
        raise InvalidStepError("row_sequence_ids", "must name a sequence once", "one twice")
    if not sequence_ids.isdisjoint(request.released.tolist()):
        raise InvalidStepError("row_sequence_ids", "must not be released", "a released one")
    if num_rows == 0:
        if num_tokens:
            raise InvalidStepError("token_ids", "must have rows", num_tokens)
        return
    if request.num_tokens.min() < 1:
        raise InvalidStepError("row_num_tokens", "must be at least 1", request.num_tokens.min())
    total = int(request.num_tokens.sum(dtype=np.int64))
    if total != num_tokens:
        raise InvalidStepError("row_num_tokens", f"must add up to {num_tokens} tokens", total)
    if request.start_positions.min() < 0:
        got = request.start_positions.min()
        raise InvalidStepError("row_start_positions", "must be at least 0", got)
    end = int((request.start_positions.astype(np.int64) + request.num_tokens).max())
    if end > limits.context_length:
        rule = f"must end within {limits.context_length} positions"
        raise InvalidStepError("row_start_positions", rule, end)
    _check_range("token_ids", request.token_ids, limits.vocab_size)


def _check_sources(request: StepRequest) -> None:
    if (request.sources == _LITERAL).all():
        return
    known = (request.sources == _LITERAL) | (request.sources == _STEP_OUTPUT)
    if not known.all():
        got = request.sources[~known][0]
        raise InvalidStepError("row_token_sources", "must be LITERAL or STEP_OUTPUT", got)
    outputs = request.sources == _STEP_OUTPUT
    if (request.num_tokens[outputs] != 1).any():
        rule = "must be 1 for STEP_OUTPUT rows"
        raise InvalidStepError("row_num_tokens", rule, request.num_tokens[outputs].max())
    starts = np.cumsum(request.num_tokens) - request.num_tokens
    if request.token_ids[starts[outputs]].any():
        raise InvalidStepError("token_ids", "must be 0 for STEP_OUTPUT rows", "another id")


def _check_wanted(request: StepRequest, limits: Limits) -> None:
    wanted, statistics = request.wanted, request.statistics
    if len(wanted) and (wanted[0] < 0 or wanted[-1] >= len(request.token_ids)):
        rule = f"must be indexes into {len(request.token_ids)} tokens"
        raise InvalidStepError("wanted_token_indexes", rule, f"{wanted[0]}..{wanted[-1]}")
    # Compared, not subtracted: differences of int32 wrap.
    if (wanted[1:] <= wanted[:-1]).any():
        raise InvalidStepError("wanted_token_indexes", "must ascend", wanted[:8].tolist())
    unknown = statistics & _UNKNOWN_STATISTICS
    if unknown.any():
        raise InvalidStepError("wanted_statistics", "must be known bits", int(unknown.max()))
    asked = (statistics & _TOP_K) != 0
    top_k = request.top_k
    if (top_k[~asked] != 0).any():
        raise InvalidStepError("wanted_top_k", "must be 0 without STATISTIC_TOP_K", top_k.max())
    if (top_k[asked] < 1).any() or (top_k[asked] > limits.max_top_k).any():
        rule = f"must be in 1..{limits.max_top_k}"
        raise InvalidStepError("wanted_top_k", rule, top_k[asked].tolist()[:8])
    temperatures = request.inverse_temperatures
    if not (np.isfinite(temperatures) & (temperatures > 0)).all():
        rule = "must be positive and finite"
        raise InvalidStepError("wanted_inverse_temperatures", rule, temperatures.tolist()[:8])
    quantiles = request.quantiles
    if not ((quantiles >= 0) & (quantiles < 1)).all():
        raise InvalidStepError("wanted_quantiles", "must be in [0, 1)", quantiles.tolist()[:8])


def _check_ids(name: str, starts: Int32, ids: Int32, limits: Limits) -> None:
    if starts[0] != 0 or starts[-1] != len(ids) or (starts[1:] < starts[:-1]).any():
        rule = f"must ascend from 0 to {len(ids)}"
        raise InvalidStepError(f"{name}_starts", rule, starts[:8].tolist())
    _check_range(f"{name}_ids", ids, limits.vocab_size)


def _check_range(field: str, ids: Int32, size: int) -> None:
    if len(ids) and (ids.min() < 0 or ids.max() >= size):
        bad = ids[(ids < 0) | (ids >= size)][0]
        raise InvalidStepError(field, f"must be in 0..{size - 1}", bad)


def _first_bad(values: Float32) -> float:
    return float(values[~np.isfinite(values)][0])
