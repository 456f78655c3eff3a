"""The requests of a round: the same for every side, and new in every round."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

TOPICS: Final = (
    "a river delta", "the history of tea", "how bridges carry load", "a lighthouse keeper",
    "training a puppy", "the night sky in winter", "baking rye bread", "a chess opening",
    "repairing a bicycle", "coral reefs", "the first railways", "growing tomatoes",
    "a mountain hut", "how clocks work", "river otters", "learning the violin",
)  # fmt: skip
_FILLER: Final = (
    "The river rises in the hills above the town, where snow lies until the end of April. "
    "Past the old mill it turns south, and for seven miles there is no bridge. "
)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that start at once: each generates `num_tokens` tokens, greedily, past any end."""

    prompts: tuple[tuple[int, ...], ...]  # token ids, one prompt a stream
    num_tokens: int

    def to_json(self) -> dict[str, Any]:
        """What a load generator reads from its standard input."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Load:
        """The inverse of `to_json`."""
        return cls(tuple(tuple(p) for p in fields["prompts"]), int(fields["num_tokens"]))


def short_text(round_name: str, index: int) -> str:
    """The prompt of stream `index`. It differs from its first word on, so no cache helps."""
    topic = TOPICS[index % len(TOPICS)]
    return f"{round_name}-{index}. Here is a short text about {topic}. It begins like this:"


def long_text(round_name: str, num_tokens: int) -> str:
    """Text of more than `num_tokens` tokens, for a prompt to be cut from."""
    return f"{round_name}. " + _FILLER * (num_tokens // 20 + 1)
