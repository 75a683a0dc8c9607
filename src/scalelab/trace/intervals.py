"""Sets of half-open intervals [start, end) of integer nanoseconds, as two arrays. All results are exact."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]


def merge(start: Times, end: Times) -> tuple[Times, Times]:
    """The union as disjoint intervals in order; those that touch become one, empty ones vanish."""
    is_kept = end > start
    start, end = start[is_kept], end[is_kept]
    if not len(start):
        return start, end
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    is_first = np.empty(len(start), dtype=bool)
    is_first[0] = True
    np.greater(start[1:], reach[:-1], out=is_first[1:])
    first = np.flatnonzero(is_first)
    last = np.append(first[1:], len(start)) - 1
    return start[first], reach[last]


def measure(start: Times, end: Times) -> int:
    """The length of the union."""
    start, end = merge(start, end)
    return int((end - start).sum())


def clip(start: Times, end: Times, low: int, high: int) -> tuple[Times, Times]:
    """What lies within [low, high)."""
    start, end = np.clip(start, low, high), np.clip(end, low, high)
    return start, end
