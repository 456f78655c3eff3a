"""Token ids to text, one token at a time."""

import codecs
from collections.abc import Sequence, Set


class Detokenizer:
    """Turns one stream of token ids into text.

    The deltas of `feed` and the rest given by `finish`, joined, equal the decoding of
    all ids at once. Bytes of an unfinished character are held back until it is
    complete; bytes that can be no character become U+FFFD, as a decoding of the
    whole would have it. A token costs time proportional to its own bytes.
    """

    def __init__(self, pieces: Sequence[bytes], skipped_ids: Set[int]) -> None:
        """Use `pieces` (bytes by token id); ids in `skipped_ids` give no text."""
        self._pieces = pieces
        self._skipped_ids = skipped_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """Return the text that this token completes; ids beyond the vocabulary give none."""
        if token_id in self._skipped_ids or not 0 <= token_id < len(self._pieces):
            return ""
        return self._decoder.decode(self._pieces[token_id])

    def finish(self) -> str:
        """Return what was held back; the stream has ended."""
        return self._decoder.decode(b"", final=True)
