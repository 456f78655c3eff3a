"""What the lookup proposer finds."""

from __future__ import annotations

import itertools

import pytest

from scheduler_service.core import SequenceId
from scheduler_service.speculation import NO_PROPOSAL, LookupProposer, Proposal
from scheduler_service.speculation.lookup import MAX_CAUGHT_UP, MAX_MATCH, LookupIndex
from tests.support.core_scenarios import make_request


def index_of(text: str, max_indexed: int = 1 << 15, max_candidates: int = 16) -> LookupIndex:
    """Return an index over the characters of `text`."""
    index = LookupIndex(max_indexed, max_candidates)
    index.extend(map(ord, text))
    return index


def draft(index: LookupIndex, count: int = 4) -> tuple[str, int]:
    """Return the draft as text, and its strength."""
    proposal = index.propose(count)
    return "".join(map(chr, proposal.token_ids)), proposal.strength


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("", 0)),
        ("a", ("", 0)),
        ("abcdefg", ("", 0)),
        ("xa ya", ("", 0)),  # one token that agrees is none
        ("abcd...ab", ("cd..", 2)),
        ("1abcX 2abcY 2abc", ("Y 2a", 5)),  # the longest wins: " 2abc" over "abc"
        ("2abcY 1abcX 3abc", ("X 3a", 3)),  # of equal ones the newest
        ("abababab", ("abab", 6)),  # goes on with its own copy
        ("aaaa", ("aaaa", 3)),
        ("abcabcab", ("cabc", 5)),
    ],
)
def test_drafts(text: str, expected: tuple[str, int]) -> None:
    assert draft(index_of(text)) == expected


def test_a_draft_has_the_length_that_was_asked_for() -> None:
    index = index_of("abcdefgh.ab")
    assert [draft(index, n)[0] for n in (0, 1, 3, 12)] == ["", "c", "cde", "cdefgh.abcde"]


def test_a_match_is_followed_past_more_new_occurrences_than_are_compared() -> None:
    """The source lies behind many newer pairs, and is kept as long as the text agrees with it."""
    source = "source: " + "of the x" * 1 + "and of the last"
    noise = "".join(f" of{c}" for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    index = index_of(source + noise, max_candidates=4)
    for known, following in itertools.pairwise("source: of the xand of the last"):
        index.extend([ord(known)])
        text, strength = draft(index, 1)
        if strength > 2:
            assert text == following
    assert draft(index, 1)[1] >= 25


def test_strength_has_a_bound() -> None:
    text = "".join(map(chr, range(1000, 1200)))
    assert draft(index_of(text + text), 2) == (text[:2], MAX_MATCH)


def test_memory_is_bounded_and_what_is_recent_is_still_found() -> None:
    index = LookupIndex(max_indexed=64)
    for start in range(0, 5000, 10):
        index.extend(range(start, start + 10))
        assert index.num_kept <= 64
        assert len(index) == start + 10
    index.extend([4990, 4991])
    assert index.propose(3) == Proposal((4992, 4993, 4994), 2)
    index.extend([100, 101])
    assert index.propose(3) == NO_PROPOSAL


def test_a_proposer_keeps_up_with_its_requests() -> None:
    proposer = LookupProposer()
    request = make_request("r", [5, 6, 7, 8, 5, 6], max_tokens=9)
    request.sequence_id = SequenceId(1)
    assert proposer.propose(request, 2) == Proposal((7, 8), 2)
    request.output_token_ids += [7, 9]
    assert proposer.propose(request, 2) == NO_PROPOSAL
    request.output_token_ids += [5, 6]
    assert proposer.propose(request, 2) == Proposal((7, 9), 2)
    proposer.forget(SequenceId(1))
    proposer.forget(SequenceId(2))
    assert len(proposer) == 0


def test_a_long_prompt_is_taken_in_over_several_steps() -> None:
    proposer = LookupProposer()
    request = make_request("r", [*range(2 * MAX_CAUGHT_UP), 3, 4], max_tokens=9)
    assert [proposer.propose(request, 1) for _ in range(3)] == [
        NO_PROPOSAL, NO_PROPOSAL, Proposal((5,), 2),
    ]  # fmt: skip
