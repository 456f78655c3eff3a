"""Steps that nobody asked for: to warm a backend up and to time it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from executor_service.engine.step_request import Source, StepRequest
from isobatch_kernels.step import Stat

if TYPE_CHECKING:
    from executor_service.engine.step_request import Int32

# Spreads token ids over the vocabulary, as text does.
_STRIDE: Final = 7919


def trial_step(num_rows: int, tokens_per_row: int, start: int, vocab_size: int) -> StepRequest:
    """Return a step of sequences 0..num_rows - 1, each from position `start`.

    It wants the statistics of greedy sampling of each row's last token.
    """
    num_tokens = num_rows * tokens_per_row
    return StepRequest(
        step_id=1,
        model_id="",
        released=np.zeros(0, np.uint64),
        sequence_ids=np.arange(num_rows, dtype=np.uint64),
        generations=np.zeros(num_rows, np.uint32),
        start_positions=np.full(num_rows, start, np.int32),
        num_tokens=np.full(num_rows, tokens_per_row, np.int32),
        sources=np.full(num_rows, Source.LITERAL, np.uint8),
        source_steps=np.zeros(num_rows, np.uint64),
        source_wanted=np.zeros(num_rows, np.int32),
        token_ids=_token_ids(num_tokens, vocab_size),
        wanted=np.arange(1, num_rows + 1, dtype=np.int32) * np.int32(tokens_per_row) - np.int32(1),
        statistics=np.full(num_rows, Stat.ARGMAX | Stat.NORMALIZER, np.uint32),
        top_k=np.zeros(num_rows, np.int32),
        inverse_temperatures=np.ones(num_rows, np.float32),
        quantiles=np.zeros(num_rows, np.float32),
        named_starts=np.zeros(num_rows + 1, np.int32),
        named_ids=np.zeros(0, np.int32),
        edit_starts=np.zeros(num_rows + 1, np.int32),
        edit_ids=np.zeros(0, np.int32),
        edit_values=np.zeros(0, np.float32),
    )


def _token_ids(num_tokens: int, vocab_size: int) -> Int32:
    ids = np.arange(num_tokens, dtype=np.int64) * _STRIDE % vocab_size
    return ids.astype(np.int32)
