"""The universal scalability law: when adding ranks makes it slower.

Gunther ("Guerrilla Capacity Planning", 2007, chapters 4 to 6) adds to Amdahl's contention σ, the waiting
for what is shared, a second loss κ, the price of keeping N ranks coherent with each other, which grows with
their pairs:

    C(N) = X(N) / X(1) = N / (1 + σ (N − 1) + κ N (N − 1))

With κ = 0 it is Amdahl's law with s = σ. With κ > 0 the throughput has a peak at N = √((1 − σ) / κ) and
falls beyond.

Turned over, N / X(N) = (1 + σ (N − 1) + κ N (N − 1)) / X(1) is linear in 1 / X(1), σ / X(1) and κ / X(1):
three coefficients, none negative, so three sizes at least. Three sizes leave no residual, and their noise
is amplified: from 1, 2 and 4 ranks σ is known to a few times the noise of a time. Trust the intervals, and
measure more sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.rounds import Floats, Rounds
from scalelab.analysis.sizes import measure_residual, solve_non_negative, solve_relative, tabulate_sizes
from scalelab.analysis.stats import estimate_over_rounds


@dataclass(frozen=True, kw_only=True)
class UslFit:
    """The universal scalability law as fitted to throughputs on several sizes."""

    contention: Estimate
    """σ: the share that waits for what is shared."""
    coherency: Estimate
    """κ: what each pair of ranks costs."""
    one_rank_throughput: float
    residual_ratio: float
    """The root mean square of the relative residuals."""
    largest_ranks: int
    """The largest size that was measured: beyond it, everything is extrapolated."""

    @property
    def peak_ranks(self) -> float | None:
        """Where throughput is highest; None where the data show no peak: the interval of κ reaches 0."""
        surely = self.coherency.value if self.coherency.low is None else self.coherency.low
        if surely <= 0:
            return None
        return math.sqrt(max(1 - self.contention.value, 0.0) / self.coherency.value)

    def predict_speedup(self, num_ranks: float) -> float:
        """X(N) / X(1)."""
        waiting = self.contention.value * (num_ranks - 1)
        agreeing = self.coherency.value * num_ranks * (num_ranks - 1)
        return num_ranks / (1 + waiting + agreeing)


def fit_usl(throughputs: Mapping[int, Rounds]) -> UslFit | None:
    """Fit the law to throughputs (of samples, say) by number of ranks; None for fewer than three sizes."""
    table = tabulate_sizes(throughputs)
    if len(table.num_ranks) < 3:
        return None
    sizes = table.num_ranks
    columns = np.column_stack([np.ones_like(sizes), sizes - 1, sizes * (sizes - 1)])
    target = sizes / table.centres
    coefficients = solve_non_negative(columns, target)
    if coefficients[0] <= 0:
        return None
    free = solve_relative(columns, target)
    rounds = [solve_relative(columns, values) for values in sizes / table.per_round]
    per_round = np.array(rounds).reshape(-1, 3)
    return UslFit(
        contention=_estimate_loss(1, coefficients, free, per_round),
        coherency=_estimate_loss(2, coefficients, free, per_round),
        one_rank_throughput=float(1 / coefficients[0]),
        residual_ratio=measure_residual(columns, coefficients, target),
        largest_ranks=table.largest_ranks,
    )


def _estimate_loss(index: int, coefficients: Floats, free: Floats, per_round: Floats) -> Estimate:
    """A coefficient of the non-negative fit, with an interval from fitting each round without that condition.

    The interval is confined to what is possible and always holds the value itself.
    """
    value = float(coefficients[index] / coefficients[0])
    if np.any(per_round[:, 0] <= 0) or free[0] <= 0:
        return Estimate(value=value)
    spread = estimate_over_rounds(float(free[index] / free[0]), per_round[:, index] / per_round[:, 0])
    if spread.low is None or spread.high is None:
        return Estimate(value=value)
    return Estimate(value=value, low=min(max(spread.low, 0.0), value), high=max(spread.high, value))
