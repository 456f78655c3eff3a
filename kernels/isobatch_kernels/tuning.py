"""What a backend leaves open for speed: how steps of so many rows are computed.

No bit of a result depends on a choice, so choosing wrong costs time and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


@runtime_checkable
class Tunable(Protocol):
    """A backend whose linear layers can be computed in more than one way."""

    def choices(self, num_rows: int) -> Sequence[str]:
        """Names of the ways that differ for a step of `num_rows` rows, the default first."""
        ...

    def choose(self, choices: Mapping[int, str]) -> None:
        """Use these from now on: by the most rows of a step, which has the way of the next bound.

        Steps beyond the last bound have the default, and so have all with an empty mapping.

        Raises:
            ValueError: an unknown name, or a bound below 1; nothing changes.
        """
        ...


@runtime_checkable
class Proposing(Tunable, Protocol):
    """A backend that can also time its layers one by one, and so find a way of its own."""

    def propose(self, num_rows: int, clock: Callable[[], int]) -> str:
        """A name that `choose` knows for `num_rows`, to be compared with `choices`.

        Takes about as long as a few steps; `clock` counts nanoseconds.
        """
        ...


def choice_for(choices: Mapping[int, str], num_rows: int) -> str | None:
    """The choice that applies to a number of rows; None for the default."""
    bounds = [bound for bound in choices if num_rows <= bound]
    return choices[min(bounds)] if bounds else None
