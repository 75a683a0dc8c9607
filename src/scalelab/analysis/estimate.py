"""A number with its interval: what every analysis returns and every table prints."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Domain = Literal["part", "amount", "signed"]
"""What a number can be: a part of a whole, from 0 to 1; an amount, 0 or more; a difference, of either sign."""
SIGNED_WORDS = frozenset(
    ("added", "change", "cost", "difference", "distance", "error", "excess", "exponent", "margin", "more", "saving")
)
OPEN_WORDS = frozenset(
    ("difference", "efficiency", "limit", "most", "nominal", "reach", "residual", "used", "variation")
)
"""Words in the names of numbers that are differences, and of ratios in percent that are not parts of a whole."""
DOMAINS: Mapping[str, Domain] = {
    "share": "part",
    "seconds": "amount",
    "bytes": "amount",
    "rate": "amount",
    "ratio": "amount",
    "count": "amount",
    "speedup": "amount",
    "efficiency": "amount",
    "throughput": "amount",
}
"""What a number can be, by its quantity in a table, or the last word of its name in a finding; others: either sign."""
ROUNDING = 1e-9
"""How far outside its domain sums of floating-point numbers may put a value that is on its edge."""


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

    @property
    def ends(self) -> tuple[float, float]:
        """Low and high; the value where one is unknown."""
        return self.value if self.low is None else self.low, self.value if self.high is None else self.high

    def holds(self, value: float) -> bool:
        """Whether a value lies in the interval."""
        low, high = self.ends
        return low <= value <= high

    def is_above(self, limit: float) -> bool:
        """Whether all of the interval is; not known without one."""
        return self.low is not None and self.low > limit

    def is_below(self, limit: float) -> bool:
        return self.high is not None and self.high < limit

    def map(self, function: Callable[[float], float]) -> Estimate:
        """The estimate of a monotone function of this one; a decreasing one swaps the ends.

        A rate from an interval of times that reaches below 0 has no interval: the function is not monotone there.
        """
        value = function(self.value)
        if self.low is None or self.high is None:
            return Estimate(value=value)
        low, high = sorted((function(self.low), function(self.high)))
        return Estimate(value=value, low=low, high=high) if low <= value <= high else Estimate(value=value)


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


def find_domain(name: str, usual: Domain) -> Domain:
    """What a number can be, by its name and what is usual for its quantity: `excess_seconds` is a difference."""
    words = set(name.split("_"))
    if words & SIGNED_WORDS:
        return "signed"
    return "amount" if usual == "part" and words & OPEN_WORDS else usual


def confine(estimate: Estimate, domain: Domain) -> Estimate | None:
    """The estimate with its interval cut to what is possible; None if the value itself is not.

    Noise gives such values: the difference of two medians that should be a time, a share whose parts were measured in
    different steps. They say that the measurement cannot tell, and nothing else.
    """
    numbers = [number for number in (estimate.low, estimate.value, estimate.high) if number is not None]
    if not all(math.isfinite(number) for number in numbers):
        return None
    if domain == "signed":
        return estimate
    least, most = 0.0, 1.0 if domain == "part" else math.inf
    if not least - ROUNDING <= estimate.value <= most + ROUNDING:
        return None
    if least <= min(numbers) and max(numbers) <= most:
        return estimate
    value, low, high = (
        None if number is None else min(max(number, least), most)
        for number in (estimate.value, estimate.low, estimate.high)
    )
    assert value is not None
    return Estimate(value=value, low=low, high=high)


PREDICTION_CONFIDENCE = 0.8


def enclose(value: float, drawn: Sequence[float]) -> Prediction:
    """A value with the 80 % interval of the results of drawing its inputs many times."""
    import numpy as np  # here: showing a run takes less time than importing it

    low, high = np.quantile(drawn, [(1 - PREDICTION_CONFIDENCE) / 2, (1 + PREDICTION_CONFIDENCE) / 2])
    return Prediction(value=value, low=float(min(low, value)), high=float(max(high, value)))
