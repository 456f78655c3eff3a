"""What one step computes, and what came of it.

A token row is one request's contiguous tokens in one step; a token-row batch is
all token rows of a step. Values only: nothing here changes after it is made. What a step makes for
each row is a named tuple, which takes less than half the time of a frozen dataclass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from scheduler_service.core.events import Event
from scheduler_service.core.params import SamplingParams
from scheduler_service.core.request import Request, RequestId, SequenceId


class TokenSourceKind(Enum):
    """Where the tokens of a row come from."""

    LITERAL = "literal"
    STEP_OUTPUT = "step_output"


class TokenSource(NamedTuple):
    """Where the tokens of a row come from.

    Attributes:
        kind: LITERAL takes `TokenRow.token_ids`; STEP_OUTPUT takes the token that the
            executor itself chose in the step before, and then the row has one token, written 0.
        step_id: That step; 0 for LITERAL.
        wanted_index: Index of the wanted position in that step; 0 for LITERAL.
    """

    kind: TokenSourceKind = TokenSourceKind.LITERAL
    step_id: int = 0
    wanted_index: int = 0


LITERAL: Final = TokenSource()


class WantedPosition(NamedTuple):
    """A position of a row whose logits are wanted.

    Attributes:
        offset: Index into the row's tokens.
        drawn_position: Absolute position of the token to be drawn from these logits, which is
            the row's start + offset + 1. It is the position in the random counter, so a
            recomputed request draws the same numbers.
        params: How the token is drawn.
    """

    offset: int
    drawn_position: int
    params: SamplingParams


class TokenRow(NamedTuple):
    """One request's contiguous tokens in one step.

    Attributes:
        request_id: The request.
        sequence_id: Name of its cached state.
        generation: Generation of that state.
        token_ids: Tokens, at least one; drafted ones last.
        start_position: Absolute position of the first, equal to the tokens computed before.
        wanted: Positions whose logits are wanted, by ascending offset; empty for a prefill
            chunk that does not reach the last known token.
        source: Where the tokens come from.
        num_draft_tokens: Of the tokens, the last ones that are drafted and not known. The token
            before them is the last known one; logits are wanted there and at each of them.
    """

    request_id: RequestId
    sequence_id: SequenceId
    generation: int
    token_ids: tuple[int, ...]
    start_position: int
    wanted: tuple[WantedPosition, ...] = ()
    source: TokenSource = LITERAL
    num_draft_tokens: int = 0

    @property
    def num_known_tokens(self) -> int:
        """Tokens that are not drafted."""
        return len(self.token_ids) - self.num_draft_tokens

    def is_of(self, request: Request) -> bool:
        """Return whether the row continues the request's present cached state."""
        return (
            request.request_id == self.request_id
            and request.sequence_id == self.sequence_id
            and request.generation == self.generation
        )

    @property
    def draft_token_ids(self) -> tuple[int, ...]:
        """The drafted tokens, in order."""
        return self.token_ids[len(self.token_ids) - self.num_draft_tokens :]


@dataclass(frozen=True, slots=True)
class SequenceOpening:
    """A sequence to announce to the executor, before any row of it is planned.

    Attributes:
        request_id: The request.
        sequence_id: Name of its cached state.
        generation: Generation of that state.
        model: Model id.
        cache_salt: Keeps one tenant's cached prefixes invisible to others.
        token_ids: All known tokens; at most all but the last may be cached, because logits are
            wanted there.
    """

    request_id: RequestId
    sequence_id: SequenceId
    generation: int
    model: str
    cache_salt: str
    token_ids: tuple[int, ...]

    @property
    def max_cached_tokens(self) -> int:
        """Most cached positions that its first row may start after."""
        return max(0, len(self.token_ids) - 1)


@dataclass(frozen=True, slots=True)
class SequenceOpened:
    """The executor's answer to an opening.

    Attributes:
        request_id: The request.
        sequence_id: Name of its cached state.
        generation: Generation of that state.
        num_cached_tokens: Positions that are there already: the first row starts after them.
        provenance_handle: Names the executor's record of these positions; 0 for none.
    """

    request_id: RequestId
    sequence_id: SequenceId
    generation: int
    num_cached_tokens: int = 0
    provenance_handle: int = 0


@dataclass(frozen=True, slots=True)
class TokenRowBatch:
    """All token rows of one step.

    The executor applies `released_sequence_ids` before it grows the cache for the rows;
    without that order the pool would be exceeded in mid-step.

    Attributes:
        step_id: Rises by one with each batch; the first is 1, and again after
            `executor_restarted`.
        model: Model id.
        rows: Token rows, at most one for each request. May be empty: then the step only
            gives sequences back.
        released_sequence_ids: Sequences to give back before anything else; each is named in
            one batch only.
        events: What planning decided: admissions and preemptions, in order.
        predicted_seconds: Time of the step by the cost curve; 0 without a curve.
        bound_seconds: Most seconds by the curve that planning allowed; infinite for no bound.
    """

    step_id: int
    model: str
    rows: tuple[TokenRow, ...]
    released_sequence_ids: tuple[SequenceId, ...] = ()
    events: tuple[Event, ...] = ()
    predicted_seconds: float = 0.0
    bound_seconds: float = math.inf

    @property
    def num_tokens(self) -> int:
        """Tokens over all rows."""
        return sum(len(row.token_ids) for row in self.rows)


class SampledRow(NamedTuple):
    """What came of one token row: the drawn token, or why there is none.

    Attributes:
        token_id: Token drawn at the row's wanted position, the last one that counts; None when
            the row wanted none or failed.
        error: Why the row failed, in words, for example the layer that was not finite; the
            request then ends with ERROR. None when it did not fail.
        accepted_token_ids: The tokens drawn before `token_id`, each equal to the row's drafted
            token in its place.
    """

    token_id: int | None = None
    error: str | None = None
    accepted_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class KvCounts:
    """Block counts of the executor's pool.

    Attributes:
        total: Blocks in the pool.
        free: Blocks that nobody uses.
        evictable: Blocks that only the prefix index holds.
        shared: Blocks used by more than one sequence.
    """

    total: int
    free: int
    evictable: int
    shared: int
