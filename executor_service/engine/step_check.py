"""The rules that every step must keep."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Final

import numpy as np

from executor_service.engine.step_request import Source
from executor_service.errors import InvalidStepError
from isobatch_kernels.step import Stat

if TYPE_CHECKING:
    from executor_service.engine.step_request import Float32, Int32, Limits, StepRequest

_ALL_STATISTICS = int(
    Stat.ARGMAX | Stat.TOP_K | Stat.NORMALIZER | Stat.QUANTILE | Stat.NAMED | Stat.FULL_ROW
    | Stat.DIGEST
)  # fmt: skip
# As numpy scalars: members of an enum cost a microsecond each time they are looked up.
_UNKNOWN_STATISTICS = ~np.uint32(_ALL_STATISTICS)
_TOP_K, _NAMED = np.uint32(Stat.TOP_K), np.uint32(Stat.NAMED)
_LITERAL, _STEP_OUTPUT = np.uint8(Source.LITERAL), np.uint8(Source.STEP_OUTPUT)
_OUTPUT: Final = int(Source.STEP_OUTPUT)
# What stays as it is while the same requests decode; `wire.read_step` then gives the same arrays.
_STEADY: Final = operator.attrgetter(
    "sequence_ids", "num_tokens", "sources", "wanted", "statistics", "top_k",
    "inverse_temperatures", "named_starts", "named_ids", "edit_starts", "edit_ids", "edit_values",
)  # fmt: skip


class StepChecker:
    """`check_step` for the steps of one model, which does not check the same arrays twice."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        # The last step that was right, unless its arrays could change.
        self._last: StepRequest | None = None
        self._num_tokens: list[int] = []

    def check(self, request: StepRequest) -> None:
        """Raise InvalidStepError naming the first field that breaks a rule."""
        if not self._is_surely_right(request):
            self._last = None
            check_step(request, self._limits)
            if _is_frozen(request):
                self._last, self._num_tokens = request, request.num_tokens.tolist()

    def _is_surely_right(self, request: StepRequest) -> bool:
        """Return whether only values differ from the last step, and those are right."""
        last, limits = self._last, self._limits
        if last is None or len(request.token_ids) != len(last.token_ids) or len(request.released):
            return False
        if not all(map(operator.is_, _STEADY(request), _STEADY(last))):
            return False
        starts, tokens = request.start_positions.tolist(), request.token_ids.tolist()
        return (
            request.step_id >= 1
            and bool(starts)
            and min(starts) >= 0
            and max(map(int.__add__, starts, self._num_tokens)) <= limits.context_length
            and min(tokens) >= 0
            and max(tokens) < limits.vocab_size
            and all(0 <= quantile < 1 for quantile in request.quantiles.tolist())
            # Rows that take their token from a step write a 0; here that is asked of all.
            and (not any(tokens) or _OUTPUT not in request.sources.tobytes())
        )


def _is_frozen(request: StepRequest) -> bool:
    return not any(array.flags.writeable for array in _STEADY(request))


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
