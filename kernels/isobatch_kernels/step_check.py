"""Checks a step before a backend writes anything; for backends that are not native code."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from isobatch_kernels.step import Int32, Stat, StepInput


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Sizes that a step must fit."""

    vocab_size: int
    context_length: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


def _require(condition: bool, rule: str, got: object) -> None:
    if not condition:
        raise ValueError(f"[step] {rule}, got {got}")


def check_step(step: StepInput, limits: StepLimits) -> None:
    """Raises ValueError for the first rule that a step breaks."""
    tokens, starts = len(step.token_ids), step.query_start_loc
    rows = len(starts) - 1
    _require(
        1 <= tokens <= limits.max_num_batched_tokens,
        "tokens must be 1 to max_num_batched_tokens",
        tokens,
    )
    _require(1 <= rows <= limits.max_num_seqs, "token rows must be 1 to max_num_seqs", rows)
    _require(len(step.positions) == tokens, "positions must be as many as tokens", tokens)
    _require(int(starts[0]) == 0, "query_start_loc must begin with 0", int(starts[0]))
    _require(bool((np.diff(starts) > 0).all()), "query_start_loc must ascend", starts[:8])
    _require(
        int(starts[-1]) == tokens,
        "query_start_loc must end with the number of tokens",
        int(starts[-1]),
    )
    _require(
        _inside(step.token_ids, limits.vocab_size),
        "token ids must lie in the vocabulary",
        step.token_ids[:8],
    )
    _check_positions(step, limits)
    _check_writes(step, limits)
    _check_wanted(step, limits)


def _inside(values: Int32, end: int) -> bool:
    return len(values) == 0 or (int(values.min()) >= 0 and int(values.max()) < end)


def _check_positions(step: StepInput, limits: StepLimits) -> None:
    positions, starts = step.positions, step.query_start_loc
    _require(
        _inside(positions, limits.context_length),
        "positions must lie in the context",
        positions[:8],
    )
    ascending = np.diff(positions) == 1
    ascending[starts[1:-1] - 1] = True
    _require(bool(ascending.all()), "positions of a row must be consecutive", positions[:8])
    blocks = positions[starts[1:] - 1] // limits.block_size + 1
    width = step.block_tables.shape[1]
    _require(
        int(blocks.max()) <= width, "block_tables must hold the blocks of every position", width
    )
    used = step.block_tables[np.arange(width) < blocks[:, None]]
    _require(_inside(used, limits.num_blocks), "block ids must lie in the pool", used[:8])


def _check_writes(step: StepInput, limits: StepLimits) -> None:
    """A block that a row writes is in no other place of any row."""
    starts, size = step.query_start_loc, limits.block_size
    width = step.block_tables.shape[1]
    first = step.positions[starts[:-1]] // size
    last = step.positions[starts[1:] - 1] // size
    columns = np.arange(width)
    used = columns <= last[:, None]
    written = used & (columns >= first[:, None])
    uses = np.bincount(step.block_tables[used], minlength=1)
    conflicts = step.block_tables[written]
    conflicts = conflicts[uses[conflicts] > 1]
    _require(len(conflicts) == 0, "a written block must belong to one row alone", conflicts[:1])


def _check_wanted(step: StepInput, limits: StepLimits) -> None:
    wanted = step.wanted
    _require(
        _inside(wanted, len(step.token_ids)),
        "wanted positions must be indexes of tokens",
        wanted[:8],
    )
    _require(bool((np.diff(wanted) > 0).all()), "wanted positions must ascend", wanted[:8])
    top = step.top_k[(step.statistics & Stat.TOP_K) != 0]
    _require(
        len(top) == 0 or (int(top.min()) >= 1 and int(top.max()) <= limits.vocab_size),
        "top_k must be 1 to the vocabulary size",
        top[:8],
    )
    temperatures, quantiles = step.inverse_temperatures, step.quantiles
    _require(
        bool((np.isfinite(temperatures) & (temperatures >= 0)).all()),
        "inverse temperatures must be finite and not negative",
        temperatures[:8],
    )
    _require(
        bool(((quantiles >= 0) & (quantiles < 1)).all()),
        "quantiles must be at least 0 and below 1",
        quantiles[:8],
    )
    edits = step.edit_starts
    _require(int(edits[0]) == 0, "edit_starts must begin with 0", int(edits[0]))
    _require(bool((np.diff(edits) >= 0).all()), "edit_starts must not descend", edits[:8])
    _require(
        int(edits[-1]) == len(step.edit_ids),
        "edit_starts must end with the number of edits",
        int(edits[-1]),
    )
    _require(
        _inside(step.edit_ids, limits.vocab_size),
        "edited ids must lie in the vocabulary",
        step.edit_ids[:8],
    )
    _require(
        bool(np.isfinite(step.edit_values).all()),
        "edit values must be finite",
        step.edit_values[:8],
    )
