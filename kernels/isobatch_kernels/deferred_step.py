"""Submitting steps to backends that cannot overlap them: a step is computed when it is finished."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from isobatch_kernels.step import Int32, PendingStep, Stat, StepInput, StepOutput

MAX_PENDING_STEPS = 2
"""Steps that may be submitted and not finished."""

_QUANTILE = np.uint32(Stat.QUANTILE)


class SubmitByRun:
    """Gives a backend with a `run` of its own its `submit`."""

    _steps: DeferredSteps | None = None

    def run(self, step: StepInput) -> StepOutput:
        """Computes a step (see `step.Backend`)."""
        raise NotImplementedError

    def submit(self, step: StepInput) -> PendingStep:
        """Keeps a step until it is finished; what is malformed in it is found only then."""
        if self._steps is None:
            self._steps = DeferredSteps(lambda each: self.run(each))
        return self._steps.submit(step)


class DeferredSteps:
    """Steps that were submitted, in order, and what the last one that was finished chose."""

    def __init__(self, run: Callable[[StepInput], StepOutput]) -> None:
        """Computes steps with `run`, which gets literal token ids alone."""
        self._run = run
        self._pending: deque[_DeferredStep] = deque()
        self._chosen = np.zeros(0, np.int32)

    def submit(self, step: StepInput) -> PendingStep:
        """Returns the step, to be computed later; raises ValueError when two are pending."""
        if len(self._pending) == MAX_PENDING_STEPS:
            raise ValueError(
                f"[step] at most {MAX_PENDING_STEPS} steps may be pending, got one more"
            )
        pending = _DeferredStep(self, step)
        self._pending.append(pending)
        return pending

    def finish(self, pending: _DeferredStep) -> StepOutput:
        """Computes the oldest pending step."""
        if not self._pending or self._pending[0] is not pending:
            raise ValueError("[step] steps must be finished once and in order, got another one")
        self._pending.popleft()
        step, before = pending.step, self._chosen
        # Whatever happens below, a later step does not get an older step's tokens.
        self._chosen = np.zeros(0, np.int32)
        output = self._run(with_literal_tokens(step, before))
        if self._pending:
            self._chosen = chosen_tokens(step, output)
        return output


class _DeferredStep:
    """Implements `step.PendingStep`."""

    __slots__ = ("_steps", "step")

    def __init__(self, steps: DeferredSteps, step: StepInput) -> None:
        self._steps = steps
        self.step = step

    @property
    def is_running(self) -> bool:
        return False

    def finish(self) -> StepOutput:
        return self._steps.finish(self)


def with_literal_tokens(step: StepInput, chosen: Int32) -> StepInput:
    """Returns a step whose token sources are filled in from `chosen`, the tokens before it.

    Raises ValueError for a source that is not there.
    """
    sources = step.token_sources
    if not len(sources):
        return step
    taken = sources >= 0
    if len(sources) != len(step.token_ids) or (sources[taken] >= len(chosen)).any():
        raise ValueError(
            f"[step] token_sources must be one a token, below {len(chosen)}, got {sources[:8]}"
        )
    token_ids = step.token_ids.copy()
    token_ids[taken] = chosen[sources[taken]]
    return replace(step, token_ids=token_ids, token_sources=np.zeros(0, np.int32))


def chosen_tokens(step: StepInput, output: StepOutput) -> Int32:
    """Returns (L,) the token that a step chose at each wanted position; 0 in a non-finite row."""
    drawn = (step.statistics & _QUANTILE) != 0
    chosen = np.where(drawn, output.quantile_ids, output.argmax_ids)
    rows = np.searchsorted(step.query_start_loc[1:], step.wanted, side="right")
    finite = output.non_finite_ops[rows] < 0
    return np.asarray(np.where(finite, np.maximum(chosen, 0), 0), np.int32)
