"""The row kernel's arithmetic stays within the paper model of its speed."""

from __future__ import annotations

import pytest

from isobatch_kernels.metal.linear import LinearProfile
from tests.metal_on_cpu.operation_counts import count


@pytest.mark.parametrize(("bits", "b"), [(4, 64), (4, 32), (8, 64), (8, 32)])
def test_slots_a_weight(bits: int, b: int) -> None:
    """At most 3 + M(1 + 4/b) slots, and a decode that does not grow with the rows."""
    decodes = set()
    for rows in LinearProfile().row_tiles[::2]:
        counts = count(bits, b, rows)
        assert counts.per_weight <= counts.bound, counts
        decodes.add(counts.decode)
    assert len(decodes) == 1
    assert decodes.pop() <= 3 * b
