"""How many drafted tokens a verifier would accept, known from where a draft is right.

A draft that proposes its most likely token at each place has, as long as it is right, the same
context as the text itself. So whether it is right at each place of a finished text tells all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Totals over texts."""

    num_drafted: int
    num_accepted: int
    num_steps: int  # of the verifier, each of which emits one token more than it accepts

    @property
    def share(self) -> float:
        """Accepted of drafted tokens."""
        return self.num_accepted / max(1, self.num_drafted)

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens for each step of the verifier."""
        return (self.num_accepted + self.num_steps) / max(1, self.num_steps)


def simulated(texts: Iterable[Sequence[bool]], num_drafts: int) -> Acceptance:
    """Walk through texts with `num_drafts` (1 or more) tokens drafted at each step.

    Each text says of every generated token whether the draft, given all before it, proposes it.
    No token is drafted past a text's end.
    """
    if num_drafts < 1:
        raise ValueError(f"[acceptance] num_drafts must be at least 1, got {num_drafts}")
    drafted = accepted = steps = 0
    for right in texts:
        position = 0
        while position < len(right):
            # The verifier's own token takes the place after the accepted ones.
            tried = min(num_drafts, len(right) - position - 1)
            run = 0
            while run < tried and right[position + run]:
                run += 1
            drafted, accepted, steps = drafted + tried, accepted + run, steps + 1
            position += run + 1
    return Acceptance(drafted, accepted, steps)
