"""The tracer beside a step loop: which of a step's numbers belong to whose trace."""

from __future__ import annotations

import numpy as np

from scheduler_service.core import (
    Request,
    RequestId,
    SamplingParams,
    SequenceId,
    TokenEmitted,
    TokenRow,
    TokenRowBatch,
    WantedPosition,
)
from scheduler_service.sampling import RowStatistics
from scheduler_service.tracing.model import KernelPath, TraceStep
from scheduler_service.tracing.recorder import Recorder
from scheduler_service.tracing.tracer import Tracer
from scheduler_service.wire import trace as wire
from scheduler_service.wire.executor import StepAnswer
from tests.support.traces import HEADER

GREEDY = SamplingParams()
PATHS = (KernelPath("linear", "gemv_multi", "vnni", 4),)


def _row(name: str, start: int, num_tokens: int, wanted: tuple[int, ...]) -> TokenRow:
    positions = tuple(WantedPosition(offset, start + offset + 1, GREEDY) for offset in wanted)
    sequence_id = SequenceId(ord(name))
    return TokenRow(RequestId(name), sequence_id, 2, (1,) * num_tokens, start, positions)


BATCH = TokenRowBatch(
    9, "m", (_row("a", 5, 1, (0,)), _row("v", 20, 4, (0, 1, 2, 3)), _row("p", 0, 30, ()))
)
ANSWER = StepAnswer(
    step_id=9,
    row_errors=(None,) * 3,
    statistics=tuple(
        RowStatistics(
            vocab_size=50,
            top_k_ids=np.array([index, index + 1, 40], np.int32),
            top_k_logits=np.array([3.5, 1.25 * index, -8], np.float32),
        )
        for index in range(5)
    ),
    digests=tuple(bytes([index]) * 16 for index in range(5)),
    kernel_paths=PATHS,
)


def _emitted(name: str, *token_ids: int) -> list[TokenEmitted]:
    return [
        TokenEmitted(request_id=RequestId(name), token_id=token_id, index=index)
        for index, token_id in enumerate(token_ids)
    ]


class _Session:
    def __init__(self, piece: bytes | None = b"") -> None:
        self.piece = piece
        self.asked: list[tuple[int, int, bool]] = []

    async def provenance_piece(
        self, sequence_id: int, generation: int, num_positions: int, include_digests: bool
    ) -> bytes | None:
        self.asked.append((sequence_id, generation, include_digests))
        return self.piece


class _World:
    def __init__(self, *names: str) -> None:
        self.sizes: list[int] = []
        self.tracer = Tracer(self.sizes.append)
        self.recorders = {}
        for name in names:
            request = Request(RequestId(name), (1,), GREEDY, 50)
            recorder = Recorder(request, wants_kv_digests=name == "v")
            recorder.begin(HEADER, None)
            self.tracer.open(recorder)
            self.recorders[name] = recorder

    def record(self, events: list[TokenEmitted]) -> None:
        assert self.tracer.wants(BATCH)
        self.tracer.record(
            BATCH, ANSWER, events, written=1.5, answered=1.75, executor_seconds=0.125
        )

    def steps(self, name: str) -> tuple[TraceStep, ...]:
        return wire.read(self.recorders[name].take()).steps


def test_the_tokens_of_a_row_are_those_of_its_first_wanted_positions() -> None:
    world = _World("a", "v", "p")
    # Of four wanted positions of row v the second token differed from its draft.
    world.record([*_emitted("a", 7), *_emitted("v", 11, 12)])
    (step,) = world.steps("v")
    assert [token.token_id for token in step.tokens] == [11, 12]
    assert [token.position for token in step.tokens] == [20, 21]
    assert [token.logits_digest[0] for token in step.tokens] == [1, 2]
    assert [token.top_ids for token in step.tokens] == [(1, 2), (2, 3)]
    assert [token.margin for token in step.tokens] == [2.25, 1.0]
    (step,) = world.steps("p")
    assert step.tokens == ()


def test_a_step_says_how_much_company_there_was() -> None:
    world = _World("a")
    world.record(_emitted("a", 7))
    (step,) = world.steps("a")
    assert (step.step_id, step.generation, step.start_position) == (9, 2, 5)
    assert (step.num_row_tokens, step.num_step_tokens, step.num_step_rows) == (1, 35, 3)
    assert (step.num_wanted, step.max_neighbour_tokens, step.kernel_paths) == (5, 30, PATHS)
    assert (step.start_ns, step.duration_ns, step.executor_ns) == (
        1_500_000_000, 250_000_000, 125_000_000,
    )  # fmt: skip


def test_who_is_not_traced_is_not_looked_at() -> None:
    world = _World("x")
    assert not world.tracer.wants(BATCH)
    assert world.tracer.request_ids == {"x"}


async def test_the_cache_is_asked_for_when_it_is_given_back() -> None:
    world, session = _World("a", "v"), _Session()
    world.record(_emitted("a", 7))
    await world.tracer.release([SequenceId(ord("q")), SequenceId(ord("v"))], session)
    assert session.asked == [(ord("v"), 2, True)]
    world.tracer.end(RequestId("v"), "length")
    assert world.recorders["v"].closed.is_set()
    assert world.sizes == [world.recorders["v"].num_bytes]
    # Of the other the executor still holds state, and will never be asked again.
    world.tracer.end(RequestId("a"), "stop")
    assert not world.recorders["a"].closed.is_set()
    world.tracer.lose()
    assert world.recorders["a"].closed.is_set()
    assert world.tracer.is_idle
    assert len(world.sizes) == 2


async def test_an_executor_that_does_not_know_leaves_the_trace_without() -> None:
    world = _World("a")
    world.record(_emitted("a", 7))
    await world.tracer.release([SequenceId(ord("a"))], _Session(None))
    world.tracer.end(RequestId("a"), "length")
    trace = wire.read(world.recorders["a"].take())
    assert trace.blocks == ()
    assert trace.end is not None
