"""The teacher writes: many sequences at once, all at the same position, so that nothing is padded.

A prompt's tokens are forced until it ends. A turn that ends is followed by the forced tokens that
open the next one, so a row goes on to its last position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn import functional

from training.prompts import Row
from training.student import EMBED, Cache, Shape, Tensor, Weights, hidden_states, rope_table

FORCED, QUESTION, DRAWN_ANSWER, GREEDY_ANSWER = 0, 1, 2, 3  # how a token came about
_ENDS: Final = ("<|endoftext|>", "<|im_end|>")
_MAX_PREFILL_TOKENS: Final = 131072


@dataclass(frozen=True, slots=True)
class Texts:
    """Equally long sequences."""

    tokens: Tensor  # (B, T) int64
    origins: Tensor  # (B, T) uint8, one of the four above
    kinds: tuple[str, ...]  # (B,)

    def rows(self, first: int, end: int) -> Texts:
        """Return some of the sequences."""
        here = slice(first, end)
        return Texts(self.tokens[here], self.origins[here], self.kinds[here])


class Writer:
    """A teacher that writes texts."""

    def __init__(
        self,
        weights: Weights,
        shape: Shape,
        encode: Callable[[str], list[int]],
        device: str,
        dtype: Any,
    ) -> None:
        """Take a teacher whose merged weights are on a device."""
        self._weights, self._shape, self._device = weights, shape, device
        # One piece for good: tens of gigabytes that come and go would fragment what is left.
        self._memory = torch.empty(0, dtype=dtype, device=device)
        self._ends = [encode(text)[0] for text in _ENDS]
        openings = [
            encode(f"\n<|im_start|>{role}\n") for role in ("assistant", "user")
        ]  # after a question, after an answer
        width = max(map(len, openings))
        self._openings = torch.tensor(
            [opening + [0] * (width - len(opening)) for opening in openings], device=device
        )
        self._opening_lengths = torch.tensor([len(each) for each in openings], device=device)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def write(self, rows: Sequence[Row], length: int, seed: int) -> Texts:
        """Continue every row to `length` tokens."""
        device, count = self._device, len(rows)
        draws = torch.Generator(device=device).manual_seed(seed)
        prompts = [row.tokens[: length - 1] for row in rows]
        tokens = torch.zeros(count, length, dtype=torch.int64)
        for index, prompt in enumerate(prompts):
            tokens[index, : len(prompt)] = torch.tensor(prompt)
        tokens = tokens.to(device)
        origins = torch.zeros(count, length, dtype=torch.uint8, device=device)
        prompt_lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        heat = torch.tensor([row.temperature for row in rows], device=device)
        answering = torch.tensor([not row.starts_in_user_turn for row in rows], device=device)
        answer_origin = torch.where(heat > 0, DRAWN_ANSWER, GREEDY_ANSWER).to(torch.uint8)
        asked = torch.zeros(count, dtype=torch.int64, device=device)  # which opening is forced
        step = torch.full((count,), int(self._openings.shape[1]), device=device)
        cos, sin = rope_table(self._shape, length, device)
        cache = Cache(self._shape, count, length, self._memory_for(count, length))
        start = min(len(prompt) for prompt in prompts)
        last = self._prefill(tokens[:, :start], cache, (cos[:start], sin[:start]))
        width = self._openings.shape[1] - 1
        for position in range(start, length):
            is_prompt = position < prompt_lengths
            is_opening = (step < self._opening_lengths[asked]) & ~is_prompt
            chosen = self._choose(last, torch.where(answering, heat, 1.0), draws)
            opening = self._openings[asked, step.clamp(max=width)]
            token = torch.where(is_opening, opening, chosen)
            token = torch.where(is_prompt, tokens[:, position], token)
            free = ~is_prompt & ~is_opening
            origin = torch.where(answering, answer_origin, QUESTION)
            origins[:, position] = torch.where(free, origin, FORCED)
            tokens[:, position] = token
            ended = free & ((token == self._ends[0]) | (token == self._ends[1]))
            step = torch.where(is_opening, step + 1, step)
            step = torch.where(ended, 0, step)
            asked = torch.where(ended, answering.long(), asked)
            answering = answering ^ ended
            if position + 1 < length:
                here = slice(position, position + 1)
                attend = cache.next_token(position)
                rope = (cos[here], sin[here])
                last = hidden_states(self._weights, self._shape, tokens[:, here], rope, attend)
                last = last[:, 0]
        return Texts(tokens, origins, tuple(row.kind for row in rows))

    def _memory_for(self, count: int, length: int) -> Tensor:
        size = Cache.elements(self._shape, count, length)
        if len(self._memory) < size:
            self._memory = self._memory[:0].clone()  # let go before more is asked for
            self._memory = torch.empty(size, dtype=self._memory.dtype, device=self._device)
        return self._memory

    def _prefill(self, tokens: Tensor, cache: Cache, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Fill the cache with the part that all rows have; return (B, hidden) last states."""
        rows = max(1, _MAX_PREFILL_TOKENS // tokens.shape[1])
        states = []
        for first in range(0, len(tokens), rows):
            part = tokens[first : first + rows]
            attend = cache.filling(first)
            states.append(hidden_states(self._weights, self._shape, part, rope, attend)[:, -1])
        return torch.cat(states)

    def _choose(self, states: Tensor, heat: Tensor, draws: Any) -> Tensor:
        """Draw a token of each row: the largest of logits with Gumbel noise of a row's heat."""
        logits = functional.linear(states, self._weights[EMBED]).float()
        noise = torch.empty_like(logits).exponential_(generator=draws).log_()
        return torch.addcmul(logits, noise, heat[:, None], value=-1.0).argmax(-1)
