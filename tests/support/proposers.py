"""Proposers for tests: the truth, rubbish, and anything between."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from scheduler_service.core import Request, SequenceId
from scheduler_service.speculation import Proposal, ProposerKind


class OracleProposer:
    """Knows each request's output, found by its prompt, and spoils some of it.

    Each proposed token is replaced by another one with the chance `noise`: 0 is always right, 1 is
    always wrong. With `wrong_at` the token at that place of every proposal is wrong instead.
    """

    kind = ProposerKind.LOOKUP

    def __init__(
        self,
        outputs: Mapping[tuple[int, ...], Sequence[int]],
        vocab_size: int,
        *,
        noise: float = 0.0,
        wrong_at: int | None = None,
        seed: int = 0,
    ) -> None:
        """Know `outputs` by prompt; the seed decides what is spoilt."""
        self._outputs = outputs
        self._vocab_size = vocab_size
        self._noise = noise
        self._wrong_at = wrong_at
        self._rng = random.Random(seed)

    def propose(self, request: Request, max_tokens: int) -> Proposal:
        """Return what follows, spoilt."""
        start = len(request.output_token_ids)
        truth = self._outputs[request.prompt_token_ids][start : start + max_tokens]
        return Proposal(tuple(self._spoilt(i, token) for i, token in enumerate(truth)), 8)

    def _spoilt(self, index: int, token: int) -> int:
        if self._rng.random() < self._noise or index == self._wrong_at:
            return (token + self._rng.randrange(1, self._vocab_size)) % self._vocab_size
        return token

    def forget(self, sequence_id: SequenceId) -> None:
        """Have nothing to let go of."""


class RandomProposer:
    """Proposes random tokens, as many as it may."""

    kind = ProposerKind.LOOKUP

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        """Draw from all ids."""
        self._vocab_size = vocab_size
        self._rng = random.Random(seed)

    def propose(self, request: Request, max_tokens: int) -> Proposal:
        """Return random tokens."""
        ids = (self._rng.randrange(self._vocab_size) for _ in range(max_tokens))
        return Proposal(tuple(ids), self._rng.randrange(70))

    def forget(self, sequence_id: SequenceId) -> None:
        """Have nothing to let go of."""
