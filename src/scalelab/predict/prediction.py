"""A number that nobody has measured, with the interval in which it should lie four times out of five.

What cannot be right about a series: said, instead of extrapolated.

super-linear   a rank needs over 10 % less time per sample than on fewer ranks. More ranks share caches and clocks
               no better than that: the rows differ in something else, such as the batch
above peak     a model FLOP/s utilisation of more than 100 %: the operations or the peak are wrong
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scalelab.predict.tables import ScalingSeries

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


MOST_GAIN = 0.10


def find_doubts(series: ScalingSeries, utilization: Mapping[int, float] | None = None) -> list[str]:
    """Sentences about what is impossible in a series; none: it may be right."""
    return [*_find_jumps(series), *_find_excess(series, utilization or {})]


def _find_jumps(series: ScalingSeries) -> Iterator[str]:
    stretch, sizes = series.stretch, series.ranks
    for before, after in itertools.pairwise(sizes):
        gain = stretch[before] / stretch[after] - 1
        if gain > MOST_GAIN:
            yield (
                f"each of {after} ranks is {gain:.0%} faster than each of {before}: these rows differ in more than"
                " their ranks (the batch, the precision, the code), so nothing follows for other sizes"
            )


def _find_excess(series: ScalingSeries, utilization: Mapping[int, float]) -> Iterator[str]:
    for ranks, share in sorted(utilization.items()):
        if ranks in series.throughput and share > 1:
            yield f"the utilisation on {ranks} ranks is {share:.0%} of the peak: the operations or the peak are wrong"
