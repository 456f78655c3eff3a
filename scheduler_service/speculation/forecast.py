"""The next step as far as it can be told before it is planned."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_service.core.request import Request, SequenceId
from scheduler_service.core.state import SchedulerState
from scheduler_service.core.step_budget import StepLoad, share_step
from scheduler_service.speculation.control import PlainStep
from scheduler_service.speculation.costs import StepCosts, assumed_curve


class Forecast:
    """Who decodes in the next step, and what it costs."""

    def __init__(
        self, state: SchedulerState, costs: StepCosts, *, goes_ahead: bool = False
    ) -> None:
        """Look at `state`; `goes_ahead` says whether steps without drafts may be sent ahead."""
        # What asking the draft model took.
        self.spent_seconds = 0.0
        self.decoding: dict[SequenceId, Request] = {}
        self._costs = costs
        self._curve = state.limits.cost_curve
        self._num_positions = 0
        self._prompts = StepLoad(self._curve)
        prompts: list[Request] = []
        for request in state.running.values():
            if request.is_paused:
                continue
            if request.num_uncomputed_tokens > 1:
                prompts.append(request)
            else:
                self.decoding[request.sequence_id] = request
                self._num_positions += request.num_computed_tokens
        shares = share_step(state, ()).num_tokens if prompts else {}
        for request in prompts:
            share = shares.get(request.request_id, 0)
            self._prompts.add_prompt(share, request.num_computed_tokens)
        self._goes_ahead = goes_ahead and not prompts
        num_tokens = len(self.decoding) + self._prompts.num_prompt_tokens
        # Drafts that the limits of a step leave room for.
        self.num_room = state.limits.max_num_batched_tokens - num_tokens

    def step(self, sequence_ids: Sequence[SequenceId], *, is_ahead: bool = False) -> PlainStep:
        """Return the step without drafts, with a token for each of these sequences.

        `is_ahead` says that it was sent ahead, so that it had what that saves.
        """
        count = len(sequence_ids)
        later = self._costs.seconds(count, self.curve)
        saved = self._costs.ahead_seconds(count, self.curve) if self._goes_ahead else 0.0
        later -= saved
        if is_ahead:
            return PlainStep(sequence_ids, self.num_room, lambda n: later, later)
        return PlainStep(
            sequence_ids, self.num_room, self._seconds, later, self.spent_seconds, saved
        )

    def prompt_seconds(self, request: Request) -> float:
        """Return what the prompt of a request took that decodes now; 0 without a curve."""
        num_tokens = request.num_computed_tokens - request.num_cached_tokens
        return self._costs.pace * self._curve.step_seconds(0, max(0, num_tokens))

    def curve(self, num_rows: int) -> float:
        """Return the curve's seconds of a step of decode rows alone; drafts count as rows."""
        if not self._curve:
            return assumed_curve(num_rows)
        return self._curve.step_seconds(num_rows, num_rows, self._num_positions_of(num_rows))

    def _num_positions_of(self, num_rows: int) -> int:
        # A draft looks at about as many positions as the rows themselves.
        return self._num_positions * num_rows // max(1, len(self.decoding))

    def _seconds(self, num_rows: int) -> float:
        prompts = self._prompts
        if not prompts.num_prompt_tokens:
            return self._costs.seconds_beyond(len(self.decoding), num_rows, self.curve)
        num_tokens = num_rows + prompts.num_prompt_tokens
        if not self._curve:
            return self._costs.pace * assumed_curve(num_tokens)
        return self._costs.pace * self._curve.step_seconds(
            num_rows, num_tokens, self._num_positions_of(num_rows), prompts.num_prompt_positions
        )
