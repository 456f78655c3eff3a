"""Greedy passes of a draft model: each row's best token is its next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, TypeAlias, runtime_checkable

import numpy as np

from isobatch_kernels.step import Backend, Int32, Stat, StepInput

_STATISTICS: Final = np.uint32(Stat.ARGMAX | Stat.NORMALIZER)


@dataclass(slots=True, eq=False)
class GreedyRow:
    """One row's part.

    A row ends behind `max_drafts` drafted tokens, with the token at which the product of
    confidences falls below `min_confidence`, before the first id that is not to be drafted, or
    where it is not finite.

    Attributes:
        token_ids: Tokens of the first pass, at least one.
        start_position: Position of the first of them.
        max_drafts: Most tokens to draft; 0 to compute its tokens alone.
        min_confidence: See above.
        drafts: The drafted tokens.
        confidences: The model's probability of each.
        num_passes: Finite passes that it had part in: it has computed one drafted token less.
        is_finite: Whether all were finite.
    """

    token_ids: Sequence[int]
    start_position: int
    max_drafts: int
    min_confidence: float = 0.0
    drafts: Sequence[int] = ()
    confidences: Sequence[float] = ()
    num_passes: int = 0
    is_finite: bool = True


# Takes rows, (len(rows), max_blocks) block tables with room for all that is computed, and the id
# from which on none is drafted. Computes the rows until each has ended, fills in what came of them,
# and returns the nanoseconds of the passes and how many there were. Raises ValueError for a
# malformed row.
Draft: TypeAlias = Callable[[Sequence[GreedyRow], Int32, int], tuple[int, int]]


@runtime_checkable
class GreedyBackend(Protocol):
    """A backend that computes all passes in one call."""

    def draft(
        self, rows: Sequence[GreedyRow], block_tables: Int32, num_ids: int
    ) -> tuple[int, int]:
        """See `Draft`."""
        ...


def greedy_passes(backend: Backend) -> Draft:
    """Returns how a backend drafts: by itself, or by a step for each pass."""
    if isinstance(backend, GreedyBackend):
        return backend.draft
    return partial(draft_by_steps, backend)


def draft_by_steps(
    backend: Backend, rows: Sequence[GreedyRow], block_tables: Int32, num_ids: int
) -> tuple[int, int]:
    """Computes a step for each pass (see `Draft`)."""
    live = list(enumerate(rows))
    nanoseconds = passes = 0
    tokens = [list(row.token_ids) for row in rows]
    products = [1.0] * len(rows)
    while live:
        indexes = [index for index, _ in live]
        starts = [
            row.start_position + (len(row.token_ids) + row.num_passes - 1) * bool(row.num_passes)
            for _, row in live
        ]
        wants = [bool(row.max_drafts) for _, row in live]
        coming = [tokens[index] for index in indexes]
        output = backend.run(_step(coming, starts, wants, block_tables[indexes]))
        nanoseconds += output.forward_ns + output.statistics_ns
        passes += 1
        chosen = iter(zip(output.argmax_ids.tolist(), output.normalizers.tolist(), strict=True))
        going = []
        for (index, row), bad_op in zip(live, output.non_finite_ops.tolist(), strict=True):
            found = next(chosen) if row.max_drafts else None
            row.is_finite = bad_op < 0
            row.num_passes += row.is_finite
            if not row.is_finite or found is None or found[0] >= num_ids:
                continue
            token, confidence = found[0], 1.0 / found[1]
            row.drafts = (*row.drafts, token)
            row.confidences = (*row.confidences, confidence)
            products[index] *= confidence
            if len(row.drafts) < row.max_drafts and products[index] >= row.min_confidence:
                tokens[index] = [token]
                going.append((index, row))
        live = going
    return nanoseconds, passes


def _step(
    tokens: Sequence[Sequence[int]],
    starts: Sequence[int],
    wants: Sequence[bool],
    block_tables: Int32,
) -> StepInput:
    """A step of rows of tokens from these positions; logits are wanted at the ends of some."""
    ends = np.cumsum([0, *map(len, tokens)]).astype(np.int32)
    positions = [start + i for start, row in zip(starts, tokens, strict=True)
                 for i in range(len(row))]  # fmt: skip
    wanted = (ends[1:] - 1)[np.array(wants)].astype(np.int32)
    count = len(wanted)
    return StepInput(
        token_ids=np.array([token for row in tokens for token in row], np.int32),
        positions=np.array(positions, np.int32),
        query_start_loc=ends,
        block_tables=block_tables,
        wanted=wanted,
        statistics=np.full(count, _STATISTICS),
        top_k=np.zeros(count, np.int32),
        inverse_temperatures=np.ones(count, np.float32),
        quantiles=np.zeros(count, np.float32),
        edit_starts=np.zeros(count + 1, np.int32),
        edit_ids=np.zeros(0, np.int32),
        edit_values=np.zeros(0, np.float32),
    )
