"""Amdahl's law for strong scaling and Gustafson's for weak scaling: how much of the work does not spread.

    Amdahl (1967)      T(N) = T₁ · (s + (1 − s) / N)       the speedup ends at 1 / s
    Gustafson (1988)   S(N) = N − s · (N − 1)              the scaled speedup grows on, with slope 1 − s

Both are straight lines in disguise. The time is a + b / N, the work per second under weak scaling is a + b
· N, and in both s = a / (a + b) with neither a nor b negative. So one fit serves both. The two fractions
are not the same number: Amdahl's is a share of the time on one rank, Gustafson's a share of the time on N.

Two sizes determine s and leave no residual; from three on `residual_ratio` says how well the law describes
the data. A residual well above the noise means that something grows with N which neither law has: see
`usl.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.rounds import Floats, Rounds
from scalelab.analysis.sizes import (
    measure_residual,
    solve_non_negative,
    solve_relative,
    tabulate_sizes,
)
from scalelab.analysis.stats import estimate_over_rounds


@dataclass(frozen=True, kw_only=True)
class AmdahlFit:
    """Amdahl's law as fitted to step times of the same work on several sizes."""

    serial_fraction: Estimate
    """The share of the one-rank time that does not shrink with ranks."""
    one_rank_seconds: float
    residual_ratio: float
    """The root mean square of the relative residuals."""
    largest_ranks: int
    """The largest size that was measured: beyond it, everything is extrapolated."""

    def predict_speedup(self, num_ranks: float) -> Estimate:
        """T(1) / T(N)."""
        return self.serial_fraction.map(lambda serial: 1 / (serial + (1 - serial) / num_ranks))


@dataclass(frozen=True, kw_only=True)
class GustafsonFit:
    """Gustafson's law as fitted to step times of work that grows with the ranks."""

    serial_fraction: Estimate
    """The share of the time on N ranks that one rank would not need longer for."""
    one_rank_seconds: float
    residual_ratio: float
    """The root mean square of the relative residuals."""
    largest_ranks: int
    """The largest size that was measured: beyond it, everything is extrapolated."""

    def predict_speedup(self, num_ranks: float) -> Estimate:
        """The work per second on N ranks over that on one."""
        return self.serial_fraction.map(lambda serial: num_ranks - serial * (num_ranks - 1))


def fit_amdahl(times: Mapping[int, Rounds]) -> AmdahlFit | None:
    """Fit T(N) = a + b / N to step times by number of ranks; None for fewer than two sizes."""
    table = tabulate_sizes(times)
    if len(table.num_ranks) < 2:
        return None
    columns = np.column_stack([np.ones_like(table.num_ranks), 1 / table.num_ranks])
    coefficients = solve_non_negative(columns, table.centres)
    return AmdahlFit(
        serial_fraction=_estimate_fraction(columns, table.centres, table.per_round),
        one_rank_seconds=float(coefficients.sum()),
        residual_ratio=measure_residual(columns, coefficients, table.centres),
        largest_ranks=table.largest_ranks,
    )


def fit_gustafson(times: Mapping[int, Rounds]) -> GustafsonFit | None:
    """Fit N / T(N) = a + b · N to step times by number of ranks, for work that grows with N.

    None for fewer than two sizes.
    """
    table = tabulate_sizes(times)
    if len(table.num_ranks) < 2:
        return None
    columns = np.column_stack([np.ones_like(table.num_ranks), table.num_ranks])
    rates = table.num_ranks / table.centres
    coefficients = solve_non_negative(columns, rates)
    return GustafsonFit(
        serial_fraction=_estimate_fraction(columns, rates, table.num_ranks / table.per_round),
        one_rank_seconds=float(1 / coefficients.sum()),
        residual_ratio=measure_residual(columns, coefficients, rates),
        largest_ranks=table.largest_ranks,
    )


def _estimate_fraction(columns: Floats, centres: Floats, per_round: Floats) -> Estimate:
    """The fraction a / (a + b), with an interval from fitting each round alone.

    Single rounds may come out negative, or their errors would not balance; the whole is then confined to
    0…1, which is what the non-negative fit of two coefficients gives.
    """
    fractions = [_find_fraction(solve_relative(columns, values)) for values in per_round]
    whole = estimate_over_rounds(_find_fraction(solve_relative(columns, centres)), fractions)
    return whole.map(lambda fraction: min(max(fraction, 0.0), 1.0))


def _find_fraction(coefficients: Floats) -> float:
    return float(coefficients[0] / coefficients.sum())
