"""Random traces of a session: whatever else a step holds, tokens are those of a solo run.

Sequences begin with few texts, so that they often start from what others have cached; rows that
verify a draft write tokens that are taken back, and a poisoned row makes its sequence useless.
"""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from executor_service.engine.model_runner import ModelRunner
from executor_service.engine.open_sequences import Opening
from executor_service.engine.session import Session
from executor_service.engine.step_request import (
    Limits,
    Outcome,
    RowOutcome,
    StepRequest,
    StepResults,
)
from executor_service.kv_cache.chain import CacheIdentity, Chains
from executor_service.kv_cache.manager import KvCacheManager
from executor_service.kv_cache.prefix_index import PrefixIndex
from tests.support.fake_backend import POISON_TOKEN, FakeBackend, toy_logits
from tests.support.steps import Row, all_wanted, step_request, step_results

LIMITS = Limits(
    max_num_seqs=4, max_num_batched_tokens=80, vocab_size=32, context_length=64, max_top_k=4
)
NUM_BLOCKS = 9
SEQUENCES = st.integers(0, 4)
WRONG = 30
TEXTS = [
    [1] * 48,
    [1] * 16 + [2] * 32,
    [1] * 20 + [POISON_TOKEN] + [1] * 27,
    [1] * 9 + [WRONG] * 39,
    [1] * 16 + [2] * 9 + [WRONG] * 23,
]
TOKENS = st.lists(
    st.integers(0, 31).filter(lambda token: token != POISON_TOKEN), min_size=1, max_size=20
)
SALTS = st.sampled_from(("", "a"))


class SessionMachine(RuleBasedStateMachine):
    """The model: the tokens that each open sequence has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.backend = FakeBackend(NUM_BLOCKS, vocab_size=LIMITS.vocab_size)
        self.epoch = 1
        self.step_id = 0
        self.last: StepRequest | None = None
        self.known: dict[int, list[int]] = {}
        self.poisoned: set[int] = set()
        self.generations: dict[int, int] = {}
        self.cached: dict[int, int] = {}
        self.salts: dict[int, str] = {}
        self.written: set[tuple[str, tuple[int, ...]]] = set()

    @initialize(shares=st.booleans())
    def build(self, shares: bool) -> None:
        index = PrefixIndex(Chains(CacheIdentity("X1", "f16", "", "", 16))) if shares else None
        cache = KvCacheManager(NUM_BLOCKS, 16, self.backend.zero_blocks, index)
        self.session = Session("toy", ModelRunner((), self.backend), cache, LIMITS)
        self.ticket = self.session.start(self.epoch)

    @rule(
        sequence_id=SEQUENCES,
        again=st.booleans(),
        text=st.sampled_from(TEXTS),
        length=st.integers(0, 48),
        salt=SALTS,
    )
    def open(self, sequence_id: int, again: bool, text: list[int], length: int, salt: str) -> None:
        generation = self.generations.get(sequence_id, 0) + (not again)
        ids = np.array(text[:length], np.int32)
        opening = Opening(sequence_id, generation, "", salt, ids, 100)
        (cached,) = self.session.open(self.ticket, [opening])
        if again and sequence_id in self.known:
            assert cached == self.cached[sequence_id]
            return
        assert cached <= max(0, length - 1)
        assert not cached or (salt, tuple(text[:cached])) in self.written
        self.known[sequence_id] = text[:cached]
        self.poisoned.discard(sequence_id)
        self.cached[sequence_id] = cached
        self.salts[sequence_id] = salt
        self.generations[sequence_id] = generation

    @rule(sequence_ids=st.lists(SEQUENCES, max_size=2))
    def release(self, sequence_ids: list[int]) -> None:
        self.session.release(self.ticket, sequence_ids)
        for sequence_id in sequence_ids:
            self.known.pop(sequence_id, None)

    @rule(
        rows=st.dictionaries(SEQUENCES, st.integers(1, 30), min_size=1, max_size=4),
        text=st.sampled_from(TEXTS),
        free=TOKENS,
        released=st.lists(SEQUENCES, max_size=2),
        poison=st.integers(0, 20),
    )
    def step(
        self,
        rows: dict[int, int],
        text: list[int],
        free: list[int],
        released: list[int],
        poison: int,
    ) -> None:
        """Rows go on with `text` where they are at its beginning, else with free tokens."""
        asked: dict[int, list[int]] = {}
        for key, count in rows.items():
            if key not in self.known or key in released or len(self.known[key]) > 40:
                continue
            start = len(self.known[key])
            fits = self.known[key] == text[:start] and start < len(text)
            tokens = (text[start : start + count] if fits else free)[:20]
            asked[key] = [POISON_TOKEN] if poison == key else tokens
        request = step_request(
            self.step_id + 1,
            [
                Row(key, tuple(tokens), len(self.known[key]), self.generations[key])
                for key, tokens in asked.items()
            ],
            released,
        )
        answer = self._step(request, released)
        if answer is None:
            return
        for key, tokens in asked.items():
            self._note(key, tokens)
        if asked:
            bad = [key in self.poisoned for key in asked]
            assert [outcome == RowOutcome.NON_FINITE for outcome in answer.row_outcomes] == bad
            for key, token in zip(asked, answer.argmax_ids.tolist(), strict=True):
                if key not in self.poisoned:
                    assert token == int(np.argmax(toy_logits(self.known[key], 32)))

    @rule(
        sequence_id=SEQUENCES,
        text=st.sampled_from(TEXTS),
        num_right=st.integers(0, 7),
        drafts=st.integers(1, 12),
    )
    def verify(self, sequence_id: int, text: list[int], num_right: int, drafts: int) -> None:
        """A row of the last known token and a draft: what was wrong is written over later."""
        known = self.known.get(sequence_id)
        if known is None or len(known) > 40 or sequence_id in self.poisoned:
            return
        start = len(known)
        true = text[start : start + 1 + num_right] if known == text[:start] else []
        if POISON_TOKEN in true:
            return
        right = true[1 : 1 + drafts]
        draft = right + [WRONG] * (drafts - len(right))
        row = Row(sequence_id, ((true or [5])[0], *draft), start, self.generations[sequence_id])
        answer = self._step(all_wanted(step_request(self.step_id + 1, [row])), [])
        if answer is None:
            return
        assert answer.argmax_ids.tolist() == [
            int(np.argmax(toy_logits([*known, *row.tokens[: end + 1]], 32)))
            for end in range(len(row.tokens))
        ]
        self._note(sequence_id, [row.tokens[0], *right])

    def _step(self, request: StepRequest, released: list[int]) -> StepResults | None:
        answer = self.session.step(self.ticket, request, 0)
        self.step_id += 1
        self.last = request
        for sequence_id in released:
            self.known.pop(sequence_id, None)
        if answer.outcome is Outcome.NO_CAPACITY:
            return None
        return answer.results or step_results()

    def _note(self, sequence_id: int, tokens: list[int]) -> None:
        """The sequence goes on behind `tokens`."""
        known = self.known[sequence_id]
        known += tokens
        if POISON_TOKEN in tokens:
            self.poisoned.add(sequence_id)
        if sequence_id not in self.poisoned:
            salt = self.salts[sequence_id]
            self.written |= {(salt, tuple(known[:end])) for end in range(16, len(known) + 1, 16)}

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
        if not self.known:
            assert counts.shared_blocks == 0
            assert counts.free_blocks + counts.evictable_blocks == NUM_BLOCKS


SessionMachine.TestCase.settings = settings(stateful_step_count=30)
TestSessionTraces = SessionMachine.TestCase
