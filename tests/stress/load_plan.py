"""What each stream of a load does, request by request, drawn from a seed.

A plan does not depend on time: stream s does the same things in the same order in every run with
the same seed. A failing request is named by (seed, round, stream, number) and can be run again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from scheduler_service.client import Priority
from tests.stress.request_pool import Profile


class Fate(StrEnum):
    """How a client treats a request."""

    FINISH = "finish"  # reads to the end
    SLOW = "slow"  # reads to the end with pauses
    CANCEL = "cancel"  # calls Cancel after some tokens and reads on
    LEAVE = "leave"  # closes the stream after some tokens
    DROP = "drop"  # its task is cancelled at some time
    DEADLINE = "deadline"  # gives the call a short deadline
    HANG_UP = "hang_up"  # closes its connection after some tokens
    INVALID = "invalid"  # asks for what must be refused


_WEIGHTS: Final = {
    Fate.FINISH: 50,
    Fate.SLOW: 6,
    Fate.CANCEL: 10,
    Fate.LEAVE: 10,
    Fate.DROP: 8,
    Fate.DEADLINE: 8,
    Fate.HANG_UP: 5,
    Fate.INVALID: 3,
}


@dataclass(frozen=True, slots=True)
class Action:
    """One request of a stream."""

    request_index: int
    fate: Fate
    after_tokens: int  # of CANCEL, LEAVE and HANG_UP
    seconds: float  # of DROP and DEADLINE; the sum of the pauses of SLOW
    wait_seconds: float  # before the request is sent
    priority: Priority
    client_id: str


def draw_action(
    profile: Profile, pool_size: int, seed: int, round_index: int, stream: int, number: int
) -> Action:
    """Return the `number`-th action of a stream in a round."""
    rng = random.Random(f"{seed}-{round_index}-{stream}-{number}")
    fate = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    return Action(
        request_index=rng.randrange(pool_size),
        fate=fate,
        after_tokens=rng.choice((0, 0, 1, 2, rng.randrange(1, profile.max_tokens))),
        seconds=profile.pace_seconds * rng.choice((0.02, rng.random(), 2 * rng.random())),
        wait_seconds=profile.pace_seconds * rng.choice((0.0, 0.0, 0.3 * rng.random())),
        priority=rng.choice(list(Priority)),
        client_id=rng.choice(("", "a", "b")),
    )
