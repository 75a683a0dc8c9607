"""Walsh averages and the signed-rank distribution: what the Hodges–Lehmann centre and its interval are read from.

A few hundred numbers have all their pairs listed. Of more, single averages are found without listing any, in time that
grows hardly faster than the numbers: 2,500 rounds have three million pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MOST_LISTED = 200
"""With more values than this, pairs are not listed and the signed-rank distribution is normal to three digits."""
FEW_PAIRS = 5000
"""Listed at once."""


def select_averages(data: Floats, ranks: Sequence[int]) -> list[float]:
    """The Walsh averages (the mean of every pair, each value paired with itself too) of the given ranks from 0."""
    if len(data) <= MOST_LISTED:
        first, second = np.triu_indices(len(data))
        averages: Floats = np.sort((data[first] + data[second]) / 2)
        return [float(averages[rank]) for rank in ranks]
    return [_search_average(np.sort(data), rank) for rank in ranks]


def _search_average(data: Floats, rank: int) -> float:
    """One Walsh average of many sorted values: limits are narrowed until few pairs lie between them, which are listed.

    The averages up to a limit are counted without listing them, as Monahan (1984) does; the next limit is the weighted
    median of what is left in every row of pairs (Johnson & Mizoguchi 1978), so that at least a quarter drops out.
    """
    num = len(data)
    own = np.arange(num)

    def count(limit: float) -> NDArray[np.int64]:
        """How many values from its own place on pair with each value to at most the limit."""
        return np.asarray(np.maximum(np.searchsorted(data, 2 * limit - data, side="right") - own, 0))

    rounding = 2 * float(np.spacing(np.abs(data).max()))
    below, up_to = np.zeros_like(own), num - own
    while int((between := up_to - below).sum()) > FEW_PAIRS:
        rows = np.flatnonzero(between)
        middles = (data[rows] + data[rows + below[rows] + between[rows] // 2]) / 2
        middle = _weigh_median(middles, between[rows])
        if int((counted := count(middle + rounding)).sum()) <= rank:
            below = counted
        elif int((counted := count(middle - rounding)).sum()) > rank:
            up_to = counted
        else:
            return middle  # of equal averages there may be thousands
    firsts = np.repeat(own, between)
    starts = np.repeat(own + below - (np.cumsum(between) - between), between)
    averages = np.sort((data[firsts] + data[starts + np.arange(len(firsts))]) / 2)
    return float(averages[rank - int(below.sum())])


def _weigh_median(values: Floats, weights: NDArray[np.int64]) -> float:
    """The value up to which half of the weight lies."""
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(values[order[np.searchsorted(total, total[-1] / 2)]])


@cache
def find_position(num_values: int, tail: float) -> float:
    """How far from either end of the Walsh averages the limits lie, in ranks from 0.

    The k-th smallest average, from 0, is too high a limit with probability P(W ≤ k). Between the two ranks
    that enclose the tail the limit is interpolated in that probability, as Hettmansperger & Sheather (1986) do
    for the median.
    """
    if num_values > MOST_LISTED:
        from scipy.special import ndtri

        variance = num_values * (num_values + 1) * (2 * num_values + 1) / 24
        return num_values * (num_values + 1) / 4 - 0.5 + float(ndtri(tail)) * math.sqrt(variance)
    distribution = tabulate_signed_rank(num_values)
    rank = int(np.searchsorted(distribution, tail, side="right")) - 1
    below, above = distribution[rank], distribution[rank + 1]
    return rank + float((tail - below) / (above - below))


def tabulate_signed_rank(num_values: int) -> Floats:
    """P(W ≤ w) for w = 0, 1, …: each rank 1…n is in the sum W or not, with equal chance (Wilcoxon 1945)."""
    chances = np.ones(1)
    for rank in range(1, num_values + 1):
        chances = (np.pad(chances, (0, rank)) + np.pad(chances, (rank, 0))) / 2
    return np.cumsum(chances)
