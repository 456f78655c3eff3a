"""Who gets into a step: the product's own core, and three simple policies to compare it with.

All of them run over the same executor with the same prefix cache, so what differs is the order of
work alone. The simple ones reserve the blocks of a request's whole answer before it begins (they
know its length, which flatters them) and so never have to take anything back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from scheduler_service.core import (
    Event,
    FinishReason,
    Limits,
    Request,
    RequestFinished,
    RequestId,
    SchedulerState,
    SequenceId,
    SequenceOpened,
    SequenceOpening,
    TokenEmitted,
    TokenRow,
    TokenRowBatch,
    WantedPosition,
    apply,
    capacity_refused,
    opened,
    openings,
    plan,
    record_kv_counts,
    record_step_seconds,
    submit,
)
from tests.bench.simulation.executor import StepAnswer
from tests.bench.simulation.machine import Machine
from tests.bench.simulation.settings import STEP_TOKENS, WHOLE_STEP_TOKENS, limits


class Policy(Protocol):
    """Decides about steps as the scheduler's shell lets the core decide."""

    def submit(self, request: Request) -> None:
        """Take a request."""
        ...

    def openings(self, now: float) -> Sequence[SequenceOpening]:
        """Return the sequences to announce."""
        ...

    def opened(self, answers: Iterable[SequenceOpened]) -> None:
        """Take the executor's answers to them."""
        ...

    def plan(self, now: float) -> TokenRowBatch | None:
        """Return the next step, or None when there is nothing to do."""
        ...

    def apply(self, batch: TokenRowBatch, answer: StepAnswer) -> list[Event]:
        """Take a step's answer."""
        ...


class Isobatch:
    """The product's core."""

    def __init__(self, limits: Limits) -> None:
        """Schedule within the limits."""
        self.state = SchedulerState(limits)

    def submit(self, request: Request) -> None:
        """Take a request."""
        submit(self.state, request)

    def openings(self, now: float) -> Sequence[SequenceOpening]:
        """Return the sequences to announce."""
        return openings(self.state, now)

    def opened(self, answers: Iterable[SequenceOpened]) -> None:
        """Take the executor's answers to them."""
        opened(self.state, answers)

    def plan(self, now: float) -> TokenRowBatch | None:
        """Return the next step."""
        return plan(self.state, now)

    def apply(self, batch: TokenRowBatch, answer: StepAnswer) -> list[Event]:
        """Take a step's answer."""
        record_kv_counts(self.state, answer.counts)
        if answer.sampled is None:
            return capacity_refused(self.state, batch)
        record_step_seconds(self.state, batch, answer.seconds)
        return apply(self.state, batch, answer.sampled)


class _WholePrompts:
    """First come, first served, a prompt in one piece; which steps there are is up to subclasses.

    Attributes:
        waiting: Requests without a row yet, in order of arrival.
        running: Requests that were admitted, in order.
    """

    def __init__(self, limits: Limits) -> None:
        """Admit at most `max_num_seqs` requests whose answers all fit the pool."""
        self._limits = limits
        self.waiting: deque[Request] = deque()
        self.running: dict[RequestId, Request] = {}
        self._released: list[SequenceId] = []
        self._num_reserved = 0
        self._last_sequence = 0
        self._step_id = 0

    def submit(self, request: Request) -> None:
        """Put a request at the end of the queue."""
        self._last_sequence += 1
        request.sequence_id = SequenceId(self._last_sequence)
        self.waiting.append(request)

    def _blocks(self, request: Request) -> int:
        most = len(request.prompt_token_ids) + request.max_tokens
        return -(-most // self._limits.block_size)

    def may_admit(self) -> bool:
        """Whether this is a time to take new requests in."""
        return True

    def openings(self, now: float) -> Sequence[SequenceOpening]:
        """Admit who fits and return their sequences."""
        found: list[SequenceOpening] = []
        is_time = self.may_admit()
        while is_time and self.waiting and len(self.running) < self._limits.max_num_seqs:
            request = self.waiting[0]
            num_blocks = self._num_reserved + self._blocks(request)
            if num_blocks > self._limits.num_blocks:
                break
            self._num_reserved = num_blocks
            self.running[request.request_id] = self.waiting.popleft()
            found.append(
                SequenceOpening(
                    request.request_id, request.sequence_id, 0, "", request.cache_salt,
                    request.prompt_token_ids,
                )
            )  # fmt: skip
        return found

    def opened(self, answers: Iterable[SequenceOpened]) -> None:
        """Start behind what is cached."""
        for answer in answers:
            request = self.running[answer.request_id]
            request.num_computed_tokens = request.num_cached_tokens = answer.num_cached_tokens

    def choose(self, prompts: list[Request], decoding: list[Request]) -> list[Request]:
        """Return the requests of the next step, of those with a prompt and those without."""
        raise NotImplementedError

    def whole(self, prompts: Iterable[Request], num_left: int) -> list[Request]:
        """Return the first prompts that fit a step; one alone always does."""
        found: list[Request] = []
        for request in prompts:
            num_left -= request.num_uncomputed_tokens
            if num_left < 0 and found:
                break
            found.append(request)
        return found

    def plan(self, now: float) -> TokenRowBatch | None:
        """Return the next step."""
        prompts = [each for each in self.running.values() if not each.output_token_ids]
        decoding = [each for each in self.running.values() if each.output_token_ids]
        rows = tuple(_row(each) for each in self.choose(prompts, decoding))
        if not rows and not self._released:
            return None
        self._step_id += 1
        released, self._released = tuple(self._released), []
        return TokenRowBatch(self._step_id, "", rows, released_sequence_ids=released)

    def apply(self, batch: TokenRowBatch, answer: StepAnswer) -> list[Event]:
        """Take a step's answer; blocks were reserved, so it cannot be a refusal."""
        if answer.sampled is None:
            raise AssertionError("[simulation] reserved blocks must be there, got a refusal")
        events: list[Event] = []
        for row in batch.rows:
            request = self.running[row.request_id]
            token_id = answer.sampled[row.request_id].token_id
            if token_id is None:
                raise AssertionError("[simulation] a row must give a token, got none")
            request.num_computed_tokens = request.num_tokens
            request.output_token_ids.append(token_id)
            index = len(request.output_token_ids) - 1
            events.append(TokenEmitted(request_id=row.request_id, token_id=token_id, index=index))
            if index + 1 == request.max_tokens:
                del self.running[request.request_id]
                self._num_reserved -= self._blocks(request)
                self._released.append(request.sequence_id)
                events.append(
                    RequestFinished(request_id=row.request_id, reason=FinishReason.LENGTH)
                )
        return events


def _row(request: Request) -> TokenRow:
    start, stop = request.num_computed_tokens, request.num_tokens
    return TokenRow(
        request.request_id, request.sequence_id, 0, request.tokens(start, stop), start,
        (WantedPosition(stop - start - 1, stop, request.params),),
    )  # fmt: skip


class FirstComeFirstServed(_WholePrompts):
    """Continuous batching without chunks: whole prompts join the step of those that decode."""

    def choose(self, prompts: list[Request], decoding: list[Request]) -> list[Request]:
        """Return all that decode, and the prompts that fit beside them."""
        num_left = self._limits.max_num_batched_tokens - len(decoding)
        return [*decoding, *self.whole(prompts, num_left)]


class PrefillFirst(_WholePrompts):
    """Prompts have steps of their own, and those that decode wait as long as there are any."""

    def choose(self, prompts: list[Request], decoding: list[Request]) -> list[Request]:
        """Return the prompts that fit, or all that decode."""
        return self.whole(prompts, self._limits.max_num_batched_tokens) or decoding


class StaticBatches(_WholePrompts):
    """A batch begins when the one before has ended, all of it."""

    def may_admit(self) -> bool:
        """Whether nobody runs."""
        return not self.running

    def choose(self, prompts: list[Request], decoding: list[Request]) -> list[Request]:
        """Return prompts as long as there are any, then all that decode."""
        return self.whole(prompts, self._limits.max_num_batched_tokens) or decoding


@dataclass(frozen=True, slots=True)
class Named:
    """A policy under its name, with what makes it for a machine."""

    name: str
    make: Callable[[Machine], Policy]


POLICIES: Final = (
    Named("isobatch", lambda machine: Isobatch(limits(STEP_TOKENS, machine.curve))),
    Named("isobatch, 40 ms", lambda machine: Isobatch(limits(STEP_TOKENS, machine.curve, 0.04))),
    Named("first come, whole prompts", lambda _: FirstComeFirstServed(limits(WHOLE_STEP_TOKENS))),
    Named("prefill first", lambda _: PrefillFirst(limits(WHOLE_STEP_TOKENS))),
    Named("static batches", lambda _: StaticBatches(limits(WHOLE_STEP_TOKENS))),
)
