"""Cached prefixes through both services, with the real model: the same answers for less work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler_service.client import ChatMessage, Client, Completion, GenerationParams
from tests.support.embedded_model import embedded_model_path
from tests.support.services import running_pair

TURNS = (
    "Name a sea.", "Is it cold?", "Who sails there?", "Name a ship.", "How old is it?",
    "Name a port.", "Is it large?", "Name a fish.", "Do people eat it?", "Thank you.",
)  # fmt: skip


def greedy(salt: str, max_tokens: int) -> GenerationParams:
    return GenerationParams(
        max_tokens=max_tokens,
        temperature=0,
        ignore_eos=True,
        return_logits_digests=True,
        cache_salt=salt,
    )


def same(one: Completion, other: Completion) -> bool:
    """Tokens, text and the bits of all logits."""
    return (one.token_ids, one.text, one.logits_digests) == (
        other.token_ids,
        other.text,
        other.logits_digests,
    )


def ten_turns(client: Client) -> tuple[list[ChatMessage], Completion]:
    """Each turn among cached ones and as a stranger's; returns the last turn."""
    messages: list[ChatMessage] = []
    before: list[int] = []
    for turn, question in enumerate(TURNS):
        messages.append(ChatMessage("user", question))
        prompt = list(client.tokenize(messages).token_ids)
        warm = client.chat(messages, greedy("tenant", 5)).completion()
        cold = client.chat(messages, greedy(f"stranger {turn}", 5)).completion()
        assert same(warm, cold)
        assert cold.usage.num_cached_tokens == 0
        # What the turn before has read and written, as far as it is still the same text.
        pairs = zip(before, prompt, strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), len(before))
        assert warm.usage.num_cached_tokens == min(shared, len(prompt) - 1) // 16 * 16
        assert warm.usage.num_prompt_tokens == len(prompt)
        # The last token that was generated is nobody's input yet.
        before = prompt + list(warm.token_ids)[:-1]
        if turn < len(TURNS) - 1:
            messages.append(ChatMessage("assistant", warm.text))
    assert warm.usage.num_cached_tokens > 100
    return messages, warm


# One test, so that the executor is started twice and not four times.
@pytest.mark.timeout(400)
def test_a_conversation_computes_what_is_new_and_survives_a_restart(tmp_path: Path) -> None:
    """Ten turns; then a new executor finds them on disk, for the same tenant alone."""
    flags = ("--prefix-disk-mb", "400", "--prefix-disk-dir", str(tmp_path))

    @contextlib.contextmanager
    def serving() -> Iterator[Client]:
        with (
            running_pair(embedded_model_path(), executor_flags=flags) as pair,
            Client(pair.schedulers[0].address) as client,
        ):
            yield client

    with serving() as client:
        messages, cold = ten_turns(client)
    most = (cold.usage.num_prompt_tokens - 1) // 16 * 16
    # An opening reads for a bounded time: on a machine that stalls it may not get everything.
    for _ in range(3):
        with serving() as client:
            warm = client.chat(messages, greedy("tenant", 5)).completion()
            other = client.chat(messages, greedy("another", 5)).completion()
        assert same(warm, cold)
        assert same(other, cold)
        assert other.usage.num_cached_tokens == 0
        if warm.usage.num_cached_tokens == most:
            break
    assert warm.usage.num_cached_tokens == most
