"""How long the phases of a step took."""

from dataclasses import dataclass

from scheduler_service.metrics import StepPhase


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Monotonic times in seconds at the borders of a step's phases."""

    started: float
    planned: float
    # Of the time from start to planned: waiting for the executor to open sequences and to draft.
    opening_seconds: float
    written: float
    fanned_out: float
    answered: float
    applied: float

    def phases(self, executor_seconds: float) -> dict[StepPhase, float]:
        """Return the seconds of each phase; they add up to `applied - started`.

        `executor_seconds` is the executor's own account of its time.
        """
        waited = self.answered - self.fanned_out
        forward = min(executor_seconds, waited)
        return {
            StepPhase.PLAN: self.planned - self.started - self.opening_seconds,
            StepPhase.FANOUT: self.fanned_out - self.written,
            StepPhase.FORWARD: forward,
            StepPhase.TRANSPORT: self.opening_seconds
            + (self.written - self.planned)
            + (waited - forward),
            StepPhase.SAMPLE: self.applied - self.answered,
        }
