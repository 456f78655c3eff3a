"""Step requests for tests, from rows written as plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from executor_service.engine.step_request import Limits, Source, StepRequest, StepResults
from isobatch_kernels.step import PathCount, Stat

LIMITS = Limits(
    max_num_seqs=3, max_num_batched_tokens=8, vocab_size=50, context_length=20, max_top_k=4
)


@dataclass(frozen=True, slots=True)
class Want:
    """Statistics of one row's last token."""

    statistics: Stat = Stat.ARGMAX
    top_k: int = 0
    inverse_temperature: float = 1.0
    quantile: float = 0.0
    named: tuple[int, ...] = ()
    edits: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """One token row; `want` None asks for nothing."""

    sequence_id: int
    tokens: tuple[int, ...]
    start: int = 0
    generation: int = 0
    want: Want | None = field(default_factory=Want)
    output_of: tuple[int, int] | None = None  # (step, wanted index)


def _starts(lengths: Sequence[int]) -> Any:
    return np.concatenate(([0], np.cumsum(np.array(lengths, np.int64)))).astype(np.int32)


def step_request(
    step_id: int, rows: Sequence[Row], released: Sequence[int] = (), model_id: str = ""
) -> StepRequest:
    """Builds the arrays of a step."""
    ends = np.cumsum([len(row.tokens) for row in rows])
    wanted = [(end - 1, row.want) for end, row in zip(ends, rows, strict=True) if row.want]
    wants = [want for _, want in wanted]
    named = [token for want in wants for token in want.named]
    edits = [edit for want in wants for edit in want.edits]
    sources = [row.output_of or (0, 0) for row in rows]
    return StepRequest(
        step_id=step_id,
        model_id=model_id,
        released=np.array(released, np.uint64),
        sequence_ids=np.array([row.sequence_id for row in rows], np.uint64),
        generations=np.array([row.generation for row in rows], np.uint32),
        start_positions=np.array([row.start for row in rows], np.int32),
        num_tokens=np.array([len(row.tokens) for row in rows], np.int32),
        sources=np.array(
            [Source.STEP_OUTPUT if row.output_of else Source.LITERAL for row in rows], np.uint8
        ),
        source_steps=np.array([source[0] for source in sources], np.uint64),
        source_wanted=np.array([source[1] for source in sources], np.int32),
        token_ids=np.array([token for row in rows for token in row.tokens], np.int32),
        wanted=np.array([index for index, _ in wanted], np.int32),
        statistics=np.array([want.statistics for want in wants], np.uint32),
        top_k=np.array([want.top_k for want in wants], np.int32),
        inverse_temperatures=np.array([want.inverse_temperature for want in wants], np.float32),
        quantiles=np.array([want.quantile for want in wants], np.float32),
        named_starts=_starts([len(want.named) for want in wants]),
        named_ids=np.array(named, np.int32),
        edit_starts=_starts([len(want.edits) for want in wants]),
        edit_ids=np.array([token for token, _ in edits], np.int32),
        edit_values=np.array([value for _, value in edits], np.float32),
    )


def all_wanted(request: StepRequest, wanted: Sequence[int] | None = None) -> StepRequest:
    """The step with the argmax wanted at every token, as a row that verifies a draft asks.

    With `wanted`, at those of its tokens.
    """
    indexes = range(len(request.token_ids)) if wanted is None else wanted
    count = len(indexes)
    return replace(
        request,
        wanted=np.array(indexes, np.int32),
        statistics=np.full(count, Stat.ARGMAX, np.uint32),
        top_k=np.zeros(count, np.int32),
        inverse_temperatures=np.ones(count, np.float32),
        quantiles=np.zeros(count, np.float32),
        named_starts=np.zeros(count + 1, np.int32),
        edit_starts=np.zeros(count + 1, np.int32),
    )


def step_results() -> StepResults:
    """Results of two rows with a wanted position each; the second row is not finite."""
    return StepResults(
        row_outcomes=np.array([1, 2], np.uint8),
        non_finite_details=("layers.3.mlp.down",),
        argmax_ids=np.array([4, -1], np.int32),
        max_logits=np.array([1.5, 2.5], np.float32),
        quantile_ids=np.array([-1, 6], np.int32),
        normalizers=np.array([0, 3.5], np.float32),
        top_k_starts=np.array([0, 1, 1], np.int32),
        top_k_ids=np.array([4], np.int32),
        top_k_logits=np.array([1.5], np.float32),
        top_k_weights=np.array([1], np.float32),
        named_logits=np.array([0.25], np.float32),
        digests=bytes(32),
        forward_ns=11,
        statistics_ns=12,
        paths=(PathCount("linear", "gemm", "vnni", 3, 40),),
    )
