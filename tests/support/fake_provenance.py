"""What the fake executor says about a sequence's cached positions."""

import hashlib
from collections.abc import Sequence

import numpy as np

from isobatch.executor.v1 import provenance_pb2 as pb


def toy_provenance(
    request: pb.GetProvenanceRequest, token_ids: Sequence[int], block_size: int, epoch: int
) -> pb.GetProvenanceResponse:
    """Blocks of unknown steps, with digests that depend on the tokens up to each position."""
    token_ids = token_ids[: request.num_positions or None]
    reply = pb.GetProvenanceResponse(executor_epoch=epoch, numeric_class="X1-toy", kv_class="f16")
    for start in range(0, len(token_ids), block_size):
        ends = range(start + 1, min(start + block_size, len(token_ids)) + 1)
        digests = [
            hashlib.blake2b(repr(list(token_ids[:end])).encode(), digest_size=16).digest()
            for end in ends
            if request.include_digests
        ]
        reply.blocks.add(
            block_index=start // block_size,
            num_positions=len(ends),
            position_steps=np.full(len(ends), -1, "<i4").tobytes(),
            position_digests=b"".join(digests),
        )
    return reply
