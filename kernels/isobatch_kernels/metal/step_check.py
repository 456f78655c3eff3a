"""The check of every index in a step, before anything is written; and steps for warming up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch_kernels.step import Stat, StepInput

if TYPE_CHECKING:
    import numpy.typing as npt

    from isobatch_kernels.step import Int32


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Sizes that a step has to fit."""

    max_tokens: int
    max_rows: int
    vocab_size: int
    context_length: int
    num_blocks: int
    block_size: int


def _require(condition: bool, rule: str, got: object) -> None:
    if not condition:
        raise ValueError(f"[step] {rule}, got {got}")


def _require_all(holds: npt.NDArray[np.bool_], values: npt.NDArray[Any], rule: str) -> None:
    """Names the first value that breaks the rule."""
    if not holds.all():
        _require(False, rule, values[np.argmin(holds)])


def check_step(step: StepInput, limits: StepLimits) -> None:
    """Raises ValueError for the first thing that does not fit."""
    tokens, rows = len(step.token_ids), len(step.query_start_loc) - 1
    _require(1 <= tokens <= limits.max_tokens, "tokens must be 1 to max_num_batched_tokens", tokens)
    _require(1 <= rows <= limits.max_rows, "token rows must be 1 to max_num_seqs", rows)
    starts, ids = step.query_start_loc, step.token_ids
    _require(starts[0] == 0, "query_start_loc must begin with 0", starts[0])
    _require_all(np.diff(starts) > 0, starts[1:], "query_start_loc must ascend")
    rule = "query_start_loc must end with the number of tokens"
    _require(starts[-1] == tokens, rule, starts[-1])
    _require(
        len(step.positions) == tokens, f"positions must have {tokens} entries", len(step.positions)
    )
    _require(
        len(step.block_tables) == rows,
        f"block_tables must have {rows} rows",
        len(step.block_tables),
    )
    known = (ids >= 0) & (ids < limits.vocab_size)
    _require_all(known, ids, "token ids must lie in the vocabulary")
    for row in range(rows):
        positions = step.positions[starts[row] : starts[row + 1]]
        _check_row(positions, step.block_tables[row], limits)
    _check_writes(step, limits)
    _check_wanted(step, limits)
    _check_edits(step, limits)


def _check_row(positions: Int32, table: Int32, limits: StepLimits) -> None:
    _require(positions[0] >= 0, "positions must not be negative", positions[0])
    inside = positions < limits.context_length
    _require_all(inside, positions, "positions must lie in the context")
    rule = "positions of a row must be consecutive"
    _require_all(np.diff(positions) == 1, positions[1:], rule)
    blocks = int(positions[-1]) // limits.block_size + 1
    rule = "block_tables must hold the blocks of every position"
    _require(len(table) >= blocks, rule, len(table))
    used = table[:blocks]
    in_pool = (used >= 0) & (used < limits.num_blocks)
    _require_all(in_pool, used, "block ids must lie in the pool")


def _check_writes(step: StepInput, limits: StepLimits) -> None:
    """A block that is written is seen by nobody else, and once."""
    rule, starts = "a written block must belong to one row alone", step.query_start_loc
    writer: dict[int, tuple[int, int]] = {}
    visible: list[tuple[int, int, int]] = []
    for row in range(len(starts) - 1):
        first = int(step.positions[starts[row]]) // limits.block_size
        last = int(step.positions[starts[row + 1] - 1]) // limits.block_size
        table = step.block_tables[row, : last + 1].tolist()
        visible += [(block, row, place) for place, block in enumerate(table)]
        for place in range(first, last + 1):
            _require(table[place] not in writer, rule, table[place])
            writer[table[place]] = (row, place)
    for block, row, place in visible:
        _require(writer.get(block, (row, place)) == (row, place), rule, block)


def _check_wanted(step: StepInput, limits: StepLimits) -> None:
    wanted, count = step.wanted, len(step.wanted)
    for name in ("statistics", "top_k", "inverse_temperatures", "quantiles"):
        size = len(getattr(step, name))
        _require(size == count, f"{name} must have {count} entries", size)
    inside = (wanted >= 0) & (wanted < len(step.token_ids))
    _require_all(inside, wanted, "wanted positions must be indexes of tokens")
    _require_all(np.diff(wanted) > 0, wanted[1:], "wanted positions must ascend")
    asked = step.top_k[(step.statistics & Stat.TOP_K) != 0]
    fits = (asked >= 1) & (asked <= limits.vocab_size)
    _require_all(fits, asked, "top_k must be 1 to the vocabulary size")
    t, u = step.inverse_temperatures, step.quantiles
    usable = np.isfinite(t) & (t >= 0)
    _require_all(usable, t, "inverse temperatures must be finite and not negative")
    _require_all((u >= 0) & (u < 1), u, "quantiles must be at least 0 and below 1")


def _check_edits(step: StepInput, limits: StepLimits) -> None:
    starts, ids, values = step.edit_starts, step.edit_ids, step.edit_values
    count = len(step.wanted) + 1
    _require(len(starts) == count, f"edit_starts must have {count} entries", len(starts))
    _require(starts[0] == 0, "edit_starts must begin with 0", starts[0])
    _require_all(np.diff(starts) >= 0, starts[1:], "edit_starts must not descend")
    _require(starts[-1] == len(ids), "edit_starts must end with the number of edits", starts[-1])
    _require(len(values) == len(ids), f"edit_values must have {len(ids)} entries", len(values))
    known = (ids >= 0) & (ids < limits.vocab_size)
    _require_all(known, ids, "edited ids must lie in the vocabulary")
    _require_all(np.isfinite(values), values, "edit values must be finite")


def warm_up_step(start: int, tokens: int, block_size: int, *, one_block: bool = False) -> StepInput:
    """One row of token 0 at positions from `start`, over the first blocks of the pool.

    Its last position wants every statistic and has an edit. With `one_block` every position lies
    in block 0, which `check_step` refuses.
    """
    blocks = (start + tokens - 1) // block_size + 1
    table = np.zeros(blocks, np.int32) if one_block else np.arange(blocks, dtype=np.int32)
    return StepInput(
        token_ids=np.zeros(tokens, np.int32),
        positions=np.arange(start, start + tokens, dtype=np.int32),
        query_start_loc=np.array([0, tokens], np.int32),
        block_tables=table[None, :],
        wanted=np.array([tokens - 1], np.int32),
        statistics=np.array([Stat.TOP_K | Stat.NORMALIZER | Stat.QUANTILE], np.uint32),
        top_k=np.ones(1, np.int32),
        inverse_temperatures=np.ones(1, np.float32),
        quantiles=np.full(1, 0.5, np.float32),
        edit_starts=np.array([0, 1], np.int32),
        edit_ids=np.zeros(1, np.int32),
        edit_values=np.zeros(1, np.float32),
    )
