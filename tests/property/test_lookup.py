"""The lookup index equals a search that looks everywhere, however its tokens arrive."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.speculation import NO_PROPOSAL, Proposal
from scheduler_service.speculation.lookup import MAX_MATCH, MIN_MATCH, LookupIndex

texts = st.lists(st.integers(0, 3), max_size=80) | st.lists(st.integers(0, 1), max_size=200)


def search(tokens: list[int], count: int) -> Proposal:
    """Return the draft by definition: the longest match, of equal ones the newest."""
    best = (MIN_MATCH - 1, -1)
    for end in range(len(tokens) - 1):
        length = 0
        while length <= end and length < MAX_MATCH and tokens[end - length] == tokens[-1 - length]:
            length += 1
        best = max(best, (length, end))
    length, end = best
    if length < MIN_MATCH or count < 1:
        return NO_PROPOSAL
    followed = list(tokens)
    for _ in range(count):
        end += 1
        followed.append(followed[end])
    return Proposal(tuple(followed[len(tokens) :]), length)


@given(texts, st.lists(st.integers(1, 9), max_size=40), st.integers(0, 9))
def test_with_all_occurrences_compared_it_is_the_longest_match(
    tokens: list[int], cuts: list[int], count: int
) -> None:
    index = LookupIndex(max_candidates=len(tokens))
    start = 0
    for size in [*cuts, len(tokens)]:
        index.extend(tokens[start : start + size])
        start += size
        known = tokens[:start]
        assert index.propose(count) == search(known, count)


@given(texts, st.integers(1, 3), st.integers(8, 40), st.integers(1, 9))
def test_with_few_compared_and_little_kept_a_draft_is_still_what_followed_a_match(
    tokens: list[int], max_candidates: int, max_indexed: int, count: int
) -> None:
    index = LookupIndex(max_indexed, max_candidates)
    for position, token in enumerate(tokens):
        index.extend([token])
        known = tokens[: position + 1]
        assert index.num_kept <= max_indexed
        proposal = index.propose(count)
        if proposal == NO_PROPOSAL:
            continue
        assert MIN_MATCH <= proposal.strength <= MAX_MATCH
        assert proposal.strength <= search(known, 1).strength
        suffix = known[-proposal.strength :]
        sources = [
            end
            for end in range(proposal.strength - 1, position)
            if known[end + 1 - proposal.strength : end + 1] == suffix
        ]
        followed = [tuple(_follow(known, end, count)) for end in sources]
        assert proposal.token_ids in followed


def _follow(known: list[int], end: int, count: int) -> list[int]:
    tokens = list(known)
    for offset in range(count):
        tokens.append(tokens[end + 1 + offset])
    return tokens[len(known) :]
