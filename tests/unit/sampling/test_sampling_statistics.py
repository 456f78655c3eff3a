"""Row statistics from full rows, against their definition read one number at a time."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_service.sampling import row_statistics
from scheduler_service.sampling.statistics import (
    quantile_token,
    running_chunk_sums,
    total_order,
    weights,
)
from tests.support import literal_sampling as literal

SIZES = [1, 2, 255, 256, 257, 1023, 1024, 1025, 2048, 3001]
DRAWS = [0.0, 2**-24, 0.25, 0.5, 0.999, 1 - 2**-24]


def _row(size: int, spread: float = 8.0) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    generator = np.random.default_rng(size)
    return (generator.standard_normal(size) * spread).astype(np.float32)


@pytest.mark.parametrize("size", SIZES)
def test_sums_equal_the_definition(size: int) -> None:
    """Z and every running chunk sum, bit for bit, on and off the borders of lanes and chunks."""
    row_weights = weights(_row(size), 0.7)
    assert running_chunk_sums(row_weights).tolist() == literal.running_sums(list(row_weights))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("u", DRAWS)
def test_quantile_tokens_equal_the_definition(size: int, u: float) -> None:
    """At the ends and inside; spread and flat rows."""
    for spread in (0.01, 1.0, 30.0):
        row_weights = weights(_row(size, spread), 1.0)
        assert quantile_token(row_weights, u) == literal.quantile(list(row_weights), u)


def test_a_draw_never_picks_a_weight_of_zero() -> None:
    """Zeros at both ends of the row, the mass in the second chunk."""
    logits = np.full(3000, -1000, dtype=np.float32)
    logits[1500:1503] = 0
    row_weights = weights(logits, 1.0)
    assert {quantile_token(row_weights, u) for u in DRAWS} <= {1500, 1501, 1502}
    assert quantile_token(row_weights, 0.0) == 1500
    assert quantile_token(row_weights, 1 - 2**-24) == 1502


def test_weights_equal_the_definition() -> None:
    """Subtraction, scaling and exponential, each rounded to fp32."""
    logits = _row(64)
    scale = np.float32(1.3)
    expected = [literal.exp((logit - logits.max()) * scale) for logit in logits]
    assert weights(logits, float(scale)).tolist() == expected


def test_weights_at_a_tiny_temperature_do_not_warn() -> None:
    """An infinite distance from the maximum weighs nothing."""
    logits = np.array([-(2.0**90), 0.0], dtype=np.float32)
    assert weights(logits, 2.0**60).tolist() == [0.0, 1.0]


def test_ties_go_to_the_lowest_id() -> None:
    """In argmax and in the total order."""
    logits = np.array([1, 3, 3, 2, 3, 2], dtype=np.float32)
    assert total_order(logits).tolist() == [1, 2, 4, 3, 5, 0]
    assert row_statistics(logits).argmax_id == 1


def test_all_statistics_of_a_row() -> None:
    """Each field, and top-K cut to the row when K is larger."""
    logits = np.array([0, 2, 1], dtype=np.float32)
    stats = row_statistics(logits, u=0.5, top_k=64)
    row_weights = weights(logits, 1.0)
    assert (stats.vocab_size, stats.argmax_id, stats.max_logit) == (3, 1, 2.0)
    assert stats.normalizer == running_chunk_sums(row_weights)[-1]
    assert stats.quantile_id == 1
    assert stats.top_k_ids is not None
    assert stats.top_k_ids.tolist() == [1, 2, 0]
    assert stats.top_k_logits is not None
    assert stats.top_k_logits.tolist() == [2.0, 1.0, 0.0]
    assert stats.top_k_weights is not None
    assert stats.top_k_weights.tolist() == row_weights[[1, 2, 0]].tolist()
