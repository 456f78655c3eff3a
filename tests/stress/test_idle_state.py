"""What an idle process holds beyond its baseline is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_service.client import Stats
from tests.stress.idle_state import MOST_NEW_THREADS, ProcessCounts, Snapshot, grown, memory_growth

BASE = ProcessCounts(
    pid=7, num_threads=10, num_descriptors=20, num_children=0, resident_mebibytes=100.0
)
STATS = Stats(0, 0, 0, 0, 0, 0, 0, 64, 64, True)


def test_nothing_more_is_no_leak() -> None:
    assert grown("x", BASE, BASE) == []
    assert grown("x", replace(BASE, num_descriptors=19, num_threads=11), BASE) == []


@pytest.mark.parametrize(
    "now",
    [
        replace(BASE, num_descriptors=21),
        replace(BASE, num_threads=BASE.num_threads + MOST_NEW_THREADS + 1),
        replace(BASE, num_children=1),
    ],
)
def test_a_leak_is_named(now: ProcessCounts) -> None:
    assert len(grown("x", now, BASE)) == 1


def test_memory_of_the_same_process_alone_is_compared() -> None:
    first = Snapshot(BASE, BASE, {}, {}, STATS)
    more = replace(BASE, resident_mebibytes=111.0)
    assert len(memory_growth(first, Snapshot(more, BASE, {}, {}, STATS), 10.0)) == 1
    assert memory_growth(first, Snapshot(more, BASE, {}, {}, STATS), 12.0) == []
    assert memory_growth(first, Snapshot(replace(more, pid=8), BASE, {}, {}, STATS), 10.0) == []
