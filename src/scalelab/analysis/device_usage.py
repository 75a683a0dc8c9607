"""How busy a device was over time: its mean, its spread, its idle stretches, and tenths of the time.

Every number weighs an interval by its length. Launches, not intervals, are what a confidence interval counts, as with
step times: intervals of one launch resemble each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import estimate_over_rounds
from scalelab.records.observations import DeviceLoad

IDLE = 0.1
"""An interval in which a device was busy for less than this share of it counts as idle."""
NUM_SLICES = 10


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What was seen of one device in one launch, and the stretch of time that counts."""

    loads: Sequence[DeviceLoad]
    start_seconds: float
    end_seconds: float

    @property
    def counted(self) -> list[DeviceLoad]:
        """The intervals that lie wholly within the stretch."""
        return [
            load
            for load in self.loads
            if load.seconds - load.interval_seconds >= self.start_seconds and load.seconds <= self.end_seconds
        ]


@dataclass(frozen=True, kw_only=True)
class Utilization:
    """One device over all launches."""

    busy: Estimate
    """The mean over time."""
    low: float
    """The 5th percentile of the intervals."""
    high: float
    """The 95th."""
    idle: Estimate
    """The share of time in intervals in which it hardly did anything."""
    slices: tuple[float | None, ...]
    """The mean of every tenth of the time, over launches; None where no interval fell into it."""


def describe_utilization(launches: Sequence[Launch]) -> Utilization | None:
    """One device; None where no interval counts, as in a launch that is shorter than two looks."""
    counted = [launch.counted for launch in launches]
    every = [load for loads in counted for load in loads]
    if not every:
        return None
    low, high = np.quantile([load.busy for load in every], [0.05, 0.95])
    return Utilization(
        busy=_estimate_share(_weigh_busy(every), [_weigh_busy(loads) for loads in counted if loads]),
        low=float(low),
        high=float(high),
        idle=_estimate_share(_weigh_idle(every), [_weigh_idle(loads) for loads in counted if loads]),
        slices=slice_time(launches),
    )


def slice_time(launches: Sequence[Launch], num_slices: int = NUM_SLICES) -> tuple[float | None, ...]:
    """The mean of each of so many equal parts of the time; an interval counts where its middle lies."""
    parts: list[list[DeviceLoad]] = [[] for _ in range(num_slices)]
    for launch in launches:
        length = launch.end_seconds - launch.start_seconds
        for load in launch.counted:
            middle = load.seconds - load.interval_seconds / 2 - launch.start_seconds
            parts[min(num_slices - 1, int(num_slices * middle / length))].append(load)
    return tuple(_weigh_busy(part) if part else None for part in parts)


def _estimate_share(value: float, per_launch: Sequence[float]) -> Estimate:
    """The interval of a share ends at 0 and at 1."""
    return estimate_over_rounds(value, per_launch).map(lambda end: min(1.0, max(0.0, end)))


def _weigh_busy(loads: Sequence[DeviceLoad]) -> float:
    return float(np.average([load.busy for load in loads], weights=[load.interval_seconds for load in loads]))


def _weigh_idle(loads: Sequence[DeviceLoad]) -> float:
    weights = [load.interval_seconds for load in loads]
    return float(np.average([load.busy < IDLE for load in loads], weights=weights))
