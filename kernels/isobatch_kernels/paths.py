"""Counts of kernel paths in a step, for metrics and for tests that a path was really taken."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence

import numpy as np

from isobatch_kernels.kernel_policy import EXACT, float_path
from isobatch_kernels.program import (
    Embed,
    GateQuantize,
    Linear,
    NormQuantize,
    PagedAttention,
    Program,
    Quantize,
    RopeWriteKV,
    RowStatistics,
)
from isobatch_kernels.step import PathCount, StepInput

_NAMES = {
    Embed: "embed",
    NormQuantize: "norm_quantize",
    Quantize: "quantize",
    Linear: "linear",
    RopeWriteKV: "rope_write_kv",
    PagedAttention: "paged_attention",
    GateQuantize: "gate_quantize",
    RowStatistics: "row_statistics",
}


def linear_path(rows: int) -> str:
    """Name of the path that a linear layer takes for a number of rows."""
    if rows == 1:
        return "gemv"
    return "gemv_multi" if rows <= 16 else "gemm"


class PathCounter:
    """Knows how many ops of each kind a program has, and so what a step dispatches."""

    def __init__(self, program: Program, unit: str) -> None:
        self._unit = unit
        # (op, whether its rows are wanted positions, a float policy and its rows) -> ops
        self._ops: Counter[tuple[str, bool, str, int]] = Counter()
        for op in program.ops:
            name = _NAMES.get(type(op))
            if name is not None:
                wanted = isinstance(op, RowStatistics) or (
                    isinstance(op, NormQuantize | Linear) and op.wanted_only
                )
                policy, threshold_rows = EXACT, 0
                if isinstance(op, Linear):
                    policy, threshold_rows = op.policy, op.threshold_rows
                self._ops[name, wanted, policy, threshold_rows] += 1
        # Steps of one size count the same.
        self._count = functools.lru_cache(maxsize=64)(self._count_sizes)

    def count(self, step: StepInput) -> Sequence[PathCount]:
        """The dispatches of one step."""
        num_tokens = len(step.token_ids)
        decode = num_tokens
        if num_tokens != len(step.query_start_loc) - 1:
            decode = int((np.diff(step.query_start_loc) == 1).sum())
        return self._count(num_tokens, len(step.wanted), decode)

    def _count_sizes(self, num_tokens: int, num_wanted: int, decode: int) -> Sequence[PathCount]:
        counts: list[PathCount] = []
        for (op, wanted, policy, threshold_rows), dispatches in self._ops.items():
            rows = num_wanted if wanted else num_tokens
            if op == "paged_attention":
                parts = [("attention_decode", decode), ("attention_prefill", rows - decode)]
            elif op == "linear":
                exact = policy == EXACT
                path = linear_path(rows) if exact else float_path(policy, threshold_rows, rows)
                parts = [(path, rows)]
            else:
                parts = [("other", rows)]
            counts.extend(
                PathCount(op, path, self._unit, dispatches, dispatches * n)
                for path, n in parts
                if n > 0
            )
        return tuple(counts)
