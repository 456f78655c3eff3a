"""Section 5 of docs/numerics.md read literally, one number at a time.

Slow and plain on purpose: exact rational arithmetic for fma, fp32 scalars for the rest, Python
loops in the stated order. The numpy implementation must equal it bit for bit.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scheduler_service.core import SamplingParams

F = np.float32


def to_fp32(value: Fraction) -> np.float32:
    """Round an exact number to fp32, to nearest, ties to even; normal range only."""
    if value == 0:
        return F(0)
    exponent = 0
    while abs(value) / Fraction(2) ** exponent >= 2**24:
        exponent += 1
    while abs(value) / Fraction(2) ** exponent < 2**23:
        exponent -= 1
    # Python rounds a fraction's half to even; the result has at most 24 bits.
    return F(float(round(value / Fraction(2) ** exponent) * Fraction(2) ** exponent))


def fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    """Return a*b + c, rounded once."""
    return to_fp32(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


def exp(x: np.float32) -> np.float32:
    """Return the exponential of section 4."""
    if x < -40:
        return F(0)
    n = np.rint(x * F(float.fromhex("0x1.715476p+0")))
    r = fma(n, F(float.fromhex("-0x1.63p-1")), x)
    r = fma(n, F(float.fromhex("0x1.bd0106p-13")), r)
    p = to_fp32(Fraction(1, 5040))
    for denominator in (720, 120, 24, 6, 2, 1, 1):
        p = fma(p, r, to_fp32(Fraction(1, denominator)))
    return to_fp32(Fraction(float(p)) * Fraction(2) ** int(n))


def sum256(values: Sequence[np.float32]) -> np.float32:
    """Return the sum over 256 chains, folded in halves."""
    chains = [F(0)] * 256
    for index, value in enumerate(values):
        chains[index % 256] += value
    width = 128
    while width:
        for lane in range(width):
            chains[lane] += chains[lane + width]
        width //= 2
    return chains[0]


def running_sums(weights: Sequence[np.float32]) -> list[np.float32]:
    """Return R_c for each chunk of 1,024 ids."""
    sums: list[np.float32] = []
    for start in range(0, len(weights), 1024):
        chunk = sum256(weights[start : start + 1024])
        sums.append(sums[-1] + chunk if sums else chunk)
    return sums


def quantile(weights: Sequence[np.float32], u: float) -> int:
    """Return the token at quantile u."""
    sums = running_sums(weights)
    target = F(u) * sums[-1]
    positive = [index for index, weight in enumerate(weights) if weight > 0]
    for chunk, total in enumerate(sums):
        if total > target:
            running = sums[chunk - 1] if chunk else F(0)
            last = min(1024 * (chunk + 1), len(weights))
            for index in range(1024 * chunk, last):
                running = running + weights[index]
                if running > target:
                    return index
            return max(index for index in positive if index < last)
    return positive[-1]


def order(logits: Sequence[float]) -> list[int]:
    """Return ids by (logit descending, id ascending)."""
    return sorted(range(len(logits)), key=lambda index: (-logits[index], index))


def draw(
    params: SamplingParams, ids: Sequence[int], weights: Sequence[np.float32], u: float
) -> int:
    """Return the token of a truncated draw from all ids in order and the weights by id."""
    total = float(running_sums(weights)[-1])
    kept = list(ids)
    if 0 < params.top_k < len(ids):
        kept = kept[: params.top_k]
        total = 0.0
        for index in kept:
            total += float(weights[index])
    if params.top_p < 1:
        running = 0.0
        for count, index in enumerate(kept, start=1):
            running += float(weights[index])
            if running >= params.top_p * total:
                kept = kept[:count]
                break
    if params.min_p > 0:
        for count, index in enumerate(kept):
            if weights[index] < F(params.min_p):
                kept = kept[:count]
                break
    mass = 0.0
    for index in kept:
        mass += float(weights[index])
    running = 0.0
    for index in kept:
        running += float(weights[index])
        if running > u * mass:
            return index
    return kept[-1]
