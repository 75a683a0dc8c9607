"""How a step grows with its batch, and where larger batches stop paying.

    T(B) = t₀ + c · B         throughput  B / T(B) = (1/c) · B / (B + B½)         B½ = t₀ / c

t₀ is what a step costs whatever the batch (launching, the update, the exchange), c what a sample adds. Throughput rises
like the rate of an enzyme with its substrate (Michaelis & Menten 1913; for vectors, Hockney's n½, 1985): at B½ it is
half of what it can become, at 19 · B½ 95 %. Neither number can be negative: a fit that would want that finds 0.

Two batches determine both. From three on `residual_ratio` says how well a straight line describes the steps: caches,
threads and padding bend it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.rounds import Floats, Rounds
from scalelab.analysis.sizes import measure_residual, solve_non_negative, solve_relative, tabulate_sizes
from scalelab.analysis.stats import estimate_over_rounds

SATURATED_SHARE = 0.95
"""Throughput from which on a batch counts as saturated, over the most that any batch could give."""


@dataclass(frozen=True, kw_only=True)
class SaturationFit:
    """T(B) = t₀ + c · B as fitted to step times of several batches."""

    fixed_seconds: Estimate
    """t₀."""
    sample_seconds: Estimate
    """c."""
    half_batch: Estimate | None
    """B½ = t₀ / c; None where a sample costs nothing that could be measured."""
    residual_ratio: float | None
    """The root mean square of the relative residuals; None for two batches, which determine the line."""
    largest_batch: int

    @property
    def most_samples_per_second(self) -> Estimate | None:
        """What throughput tends to with ever larger batches; without an interval where a sample may cost nothing."""
        if self.half_batch is None:
            return None
        cost = self.sample_seconds
        return cost.map(lambda seconds: 1 / seconds) if cost.low else Estimate(value=1 / cost.value)

    @property
    def saturated_batch(self) -> Estimate | None:
        """The batch that reaches `SATURATED_SHARE` of that."""
        factor = SATURATED_SHARE / (1 - SATURATED_SHARE)
        return None if self.half_batch is None else self.half_batch.map(lambda batch: batch * factor)

    def predict_seconds(self, batch: float) -> float:
        return self.fixed_seconds.value + self.sample_seconds.value * batch


def fit_saturation(times: Mapping[int, Rounds]) -> SaturationFit | None:
    """Fit the line to step times by batch; None for fewer than two batches that gave any."""
    table = tabulate_sizes(times)
    if len(table.num_ranks) < 2:
        return None
    batches = table.num_ranks
    columns = np.column_stack([np.ones_like(batches), batches])
    fixed, slope = solve_non_negative(columns, table.centres)
    rounds = [solve_relative(columns, values) for values in table.per_round]
    half = None
    if slope > 0:
        halves = [float(found[0] / found[1]) for found in rounds if found[1] > 0]
        half = _confine(estimate_over_rounds(float(fixed / slope), halves))
    return SaturationFit(
        fixed_seconds=_estimate(fixed, rounds, 0),
        sample_seconds=_estimate(slope, rounds, 1),
        half_batch=half,
        residual_ratio=(
            measure_residual(columns, np.array([fixed, slope]), table.centres) if len(batches) > 2 else None
        ),
        largest_batch=table.largest_ranks,
    )


def _estimate(value: float, rounds: list[Floats], index: int) -> Estimate:
    return _confine(estimate_over_rounds(float(value), [float(found[index]) for found in rounds]))


def _confine(estimate: Estimate) -> Estimate:
    """Neither a time nor a batch is below 0."""
    return estimate.map(lambda end: max(end, 0.0))
