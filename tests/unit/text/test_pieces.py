"""Bytes of token ids."""

import pytest
from tokenizers import decoders, pre_tokenizers

from scheduler_service.text.errors import TokenizerError
from scheduler_service.text.pieces import build_pieces

BYTE_LEVEL = {"type": "ByteLevel"}


def test_the_byte_level_alphabet_spells_every_byte_once() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = build_pieces({mark: i for i, mark in enumerate(alphabet)}, BYTE_LEVEL)
    assert sorted(pieces) == [bytes([value]) for value in range(256)]
    decoder = decoders.ByteLevel()
    for mark, piece in zip(alphabet, pieces, strict=True):
        assert decoder.decode([mark]) == piece.decode(errors="replace")


@pytest.mark.parametrize(
    "token", ["a b", " ", "\n", "\u00a0", "\u00ad\u00c3", "<\uff5cend\u2581of\uff5c>", "\u65e5"]
)
def test_tokens_outside_the_alphabet_stand_for_themselves(token: str) -> None:
    assert build_pieces({token: 0}, BYTE_LEVEL) == [token.encode()]
    assert decoders.ByteLevel().decode([token]) == token


def test_a_byte_level_decoder_may_be_part_of_a_sequence() -> None:
    decoder = {"type": "Sequence", "decoders": [{"type": "Fuse"}, BYTE_LEVEL]}
    assert build_pieces({"\u0120a": 1}, decoder) == [b"", b" a"]


def test_an_id_beyond_every_vocabulary_is_refused() -> None:
    with pytest.raises(TokenizerError, match="ids must be below 16777216, got 16777216"):
        build_pieces({"a": 1 << 24}, BYTE_LEVEL)


def test_unknown_decoders_are_refused_by_name() -> None:
    with pytest.raises(TokenizerError, match="got \\['BPEDecoder'\\]"):
        build_pieces({}, {"type": "BPEDecoder", "suffix": "</w>"})
