"""How many blocks the cache gets."""

from __future__ import annotations

import pytest

from executor_service.errors import ConfigError
from executor_service.kv_cache.sizing import block_bytes, memory_mb_for, num_blocks
from isobatch_kernels.program import Dimensions

# 30 layers, 3 key/value heads of 64: 368,640 bytes for 16 positions.
DIMENSIONS = Dimensions(576, 30, 9, 3, 64, 49152, 8192, 0.125)
GIB = 2**30


def test_a_block_holds_keys_and_values_of_all_layers() -> None:
    assert block_bytes(DIMENSIONS, 16) == 30 * 2 * 3 * 64 * 16 * 2 == 368640


def test_the_default_holds_64_conversations_of_1024_tokens() -> None:
    assert num_blocks(DIMENSIONS, 16, 0, 64 * GIB) * 16 == 64 * 1024


def test_the_default_takes_at_most_a_quarter_of_the_machine() -> None:
    count = num_blocks(DIMENSIONS, 16, 0, 4 * GIB)
    assert count * 368640 <= GIB < (count + 1) * 368640


def test_the_memory_for_a_context_is_the_least_that_holds_it() -> None:
    for num_positions in (1, 16, 17, 8192):
        memory_mb = memory_mb_for(num_positions, 16, 368640)
        assert num_blocks(DIMENSIONS, 16, memory_mb, 64 * GIB) * 16 >= num_positions
        assert memory_mb == 1 or memory_mb - 1 < -(-num_positions // 16) * 368640 / 2**20


def test_a_given_memory_is_used_as_it_is() -> None:
    assert num_blocks(DIMENSIONS, 16, 1, 4 * GIB) == 2
    assert num_blocks(DIMENSIONS, 16, 8192, 8 * GIB) == 8192 * 2**20 // 368640


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_memory_mb must hold a block of 1 MiB, got 0"):
        num_blocks(DIMENSIONS, 16, 0, 2**20)


@pytest.mark.parametrize("memory_mb", [4097, 10**9, 10**18])
def test_more_than_the_machine_has_is_refused(memory_mb: int) -> None:
    with pytest.raises(ConfigError, match=f"at most the machine's 4096, got {memory_mb}"):
        num_blocks(DIMENSIONS, 16, memory_mb, 4 * GIB)
