"""Provenance as messages of the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from executor_service.engine.capabilities import KV_CLASS
from executor_service.errors import InvalidRequestError
from executor_service.wire import KERNEL_OPS, KERNEL_PATHS, KERNEL_UNITS
from isobatch.executor.v1 import provenance_pb2 as pb
from isobatch.executor.v1 import token_rows_pb2 as rows_pb

if TYPE_CHECKING:
    from collections.abc import Callable

    from executor_service.engine.provenance_report import (
        BlockReport,
        ProvenanceReport,
        StepReport,
    )
    from executor_service.engine.session import Session
    from executor_service.kv_cache.provenance import KernelUse


def read_request(request: pb.GetProvenanceRequest) -> Callable[[Session], ProvenanceReport]:
    """Return what to ask the session, on the engine thread; raises InvalidRequestError."""
    digests = request.include_digests
    kind = request.WhichOneof("target")
    if kind == "sequence":
        key = request.sequence
        return lambda session: session.provenance(
            key.sequence_id, key.generation, request.num_positions, include_digests=digests
        )
    if kind == "handle":
        handle = request.handle
        return lambda session: session.provenance_of(handle, include_digests=digests)
    raise InvalidRequestError("[provenance] a sequence or a handle must be set, got none")


def response(
    executor_epoch: int, numeric_class: str, report: ProvenanceReport
) -> pb.GetProvenanceResponse:
    """Encode a report."""
    return pb.GetProvenanceResponse(
        executor_epoch=executor_epoch,
        numeric_class=numeric_class,
        kv_class=KV_CLASS,
        path_sets=[
            pb.KernelPathSet(paths=[_path(each) for each in uses]) for uses in report.path_sets
        ],
        steps=[_step(each) for each in report.steps],
        blocks=[_block(each) for each in report.blocks],
    )


def _path(use: KernelUse) -> rows_pb.KernelPathCount:
    return rows_pb.KernelPathCount(
        op=KERNEL_OPS.get(use.op, rows_pb.KERNEL_OP_UNSPECIFIED),
        path=KERNEL_PATHS.get(use.path, rows_pb.KERNEL_PATH_UNSPECIFIED),
        unit=KERNEL_UNITS.get(use.unit, rows_pb.KERNEL_UNIT_UNSPECIFIED),
        dispatches=use.dispatches,
    )


def _step(report: StepReport) -> pb.ProvenanceStep:
    step = report.record
    return pb.ProvenanceStep(
        scheduler_epoch=step.scheduler_epoch,
        step_id=step.step_id,
        num_tokens=step.num_tokens,
        num_wanted=step.num_wanted,
        num_rows=step.num_rows,
        path_set=step.path_set,
        sequence_hashes=report.sequence_hashes.astype("<u8", copy=False).tobytes(),
        row_num_tokens=step.row_num_tokens.astype("<i4", copy=False).tobytes(),
    )


def _block(block: BlockReport) -> pb.BlockProvenance:
    record = block.record
    return pb.BlockProvenance(
        block_index=block.block_index,
        num_positions=block.num_positions,
        writer_hash=block.writer_hash,
        scheduler_epoch=record.scheduler_epoch,
        first_step_id=record.first_step_id,
        last_step_id=record.last_step_id,
        min_step_tokens=record.min_step_tokens,
        max_step_tokens=record.max_step_tokens,
        path_sets=record.path_sets,
        position_steps=np.array(block.position_steps, "<i4").tobytes(),
        position_digests=b"".join(block.position_digests),
    )
