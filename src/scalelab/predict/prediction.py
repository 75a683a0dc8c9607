"""A number that nobody has measured, with the interval in which it should lie four times out of five."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.8
"""A prediction's interval is narrower than a measurement's 95 %: it has to be useful where nothing was measured."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A value with its 80 % interval."""

    value: float
    low: float
    high: float

    def map(self, function: Callable[[float], float]) -> Prediction:
        """The prediction of a monotone function of this one; a decreasing one swaps the ends."""
        ends = (function(self.low), function(self.high))
        return Prediction(value=function(self.value), low=min(ends), high=max(ends))

    def holds(self, value: float) -> bool:
        """Whether a value lies in the interval."""
        return self.low <= value <= self.high


def enclose(value: float, drawn: Sequence[float]) -> Prediction:
    """A value with the interval of what came out when its inputs were drawn many times."""
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Prediction(value=value, low=float(min(low, value)), high=float(max(high, value)))
