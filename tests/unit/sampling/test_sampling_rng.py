"""Philox against the known answers of its authors, and the draws made from it."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_service.sampling.rng import Purpose, Words, philox4x32, uniform

# From kat_vectors of Random123, lines "philox4x32 10": counter, key, result.
KNOWN_ANSWERS = [
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: Words, key: tuple[int, int], expected: Words) -> None:
    """The published vectors."""
    assert philox4x32(counter, key) == expected


def test_a_literal_reading_of_the_paper_agrees() -> None:
    """The same round function in fixed-width integers, on random counters and keys."""
    generator = np.random.default_rng(7)
    for _ in range(50):
        words = [int(word) for word in generator.integers(0, 2**32, 6)]
        counter = (words[0], words[1], words[2], words[3])
        assert philox4x32(counter, (words[4], words[5])) == _literal(words[:4], words[4:])


def _literal(counter: list[int], key: list[int]) -> Words:
    """Philox with numpy's fixed-width integers, written from the paper's round function."""
    c = [np.uint64(word) for word in counter]
    k = [np.uint64(word) for word in key]
    low = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    for _ in range(10):
        left = c[0] * np.uint64(0xD2511F53)
        right = c[2] * np.uint64(0xCD9E8D57)
        c = [(right >> shift) ^ c[1] ^ k[0], right & low, (left >> shift) ^ c[3] ^ k[1], left & low]
        k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
    return int(c[0]), int(c[1]), int(c[2]), int(c[3])


def test_a_draw_is_the_first_word_of_its_counter() -> None:
    """Seed and position are split in two words each, low first; the top 24 bits are kept."""
    seed, position = 0x299F31D0_A4093822, 0x85A308D3_243F6A88
    word = philox4x32((0x243F6A88, 0x85A308D3, 0, 0), (0xA4093822, 0x299F31D0))[0]
    assert uniform(seed, position, Purpose.SAMPLE) == (word >> 8) / 2**24


def test_draws_are_in_range_and_exact_in_fp32() -> None:
    """u is below 1 and survives the trip to fp32."""
    for position in range(2000):
        u = uniform(12345, position)
        assert 0 <= u < 1
        assert float(np.float32(u)) == u


def test_neighbouring_draws_differ_and_fill_the_interval() -> None:
    """A coarse look at uniformity: each tenth gets its share of 10,000 draws, within 5 sigma."""
    draws = np.array([uniform(1, position) for position in range(10_000)])
    counts, _ = np.histogram(draws, bins=10, range=(0, 1))
    assert abs(counts - 1000).max() < 5 * 30
    assert len(set(draws.tolist())) > 9_990
    assert uniform(1, 0) != uniform(2, 0)
