"""What the record of who wrote which block costs a step.

    python tests/bench/bench_provenance.py --rows 1,8,16 --steps 2000 --rounds 7 --cold 64

A session computes decode steps on a backend that answers at once, with and without the record, in
turns. Steps are entered together, so what counts is the mean over windows of 128 steps: medians of
those, in microseconds of the thread's time a step, and the difference of the rounds' medians. With
`--cold MB` so much memory is read before each step, outside the time, as in a forward pass, which
empties the caches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))

from executor_service.engine.model_runner import ModelRunner
from executor_service.engine.open_sequences import Opening
from executor_service.engine.session import Session
from executor_service.engine.step_request import Limits, StepRequest
from executor_service.kv_cache.manager import KvCacheManager
from isobatch_kernels.step import PathCount, StepInput, StepOutput
from tests.support.fake_backend import FakeBackend
from tests.support.steps import Row, step_request

LIMITS = Limits(
    max_num_seqs=64, max_num_batched_tokens=64, vocab_size=64, context_length=100_000, max_top_k=8
)
PATHS = tuple(PathCount(f"op{index}", "other", "vnni", 30, 30) for index in range(8))


class InstantBackend(FakeBackend):
    """Answers every step of one size with the same arrays."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._answers: dict[int, StepOutput] = {}

    def run(self, step: StepInput) -> StepOutput:
        count = len(step.wanted)
        if count not in self._answers:
            self._answers[count] = replace(super().run(step), paths=PATHS)
        return self._answers[count]


WINDOW = 128


def microseconds(num_rows: int, num_steps: int, *, is_recorded: bool, cold_mb: int = 0) -> float:
    """Return the cost of a decode step: the median of means over windows of steps."""
    weights = np.ones(cold_mb << 17, np.float64)
    num_blocks = num_rows * (num_steps // 16 + 2)
    cache = KvCacheManager(num_blocks, 16, lambda _: None)
    if not is_recorded:
        cache.provenance.record = lambda *_: 0  # type: ignore[method-assign]
        cache.provenance.forget = lambda block_ids: None  # type: ignore[method-assign]
    session = Session("toy", ModelRunner(("embed",), InstantBackend(num_blocks)), cache, LIMITS)
    ticket = session.start(1)
    no_tokens = np.zeros(0, np.int32)
    session.open(ticket, [Opening(each, 0, "", "", no_tokens, 0) for each in range(num_rows)])
    first = step_request(1, [Row(each, (5,), 0) for each in range(num_rows)])
    spent = []
    for step_id in range(1, num_steps + 1):
        starts = np.full(num_rows, step_id - 1, np.int32)
        weights.sum()
        request: StepRequest = replace(first, step_id=step_id, start_positions=starts)
        started = time.thread_time_ns()
        session.step(ticket, request, 0)
        spent.append((time.thread_time_ns() - started) / 1000)
    windows = range(WINDOW, num_steps - WINDOW + 1, WINDOW)
    return statistics.median(statistics.fmean(spent[at : at + WINDOW]) for at in windows)


def main(arguments: Sequence[str]) -> int:
    """Print one line for each number of rows, and all of it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,8,16")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cold", type=int, default=0, help="MB read before each step")
    options = parser.parse_args(arguments)
    results = {}
    for num_rows in map(int, options.rows.split(",")):
        pairs = [
            tuple(
                microseconds(num_rows, options.steps, is_recorded=each, cold_mb=options.cold)
                for each in (False, True)
            )
            for _ in range(options.rounds)
        ]
        without, with_record = (statistics.median(column) for column in zip(*pairs, strict=True))
        cost = statistics.median(pair[1] - pair[0] for pair in pairs)
        results[num_rows] = {"without": without, "with": with_record, "cost": cost}
        print(f"{num_rows} rows: {without:.1f} us without, {with_record:.1f} with, {cost:.1f} more")
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
