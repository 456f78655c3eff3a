"""K-limited choices, full-row choices and the rule read literally give one token."""

from __future__ import annotations

import numpy as np
from hypothesis import event, given
from hypothesis import strategies as st

from scheduler_service.core import SamplingParams
from scheduler_service.sampling import (
    NEED_FULL_ROW,
    choose,
    choose_from_full_row,
    row_statistics,
    wanted_statistics,
)
from scheduler_service.sampling.statistics import weights
from tests.support import literal_sampling as literal

mixes = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 1.7, 40.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 20, 63, 64, 65, 200, 10_000]),
    top_p=st.sampled_from([1.0, 1.0, 0.0, 0.1, 0.5, 0.9, 0.999, 0.9999999]),
    min_p=st.sampled_from([0.0, 0.0, 1e-6, 0.01, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)
# Multiples of 1/4 make many ties; the spread decides how much mass the first few ids hold.
rows = st.tuples(st.integers(0, 2**32), st.integers(1, 300), st.sampled_from([0.5, 3.0, 20.0]))
positions = st.integers(0, 2**40)


def _logits(row: tuple[int, int, float]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    seed, size, spread = row
    drawn = np.random.default_rng(seed).standard_normal(size) * spread
    return (np.round(drawn * 4) / 4).astype(np.float32)


@given(mixes, rows, positions, st.sampled_from([1, 8, 64, 256]))
def test_k_entries_never_disagree_with_the_full_row(
    params: SamplingParams, row: tuple[int, int, float], position: int, max_top_k: int
) -> None:
    """Either they decide as the row does, or they say that they do not."""
    logits = _logits(row)
    asked = wanted_statistics(params, position, vocab_size=len(logits), max_top_k=max_top_k)
    stats = row_statistics(
        logits,
        inverse_temperature=asked.inverse_temperature,
        u=asked.quantile,
        top_k=asked.top_k,
    )
    chosen = choose(params, stats, asked.quantile)
    event(f"decided={chosen is not NEED_FULL_ROW}")
    full = choose_from_full_row(params, logits, asked.quantile)
    assert chosen is NEED_FULL_ROW or chosen == full
    if asked.top_k == len(logits):
        assert chosen == full, "K entries that are the whole row always decide"


@given(mixes, rows, positions)
def test_the_full_row_equals_the_rule_read_literally(
    params: SamplingParams, row: tuple[int, int, float], position: int
) -> None:
    """Filters, sums and draw, one number at a time."""
    logits = _logits(row)
    asked = wanted_statistics(params, position, vocab_size=len(logits), max_top_k=256)
    full = choose_from_full_row(params, logits, asked.quantile)
    order = literal.order(logits.tolist())
    if params.temperature == 0:
        assert full == order[0]
        return
    row_weights = list(weights(logits, asked.inverse_temperature))
    top_k_cuts = 0 < params.top_k < len(logits)
    if top_k_cuts or params.top_p < 1 or params.min_p > 0:
        assert full == literal.draw(params, order, row_weights, asked.quantile)
    else:
        assert full == literal.quantile(row_weights, asked.quantile)
