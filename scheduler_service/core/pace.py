"""How fast the executor is of late, against its cost curve.

Machines have slow and fast states, and a curve is measured with few points: what a prompt pays
deep in a context may be a guess. So two factors are kept, of steps that only decode and of steps
that do both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_WEIGHT: Final = 0.05
# A single late step is a pause, not the machine's speed.
_MOST_AT_ONCE: Final = 2.0
_LEAST, _MOST = 0.1, 10.0


@dataclass(slots=True)
class Pace:
    """Running averages of measured over predicted seconds.

    Attributes:
        decode: Seconds that a step of decode rows takes for each second of the curve.
        prompts: How many times that, for a step of decode rows and prompts.
    """

    decode: float = 1.0
    prompts: float = 1.0

    @property
    def mixed(self) -> float:
        """Seconds that a step of both takes for each second of the curve."""
        return self.decode * self.prompts

    def record(self, ratio: float, *, is_mixed: bool) -> None:
        """Record measured over predicted seconds of one step."""
        if is_mixed:
            self.prompts = _towards(self.prompts, ratio / self.decode)
        else:
            self.decode = _towards(self.decode, ratio)


def _towards(average: float, seen: float) -> float:
    seen = min(max(seen, average / _MOST_AT_ONCE), average * _MOST_AT_ONCE)
    return min(max(average + _WEIGHT * (seen - average), _LEAST), _MOST)
