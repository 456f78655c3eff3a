"""Requests that must be refused with INVALID_ARGUMENT, and the field that each must name."""

from __future__ import annotations

import math
from typing import Any

from isobatch.scheduler.v1 import sampling_pb2
from isobatch.scheduler.v1 import scheduler_service_pb2 as pb

BadRequest = tuple[dict[str, Any], str]


def sampling(**fields: Any) -> dict[str, Any]:
    """A request with sampling parameters."""
    return {"text": "x", "sampling": sampling_pb2.SamplingParams(**fields)}


def stopping(**fields: Any) -> dict[str, Any]:
    """A request with stopping parameters."""
    return {"text": "x", "stopping": sampling_pb2.StoppingParams(**fields)}


def chat(*turns: tuple[str, str]) -> dict[str, Any]:
    """A conversation of (role, content)."""
    return {"chat": pb.Chat(messages=[pb.ChatMessage(role=r, content=c) for r, c in turns])}


EMPTY: list[BadRequest] = [
    ({}, "prompt"),
    ({"text": ""}, "text"),
    ({"token_ids": pb.TokenIds()}, "token_ids"),
    (chat(), "chat"),
]


def numbers() -> list[BadRequest]:
    """Values that are no number, infinite, negative or too large, in every field that has one."""
    bad = {
        "temperature": (math.nan, math.inf, -math.inf, -1.0, -1e-30),
        "top_p": (math.nan, math.inf, -math.inf, -0.5, 1.0001),
        "min_p": (math.nan, math.inf, -math.inf, -0.5, 1.0001),
    }
    return [
        (sampling(**{field: value}), f"sampling.{field}")
        for field, values in bad.items()
        for value in values
    ]


def biases(vocab_size: int) -> list[BadRequest]:
    """Biases that are out of range, by value or by id."""
    pairs = [(5, value) for value in (math.nan, math.inf, -math.inf, 100.5, -1000.0)]
    pairs += [(token_id, 1.0) for token_id in (vocab_size, vocab_size + 1, 2**31, 2**32 - 1)]
    return [
        (sampling(logit_bias={token_id: value}), f"sampling.logit_bias[{token_id}]")
        for token_id, value in pairs
    ]


def out_of_range(vocab_size: int) -> list[BadRequest]:
    """Token ids, lengths, stop rules and names out of range."""
    return [
        ({"token_ids": pb.TokenIds(ids=[5, vocab_size])}, "token_ids"),
        ({"token_ids": pb.TokenIds(ids=[2**32 - 1])}, "token_ids"),
        (chat(("no role", "x")), "chat"),
        (chat(("", "x")), "chat"),
        (stopping(max_tokens=0), "stopping.max_tokens"),
        (stopping(max_tokens=-1), "stopping.max_tokens"),
        (stopping(max_tokens=-(2**31)), "stopping.max_tokens"),
        (stopping(stop=["ok", ""]), "stopping.stop[1]"),
        (stopping(stop=["x" * 1025]), "stopping.stop[0]"),
        (stopping(stop=["x"] * 17), "stopping.stop"),
        (stopping(stop_token_ids=[2, vocab_size]), "stopping.stop_token_ids[1]"),
        ({"text": "x", "coalesce_ms": 51}, "coalesce_ms"),
        ({"text": "x", "request_id": "i" * 129}, "request_id"),
        ({"text": "x", "cache_salt": "s" * 257}, "cache_salt"),
    ]
