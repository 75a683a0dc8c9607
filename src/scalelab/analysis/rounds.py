"""Rounds: the step times of one configuration, launch by launch.

Every configuration is launched once per round, and the rounds of all configurations are interleaved. So two
things are true of every series: steps of one launch resemble each other more than steps of two launches,
and round `i` of one configuration ran next to round `i` of every other, under the same weather. The first
is why a round, not a step, is the unit that an interval counts; the second is why configurations are
compared round by round.

A round that gave nothing is an empty sequence: it keeps its place, so that the others stay aligned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Rounds = Sequence[Sequence[float]]
"""Positive numbers, one sequence per round, in the order in which the rounds ran."""

Floats = NDArray[np.float64]


def find_medians(rounds: Iterable[Sequence[float] | Floats]) -> Floats:
    """The median of each round; a round that gave nothing has NaN."""
    return np.array([np.median(steps) if len(steps) else np.nan for steps in rounds], dtype=np.float64)


def drop_empty(rounds: Rounds) -> list[Floats]:
    """The rounds that gave something, as arrays."""
    return [np.asarray(steps, dtype=np.float64) for steps in rounds if len(steps)]


def pair_medians(configurations: Sequence[Rounds]) -> Floats:
    """The medians of the rounds that all configurations completed: a row for each, a column per round.

    Series of unequal length were not run in the same rounds and share none.
    """
    if len({len(rounds) for rounds in configurations}) != 1:
        return np.empty((len(configurations), 0))
    medians = np.array([find_medians(rounds) for rounds in configurations])
    return medians[:, np.isfinite(medians).all(axis=0)]
