"""Traces whose bytes are a message, and whose lists contradict each other, are refused as such."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from isobatch.executor.v1 import provenance_pb2
from isobatch.trace.v1 import trace_pb2 as pb
from scheduler_service.wire import trace as wire
from tests.support.traces import HEADER


def _kv(*, num_hashes: int = 2, num_rows: int = 2, num_digests: int = 3) -> bytes:
    """A piece with one block of three positions, all written by one step of two rows."""
    provenance = provenance_pb2.GetProvenanceResponse(
        path_sets=[provenance_pb2.KernelPathSet()],
        steps=[
            provenance_pb2.ProvenanceStep(
                sequence_hashes=bytes(8 * num_hashes),
                row_num_tokens=struct.pack(f"<{num_rows}i", *range(num_rows)),
            )
        ],
        blocks=[
            provenance_pb2.BlockProvenance(
                position_steps=bytes(4 * 3), position_digests=bytes(16 * num_digests)
            )
        ],
    )
    record = pb.TraceRecord(kv=pb.TraceKv(provenance=provenance))
    return pb.Trace(records=[record]).SerializeToString()


@pytest.mark.parametrize("num_digests", [0, 3])
def test_lists_that_agree_are_read(num_digests: int) -> None:
    (block,) = wire.read(wire.header(HEADER) + _kv(num_digests=num_digests)).blocks
    assert (len(block.steps), len(block.digests)) == (3, num_digests)


@pytest.mark.parametrize("lengths", [{"num_hashes": 3}, {"num_rows": 1}, {"num_digests": 2}])
def test_lists_that_contradict_each_other_are_refused(lengths: dict[str, int]) -> None:
    with pytest.raises(wire.TraceFormatError, match="its records must agree, got lists of"):
        wire.read(wire.header(HEADER) + _kv(**lengths))


def test_blocks_without_positions_are_refused() -> None:
    with pytest.raises(wire.TraceFormatError, match="block_size must be at least 1, got 0"):
        wire.read(wire.header(replace(HEADER, block_size=0)))
