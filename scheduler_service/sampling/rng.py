"""The random numbers of sampling: Philox4x32-10.

Counter-based, so a draw is a pure function of (seed, position, purpose): a request that is
preempted, recomputed or resumed elsewhere draws the same numbers. Source of the algorithm:
J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS: Final = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS: Final = 10
_MASK: Final = 0xFFFFFFFF

Words = tuple[int, int, int, int]


class Purpose(IntEnum):
    """What a draw is for; part of the counter, so that purposes never share a number."""

    SAMPLE = 0


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Return the four 32-bit words of a 128-bit counter under a 64-bit key, all as u32."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        product0 = _MULTIPLIERS[0] * x0
        product1 = _MULTIPLIERS[1] * x2
        x0, x1, x2, x3 = (
            (product1 >> 32) ^ x1 ^ k0,
            product1 & _MASK,
            (product0 >> 32) ^ x3 ^ k1,
            product0 & _MASK,
        )
        k0 = (k0 + _KEY_INCREMENTS[0]) & _MASK
        k1 = (k1 + _KEY_INCREMENTS[1]) & _MASK
    return x0, x1, x2, x3


def uniform(seed: int, position: int, purpose: Purpose = Purpose.SAMPLE) -> float:
    """Return u in [0, 1), a multiple of 2^-24 and so exact in fp32.

    Args:
        seed: The request's seed, in [0, 2^64).
        position: Absolute position of the token to be drawn, in [0, 2^64).
        purpose: What the draw is for.
    """
    counter = (position & _MASK, position >> 32, int(purpose), 0)
    word = philox4x32(counter, (seed & _MASK, seed >> 32))[0]
    return (word >> 8) * 2.0**-24
