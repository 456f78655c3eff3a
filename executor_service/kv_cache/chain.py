"""Chains of full blocks: what a block's keys and values depend on, as one object.

A node stands for the tokens of one full block *after* the tokens of its parent; a root stands for
everything else that the values depend on (numeric class, class of the cache, weights) and for the
salt of a tenant. Two writers of the same tokens get the same node, whoever comes first, so equality
of nodes is identity.

Nodes are found by a BLAKE2b digest over the parent's digest and the tokens, and then compared
whole: tokens with tokens, parent with parent. A parent lives as long as its children, so that
comparison covers the whole chain, and two chains whose digests are equal are still two chains.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from collections.abc import Callable

DIGEST_BYTES: Final = 32
_MAGIC: Final = b"isobatch prefix 1"


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """What the bits of a cached state depend on, besides its tokens."""

    numeric_class: str
    kv_class: str
    weights_digest: str
    # Digest of the architecture and its sizes: weights alone do not say what is done with them.
    config_digest: str
    block_size: int

    def encoded(self, salt: str) -> bytes:
        """Return the identity and a tenant's salt as bytes, each part after its length."""
        parts = (
            self.numeric_class, self.kv_class, self.weights_digest, self.config_digest,
            str(self.block_size), salt,
        )  # fmt: skip
        encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
        return b"".join(len(part).to_bytes(8, "little") + part for part in encoded)


class ChainNode:
    """One full block of tokens after its parent's, or a root."""

    __slots__ = ("__weakref__", "depth", "digest", "parent", "tokens")

    def __init__(self, parent: ChainNode | None, tokens: bytes, digest: bytes) -> None:
        self.parent = parent
        self.tokens = tokens  # int32, little-endian; of a root, the encoded identity
        self.digest = digest
        self.depth: int = 0 if parent is None else parent.depth + 1


def chain_digest(parent: bytes, tokens: bytes) -> bytes:
    """Return BLAKE2b-256 over a parent's digest and a block's tokens."""
    return hashlib.blake2b(parent + tokens, digest_size=DIGEST_BYTES).digest()


class Chains:
    """All nodes that a block, a sequence or a child of theirs still needs."""

    def __init__(
        self,
        identity: CacheIdentity,
        digest: Callable[[bytes, bytes], bytes] = chain_digest,
    ) -> None:
        """Make chains below `identity`; tests give a `digest` that collides."""
        self._identity = identity
        self._digest = digest
        self._nodes: WeakValueDictionary[bytes, ChainNode] = WeakValueDictionary()

    def root(self, salt: str) -> ChainNode | None:
        """Return the root of a tenant; None when its digest belongs to another chain."""
        return self._node(None, _MAGIC, self._identity.encoded(salt))

    def child(self, parent: ChainNode, tokens: bytes) -> ChainNode | None:
        """Return the node of a block of int32 tokens; None when its digest is another chain's."""
        return self._node(parent, parent.digest, tokens)

    def _node(self, parent: ChainNode | None, above: bytes, tokens: bytes) -> ChainNode | None:
        digest = self._digest(above, tokens)
        known = self._nodes.get(digest)
        if known is None:
            known = self._nodes[digest] = ChainNode(parent, tokens, digest)
        elif known.parent is not parent or known.tokens != tokens:
            return None
        return known
