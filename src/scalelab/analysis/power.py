"""How a time grows with a size: the exponent of T ∝ xᵃ.

On double logarithmic paper a power is a straight line and a its slope, here by least squares. a = 1 is growth in
proportion, 2 that of a matrix product with its width, 0 a time that does not depend on the size at all. Most times are
sums of several such terms, so a is not a constant: it is the mean slope over the sizes that were measured, and rises
towards the largest exponent as the sizes grow.

The interval comes from the rounds: the slope of each alone, as everywhere (`stats.py`). It does not say whether a power
describes the times, for which `residual_ratio` is there, from three sizes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.location import estimate_location
from scalelab.analysis.rounds import Floats, Rounds, pair_medians
from scalelab.analysis.stats import estimate_median


@dataclass(frozen=True, kw_only=True)
class PowerFit:
    """T ∝ xᵃ as fitted to times of several sizes."""

    exponent: Estimate
    smallest: float
    largest: float
    residual_ratio: float | None
    """The root mean square of the relative residuals; None for two sizes, which determine the line."""


def fit_power(times: Mapping[float, Rounds]) -> PowerFit | None:
    """Fit the exponent to step times by size; None for fewer than two positive sizes that gave any."""
    sizes = sorted(size for size, rounds in times.items() if size > 0 and any(len(steps) for steps in rounds))
    if len(sizes) < 2:
        return None
    centres = [estimate_median(times[size]).value for size in sizes]
    slopes = [find_exponent(sizes, column) for column in pair_medians([times[size] for size in sizes]).T]
    return PowerFit(
        exponent=estimate_location(slopes) if slopes else Estimate(value=find_exponent(sizes, centres)),
        smallest=sizes[0],
        largest=sizes[-1],
        residual_ratio=_measure_residual(sizes, centres) if len(sizes) > 2 else None,
    )


def find_exponent(sizes: Sequence[float], values: Sequence[float] | Floats) -> float:
    """The slope of the logs, by least squares."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def _measure_residual(sizes: Sequence[float], values: Sequence[float]) -> float:
    slope, level = np.polyfit(np.log(sizes), np.log(values), 1)
    fitted = np.exp(level + slope * np.log(sizes))
    return float(np.sqrt(np.mean((fitted / np.asarray(values) - 1) ** 2)))
