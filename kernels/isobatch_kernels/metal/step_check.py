"""The check of every index in a step, before anything is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from isobatch_kernels.step import Stat

if TYPE_CHECKING:
    from isobatch_kernels.step import StepInput


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


def check_step(step: StepInput, limits: StepLimits) -> None:
    """Raises ValueError for the first thing that does not fit."""
    tokens, rows = len(step.token_ids), len(step.query_start_loc) - 1
    _require(1 <= tokens <= limits.max_tokens, "tokens must be 1 to max_num_batched_tokens", tokens)
    _require(1 <= rows <= limits.max_rows, "token rows must be 1 to max_num_seqs", rows)
    starts = step.query_start_loc
    _require(int(starts[0]) == 0, "query_start_loc must begin with 0", int(starts[0]))
    _require(bool((np.diff(starts) > 0).all()), "query_start_loc must ascend", starts.tolist())
    _require(int(starts[-1]) == tokens, "query_start_loc must end with the tokens", int(starts[-1]))
    _require(len(step.positions) == tokens, "positions must match tokens", len(step.positions))
    ids = step.token_ids
    _require(
        bool(((ids >= 0) & (ids < limits.vocab_size)).all()),
        "token ids must lie in the vocabulary",
        int(ids.max()),
    )
    _require(
        step.block_tables.shape[0] == rows, "block_tables must match rows", step.block_tables.shape
    )
    _check_positions(step, limits)
    _check_writes(step, limits)
    _check_wanted(step, limits)


def _check_positions(step: StepInput, limits: StepLimits) -> None:
    starts = step.query_start_loc
    for row in range(len(starts) - 1):
        positions = step.positions[starts[row] : starts[row + 1]]
        _require(
            int(positions[0]) >= 0 and int(positions[-1]) < limits.context_length,
            "positions must lie in the context",
            (int(positions[0]), int(positions[-1])),
        )
        _require(
            bool((np.diff(positions) == 1).all()),
            "positions of a row must be consecutive",
            positions.tolist(),
        )
        blocks = int(positions[-1]) // limits.block_size + 1
        table = step.block_tables[row, :blocks]
        _require(
            len(table) == blocks, "block_tables must hold the blocks of every position", len(table)
        )
        inside = (table >= 0) & (table < limits.num_blocks)
        _require(bool(inside.all()), "block ids must lie in the pool", table.tolist())


def _check_writes(step: StepInput, limits: StepLimits) -> None:
    """A block that is written is seen by nobody else, and once."""
    starts = step.query_start_loc
    writer: dict[int, tuple[int, int]] = {}
    visible: list[tuple[int, int, int]] = []
    for row in range(len(starts) - 1):
        first = int(step.positions[starts[row]]) // limits.block_size
        last = int(step.positions[starts[row + 1] - 1]) // limits.block_size
        table = step.block_tables[row, : last + 1].tolist()
        visible += [(block, row, place) for place, block in enumerate(table)]
        for place in range(first, last + 1):
            taken = table[place] in writer
            _require(not taken, "a written block must belong to one row alone", table[place])
            writer[table[place]] = (row, place)
    for block, row, place in visible:
        owner = writer.get(block, (row, place))
        _require(owner == (row, place), "a written block must belong to one row alone", block)


def _check_wanted(step: StepInput, limits: StepLimits) -> None:
    wanted, count = step.wanted, len(step.wanted)
    for name in ("statistics", "top_k", "inverse_temperatures", "quantiles"):
        size = len(getattr(step, name))
        _require(size == count, f"{name} must have {count} entries", size)
    _require(
        len(step.edit_starts) == count + 1,
        "edit_starts must have one entry more",
        len(step.edit_starts),
    )
    inside = (wanted >= 0) & (wanted < len(step.token_ids))
    _require(bool(inside.all()), "wanted positions must be indexes of tokens", wanted.tolist())
    _require(bool((np.diff(wanted) > 0).all()), "wanted positions must ascend", wanted.tolist())
    asked = step.top_k[(step.statistics & Stat.TOP_K) != 0]
    fits = bool(((asked >= 1) & (asked <= limits.vocab_size)).all())
    _require(fits, "top_k must be 1 to the vocabulary size", asked.tolist())
    t, u = step.inverse_temperatures, step.quantiles
    _require(
        bool((np.isfinite(t) & (t >= 0)).all()),
        "inverse temperatures must be finite and not negative",
        t.tolist(),
    )
    _require(
        bool(((u >= 0) & (u < 1)).all()), "quantiles must be at least 0 and below 1", u.tolist()
    )
    starts = step.edit_starts
    ordered = int(starts[0]) == 0 and bool((np.diff(starts) >= 0).all())
    _require(
        ordered and int(starts[-1]) == len(step.edit_ids) == len(step.edit_values),
        "edit_starts must be prefix sums over the edits",
        starts.tolist(),
    )
    edited = (step.edit_ids >= 0) & (step.edit_ids < limits.vocab_size)
    _require(bool(edited.all()), "edited ids must lie in the vocabulary", step.edit_ids.tolist())
    finite = bool(np.isfinite(step.edit_values).all())
    _require(finite, "edit values must be finite", step.edit_values.tolist())
