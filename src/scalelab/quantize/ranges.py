"""Which numbers int8 should be able to tell apart: five ways to choose a range from what was counted.

    minmax       all that was seen; nothing is clipped, one outlier coarsens everything
    sigma        mean ± k σ, but no further than what was seen
    percentile   so that a share of all numbers lies inside
    mse          the least mean squared error of rounding and clipping together
    entropy      the least Kullback–Leibler divergence of the rounded distribution from the true one (Migacz, 8-bit
                 Inference with TensorRT, 2017)

A range begins as the widest that makes sense for its grid: [0, max] where nothing is negative, [−m, m] for a symmetric
grid. `mse` and `entropy` try ranges that are this one made smaller; `mse` by powers of 2^(1/16) over eight octaves,
then by sixteen steps between the neighbours of the best one. Zeros are left out by `entropy`: any range stands for
them exactly, and after a ReLU they would outweigh all else. Everything is computed from sorted counts in float64, so
equal counts give equal ranges to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from scalelab.errors import UnknownName, UsageError
from scalelab.quantize.histogram import Bins, Histogram, Values, rebin

Method = Literal["minmax", "sigma", "percentile", "mse", "entropy"]
Range = tuple[float, float]

NUM_LEVELS = 255
"""Steps of a grid of a byte."""
NUM_LINEAR_BINS = 2048
"""Into which the widest range is divided for the entropy."""
OCTAVES_TRIED = 8
TRIES_PER_OCTAVE = 16


@dataclass(frozen=True, kw_only=True)
class RangeSettings:
    """How a range is chosen."""

    method: Method = "minmax"
    sigmas: float = 3.0
    """How many standard deviations on each side of the mean `sigma` keeps."""
    percentile: float = 99.99
    """Which share of the numbers, in percent, `percentile` keeps."""

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise UnknownName("calibration method", self.method, get_args(Method))
        if not self.sigmas > 0:
            raise UsageError(f"sigmas must be > 0 (3 is usual), got {self.sigmas}")
        if not 50 < self.percentile <= 100:
            raise UsageError(f"percentile must be above 50 and at most 100 (99.99 is usual), got {self.percentile}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Spread:
    """Numbers as a range is chosen from them, and the widest range that makes sense for their grid."""

    bins: Bins
    widest: Range


def choose_range(histogram: Histogram, settings: RangeSettings, is_symmetric: bool) -> Range:
    """The range for numbers that were counted; zero is in it."""
    widest = find_widest(histogram.least, histogram.largest, is_symmetric)
    if settings.method == "minmax" or widest == (0.0, 0.0):
        return widest
    return CHOOSERS[settings.method](Spread(bins=histogram.list_bins(), widest=widest), settings)


def choose_weight_limit(weights: Values, settings: RangeSettings) -> float:
    """The largest magnitude that weights shall have, of a tensor or of one output channel."""
    largest = float(np.abs(weights).max(initial=0.0))
    if settings.method == "minmax" or largest == 0.0:
        return largest
    values = np.sort(weights.astype(np.float64))
    bins = Bins(lows=values, highs=values, counts=np.ones(len(values), np.int64))
    return CHOOSERS[settings.method](Spread(bins=bins, widest=(-largest, largest)), settings)[1]


def find_widest(least: float, largest: float, is_symmetric: bool) -> Range:
    """The range of everything that was seen, and zero."""
    if not is_symmetric:
        return min(least, 0.0), max(largest, 0.0)
    limit = max(abs(least), abs(largest))
    return -limit, limit


def choose_by_sigma(spread: Spread, settings: RangeSettings) -> Range:
    mean, deviation = spread.bins.mean, spread.bins.deviation
    return narrow(spread.widest, mean - settings.sigmas * deviation, mean + settings.sigmas * deviation)


def choose_by_percentile(spread: Spread, settings: RangeSettings) -> Range:
    """Of the magnitudes for a symmetric range; otherwise what is left out is left out in equal parts at both ends."""
    share = settings.percentile / 100.0
    low, high = spread.widest
    if low == -high:
        limit = find_quantile(np.abs(spread.bins.middles), spread.bins.counts, share)
        return narrow(spread.widest, -limit, limit)
    outside = (1.0 - share) / 2 if low < 0 else 1.0 - share
    values, counts = spread.bins.middles, spread.bins.counts
    return narrow(spread.widest, find_quantile(values, counts, outside), find_quantile(values, counts, 1.0 - outside))


def find_quantile(values: Values, counts: Iterable[int], share: float) -> float:
    """The least of the values up to which at least that share of all lies."""
    order = np.argsort(values, kind="stable")
    below = np.cumsum(np.asarray(counts)[order])
    place = int(np.searchsorted(below, share * below[-1], side="left"))
    return float(values[order][min(place, len(values) - 1)])


def choose_by_mse(spread: Spread, _: RangeSettings) -> Range:
    ratios = 2.0 ** (-np.arange(OCTAVES_TRIED * TRIES_PER_OCTAVE + 1) / TRIES_PER_OCTAVE)
    best = find_best(spread, ratios)
    step = 2.0 ** (1 / TRIES_PER_OCTAVE)
    return scale_range(spread.widest, find_best(spread, np.linspace(min(best * step, 1.0), best / step, 17)))


def find_best(spread: Spread, ratios: Values) -> float:
    """The ratio with the least squared error; of equals the widest."""
    errors = [measure_error(spread.bins, scale_range(spread.widest, float(ratio))) for ratio in ratios]
    return float(ratios[int(np.argmin(errors))])


def measure_error(bins: Bins, chosen: Range) -> float:
    """The sum of squared differences between the numbers and what a grid of this range makes of them."""
    low, high = chosen
    step = max(high, -low) / 127.0 if low == -high else (high - low) / NUM_LEVELS
    first, last = np.rint(low / step), np.rint(high / step)
    values = bins.middles
    rounded = np.clip(np.rint(values / step), first, last) * step
    return float(np.sum((values - rounded) ** 2 * bins.counts))


def choose_by_entropy(spread: Spread, _: RangeSettings) -> Range:
    low, high = spread.widest
    edges = np.linspace(low, high, NUM_LINEAR_BINS + 1)
    is_other = (spread.bins.lows != 0) | (spread.bins.highs != 0)
    bins = spread.bins
    counted = Bins(lows=bins.lows[is_other], highs=bins.highs[is_other], counts=bins.counts[is_other])
    counts = rebin(counted, edges)
    zero = round(-low / (high - low) * NUM_LINEAR_BINS)
    sizes = np.arange(NUM_LINEAR_BINS, NUM_LEVELS, -8)
    firsts = zero - np.rint(zero * sizes / NUM_LINEAR_BINS).astype(int)
    divergences = [measure_divergence(counts, int(first), int(size)) for first, size in zip(firsts, sizes, strict=True)]
    best = int(np.argmin(divergences))
    return scale_range(spread.widest, float(sizes[best]) / NUM_LINEAR_BINS)


def measure_divergence(counts: Values, first: int, size: int) -> float:
    """KL(p ‖ q): p is what is inside with the rest clipped to its ends, q is the inside in NUM_LEVELS steps."""
    inside = counts[first : first + size]
    true = inside.copy()
    true[0] += counts[:first].sum()
    true[-1] += counts[first + size :].sum()
    starts = np.arange(NUM_LEVELS) * size // NUM_LEVELS
    is_used = inside > 0
    sums, used = np.add.reduceat(inside, starts), np.add.reduceat(is_used.astype(float), starts)
    lengths = np.diff(np.append(starts, size))
    spread_out = np.repeat(np.divide(sums, used, out=np.zeros_like(sums), where=used > 0), lengths) * is_used
    if true.sum() == 0 or spread_out.sum() == 0:
        return float("inf")
    p, q = true / true.sum(), spread_out / spread_out.sum()
    # A number that is clipped to an end where nothing was before is as wrong as can be, but finitely so.
    q = np.where((p > 0) & (q == 0), 1e-9, q)
    known = p > 0
    return float(np.sum(p[known] * np.log(p[known] / q[known])))


def narrow(widest: Range, low: float, high: float) -> Range:
    """The range from `low` to `high`, no wider than `widest`, symmetric if that is, with zero in it."""
    if widest[0] == -widest[1]:
        limit = min(max(abs(low), abs(high)), widest[1])
        return -limit, limit
    return min(max(low, widest[0]), 0.0), max(min(high, widest[1]), 0.0)


def scale_range(chosen: Range, ratio: float) -> Range:
    return chosen[0] * ratio, chosen[1] * ratio


CHOOSERS: dict[Method, Callable[[Spread, RangeSettings], Range]] = {
    "sigma": choose_by_sigma,
    "percentile": choose_by_percentile,
    "mse": choose_by_mse,
    "entropy": choose_by_entropy,
}
