"""The draft model of the fake executor: as good as told, forgetful or failing on demand."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from isobatch.executor.v1 import capabilities_pb2, drafts_pb2
from isobatch.executor.v1 import executor_service_pb2 as pb
from tests.support.fake_answers import array
from tests.support.toy_model import ToyModel

COMPUTED = drafts_pb2.DRAFT_OUTCOME_COMPUTED
BEHIND = drafts_pb2.DRAFT_OUTCOME_BEHIND
NO_CAPACITY = drafts_pb2.DRAFT_OUTCOME_NO_CAPACITY
FAILED = drafts_pb2.DRAFT_OUTCOME_FAILED


@dataclass(slots=True)
class FakeDrafter:
    """Drafts with a toy model, the target's own unless another is given."""

    model: ToyModel
    # Chance that a drafted token is replaced by another one.
    noise: float = 0.0
    # What it says of its own tokens.
    confidence: float = 0.9
    max_rows: int = 64
    max_tokens: int = 512
    context_length: int = 512
    # (rows, tokens, nanoseconds) of each point of its cost curve.
    cost_points: tuple[tuple[int, int, int], ...] = ()
    # Ends that are forced on a sequence's row, by a function of the number of its request.
    force: Callable[[int, int], int | None] = lambda number, sequence_id: None
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    # By sequence: generation and known tokens.
    known: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    requests: list[drafts_pb2.DraftTokens] = field(default_factory=list)

    def describe(self, reply: pb.GetCapabilitiesResponse) -> None:
        """Add the draft model to the capabilities."""
        reply.models.add(
            model_id="toy-draft",
            role=capabilities_pb2.MODEL_ROLE_DRAFT,
            max_draft_rows=self.max_rows,
            max_draft_tokens=self.max_tokens,
            context_length=self.context_length,
            cost_curve=[
                capabilities_pb2.CostPoint(num_rows=rows, num_tokens=tokens, duration_ns=ns)
                for rows, tokens, ns in self.cost_points
            ],
        )

    def answer(self, request: drafts_pb2.DraftTokens) -> drafts_pb2.TokensDrafted:
        """Draft for the rows of a request."""
        self.requests.append(request)
        ids = array(request.row_sequence_ids, "<u8")
        tokens = array(request.token_ids, "<i4")
        if len(ids) > self.max_rows or len(tokens) > self.max_tokens or not ids:
            raise ValueError("a request of the draft model within its limits")
        rows = zip(
            ids, array(request.row_generations, "<u4"), array(request.row_start_positions, "<i4"),
            array(request.row_num_tokens, "<i4"), array(request.row_max_drafts, "<i4"),
            array(request.row_min_confidences, "<f4"), strict=True,
        )  # fmt: skip
        ends, computed, drafted = [], [], []
        offset = 0
        for sequence_id, generation, start, count, most, least in rows:
            carried, offset = tokens[offset : offset + count], offset + count
            if count < 1:
                raise ValueError("a row carries a token at least")
            end, known = self._row(sequence_id, generation, start, carried)
            ends.append(end)
            computed.append(len(known))
            drafted.append(self._drafts(known, most, least) if end == COMPUTED else [])
        if offset != len(tokens):
            raise ValueError("each carried token belongs to a row")
        flat = [token for row in drafted for token in row]
        return drafts_pb2.TokensDrafted(
            row_outcomes=bytes(ends),
            row_num_computed=_packed("<i4", computed),
            row_num_drafts=_packed("<i4", [len(row) for row in drafted]),
            token_ids=_packed("<i4", flat),
            confidences=_packed("<f4", [self.confidence] * len(flat)),
        )

    def _row(
        self, sequence_id: int, generation: int, start: int, carried: list[int]
    ) -> tuple[int, list[int]]:
        forced = self.force(len(self.requests), sequence_id)
        kept, known = self.known.get(sequence_id, (generation, []))
        if kept != generation or forced == BEHIND:
            known = []
        if forced in (NO_CAPACITY, FAILED):
            return forced, known
        if start > len(known):
            self.known[sequence_id] = (generation, known)
            return BEHIND, known
        known = [*known[:start], *carried]
        self.known[sequence_id] = (generation, known)
        return COMPUTED, known

    def _drafts(self, known: list[int], most: int, least: float) -> list[int]:
        drafts: list[int] = []
        product = 1.0
        while len(drafts) < most and product >= least:
            token = int(np.argmax(self.model.logits([*known, *drafts])))
            if self.rng.random() < self.noise:
                token = (token + self.rng.randrange(1, 50)) % self.model.vocab_size
            drafts.append(token)
            product *= self.confidence
        return drafts

    def release(self, sequence_id: int) -> None:
        """Let go of a sequence."""
        self.known.pop(sequence_id, None)


def _packed(dtype: str, values: list[Any]) -> bytes:
    return np.array(values, dtype).tobytes()
