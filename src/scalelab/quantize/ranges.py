"""Choose the range that int8 covers from a histogram of values.

    minmax       everything seen: nothing is clipped, one outlier coarsens every step
    sigma        mean ± 3 σ, within what was seen
    percentile   99.99 % of the values
    mse          least mean squared error of rounding plus clipping
    entropy      least KL divergence of the rounded from the true distribution (Migacz, 8-bit Inference with
                 TensorRT, 2017); zeros are left out, since every range represents them exactly

The widest range is [0, max] where nothing is negative and [−m, m] otherwise. `mse` and `entropy` try smaller copies of
it: `mse` by powers of 2^(1/16) over eight octaves, then sixteen steps around the best. Everything is computed in
float64 from sorted counts, so equal counts give bit-equal ranges.

**Why mse is the default.** Accuracy against float in points (right answers won + lost) on CIFAR-10's 10,000 test
images, 512 calibration images, executed by onnxruntime; a difference has an interval of about ± 0.2 points:

                          lenet             lenet, bias       resnet20
    minmax                +0.13  41 + 28    −0.04  27 + 31    +0.02  51 + 49
    mse                   +0.09  47 + 38    −0.06  18 + 24    +0.10  37 + 27
    entropy               +0.12  45 + 33    −0.10  23 + 33    +0.06  47 + 41

The three do not differ by more than chance; mse changes the fewest answers in two of three networks. The choice was
made on these figures, so they are a winner's: benchmarks/int8_accuracy.py tests it on other networks. Logits rounded
to a byte tie in 3 to 4 % of lenet's samples, so they stay float by default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import numpy as np

from scalelab.quantize.histogram import Bins, ValueHistogram, Values, rebin

Method = Literal["minmax", "sigma", "percentile", "mse", "entropy"]
Range = tuple[float, float]

SIGMAS = 3.0
PERCENTILE = 99.99
NUM_LEVELS = 255
"""Steps of a byte's grid."""
NUM_LINEAR_BINS = 2048
"""Bins of the widest range for the entropy."""
OCTAVES_TRIED = 8
TRIES_PER_OCTAVE = 16


def choose_range(histogram: ValueHistogram, method: Method, is_symmetric: bool) -> Range:
    """The range for counted values; it contains zero."""
    widest = find_widest(histogram.least, histogram.largest, is_symmetric)
    if method == "minmax" or widest == (0.0, 0.0):
        return widest
    return CHOOSERS[method](histogram.list_bins(), widest)


def find_widest(least: float, largest: float, is_symmetric: bool) -> Range:
    """Everything seen, and zero."""
    if not is_symmetric:
        return min(least, 0.0), max(largest, 0.0)
    limit = max(abs(least), abs(largest))
    return -limit, limit


def choose_by_sigma(bins: Bins, widest: Range) -> Range:
    mean, deviation = bins.mean, bins.deviation
    return narrow(widest, mean - SIGMAS * deviation, mean + SIGMAS * deviation)


def choose_by_percentile(bins: Bins, widest: Range) -> Range:
    """Of magnitudes for a symmetric range; otherwise equal shares are cut at both ends."""
    share = PERCENTILE / 100.0
    low, high = widest
    if low == -high:
        limit = find_quantile(np.abs(bins.middles), bins.counts, share)
        return narrow(widest, -limit, limit)
    outside = (1.0 - share) / 2 if low < 0 else 1.0 - share
    values, counts = bins.middles, bins.counts
    return narrow(widest, find_quantile(values, counts, outside), find_quantile(values, counts, 1.0 - outside))


def find_quantile(values: Values, counts: Iterable[int], share: float) -> float:
    """The smallest value with at least that share of all values at or below it."""
    order = np.argsort(values, kind="stable")
    below = np.cumsum(np.asarray(counts)[order])
    place = int(np.searchsorted(below, share * below[-1], side="left"))
    return float(values[order][min(place, len(values) - 1)])


def choose_by_mse(bins: Bins, widest: Range) -> Range:
    ratios = 2.0 ** (-np.arange(OCTAVES_TRIED * TRIES_PER_OCTAVE + 1) / TRIES_PER_OCTAVE)
    best = find_best(bins, widest, ratios)
    step = 2.0 ** (1 / TRIES_PER_OCTAVE)
    return scale_range(widest, find_best(bins, widest, np.linspace(min(best * step, 1.0), best / step, 17)))


def find_best(bins: Bins, widest: Range, ratios: Values) -> float:
    """The ratio with the least squared error; the widest of equals."""
    errors = [measure_error(bins, scale_range(widest, float(ratio))) for ratio in ratios]
    return float(ratios[int(np.argmin(errors))])


def measure_error(bins: Bins, chosen: Range) -> float:
    """Sum of squared differences between values and their nearest grid points."""
    low, high = chosen
    step = max(high, -low) / 127.0 if low == -high else (high - low) / NUM_LEVELS
    first, last = np.rint(low / step), np.rint(high / step)
    values = bins.middles
    rounded = np.clip(np.rint(values / step), first, last) * step
    return float(np.sum((values - rounded) ** 2 * bins.counts))


def choose_by_entropy(bins: Bins, widest: Range) -> Range:
    low, high = widest
    edges = np.linspace(low, high, NUM_LINEAR_BINS + 1)
    is_other = (bins.lows != 0) | (bins.highs != 0)
    counted = Bins(lows=bins.lows[is_other], highs=bins.highs[is_other], counts=bins.counts[is_other])
    counts = rebin(counted, edges)
    zero = round(-low / (high - low) * NUM_LINEAR_BINS)
    sizes = np.arange(NUM_LINEAR_BINS, NUM_LEVELS, -8)
    firsts = zero - np.rint(zero * sizes / NUM_LINEAR_BINS).astype(int)
    divergences = [measure_divergence(counts, int(first), int(size)) for first, size in zip(firsts, sizes, strict=True)]
    best = int(np.argmin(divergences))
    return scale_range(widest, float(sizes[best]) / NUM_LINEAR_BINS)


def measure_divergence(counts: Values, first: int, size: int) -> float:
    """KL(p ‖ q): p is the inside with the rest clipped to its ends, q the inside in NUM_LEVELS steps."""
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
    # Values clipped to an empty end bin: a large but finite divergence.
    q = np.where((p > 0) & (q == 0), 1e-9, q)
    known = p > 0
    return float(np.sum(p[known] * np.log(p[known] / q[known])))


def narrow(widest: Range, low: float, high: float) -> Range:
    """[low, high] within `widest`, symmetric if that is, containing zero."""
    if widest[0] == -widest[1]:
        limit = min(max(abs(low), abs(high)), widest[1])
        return -limit, limit
    return min(max(low, widest[0]), 0.0), max(min(high, widest[1]), 0.0)


def scale_range(chosen: Range, ratio: float) -> Range:
    return chosen[0] * ratio, chosen[1] * ratio


CHOOSERS: dict[Method, Callable[[Bins, Range], Range]] = {
    "sigma": choose_by_sigma,
    "percentile": choose_by_percentile,
    "mse": choose_by_mse,
    "entropy": choose_by_entropy,
}
