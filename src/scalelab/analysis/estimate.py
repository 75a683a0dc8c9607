"""A number with its interval: what every analysis returns and every table prints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A value with its 95 % interval; an unknown interval is None, never a point."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def half_width(self) -> float | None:
        """The larger side of the interval: what ± prints."""
        if self.low is None or self.high is None:
            return None
        return max(self.high - self.value, self.value - self.low)

    def map(self, function: Callable[[float], float]) -> Estimate:
        """The estimate of a monotone function of this one; a decreasing one swaps the ends."""
        value = function(self.value)
        if self.low is None or self.high is None:
            return Estimate(value=value)
        ends = (function(self.low), function(self.high))
        return Estimate(value=value, low=min(ends), high=max(ends))


@dataclass(frozen=True, kw_only=True)
class Prediction(Estimate):
    """A value that was not measured, with its 80 % interval.

    It is narrower than a measurement's 95 % because it has to be useful where nothing was measured.
    """

    low: float
    high: float

    def map(self, function: Callable[[float], float]) -> Prediction:
        ends = (function(self.low), function(self.high))
        return Prediction(value=function(self.value), low=min(ends), high=max(ends))

    def holds(self, value: float) -> bool:
        """Whether a value lies in the interval."""
        return self.low <= value <= self.high
