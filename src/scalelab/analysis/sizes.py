"""What a law of scaling is fitted to, one number per size, and how.

All our laws are linear in their coefficients once written the right way round, so a fit is a small
least-squares problem, solved exactly. Residuals are relative: an error of 1 % counts the same at one rank
and at sixteen, as the noise of a step time is proportional to it.

The number of a size is the centre of its launches' medians, over the rounds that all sizes completed. What
a round does to all sizes alike is taken off first, so a machine that drifts leaves the shape of the law
alone. Each round is also fitted on its own: that is where the intervals of the coefficients come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from scalelab.analysis.location import estimate_location
from scalelab.analysis.rounds import Floats, Rounds, pair_medians
from scalelab.analysis.stats import estimate_median


@dataclass(frozen=True, kw_only=True)
class SizeTable:
    """The measured numbers by size."""

    num_ranks: Floats
    """The sizes, ascending."""
    centres: Floats
    """One number per size."""
    per_round: Floats
    """A row per complete round, a column per size; no rows where the sizes share no rounds."""

    @property
    def largest_ranks(self) -> int:
        """Where measurement ends and extrapolation begins."""
        return int(self.num_ranks[-1])


def tabulate_sizes(series: Mapping[int, Rounds]) -> SizeTable:
    """The numbers that a law is fitted to; sizes that gave nothing are left out."""
    sizes = sorted(size for size, rounds in series.items() if any(len(steps) for steps in rounds))
    paired = pair_medians([series[size] for size in sizes]) if sizes else np.empty((0, 0))
    if paired.shape[1]:
        centres = _find_centres(paired)
    else:
        centres = np.array([estimate_median(series[size]).value for size in sizes])
    return SizeTable(num_ranks=np.array(sizes, dtype=np.float64), centres=centres, per_round=paired.T)


def _find_centres(paired: Floats) -> Floats:
    """The centre of each row over the rounds, on the log scale, free of what a round does to all rows."""
    logs = np.log(paired)
    levels = logs.mean(axis=0)
    shape = np.array([estimate_location(row).value for row in logs - levels])
    centres: Floats = np.exp(shape + estimate_location(levels).value)
    return centres


def solve_relative(columns: Floats, target: Floats) -> Floats:
    """The coefficients c, of either sign, that make columns · c ≈ target with the least relative squares."""
    scaled = columns / target[:, np.newaxis]
    return np.asarray(np.linalg.lstsq(scaled, np.ones(len(target)), rcond=None)[0], dtype=np.float64)


def solve_non_negative(columns: Floats, target: Floats) -> Floats:
    """The same under the condition that no coefficient is negative (Lawson & Hanson 1974, chapter 23)."""
    from scipy.optimize import nnls  # here, because loading it takes longer than all that `--help` does

    scaled = columns / target[:, np.newaxis]
    coefficients: Floats = nnls(scaled, np.ones(len(target)))[0]
    return coefficients


def measure_residual(columns: Floats, coefficients: Floats, target: Floats) -> float:
    """The root mean square of the relative residuals."""
    return float(np.sqrt(np.mean((columns @ coefficients / target - 1) ** 2)))
