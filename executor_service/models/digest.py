"""The identity of a model's weights: SHA-256 over tensor names and bytes as stored.

For each tensor, by ascending name: the name's length as 8 little-endian bytes, the name, the byte
count as 8 bytes, the bytes. How tensors are spread over files does not matter. Hashing a large
model takes seconds, so the result is remembered in the cache folder, under the files' names, sizes
and modification times; not beside the model, because that folder may be read-only or shared.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from typing import TYPE_CHECKING

from executor_service.models.cache import cache_folder, write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


def tensors_digest(tensors: Mapping[str, memoryview]) -> str:
    """Return the digest in hex, from stored bytes by tensor name."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        encoded = name.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
        digest.update(tensors[name].nbytes.to_bytes(8, "little"))
        digest.update(tensors[name])
    return digest.hexdigest()


def remembered_digest(files: Sequence[Path], tensors: Mapping[str, memoryview]) -> str:
    """Return the digest of a model in `files`, hashing only when they changed since the last time.

    A cache folder that cannot be read or written only costs the time of hashing.
    """
    statuses = [(str(file.resolve()), file.stat()) for file in files]
    identity = json.dumps(
        [[path, status.st_size, status.st_mtime_ns, status.st_ino] for path, status in statuses]
    )
    key = hashlib.sha256(identity.encode()).hexdigest()[:32]
    path = cache_folder() / "digests" / f"{key}.json"
    try:
        known = json.loads(path.read_bytes())
        if known["identity"] == identity and len(bytes.fromhex(known["digest"])) == 32:
            return str(known["digest"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    digest = tensors_digest(tensors)
    with contextlib.suppress(OSError):
        write_atomically(path, json.dumps({"identity": identity, "digest": digest}).encode())
    return digest
