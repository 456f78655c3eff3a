"""Sampling as a pure function of row statistics; numpy and the core only.

`wanted_statistics` says what to ask the executor for, `choose` turns the answer into a token.
"""

from scheduler_service.sampling.params import validate
from scheduler_service.sampling.request import (
    WantedStatistics,
    is_chosen_by_executor,
    wanted_statistics,
    with_runner_up,
)
from scheduler_service.sampling.rng import Purpose, uniform
from scheduler_service.sampling.sampler import (
    NEED_FULL_ROW,
    Undecided,
    choose,
    choose_from_full_row,
)
from scheduler_service.sampling.statistics import RowStatistics, Statistic, row_statistics

__all__ = [
    "NEED_FULL_ROW",
    "Purpose",
    "RowStatistics",
    "Statistic",
    "Undecided",
    "WantedStatistics",
    "choose",
    "choose_from_full_row",
    "is_chosen_by_executor",
    "row_statistics",
    "uniform",
    "validate",
    "wanted_statistics",
    "with_runner_up",
]
