"""The outbox of a request: merging, holding back, ending."""

import asyncio

import pytest

from scheduler_service.core import FinishReason, Request, RequestId, SamplingParams
from scheduler_service.errors import DeadlineError
from scheduler_service.streams import Delta, TokenStream
from scheduler_service.text.detokenizer import Detokenizer

# Token i stands for the i-th letter; 26 and 27 are the halves of a two-byte character.
PIECES = [bytes([97 + i]) for i in range(26)] + [b"\xc3", b"\xa9"]


def _stream(*stops: str, wants_digests: bool = False) -> TokenStream:
    request = Request(RequestId("r"), (1,), SamplingParams(), 100)
    return TokenStream(
        request, Detokenizer(PIECES, frozenset()), stops, wants_digests=wants_digests
    )


def test_what_was_not_taken_is_merged() -> None:
    stream = _stream()
    for token_id in (0, 1, 2):
        stream.push_token(token_id, 1.0)
    assert stream.take() == Delta(0, (0, 1, 2), "abc", ())
    assert stream.take() is None
    stream.push_token(3, 2.0)
    assert stream.take() == Delta(3, (3,), "d", ())
    assert (stream.first_token_at, stream.last_token_at) == (1.0, 2.0)


def test_an_unfinished_character_is_held_back_and_given_up_at_the_end() -> None:
    stream = _stream()
    stream.push_token(26, 1.0)
    assert stream.take() == Delta(0, (26,), "", ())
    stream.push_token(27, 1.0)
    assert stream.take() == Delta(1, (27,), "\u00e9", ())
    stream.push_token(26, 1.0)
    stream.finish(FinishReason.LENGTH, 2.0)
    assert stream.ending is not None
    assert stream.ending.text == "\ufffd"


def test_a_possible_stop_is_held_back_and_given_out_at_the_end() -> None:
    stream = _stream("abc")
    for token_id in (25, 0, 1):
        assert not stream.push_token(token_id, 1.0)
    assert stream.take() == Delta(0, (25, 0, 1), "z", ())
    stream.finish(FinishReason.LENGTH, 2.0)
    assert stream.ending is not None
    assert (stream.ending.text, stream.ending.reason) == ("ab", FinishReason.LENGTH)


def test_a_stop_string_beats_the_reason_and_the_stop_token() -> None:
    stream = _stream("ab")
    stream.push_token(0, 1.0)
    assert stream.push_token(1, 1.0)
    stream.finish(FinishReason.STOP, 2.0, stop_token_id=1)
    ending = stream.ending
    assert ending is not None
    assert (ending.text, ending.stop_string, ending.stop_token_id) == ("", "ab", None)
    assert not stream.push_token(2, 3.0)


def test_nothing_changes_after_the_end() -> None:
    stream = _stream()
    stream.fail(DeadlineError())
    stream.finish(FinishReason.STOP, 1.0)
    stream.push_token(0, 1.0)
    assert stream.is_over
    assert (stream.ending, stream.take()) == (None, None)


def test_digests_go_with_their_tokens() -> None:
    stream = _stream(wants_digests=True)
    stream.push_token(0, 1.0, b"x" * 16)
    stream.push_token(1, 1.0, b"y" * 16)
    delta = stream.take()
    assert delta is not None
    assert delta.digests == (b"x" * 16, b"y" * 16)


async def test_the_first_token_does_not_linger_and_later_ones_do() -> None:
    stream = _stream()
    stream.push_token(0, 1.0)
    async with asyncio.timeout(1):
        await stream.wait(linger_seconds=60)
    stream.take()
    stream.push_token(1, 1.0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await stream.wait(linger_seconds=60)


async def test_the_end_cuts_lingering_short() -> None:
    stream = _stream()
    stream.push_token(0, 1.0)
    stream.take()
    stream.push_token(1, 1.0)
    waiting = asyncio.ensure_future(stream.wait(linger_seconds=60))
    await asyncio.sleep(0)
    stream.finish(FinishReason.STOP, 2.0)
    async with asyncio.timeout(1):
        await waiting


async def test_waiting_ends_with_a_token_and_starts_again_after_taking() -> None:
    stream = _stream()
    waiting = asyncio.ensure_future(stream.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    stream.push_token(0, 1.0)
    await waiting
    stream.take()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await stream.wait()
