"""Row statistics of logits: every table equals the reference bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.row_ops import TABLES, Floats, bits, reference, table_id

seeds = st.integers(0, 2**32 - 1)
sizes = st.one_of(
    st.integers(1, 70), st.sampled_from([1023, 1024, 1025, 2048]), st.integers(1, 5000)
)
LAST_U = 1 - 2.0**-24


@dataclass
class Statistics:
    """What one call returned."""

    scalars: tuple[int, float, float, int]
    logits: Floats
    ids: npt.NDArray[np.int32]
    top_logits: Floats
    weights: Floats

    def floats(self) -> list[Floats]:
        """All fp32 results."""
        scalars = np.array(self.scalars[1:3], np.float32)
        return [scalars, self.logits, self.top_logits, self.weights]

    def same_bits(self, other: Statistics) -> bool:
        """Equality of everything."""
        arrays = zip(self.floats(), other.floats(), strict=True)
        return (
            self.scalars == other.scalars
            and np.array_equal(self.ids, other.ids)
            and all(np.array_equal(bits(a), bits(b)) for a, b in arrays)
        )


def run(
    owner: Any,
    logits: Floats,
    *,
    top_k: int = 0,
    inverse_temperature: float = 1.0,
    u: float = 0.5,
    normalizer: bool = True,
    quantile: bool = True,
    edits: dict[int, float] | None = None,
) -> Statistics:
    """Statistics of a copy of the logits by a table or the reference."""
    row = logits.copy()
    edit_ids = np.array(list(edits or {}), np.int32)
    edit_values = np.array(list((edits or {}).values()), np.float32)
    ids = np.full(top_k, -7, np.int32)
    top, weights = (np.full(top_k, -7, np.float32) for _ in "tw")
    scalars = owner.statistics(
        row, normalizer, quantile, inverse_temperature, u, edit_ids, edit_values, ids, top, weights
    )
    return Statistics(scalars, row, ids, top, weights)


def random_logits(rng: np.random.Generator, n: int) -> Floats:
    """Logits: smooth, with ties, nearly constant, sorted, or with a few far above the rest."""
    x = rng.standard_normal(n) * 10.0 ** rng.uniform(-1, 1.3)
    match rng.integers(6):
        case 0:
            x = np.round(x)
        case 1:
            x = np.zeros(n) + (rng.random(n) < 0.1)
        case 2:
            x = np.sort(x) if rng.random() < 0.5 else np.sort(x)[::-1]
        case 3:
            x[rng.integers(0, n, 3)] += 60
        case 4:
            x = np.where(rng.random(n) < 0.5, x, -1e30)
    logits: Floats = x.astype(np.float32) + np.float32(0)  # no negative zero
    return logits


@given(
    seed=seeds,
    size=sizes,
    top_k=st.one_of(st.just(0), st.integers(1, 256)),
    inverse_temperature=st.sampled_from([1.0, 0.5, 1.4285715, 100.0, 1e-3]),
    u=st.one_of(
        st.sampled_from([0.0, 2.0**-24, LAST_U]), st.integers(0, 2**24 - 1).map(lambda i: i / 2**24)
    ),
    normalizer=st.booleans(),
    quantile=st.booleans(),
    num_edits=st.integers(0, 4),
)
def test_statistics(
    seed: int,
    size: int,
    top_k: int,
    inverse_temperature: float,
    u: float,
    normalizer: bool,
    quantile: bool,
    num_edits: int,
) -> None:
    """Everything that may be asked of a row, ties and K above the row's size included."""
    rng = np.random.default_rng(seed)
    logits = random_logits(rng, size)
    values = rng.choice([-np.inf, 5.0, -3.25, 2.0**-60, 2.0**-61, 1e-42], num_edits)
    edits = dict(zip(rng.integers(0, size, num_edits).tolist(), values.tolist(), strict=True))
    if all(np.isneginf(edits.get(i, 0)) for i in range(size)):
        edits = {}
    options: dict[str, Any] = {
        "top_k": top_k,
        "inverse_temperature": inverse_temperature,
        "u": u,
        "normalizer": normalizer,
        "quantile": quantile,
        "edits": edits,
    }
    want = run(reference, logits, **options)
    for table in TABLES:
        assert run(table, logits, **options).same_bits(want), table_id(table)


@pytest.mark.parametrize("table", TABLES, ids=table_id)
@pytest.mark.parametrize("size", [49152, 152064])
def test_whole_vocabularies(table: Any, size: int) -> None:
    """Rows of the size that models have, with the largest K."""
    logits = (np.random.default_rng(size).standard_normal(size) * 4).astype(np.float32)
    logits[size // 2 :] = np.round(logits[size // 2 :] * 8) / 8
    for u in (0.0, 0.37, LAST_U):
        top_k = 256 if u == 0.37 else 0
        want = run(reference, logits, top_k=top_k, u=u)
        assert run(table, logits, top_k=top_k, u=u).same_bits(want)


@pytest.mark.parametrize("table", TABLES, ids=table_id)
@given(seed=seeds, size=st.integers(1, 3000), top_k=st.integers(1, 256))
def test_top_k_is_the_order_of_a_stable_sort(table: Any, seed: int, size: int, top_k: int) -> None:
    """top-K is the head of (logit descending, id ascending), as numpy's stable sort finds it."""
    logits = random_logits(np.random.default_rng(seed), size)
    got = run(table, logits, top_k=top_k)
    order = np.argsort(-logits, kind="stable")[:top_k]
    assert np.array_equal(got.ids[: order.size], order)
    assert np.array_equal(bits(got.top_logits[: order.size]), bits(logits[order]))
    assert (got.ids[order.size :] == -1).all()
    assert (got.weights[order.size :] == 0).all()
    assert got.scalars[0] == order[0]
    assert got.weights[0] == 1


def quantile_by_definition(logits: Floats, u: float) -> tuple[float, int]:
    """Z and the quantile token in numpy: section 5 written once more, from the page alone."""
    weights = np.empty_like(logits)
    reference.exp(logits - logits.max(), weights)
    running: list[np.float32] = []
    for start in range(0, logits.size, 1024):
        chains = np.zeros(1024, np.float32)
        part = weights[start : start + 1024]
        chains[: part.size] = part
        c = chains[:256].copy()
        for row in range(1, 4):
            c = c + chains[256 * row : 256 * (row + 1)]
        while c.size > 1:
            c = c[: c.size // 2] + c[c.size // 2 :]
        running.append(c[0] if not running else running[-1] + c[0])
    target = np.float32(u) * running[-1]
    chunk = next(i for i, r in enumerate(running) if r > target)
    b = running[chunk - 1] if chunk else np.float32(0)
    part = weights[chunk * 1024 : (chunk + 1) * 1024]
    for i, weight in enumerate(part):
        b = b + weight
        if b > target:
            return float(running[-1]), chunk * 1024 + i
    return float(running[-1]), chunk * 1024 + int(np.flatnonzero(part > 0)[-1])


@given(
    seed=seeds,
    size=st.integers(1, 4000),
    u=st.one_of(st.sampled_from([0.0, LAST_U]), st.floats(0, LAST_U, width=32)),
)
def test_reference_follows_the_page(seed: int, size: int, u: float) -> None:
    """The reference's Z and quantile are those of the definition written in numpy."""
    logits = random_logits(np.random.default_rng(seed), size)
    _, _, z, token = run(reference, logits, u=u).scalars
    assert (z, token) == quantile_by_definition(logits, u)


@pytest.mark.parametrize("owner", [reference, *TABLES])
def test_a_quantile_lost_to_rounding_is_the_last_positive_weight(owner: Any) -> None:
    """An ordered sum may end below its sum256: then the last token with a weight is drawn."""
    found = 0
    for seed in range(40):
        logits = np.random.default_rng(seed).standard_normal(1024).astype(np.float32)
        logits[1000:] = -200
        weights = np.empty_like(logits)
        reference.exp(logits - logits.max(), weights)
        if (
            np.cumsum(weights, dtype=np.float32)[-1]
            > np.float32(LAST_U) * run(owner, logits).scalars[2]
        ):
            continue
        found += 1
        assert run(owner, logits, u=LAST_U).scalars[3] == 999
    assert found > 0


@pytest.mark.parametrize("table", TABLES, ids=table_id)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_non_finite_logits_are_survived(table: Any, poison: float) -> None:
    """Such a row ends elsewhere with an error; here it must only keep to its memory."""
    for size in (1, 5, 300, 2000):
        logits = np.full(size, poison, np.float32)
        logits[size // 2 :: 3] = 1
        got = run(table, logits, top_k=40, u=0.9)
        assert 0 <= got.scalars[0] < size
        assert 0 <= got.scalars[3] < size
        assert ((got.ids >= -1) & (got.ids < size)).all()
