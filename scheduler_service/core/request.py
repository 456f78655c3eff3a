"""A request and the states it can be in.

A request has tokens known (prompt and output) and tokens computed (whose keys
and values the executor holds). There is no prefill phase and no decode phase:
each step computes part of the difference.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Final, NewType

from scheduler_service.core.errors import InvalidTransitionError
from scheduler_service.core.params import SamplingParams

RequestId = NewType("RequestId", str)

SequenceId = NewType("SequenceId", int)
"""Unsigned 64-bit name of a request's cached state; chosen by the core, never reused."""


class Priority(IntEnum):
    """Priority classes; the lower the number, the sooner."""

    INTERACTIVE = 0
    NORMAL = 1
    BATCH = 2


class RequestStatus(Enum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class RequestInput(Enum):
    """What can happen to a request."""

    ADMIT = "admit"
    ADVANCE = "advance"
    PREEMPT = "preempt"
    FINISH = "finish"


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


TRANSITIONS: Final[dict[tuple[RequestStatus, RequestInput], RequestStatus]] = {
    (RequestStatus.WAITING, RequestInput.ADMIT): RequestStatus.RUNNING,
    (RequestStatus.WAITING, RequestInput.FINISH): RequestStatus.FINISHED,
    (RequestStatus.RUNNING, RequestInput.ADVANCE): RequestStatus.RUNNING,
    (RequestStatus.RUNNING, RequestInput.PREEMPT): RequestStatus.PREEMPTED,
    (RequestStatus.RUNNING, RequestInput.FINISH): RequestStatus.FINISHED,
    (RequestStatus.PREEMPTED, RequestInput.ADMIT): RequestStatus.RUNNING,
    (RequestStatus.PREEMPTED, RequestInput.FINISH): RequestStatus.FINISHED,
}
"""Every legal (status, input) pair and the status that follows. Anything else is a bug."""


@dataclass(slots=True, eq=False)
class PrefixWait:
    """A request waits to be opened while another one computes the start of its prompt.

    Attributes:
        leader: The request that computes it.
        generation: Generation of the leader's cached state.
        num_tokens: The wait is over when the leader has computed so many tokens.
        num_computed_tokens: What the leader had computed when last looked at.
        step_id: The last planned step at that time.
    """

    leader: Request
    generation: int
    num_tokens: int
    num_computed_tokens: int
    step_id: int


@dataclass(slots=True, eq=False)
class Request:
    """One request. Made by the shell, changed by the core alone once submitted.

    Attributes:
        request_id: Identity, unique among live requests.
        prompt_token_ids: Prompt, at least one token.
        params: Sampling parameters, passed on untouched.
        max_tokens: Most tokens to generate; `submit` clips it to what the context leaves.
        model: Model id.
        cache_salt: Keeps one tenant's cached prefixes invisible to others.
        stop_token_ids: Tokens that end generation; the model's own ones included.
        deadline: Monotonic time in seconds after which the request ends; None for never.
        arrival: Monotonic time in seconds at which it arrived.
        priority: Its class.
        client_id: Whose share it takes from.
        group_id: Id of the call that it is a sample of.
        takes_drafts: Whether its rows may have drafted tokens.
        sequence_id: Name of its cached state, given by `submit`; rises with arrival.
        generation: Rises each time the cached state is lost.
        is_announced: The executor may know this generation; whoever ends must then be released.
        is_opened: The executor has answered: it knows this generation and what of it is cached.
        provenance_handle: Names the executor's record of the cached positions; 0 for none.
        prefix_wait: Whom it waits for before it is opened; None for nobody.
        num_awaited_tokens: Cached tokens that its last wait was for; 0 without one.
        may_wait_for_prefix: False once a wait went by without progress.
        output_token_ids: Tokens generated so far.
        num_computed_tokens: Known tokens whose keys and values the executor holds.
        num_cached_tokens: Of these, found in the executor's prefix cache at the last opening.
        num_cached_prompt_tokens: Prompt tokens found there before its very first row.
        num_preemptions: Times the cached state was lost.
        num_yields: Of these, for a request of a higher class.
        waiting_since: Monotonic time in seconds since which it waits; `arrival` at first.
        rank: Class by which it is served and kept while it runs: that of its admission, ageing
            included.
        is_paused: Its reader is behind, so it gets no rows.
        num_granted_tokens: Positions that the executor made room for since the last opening; more
            than the computed ones where drafted tokens were not accepted.
        num_draft_tokens: Drafted tokens that its rows had.
        num_accepted_draft_tokens: Of these, those that were drawn as well.
        status: Where the request is.
        finish_reason: Why it ended; None while it lives.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    model: str = ""
    cache_salt: str = ""
    stop_token_ids: frozenset[int] = frozenset()
    deadline: float | None = None
    arrival: float = 0.0
    priority: Priority = Priority.NORMAL
    client_id: str = ""
    group_id: RequestId = RequestId("")
    takes_drafts: bool = True
    sequence_id: SequenceId = field(default=SequenceId(0), init=False)
    generation: int = field(default=0, init=False)
    is_announced: bool = field(default=False, init=False)
    is_opened: bool = field(default=False, init=False)
    provenance_handle: int = field(default=0, init=False)
    prefix_wait: PrefixWait | None = field(default=None, init=False)
    num_awaited_tokens: int = field(default=0, init=False)
    may_wait_for_prefix: bool = field(default=True, init=False)
    output_token_ids: list[int] = field(default_factory=list, init=False)
    num_computed_tokens: int = field(default=0, init=False)
    num_cached_tokens: int = field(default=0, init=False)
    num_cached_prompt_tokens: int = field(default=0, init=False)
    num_preemptions: int = field(default=0, init=False)
    num_yields: int = field(default=0, init=False)
    waiting_since: float = field(default=0.0, init=False)
    rank: int = field(default=0, init=False)
    is_paused: bool = field(default=False, init=False)
    num_granted_tokens: int = field(default=0, init=False)
    num_draft_tokens: int = field(default=0, init=False)
    num_accepted_draft_tokens: int = field(default=0, init=False)
    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)

    @property
    def public_id(self) -> RequestId:
        """Id that the client knows: that of the call."""
        return self.group_id or self.request_id

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens that are not computed yet."""
        known = len(self.prompt_token_ids) + len(self.output_token_ids)
        return known - self.num_computed_tokens

    @property
    def num_held_tokens(self) -> int:
        """Positions that it holds blocks for."""
        computed, granted = self.num_computed_tokens, self.num_granted_tokens
        return computed if computed > granted else granted

    def token(self, position: int) -> int:
        """Return the known token at an absolute position."""
        num_prompt_tokens = len(self.prompt_token_ids)
        if position < num_prompt_tokens:
            return self.prompt_token_ids[position]
        return self.output_token_ids[position - num_prompt_tokens]

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the known tokens at positions [start, stop)."""
        split = len(self.prompt_token_ids)
        if stop <= split:
            return self.prompt_token_ids[start:stop]
        output = self.output_token_ids[max(start - split, 0) : max(stop - split, 0)]
        return self.prompt_token_ids[start:stop] + tuple(output)

    def apply_input(self, given: RequestInput) -> None:
        """Move to the status that follows.

        Raises:
            InvalidTransitionError: The table does not hold (status, input).
        """
        if given is RequestInput.ADVANCE and self.status is RequestStatus.RUNNING:
            return  # as in the table, for each token
        following = TRANSITIONS.get((self.status, given))
        if following is None:
            raise InvalidTransitionError(
                f"[request] {self.status.name} does not accept {given.name}, "
                f"got it for {self.request_id!r}"
            )
        self.status = following
