"""Stop strings against a definition written out naively."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.text.stop_strings import StopMatcher


def _definition(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Return (text before the stop, stop): earliest end first, then the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


def _run(matcher: StopMatcher, deltas: list[str]) -> str:
    text = "".join(map(matcher.feed, deltas))
    return text if matcher.matched is not None else text + matcher.finish()


@given(
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.text("abc", max_size=5), max_size=12),
)
def test_equals_the_definition_however_the_text_is_cut(stops: list[str], deltas: list[str]) -> None:
    matcher = StopMatcher(stops)
    text = _run(matcher, deltas)
    assert (text, matcher.matched) == _definition("".join(deltas), stops)


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    st.text("ab", max_size=20),
)
def test_holds_back_exactly_the_longest_possible_beginning(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    given_out = matcher.feed(text)
    if matcher.matched is None:
        ends = [n for s in stops for n in range(len(s)) if n <= len(text) and text.endswith(s[:n])]
        assert given_out == text[: len(text) - max(ends)]


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_stop_across_tokens_is_found_at_every_cut(cut: int) -> None:
    text = "go <END> on"
    matcher = StopMatcher(["<END>"])
    assert _run(matcher, [text[:cut], text[cut:]]) == "go "
    assert matcher.matched == "<END>"


def test_a_stop_in_the_first_token_leaves_no_text() -> None:
    matcher = StopMatcher(["Hi"])
    assert matcher.feed("Hi there") == ""
    assert matcher.matched == "Hi"


def test_overlapping_stops_the_earliest_complete_one_wins() -> None:
    matcher = StopMatcher(["abcd", "bc"])
    assert matcher.feed("xabcd") == "xa"
    assert matcher.matched == "bc"


def test_of_two_complete_at_once_the_longer_wins() -> None:
    matcher = StopMatcher(["cd", "bcd"])
    assert matcher.feed("abcd") == "a"
    assert matcher.matched == "bcd"


def test_a_false_beginning_is_given_out() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.feed("a\n\nUs") == "a"
    assert matcher.feed("age") == "\n\nUsage"
    assert matcher.finish() == ""


def test_nothing_follows_a_match() -> None:
    matcher = StopMatcher(["."])
    assert matcher.feed("a.b") == "a"
    assert matcher.feed("c") == ""
    assert matcher.finish() == ""


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[stop_strings\] a stop string must not be empty"):
        StopMatcher(["a", ""])


def test_no_stops_hold_nothing_back() -> None:
    matcher = StopMatcher([])
    assert matcher.feed("anything") == "anything"
    assert matcher.matched is None
