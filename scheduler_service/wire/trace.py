"""Traces as messages of isobatch.trace.v1, and back.

A trace is written record by record; joined, the pieces are one `Trace` message.
"""

import struct
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from isobatch.executor.v1 import provenance_pb2
from isobatch.scheduler.v1 import sampling_pb2
from isobatch.trace.v1 import trace_pb2 as pb
from scheduler_service.core.params import SamplingParams
from scheduler_service.tracing.model import (
    DIGEST_BYTES,
    KernelPath,
    KvBlock,
    KvStep,
    Trace,
    TraceEnd,
    TraceHeader,
    TraceStep,
    TraceToken,
)
from scheduler_service.wire.kernel_paths import path_message, read_path

FORMAT_VERSION = 1


class TraceFormatError(ValueError):
    """The bytes are not a trace that this version reads."""


def _piece(record: pb.TraceRecord) -> bytes:
    return pb.Trace(records=[record]).SerializeToString(deterministic=True)


def header(value: TraceHeader) -> bytes:
    """Return the first piece of a trace."""
    params = value.sampling
    message = pb.TraceHeader(
        format_version=FORMAT_VERSION,
        request_id=value.request_id,
        arrival_unix_ns=value.arrival_unix_ns,
        model=value.model,
        weights_digest=value.weights_digest,
        numeric_class=value.numeric_class,
        kv_class=value.kv_class,
        device=value.device,
        block_size=value.block_size,
        prompt_token_ids=value.prompt_token_ids,
        sampling=sampling_pb2.SamplingParams(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=params.seed,
            logit_bias=dict(params.logit_bias),
        ),
        stopping=sampling_pb2.StoppingParams(
            max_tokens=value.max_tokens,
            stop=value.stop,
            stop_token_ids=value.stop_token_ids,
            ignore_eos=value.ignore_eos,
        ),
        include_special_tokens=value.include_special_tokens,
        has_kv_digests=value.has_kv_digests,
    )
    return _piece(pb.TraceRecord(header=message))


def kernel_paths(paths: Sequence[KernelPath]) -> bytes:
    """Return the piece of a set of kernel paths."""
    message = pb.KernelPaths(paths=[path_message(each) for each in paths])
    return _piece(pb.TraceRecord(kernel_paths=message))


def step(value: TraceStep, path_set: int) -> bytes:
    """Return the piece of a step, whose kernel paths are the `path_set`-th set."""
    message = pb.TraceStep(
        step_id=value.step_id,
        generation=value.generation,
        start_position=value.start_position,
        num_row_tokens=value.num_row_tokens,
        num_step_tokens=value.num_step_tokens,
        num_step_rows=value.num_step_rows,
        num_wanted=value.num_wanted,
        max_neighbour_tokens=value.max_neighbour_tokens,
        kernel_paths=path_set,
        start_ns=value.start_ns,
        duration_ns=value.duration_ns,
        executor_ns=value.executor_ns,
        tokens=[
            pb.TraceToken(
                position=each.position,
                token_id=each.token_id,
                logits_digest=each.logits_digest,
                top_ids=each.top_ids,
                top_logits=each.top_logits,
            )
            for each in value.tokens
        ],
    )
    return _piece(pb.TraceRecord(step=message))


def kv(generation: int, provenance: provenance_pb2.GetProvenanceResponse) -> bytes:
    """Return the piece that says who wrote the cache of one generation."""
    return _piece(pb.TraceRecord(kv=pb.TraceKv(generation=generation, provenance=provenance)))


def end(value: TraceEnd) -> bytes:
    """Return the last piece of a trace."""
    message = pb.TraceEnd(
        outcome=value.outcome,
        num_tokens=value.num_tokens,
        logits_digest=value.logits_digest,
        num_preemptions=value.num_preemptions,
    )
    return _piece(pb.TraceRecord(end=message))


def read(data: bytes) -> Trace:
    """Return the trace in the joined pieces; raises TraceFormatError."""
    try:
        records = pb.Trace.FromString(data).records
    except DecodeError as error:
        raise TraceFormatError("[trace] it must be a whole isobatch.trace.v1.Trace") from error
    if not records or records[0].WhichOneof("record") != "header":
        raise TraceFormatError("[trace] the first record must be a header")
    head = records[0].header
    if head.format_version != FORMAT_VERSION:
        raise TraceFormatError(
            f"[trace] format_version must be {FORMAT_VERSION}, got {head.format_version}"
        )
    if head.block_size < 1:
        raise TraceFormatError(f"[trace] block_size must be at least 1, got {head.block_size}")
    sets: list[tuple[KernelPath, ...]] = []
    steps: list[TraceStep] = []
    blocks: list[KvBlock] = []
    ending: TraceEnd | None = None
    try:
        for record in records[1:]:
            match record.WhichOneof("record"):
                case "kernel_paths":
                    sets.append(tuple(map(read_path, record.kernel_paths.paths)))
                case "step":
                    steps.append(_read_step(record.step, sets[record.step.kernel_paths]))
                case "kv":
                    blocks.extend(_read_kv(record.kv))
                case "end":
                    ending = _read_end(record.end)
    except (IndexError, struct.error) as error:
        raise TraceFormatError(f"[trace] its records must agree, got {error}") from error
    for block in blocks:
        _check_lengths(block)
    return Trace(_read_header(head), tuple(steps), tuple(blocks), ending)


def read_kv(piece: bytes) -> list[KvBlock]:
    """Return the cache blocks in a piece that `kv` made."""
    records = pb.Trace.FromString(piece).records
    return [block for each in records for block in _read_kv(each.kv)]


def _read_header(message: pb.TraceHeader) -> TraceHeader:
    params, stopping = message.sampling, message.stopping
    return TraceHeader(
        request_id=message.request_id,
        arrival_unix_ns=message.arrival_unix_ns,
        model=message.model,
        weights_digest=message.weights_digest,
        numeric_class=message.numeric_class,
        kv_class=message.kv_class,
        device=message.device,
        block_size=message.block_size,
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=SamplingParams(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=params.seed,
            logit_bias=tuple(sorted(params.logit_bias.items())),
        ),
        max_tokens=stopping.max_tokens,
        stop=tuple(stopping.stop),
        stop_token_ids=tuple(stopping.stop_token_ids),
        ignore_eos=stopping.ignore_eos,
        include_special_tokens=message.include_special_tokens,
        has_kv_digests=message.has_kv_digests,
    )


def _read_step(message: pb.TraceStep, paths: tuple[KernelPath, ...]) -> TraceStep:
    return TraceStep(
        step_id=message.step_id,
        generation=message.generation,
        start_position=message.start_position,
        num_row_tokens=message.num_row_tokens,
        num_step_tokens=message.num_step_tokens,
        num_step_rows=message.num_step_rows,
        num_wanted=message.num_wanted,
        max_neighbour_tokens=message.max_neighbour_tokens,
        kernel_paths=paths,
        start_ns=message.start_ns,
        duration_ns=message.duration_ns,
        executor_ns=message.executor_ns,
        tokens=tuple(
            TraceToken(
                position=each.position,
                token_id=each.token_id,
                logits_digest=each.logits_digest,
                top_ids=tuple(each.top_ids),
                top_logits=tuple(each.top_logits),
            )
            for each in message.tokens
        ),
    )


def _read_kv(message: pb.TraceKv) -> list[KvBlock]:
    provenance = message.provenance
    sets = [tuple(map(read_path, each.paths)) for each in provenance.path_sets]
    steps = [
        KvStep(
            step_id=each.step_id,
            num_tokens=each.num_tokens,
            num_wanted=each.num_wanted,
            kernel_paths=sets[each.path_set],
            sequence_hashes=_unpack("Q", each.sequence_hashes),
            row_num_tokens=_unpack("i", each.row_num_tokens),
        )
        for each in provenance.steps
    ]
    return [
        KvBlock(
            generation=message.generation,
            block_index=each.block_index,
            writer_hash=each.writer_hash,
            first_step_id=each.first_step_id,
            last_step_id=each.last_step_id,
            min_step_tokens=each.min_step_tokens,
            max_step_tokens=each.max_step_tokens,
            steps=tuple(
                None if index < 0 else steps[index] for index in _unpack("i", each.position_steps)
            ),
            digests=tuple(
                each.position_digests[start : start + DIGEST_BYTES]
                for start in range(0, len(each.position_digests), DIGEST_BYTES)
            ),
        )
        for each in provenance.blocks
    ]


def _check_lengths(block: KvBlock) -> None:
    """Raise TraceFormatError unless the lists of a block that belong together are as long."""
    pairs = [(len(each.sequence_hashes), len(each.row_num_tokens)) for each in block.steps if each]
    if block.digests:
        pairs.append((len(block.steps), len(block.digests)))
    for one, other in pairs:
        if one != other:
            raise TraceFormatError(
                f"[trace] its records must agree, got lists of {one} and {other} in a block"
            )


def _unpack(code: str, data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data)


def _read_end(message: pb.TraceEnd) -> TraceEnd:
    return TraceEnd(
        outcome=message.outcome,
        num_tokens=message.num_tokens,
        logits_digest=message.logits_digest,
        num_preemptions=message.num_preemptions,
    )
