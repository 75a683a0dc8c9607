"""Two ways to train compared by seeds, and the gradient noise scale.

A seed decides the initial weights and the order of the data, and both decide much of the accuracy. Training runs with
the same seed share that part, so they are compared seed by seed, and the difference has the smaller spread.

The simple noise scale is the batch size at which noise and gradient are equally large. The gradient of a batch of B
samples is the true gradient G plus noise of variance tr(Σ) / B, where Σ is the covariance of per-sample gradients:

    B_simple = tr(Σ) / |G|²

It predicts the critical batch size (McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", section 2.2).
Squared norms of gradients of two sizes b < B give both without bias (appendix A.1):

    |G|²   = (B · |G_B|² − b · |G_b|²) / (B − b)
    tr(Σ)  = (|G_b|² − |G_B|²) / (1/b − 1/B)

Those of one step are wild and may be negative, so both are averaged over steps and then divided; a mean of ratios would
be biased. The interval of the ratio is Fieller's (1954, "Some Problems in Interval Estimation"), from the means of
blocks of steps. If |G|² may be 0 it has no end, and none is given.

If every step is worth what the model says (section 2.3), reaching a given loss with batch B takes 1 + B_crit/B times
the fewest updates and 1 + B/B_crit times the fewest samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import FEWEST_FOR_SIGNED_RANK, Floats, estimate_location, find_t_quantile

SMALLEST_CHANGE = 0.005
"""A difference of less than half a point of accuracy is never called a loss or a gain."""
TOLERANCE = 0.01
"""Two ways whose difference surely lies within one point of accuracy do not differ in practice."""


class AccuracyChange(StrEnum):
    """What a difference in accuracy, candidate less reference, says about the candidate."""

    LOST = "lost accuracy"
    GAINED = "gained accuracy"
    NO_DIFFERENCE = "no difference"
    UNRESOLVED = "unresolved"


def estimate_change(candidate: Mapping[int, float], reference: Mapping[int, float]) -> Estimate | None:
    """The difference over the seeds that both have, candidate less reference; None without one."""
    differences = [candidate[seed] - reference[seed] for seed in sorted(candidate.keys() & reference.keys())]
    return estimate_location(differences) if differences else None


def judge_change(difference: Estimate) -> AccuracyChange:
    """Lost or gained where the interval excludes 0 and the effect is worth a word; as in `stats.judge` otherwise."""
    if difference.low is None or difference.high is None:
        return AccuracyChange.UNRESOLVED
    if difference.high < 0 and difference.value <= -SMALLEST_CHANGE:
        return AccuracyChange.LOST
    if difference.low > 0 and difference.value >= SMALLEST_CHANGE:
        return AccuracyChange.GAINED
    if difference.low > -TOLERANCE and difference.high < TOLERANCE:
        return AccuracyChange.NO_DIFFERENCE
    return AccuracyChange.UNRESOLVED


STEPS_PER_BLOCK = 5
"""Fewer make means that are far from normally distributed; more leave few blocks of an epoch."""


class GradientSquares(NamedTuple):
    """The squared norms of the gradients of one step."""

    small: float
    """Of its first pass, b samples."""
    large: float
    """Of the whole step, B samples."""


@dataclass(frozen=True, kw_only=True)
class NoiseScale:
    """How large gradient and noise are over some steps."""

    gradient_square: Estimate
    """|G|²."""
    noise_trace: Estimate
    """tr(Σ), of the gradient of one sample."""
    batch: Estimate | None
    """B_simple, in samples; None if |G|² is not above 0, without an interval if it is not distinguishable from 0."""


def estimate_noise_scale(
    trainings: Sequence[Sequence[GradientSquares]], small_batch: int, large_batch: int
) -> NoiseScale | None:
    """From the steps of one or more trainings, each a sequence of its own; None without any step.

    Six trainings or more are the blocks that the interval counts; of fewer, blocks of their steps are: the interval
    then says less about other seeds.
    """
    if not 0 < small_batch < large_batch:
        raise ValueError(f"small_batch must be < large_batch, got {small_batch} and {large_batch}")
    given = [split_squares(steps, small_batch, large_batch) for steps in trainings if len(steps)]
    if not given:
        return None
    if len(given) >= FEWEST_FOR_SIGNED_RANK:
        blocks = given
    else:
        blocks = [block for steps in given for block in np.array_split(steps, max(1, len(steps) // STEPS_PER_BLOCK))]
    means = np.array([block.mean(axis=0) for block in blocks])
    gradient, noise = (_estimate_mean(means[:, column]) for column in (0, 1))
    return NoiseScale(gradient_square=gradient, noise_trace=noise, batch=_divide_means(means[:, 1], means[:, 0]))


def split_squares(steps: Sequence[GradientSquares], small_batch: int, large_batch: int) -> Floats:
    """|G|² and tr(Σ) of every step, in two columns, each right on average only."""
    small, large = np.asarray(steps, dtype=np.float64).T
    gradient = (large_batch * large - small_batch * small) / (large_batch - small_batch)
    noise = (small - large) / (1 / small_batch - 1 / large_batch)
    return np.stack([gradient, noise], axis=1)


def predict_samples_ratio(noise_batch: Estimate, batch: int, reference: int) -> Estimate:
    """How many times the samples a batch needs to reach the loss that a reference batch reaches (section 2.3)."""
    return noise_batch.map(lambda critical: (critical + batch) / (critical + reference))


def predict_updates_ratio(noise_batch: Estimate, batch: int, reference: int) -> Estimate:
    """The same for updates."""
    return noise_batch.map(lambda critical: (critical + batch) / (critical + reference) * reference / batch)


def _estimate_mean(values: Floats) -> Estimate:
    """The mean with Student's interval: it must be the mean, for only that is without bias."""
    mean = float(values.mean())
    if len(values) < 2:
        return Estimate(value=mean)
    arm = find_t_quantile(len(values) - 1) * float(values.std(ddof=1)) / math.sqrt(len(values))
    return Estimate(value=mean, low=mean - arm, high=mean + arm)


def _divide_means(above: Floats, below: Floats) -> Estimate | None:
    """The ratio of two means of pairs, with Fieller's interval: all ρ for which above − ρ·below may be 0."""
    a, b = float(above.mean()), float(below.mean())
    if b <= 0:
        return None
    value = max(0.0, a / b)  # noise that seems to be negative is none
    if len(above) < 2:
        return Estimate(value=value)
    spread = np.cov(above, below) / len(above) * find_t_quantile(len(above) - 1) ** 2
    var_a, cov, var_b = float(spread[0, 0]), float(spread[0, 1]), float(spread[1, 1])
    square = b * b - var_b
    if square <= 0:
        return Estimate(value=value)
    middle = a * b - cov
    root = math.sqrt(max(0.0, middle * middle - square * (a * a - var_a)))
    return Estimate(value=value, low=max(0.0, (middle - root) / square), high=max(0.0, (middle + root) / square))
