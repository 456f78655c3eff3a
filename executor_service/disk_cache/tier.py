"""The second tier of the prefix cache: blocks that had to leave memory, on disk.

Blocks are read on the engine thread, when a sequence is opened, for a bounded time and only while
reading is quicker than computing. They are written by a thread of their own behind a bounded
queue; a block that finds it full is lost. Nothing that happens to a file is an error of a request:
a record that is damaged or foreign is a miss, counted and removed.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from executor_service import logs

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from executor_service.disk_cache.folder import DiskFolder
    from executor_service.disk_cache.record import RecordFormat
    from executor_service.kv_cache.block_pool import BlockId
    from executor_service.kv_cache.chain import ChainNode

# Longest time that an opening reads: meanwhile no step is computed. Beside other sequences, which
# wait, it is shorter.
READ_SECONDS: Final = 2.0
READ_SECONDS_BESIDE_OTHERS: Final = 0.25
# Memory for blocks that wait to be written.
QUEUE_BYTES: Final = 64 << 20
# Longest time that blocks are read for the disk when the process ends.
FLUSH_SECONDS: Final = 3.0
# Longest time that the end takes in all, until what is in the queue is written.
CLOSE_SECONDS: Final = 10.0
# After a write that failed, as on a full disk: then one is tried.
PAUSE_SECONDS: Final = 30.0
# Of openings that would not read because it was slow, one in so many tries whether it still is.
_TRIES: Final = 16
# A step of at least so many blocks of tokens says what a prompt costs.
_PROMPT_BLOCKS: Final = 2
_DEPTH_NS: Final = 1_000_000
_WEIGHT: Final = 0.2  # of the newest duration in a mean
_LOG = logs.get_logger(__name__)


class BlockAccess(Protocol):
    """Reads and writes blocks of the pool (isobatch_kernels.step.Backend)."""

    def read_block(self, block_id: int) -> npt.NDArray[np.uint16]:
        """Return a block's bits."""
        ...

    def write_block(self, block_id: int, bits: npt.NDArray[np.uint16]) -> None:
        """Put a block's bits."""
        ...


@dataclass(slots=True)
class DiskCounts:
    """What has happened so far."""

    written: int = 0
    dropped: int = 0  # the queue was full
    damaged: int = 0  # records that were not what their name said
    failed: int = 0  # writes that the system refused
    slow: int = 0  # openings that did not read because computing was quicker


@dataclass
class CostRule:
    """Whether reading a block is worth it: durations of reading one and of computing one."""

    read_seconds: float | None = None
    compute_seconds: float | None = None
    _skipped: int = 0

    def note_read(self, seconds: float) -> None:
        """Note how long it took to bring a block back."""
        self.read_seconds = _mean(self.read_seconds, seconds)

    def note_compute(self, seconds: float) -> None:
        """Note how long it took to compute a block's tokens within a piece of a prompt."""
        self.compute_seconds = _mean(self.compute_seconds, seconds)

    def allows(self) -> bool:
        """Return whether an opening should read; now and then it does so to see how long it takes.

        As long as one of the two is not known, it should.
        """
        if self.read_seconds is None or self.compute_seconds is None:
            return True
        if self.read_seconds <= self.compute_seconds:
            return True
        self._skipped += 1
        return self._skipped % _TRIES == 0


def _used_ns(now_ns: int, node: ChainNode) -> int:
    """Return a time of use that makes the end of a chain go before its beginning."""
    return now_ns - node.depth * _DEPTH_NS


def _mean(before: float | None, seconds: float) -> float:
    return seconds if before is None else before + _WEIGHT * (seconds - before)


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """A record to write. Nodes stay on the engine thread."""

    name: str
    header: bytes
    used_ns: int
    bits: npt.NDArray[np.uint16]


class DiskTier:
    """Brings blocks to disk and back. All methods are called on the engine thread."""

    def __init__(
        self,
        folder: DiskFolder,
        record_format: RecordFormat,
        blocks: BlockAccess,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Keep records of `record_format` in `folder`, of blocks that `blocks` gives and takes."""
        self.counts = DiskCounts()
        self.cost = CostRule()
        self.folder = folder
        self._format = record_format
        self._blocks = blocks
        self._clock = clock
        self.read_seconds = READ_SECONDS
        self.read_seconds_beside_others = READ_SECONDS_BESIDE_OTHERS
        self.flush_seconds = FLUSH_SECONDS
        self._deadline = 0.0
        self._began_ns = 0
        self._may_write_after = 0.0
        # True from a write that failed until one succeeds.
        self.is_paused = False
        self._is_given_up = False
        size = max(4, QUEUE_BYTES // max(1, record_format.payload_bytes))
        self._queue: queue.Queue[_Job | None] = queue.Queue(size)
        self._writer = threading.Thread(target=self._write_all, name="prefix-disk", daemon=True)
        self._writer.start()

    def begin(self, *, is_alone: bool) -> bool:
        """Begin to read for an opening; False when computing is quicker.

        `is_alone` says whether no other sequence is open, which would have to wait.
        """
        seconds = self.read_seconds if is_alone else self.read_seconds_beside_others
        self._deadline = self._clock() + seconds
        self._began_ns = time.time_ns()
        if self.cost.allows():
            return True
        self.counts.slow += 1
        return False

    def load(self, node: ChainNode) -> npt.NDArray[np.uint16] | None:
        """Return the bits of a node's block, if they are on disk and there is time left."""
        started = self._clock()
        if started > self._deadline:
            return None
        name = node.digest.hex()
        record = self.folder.read(name, _used_ns(self._began_ns, node))
        if record is None:
            return None
        bits = self._format.decode(node, record)
        if bits is None:
            self.counts.damaged += 1
            self.folder.remove(name)
            return None
        self.cost.note_read(self._clock() - started)
        return bits

    def put(self, block: BlockId, bits: npt.NDArray[np.uint16]) -> None:
        """Put bits that were loaded into a block of the pool."""
        self._blocks.write_block(block, bits)

    def keep(self, node: ChainNode, block: BlockId) -> None:
        """Bring a block to disk that is about to leave memory."""
        used_ns = _used_ns(time.time_ns(), node)
        if self._clock() < self._may_write_after or self.folder.note_use(
            node.digest.hex(), used_ns
        ):
            return
        if self._queue.full():
            self.counts.dropped += 1
            return
        self._queue.put(self._job(node, block, used_ns))  # only this thread adds: there is room

    def note_step(self, num_blocks: float, seconds: float) -> None:
        """Note how long it took to compute the tokens of so many blocks."""
        # Steps with fewer tokens take their time whatever they compute.
        if num_blocks >= _PROMPT_BLOCKS:
            self.cost.note_compute(seconds / num_blocks)

    def flush(
        self, blocks: list[tuple[ChainNode, BlockId]], seconds: float = CLOSE_SECONDS
    ) -> None:
        """Bring blocks to disk, in this order, before the process ends.

        Takes at most about `seconds`, however slow the disk is.
        """
        started = self._clock()
        deadline = started + min(self.flush_seconds, seconds)
        began_ns = time.time_ns()
        for node, block in blocks:
            left = deadline - self._clock()
            if left < 0:
                break
            used_ns = _used_ns(began_ns, node)
            if self.folder.note_use(node.digest.hex(), used_ns):
                continue
            try:
                self._queue.put(self._job(node, block, used_ns), timeout=left)
            except queue.Full:
                break
        self.close(seconds - (self._clock() - started))

    def _job(self, node: ChainNode, block: BlockId, used_ns: int) -> _Job:
        bits = self._blocks.read_block(block)
        return _Job(node.digest.hex(), self._format.header(node), used_ns, bits)

    def settle(self) -> None:
        """Wait until nothing waits to be written."""
        self._queue.join()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Write what waits and stop the thread; after `seconds` leave it alone with its disk."""
        deadline = self._clock() + seconds
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=max(0.0, seconds))
            self._writer.join(max(0.0, deadline - self._clock()))
        if self._writer.is_alive():
            self._is_given_up = True
            _LOG.warning("prefix cache: the disk is too slow", blocks_lost=self._queue.qsize())

    def _write_all(self) -> None:
        """The writer's thread."""
        try:
            self.folder.trim()
        except OSError as error:
            self._refused(error)
        while (job := self._queue.get()) is not None and not self._is_given_up:
            self._write(job)
            self._queue.task_done()
            # An idle thread must not keep the last block alive.
            del job

    def _write(self, job: _Job) -> None:
        if self._clock() < self._may_write_after:
            return
        try:
            record = self._format.encode(job.header, job.bits)
            self.folder.write(job.name, record, job.used_ns)
            self.counts.written += 1
            if self.is_paused:
                self.is_paused = False
                _LOG.info("prefix cache: blocks are written to disk again")
        except (OSError, MemoryError) as error:
            self._refused(error)

    def _refused(self, error: OSError | MemoryError) -> None:
        if not self.is_paused:
            self.is_paused = True
            _LOG.warning(
                "prefix cache: no blocks are written to disk until it takes one",
                error=str(error),
                try_seconds=PAUSE_SECONDS,
            )
        self.counts.failed += 1
        self._may_write_after = self._clock() + PAUSE_SECONDS
