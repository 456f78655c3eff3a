"""How many blocks the cache gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from executor_service.errors import ConfigError

if TYPE_CHECKING:
    from isobatch_kernels.program import Dimensions

# Enough for 64 conversations of 1,024 tokens.
DEFAULT_TOKENS: Final = 64 * 1024
# Weights, buffers and everybody else share the machine.
MEMORY_SHARE: Final = 0.25
_ELEMENT_BYTES: Final = 2  # fp16


def block_bytes(dimensions: Dimensions, block_size: int) -> int:
    """Return the bytes of one block: keys and values of all layers."""
    per_position = dimensions.num_layers * 2 * dimensions.num_kv_heads * dimensions.head_dim
    return per_position * block_size * _ELEMENT_BYTES


def memory_mb_for(num_positions: int, block_size: int, bytes_per_block: int) -> int:
    """Return the least MiB whose blocks hold so many positions of one sequence."""
    return -(-(-(-num_positions // block_size) * bytes_per_block) // 2**20)


def num_blocks(dimensions: Dimensions, block_size: int, memory_mb: int, machine_bytes: int) -> int:
    """Return the number of blocks.

    `memory_mb` MiB when it is not 0, else room for DEFAULT_TOKENS positions within a share of the
    machine's memory. Raises ConfigError when not even one block fits, or the machine has less.
    """
    if memory_mb * 2**20 > machine_bytes:
        raise ConfigError(
            f"[config] kv_memory_mb must be at most the machine's {machine_bytes // 2**20}, "
            f"got {memory_mb}"
        )
    each = block_bytes(dimensions, block_size)
    if memory_mb:
        count = memory_mb * 2**20 // each
    else:
        wanted = -(-DEFAULT_TOKENS // block_size)
        count = min(wanted, int(machine_bytes * MEMORY_SHARE) // each)
    if count < 1:
        raise ConfigError(
            f"[config] kv_memory_mb must hold a block of {-(-each // 2**20)} MiB, got {memory_mb} "
            f"(0 means a quarter of {machine_bytes // 2**20} MiB)"
        )
    return count
