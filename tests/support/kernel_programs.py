"""Steps over small programs, for tests of the native engine.

Importing this skips the module that asks for it where the native module is not built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

native: Any = pytest.importorskip(
    "isobatch_kernels._cpu", reason="the native CPU module is not built"
)

from isobatch_kernels.cpu_backend import CpuBackend, CpuLimits  # noqa: E402
from isobatch_kernels.step import Stat, StepInput  # noqa: E402

UNITS = [u for u in ("scalar", "neon", "avx2", "amx", "vnni") if native.unit_available(u)]
ALL_STATISTICS = Stat.ARGMAX | Stat.TOP_K | Stat.NORMALIZER | Stat.QUANTILE
BLOCK_SIZE = 16


def bits(x: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """The bits of fp32 values, so that == compares them exactly."""
    return np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)


@dataclass
class Row:
    """One token row: its tokens, where they begin, and the blocks of its sequence."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    # Tokens of the row that want logits; by default the last.
    wanted: Sequence[int] = field(default_factory=lambda: (-1,))


def make_step(rows: Sequence[Row], **changes: Any) -> StepInput:
    """A step that asks for every statistic; `changes` replace its arrays."""
    lengths = [len(row.tokens) for row in rows]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    table = np.full((len(rows), max(len(row.blocks) for row in rows)), -1, dtype=np.int32)
    for i, row in enumerate(rows):
        table[i, : len(row.blocks)] = row.blocks
    wanted = [
        int(starts[i]) + w % lengths[i] for i, row in enumerate(rows) for w in sorted(row.wanted)
    ]
    count = len(wanted)
    arrays: dict[str, Any] = {
        "token_ids": np.concatenate([np.asarray(row.tokens, np.int32) for row in rows]),
        "positions": np.concatenate(
            [
                np.arange(row.start, row.start + n, dtype=np.int32)
                for row, n in zip(rows, lengths, strict=True)
            ]
        ),
        "query_start_loc": starts,
        "block_tables": table,
        "wanted": np.asarray(wanted, np.int32),
        "statistics": np.full(count, ALL_STATISTICS, np.uint32),
        "top_k": np.full(count, 7, np.int32),
        "inverse_temperatures": np.full(count, 1.25, np.float32),
        "quantiles": np.full(count, 0.625, np.float32),
        "edit_starts": np.zeros(count + 1, np.int32),
        "edit_ids": np.zeros(0, np.int32),
        "edit_values": np.zeros(0, np.float32),
    }
    return StepInput(**(arrays | changes))


def make_backend(program: Any, unit: str, *, threads: int = 1, **limits: int) -> CpuBackend:
    """A backend with room for 64 blocks, 8 rows and 640 tokens unless told otherwise."""
    sizes = {"num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 640} | limits
    return CpuBackend(
        program, CpuLimits(block_size=BLOCK_SIZE, num_threads=threads, **sizes), unit=unit
    )
