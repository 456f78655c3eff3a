"""A step on its way: what was handed to the device, and how it becomes a StepOutput."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isobatch_kernels.metal.arrays import LibraryArray
    from isobatch_kernels.metal.forward import StepWork
    from isobatch_kernels.metal.non_finite import Watched
    from isobatch_kernels.metal.statistics import DeviceStatistics
    from isobatch_kernels.step import StepOutput


@dataclass(slots=True)
class SubmittedStep:
    """Implements `step.PendingStep`: everything was enqueued, and the device works on it."""

    work: StepWork
    markers: list[LibraryArray]  # one a stage, there once the stage has been computed
    watched: Watched
    statistics: DeviceStatistics | None
    began_ns: int
    complete: Callable[[SubmittedStep], StepOutput]

    @property
    def is_running(self) -> bool:
        """The device computes it whether anybody waits or not."""
        return True

    def finish(self) -> StepOutput:
        """Waits for the results (see `step.PendingStep`)."""
        return self.complete(self)
