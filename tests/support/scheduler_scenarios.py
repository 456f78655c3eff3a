"""Everything that can happen to a scheduler, as strategies of Hypothesis."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st

from scheduler_service.core import NO_CURVE, CostCurve, CostPoint, Priority
from tests.support.fake_block_pool import VOCAB_SIZE

# Prompts start with some of these tokens, so that many share a prefix.
COMMON = [1, 2, 1, 4, 5, 6, 1, 8, 9, 1, 11, 12]


@dataclass(frozen=True)
class Arrival:
    """A request and the step before which it arrives."""

    prompt: list[int]
    max_tokens: int
    stops: bool
    step: int
    deadline: int | None
    salt: str
    priority: Priority
    client: str


@dataclass(frozen=True)
class Scenario:
    """All that happens in a trace. Numbers in the sets and maps are steps."""

    arrivals: list[Arrival]
    tokens: int
    chunk: int
    seqs: int
    block_size: int
    slack: int
    missing_blocks: int
    # Most cached tokens of each opening, in turn; 0 for an executor that finds nothing.
    hits: list[int]
    # Drafted tokens of each request and step, in turn: how many, and the first wrong one.
    drafts: list[tuple[int, int]]
    curve: CostCurve
    bound: float
    # Whether a step may be planned and sent before the answer to the last one.
    looks_ahead: bool
    cancels: dict[int, int] = field(default_factory=dict)
    stop_strings: dict[int, int] = field(default_factory=dict)
    restarts_in_flight: set[int] = field(default_factory=set)
    restarts_between: set[int] = field(default_factory=set)
    refusals: set[int] = field(default_factory=set)
    # Between the announcement of sequences and the answer, and between that and the step.
    opening_cancels: dict[int, int] = field(default_factory=dict)
    lost_openings: set[int] = field(default_factory=set)
    restarts_while_opening: set[int] = field(default_factory=set)
    restarts_when_opened: set[int] = field(default_factory=set)
    pauses: dict[int, int] = field(default_factory=dict)


_STEPS = st.integers(0, 40)
_INDEXES = st.dictionaries(_STEPS, st.integers(0, 7), max_size=3)

arrivals = st.builds(
    Arrival,
    prompt=st.builds(
        lambda shared, own: COMMON[:shared] + own,
        st.integers(0, len(COMMON)),
        st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12),
    ),
    max_tokens=st.integers(1, 12),
    stops=st.booleans(),
    step=st.just(0) | st.integers(0, 30),
    deadline=st.none() | st.none() | st.integers(0, 60),
    salt=st.sampled_from(["", "", "", "other"]),
    priority=st.sampled_from(Priority),
    client=st.sampled_from("ab"),
)

_CURVES = st.builds(
    lambda base, row, logits, position, kink: CostCurve(
        [
            *(CostPoint(n, n, 0, base + n * (row + logits)) for n in (1, 2, 4, 8)),
            *(CostPoint(1, n, 0, base + n * row + (kink if n > 6 else 0)) for n in (4, 6, 7, 16)),
            CostPoint(1, 1, 10, base + row + logits + 10 * position),
            CostPoint(1, 4, 10, base + 4 * row + 40 * position),
        ]
    ),
    st.floats(0.1, 10), st.floats(0, 3), st.floats(0, 1), st.floats(0, 1), st.floats(0, 20),
)  # fmt: skip

shapes = {
    "curve": st.just(NO_CURVE) | _CURVES,
    "bound": st.just(0.0) | st.floats(0.5, 30),
    "arrivals": st.lists(arrivals, min_size=1, max_size=8),
    "tokens": st.integers(1, 24),
    "chunk": st.sampled_from([1, 2, 7, 64]),
    "seqs": st.integers(1, 8),
    "block_size": st.integers(1, 5),
    "slack": st.integers(0, 4),
    "drafts": st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5)
    | st.just([(0, 0)]),
    "hits": st.lists(st.integers(0, 30) | st.just(30), min_size=1, max_size=4),
    "pauses": _INDEXES,
    "looks_ahead": st.booleans(),
}

quiet = st.builds(Scenario, **shapes, missing_blocks=st.just(0))
troubled = st.builds(
    Scenario,
    **shapes,
    missing_blocks=st.integers(0, 3),
    cancels=_INDEXES,
    stop_strings=_INDEXES,
    restarts_in_flight=st.sets(_STEPS, max_size=2),
    restarts_between=st.sets(_STEPS, max_size=2),
    refusals=st.sets(_STEPS, max_size=8),
    opening_cancels=_INDEXES,
    lost_openings=st.sets(_STEPS, max_size=4),
    restarts_while_opening=st.sets(_STEPS, max_size=1),
    restarts_when_opened=st.sets(_STEPS, max_size=1),
)
