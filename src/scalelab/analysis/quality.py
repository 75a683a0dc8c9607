"""How good a measurement is, in numbers: outliers, drift and noise.

Everything here is relative to a median and robust: a spike must not hide another, and must not look like
noise. What to say about the numbers is the report's business.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scalelab.analysis.rounds import Floats, Rounds, drop_empty, find_medians
from scalelab.analysis.warmup import MAD_TO_DEVIATION, find_step_medians

OUTLIER_DEVIATIONS = 3.5
"""Iglewicz & Hoaglin (1993): a modified z-score above 3.5 marks an outlier."""

OUTLIER_RATIO = 1.5
"""And it must be half as long again as the median: a tight series has harmless outliers."""

DRIFT_CHANCE = 0.02
"""How often a series without a trend may be taken for one with it; five values can reach that."""

SMALLEST_DRIFT = 0.03
"""A trend that changes times by less than 3 % from first to last is not worth a warning."""


@dataclass(frozen=True, kw_only=True)
class Outlier:
    """A step that took much longer than the others of its launch."""

    round: int
    """Index into the rounds, from 0."""
    step: int
    """Index into the steps of that round, from 0."""
    ratio: float
    """Its time over the median of its launch."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """A trend of the step time: relative changes from first to last, None where there is no trend."""

    change_over_rounds: float | None
    change_within_launches: float | None


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Robust relative standard deviations; None where there is too little to tell."""

    within_ratio: float | None
    """Of the steps of a launch around its median: the median over launches."""
    between_ratio: float | None
    """Of the launches' medians."""


def find_outliers(rounds: Rounds) -> list[Outlier]:
    """The steps that are far above the median of their launch, by both its noise and its length."""
    found: list[Outlier] = []
    for index, steps in enumerate(rounds):
        if not len(steps):
            continue
        times = np.asarray(steps, dtype=np.float64)
        median = float(np.median(times))
        limit = max(median * (1 + OUTLIER_DEVIATIONS * _measure_spread(times)), median * OUTLIER_RATIO)
        found += [
            Outlier(round=index, step=int(step), ratio=float(times[step] / median))
            for step in np.flatnonzero(times > limit)
        ]
    return found


def measure_noise(rounds: Rounds) -> Noise:
    """The robust relative spread within launches, and of the launches' medians."""
    series = drop_empty(rounds)
    within = [_measure_spread(steps) for steps in series if len(steps) > 1]
    return Noise(
        within_ratio=float(np.median(within)) if within else None,
        between_ratio=_measure_spread(find_medians(series)) if len(series) > 1 else None,
    )


def find_drift(rounds: Rounds) -> Drift | None:
    """The trend over the rounds and within the launches, where there is one of any consequence."""
    series = drop_empty(rounds)
    relative = [(steps / np.median(steps)).tolist() for steps in series]
    over_rounds = _find_trend(find_medians(series))
    within_launches = _find_trend(find_step_medians(relative))
    if over_rounds is None and within_launches is None:
        return None
    return Drift(change_over_rounds=over_rounds, change_within_launches=within_launches)


def _measure_spread(values: Floats) -> float:
    """The median absolute deviation, as a standard deviation relative to the median."""
    centre = np.median(values)
    return float(MAD_TO_DEVIATION * np.median(np.abs(values - centre)) / centre)


def _find_trend(values: Floats) -> float | None:
    """The relative change from first to last, where it is both significant and large enough.

    The slope is the median of the slopes of all pairs (Theil 1950, Sen 1968); whether there is one is Mann's test
    (1945), which is Kendall's of the values against their order.
    """
    from scipy.stats import kendalltau, theilslopes  # here, because loading it takes longer than all that `--help` does

    if len(values) < 2 or np.ptp(values) == 0:
        return None
    order = np.arange(len(values))
    change = float(theilslopes(values, order).slope) * (len(values) - 1) / float(np.median(values))
    chance = float(kendalltau(order, values).pvalue)
    return change if abs(change) >= SMALLEST_DRIFT and chance <= DRIFT_CHANCE else None
