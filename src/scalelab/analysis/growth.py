"""How a time grows with a size (the exponent of T ∝ xᵃ), and how long a much larger model would train.

On double logarithmic axes a power is a straight line with slope a, fitted by least squares. a = 1 is proportional
growth, 2 that of a matrix product with its width, 0 no dependence on the size. Most times are sums of several such
terms, so a is the mean slope over the measured sizes and rises towards the largest exponent as the sizes grow. The
interval comes from the slope of each round (`stats.py`). Whether a power describes the times at all is said by
`residual_ratio`, from three sizes on.

The linear rule for a larger model:

    tokens/s of the large model = tokens/s · P / P_large
    days  = tokens / (tokens/s) / 86 400
    years = days / 365

It assumes 6 operations per parameter and token (Kaplan et al. 2020, section 2.1), the same operations per second on
both models, and nothing that only large models have: no communication, no memory limit, no attention that grows with
the context, no failures. It is an order of magnitude; the intervals only say how well the small model was measured.
Nothing is rounded on the way. A throughput that was rounded before has an interval of half a unit of its last digit
(`from_rounded`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import Floats, Rounds, estimate_location, estimate_median, pair_medians


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


SECONDS_PER_DAY = 86_400
DAYS_PER_YEAR = 365


@dataclass(frozen=True, kw_only=True)
class Extrapolation:
    """The training of a larger model at the same operations per second."""

    tokens_per_second: Estimate
    days: Estimate
    years: Estimate
    """Of 365 days."""


def extrapolate_training(
    tokens_per_second: Estimate, num_parameters: float, *, target_parameters: float, target_tokens: float
) -> Extrapolation:
    """The larger model's throughput, and the time that it needs for the tokens."""
    rate = tokens_per_second.map(lambda tokens: tokens * num_parameters / target_parameters)
    days = rate.map(lambda tokens: target_tokens / tokens / SECONDS_PER_DAY)
    return Extrapolation(tokens_per_second=rate, days=days, years=days.map(lambda number: number / DAYS_PER_YEAR))


def infer_throughput(days: float, num_parameters: float, *, target_parameters: float, target_tokens: float) -> float:
    """The measured tokens/s that a number of days was extrapolated from: the same rule, backwards."""
    return target_tokens / (days * SECONDS_PER_DAY) * target_parameters / num_parameters


def from_rounded(value: float, decimals: int) -> Estimate:
    """A number that was printed with so many decimals, with everything that it may have been before."""
    half = 0.5 * 10.0**-decimals
    return Estimate(value=value, low=value - half, high=value + half)
