"""When nobody looks for drafts: looking itself takes time, and often there are none.

A look costs some tenths of a millisecond where a forward pass has emptied the caches. So after some
that found nothing worth a try the next one comes later, each time after twice as many steps. What
is found, and whoever comes or goes, ends that.
"""

from __future__ import annotations

from typing import Final

QUIET_LOOKS: Final = 4
"""Looks that find nothing, after which none is expected to at the next step."""

SHORTEST_NAP: Final = 1
LONGEST_NAP: Final = 8
"""Most steps from one look to the next."""


class Naps:
    """Which steps are not looked at, and how many there were since accounts were last kept."""

    def __init__(self) -> None:
        # Looks since one found something or the draft model was asked.
        self._num_quiet = 0
        # Steps from the last look to the next, and how many of them are still to come.
        self._length = 0
        self._num_left = 0
        # Who ran at the last look that began a nap.
        self._num_running = 0
        self._num_unbooked = 0

    def is_on(self, num_running: int) -> bool:
        """Return whether nobody looks now, when so many requests run."""
        if self._num_left and num_running != self._num_running:
            self._num_left = self._length = 0
        return self._num_left > 0

    def note_look(
        self, num_running: int, longest: int, *, has_found: bool, has_asked: bool = False
    ) -> None:
        """Take in a look for drafts of one step.

        Args:
            num_running: Requests that run.
            longest: Most steps to the next look; 0 where each step is to be looked at.
            has_found: Whether something is drafted.
            has_asked: Whether the draft model was asked before that.
        """
        self._num_quiet = 0 if has_found or has_asked else self._num_quiet + 1
        if has_found:
            self._length = 0
        elif self._num_quiet >= QUIET_LOOKS:
            self._length = min(longest, 2 * self._length or SHORTEST_NAP)
            self._num_left, self._num_running = self._length, num_running

    def count_step(self, *, was_looked_at: bool) -> int:
        """Count a computed step.

        Returns the steps before it that were not looked at and are to be booked together with it;
        0 for one that was not looked at itself.
        """
        self._num_left = max(0, self._num_left - 1)
        if not was_looked_at:
            self._num_unbooked += 1
            return 0
        num_unbooked, self._num_unbooked = self._num_unbooked, 0
        return num_unbooked
