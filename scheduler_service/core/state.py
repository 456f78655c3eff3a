"""The scheduler's whole state for one model, and the invariants that hold between calls.

Functions of `admission`, `plan` and `apply` change it; nothing else does. A trace of their calls
replays exactly: there is no clock, no randomness and no input but the arguments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from scheduler_service.core.batch import KvCounts, TokenRow, TokenRowBatch
from scheduler_service.core.capacity import blocks_for
from scheduler_service.core.cost_curve import NO_CURVE, CostCurve
from scheduler_service.core.errors import InvalidParameterError
from scheduler_service.core.output_lengths import OutputLengths
from scheduler_service.core.pace import Pace
from scheduler_service.core.queues import DeadlineQueue, WaitingQueue
from scheduler_service.core.request import Request, RequestId, RequestStatus, SequenceId
from scheduler_service.core.service_rate import ServiceRate


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one model's scheduling.

    Attributes:
        max_num_batched_tokens: Most tokens of a step.
        max_num_seqs: Most requests that hold cached state, hence most rows of a step.
        max_num_waiting: Most requests that wait; `submit` refuses more.
        block_size: Cache positions of a block.
        num_blocks: Blocks of the pool.
        context_length: Most tokens of prompt and output together.
        max_prefill_chunk: Most tokens of one row.
        max_waiting_tokens: Most tokens of all requests that wait; `submit` refuses more, but
            never the first.
        aging_seconds: After so long a waiting request rises by one priority class.
        max_step_seconds: Most seconds of a step while somebody decodes; 0 to derive it from the
            curve. Without a curve nothing is bounded.
        cost_curve: What steps cost.

    Raises:
        InvalidParameterError: A count is below 1, `aging_seconds` is not above 0, or
            `max_step_seconds` is below 0 or not finite.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_num_waiting: int
    block_size: int
    num_blocks: int
    context_length: int
    max_prefill_chunk: int = 512
    max_waiting_tokens: int = 1_000_000
    aging_seconds: float = 30.0
    max_step_seconds: float = 0.0
    cost_curve: CostCurve = NO_CURVE

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise InvalidParameterError("limits", name, "must be at least 1", value)
        if not self.aging_seconds > 0:
            raise InvalidParameterError(
                "limits", "aging_seconds", "must be above 0", self.aging_seconds
            )
        if not 0 <= self.max_step_seconds < math.inf:
            raise InvalidParameterError(
                "limits", "max_step_seconds", "must be finite and at least 0",
                self.max_step_seconds,
            )  # fmt: skip

    @property
    def pool_capacity(self) -> int:
        """Tokens that all blocks hold."""
        return self.num_blocks * self.block_size

    @property
    def max_sequence_length(self) -> int:
        """Most tokens of prompt and output together that context and pool both allow."""
        return min(self.context_length, self.pool_capacity)


@dataclass(slots=True, eq=False)
class SchedulerState:
    """Requests of one model and what they hold.

    Attributes:
        limits: Bounds.
        model: Model id, copied to every batch.
        requests: Live requests.
        waiting: Live requests without rows. Opened ones hold what the executor has cached of them.
        running: Live requests with rows, in order of admission.
        deadlines: Deadlines of live requests.
        to_release: Sequences that the next batch gives back, in order.
        num_blocks_to_release: Blocks of these, each sequence counted as if it shared none.
        in_flight: The batch that was planned and not yet applied or refused.
        ahead: The batch that was planned after it, before its answer.
        num_vain_rows: Rows computed so far for requests that had ended or lost their state.
        step_id: Id of the last planned batch; 0 before the first.
        last_sequence_id: The last sequence id given.
        block_ceiling: Most blocks to count on. Below `limits.num_blocks` after the executor
            refused a step, until a running request ends.
        num_refusals_alone: Steps in a row that the executor refused although one request ran.
        kv_counts: The executor's own counts, as last recorded; None before the first answer.
        may_open_early: Whether the first in the queue may be opened before it fits. False after
            its cached blocks had to be given back, until a running request ends.
        pace: How fast steps are of late, against the curve.
        shares_prefixes: Whether waiting for a prefix that another request computes is of use.
        output_lengths: Lengths of finished outputs, which predict those to come.
        service_rate: How fast steps and the queue have been.
        now: The latest monotonic time in seconds that was given.
    """

    limits: Limits
    model: str = ""
    requests: dict[RequestId, Request] = field(default_factory=dict, init=False)
    waiting: WaitingQueue = field(init=False)
    running: dict[RequestId, Request] = field(default_factory=dict, init=False)
    deadlines: DeadlineQueue = field(default_factory=DeadlineQueue, init=False)
    to_release: list[SequenceId] = field(default_factory=list, init=False)
    num_blocks_to_release: int = field(default=0, init=False)
    in_flight: TokenRowBatch | None = field(default=None, init=False)
    ahead: TokenRowBatch | None = field(default=None, init=False)
    num_vain_rows: int = field(default=0, init=False)
    step_id: int = field(default=0, init=False)
    last_sequence_id: SequenceId = field(default=SequenceId(0), init=False)
    block_ceiling: int = field(default=0, init=False)
    num_refusals_alone: int = field(default=0, init=False)
    kv_counts: KvCounts | None = field(default=None, init=False)
    may_open_early: bool = field(default=True, init=False)
    shares_prefixes: bool = field(default=True, init=False)
    output_lengths: OutputLengths = field(default_factory=OutputLengths, init=False)
    service_rate: ServiceRate = field(default_factory=ServiceRate, init=False)
    now: float = field(default=0.0, init=False)
    pace: Pace = field(default_factory=Pace, init=False)

    def __post_init__(self) -> None:
        self.waiting = WaitingQueue(self.limits.aging_seconds)
        self.block_ceiling = self.limits.num_blocks

    @property
    def has_work(self) -> bool:
        """True while `plan` would return a batch, were none in flight."""
        return bool(self.to_release) or any(
            not request.is_paused for request in self.requests.values()
        )

    def land(self, batch: TokenRowBatch) -> bool:
        """Note that a batch is answered; return False for one that is not the first in flight."""
        if self.in_flight is not batch:
            return False
        self.in_flight, self.ahead = self.ahead, None
        return True

    def request_of(self, row: TokenRow) -> Request | None:
        """Return the running request whose present cached state a row continues, or None."""
        request = self.running.get(row.request_id)
        return request if request is not None and row.is_of(request) else None

    def num_blocks_held(self) -> int:
        """Return the blocks that are held, each sequence counted as if it shared none."""
        size = self.limits.block_size
        held = sum([blocks_for(r.num_held_tokens, size) for r in self.running.values()])
        return held + sum(
            blocks_for(each.num_computed_tokens, size)
            for each in self.waiting
            if each.num_computed_tokens
        )

    def _num_own_blocks(self) -> int:
        """Return the blocks that running requests computed themselves, which nobody else did."""
        size = self.limits.block_size
        return sum(
            blocks_for(r.num_computed_tokens, size) - blocks_for(r.num_cached_tokens, size)
            for r in self.running.values()
        )

    def check_invariants(self) -> None:
        """Check what holds between any two calls; O(live requests), meant for tests.

        Raises:
            AssertionError: One of them is broken.
        """
        running = list(self.running.values())
        waiting = list(self.waiting)
        known = {request.request_id: request for request in running + waiting}
        _check(known == self.requests, "a live request runs or waits", known)
        _check(len(known) == len(running) + len(waiting), "and not both", known)
        ids = {request.sequence_id for request in known.values()}
        _check(len(ids) == len(known), "sequence ids are unique", ids)
        ordered = list(self.waiting.ordered(self.now))
        anew = list(self.waiting.ordered_anew(self.now))
        _check(ordered == anew, "the kept order of admission holds", ordered)
        _check(
            {each.request_id for each in ordered}
            == {each.request_id for each in waiting if not each.is_paused},
            "the order of admission has everybody who may be admitted", ordered,
        )  # fmt: skip
        num_waiting_tokens = sum(request.num_tokens for request in waiting)
        _check(self.waiting.num_tokens == num_waiting_tokens, "waiting tokens", num_waiting_tokens)
        for request in running:
            _check(request.status is RequestStatus.RUNNING, "running is RUNNING", request)
            _check(request.is_opened, "a running request is opened", request)
            _check(request.num_uncomputed_tokens >= 1, "a running request has work", request)
            _check(request.sequence_id not in self.to_release, "running is kept", request)
        for request in waiting:
            idle = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            _check(idle, "waiting is WAITING or PREEMPTED", request)
            _check(request.is_announced or not request.is_opened, "announced first", request)
            cached = request.num_cached_tokens if request.is_opened else 0
            _check(request.num_computed_tokens == cached, "waiting computes nothing", request)
            _check(request.num_uncomputed_tokens >= 1, "a waiting request has work", request)
        limits = self.limits
        _check(len(running) <= limits.max_num_seqs, "max_num_seqs", len(running))
        own = self._num_own_blocks()
        _check(own <= limits.num_blocks, "blocks of their own fit the pool", own)
        _check(1 <= self.block_ceiling <= limits.num_blocks, "block_ceiling", self.block_ceiling)
        _check(self.ahead is None or self.in_flight is not None, "ahead of one", self.ahead)
        released = self.to_release
        _check(len(released) == len(set(released)), "a sequence is released once", released)
        for request in self.requests.values():
            length = len(request.prompt_token_ids) + request.max_tokens
            _check(length <= limits.max_sequence_length, "a request can fit", request)
            _check(len(request.output_token_ids) < request.max_tokens, "max_tokens", request)


def _check(holds: bool, rule: str, got: object) -> None:
    if not holds:
        raise AssertionError(f"[scheduler_state] {rule}, got {got!r}")
