"""The form of a block on disk: a header that says what it is, the bits, a checksum.

    magic (8 bytes) | header length (uint32) | payload length (uint64)
    header: JSON of what the bits depend on
    payload: fp16 bits of (num_layers, 2, num_kv_heads, block_size, head_dim)
    BLAKE2b-256 of all of the above

Numbers are little-endian. A tenant's salt is not written: it is part of the chain's digest.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from executor_service.kv_cache.chain import CacheIdentity, ChainNode

MAGIC: Final = b"ISOBKV1\n"
CHECKSUM_BYTES: Final = 32
_LENGTHS: Final = struct.Struct("<IQ")


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """What the records of one executor have in common."""

    identity: CacheIdentity
    build: str  # of the kernels
    shape: tuple[int, ...]  # of a block's fp16 bits

    @property
    def namespace(self) -> str:
        """Name of a folder for records of this kind alone."""
        return hashlib.blake2b(self._common(), digest_size=8).hexdigest()

    @property
    def payload_bytes(self) -> int:
        """Bytes of a block."""
        return int(np.prod(self.shape)) * 2

    def _common(self) -> bytes:
        return json.dumps(self._fields(), sort_keys=True).encode()

    def _fields(self) -> dict[str, object]:
        identity = self.identity
        return {
            "numeric_class": identity.numeric_class,
            "kv_class": identity.kv_class,
            "weights": identity.weights_digest,
            "config": identity.config_digest,
            "block_size": identity.block_size,
            "build": self.build,
            "shape": list(self.shape),
        }

    def header(self, node: ChainNode) -> bytes:
        """Return the header of a node's record; equal exactly for equal states."""
        parent = b"" if node.parent is None else node.parent.digest
        own = {
            "chain": node.digest.hex(),
            "parent": parent.hex(),
            "tokens": np.frombuffer(node.tokens, "<i4").tolist(),
        }
        return json.dumps(self._fields() | own, sort_keys=True).encode()

    def encode(self, header: bytes, bits: npt.NDArray[np.uint16]) -> bytes:
        """Return the record of a block."""
        payload = bits.astype("<u2", copy=False).tobytes()
        body = MAGIC + _LENGTHS.pack(len(header), len(payload)) + header + payload
        return body + hashlib.blake2b(body, digest_size=CHECKSUM_BYTES).digest()

    def decode(self, node: ChainNode, record: bytes) -> npt.NDArray[np.uint16] | None:
        """Return the bits of a node's block; None for any other record, and for a damaged one."""
        expected = self.header(node)
        start = MAGIC + _LENGTHS.pack(len(expected), self.payload_bytes) + expected
        end = len(start) + self.payload_bytes
        if len(record) != end + CHECKSUM_BYTES or not record.startswith(start):
            return None
        view = memoryview(record)
        if hashlib.blake2b(view[:end], digest_size=CHECKSUM_BYTES).digest() != view[end:]:
            return None
        bits = np.frombuffer(view[len(start) : end], "<u2").reshape(self.shape)
        return bits.astype(np.uint16, copy=False)
