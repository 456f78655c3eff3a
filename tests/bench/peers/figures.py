"""What one round of requests says: rates and latencies from the arrivals of tokens."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

# Arrival time in seconds and number of tokens of every message of a stream.
Arrivals = Sequence[tuple[float, int]]


@dataclass(frozen=True, slots=True)
class Figures:
    """One round on one side."""

    tokens_per_second: float  # all generated tokens over the wall time of the round
    decode_tokens_per_second: float  # after every stream has its first token; 0 without such
    ttft_ms: float  # median over streams
    itl_ms: float  # median gap between messages; 0 without gaps
    num_prompt_tokens: int  # over all streams, as the server counted them
    num_cached_prompt_tokens: int  # of these, taken from a cache: must be 0 to compare

    def to_json(self) -> dict[str, Any]:
        """What a load generator prints."""
        return asdict(self)


def figures(
    started: float, streams: Sequence[Arrivals], num_prompt_tokens: int, num_cached: int
) -> Figures:
    """Reduces a round that began at `started` (seconds, same clock as the arrivals)."""
    ended = max(arrivals[-1][0] for arrivals in streams)
    total = sum(count for arrivals in streams for _, count in arrivals)
    all_started = max(arrivals[0][0] for arrivals in streams)
    late = sum(count for arrivals in streams for at, count in arrivals if at > all_started)
    gaps = [
        after[0] - before[0]
        for arrivals in streams
        for before, after in itertools.pairwise(arrivals)
    ]
    return Figures(
        tokens_per_second=total / (ended - started),
        decode_tokens_per_second=late / (ended - all_started) if late else 0.0,
        ttft_ms=1e3 * statistics.median(arrivals[0][0] - started for arrivals in streams),
        itl_ms=1e3 * statistics.median(gaps) if gaps else 0.0,
        num_prompt_tokens=num_prompt_tokens,
        num_cached_prompt_tokens=num_cached,
    )
