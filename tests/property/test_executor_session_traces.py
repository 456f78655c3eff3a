"""Random traces of a session: whatever else a step holds, tokens are those of a solo run."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from executor_service.engine.model_runner import ModelRunner
from executor_service.engine.session import Opening, Session
from executor_service.engine.step_request import Limits, Outcome, StepRequest
from executor_service.kv_cache.manager import KvCacheManager
from tests.support.fake_backend import POISON_TOKEN, FakeBackend, toy_logits
from tests.support.steps import Row, step_request

LIMITS = Limits(
    max_num_seqs=4, max_num_batched_tokens=80, vocab_size=32, context_length=64, max_top_k=4
)
NUM_BLOCKS = 9
SEQUENCES = st.integers(0, 4)
TOKENS = st.lists(
    st.integers(0, 31).filter(lambda token: token != POISON_TOKEN), min_size=1, max_size=20
)


class SessionMachine(RuleBasedStateMachine):
    """The model: the tokens that each open sequence has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.backend = FakeBackend(NUM_BLOCKS, vocab_size=LIMITS.vocab_size)
        cache = KvCacheManager(NUM_BLOCKS, 16, self.backend.zero_blocks)
        self.session = Session("toy", ModelRunner((), self.backend), cache, LIMITS)
        self.epoch = 1
        self.ticket = self.session.start(self.epoch)
        self.step_id = 0
        self.last: StepRequest | None = None
        self.known: dict[int, list[int]] = {}
        self.generations: dict[int, int] = {}

    @rule(sequence_id=SEQUENCES, again=st.booleans())
    def open(self, sequence_id: int, again: bool) -> None:
        generation = self.generations.get(sequence_id, 0) + (not again)
        opening = Opening(sequence_id, generation, "", "", np.zeros(0, np.int32), 0)
        assert self.session.open(self.ticket, [opening]) == [0]
        if not again or sequence_id not in self.known:
            self.known[sequence_id] = []
        self.generations[sequence_id] = generation

    @rule(sequence_ids=st.lists(SEQUENCES, max_size=2))
    def release(self, sequence_ids: list[int]) -> None:
        self.session.release(self.ticket, sequence_ids)
        for sequence_id in sequence_ids:
            self.known.pop(sequence_id, None)

    @rule(
        rows=st.dictionaries(SEQUENCES, TOKENS, max_size=4),
        back=st.integers(0, 3),
        released=st.lists(SEQUENCES, max_size=2),
    )
    def step(self, rows: dict[int, list[int]], back: int, released: list[int]) -> None:
        rows = {
            key: tokens
            for key, tokens in rows.items()
            if key in self.known and key not in released and len(self.known[key]) <= 40
        }
        starts = {key: max(0, len(self.known[key]) - back) for key in rows}
        request = step_request(
            self.step_id + 1,
            [
                Row(key, tuple(tokens), starts[key], self.generations[key])
                for key, tokens in rows.items()
            ],
            released,
        )
        answer = self.session.step(self.ticket, request, 0)
        self.step_id += 1
        self.last = request
        for sequence_id in released:
            self.known.pop(sequence_id, None)
        if answer.outcome is Outcome.NO_CAPACITY:
            return
        for key, tokens in rows.items():
            self.known[key] = self.known[key][: starts[key]] + tokens
        if rows:
            assert answer.results is not None
            expected = [int(np.argmax(toy_logits(self.known[key], 32))) for key in rows]
            assert answer.results.argmax_ids.tolist() == expected

    @rule(reconnect=st.booleans())
    def repeat(self, reconnect: bool) -> None:
        if reconnect:
            self.ticket = self.session.start(self.epoch)
        if self.last is not None:
            runs = self.backend.num_runs
            self.session.step(self.ticket, self.last, 0)
            assert self.backend.num_runs == runs

    @rule()
    def restart_scheduler(self) -> None:
        self.epoch += 1
        self.ticket = self.session.start(self.epoch)
        self.step_id, self.last = 0, None
        self.known.clear()
        self.generations.clear()

    @invariant()
    def whole(self) -> None:
        self.session.check_integrity()
        counts = self.session.occupancy()
        assert counts.shared_blocks == 0
        if not self.known:
            assert counts.free_blocks == NUM_BLOCKS


SessionMachine.TestCase.settings = settings(stateful_step_count=20)
TestSessionTraces = SessionMachine.TestCase
