"""The teacher's most likely next tokens at every position, small enough to keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional

from training.student import EMBED, Shape, Tensor, Weights, hidden_states, rope_table

NUM_CANDIDATES: Final = 32
# Vocabularies of up to 65,536 tokens fit 16 bits, which torch has only with a sign.
_SHIFT: Final = 32768
_MAX_BODY_TOKENS: Final = 65536
_MAX_HEAD_TOKENS: Final = 8192


@dataclass(frozen=True, slots=True)
class Labels:
    """What the teacher says follows each token of equally long sequences."""

    ids: Tensor  # (B, T, NUM_CANDIDATES) int16, see `token_ids`
    log_probabilities: Tensor  # (B, T, NUM_CANDIDATES) fp16, descending


def token_ids(stored: Tensor) -> Tensor:
    """Return stored ids as int64."""
    return stored.long() + _SHIFT


@torch.no_grad()  # type: ignore[untyped-decorator]
def label(weights: Weights, shape: Shape, tokens: Tensor) -> Labels:
    """Read (B, T) tokens with the teacher."""
    count, length = tokens.shape
    device = str(tokens.device)
    rope = rope_table(shape, length, device)
    size = (count * length, min(NUM_CANDIDATES, shape.vocab_size))
    ids = torch.empty(size, dtype=torch.int16, device=device)
    values = torch.empty(size, dtype=torch.float16, device=device)
    rows = max(1, _MAX_BODY_TOKENS // length)
    for first in range(0, count, rows):
        states = hidden_states(weights, shape, tokens[first : first + rows], rope)
        states = states.reshape(-1, shape.hidden_size)
        for begin in range(0, len(states), _MAX_HEAD_TOKENS):
            part = states[begin : begin + _MAX_HEAD_TOKENS]
            logits = functional.linear(part, weights[EMBED])
            best, where = logits.topk(size[1], dim=-1)
            total = torch.logsumexp(logits.float(), dim=-1, keepdim=True)
            here = slice(first * length + begin, first * length + begin + len(part))
            ids[here] = (where - _SHIFT).to(torch.int16)
            values[here] = (best.float() - total).half()
    return Labels(ids.reshape(count, length, -1), values.reshape(count, length, -1))
