"""Speculation on real texts with a simulated clock: what lookup gains and costs, without noise.

    python tests/bench/simulate_speculation.py --noise 0.2 --seeds 1,2,3

A service writes the texts of `bench_speculation.py` once. Then the scheduler's core, lookup and
controller run on them while time is counted by a line (a step, and each row more) and by what a
step sent ahead of the answer saves; the controller sees these times with noise. What is printed is
the time without drafts over that with lookup, of all streams and of the one that fares worst.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, cast

sys.path.append(str(Path(__file__).resolve().parents[2]))

from scheduler_service.client import AsyncClient, ChatMessage, Completion
from scheduler_service.core import (
    CostCurve,
    CostPoint,
    Limits,
    Request,
    RequestId,
    SampledRow,
    SamplingParams,
    SchedulerState,
    TokenRowBatch,
    apply,
    plan,
    plan_ahead,
    submit,
)
from scheduler_service.speculation import AdaptiveController, LookupProposer, Speculator
from tests.bench.bench_speculation import request
from tests.bench.speculation_texts import KINDS
from tests.support.core_scenarios import open_waiting
from tests.support.services import running_pair

Text: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
# Tokens of a prompt, and those that followed.

NUM_TEXTS = 24
OUTLIER = 0.01  # share of steps that seem to take three times as long


async def write(address: str, kind: str, num_tokens: int) -> list[Text]:
    """Return the texts of a kind as a service writes them, eight at a time."""

    async def one(client: AsyncClient, index: int) -> Text:
        words, params = request(kind, index, num_tokens)
        prompt = await client.tokenize(cast("str | Sequence[ChatMessage]", words))
        async with await client.generate(words, params) as stream:
            completion: Completion = await stream.completion()
        return tuple(prompt.token_ids), tuple(completion.token_ids)

    texts: list[Text] = []
    async with AsyncClient(address) as client:
        for first in range(0, NUM_TEXTS, 8):
            texts += await asyncio.gather(*(one(client, first + i) for i in range(8)))
    return texts


@dataclass(slots=True)
class Clock:
    """What steps take, in milliseconds."""

    first: float
    each: float
    prompt: float  # each token of a prompt
    savings: Sequence[float]  # of a step sent ahead, by rows: the last holds beyond

    def step(self, batch: TokenRowBatch, *, is_ahead: bool) -> float:
        """Return the time of a step."""
        if any(row.num_known_tokens > 1 for row in batch.rows):
            return self.prompt * batch.num_tokens
        saving = self.savings[min(len(batch.rows), len(self.savings)) - 1] if is_ahead else 0.0
        return (self.first + self.each * (batch.num_tokens - 1)) * (1.0 - saving)

    def curve(self) -> CostCurve:
        """Return the curve that the scheduler is told."""
        sizes = (1, 2, 4, 8, 16, 32, 64)
        decode = [CostPoint(n, n, 0, (self.first + self.each * (n - 1)) / 1000) for n in sizes]
        return CostCurve(
            [*decode, *(CostPoint(1, n, 0, self.prompt * n / 1000) for n in sizes[4:])]
        )


@dataclass(slots=True)
class Run:
    """Texts that are generated `num_streams` at a time, with lookup or without."""

    texts: Sequence[Text]
    num_streams: int
    clock: Clock
    noise: float
    seed: int
    speculator: Speculator | None = None
    now: float = 0.0
    num_drafted: int = 0
    num_accepted: int = 0
    num_tokens: int = 0
    # By text: when its first and its last token came.
    firsts: dict[int, float] = field(default_factory=dict)
    lasts: dict[int, float] = field(default_factory=dict)

    def times(self) -> list[float]:
        """Run to the end; return each text's time after its first token."""
        limits = Limits(
            max_num_batched_tokens=512, max_num_seqs=64, max_num_waiting=64, block_size=16,
            num_blocks=9999, context_length=8192, cost_curve=self.clock.curve(),
        )  # fmt: skip
        state = SchedulerState(limits)
        rng = random.Random(self.seed)
        for first in range(0, len(self.texts), self.num_streams):
            for number in range(first, min(first + self.num_streams, len(self.texts))):
                prompt, output = self.texts[number]
                name = str(number)
                submit(
                    state,
                    Request(
                        RequestId(name), prompt, SamplingParams(), len(output), cache_salt=name
                    ),
                )
            self._finish(state, rng)
        return [self.lasts[number] - self.firsts[number] for number in range(len(self.texts))]

    def _finish(self, state: SchedulerState, rng: random.Random) -> None:
        speculator = self.speculator
        sent: deque[tuple[TokenRowBatch, bool]] = deque()
        while state.requests or sent:
            if not sent:
                open_waiting(state)
                drafts = speculator.draft(state, goes_ahead=True) if speculator else {}
                batch = plan(state, self.now, drafts)
                if batch is None:
                    return
                sent.append((batch, False))
            if len(sent) == 1 and not (speculator and speculator.may_draft(state)):
                following = plan_ahead(state, lambda _: True)
                if following is not None:
                    sent.append((following, True))
            batch, is_ahead = sent.popleft()
            taken = self.clock.step(batch, is_ahead=is_ahead) if batch.rows else 0.0
            self.now += taken
            rows = {row.request_id: self._row(state, row.request_id, row.draft_token_ids)
                    for row in batch.rows if row.wanted}  # fmt: skip
            live = set(state.requests)
            apply(state, batch, rows)
            self.lasts.update((int(each), self.now) for each in live - set(state.requests))
            if speculator is not None and batch.rows:
                seen = rng.uniform(1 - self.noise, 1 + self.noise)
                seen *= 3.0 if rng.random() < OUTLIER else 1.0
                speculator.learn(batch, rows, taken * seen / 1000)

    def _row(
        self, state: SchedulerState, request_id: RequestId, drafts: Sequence[int]
    ) -> SampledRow:
        live = state.requests.get(request_id)
        if live is None:
            return SampledRow(0)
        self.firsts.setdefault(int(request_id), self.now)
        start = len(live.output_token_ids)
        left = self.texts[int(request_id)][1][start:]
        num_right = 0
        while num_right < min(len(drafts), len(left) - 1) and drafts[num_right] == left[num_right]:
            num_right += 1
        self.num_drafted += len(drafts)
        self.num_accepted += num_right
        self.num_tokens += num_right + 1
        return SampledRow(left[num_right], None, tuple(drafts[:num_right]))


def main() -> None:
    """Parse flags, write the texts, simulate and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--streams", default="1,4,8")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--noise", type=float, default=0.2)
    parser.add_argument("--first-ms", type=float, default=5.65)
    parser.add_argument("--row-ms", type=float, default=1.03)
    parser.add_argument("--prompt-ms", type=float, default=0.8)
    parser.add_argument("--savings", default="0.11,0.1,0.09,0.085,0.075,0.07,0.06,0.05")
    args = parser.parse_args()
    savings = [float(each) for each in args.savings.split(",")]
    clock = Clock(args.first_ms, args.row_ms, args.prompt_ms, savings)
    with running_pair(args.model) as pair:
        address = pair.schedulers[0].address
        texts = {kind: asyncio.run(write(address, kind, args.tokens)) for kind in KINDS}
    print("| text | streams | seed | gain | worst stream | drafted a token | accepted |")
    print("|---|---|---|---|---|---|---|")
    for kind, some in texts.items():
        for count in map(int, args.streams.split(",")):
            plain = Run(some, count, clock, args.noise, 0).times()
            for seed in map(int, args.seeds.split(",")):
                speculator = Speculator(LookupProposer(), AdaptiveController(), 8)
                run = Run(some, count, clock, args.noise, seed, speculator)
                times = run.times()
                worst = min(a / b for a, b in zip(plain, times, strict=True) if b)
                print(
                    f"| {kind} | {count} | {seed} | {sum(plain) / sum(times):.3f} | {worst:.3f} "
                    f"| {run.num_drafted / run.num_tokens:.2f} "
                    f"| {run.num_accepted / max(1, run.num_drafted):.0%} |"
                )


if __name__ == "__main__":
    main()
