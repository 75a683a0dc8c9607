"""What trainings of the same seeds say about two ways to train: differences in accuracy, and the verdict on them.

A seed decides the first weights and the order of the data, and both decide much of the accuracy. Trainings that share a
seed share that part, so they are compared seed by seed, and the difference has the smaller spread.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.location import estimate_location

SMALLEST_CHANGE = 0.005
"""A difference of less than half a point of accuracy is never called a loss or a gain."""
TOLERANCE = 0.01
"""Two ways whose difference surely lies within one point of accuracy do not differ in practice."""


class Change(StrEnum):
    """What a difference in accuracy, candidate less reference, says about the candidate."""

    LOST = "lost accuracy"
    GAINED = "gained accuracy"
    NO_DIFFERENCE = "no difference"
    UNRESOLVED = "unresolved"


def estimate_change(candidate: Mapping[int, float], reference: Mapping[int, float]) -> Estimate | None:
    """The difference over the seeds that both have, candidate less reference; None without one."""
    differences = [candidate[seed] - reference[seed] for seed in sorted(candidate.keys() & reference.keys())]
    return estimate_location(differences) if differences else None


def judge_change(difference: Estimate) -> Change:
    """Lost or gained where the interval excludes 0 and the effect is worth a word; as in `stats.judge` otherwise."""
    if difference.low is None or difference.high is None:
        return Change.UNRESOLVED
    if difference.high < 0 and difference.value <= -SMALLEST_CHANGE:
        return Change.LOST
    if difference.low > 0 and difference.value >= SMALLEST_CHANGE:
        return Change.GAINED
    if difference.low > -TOLERANCE and difference.high < TOLERANCE:
        return Change.NO_DIFFERENCE
    return Change.UNRESOLVED
