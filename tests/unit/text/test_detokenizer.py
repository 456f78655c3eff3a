"""The streaming detokenizer against decoding everything at once."""

import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.text.detokenizer import Detokenizer
from scheduler_service.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizer import tokenizer_document, tokenizer_source, vocab_size

LIBRARY = tokenizers.Tokenizer.from_str(tokenizer_document().decode())
TOKENIZER = Tokenizer(tokenizer_source())
BYTES = [bytes([value]) for value in range(256)]


def _stream(ids: list[int], *, include_special_tokens: bool = False) -> list[str]:
    detokenizer = TOKENIZER.detokenizer(include_special_tokens=include_special_tokens)
    return [*map(detokenizer.feed, ids), detokenizer.finish()]


@given(st.lists(st.integers(0, vocab_size() - 1), max_size=60), st.booleans())
def test_joined_deltas_equal_the_library_for_any_ids(ids: list[int], keep: bool) -> None:
    """Invalid byte runs included: replacement characters fall in the same places."""
    expected = LIBRARY.decode(ids, skip_special_tokens=not keep)
    assert "".join(_stream(ids, include_special_tokens=keep)) == expected


@given(st.text(max_size=30))
def test_every_text_comes_back(text: str) -> None:
    assert "".join(_stream(TOKENIZER.encode_text(text))) == text


def test_every_split_of_multi_byte_text_gives_whole_characters() -> None:
    """Cut anywhere into two tokens: no delta holds a broken character."""
    text = "a\u00e9\u65e5\U0001f98a\u200dz"
    data = text.encode()
    for cut in range(len(data) + 1):
        detokenizer = Detokenizer([data[:cut], data[cut:]], frozenset())
        first, second, rest = detokenizer.feed(0), detokenizer.feed(1), detokenizer.finish()
        assert first + second == text
        assert rest == ""
        assert first == data[:cut].decode(errors="ignore")


def test_byte_by_byte_text_appears_with_the_last_byte_of_each_character() -> None:
    detokenizer = Detokenizer(BYTES, frozenset())
    deltas = [detokenizer.feed(byte) for byte in "\U0001f98a\u00e9".encode()]
    assert deltas == ["", "", "", "\U0001f98a", "", "\u00e9"]


def test_an_unfinished_character_is_given_up_at_the_end() -> None:
    detokenizer = Detokenizer(BYTES, frozenset())
    assert detokenizer.feed(0xE6) + detokenizer.feed(0x97) == ""
    assert detokenizer.finish() == "\ufffd"


def test_control_tokens_are_left_out_unless_asked_for() -> None:
    ids = [1, *TOKENIZER.encode_text("hello"), 2]
    assert "".join(_stream(ids)) == "hello"
    kept = "".join(_stream(ids, include_special_tokens=True))
    assert kept == "<|im_start|>hello<|im_end|>"


def test_ids_beyond_the_vocabulary_give_no_text() -> None:
    """Logits may be wider than the vocabulary."""
    assert _stream([vocab_size() + 5]) == ["", ""]
