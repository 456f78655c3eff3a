"""Blocks without a backend, and chains to name them, for tests of the prefix cache's disk tier."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from executor_service.disk_cache.folder import DiskFolder
from executor_service.disk_cache.record import RecordFormat
from executor_service.disk_cache.tier import DiskTier
from executor_service.kv_cache.chain import CacheIdentity, ChainNode, Chains

IDENTITY = CacheIdentity("X1", "f16", "weights", "config", 16)
FORMAT = RecordFormat(IDENTITY, "build", (2, 2, 1, 16, 8))


@dataclass
class Blocks:
    """Implements disk_cache.tier.BlockAccess."""

    contents: dict[int, npt.NDArray[np.uint16]] = field(default_factory=dict)

    def fill(self, block: int, seed: int) -> npt.NDArray[np.uint16]:
        """Give a block contents of its own."""
        shape = FORMAT.shape
        bits = np.random.default_rng(seed).integers(0, 2**16, shape).astype(np.uint16)
        self.contents[block] = bits
        return bits

    def read_block(self, block_id: int) -> npt.NDArray[np.uint16]:
        return self.contents[block_id]

    def write_block(self, block_id: int, bits: npt.NDArray[np.uint16]) -> None:
        self.contents[block_id] = bits


def chain(length: int, salt: str = "", identity: CacheIdentity = IDENTITY) -> list[ChainNode]:
    """The nodes of a text of so many blocks."""
    chains = Chains(identity)
    node = chains.root(salt)
    nodes = []
    for number in range(length):
        assert node is not None
        node = chains.child(node, np.full(16, number, "<i4").tobytes())
        assert node is not None
        nodes.append(node)
    return nodes


def disk_tier(
    root: Path, blocks: Blocks, limit: int = 10**6, record_format: RecordFormat = FORMAT
) -> DiskTier:
    """A tier in `root`."""
    return DiskTier(DiskFolder(root, record_format.namespace, limit), record_format, blocks)


def files(root: Path) -> list[Path]:
    """All records."""
    return sorted(root.rglob("*.kv"))
