"""Drafts by lookup: what followed the last time these same tokens were seen.

Text that is copied, edited or summarised repeats its source for long stretches. The index is that
of LZ77 compressors (hash chains; Ziv and Lempel 1977, RFC 1951 section 4): the last occurrence of
each pair of tokens, and for each position the occurrence of the same pair before it. The longest
match among the newest occurrences wins; of equal ones the newest. A match that goes on is followed
from token to token and never looked for again, so a long source is not lost behind many newer
occurrences of a common pair.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from scheduler_service.core.request import Request, SequenceId
from scheduler_service.speculation.proposer import NO_PROPOSAL, Proposal, ProposerKind

MIN_MATCH: Final = 2
"""Tokens that must agree; the index is by pairs."""

MAX_MATCH: Final = 64
"""Agreeing tokens that are counted at most: beyond that, more say nothing more."""

MAX_INDEXED: Final = 1 << 15
"""Tokens of one sequence that are kept; beyond that the older half is let go."""

MAX_CANDIDATES: Final = 16
"""Occurrences that are compared for one proposal."""

MAX_CAUGHT_UP: Final = 4096
"""Tokens taken in for one proposal, so that a long prompt holds nobody up (about 1 ms)."""

_ABSENT: Final = -1


class LookupIndex:
    """Known tokens of one sequence, and where each pair of them occurred.

    Memory: at most `max_indexed` tokens, links and pairs. Time: O(1) amortised for a token,
    O(max_candidates * MAX_MATCH) for a proposal at the very most.
    """

    __slots__ = (
        "_before", "_last", "_match", "_max_candidates", "_max_indexed", "_source", "_tokens",
        "num_dropped",
    )  # fmt: skip

    def __init__(
        self, max_indexed: int = MAX_INDEXED, max_candidates: int = MAX_CANDIDATES
    ) -> None:
        self._max_indexed = max_indexed
        self._max_candidates = max_candidates
        self._tokens: list[int] = []
        # Position of the second token of each pair's last occurrence.
        self._last: dict[int, int] = {}
        # For each position, the one before it at which the same pair ended.
        self._before: list[int] = []
        # Position that the last token was matched with, and how many tokens agree up to there.
        self._source = _ABSENT
        self._match = 0
        self.num_dropped = 0

    def __len__(self) -> int:
        """Return how many tokens were taken in, those let go included."""
        return self.num_dropped + len(self._tokens)

    @property
    def num_kept(self) -> int:
        """Tokens that are kept."""
        return len(self._tokens)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Take in the next known tokens."""
        for token_id in token_ids:
            self._append(token_id)
        if len(self._tokens) > self._max_indexed:
            self._drop_older_half()

    def _append(self, token_id: int) -> None:
        tokens = self._tokens
        position = len(tokens)
        if self._source != _ABSENT:
            if tokens[self._source + 1] == token_id:
                self._source += 1
                self._match = min(self._match + 1, MAX_MATCH)
            else:
                self._source = _ABSENT
        before = _ABSENT
        if position:
            pair = tokens[-1] << 32 | token_id
            before = self._last.get(pair, _ABSENT)
            self._last[pair] = position
        tokens.append(token_id)
        self._before.append(before)

    def _drop_older_half(self) -> None:
        kept = self._tokens[-(self._max_indexed // 2) :]
        self.num_dropped += len(self._tokens) - len(kept)
        self._tokens, self._last, self._before = [], {}, []
        self._source = _ABSENT
        for token_id in kept:
            self._append(token_id)

    def propose(self, max_tokens: int) -> Proposal:
        """Return what followed the longest match of the last tokens, up to `max_tokens`."""
        self._find()
        if self._source == _ABSENT or max_tokens < 1:
            return NO_PROPOSAL
        start = self._source + 1
        found = self._tokens[start : start + max_tokens]
        # A source that reaches the end goes on with its own copy: text with a period.
        period = len(self._tokens) - start
        while len(found) < max_tokens:
            found.append(found[len(found) - period])
        return Proposal(tuple(found), self._match)

    def _find(self) -> None:
        """Set source and match to the best of the followed one and the newest occurrences."""
        tokens = self._tokens
        position = len(tokens) - 1
        best, longest = self._source, self._match if self._source != _ABSENT else 0
        candidate = self._before[position] if position >= 0 else _ABSENT
        for _ in range(self._max_candidates):
            if candidate == _ABSENT or longest == MAX_MATCH:
                break
            length = self._match_length(candidate, position)
            if length > longest or (length == longest and candidate > best):
                best, longest = candidate, length
            candidate = self._before[candidate]
        self._source, self._match = best, longest

    def _match_length(self, candidate: int, position: int) -> int:
        """Return how many tokens up to the two positions agree; the last two are known to."""
        tokens = self._tokens
        length = MIN_MATCH
        limit = min(MAX_MATCH, candidate + 1)
        while length < limit and tokens[candidate - length] == tokens[position - length]:
            length += 1
        return length


class LookupProposer:
    """Drafts from each request's own prompt and output."""

    kind = ProposerKind.LOOKUP

    def __init__(self) -> None:
        self._indexes: dict[SequenceId, LookupIndex] = {}

    def __len__(self) -> int:
        """Return how many sequences something is kept for."""
        return len(self._indexes)

    def propose(self, request: Request, max_tokens: int) -> Proposal:
        """Return a proposal; an empty one while a long prompt is still being taken in."""
        index = self._indexes.get(request.sequence_id)
        if index is None:
            index = self._indexes[request.sequence_id] = LookupIndex()
        known, num_tokens = len(index), request.num_tokens
        if known < num_tokens:
            index.extend(request.tokens(known, min(num_tokens, known + MAX_CAUGHT_UP)))
        if len(index) < num_tokens:
            return NO_PROPOSAL
        return index.propose(max_tokens)

    def forget(self, sequence_id: SequenceId) -> None:
        """Let go of a sequence's index."""
        self._indexes.pop(sequence_id, None)
