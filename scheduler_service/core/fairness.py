"""Fair shares of clients: whose turn it is, by the tokens that each was served.

The rule is that of virtual token counters (Sheng et al., "Fairness in Serving Large Language
Models", OSDI 2024): each client has a counter of what it was served, the client with the lowest
one is next, and a client that comes back after a while starts from the lowest counter of those
that wait, so that nobody saves up turns.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

OUTPUT_WEIGHT: Final = 2
"""What a generated token costs in tokens of a prompt: it needs a step of its own."""

MAX_CLIENTS: Final = 1024
"""Counters that are kept; beyond, those of the clients that came longest ago are forgotten."""


class FairShare:
    """The counters of one priority class. Every operation but `join` is O(1)."""

    __slots__ = ("_last", "_served")

    def __init__(self) -> None:
        self._served: OrderedDict[str, int] = OrderedDict()
        # The counter of the client whose request was admitted last, before that request.
        self._last = 0

    def served(self, client_id: str) -> int:
        """Return a client's counter in tokens of a prompt."""
        return self._served.get(client_id, self._last)

    def join(self, client_id: str, waiting: Iterable[str]) -> None:
        """Lift the counter of a client that had nobody waiting to those of the `waiting` ones."""
        floor = min((self.served(other) for other in waiting), default=self._last)
        self._served[client_id] = max(self.served(client_id), floor)
        self._served.move_to_end(client_id)
        while len(self._served) > MAX_CLIENTS:
            self._served.popitem(last=False)

    def admit(self, client_id: str, num_tokens: int) -> None:
        """Count a prompt that is about to run."""
        self._last = max(self._last, self.served(client_id))
        self.charge(client_id, num_tokens)

    def charge(self, client_id: str, num_tokens: int) -> None:
        """Count tokens that a client was served."""
        served = self._served
        served[client_id] = served.get(client_id, self._last) + num_tokens
