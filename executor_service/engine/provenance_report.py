"""The provenance of a sequence's blocks, or of one step, put together for whoever asks.

Sequences are named by 64 bits that are equal for equal sequences of this process and say nothing
else: a neighbour's identity is no one's business.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from executor_service.errors import RecordNotKeptError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from executor_service.kv_cache.manager import KvCacheManager
    from executor_service.kv_cache.provenance import BlockRecord, KernelUse, StepRecord

    # Takes a block id, gives (num_layers, 2, num_kv_heads, block_size, head_dim) fp16 bits.
    ReadBlock = Callable[[int], npt.NDArray[np.uint16]]

POSITION_DIGEST_BYTES: Final = 16
_KEY_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class BlockReport:
    """One block of a sequence."""

    block_index: int
    num_positions: int
    record: BlockRecord
    writer_hash: int  # 0 for nobody known
    # For each position its index into the report's steps, -1 where the step is no longer known.
    position_steps: tuple[int, ...]
    # One for each position, or none at all.
    position_digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StepReport:
    """One step."""

    record: StepRecord
    # (num_rows,), one for each token row; empty when these are no longer kept.
    sequence_hashes: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class ProvenanceReport:
    """Steps in their order, blocks in the order of positions."""

    path_sets: tuple[tuple[KernelUse, ...], ...]
    steps: tuple[StepReport, ...]
    blocks: tuple[BlockReport, ...] = ()


class ProvenanceReports:
    """Reads the records of one cache."""

    def __init__(
        self, cache: KvCacheManager, read_block: ReadBlock, key: bytes | None = None
    ) -> None:
        """Hash sequences with `key` (16 bytes), drawn from the operating system unless given."""
        self._cache = cache
        self._read_block = read_block
        self._key = os.urandom(_KEY_BYTES) if key is None else key

    def of_step(self, serial: int) -> ProvenanceReport:
        """Return the record of one step; raises RecordNotKeptError."""
        provenance = self._cache.provenance
        record = provenance.step(serial)
        if record is None:
            raise RecordNotKeptError("[provenance] the step must be kept, got one that is not")
        return ProvenanceReport(tuple(provenance.path_sets), self._steps([record]))

    def of_sequence(
        self, sequence_id: int, num_positions: int, include_digests: bool
    ) -> ProvenanceReport:
        """Return who wrote the first `num_positions` positions of an open sequence."""
        provenance, size = self._cache.provenance, self._cache.block_size
        counts = [min(size, num_positions - start) for start in range(0, num_positions, size)]
        ids = self._cache.block_tables([sequence_id])[0].tolist()[: len(counts)]
        records = [provenance.block(each, count) for each, count in zip(ids, counts, strict=True)]
        serials = sorted({serial for record in records for serial in record.position_serials})
        steps = [(each, step) for each in serials if (step := provenance.step(each)) is not None]
        index_of = {serial: index for index, (serial, _) in enumerate(steps)}
        blocks = tuple(
            BlockReport(
                block_index=index,
                num_positions=len(record.position_serials),
                record=record,
                writer_hash=self._hash(record.writer_id, record.scheduler_epoch),
                position_steps=tuple(index_of.get(each, -1) for each in record.position_serials),
                position_digests=position_digests(
                    self._read_block(block), len(record.position_serials)
                )
                if include_digests
                else (),
            )
            for index, (block, record) in enumerate(zip(ids, records, strict=True))
        )
        return ProvenanceReport(
            tuple(provenance.path_sets), self._steps([step for _, step in steps]), blocks
        )

    def _steps(self, records: Sequence[StepRecord]) -> tuple[StepReport, ...]:
        """Return reports of steps; each sequence is hashed once, however many rows it had."""
        hashes: dict[int, npt.NDArray[np.uint64]] = {}
        for epoch in {record.scheduler_epoch for record in records}:
            ids = [each.sequence_ids for each in records if each.scheduler_epoch == epoch]
            unique, inverse = np.unique(np.concatenate(ids), return_inverse=True)
            hashed = np.array([self._hash(each, epoch) for each in unique.tolist()], np.uint64)
            hashes[epoch] = hashed[inverse]
        reports = []
        next_of = dict.fromkeys(hashes, 0)
        for record in records:
            epoch, count = record.scheduler_epoch, len(record.sequence_ids)
            start = next_of[epoch]
            next_of[epoch] = start + count
            reports.append(StepReport(record, hashes[epoch][start : start + count]))
        return tuple(reports)

    def _hash(self, sequence_id: int | None, scheduler_epoch: int) -> int:
        if sequence_id is None:
            return 0
        data = sequence_id.to_bytes(8, "little") + scheduler_epoch.to_bytes(8, "little")
        digest = hashlib.blake2b(data, digest_size=8, key=self._key).digest()
        return int.from_bytes(digest, "little")


def step_handle(serial: int) -> int:
    """Return what names the record of a step; even."""
    return 2 * serial


def opening_handle(sequence_id: int, num_cached_tokens: int) -> int:
    """Return what names the record of a sequence's cached positions; odd, and 0 for none."""
    has_one = num_cached_tokens > 0 and sequence_id < 2**63
    return 2 * sequence_id + 1 if has_one else 0


def position_digests(block: npt.NDArray[np.uint16], num_positions: int) -> tuple[bytes, ...]:
    """Return BLAKE2b (16 bytes) of each position's keys and values, in every layer.

    `block` is (num_layers, 2, num_kv_heads, block_size, head_dim) fp16 bits; hashed are, for each
    position, the little-endian bytes of (num_layers, 2, num_kv_heads, head_dim).
    """
    by_position = np.ascontiguousarray(np.moveaxis(block, 3, 0)[:num_positions], "<u2")
    return tuple(
        hashlib.blake2b(each.tobytes(), digest_size=POSITION_DIGEST_BYTES).digest()
        for each in by_position
    )
