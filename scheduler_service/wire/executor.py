"""The executor's contract: core values to messages, answers to arrays.

Arrays travel as packed little-endian bytes; their dtypes and shapes are stated in the contract
and checked here, so that a broken answer is an error and never a wrong token.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from isobatch.executor.v1 import executor_service_pb2 as pb
from isobatch.executor.v1 import token_rows_pb2
from scheduler_service.core import (
    KvCounts,
    SequenceOpened,
    SequenceOpening,
    TokenRowBatch,
    TokenSourceKind,
)
from scheduler_service.sampling import RowStatistics, Statistic, WantedStatistics
from scheduler_service.tracing.model import KernelPath
from scheduler_service.wire.capabilities import WireError
from scheduler_service.wire.kernel_paths import read_path

_I32 = np.dtype("<i4")
_F32 = np.dtype("<f4")
_U8 = np.dtype("u1")

_DIGEST_BYTES = 16
_COMPUTED = bytes([token_rows_pb2.ROW_OUTCOME_COMPUTED])
# As plain numbers: operators of enums are slow, and these are asked for in every step.
_TOP_K, _DIGEST = int(Statistic.TOP_K), int(Statistic.DIGEST)
_SOURCES = {
    TokenSourceKind.LITERAL: token_rows_pb2.TOKEN_SOURCE_LITERAL,
    TokenSourceKind.STEP_OUTPUT: token_rows_pb2.TOKEN_SOURCE_STEP_OUTPUT,
}

_Scalar = TypeVar("_Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True, eq=False)
class StepAnswer:
    """The executor's answer to a step that ran, by token row (S) and wanted position (L)."""

    step_id: int
    # (S,): why the row must not be used; None for a good row.
    row_errors: tuple[str | None, ...]
    # (L,)
    statistics: tuple[RowStatistics, ...]
    # (L,): 16 bytes each, or empty where none was asked for.
    digests: tuple[bytes, ...]
    # Empty unless they were asked for.
    kernel_paths: tuple[KernelPath, ...] = ()


@dataclass(frozen=True, slots=True)
class StepReply:
    """What came back for a step: an answer, or none for want of blocks."""

    # None when the pool could not grow and nothing was computed.
    answer: StepAnswer | None
    kv_counts: KvCounts
    # From arrival, or from the end of the step ahead, to the answer; of the executor, in seconds.
    executor_seconds: float
    # False when nothing was computed because the step whose tokens it takes was not.
    has_source: bool = True


def _pack(code: str, values: Sequence[float]) -> bytes:
    """Pack numbers by `struct`'s code; for the few of a step this beats an array by far."""
    return struct.pack(f"<{len(values)}{code}", *values)


def _numbers(name: str, data: bytes, code: str, count: int) -> tuple[Any, ...]:
    """Unpack `count` numbers of 4 bytes by `struct`'s code."""
    if len(data) != 4 * count:
        raise WireError(f"[step_result] {name} must have {4 * count} bytes, got {len(data)}")
    return struct.unpack(f"<{count}{code}", data)


def _unpack(name: str, data: bytes, dtype: "np.dtype[_Scalar]", count: int) -> NDArray[_Scalar]:
    if len(data) != count * dtype.itemsize:
        raise WireError(
            f"[step_result] {name} must have {count * dtype.itemsize} bytes, got {len(data)}"
        )
    return np.frombuffer(data, dtype)


def start_session(scheduler_epoch: int) -> pb.SessionRequest:
    """Return the first message of a session."""
    return pb.SessionRequest(start=pb.StartSession(scheduler_epoch=scheduler_epoch))


def open_sequences(openings: Sequence[SequenceOpening]) -> pb.SessionRequest:
    """Return the message that announces sequences, with their tokens for prefix lookup."""
    return pb.SessionRequest(
        open=token_rows_pb2.OpenSequences(
            sequences=[
                token_rows_pb2.OpenSequence(
                    key=token_rows_pb2.SequenceKey(
                        sequence_id=opening.sequence_id, generation=opening.generation
                    ),
                    model_id=opening.model,
                    cache_salt=opening.cache_salt,
                    token_ids=_pack("i", opening.token_ids),
                    max_cached_tokens=opening.max_cached_tokens,
                )
                for opening in openings
            ]
        )
    )


def step(batch: TokenRowBatch, wanted: Sequence[WantedStatistics]) -> pb.SessionRequest:
    """Return the message of a step; `wanted` has one question for each wanted position."""
    rows = batch.rows
    indexes: list[int] = []
    token_ids: list[int] = []
    has_sources = False
    for row in rows:
        start = len(token_ids)
        token_ids += row.token_ids
        indexes += [start + position.offset for position in row.wanted]
        has_sources = has_sources or row.source.kind is not TokenSourceKind.LITERAL
    if len(wanted) != len(indexes):
        raise AssertionError(
            f"[wire] each wanted position must have a question, got {len(wanted)} "
            f"for {len(indexes)}"
        )
    message = token_rows_pb2.Step(
        step_id=batch.step_id,
        model_id=batch.model,
        released_sequence_ids=_pack("Q", batch.released_sequence_ids),
        row_sequence_ids=_pack("Q", [row.sequence_id for row in rows]),
        row_generations=_pack("I", [row.generation for row in rows]),
        row_start_positions=_pack("i", [row.start_position for row in rows]),
        row_num_tokens=_pack("i", [len(row.token_ids) for row in rows]),
        token_ids=_pack("i", token_ids),
        wanted_token_indexes=_pack("i", indexes),
        wanted_statistics=_pack("I", [each.statistics for each in wanted]),
        wanted_top_k=_pack("i", [each.top_k for each in wanted]),
        wanted_inverse_temperatures=_pack("f", [each.inverse_temperature for each in wanted]),
        wanted_quantiles=_pack("f", [each.quantile for each in wanted]),
    )
    if has_sources:
        message.row_token_sources = bytes([_SOURCES[row.source.kind] for row in rows])
        message.row_source_steps = _pack("Q", [row.source.step_id for row in rows])
        message.row_source_wanted = _pack("i", [row.source.wanted_index for row in rows])
    if any(each.edits for each in wanted):
        message.edit_starts = _prefix_sums(len(each.edits) for each in wanted)
        message.edit_ids = _pack("i", [edit[0] for each in wanted for edit in each.edits])
        values = (edit[1] for each in wanted for edit in each.edits)
        message.edit_values = np.fromiter(values, _F32).tobytes()
    return pb.SessionRequest(step=message)


def _prefix_sums(lengths: Iterable[int]) -> bytes:
    return np.concatenate(([0], np.cumsum(np.fromiter(lengths, np.int64)))).astype(_I32).tobytes()


def fetch_logits(step_id: int, wanted_indexes: Sequence[int]) -> pb.SessionRequest:
    """Return the message that asks for full rows of the last step."""
    return pb.SessionRequest(
        fetch_logits=token_rows_pb2.FetchLogits(
            step_id=step_id, wanted_indexes=_pack("i", wanted_indexes)
        )
    )


def _expect(response: pb.SessionResponse, name: str) -> None:
    got = response.WhichOneof("message")
    if got != name:
        raise WireError(f"[session] the answer must be {name}, got {got}")


def read_started(response: pb.SessionResponse) -> int:
    """Return the executor epoch of the answer to `start_session`."""
    _expect(response, "started")
    return response.started.executor_epoch


def read_opened(
    response: pb.SessionResponse, openings: Sequence[SequenceOpening]
) -> tuple[list[SequenceOpened], KvCounts]:
    """Return the answer to `open_sequences(openings)`, in order, and the block counts after it."""
    _expect(response, "opened")
    sequences = response.opened.sequences
    if len(sequences) != len(openings):
        raise WireError(f"[opened] {len(openings)} sequences were asked for, got {len(sequences)}")
    answers = []
    for opening, each in zip(openings, sequences, strict=True):
        key, asked = each.key, (opening.sequence_id, opening.generation)
        if (key.sequence_id, key.generation) != asked:
            raise WireError(
                f"[opened] sequence {asked} was asked for, got {(key.sequence_id, key.generation)}"
            )
        if each.num_cached_tokens > opening.max_cached_tokens:
            raise WireError(
                f"[opened] at most {opening.max_cached_tokens} cached tokens were asked for, "
                f"got {each.num_cached_tokens}"
            )
        answers.append(
            SequenceOpened(
                opening.request_id,
                opening.sequence_id,
                opening.generation,
                each.num_cached_tokens,
                each.provenance_handle,
            )
        )
    return answers, _kv_counts(response.opened.kv_occupancy)


def _kv_counts(occupancy: token_rows_pb2.KvOccupancy) -> KvCounts:
    return KvCounts(
        occupancy.total_blocks, occupancy.free_blocks, occupancy.evictable_blocks,
        occupancy.shared_blocks,
    )  # fmt: skip


def read_step(
    response: pb.SessionResponse, batch: TokenRowBatch, wanted: Sequence[WantedStatistics],
    vocab_size: int, *, wants_paths: bool = False,
) -> StepReply:  # fmt: skip
    """Return the answer to `step(batch, wanted)`, with kernel paths where they are wanted."""
    _expect(response, "step_result")
    result = response.step_result
    if result.step_id != batch.step_id:
        raise WireError(f"[step_result] step_id must be {batch.step_id}, got {result.step_id}")
    counts = _kv_counts(result.kv_occupancy)
    seconds = result.timings.total_ns * 1e-9
    if result.outcome == token_rows_pb2.STEP_OUTCOME_NO_CAPACITY:
        return StepReply(None, counts, seconds)
    if result.outcome == token_rows_pb2.STEP_OUTCOME_SOURCE_NOT_COMPUTED:
        return StepReply(None, counts, seconds, has_source=False)
    if result.outcome != token_rows_pb2.STEP_OUTCOME_COMPUTED:
        raise WireError(f"[step_result] outcome must be set, got {result.outcome}")
    answer = StepAnswer(
        step_id=result.step_id,
        row_errors=_row_errors(result, len(batch.rows)),
        statistics=_statistics(result, wanted, vocab_size),
        digests=_digests(result.digests, wanted),
        kernel_paths=tuple(map(read_path, result.kernel_paths)) if wants_paths else (),
    )
    return StepReply(answer, counts, seconds)


def _row_errors(result: token_rows_pb2.StepResult, num_rows: int) -> tuple[str | None, ...]:
    if len(result.row_outcomes) != num_rows:
        raise WireError(
            f"[step_result] row_outcomes must have {num_rows} bytes, got {len(result.row_outcomes)}"
        )
    if result.row_outcomes == _COMPUTED * num_rows:
        return (None,) * num_rows
    details = iter(result.non_finite_details)
    errors: list[str | None] = []
    for outcome in result.row_outcomes:
        if outcome == token_rows_pb2.ROW_OUTCOME_COMPUTED:
            errors.append(None)
        elif outcome == token_rows_pb2.ROW_OUTCOME_NON_FINITE:
            where = next(details, "") or "an unnamed layer"
            errors.append(f"[forward] numbers must stay finite, got NaN or infinity in {where}")
        else:
            raise WireError(f"[step_result] row_outcomes must be set, got {outcome}")
    return tuple(errors)


def _statistics(
    result: token_rows_pb2.StepResult, wanted: Sequence[WantedStatistics], vocab_size: int
) -> tuple[RowStatistics, ...]:
    count = len(wanted)
    argmax_ids = _numbers("argmax_ids", result.argmax_ids, "i", count)
    max_logits = _numbers("max_logits", result.max_logits, "f", count)
    quantile_ids = _numbers("quantile_ids", result.quantile_ids, "i", count)
    normalizers = _numbers("normalizers", result.normalizers, "f", count)
    if not any(each.top_k for each in wanted):
        # As in nearly all steps.
        return tuple(
            [
                RowStatistics(vocab_size, *numbers)
                for numbers in zip(argmax_ids, max_logits, quantile_ids, normalizers, strict=True)
            ]
        )
    starts = _numbers("top_k_starts", result.top_k_starts, "i", count + 1)
    ids = _unpack("top_k_ids", result.top_k_ids, _I32, starts[-1])
    logits = _unpack("top_k_logits", result.top_k_logits, _F32, starts[-1])
    weights = _unpack("top_k_weights", result.top_k_weights, _F32, starts[-1])
    rows = []
    for index, each in enumerate(wanted):
        span = slice(starts[index], starts[index + 1])
        has_top_k = int(each.statistics) & _TOP_K
        if has_top_k and span.stop - span.start != each.top_k:
            raise WireError(
                f"[step_result] top-K must have {each.top_k} entries, got {span.stop - span.start}"
            )
        rows.append(
            RowStatistics(
                vocab_size=vocab_size,
                argmax_id=argmax_ids[index],
                max_logit=max_logits[index],
                quantile_id=quantile_ids[index],
                normalizer=normalizers[index],
                top_k_ids=ids[span] if has_top_k else None,
                top_k_logits=logits[span] if has_top_k else None,
                top_k_weights=weights[span] if has_top_k else None,
            )
        )
    return tuple(rows)


def _digests(data: bytes, wanted: Sequence[WantedStatistics]) -> tuple[bytes, ...]:
    if not any(int(each.statistics) & _DIGEST for each in wanted):
        return (b"",) * len(wanted)
    packed = _unpack("digests", data, _U8, len(wanted) * _DIGEST_BYTES).tobytes()
    return tuple(
        packed[index * _DIGEST_BYTES : (index + 1) * _DIGEST_BYTES]
        if int(each.statistics) & _DIGEST
        else b""
        for index, each in enumerate(wanted)
    )


def read_logits(
    response: pb.SessionResponse, step_id: int, num_rows: int, vocab_size: int
) -> NDArray[np.float32]:
    """Return the (num_rows, vocab_size) rows of the answer to `fetch_logits`."""
    _expect(response, "logits_fetched")
    fetched = response.logits_fetched
    if fetched.step_id != step_id:
        raise WireError(f"[logits_fetched] step_id must be {step_id}, got {fetched.step_id}")
    if fetched.logits.WhichOneof("payload") != "inline":
        raise WireError("[logits_fetched] logits must be inline: no shared memory was offered")
    flat = _unpack("logits", fetched.logits.inline, _F32, num_rows * vocab_size)
    return flat.reshape(num_rows, vocab_size)
