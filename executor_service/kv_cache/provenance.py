"""Who wrote which block: for every cached position its token row, for every row its step.

Kept for all blocks at all times, so its arrays are made once: one number for each position
(8 bytes), rings of the last token rows and steps, and a summary of each block. A step only puts
its arrays aside; they are entered into all of this together for several steps, because after a
forward pass each touch of memory waits, or when somebody asks. Summaries follow behind, a few
blocks at a time, so that a block whose rows have left the rings still says who wrote it, when, by
which kernel paths and in how large steps. Sequence ids are kept as they are; whoever tells them to
others hashes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from isobatch_kernels.step import PathCount

    Int32 = npt.NDArray[np.int32]
    Int64 = npt.NDArray[np.int64]
    UInt64 = npt.NDArray[np.uint64]

STEPS_KEPT: Final = 16_384
ROWS_KEPT: Final = 262_144
# Every block is summed up this many times while the rings go round once, in so many parts.
_ROUNDS: Final = 4
_PARTS: Final = 32
# Most entries of block tables that steps put aside may hold on to: 1 MB.
_TABLE_ENTRIES_KEPT: Final = 1 << 18
# Sets of kernel paths are bits of a word; a policy and a model make a dozen at most.
_MAX_PATH_SETS: Final = 63

# Columns of a step and of a block's summary.
_SERIAL, _EPOCH, _STEP_ID, _TOKENS, _WANTED, _PATHS, _FIRST_ROW = range(7)
_BEGUN, _WRITER, _FIRST_EPOCH, _FIRST_STEP, _LAST_STEP, _LEAST, _MOST, _PATH_BITS = range(8)


@dataclass(frozen=True, slots=True)
class KernelUse:
    """One kernel path of a step: the op, its path and unit, and how often it ran."""

    op: str
    path: str
    unit: str
    dispatches: int


@dataclass(frozen=True, slots=True, eq=False)
class StepRecord:
    """One step that wrote to the cache."""

    scheduler_epoch: int
    step_id: int
    num_tokens: int
    num_wanted: int
    num_rows: int
    path_set: int
    # (num_rows,), one for each token row; empty when these are no longer kept.
    sequence_ids: UInt64
    row_num_tokens: Int32


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """What one block remembers of those who wrote to it."""

    # None when nobody is known to have written its first position.
    writer_id: int | None
    scheduler_epoch: int
    first_step_id: int
    last_step_id: int
    min_step_tokens: int
    max_step_tokens: int
    path_sets: tuple[int, ...]
    # For each position the serial number of its step, for `step`; 0 when no longer known.
    position_serials: tuple[int, ...]


class _Aside(NamedTuple):
    """A computed step that is not entered yet; fields as in `Provenance.record`."""

    serial: int
    step_id: int
    first_row: int
    sequence_ids: UInt64
    start_positions: Int32
    num_tokens: Int32
    tables: Int32
    total_tokens: int
    num_wanted: int
    path_set: int


class Provenance:
    """Records of all blocks of one pool. `record` runs in every step and must stay cheap."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        steps_kept: int = STEPS_KEPT,
        rows_kept: int = ROWS_KEPT,
    ) -> None:
        """Keep the last `steps_kept` steps and the last `rows_kept` token rows of steps."""
        self._shift = block_size.bit_length() - 1
        self._mask = block_size - 1
        self._epoch = 0
        # By position: the number of the token row that wrote it. Rows and steps are numbered from
        # 1 over all epochs; 0 is none.
        self._written = np.zeros(num_blocks * block_size, np.int64)
        self._blocks = np.zeros((num_blocks, 8), np.int64)
        self._next_row = 1
        self._row_ids = np.zeros(rows_kept, np.uint64)
        self._row_tokens = np.zeros(rows_kept, np.int32)
        self._row_serials = np.zeros(rows_kept, np.int64)
        self._serial = 0
        self._steps = np.zeros((steps_kept, 7), np.int64)
        self._path_sets: list[tuple[KernelUse, ...]] = []
        self._set_of: dict[tuple[KernelUse, ...], int] = {}
        self._last_paths: Sequence[PathCount] | None = None
        self._last_set = 0
        # Steps that are not entered yet, and blocks handed out since, each with the row that was
        # next then.
        self._aside: list[_Aside] = []
        self._table_entries = 0
        self._handed_out: list[tuple[Int32, int]] = []
        # Summing up: blocks with rows that are not in their summary, the next block to look at, and
        # the step and row at which it is due.
        self._is_new = np.zeros(num_blocks, np.bool_)
        self._part = -(-num_blocks // _PARTS)
        self._due_block = self._due_serial = self._due_row = 0

    @property
    def path_sets(self) -> Sequence[tuple[KernelUse, ...]]:
        """The sets of kernel paths that steps name by index; only ever grows."""
        return self._path_sets

    def begin_epoch(self, scheduler_epoch: int) -> None:
        """Say whose step ids follow."""
        self._enter()
        self._epoch = scheduler_epoch % 2**63  # what the arrays hold

    def forget(self, block_ids: Int32) -> None:
        """Drop the records of (n,) blocks that are handed out."""
        self._handed_out.append((block_ids, self._next_row))

    def record(
        self,
        step_id: int,
        sequence_ids: UInt64,
        start_positions: Int32,
        num_tokens: Int32,
        tables: Int32,
        total_tokens: int,
        num_wanted: int,
        paths: Sequence[PathCount],
    ) -> int:
        """Record a computed step and return its serial number.

        Args:
            step_id: Its id.
            sequence_ids: (S,) uint64, the token rows' sequences.
            start_positions: (S,) int32, position of each row's first token.
            num_tokens: (S,) int32, tokens of each row.
            tables: (S, max_blocks) int32, block ids.
            total_tokens: The sum of `num_tokens`.
            num_wanted: Wanted positions of the step.
            paths: The kernel paths that it dispatched.

        The arrays must not change afterwards.
        """
        if paths is not self._last_paths:
            self._last_paths, self._last_set = paths, self._path_set(paths)
        self._serial = serial = self._serial + 1
        first = self._next_row
        self._next_row = first + len(sequence_ids)
        if not (self._aside and self._aside[-1].tables is tables):
            self._table_entries += tables.size
        self._aside.append(
            _Aside(
                serial, step_id, first, sequence_ids, start_positions, num_tokens, tables,
                total_tokens, num_wanted, self._last_set,
            )
        )  # fmt: skip
        if serial >= self._due_serial or self._next_row >= self._due_row:
            self._enter()
            self._sum_up_part()
        elif self._table_entries >= _TABLE_ENTRIES_KEPT:
            self._enter()
        return serial

    def _enter(self) -> None:
        """Enter what was put aside, in order."""
        if self._aside:
            aside, self._aside, self._table_entries = self._aside, [], 0
            self._enter_steps(aside)
        if self._handed_out:
            handed_out, self._handed_out = self._handed_out, []
            blocks = np.concatenate([ids for ids, _ in handed_out])
            rows = np.repeat([row for _, row in handed_out], [len(ids) for ids, _ in handed_out])
            self._blocks[blocks] = 0
            written = self._written.reshape(-1, self._mask + 1)
            # What was written since stays. A block that was handed out twice comes twice here, and
            # the last assignment holds.
            known = written[blocks]
            written[blocks] = np.where(known < rows[:, None], 0, known)

    def _enter_steps(self, aside: list[_Aside]) -> None:
        serials = np.array([each.serial for each in aside])
        self._steps[serials % len(self._steps)] = [
            (each.serial, self._epoch, each.step_id, each.total_tokens, each.num_wanted,
             each.path_set, each.first_row)
            for each in aside
        ]  # fmt: skip
        counts = [len(each.sequence_ids) for each in aside]
        ids, starts, num_tokens = (
            np.concatenate(arrays)
            for arrays in zip(
                *((each.sequence_ids, each.start_positions, each.num_tokens) for each in aside),
                strict=True,
            )
        )
        rows = np.arange(aside[0].first_row, self._next_row)
        where = rows % len(self._row_ids)
        self._row_ids[where] = ids
        self._row_tokens[where] = num_tokens
        self._row_serials[where] = np.repeat(serials, counts)
        # All tables in one array; a row's begins at `begins`.
        tables: list[Int32] = []
        steps_begin, end = [], 0
        for each in aside:
            if not tables or each.tables is not tables[-1]:
                tables.append(each.tables)
                end += each.tables.size
            width = each.tables.shape[1]
            steps_begin.append((end - each.tables.size - each.first_row * width, width))
        begins, widths = np.repeat(np.array(steps_begin), counts, axis=0).T
        begins = begins + rows * widths
        positions = starts
        total = sum(each.total_tokens for each in aside)
        if total != len(rows):
            before = np.cumsum(num_tokens) - num_tokens
            positions = np.arange(total) + np.repeat(starts - before, num_tokens)
            begins, rows = np.repeat(begins, num_tokens), np.repeat(rows, num_tokens)
        flat = np.concatenate([each.reshape(-1) for each in tables])
        blocks = flat[begins + (positions >> self._shift)]
        self._is_new[blocks] = True
        # A position that was written twice keeps the last row.
        self._written[(blocks << self._shift) + (positions & self._mask)] = rows

    def _path_set(self, paths: Sequence[PathCount]) -> int:
        # Without the rows, which differ from step to step: that bounds the number of sets.
        uses = tuple(KernelUse(each.op, each.path, each.unit, each.dispatches) for each in paths)
        known = self._set_of.get(uses)
        if known is None:
            known = self._set_of[uses] = len(self._path_sets)
            self._path_sets.append(uses)
        return known

    def _sum_up_part(self) -> None:
        self._due_serial = self._serial + len(self._steps) // (_ROUNDS * _PARTS)
        self._due_row = self._next_row + len(self._row_ids) // (_ROUNDS * _PARTS)
        stop = self._due_block + self._part
        blocks = self._due_block + np.flatnonzero(self._is_new[self._due_block : stop])
        if len(blocks):
            self._is_new[blocks] = False
            self._sum_up(blocks)
        self._due_block = stop if stop < len(self._blocks) else 0

    def _sum_up(self, blocks: Int64) -> None:
        """Bring the summaries of (n,) blocks up to date with the rows that are still kept."""
        written = self._written.reshape(-1, self._mask + 1)[blocks]
        serials = self._serials(written)
        steps = self._steps[serials % len(self._steps)]
        # What is older than the block's first position is of a life before it.
        is_known = (serials > 0) & (written >= written[:, :1])
        has_any = is_known.any(axis=1)
        if not has_any.all():
            blocks, written, is_known = blocks[has_any], written[has_any], is_known[has_any]
            steps = steps[has_any]
        if not len(blocks):
            return
        summary = self._blocks[blocks]
        # A block whose first position was written anew has forgotten what was there before.
        anew = (summary[:, _BEGUN] != written[:, 0]) | (summary[:, _BEGUN] == 0)
        begins = anew & is_known[:, 0]
        summary[anew] = 0
        first = steps[:, 0]
        writers = self._row_ids[written[:, 0] % len(self._row_ids)].view(np.int64)
        for column, values in (
            (_BEGUN, written[:, 0]),
            (_WRITER, writers),
            (_FIRST_EPOCH, first[:, _EPOCH]),
            (_FIRST_STEP, first[:, _STEP_ID]),
        ):
            summary[begins, column] = values[begins]
        tokens = steps[:, :, _TOKENS]
        most = np.where(is_known, tokens, 0).max(axis=1)
        least = np.where(is_known, tokens, np.iinfo(np.int64).max).min(axis=1)
        before = np.where(summary[:, _LEAST] == 0, least, summary[:, _LEAST])
        summary[:, _LEAST] = np.minimum(before, least)
        summary[:, _MOST] = np.maximum(summary[:, _MOST], most)
        sets = np.minimum(steps[:, :, _PATHS], _MAX_PATH_SETS - 1)
        bits = np.where(is_known, np.left_shift(np.int64(1), sets), 0)
        summary[:, _PATH_BITS] |= np.bitwise_or.reduce(bits, axis=1)
        latest = np.where(is_known, written, 0).argmax(axis=1)
        summary[:, _LAST_STEP] = steps[np.arange(len(steps)), latest, _STEP_ID]
        self._blocks[blocks] = summary

    def _serials(self, written: Int64) -> Int64:
        """Return the step of each token row number; 0 where row or step is no longer kept."""
        oldest_row = max(1, self._next_row - len(self._row_ids))
        serials = self._row_serials[written % len(self._row_ids)]
        is_kept = (written >= oldest_row) & (serials > self._serial - len(self._steps))
        return np.where(is_kept, serials, 0)

    def step(self, serial: int) -> StepRecord | None:
        """Return a step by its serial number; None when it is not kept."""
        self._enter()
        if not max(0, self._serial - len(self._steps)) < serial <= self._serial:
            return None
        _, epoch, step_id, num_tokens, num_wanted, path_set, first = self._steps[
            serial % len(self._steps)
        ].tolist()
        end = self._next_row
        if serial < self._serial:
            end = int(self._steps[(serial + 1) % len(self._steps), _FIRST_ROW])
        where = np.arange(first, end if self._next_row - first <= len(self._row_ids) else first)
        where %= len(self._row_ids)
        return StepRecord(
            scheduler_epoch=epoch,
            step_id=step_id,
            num_tokens=num_tokens,
            num_wanted=num_wanted,
            num_rows=end - first,
            path_set=path_set,
            sequence_ids=self._row_ids[where],
            row_num_tokens=self._row_tokens[where],
        )

    def block(self, block_id: int, num_positions: int) -> BlockRecord:
        """Return the record of a block's first `num_positions` positions."""
        self._enter()
        self._sum_up(np.array([block_id], np.int64))
        start = block_id << self._shift
        written = self._written[start : start + num_positions]
        begun, writer, epoch, first, last, least, most, bits = self._blocks[block_id].tolist()
        return BlockRecord(
            writer_id=writer % 2**64 if begun else None,
            scheduler_epoch=epoch,
            first_step_id=first,
            last_step_id=last,
            min_step_tokens=least,
            max_step_tokens=most,
            path_sets=tuple(each for each in range(_MAX_PATH_SETS) if bits >> each & 1),
            position_serials=tuple(self._serials(written).tolist()),
        )
