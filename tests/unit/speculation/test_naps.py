"""When nobody looks for drafts, and the steps that go by meanwhile."""

from __future__ import annotations

import itertools

from scheduler_service.speculation.naps import LONGEST_NAP, SHORTEST_NAP, Naps


def run(
    naps: Naps,
    num_steps: int,
    *,
    longest: int = LONGEST_NAP,
    found_at: int | None = None,
    has_asked: bool = False,
) -> tuple[list[int], list[int]]:
    """Run steps; return those that were looked at, and the unbooked ones that came with them."""
    looked, unbooked = [], []
    for step in range(num_steps):
        was_looked_at = not naps.is_on(1)
        if was_looked_at:
            looked.append(step)
            has_found = step == found_at
            naps.note_look(1, longest, has_found=has_found, has_asked=has_asked)
        count = naps.count_step(was_looked_at=was_looked_at)
        if was_looked_at:
            unbooked.append(count)
        else:
            assert count == 0
    return looked, unbooked


def gaps(looked: list[int]) -> list[int]:
    """Return the steps from each look to the next."""
    return [after - before for before, after in itertools.pairwise(looked)]


def test_looks_come_after_twice_as_many_steps_each_time_up_to_a_bound() -> None:
    looked, unbooked = run(Naps(), 60)
    assert looked[:8] == [0, 1, 2, 3, 4, 6, 10, 18]
    assert set(gaps(looked[7:])) == {LONGEST_NAP}
    # A step without a look is booked with the next that has one, once.
    assert unbooked == [0, *(gap - 1 for gap in gaps(looked))]


def test_what_is_found_ends_naps() -> None:
    looked, _ = run(Naps(), 60, found_at=18)
    assert looked[7:15] == [18, 19, 20, 21, 22, 23, 25, 29]


def test_who_comes_or_goes_ends_a_nap() -> None:
    naps = Naps()
    run(naps, 12)
    assert naps.is_on(1)
    assert not naps.is_on(2)
    # It stays over when there are as many as before, and naps begin again with the shortest.
    assert run(naps, 9)[0] == [0, 1, 3, 7]


def test_asking_the_draft_model_is_no_quiet_look() -> None:
    assert run(Naps(), 30, has_asked=True)[0] == list(range(30))


def test_naps_may_be_bounded_or_left_out() -> None:
    assert run(Naps(), 30, longest=SHORTEST_NAP)[0] == list(range(30))
    assert run(Naps(), 30, longest=0)[0] == list(range(30))
    naps = Naps()
    run(naps, 60)
    looked, _ = run(naps, 20, longest=SHORTEST_NAP)
    assert set(gaps(looked)) == {SHORTEST_NAP}
