"""The distinct requests that a load is drawn from, made from a seed.

There are few of them, so that each can be run alone once and every later answer be compared with
that run.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Final

from scheduler_service.client import ChatMessage, GenerationParams, Prompt

_WORDS: Final = (
    "the", "old", "bridge", "over", "a", "cold", "river", "where", "nobody", "fishes", "any",
    "more", "and", "every", "spring", "brings", "new", "boats", "children", "songs", "naïve",
    "café", "日本語", "straße", "🦊", "stories", "stars,", "bread;", "1789", "3.14", "too.",
    "Why?", "So!",
)  # fmt: skip
_STOPS: Final = (" the", ".", "\n", "e ", "and ", "ing", "語", "🦊", "never to be found in a text")


@dataclass(frozen=True, slots=True)
class Profile:
    """What a model can take: sizes of requests, and the pace of the world around them."""

    name: str
    vocab_size: int
    max_prompt_words: int
    max_prompt_ids: int
    max_tokens: int
    # Typical seconds of a request under load; deadlines and pauses are drawn around it.
    pace_seconds: float


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """One distinct request."""

    index: int
    prompt: Prompt
    params: GenerationParams


def make_pool(profile: Profile, seed: int, size: int) -> tuple[PoolRequest, ...]:
    """Return `size` requests of all kinds; equal arguments give equal requests."""
    return tuple(
        PoolRequest(index, *_request(profile, random.Random(f"{seed}-pool-{index}"), index))
        for index in range(size)
    )


def _request(profile: Profile, rng: random.Random, index: int) -> tuple[Prompt, GenerationParams]:
    params = replace(
        _SAMPLING[index % len(_SAMPLING)](rng),
        # Long ones are common enough to fill the cache.
        max_tokens=rng.choice((_log_uniform(rng, 1, profile.max_tokens), profile.max_tokens)),
        ignore_eos=rng.random() < 0.6,
        include_special_tokens=rng.random() < 0.2,
        coalesce_ms=rng.choice((0, 0, 0, 5, 30)),
        return_logits_digests=rng.random() < 0.75,
        cache_salt=rng.choice(("", "", "tenant-a", "tenant-b")),
    )
    if rng.random() < 0.4:
        params = replace(params, stop=tuple(rng.sample(_STOPS, rng.randint(1, 4))))
    if rng.random() < 0.15:
        ids = tuple(rng.randrange(profile.vocab_size) for _ in range(8))
        params = replace(params, stop_token_ids=ids)
    if rng.random() < 0.15:
        bias = {rng.randrange(profile.vocab_size): rng.uniform(-100, 20) for _ in range(5)}
        params = replace(params, logit_bias=bias)
    return _prompt(profile, rng), params


def _prompt(profile: Profile, rng: random.Random) -> Prompt:
    kind = rng.random()
    if kind < 0.25:
        length = _log_uniform(rng, 1, profile.max_prompt_ids)
        return tuple(rng.randrange(3, profile.vocab_size) for _ in range(length))
    text = " ".join(rng.choices(_WORDS, k=_log_uniform(rng, 1, profile.max_prompt_words)))
    if kind < 0.4:
        return (ChatMessage("system", "You are brief."), ChatMessage("user", text))
    return text


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return min(high, int(low * ((high + 1) / low) ** rng.random()))


def _seeded(rng: random.Random) -> GenerationParams:
    return GenerationParams(temperature=rng.uniform(0.2, 1.5), seed=rng.getrandbits(64))


_SAMPLING: Final = (
    lambda rng: GenerationParams(temperature=0.0),
    _seeded,
    lambda rng: replace(_seeded(rng), top_k=rng.choice((1, 2, 5, 40, 200, 1_000_000))),
    lambda rng: replace(_seeded(rng), top_p=rng.uniform(0.1, 0.99)),
    lambda rng: replace(_seeded(rng), min_p=rng.uniform(0.01, 0.4)),
    lambda rng: replace(
        _seeded(rng), top_k=rng.choice((3, 60)), top_p=rng.uniform(0.5, 1), min_p=0.02
    ),
)
