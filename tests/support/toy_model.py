"""A deterministic toy language model: logits are a hash of all tokens so far."""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from scheduler_service.core import SamplingParams
from scheduler_service.sampling import choose_from_full_row, uniform


class ToyModel:
    """Logits of a token depend on it and on every token before it, and on nothing else."""

    def __init__(self, vocab_size: int, salt: bytes = b"") -> None:
        """Make a model of `vocab_size` ids; another `salt` is another model."""
        self.vocab_size = vocab_size
        self._salt = salt

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Return (V,) logits in [-8, 8) of the token after `token_ids`, multiples of 2^-8."""
        packed = np.asarray(token_ids, dtype="<i4").tobytes()
        raw = hashlib.shake_128(self._salt + packed).digest(2 * self.vocab_size)
        codes = np.frombuffer(raw, dtype="<u2") % 4096
        return (codes.astype(np.float32) - 2048) * np.float32(2**-8)

    def solo_run(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        max_tokens: int,
        stop_token_ids: Iterable[int] = (),
    ) -> list[int]:
        """Return the tokens that a request of its own would give, from full rows."""
        stops = set(stop_token_ids)
        known = list(prompt)
        output: list[int] = []
        while len(output) < max_tokens:
            logits = self.logits(known)
            for token_id, value in params.logit_bias:
                logits[token_id] += np.float32(value)
            token = choose_from_full_row(params, logits, uniform(params.seed, len(known)))
            known.append(token)
            output.append(token)
            if token in stops:
                break
        return output
