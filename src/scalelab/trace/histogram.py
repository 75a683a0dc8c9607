"""The distribution of any number of times in a fixed amount of memory.

Times fall into bins whose width is 1/64 of their power of two, so that a quantile is at most 0.8 % off; below 128 ns it
is exact. The idea is that of HdrHistogram (Gil Tene).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BITS = 6
"""A power of two is cut into 2^BITS bins."""
EXACT_BELOW = 2 << BITS
NUM_BINS = EXACT_BELOW + (63 - BITS) * (1 << BITS)


class Histogram:
    """Counts times that are not negative, in nanoseconds."""

    def __init__(self) -> None:
        self._count = np.zeros(NUM_BINS, dtype=np.int64)

    @property
    def count(self) -> int:
        return int(self._count.sum())

    def add(self, times: NDArray[np.int64]) -> None:
        np.add.at(self._count, find_bins(times), 1)

    def find_quantile(self, share: float) -> float | None:
        """The time that `share` of all do not exceed, to within half a bin; None: there are none."""
        if not self.count:
            return None
        reached = np.cumsum(self._count)
        index = int(np.searchsorted(reached, max(1.0, share * reached[-1])))
        if index < EXACT_BELOW:
            return float(index)
        shift, place = divmod(index, 1 << BITS)
        low = ((1 << BITS) + place) << (shift - 1)
        return low + ((1 << (shift - 1)) - 1) / 2


def find_bins(times: NDArray[np.int64]) -> NDArray[np.int64]:
    """The bin of every time."""
    # A double has the leading bit of an integer below 2^53 right, and those above only tell ages of the universe apart.
    exponent = np.frexp(times.astype(np.float64))[1].astype(np.int64)
    shift = np.maximum(exponent - 1 - BITS, 0)
    return (shift << BITS) + (times >> shift)
