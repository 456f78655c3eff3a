"""The stream's order is part of the contract, and the SDK checks it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_service.client import (
    Accepted,
    Finished,
    FinishReason,
    ProtocolError,
    RequestCancelledError,
    Timings,
    TokenEvent,
    Usage,
)
from scheduler_service.client._assembly import Assembly

ACCEPTED = Accepted("r", "toy", 3, 9, 5, "X1")
FINISHED = Finished(
    FinishReason.STOP, "tail", "END", None, Usage(3, 2, 3), Timings(0.0, 0.1, 0.2), 1
)


def test_pieces_join_into_a_completion() -> None:
    """Text includes what Finished still held back; ids and digests keep their order."""
    assembly = Assembly()
    for event in (
        ACCEPTED,
        TokenEvent(0, (7, 8), "ab", (b"x", b"y")),
        TokenEvent(2, (9,), "c", (b"z",)),
        FINISHED,
    ):
        assert assembly.fold(event) is event
    completion = assembly.completion()
    assert completion.text == "abctail"
    assert completion.token_ids == (7, 8, 9)
    assert completion.logits_digests == (b"x", b"y", b"z")
    assert completion.seed == 9
    assert completion.stop_string == "END"
    assert completion.num_preemptions == 1


@pytest.mark.parametrize("start_index", [0, 2])
def test_repeats_and_gaps_are_seen(start_index: int) -> None:
    """One token is known, so the next must have index 1."""
    assembly = Assembly()
    assembly.fold(ACCEPTED)
    assembly.fold(TokenEvent(0, (7,), "a"))
    with pytest.raises(ProtocolError, match=f"must be 1, got {start_index}"):
        assembly.fold(TokenEvent(start_index, (8,), "b"))


def test_tokens_before_accepted_are_refused() -> None:
    """Without Accepted nobody knows the seed."""
    with pytest.raises(ProtocolError, match="Accepted must be the first event, got TokenEvent"):
        Assembly().fold(TokenEvent(0, (7,), "a"))


def test_nothing_follows_finished() -> None:
    """Finished is the last event."""
    assembly = Assembly()
    assembly.fold(ACCEPTED)
    assembly.fold(FINISHED)
    with pytest.raises(ProtocolError, match="must be the last event"):
        assembly.fold(TokenEvent(0, (7,), "a"))


def test_accepted_may_repeat_before_tokens_only() -> None:
    """A retried request is accepted again, which the caller need not see."""
    assembly = Assembly()
    assert assembly.fold(ACCEPTED) is ACCEPTED
    assert assembly.fold(ACCEPTED) is None
    assembly.fold(TokenEvent(0, (7,), "a"))
    with pytest.raises(ProtocolError, match="before tokens"):
        assembly.fold(ACCEPTED)


def test_end_without_finished_breaks_the_contract() -> None:
    """A stream that just stops is not an answer."""
    assembly = Assembly()
    assembly.fold(ACCEPTED)
    with pytest.raises(ProtocolError, match="must end with Finished"):
        assembly.check_ended()
    with pytest.raises(RequestCancelledError, match="got 0 tokens"):
        assembly.completion()


def test_samples_are_put_together_apart() -> None:
    """Each has its own tokens, end and seed; `text` and `completion` are those of the first."""
    assembly = Assembly()
    assembly.fold(replace(ACCEPTED, seed=2**64 - 1, num_samples=2))
    for event in (
        TokenEvent(0, (7,), "a"),
        TokenEvent(0, (8,), "b", sample_index=1),
        replace(FINISHED, sample_index=1),
        TokenEvent(1, (9,), "c"),
    ):
        assert assembly.fold(event) is event
    with pytest.raises(ProtocolError, match="must end with Finished"):
        assembly.check_ended()
    with pytest.raises(ProtocolError, match="Finished must be the last event"):
        assembly.fold(TokenEvent(1, (9,), "c", sample_index=1))
    with pytest.raises(ProtocolError, match="sample_index must be below 2, got 2"):
        assembly.fold(TokenEvent(0, (9,), "c", sample_index=2))
    assembly.fold(FINISHED)
    assembly.check_ended()
    first, second = assembly.completions()
    assert (first.token_ids, first.text, first.seed) == ((7, 9), "actail", 2**64 - 1)
    assert (second.token_ids, second.text, second.seed) == ((8,), "btail", 0)
    assert [first.sample_index, second.sample_index] == [0, 1]
    assert assembly.completion() == first
    assert assembly.text == "actail"
