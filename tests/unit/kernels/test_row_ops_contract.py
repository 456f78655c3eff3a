"""What the row operations refuse, and that this machine's tables are the ones expected."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.row_ops import TABLES, native


def test_the_portable_table_is_always_there() -> None:
    """Every machine has at least the scalar table; names are in order of speed."""
    names = native.row_ops_names()
    assert names[0] == "scalar"
    assert [t.name for t in TABLES[::2]] == names


def test_unknown_tables_are_refused_by_name() -> None:
    """The message says what was asked for."""
    with pytest.raises(ValueError, match=r"\[row_ops\] .*got sse9"):
        native.RowOps("sse9")


@pytest.mark.parametrize(
    ("head_dim", "block_size", "rule"),
    [(64, 32, "block_size must be 16"), (64, 8, "block_size must be 16"), (3, 16, "head_dim must")],
)
def test_caches_of_other_shapes_are_refused(head_dim: int, block_size: int, rule: str) -> None:
    """Attention knows blocks of 16 and even heads alone, and says so."""
    store = np.zeros(2 * head_dim * block_size, np.uint16)
    with pytest.raises(ValueError, match=rule):
        native.Cache(store, store.copy(), 1, head_dim, block_size)
