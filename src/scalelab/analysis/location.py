"""The centre of a handful of numbers, one per round, with its 95 % interval.

The numbers are what each round says about the question: the log of a ratio, a difference, a fitted
fraction. There are few of them, and now and then a launch is hit by somebody else's burst of work and its
number is far off. The mean with Student's interval is the best answer without such launches and a poor one
with them: where one launch in twenty is hit, its error doubles. The Hodges–Lehmann estimate (Hodges &
Lehmann 1963) gives up 5 % of the mean's efficiency and is hardly moved. Its interval is Wilcoxon's
signed-rank test turned round (Hollander & Wolfe, "Nonparametric Statistical Methods", chapter 3). It is
exact for every symmetric distribution, and the log of the ratio of two equal configurations is symmetric by
construction.

With fewer than six numbers the signed-rank test cannot reach 95 % at all, and Student's interval is put
around the same centre. One number has no interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
from scipy.special import stdtrit

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.rounds import Floats

CONFIDENCE = 0.95
"""What an interval promises, everywhere in this package."""

TAIL = (1 - CONFIDENCE) / 2

FEWEST_FOR_SIGNED_RANK = 6
"""With five numbers the widest signed-rank interval, smallest to largest, covers 1 − 2 / 2⁵ = 93.75 %."""


def estimate_location(values: Sequence[float] | Floats) -> Estimate:
    """The Hodges–Lehmann centre of one or more independent values, with its 95 % interval."""
    data = np.asarray(values, dtype=np.float64)
    if not len(data):
        raise ValueError("nothing has no centre: leave out a configuration that gave no steps")
    walsh = _average_pairs(data)
    centre = float(np.median(walsh))
    if len(data) < 2:
        return Estimate(value=centre)
    if len(data) < FEWEST_FOR_SIGNED_RANK:
        arm = find_t_quantile(len(data) - 1) * float(data.std(ddof=1)) / math.sqrt(len(data))
        return Estimate(value=centre, low=centre - arm, high=centre + arm)
    position = _find_position(len(data))
    low, high = np.interp([position, len(walsh) - 1 - position], np.arange(len(walsh)), walsh)
    return Estimate(value=centre, low=float(low), high=float(high))


def find_t_quantile(degrees_of_freedom: float) -> float:
    """Student's t at 97.5 %: how many standard errors an arm of the interval has."""
    return float(stdtrit(degrees_of_freedom, 1 - TAIL))


def _average_pairs(data: Floats) -> Floats:
    """The Walsh averages, sorted: the mean of every pair, each value paired with itself too."""
    first, second = np.triu_indices(len(data))
    averages: Floats = np.sort((data[first] + data[second]) / 2)
    return averages


@cache
def _find_position(num_values: int) -> float:
    """How far from either end of the Walsh averages the limits lie, in ranks from 0.

    The k-th smallest average, from 0, is too high a limit with probability P(W ≤ k). Between the two ranks
    that enclose 2.5 % the limit is interpolated in that probability, as Hettmansperger & Sheather (1986) do
    for the median.
    """
    distribution = _tabulate_signed_rank(num_values)
    rank = int(np.searchsorted(distribution, TAIL, side="right")) - 1
    below, above = distribution[rank], distribution[rank + 1]
    return rank + float((TAIL - below) / (above - below))


def _tabulate_signed_rank(num_values: int) -> Floats:
    """P(W ≤ w) for w = 0, 1, …: each rank 1…n is in the sum W or not, with equal chance (Wilcoxon 1945)."""
    chances = np.ones(1)
    for rank in range(1, num_values + 1):
        chances = (np.pad(chances, (0, rank)) + np.pad(chances, (rank, 0))) / 2
    return np.cumsum(chances)
