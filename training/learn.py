"""One student's learning: the loss against the teacher's labels, and a report on held-out texts."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn import functional

from training.acceptance import simulated
from training.generate import DRAWN_ANSWER, FORCED, GREEDY_ANSWER, QUESTION, Texts
from training.gguf_file import read_gguf
from training.labels import Labels, token_ids
from training.student import (
    EMBED,
    Shape,
    Tensor,
    Weights,
    from_file,
    hidden_states,
    initial,
    merged,
    rope_table,
    round_weights,
)

# What a token counts for, by how it came about (`generate`).
_WEIGHTS: Final = {FORCED: 0.2, QUESTION: 0.4, DRAWN_ANSWER: 1.0, GREEDY_ANSWER: 1.0}
# The written token itself has this part of the goal; the rest is the teacher's distribution.
_EMITTED: Final = 0.1
_WARM_UP: Final = 0.03  # of the time
_LEAST_RATE: Final = 0.02  # of the largest
_DECAY: Final = 0.05
_EMBED_RATE: Final = 0.4  # of the others': it does not begin at random
_HEAD_TOKENS: Final = 4096
_MAX_NORM: Final = 1.0


def rate_at(progress: float) -> float:
    """Return the learning rate as a part of the largest: a warm-up, then a cosine."""
    if progress < _WARM_UP:
        return max(progress / _WARM_UP, 0.01)
    along = (progress - _WARM_UP) / (1 - _WARM_UP)
    return _LEAST_RATE + (1 - _LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, along)))


class Learner:
    """A student, its optimiser and its averages."""

    def __init__(self, shape: Shape, teacher_embedding: Tensor, args: argparse.Namespace) -> None:
        """Draw the first weights."""
        self._shape = shape
        self._rate: float = args.rate
        self._device: str = args.device
        self._is_gpu = args.device.startswith("cuda")
        self._head_dtype = torch.float16 if self._is_gpu else torch.float32
        self._weights = (
            dict(from_file(read_gguf(Path(args.start))[1], shape, torch.float32, args.device))
            if args.start
            else initial(shape, teacher_embedding, args.seed)
        )
        for weight in self._weights.values():
            weight.requires_grad_(True)
        embed = self._weights[EMBED]
        vectors = [weight for weight in self._weights.values() if weight.ndim == 1]
        matrices = [
            weight for weight in self._weights.values() if weight.ndim == 2 and weight is not embed
        ]
        # Steps of orthogonal matrices, as large as AdamW's own (torch's Muon, "match_rms_adamw").
        self._optimizers = [
            torch.optim.Muon(
                matrices, lr=self._rate, weight_decay=_DECAY, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(
                [
                    {"params": vectors, "part": 1.0},
                    {"params": [embed], "part": _EMBED_RATE},
                ],
                lr=self._rate,
                betas=(0.9, 0.95),
                weight_decay=0.0,
                fused=self._is_gpu,
            ),
        ]
        self._ropes: dict[int, tuple[Tensor, Tensor]] = {}
        self._origin_weights = torch.tensor(
            [_WEIGHTS[origin] for origin in range(4)], device=self._device
        )
        self.num_parameters = sum(weight.numel() for weight in self._weights.values())
        self.num_tokens = 0
        self.num_steps = 0
        self._sums = torch.zeros(4, device=self._device)
        self._shown_rate = 0.0

    def weights(self) -> Weights:
        """Return the fp32 weights."""
        return {name: weight.detach() for name, weight in self._weights.items()}

    def step(
        self, tokens: Tensor, origins: Tensor, labels: Labels, *, progress: float, is_rounded: bool
    ) -> None:
        """Learn from (B, T) tokens."""
        length = tokens.shape[1]
        if length not in self._ropes:
            self._ropes[length] = rope_table(self._shape, length, self._device)
        used = round_weights(self._weights) if is_rounded else self._weights
        with torch.autocast("cuda", torch.bfloat16, enabled=self._is_gpu):
            states = hidden_states(
                merged(used, self._shape), self._shape, tokens, self._ropes[length]
            )
        states = states[:, :-1].reshape(-1, self._shape.hidden_size)
        state_gradient = self._head(states, used[EMBED], tokens, origins, labels)
        states.backward(state_gradient.to(states.dtype))
        embed = self._weights[EMBED]
        embed.grad = self._head_gradient if embed.grad is None else embed.grad + self._head_gradient
        norm = torch.nn.utils.clip_grad_norm_(list(self._weights.values()), _MAX_NORM)
        self._shown_rate = self._rate * rate_at(progress)
        is_finite = bool(torch.isfinite(norm))
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._shown_rate * group.get("part", 1.0)
            if is_finite:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._sums[3] += torch.nan_to_num(norm)
        self.num_tokens += tokens.numel()
        self.num_steps += 1

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _head(
        self, states: Tensor, embed: Tensor, tokens: Tensor, origins: Tensor, labels: Labels
    ) -> Tensor:
        """Return the loss's gradient of (N, hidden) states; keep that of the embedding.

        The loss is the cross-entropy with the teacher's most likely tokens and the written one.
        Logits of some thousand rows exist at a time, and their gradient takes their place.
        """
        size = labels.ids.shape[-1]
        ids = token_ids(labels.ids[:, :-1]).reshape(-1, size)
        goals = labels.log_probabilities[:, :-1].reshape(-1, size).float().softmax(-1)
        written = tokens[:, 1:].reshape(-1)
        origin = origins[:, 1:].reshape(-1).long()
        counts = self._origin_weights[origin]
        emitted = torch.where(origin == FORCED, 0.0, _EMITTED)
        total = counts.sum()
        matrix = embed.detach().to(self._head_dtype)
        inputs = states.detach().to(self._head_dtype)
        gradient = torch.empty_like(inputs)
        self._head_gradient = torch.zeros(embed.shape, device=embed.device)
        for begin in range(0, len(inputs), _HEAD_TOKENS):
            rows = slice(begin, begin + _HEAD_TOKENS)
            softmax = torch.softmax(functional.linear(inputs[rows], matrix), dim=-1)
            soft = goals[rows] * (1 - emitted[rows, None])
            hard = written[rows, None]
            self._count(softmax, ids[rows], goals[rows], hard, counts[rows], origin[rows])
            softmax.scatter_add_(1, ids[rows], -soft.to(softmax.dtype))
            softmax.scatter_add_(1, hard, -emitted[rows, None].to(softmax.dtype))
            softmax.mul_(counts[rows, None].to(softmax.dtype))
            gradient[rows] = softmax @ matrix
            self._head_gradient += (softmax.T @ inputs[rows]).float()
        self._head_gradient /= total
        return gradient.float() / total

    def _count(
        self,
        softmax: Tensor,
        ids: Tensor,
        goals: Tensor,
        written: Tensor,
        counts: Tensor,
        origin: Tensor,
    ) -> None:
        """Add up the loss and how often the student's best token is the teacher's."""
        chosen = softmax.gather(1, ids).float().clamp(min=1e-7).log()
        self._sums[0] -= (counts * (goals * chosen).sum(-1)).sum()
        self._sums[1] += counts.sum()
        every = slice(None, None, 16)
        best = softmax[every].argmax(-1) == ids[every, 0]
        answers = origin[every] >= DRAWN_ANSWER
        share = (best & answers).sum() / answers.sum().clamp(min=1)
        self._sums[2] += share * counts.sum()

    def values(self, speed: float) -> dict[str, object]:
        """Return averages since the last time, and begin new ones."""
        loss, weight, agreement, norm = self._sums.tolist()
        steps = max(1, self.num_steps - getattr(self, "_last_steps", 0))
        self._last_steps = self.num_steps
        self._sums.zero_()
        return {
            "loss": loss / max(weight, 1e-9),
            "agreement": agreement / max(weight, 1e-9),
            "gradient_norm": norm / steps,
            "rate": self._shown_rate,
            "learnt": self.num_tokens,
            "steps": self.num_steps,
            "tokens_per_second": speed,
        }


def line(values: dict[str, object]) -> str:
    """Return the values of `Learner.values` as words."""
    return ", ".join(
        f"{name} {value:,.4g}" if isinstance(value, float) else f"{name} {value:,}"
        for name, value in values.items()
    )


@torch.no_grad()  # type: ignore[untyped-decorator]
def held_out_report(
    weights: Weights, shape: Shape, texts: Texts, is_gpu: bool
) -> list[dict[str, Any]]:
    """Return, by kind of text, the agreement with what was written and simulated acceptance."""
    count, length = texts.tokens.shape
    rope = rope_table(shape, length, str(texts.tokens.device))
    dtype = torch.float16 if is_gpu else torch.float32
    matrix = weights[EMBED].to(dtype)
    weights = merged(weights, shape)
    right = torch.zeros(texts.tokens.shape, dtype=torch.bool)
    for row in range(0, count, 8):
        tokens = texts.tokens[row : row + 8]
        with torch.autocast("cuda", torch.bfloat16, enabled=is_gpu):
            states = hidden_states(weights, shape, tokens, rope)
        best = functional.linear(states[:, :-1].to(dtype), matrix).argmax(-1)
        right[row : row + 8, 1:] = (best == tokens[:, 1:]).cpu()
    origins, hits = texts.origins.tolist(), right.tolist()
    reports = []
    for kind in dict.fromkeys(texts.kinds):
        for origin, how in ((GREEDY_ANSWER, "greedy"), (DRAWN_ANSWER, "drawn")):
            answers = [
                _first_answer(hits[row], origins[row], origin)
                for row in range(count)
                if texts.kinds[row] == kind
            ]
            answers = [answer for answer in answers if answer]
            total = sum(map(len, answers))
            if not total:
                continue
            report: dict[str, Any] = {
                "kind": kind,
                "how": how,
                "tokens": total,
                "agreement": round(sum(map(sum, answers)) / total, 4),
            }
            for drafts in (1, 2, 3, 4):
                found = simulated(answers, drafts)
                report[f"accepted at {drafts}"] = round(found.share, 4)
                report[f"tokens a step at {drafts}"] = round(found.tokens_per_step, 3)
            reports.append(report)
    return reports


def _first_answer(hits: list[bool], origins: list[int], origin: int) -> list[bool]:
    """Return what was right in a row's first answer, of at most 256 tokens."""
    answer: list[bool] = []
    for hit, source in zip(hits, origins, strict=True):
        if source == origin:
            answer.append(hit)
        elif answer:
            break
    return answer[:256]
