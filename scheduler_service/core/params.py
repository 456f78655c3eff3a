"""How tokens of a request are drawn. The core passes these values on and never reads them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters; `sampling.params.validate` checks them.

    Attributes:
        temperature: At least 0; 0 is greedy.
        top_k: Keep the K likeliest tokens; 0 keeps all.
        top_p: Keep the shortest prefix with this share of probability, in [0, 1].
        min_p: Keep tokens at least this likely relative to the likeliest, in [0, 1].
        seed: Unsigned 64-bit seed.
        logit_bias: (token id, added value) pairs, by ascending id.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
