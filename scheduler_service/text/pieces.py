"""The bytes that each token id stands for.

Two families of vocabularies are understood, told apart by the decoder named in
the tokenizer document:

- byte level (GPT-2 and its heirs): every character of a token spells one byte
  through a fixed table; a token with a character outside the table stands for
  its own UTF-8 bytes;
- byte fallback (SentencePiece heirs): U+2581 spells a space and `<0xAB>` spells
  one byte.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from scheduler_service.text.errors import TokenizerError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"
# Far beyond every vocabulary; a table of so many entries takes 128 MiB.
MAX_TOKEN_IDS = 1 << 24


def _byte_level_table() -> dict[str, int]:
    """Return the character-to-byte table of byte-level vocabularies.

    Printable Latin-1 characters stand for themselves; the remaining bytes are
    numbered upwards from U+0100 in ascending order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in table)
    table.update((chr(0x100 + index), byte) for index, byte in enumerate(others))
    return table


# For str.translate, which with Latin-1 is several times faster than a loop over characters.
# Latin-1 characters that spell no byte are sent out of Latin-1.
_TRANSLATION = dict.fromkeys(range(256), "\U0010ffff")
_TRANSLATION.update((ord(mark), chr(byte)) for mark, byte in _byte_level_table().items())


def _byte_level_piece(token: str) -> bytes:
    try:
        return token.translate(_TRANSLATION).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def _byte_fallback_piece(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    if match:
        return bytes([int(match[1], 16)])
    return token.replace(_SPACE_MARK, " ").encode()


def _decoder_types(decoder: Mapping[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    if decoder.get("type") == "Sequence":
        return {str(part.get("type")) for part in decoder.get("decoders", ())}
    return {str(decoder.get("type"))}


def build_pieces(
    vocabulary: Mapping[str, int], decoder: Mapping[str, Any] | None
) -> Sequence[bytes]:
    """Return a table from token id to bytes; ids without a token give b"".

    `decoder` is the decoder object of the tokenizer document. Raises
    TokenizerError for a decoder of neither family, and for an id far beyond every vocabulary.
    """
    types = _decoder_types(decoder)
    if "ByteLevel" in types:
        spell = _byte_level_piece
    elif types & {"ByteFallback", "Metaspace"}:
        spell = _byte_fallback_piece
    else:
        raise TokenizerError(
            "[tokenizer] decoder must be ByteLevel, ByteFallback or Metaspace, "
            f"got {sorted(types) or 'none'}"
        )
    largest = max(vocabulary.values(), default=-1)
    if largest >= MAX_TOKEN_IDS:
        raise TokenizerError(f"[tokenizer] ids must be below {MAX_TOKEN_IDS}, got {largest}")
    pieces = [b""] * (largest + 1)
    for token, token_id in vocabulary.items():
        pieces[token_id] = spell(token)
    return pieces
