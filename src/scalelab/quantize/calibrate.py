"""Count the values of every layer on the calibration images, and choose the range that int8 covers.

Scales do not depend on batch size or sample order, bit for bit: kernels sum in another order for another batch size or
thread count, so every sample runs alone, in a batch of one on one thread. (Two threads gain nothing there; lenet took
20 times as long on a busy machine.) Memory is bounded by the histograms, about half a megabyte per layer, and a buffer
of four megabytes per layer. Counted are the layers with a grid of their own; max pooling, flatten and a separate ReLU
share their input's.

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
made on these figures, so they are a winner's: benchmarks/int8_accuracy.py tests it on other networks. Logits rounded to
a byte tie in 3 to 4 % of lenet's samples, so they stay float by default.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import torch

from scalelab.errors import UnknownName, UsageError
from scalelab.quantize.histogram import Bins, ValueHistogram, Values, count_values, merge_histograms, rebin
from scalelab.quantize.network import PASSING, CapturedNetwork, run_float
from scalelab.quantize.sessions import one_thread

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


def choose_range(histogram: ValueHistogram, method: Method) -> Range:
    """The range for counted values: from 0 if none is negative, otherwise symmetric."""
    widest = find_widest(histogram.least, histogram.largest)
    if method == "minmax" or widest == (0.0, 0.0):
        return widest
    return CHOOSERS[method](histogram.list_bins(), widest)


def find_widest(least: float, largest: float) -> Range:
    """Everything seen, and zero."""
    if least >= 0:
        return 0.0, max(largest, 0.0)
    limit = max(-least, largest)
    return -limit, limit


def choose_by_sigma(bins: Bins, widest: Range) -> Range:
    return narrow(widest, abs(bins.mean) + SIGMAS * bins.deviation)


def choose_by_percentile(bins: Bins, widest: Range) -> Range:
    """Of magnitudes."""
    return narrow(widest, find_quantile(np.abs(bins.middles), bins.counts, PERCENTILE / 100.0))


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


def narrow(widest: Range, limit: float) -> Range:
    """Up to `limit` within `widest`, symmetric if that is."""
    high = min(limit, widest[1])
    return -high if widest[0] < 0 else 0.0, high


def scale_range(chosen: Range, ratio: float) -> Range:
    return chosen[0] * ratio, chosen[1] * ratio


CHOOSERS: dict[Method, Callable[[Bins, Range], Range]] = {
    "sigma": choose_by_sigma,
    "percentile": choose_by_percentile,
    "mse": choose_by_mse,
    "entropy": choose_by_entropy,
}


BUFFER_VALUES = 1 << 20
"""Values of a layer counted at once."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """The counts, and how to choose ranges from them."""

    histograms: Mapping[str, ValueHistogram]
    """Outputs of the layers with a grid of their own, after the ReLU."""
    num_samples: int
    method: Method = "mse"

    @functools.cached_property
    def ranges(self) -> Mapping[str, Range]:
        """The range chosen for each, symmetric where something negative was seen."""
        return {name: choose_range(histogram, self.method) for name, histogram in self.histograms.items()}


def calibrate(network: CapturedNetwork, batches: Iterable[torch.Tensor], method: Method = "mse") -> Calibration:
    """Count the outputs of every layer on batches of images."""
    if method not in get_args(Method):
        raise UnknownName("calibration method", method, get_args(Method))
    recorder = OutputRecorder(names=[layer.name for layer in network.layers if layer.op not in PASSING])
    num_samples = 0
    for number, images in number_batches(network, batches):
        with one_thread():
            for sample in images:
                results = run_float(network, sample.unsqueeze(0).clone(memory_format=torch.contiguous_format))
                check_finite(number, results)
                recorder.record(results)
        num_samples += len(images)
    histograms = recorder.finish()
    check_counted(network, histograms, num_samples)
    return Calibration(histograms=histograms, num_samples=num_samples, method=method)


@dataclass(kw_only=True)
class OutputRecorder:
    """Buffers outputs until there are enough to count."""

    names: list[str]
    waiting: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    num_waiting: dict[str, int] = field(default_factory=dict)
    histograms: dict[str, ValueHistogram] = field(default_factory=dict)

    def record(self, results: Mapping[str, torch.Tensor]) -> None:
        for name in self.names:
            self.waiting.setdefault(name, []).append(results[name].flatten())
            self.num_waiting[name] = self.num_waiting.get(name, 0) + results[name].numel()
            if self.num_waiting[name] >= BUFFER_VALUES:
                self.count(name)

    def count(self, name: str) -> None:
        counted = count_values(torch.cat(self.waiting.pop(name)))
        self.num_waiting[name] = 0
        self.histograms[name] = merge_histograms([self.histograms.get(name, ValueHistogram()), counted])

    def finish(self) -> dict[str, ValueHistogram]:
        for name in list(self.waiting):
            self.count(name)
        return {name: self.histograms[name] for name in self.names if name in self.histograms}


def number_batches(network: CapturedNetwork, batches: Iterable[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
    """Every batch with its number from 0, checked."""
    for number, images in enumerate(batches):
        if tuple(images.shape[1:]) != network.input_shape:
            raise UsageError(
                f"calibration batch {number} has shape {tuple(images.shape)}: it must be"
                f" (samples, {', '.join(map(str, network.input_shape))})"
            )
        yield number, images.detach().to("cpu", torch.float32)


def check_finite(number: int, results: Mapping[str, torch.Tensor]) -> None:
    for name, values in results.items():
        if not torch.isfinite(values).all():
            kind = "NaN" if torch.isnan(values).any() else "infinite numbers"
            raise UsageError(
                f"calibration batch {number} produces {kind} in layer {name}: "
                + ("check how its images are read and normalised" if name == "input" else "the model overflows there")
            )


def check_counted(network: CapturedNetwork, histograms: Mapping[str, ValueHistogram], num_samples: int) -> None:
    if num_samples == 0:
        raise UsageError("there are no calibration samples: pass at least one batch; a few hundred samples are usual")
    images = histograms[network.layers[0].name]
    if images.is_constant:
        raise UsageError(
            f"every value of the calibration images is {images.least:g}, which gives no range:"
            " use images like those the model will see"
        )
