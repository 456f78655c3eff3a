"""The contract's messages to the engine's values and back. Generated messages stop here.

Arrays travel as packed little-endian bytes. Their lengths are checked here, against each other;
what the values may be is `check_step`'s business.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from executor_service.engine.open_sequences import Opening
from executor_service.engine.provenance_report import opening_handle
from executor_service.engine.step_request import Outcome, Source, StepAnswer, StepRequest
from executor_service.errors import InvalidRequestError, InvalidStepError
from isobatch.executor.v1 import executor_service_pb2 as service_pb
from isobatch.executor.v1 import token_rows_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable

    from executor_service.engine.step_request import Int32
    from executor_service.kv_cache.manager import KvOccupancy
    from isobatch_kernels.step import PathCount

_I32 = np.dtype("<i4")
_U32 = np.dtype("<u4")
_U64 = np.dtype("<u8")
_F32 = np.dtype("<f4")
_U8 = np.dtype("u1")

_Scalar = TypeVar("_Scalar", bound=np.generic)

KERNEL_OPS = {
    "embed": pb.KERNEL_OP_EMBED,
    "norm_quantize": pb.KERNEL_OP_NORM_QUANTIZE,
    "linear": pb.KERNEL_OP_LINEAR,
    "rope_write_kv": pb.KERNEL_OP_ROPE_WRITE_KV,
    "paged_attention": pb.KERNEL_OP_PAGED_ATTENTION,
    "gate_quantize": pb.KERNEL_OP_GATE_QUANTIZE,
    "row_statistics": pb.KERNEL_OP_ROW_STATISTICS,
    "quantize": pb.KERNEL_OP_QUANTIZE,
}
KERNEL_PATHS = {
    "gemv": pb.KERNEL_PATH_GEMV,
    "gemv_multi": pb.KERNEL_PATH_GEMV_MULTI,
    "gemm": pb.KERNEL_PATH_GEMM,
    "attention_decode": pb.KERNEL_PATH_ATTENTION_DECODE,
    "attention_prefill": pb.KERNEL_PATH_ATTENTION_PREFILL,
    "other": pb.KERNEL_PATH_OTHER,
}
_OUTCOMES = {
    Outcome.COMPUTED: pb.STEP_OUTCOME_COMPUTED,
    Outcome.NO_CAPACITY: pb.STEP_OUTCOME_NO_CAPACITY,
    Outcome.SOURCE_NOT_COMPUTED: pb.STEP_OUTCOME_SOURCE_NOT_COMPUTED,
}
KERNEL_UNITS = {
    # The reference is scalar code; the contract has no name of its own for it.
    "reference": pb.KERNEL_UNIT_SCALAR,
    "scalar": pb.KERNEL_UNIT_SCALAR,
    "avx2": pb.KERNEL_UNIT_AVX2,
    "vnni": pb.KERNEL_UNIT_VNNI,
    "amx": pb.KERNEL_UNIT_AMX,
    "neon": pb.KERNEL_UNIT_NEON,
    "metal": pb.KERNEL_UNIT_METAL,
    "cuda": pb.KERNEL_UNIT_CUDA,
    "mlx": pb.KERNEL_UNIT_MLX,
}


def _array(
    field: str, data: bytes, dtype: np.dtype[_Scalar], count: int | None = None
) -> npt.NDArray[_Scalar]:
    """Read an array of `count` elements, or of any whole number of them."""
    size, rest = divmod(len(data), dtype.itemsize)
    if rest:
        rule = f"must be whole elements of {dtype.itemsize} bytes"
        raise InvalidStepError(field, rule, f"{len(data)} bytes")
    if count is not None and size != count:
        raise InvalidStepError(field, f"must have {count} elements", size)
    return np.frombuffer(data, dtype)


def _optional(
    field: str, data: bytes, dtype: np.dtype[_Scalar], count: int, default: int
) -> npt.NDArray[_Scalar]:
    """Read an array of `count` elements that may be left out."""
    if not data:
        return np.frombuffer(np.full(count, default, dtype).tobytes(), dtype)
    return _array(field, data, dtype, count)


def _required(
    field: str, data: bytes, dtype: np.dtype[_Scalar], count: int, _default: int
) -> npt.NDArray[_Scalar]:
    return _array(field, data, dtype, count)


def read_step(step: pb.Step) -> StepRequest:
    """Decode a step; raises InvalidStepError for an array of the wrong length.

    Fields whose bytes are those of the step before give the same (read-only) arrays again.
    """
    rows = _read_rows(
        step.row_sequence_ids,
        step.row_generations,
        step.row_num_tokens,
        step.row_token_sources,
        step.row_source_wanted,
    )
    questions = _read_questions(
        step.wanted_token_indexes,
        step.wanted_statistics,
        step.wanted_top_k,
        step.wanted_inverse_temperatures,
        step.named_starts,
        step.named_ids,
        step.edit_starts,
        step.edit_ids,
        step.edit_values,
    )
    # Where no row takes its token from a step, this array and `row_source_wanted` may be left out.
    read = _required if rows.has_outputs else _optional
    num_rows, num_wanted = len(rows.sequence_ids), len(questions.wanted)
    return StepRequest(
        step_id=step.step_id,
        model_id=step.model_id,
        released=_array("released_sequence_ids", step.released_sequence_ids, _U64),
        sequence_ids=rows.sequence_ids,
        generations=rows.generations,
        start_positions=_array("row_start_positions", step.row_start_positions, _I32, num_rows),
        num_tokens=rows.num_tokens,
        sources=rows.sources,
        source_steps=read("row_source_steps", step.row_source_steps, _U64, num_rows, 0),
        source_wanted=rows.source_wanted,
        token_ids=_array("token_ids", step.token_ids, _I32),
        wanted=questions.wanted,
        statistics=questions.statistics,
        top_k=questions.top_k,
        inverse_temperatures=questions.inverse_temperatures,
        quantiles=_array("wanted_quantiles", step.wanted_quantiles, _F32, num_wanted),
        named_starts=questions.named_starts,
        named_ids=questions.named_ids,
        edit_starts=questions.edit_starts,
        edit_ids=questions.edit_ids,
        edit_values=questions.edit_values,
        record_provenance=step.record_provenance,
    )


class _Rows(NamedTuple):
    sequence_ids: npt.NDArray[np.uint64]
    generations: npt.NDArray[np.uint32]
    num_tokens: Int32
    sources: npt.NDArray[np.uint8]
    source_wanted: Int32
    has_outputs: bool


class _Questions(NamedTuple):
    wanted: Int32
    statistics: npt.NDArray[np.uint32]
    top_k: Int32
    inverse_temperatures: npt.NDArray[np.float32]
    named_starts: Int32
    named_ids: Int32
    edit_starts: Int32
    edit_ids: Int32
    edit_values: npt.NDArray[np.float32]


# While the same requests decode, these two come with the same bytes in every step.
@functools.lru_cache(maxsize=2)
def _read_rows(
    sequence_ids: bytes,
    generations: bytes,
    num_tokens: bytes,
    sources: bytes,
    source_wanted: bytes,
) -> _Rows:
    ids = _array("row_sequence_ids", sequence_ids, _U64)
    count = len(ids)
    kinds = _optional("row_token_sources", sources, _U8, count, Source.LITERAL)
    has_outputs = Source.STEP_OUTPUT in kinds.tobytes()
    read = _required if has_outputs else _optional
    return _Rows(
        sequence_ids=ids,
        generations=_array("row_generations", generations, _U32, count),
        num_tokens=_array("row_num_tokens", num_tokens, _I32, count),
        sources=kinds,
        source_wanted=read("row_source_wanted", source_wanted, _I32, count, 0),
        has_outputs=has_outputs,
    )


@functools.lru_cache(maxsize=2)
def _read_questions(
    wanted: bytes,
    statistics: bytes,
    top_k: bytes,
    inverse_temperatures: bytes,
    named_starts: bytes,
    named_ids: bytes,
    edit_starts: bytes,
    edit_ids: bytes,
    edit_values: bytes,
) -> _Questions:
    positions = _array("wanted_token_indexes", wanted, _I32)
    count = len(positions)
    edits = _array("edit_ids", edit_ids, _I32)
    return _Questions(
        wanted=positions,
        statistics=_array("wanted_statistics", statistics, _U32, count),
        top_k=_array("wanted_top_k", top_k, _I32, count),
        inverse_temperatures=_array(
            "wanted_inverse_temperatures", inverse_temperatures, _F32, count
        ),
        named_starts=_optional("named_starts", named_starts, _I32, count + 1, 0),
        named_ids=_array("named_ids", named_ids, _I32),
        edit_starts=_optional("edit_starts", edit_starts, _I32, count + 1, 0),
        edit_ids=edits,
        edit_values=_array("edit_values", edit_values, _F32, len(edits)),
    )


def read_openings(message: pb.OpenSequences) -> list[Opening]:
    """Decode the sequences of an Open."""
    return [
        Opening(
            sequence_id=each.key.sequence_id,
            generation=each.key.generation,
            model_id=each.model_id,
            cache_salt=each.cache_salt,
            token_ids=_ids("open", "token_ids", each.token_ids, _I32),
            max_cached_tokens=each.max_cached_tokens,
        )
        for each in message.sequences
    ]


def read_released(message: pb.ReleaseSequences) -> list[int]:
    """Decode the sequences of a Release."""
    ids: list[int] = _ids("release", "sequence_ids", message.sequence_ids, _U64).tolist()
    return ids


def read_wanted_indexes(message: pb.FetchLogits) -> Int32:
    """Decode the rows of a FetchLogits."""
    return _ids("fetch_logits", "wanted_indexes", message.wanted_indexes, _I32)


def _ids(op: str, field: str, data: bytes, dtype: np.dtype[_Scalar]) -> npt.NDArray[_Scalar]:
    if len(data) % dtype.itemsize:
        raise InvalidRequestError(
            f"[{op}] {field} must be whole elements of {dtype.itemsize} bytes, "
            f"got {len(data)} bytes",
            {"field": field},
        )
    return np.frombuffer(data, dtype)


def occupancy(counts: KvOccupancy) -> pb.KvOccupancy:
    """Encode counts of blocks."""
    return pb.KvOccupancy(
        total_blocks=counts.total_blocks,
        free_blocks=counts.free_blocks,
        evictable_blocks=counts.evictable_blocks,
        shared_blocks=counts.shared_blocks,
    )


def sequences_opened(
    openings: Iterable[Opening],
    cached: Iterable[int],
    counts: KvOccupancy,
) -> pb.SequencesOpened:
    """Encode the answer to an Open."""
    return pb.SequencesOpened(
        sequences=[
            pb.SequenceOpened(
                key=pb.SequenceKey(sequence_id=opening.sequence_id, generation=opening.generation),
                num_cached_tokens=num_cached,
                provenance_handle=opening_handle(opening.sequence_id, num_cached),
            )
            for opening, num_cached in zip(openings, cached, strict=True)
        ],
        kv_occupancy=occupancy(counts),
    )


def step_result(answer: StepAnswer, executor_epoch: int, total_ns: int) -> pb.StepResult:
    """Encode the answer to a step."""
    results = answer.results
    if results is None:
        return pb.StepResult(
            step_id=answer.step_id,
            executor_epoch=executor_epoch,
            outcome=_OUTCOMES[answer.outcome],
            timings=pb.StepTimings(
                queue_ns=answer.queue_ns, prepare_ns=answer.prepare_ns, total_ns=total_ns
            ),
            kv_occupancy=occupancy(answer.occupancy),
        )
    result = pb.StepResult(
        step_id=answer.step_id,
        executor_epoch=executor_epoch,
        outcome=_OUTCOMES[answer.outcome],
        timings=pb.StepTimings(
            queue_ns=answer.queue_ns,
            prepare_ns=answer.prepare_ns,
            forward_ns=results.forward_ns,
            statistics_ns=results.statistics_ns,
            total_ns=total_ns,
        ),
        kv_occupancy=occupancy(answer.occupancy),
        row_outcomes=results.row_outcomes.tobytes(),
        argmax_ids=_bytes(results.argmax_ids, _I32),
        max_logits=_bytes(results.max_logits, _F32),
        quantile_ids=_bytes(results.quantile_ids, _I32),
        normalizers=_bytes(results.normalizers, _F32),
        top_k_starts=_bytes(results.top_k_starts, _I32),
        top_k_ids=_bytes(results.top_k_ids, _I32),
        top_k_logits=_bytes(results.top_k_logits, _F32),
        top_k_weights=_bytes(results.top_k_weights, _F32),
        named_logits=_bytes(results.named_logits, _F32),
        digests=results.digests,
        provenance_handle=answer.provenance_handle,
        non_finite_details=results.non_finite_details,
    )
    result.MergeFrom(_kernel_paths(tuple(results.paths)))
    return result


def logits_fetched(step_id: int, logits: bytes) -> service_pb.SessionResponse:
    """Encode the answer to a FetchLogits."""
    return service_pb.SessionResponse(
        logits_fetched=pb.LogitsFetched(step_id=step_id, logits=pb.TensorPayload(inline=logits))
    )


def _bytes(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    # Nearly always it is: native types are one object each.
    if values.dtype is not dtype:
        values = values.astype(dtype)
    return values.tobytes()


# Steps of one size dispatch the same kernels.
@functools.lru_cache(maxsize=64)
def _kernel_paths(counts: tuple[PathCount, ...]) -> pb.StepResult:
    """Return an answer of these kernel paths alone, to be merged into others."""
    return pb.StepResult(
        kernel_paths=[
            pb.KernelPathCount(
                op=KERNEL_OPS.get(count.op, pb.KERNEL_OP_UNSPECIFIED),
                path=KERNEL_PATHS.get(count.path, pb.KERNEL_PATH_UNSPECIFIED),
                unit=KERNEL_UNITS.get(count.unit, pb.KERNEL_UNIT_UNSPECIFIED),
                dispatches=count.dispatches,
                rows=count.rows,
            )
            for count in counts
        ]
    )
