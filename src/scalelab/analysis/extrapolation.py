"""How long a much larger model would train, from the throughput of a small one.

    tokens/s of the large model = tokens/s · P / P_large
    days  = tokens / (tokens/s) / 86 400
    years = days / 365

The rule rests on a step costing 6 operations per parameter and token (Kaplan et al. 2020, section 2.1), on the same
hardware doing as many operations per second on both models, and on nothing that only large models have: no
communication, no memory that the model does not fit into, no attention that grows with the context, no failures. It is
an estimate of the order of magnitude, and the intervals say only how well the small model was measured.

Nothing is rounded on the way. A throughput that was rounded before it came here is an estimate itself, whose interval
reaches half a unit of its last digit to both sides (`from_rounded`): numbers that others derived before rounding lie
within what follows from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from scalelab.analysis.estimate import Estimate

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
    """The larger model's throughput, and the time that it needs for so many tokens."""
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
