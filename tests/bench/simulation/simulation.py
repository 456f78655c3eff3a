"""The discrete-event loop: clients ask, a policy plans, the executor answers, time jumps.

The order of calls is that of the scheduler's step loop: sequences are opened before they are
planned, requests come in while a step runs, and tokens come out when it ends.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from scheduler_service.core import (
    Event,
    Request,
    RequestFinished,
    RequestId,
    RequestPreempted,
    SamplingParams,
    TokenEmitted,
)
from tests.bench.simulation.executor import SimulatedExecutor
from tests.bench.simulation.policies import Policy
from tests.bench.simulation.workload import Conversation, Workload

STEP_OVERHEAD_SECONDS = 0.0015
"""What a step costs beside the executor's own time (docs/performance.md)."""
OPEN_SECONDS = 0.0003
"""A round trip that announces sequences."""


@dataclass(slots=True)
class Record:
    """What became of a request; times in seconds."""

    client: int
    arrival: float
    num_prompt: int
    num_answer: int
    token_times: list[float] = field(default_factory=list)
    ends: int = 0


@dataclass(slots=True)
class Outcome:
    """What a whole run gave."""

    records: dict[RequestId, Record]
    seconds: float
    num_steps: int
    num_preemptions: int
    num_computed_tokens: int
    num_cached_tokens: int


class Simulation:
    """One policy over one workload."""

    def __init__(self, policy: Policy, executor: SimulatedExecutor, seed: int = 0) -> None:
        """Draw the tokens of prompts and answers from `seed`; they decide what is shared."""
        self._policy = policy
        self._executor = executor
        self._seed = seed
        self._now = 0.0
        self._coming: list[tuple[float, int, int]] = []
        self._workload: Workload = ()
        self._histories: list[tuple[int, ...]] = []
        self._records: dict[RequestId, Record] = {}
        self._outputs: dict[RequestId, tuple[tuple[int, ...], int]] = {}
        self._turns: dict[RequestId, tuple[int, int]] = {}
        self._num_preemptions = 0

    def run(self, workload: Workload) -> Outcome:
        """Run until every request has ended."""
        self._workload = workload
        self._histories = [self._system(each) for each in workload]
        self._coming = [(each.start, index, 0) for index, each in enumerate(workload)]
        heapq.heapify(self._coming)
        num_steps = 0
        while True:
            self._submit_until(self._now)
            sequences = self._policy.openings(self._now)
            if sequences:
                self._now += OPEN_SECONDS
                self._policy.opened(self._executor.open(sequences))
            batch = self._policy.plan(self._now)
            if batch is not None:
                answer = self._executor.run(batch, self._outputs)
                num_steps += 1
                self._now += answer.seconds + STEP_OVERHEAD_SECONDS
                self._submit_until(self._now)
                for event in self._policy.apply(batch, answer):
                    self._take(event)
                for event in batch.events:
                    self._take(event)
            elif self._coming:
                self._now = max(self._now, self._coming[0][0])
            else:
                break
        executor = self._executor
        return Outcome(
            self._records, self._now, num_steps, self._num_preemptions,
            executor.num_computed_tokens, executor.num_cached_tokens,
        )  # fmt: skip

    def _tokens(self, num_tokens: int, *name: object) -> tuple[int, ...]:
        # Bytes make small integers, of which Python keeps one each.
        return tuple(random.Random(f"{self._seed} {name}").randbytes(num_tokens))

    def _system(self, conversation: Conversation) -> tuple[int, ...]:
        return self._tokens(conversation.num_system, "system", conversation.system)

    def _submit_until(self, now: float) -> None:
        while self._coming and self._coming[0][0] <= now:
            time, index, turn = heapq.heappop(self._coming)
            self._submit(time, index, turn)

    def _submit(self, time: float, index: int, turn: int) -> None:
        conversation = self._workload[index]
        asked = conversation.turns[turn]
        name = RequestId(f"{index}.{turn}")
        prompt = self._histories[index] + self._tokens(asked.num_new, "question", name)
        answer = self._tokens(asked.num_answer, "answer", name)
        self._histories[index] = prompt + answer
        self._outputs[name] = (answer, len(prompt))
        self._turns[name] = (index, turn)
        self._records[name] = Record(conversation.client, time, len(prompt), len(answer))
        self._policy.submit(
            Request(
                name, prompt, SamplingParams(), max_tokens=len(answer), arrival=time,
                client_id=str(conversation.client),
            )
        )  # fmt: skip

    def _take(self, event: Event) -> None:
        match event:
            case TokenEmitted():
                self._records[event.request_id].token_times.append(self._now)
            case RequestPreempted():
                self._num_preemptions += 1
            case RequestFinished():
                self._finish(event.request_id)
            case _:
                pass

    def _finish(self, name: RequestId) -> None:
        self._records[name].ends += 1
        del self._outputs[name]
        index, turn = self._turns.pop(name)
        turns = self._workload[index].turns
        if turn + 1 < len(turns):
            when = self._now + turns[turn + 1].think_seconds
            heapq.heappush(self._coming, (when, index, turn + 1))
        else:
            self._histories[index] = ()


def gaps(record: Record) -> Iterator[float]:
    """Return the times between the tokens of a request."""
    times = record.token_times
    return (after - before for before, after in itertools.pairwise(times))
