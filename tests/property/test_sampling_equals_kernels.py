"""The scheduler's numpy statistics equal the kernels' bit for bit.

A token may be decided on either side, from top-K statistics or from a row fetched in full, so the
two implementations of docs/numerics.md, section 5, must never differ.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.sampling import row_statistics
from tests.support.row_ops import Floats, bits, reference

sizes = st.one_of(
    st.integers(1, 70), st.sampled_from([255, 256, 1023, 1024, 1025, 4097]), st.integers(1, 5000)
)
seeds = st.integers(0, 2**32 - 1)
spreads = st.sampled_from([1e-3, 0.3, 3.0, 30.0])
inverse_temperatures = st.sampled_from([1.0, 0.025, 1.3, 5.0, 1e5, 2.0**-60])
draws = st.integers(0, 2**24 - 1).map(lambda word: word * 2.0**-24)


def check_equal(logits: Floats, inverse_temperature: float, u: float, top_k: int) -> None:
    """Compare every statistic of one row with the reference's."""
    scale = float(np.float32(inverse_temperature))
    ids = np.empty(top_k, np.int32)
    top, weights = (np.empty(top_k, np.float32) for _ in "tw")
    none_ids, none_values = np.empty(0, np.int32), np.empty(0, np.float32)
    argmax_id, max_logit, normalizer, quantile_id = reference.statistics(
        logits.copy(), True, True, scale, u, none_ids, none_values, ids, top, weights
    )
    ours = row_statistics(logits, inverse_temperature=scale, u=u, top_k=top_k)
    assert (ours.argmax_id, ours.quantile_id) == (argmax_id, quantile_id)
    assert (
        bits([ours.max_logit, ours.normalizer]).tolist() == bits([max_logit, normalizer]).tolist()
    )
    assert ours.top_k_ids is not None
    assert ours.top_k_ids.tolist() == ids.tolist()
    assert ours.top_k_logits is not None
    assert bits(ours.top_k_logits).tolist() == bits(top).tolist()
    assert ours.top_k_weights is not None
    assert bits(ours.top_k_weights).tolist() == bits(weights).tolist()


@given(sizes, seeds, spreads, inverse_temperatures, draws)
def test_random_rows(
    size: int, seed: int, spread: float, inverse_temperature: float, u: float
) -> None:
    """Rows of all sizes, flat and steep, at temperatures from greedy to uniform."""
    generator = np.random.default_rng(seed)
    logits = (generator.standard_normal(size) * spread).astype(np.float32)
    check_equal(logits, inverse_temperature, u, min(64, size))


@settings(max_examples=5)
@given(seeds, draws)
def test_rows_of_a_real_vocabulary(seed: int, u: float) -> None:
    """49,152 ids in 48 chunks."""
    logits = (np.random.default_rng(seed).standard_normal(49_152) * 4).astype(np.float32)
    check_equal(logits, 1.25, u, 256)
