"""How often which numbers occur, counted so that no order, batch size or split over ranks can be seen in the counts.

A bin is what a float32 begins with: its sign, its exponent and the first 11 of 23 bits of its mantissa. So bins need no
range in advance (2048 of them in every octave, each at most 1/2048 of its numbers wide), a number falls into the same
one whenever it comes, counts are integers, and merging two histograms is adding them: exact, in any order. The least
and the largest number are kept as they are. Only octaves in which something was counted are stored, 16 KB each and 512
at most, so 8 MB is the bound and about half a megabyte the use, however many numbers are counted.

What is derived (`mean`, `deviation`) stands on the middles of the bins, which are at most 2⁻¹² of a number away from
it; sums are rounded once (math.fsum), so that they too are the same whatever came first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

MANTISSA_BITS = 11
BINS_PER_OCTAVE = 1 << MANTISSA_BITS
SHIFT = 23 - MANTISSA_BITS
NUM_OCTAVES = 256
"""Of one sign: as many as exponents."""
NUM_BINS = 2 * NUM_OCTAVES * BINS_PER_OCTAVE

Counts = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Bins:
    """The bins with something in them, in rising order of their numbers."""

    lows: Values
    """Where each begins and ends; zero is a bin of no width."""
    highs: Values
    counts: Counts

    @property
    def middles(self) -> Values:
        return (self.lows + self.highs) / 2

    @property
    def num_values(self) -> int:
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        return math.fsum(self.middles * self.counts) / self.num_values

    @property
    def deviation(self) -> float:
        """The standard deviation of what was counted, σ² = Σ (x − mean)² / n."""
        mean = self.mean
        return math.sqrt(math.fsum((self.middles - mean) ** 2 * self.counts) / self.num_values)


@dataclass(frozen=True, kw_only=True, eq=False)
class Histogram:
    """The counts of a tensor's numbers."""

    octaves: Mapping[int, Counts] = field(default_factory=dict)
    """By sign and exponent (those of negative numbers begin at 256)."""
    least: float = math.inf
    largest: float = -math.inf

    @property
    def num_values(self) -> int:
        return sum(int(counts.sum()) for counts in self.octaves.values())

    @property
    def is_constant(self) -> bool:
        return self.least == self.largest

    def list_bins(self) -> Bins:
        keys, counts = list_counts(self.octaves)
        magnitudes = (keys % (NUM_BINS // 2)).astype(np.uint32)
        near = (magnitudes << np.uint32(SHIFT)).view(np.float32).astype(np.float64)
        far = ((magnitudes + np.uint32(1)) << np.uint32(SHIFT)).view(np.float32).astype(np.float64)
        far[magnitudes == 0] = 0.0
        is_negative = keys >= NUM_BINS // 2
        lows, highs = np.where(is_negative, -far, near), np.where(is_negative, -near, far)
        # Images are often full of their least or largest number, and none lies beyond it in the same bin.
        lows, highs = (np.clip(ends, self.least, self.largest) for ends in (lows, highs))
        order = np.argsort(lows + highs, kind="stable")
        return Bins(lows=lows[order], highs=highs[order], counts=counts[order])

    @property
    def mean(self) -> float:
        return self.list_bins().mean

    @property
    def deviation(self) -> float:
        return self.list_bins().deviation

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Histogram) or self.octaves.keys() != other.octaves.keys():
            return False
        same = all(np.array_equal(counts, other.octaves[octave]) for octave, counts in self.octaves.items())
        return same and (self.least, self.largest) == (other.least, other.largest)

    __hash__ = None  # type: ignore[assignment]


def count_values(values: torch.Tensor) -> Histogram:
    """The histogram of a tensor of finite float32 numbers."""
    if values.numel() == 0:
        return Histogram()
    # Adding zero makes a zero of minus zero, which would be a bin of its own.
    flat = values.detach().to("cpu", torch.float32).flatten() + 0.0
    keys = (flat.view(torch.int32) >> SHIFT) & (NUM_BINS - 1)
    counts = torch.bincount(keys, minlength=NUM_BINS).reshape(-1, BINS_PER_OCTAVE)
    occupied = counts.any(dim=1).nonzero().flatten().tolist()
    octaves = {octave: counts[octave].numpy().copy() for octave in occupied}
    return Histogram(octaves=octaves, least=float(flat.min()), largest=float(flat.max()))


def merge_histograms(histograms: Iterable[Histogram]) -> Histogram:
    """All of them counted together."""
    octaves: dict[int, Counts] = {}
    least, largest = math.inf, -math.inf
    for histogram in histograms:
        for octave, counts in histogram.octaves.items():
            octaves[octave] = octaves[octave] + counts if octave in octaves else counts
        least, largest = min(least, histogram.least), max(largest, histogram.largest)
    return Histogram(octaves=octaves, least=least, largest=largest)


def list_counts(octaves: Mapping[int, Counts]) -> tuple[npt.NDArray[np.int64], Counts]:
    """The numbers of the bins that are not empty, and their counts."""
    if not octaves:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    inside = {octave: np.flatnonzero(counts) for octave, counts in octaves.items()}
    keys = [octave * BINS_PER_OCTAVE + places for octave, places in inside.items()]
    return np.concatenate(keys), np.concatenate([octaves[octave][places] for octave, places in inside.items()])


def rebin(bins: Bins, edges: Values) -> Values:
    """How many numbers lie between each two of the rising `edges`; what an edge cuts is shared out by width."""
    counts = np.diff(share_below(bins, edges))
    is_point = (bins.highs == bins.lows) & (bins.lows >= edges[0]) & (bins.lows <= edges[-1])
    places = np.searchsorted(edges, bins.lows[is_point], side="right") - 1
    np.add.at(counts, np.clip(places, 0, len(counts) - 1), bins.counts[is_point])
    return counts


def share_below(bins: Bins, edges: Values) -> Values:
    """How many numbers lie below each edge, without those of bins that have no width."""
    is_wide = bins.highs > bins.lows
    lows, highs, counts = bins.lows[is_wide], bins.highs[is_wide], bins.counts[is_wide]
    if not len(lows):
        return np.zeros(len(edges))
    before = np.concatenate([[0], np.cumsum(counts)])
    places = np.searchsorted(lows, edges, side="right") - 1
    inside = np.clip(places, 0, None)
    parts = np.clip((edges - lows[inside]) / (highs[inside] - lows[inside]), 0.0, 1.0)
    below: Values = np.where(places < 0, 0.0, before[inside] + parts * counts[inside])
    return below
