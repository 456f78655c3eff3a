"""What drafting costs: passes of the draft model, and the way to the executor and back."""

from __future__ import annotations

from typing import Final

from scheduler_service.core.cost_curve import CostCurve
from scheduler_service.speculation.draft_work import DraftWork

ASSUMED_PASS: Final = 0.15
"""A pass in plain steps, where no curve was measured."""

FIRST_OVERHEAD_SECONDS: Final = 0.0005
"""The way there and back before any was timed."""

_DECAY: Final = 0.95
_MAX_OUTLIER: Final = 4.0


class DraftCosts:
    """Seconds of requests to the draft model, corrected by those that were made."""

    def __init__(self, curve: CostCurve) -> None:
        """Expect of passes what the draft model's cost curve says; it may be empty."""
        self._curve = curve
        self._taken = 0.0
        self._expected = 0.0
        self._overhead = FIRST_OVERHEAD_SECONDS
        # Of a step of the target without drafts, for where there is no curve.
        self._plain_seconds = 0.0

    @property
    def overhead_seconds(self) -> float:
        """Expected time of a request beside its passes."""
        return self._overhead

    def set_plain_step(self, seconds: float) -> None:
        """Note what a step of the target takes now."""
        self._plain_seconds = seconds

    def pass_seconds(self, num_rows: int, num_positions: int = 0) -> float:
        """Return the time of a pass with a token for each row, over so many cached positions."""
        return self._pace * self._raw(num_rows, num_rows, num_positions)

    def catch_up_seconds(self, num_tokens: int) -> float:
        """Return the time of a pass over so many known tokens of one sequence."""
        return self._pace * self._raw(1, num_tokens, 0)

    def _raw(self, num_rows: int, num_tokens: int, num_positions: int) -> float:
        if not self._curve:
            return self._plain_seconds * ASSUMED_PASS * (1.0 + (num_tokens - 1) / 16)
        return self._curve.step_seconds(num_rows, num_tokens, num_positions)

    @property
    def _pace(self) -> float:
        return self._taken / self._expected if self._expected else 1.0

    def work_seconds(self, work: DraftWork, num_positions: int = 0) -> float:
        """Return what all passes of a request take at most, without the way there and back."""
        depths = [row.max_drafts for row in work.rows]
        num_tokens = sum(len(row.token_ids) for row in work.rows)
        seconds = self._pace * self._raw(len(work.rows), num_tokens, num_positions)
        for depth in range(1, max(depths)):
            seconds += self.pass_seconds(sum(each > depth for each in depths), num_positions)
        return seconds

    def observe(self, expected_seconds: float, pass_seconds: float, wall_seconds: float) -> None:
        """Take in a request.

        Args:
            expected_seconds: What its passes were expected to take, as many as there were.
            pass_seconds: What they took.
            wall_seconds: From before it was sent to after it was answered.
        """
        if expected_seconds > 0 and pass_seconds > 0:
            by_curve = expected_seconds / self._pace
            limited = min(pass_seconds, _MAX_OUTLIER * expected_seconds)
            self._taken = self._taken * _DECAY + limited
            self._expected = self._expected * _DECAY + by_curve
        overhead = min(max(0.0, wall_seconds - pass_seconds), _MAX_OUTLIER * self._overhead)
        self._overhead += (1.0 - _DECAY) * (overhead - self._overhead)
