"""What a run meant for those who waited: percentiles, goodput, fairness, as rows of a table."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.bench.simulation.simulation import Outcome, Record, gaps


@dataclass(frozen=True, slots=True)
class Goal:
    """What a request needs to count as served well; seconds."""

    first_token: float
    longest_gap: float

    def holds(self, record: Record) -> bool:
        """Whether a request was served well."""
        first = record.token_times[0] - record.arrival
        return first <= self.first_token and max(gaps(record), default=0.0) <= self.longest_gap


@dataclass(frozen=True, slots=True)
class Summary:
    """One policy on one workload; times in seconds."""

    workload: str
    policy: str
    num_requests: int
    first_token: dict[str, float]
    inter_token: dict[str, float]
    good_share: float
    good_per_second: float
    tokens_per_second: float
    fairness: float
    cached_share: float
    num_preemptions: int


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value that at least `share` of the ordered ones do not exceed; 0 for none."""
    if not ordered:
        return 0.0
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """Return p50, p90, p99 and the greatest of the values."""
    ordered = sorted(values)
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: percentile(ordered, share) for name, share in shares.items()}


def jain(values: Sequence[float]) -> float:
    """Return Jain's index: 1 where all have the same, 1/n where one of n has everything.

    R. Jain, D. Chiu, W. Hawe: A quantitative measure of fairness and discrimination for resource
    allocation in shared computer systems, DEC-TR-301, 1984.
    """
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def speeds(records: Iterable[Record]) -> list[float]:
    """Return for each client the tokens that it got for each second that it waited for any."""
    tokens: defaultdict[int, int] = defaultdict(int)
    seconds: defaultdict[int, float] = defaultdict(float)
    for record in records:
        tokens[record.client] += record.num_answer
        seconds[record.client] += record.token_times[-1] - record.arrival
    return [tokens[client] / seconds[client] for client in tokens]


def summarize(workload: str, policy: str, outcome: Outcome, goal: Goal) -> Summary:
    """Return the row of one run."""
    records = list(outcome.records.values())
    num_good = sum(map(goal.holds, records))
    known = outcome.num_cached_tokens + outcome.num_computed_tokens
    return Summary(
        workload=workload,
        policy=policy,
        num_requests=len(records),
        first_token=percentiles(each.token_times[0] - each.arrival for each in records),
        inter_token=percentiles(gap for each in records for gap in gaps(each)),
        good_share=num_good / len(records),
        good_per_second=num_good / outcome.seconds,
        tokens_per_second=sum(each.num_answer for each in records) / outcome.seconds,
        fairness=jain(speeds(records)),
        cached_share=outcome.num_cached_tokens / known,
        num_preemptions=outcome.num_preemptions,
    )


_COLUMNS = (
    "policy", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "ITL longest", "served well",
    "well served a minute", "tok/s", "fairness", "from cache",
)  # fmt: skip


def markdown(summaries: Sequence[Summary]) -> str:
    """Return one table for each workload; TTFT in seconds, ITL in milliseconds."""
    parts = []
    for workload in dict.fromkeys(each.workload for each in summaries):
        rows = [each for each in summaries if each.workload == workload]
        lines = [
            f"**{workload}**, {rows[0].num_requests:,} requests",
            "",
            "| " + " | ".join(_COLUMNS) + " |",
            "|---" + "|---:" * (len(_COLUMNS) - 1) + "|",
            *map(_row, rows),
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _row(row: Summary) -> str:
    gap = {name: f"{seconds * 1e3:,.0f} ms" for name, seconds in row.inter_token.items()}
    first = {name: f"{seconds:,.2f} s" for name, seconds in row.first_token.items()}
    cells = (
        row.policy, first["p50"], first["p99"], gap["p50"], gap["p99"], gap["max"],
        f"{row.good_share:.0%}", f"{row.good_per_second * 60:,.1f}",
        f"{row.tokens_per_second:,.0f}", f"{row.fairness:.2f}", f"{row.cached_share:.0%}",
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"
