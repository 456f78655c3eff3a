"""The prefix index: which block holds the state after which tokens.

A block enters when it is full of confirmed tokens, and stays after its writer has gone: it is then
evictable, and the least recently used one is taken first. A sequence gives its blocks up last one
first, so the end of a chain is taken before its beginning, without which nobody finds the end.

This module knows chains and block ids, never sequences, reference counts or memory.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from executor_service.kv_cache.chain import ChainNode, Chains

if TYPE_CHECKING:
    from collections.abc import Iterator

    from executor_service.kv_cache.block_pool import BlockId


@dataclass(slots=True)
class PrefixCounts:
    """What has happened so far; numbers only rise, save `indexed`."""

    lookups_hit: int = 0
    lookups_missed: int = 0
    tokens_hit: int = 0  # in memory
    tokens_hit_on_disk: int = 0
    tokens_missed: int = 0  # of those that were looked for
    evictions: int = 0
    indexed: int = 0  # blocks in the index now


class PrefixIndex:
    """Blocks by chain node; at most one block a node, and the first one stays."""

    def __init__(self, chains: Chains) -> None:
        self.chains = chains
        self.counts = PrefixCounts()
        self._nodes: dict[BlockId, ChainNode] = {}
        self._blocks: dict[ChainNode, BlockId] = {}
        # Blocks that no sequence holds, the least recently used first.
        self._evictable: OrderedDict[BlockId, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, block: object) -> bool:
        return block in self._nodes

    @property
    def num_evictable(self) -> int:
        """Blocks that no sequence holds."""
        return len(self._evictable)

    def block_of(self, node: ChainNode) -> BlockId | None:
        """Return the block that holds a node's state."""
        return self._blocks.get(node)

    def node_of(self, block: BlockId) -> ChainNode | None:
        """Return the node whose state a block holds."""
        return self._nodes.get(block)

    def find(self, salt: str, tokens: bytes, block_bytes: int) -> Iterator[ChainNode]:
        """Yield the nodes of whole blocks of `tokens` from the start, as far as digests are free.

        `tokens` are int32 ids, `block_bytes` the bytes of a block of them. A node need not have a
        block.
        """
        node = self.chains.root(salt)
        for end in range(block_bytes, len(tokens) + 1, block_bytes):
            if node is None:
                return
            node = self.chains.child(node, tokens[end - block_bytes : end])
            if node is not None:
                yield node

    def add(self, node: ChainNode, block: BlockId) -> bool:
        """Enter a block that a sequence holds; False, with nothing changed, when there is one."""
        if node in self._blocks:
            return False
        self._blocks[node] = block
        self._nodes[block] = node
        self.counts.indexed = len(self._nodes)
        return True

    def park(self, block: BlockId) -> None:
        """Note that the last holder of a block has gone."""
        self._evictable[block] = None

    def pin(self, block: BlockId) -> None:
        """Note that a block has a holder again."""
        del self._evictable[block]

    def touch(self, node: ChainNode) -> None:
        """Note that an equal copy of a node's block was in use until now."""
        block = self._blocks[node]
        if block in self._evictable:
            self._evictable.move_to_end(block)

    def evict(self) -> tuple[BlockId, ChainNode]:
        """Take the least recently used block that nobody holds out of the index."""
        block, _ = self._evictable.popitem(last=False)
        node = self._nodes.pop(block)
        del self._blocks[node]
        self.counts.evictions += 1
        self.counts.indexed = len(self._nodes)
        return block, node

    def blocks(self) -> list[tuple[ChainNode, BlockId]]:
        """Return what no sequence holds, the most recently used and beginnings of chains first."""
        return [(self._nodes[block], block) for block in reversed(self._evictable)]

    def evictable(self) -> list[BlockId]:
        """Return the blocks that no sequence holds, the least recently used first."""
        return list(self._evictable)

    def check_integrity(self) -> None:
        """Raise AssertionError when the two directions or the evictable ones disagree."""
        if {node: block for block, node in self._nodes.items()} != self._blocks:
            raise AssertionError("[prefix_index] nodes and blocks disagree")
        if not self._evictable.keys() <= self._nodes.keys():
            raise AssertionError("[prefix_index] a block is evictable and not in the index")
