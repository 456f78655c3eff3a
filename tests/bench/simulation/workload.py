"""Who asks for what, and when: clients with conversations, from a seed or from a file."""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Final

from tests.bench.simulation.lengths import (
    CODE_ANSWER,
    CODE_PROMPT,
    CONVERSATION_ANSWER,
    CONVERSATION_PROMPT,
    Quantiles,
)


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer.

    Attributes:
        num_new: Tokens of the question, behind everything that was said before.
        num_answer: Tokens that will be generated, at least one.
        think_seconds: From the end of the answer before to this question.
    """

    num_new: int
    num_answer: int
    think_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Conversation:
    """What one client says.

    Attributes:
        client: Who it is.
        start: When the first question comes, seconds.
        system: Which system prompt is in front; those of one name are the same tokens.
        num_system: Its tokens.
        turns: In order; each waits for the answer before it.
    """

    client: int
    start: float
    turns: tuple[Turn, ...]
    system: int = 0
    num_system: int = 0


Workload = tuple[Conversation, ...]
MAX_PROMPT: Final = 6000
"""Longer prompts are cut, to leave room for an answer in a context of 8,192 tokens."""


def _single(prompt: Quantiles, answer: Quantiles, source: random.Random) -> tuple[Turn, ...]:
    num_new = min(MAX_PROMPT, max(1, prompt.draw(source)))
    return (Turn(num_new, max(1, answer.draw(source))),)


def azure_conversations(num_clients: int, seed: int) -> Workload:
    """Requests like those of Azure's conversation service: even arrivals (Poisson)."""
    source = random.Random(f"conversations {seed}")
    now = 0.0
    found: list[Conversation] = []
    for client in range(num_clients):
        now += source.expovariate(1.0)
        turns = _single(CONVERSATION_PROMPT, CONVERSATION_ANSWER, source)
        found.append(Conversation(client, now, turns))
    return tuple(found)


def azure_code_bursts(num_clients: int, seed: int) -> Workload:
    """Requests like those of Azure's code completion: long prompts, short answers, in bursts.

    There, ten seconds hold 26 requests in the mean and 327 at most, and the gaps' coefficient of
    variation is 13. Here a burst of 2 to 12 requests comes at once and then nobody for a while.
    """
    source = random.Random(f"code {seed}")
    now = 0.0
    found: list[Conversation] = []
    while len(found) < num_clients:
        size = min(source.randint(2, 12), num_clients - len(found))
        now += source.expovariate(1.0) * size
        for _ in range(size):
            start = now + source.random()
            turns = _single(CODE_PROMPT, CODE_ANSWER, source)
            found.append(Conversation(len(found), start, turns))
    return tuple(found)


def shared_chats(num_clients: int, seed: int) -> Workload:
    """Chats of several turns behind one of four system prompts, which are asked unequally often.

    A third of the chats end after each turn; people think ten seconds in the mean.
    """
    source = random.Random(f"chats {seed}")
    now = 0.0
    found: list[Conversation] = []
    for client in range(num_clients):
        now += source.expovariate(1.0)
        system = min(int(source.expovariate(0.8)), 3)
        turns: list[Turn] = []
        while not turns or (len(turns) < 10 and source.random() < 2 / 3):
            think = source.expovariate(0.1) if turns else 0.0
            answer = max(1, CONVERSATION_ANSWER.draw(source) // 2)
            turns.append(Turn(source.randint(10, 120), answer, think))
        found.append(Conversation(client, now, tuple(turns), system, 400 + 100 * system))
    return tuple(found)


def long_prompts(num_clients: int, seed: int) -> Workload:
    """Short chats with long answers, and every twentieth client brings a prompt of 6,000 tokens."""
    source = random.Random(f"long {seed}")
    now = 0.0
    found: list[Conversation] = []
    for client in range(num_clients):
        now += source.expovariate(1.0)
        turn = Turn(MAX_PROMPT, 40) if client % 20 == 19 else Turn(
            source.randint(20, 200), source.randint(100, 400)
        )  # fmt: skip
        found.append(Conversation(client, now, (turn,)))
    return tuple(found)


def greedy_client(num_clients: int, seed: int) -> Workload:
    """Short chats, and one client that asks 30 things at once for every 60 others that come."""
    source = random.Random(f"greedy {seed}")
    now = 0.0
    found: list[Conversation] = []
    for client in range(1, num_clients + 1):
        now += source.expovariate(1.0)
        turn = Turn(source.randint(20, 200), source.randint(50, 200))
        found.append(Conversation(client, now, (turn,)))
        if client % 60 == 30 or client == num_clients // 2:
            turns = ((Turn(source.randint(200, 800), source.randint(100, 300)),) for _ in range(30))
            found += [Conversation(0, now, each) for each in turns]
    return tuple(found)


SYNTHETIC: Final[Mapping[str, Callable[[int, int], Workload]]] = {
    "conversations": azure_conversations,
    "code bursts": azure_code_bursts,
    "shared chats": shared_chats,
    "long prompts": long_prompts,
    "a greedy client": greedy_client,
}
"""Workloads by name, made of (clients, seed); one client arrives each second until `at_rate`."""


def recorded(path: Path, num_clients: int) -> Workload:
    """Read the first requests of a trace in the format of Azure's, each a client of its own.

    Columns TIMESTAMP (ISO 8601), ContextTokens, GeneratedTokens.
    """

    def rows() -> Iterator[tuple[float, int, int]]:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                # Older Pythons take three or six digits of a second, the files have seven.
                stamp = datetime.fromisoformat(row["TIMESTAMP"][:26].split("+")[0])
                yield stamp.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"])

    ordered = sorted(rows())[:num_clients]
    return tuple(
        Conversation(
            client, time - ordered[0][0],
            (Turn(min(MAX_PROMPT, max(1, num_prompt)), max(1, num_answer)),),
        )
        for client, (time, num_prompt, num_answer) in enumerate(ordered)
    )  # fmt: skip


def at_rate(workload: Workload, clients_per_second: float) -> Workload:
    """Return the workload with its starts stretched so that so many clients come in a second."""
    span = max(each.start for each in workload) or 1.0
    factor = len(workload) / clients_per_second / span
    return tuple(replace(each, start=each.start * factor) for each in workload)
