"""What a step takes on the simulated machine, from a cost curve that was measured on a real one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from scheduler_service.core import TokenRowBatch
from scheduler_service.core.cost_curve import CostCurve, CostPoint


def load_curve(path: Path) -> CostCurve:
    """Read the curve of a file that docs/measurements holds."""
    return CostCurve(
        CostPoint(
            each["num_rows"], each["num_tokens"], each["context_length"], each["duration_ns"] * 1e-9
        )
        for each in json.loads(path.read_text())["points"]
    )


class Machine:
    """Times of steps, as the curve expects them.

    Attributes:
        curve: What was measured; the product's policy plans by it.
    """

    def __init__(self, curve: CostCurve) -> None:
        """Take a curve that is not empty."""
        self.curve = curve
        self._longest = curve.prompt_sizes[-1]

    def seconds(self, rows: Iterable[tuple[int, int]]) -> float:
        """Return the time of a step of rows (tokens, cached positions before them).

        A row that is longer than any that was measured attends to its own earlier pieces, as it
        would in steps of their own; otherwise a prompt in one piece would cost too little.
        """
        num_decode = num_tokens = num_positions = num_prompt_positions = 0
        for length, start in rows:
            num_tokens += length
            if length == 1:
                num_decode += 1
                num_positions += start
                continue
            num_prompt_positions += length * start
            for piece in range(0, length, self._longest):
                num_prompt_positions += piece * min(self._longest, length - piece)
        if not num_tokens:
            return 0.0
        return self.curve.step_seconds(num_decode, num_tokens, num_positions, num_prompt_positions)

    def step_seconds(self, batch: TokenRowBatch) -> float:
        """Return the time of a batch."""
        return self.seconds([(len(row.token_ids), row.start_position) for row in batch.rows])
