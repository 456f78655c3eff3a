"""A backend with a toy model whose logits depend on every token that its paged cache shows it.

The cache holds, for each position, the token id written there. A row's logits come from all tokens
that its block table leads to, so a wrong table, a block shared by mistake or a step that is
computed twice shows in the answer. Cleared blocks hold CLEARED, and others GARBAGE: reading either
fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from isobatch_kernels.deferred_step import SubmitByRun
from isobatch_kernels.step import Int32, PathCount, Stat, StepInput, StepOutput

CLEARED = -1
GARBAGE = -2
# A row that contains this token is not finite.
POISON_TOKEN = 13


def toy_logits(tokens: Sequence[int], vocab_size: int) -> npt.NDArray[np.float32]:
    """Logits of the token after `tokens`: (vocab_size,) multiples of 1/64 below 16."""
    state = 17
    for token in tokens:
        state = (state * 1103515245 + 12345 + token * 2654435761) % 2**32
    ids = np.arange(vocab_size, dtype=np.uint64)
    mixed = (ids * np.uint64(40503) + np.uint64(state)) * np.uint64(2246822519) % np.uint64(2**32)
    return np.asarray((mixed >> np.uint64(22)) / 64, np.float32)


@dataclass
class FakeBackend(SubmitByRun):
    """Implements isobatch_kernels.step.Backend."""

    num_blocks: int
    block_size: int = 16
    vocab_size: int = 64
    unit: str = "scalar"
    rope_digest: str = "00000000"
    cache: npt.NDArray[np.int32] = field(init=False)
    num_runs: int = 0
    is_closed: bool = False
    fail_next: Exception | None = None

    def __post_init__(self) -> None:
        self.cache = np.full((self.num_blocks, self.block_size), GARBAGE, np.int32)

    def zero_blocks(self, block_ids: Int32) -> None:
        self.cache[block_ids] = CLEARED

    def read_block(self, block_id: int) -> npt.NDArray[np.uint16]:
        halves = self.cache[block_id].view(np.uint16).reshape(self.block_size, 2)
        return np.array(halves.T.reshape(1, 2, 1, self.block_size, 1))

    def write_block(self, block_id: int, bits: npt.NDArray[np.uint16]) -> None:
        self.cache[block_id] = bits.view(np.int32)

    def close(self) -> None:
        self.is_closed = True

    def run(self, step: StepInput) -> StepOutput:
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        self.num_runs += 1
        rows = len(step.query_start_loc) - 1
        contexts: list[list[int]] = []
        non_finite = np.full(rows, -1, np.int32)
        for row in range(rows):
            for index in range(step.query_start_loc[row], step.query_start_loc[row + 1]):
                position, token = int(step.positions[index]), int(step.token_ids[index])
                block, offset = divmod(position, self.block_size)
                self.cache[step.block_tables[row, block], offset] = token
                context = self._slots(step, row)[: position + 1]
                if min(context) < 0:
                    raise AssertionError(f"row {row} reads a position that was never written")
                contexts.append(context)
                if token == POISON_TOKEN:
                    non_finite[row] = 1
        logits = np.stack(
            [toy_logits(contexts[index], self.vocab_size) for index in step.wanted]
            or [np.zeros(self.vocab_size, np.float32)]
        )[: len(step.wanted)]
        for index in range(len(step.wanted)):
            span = slice(step.edit_starts[index], step.edit_starts[index + 1])
            np.add.at(logits[index], step.edit_ids[span], step.edit_values[span])
        return self._output(step, logits, non_finite)

    def _slots(self, step: StepInput, row: int) -> list[int]:
        blocks = [block for block in step.block_tables[row].tolist() if block >= 0]
        return [int(token) for token in self.cache[blocks].reshape(-1)]

    def _output(
        self, step: StepInput, logits: npt.NDArray[np.float32], non_finite: Int32
    ) -> StepOutput:
        asked = (step.statistics & np.uint32(Stat.TOP_K)) != 0
        counts = np.where(asked, step.top_k, 0)
        order = np.argsort(-logits, axis=1, kind="stable").astype(np.int32)
        best = [order[index, :count] for index, count in enumerate(counts)]
        maxima = logits.max(axis=1, initial=-np.inf).astype(np.float32)
        weights = np.exp((logits - maxima[:, None]) * step.inverse_temperatures[:, None])
        totals = weights.sum(axis=1)
        drawn = [
            int(np.searchsorted(np.cumsum(row), total * quantile, side="right"))
            for row, total, quantile in zip(weights, totals, step.quantiles, strict=True)
        ]
        wants = (step.statistics & np.uint32(Stat.QUANTILE)) != 0
        normalizes = (step.statistics & np.uint32(Stat.NORMALIZER)) != 0
        num_tokens = len(step.token_ids)
        return StepOutput(
            logits=logits,
            argmax_ids=order[:, 0].copy() if len(order) else np.zeros(0, np.int32),
            max_logits=maxima,
            normalizers=np.where(normalizes, totals, 0).astype(np.float32),
            quantile_ids=np.where(wants, np.array(drawn, np.int32), -1).astype(np.int32),
            top_k_starts=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
            top_k_ids=np.concatenate([*best, np.zeros(0, np.int32)]).astype(np.int32),
            top_k_logits=_gather(logits, best),
            top_k_weights=_gather(weights.astype(np.float32), best),
            non_finite_ops=non_finite,
            forward_ns=1000,
            statistics_ns=100,
            paths=(PathCount("linear", "gemv", self.unit, 3, num_tokens),),
        )


def _gather(values: npt.NDArray[np.float32], ids: Sequence[Int32]) -> npt.NDArray[np.float32]:
    picked = [values[index, each] for index, each in enumerate(ids)]
    return np.concatenate([*picked, np.zeros(0, np.float32)]).astype(np.float32)
