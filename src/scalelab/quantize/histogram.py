"""Count float32 values so that order, batch size and batching leave no trace in the counts.

A bin is the beginning of a float32: sign, exponent and the first 11 of 23 mantissa bits. Bins need no range in advance
(2048 per octave, each at most 1/2048 of its values wide), counts are integers, and merging is adding: exact, in any
order. Minimum and maximum are kept exactly. Only occupied octaves are stored, 16 KB each: typically half a megabyte, at
most 8 MB.

`mean` and `deviation` use the bins' middles, at most 2⁻¹² of a value off, and math.fsum, so they do not depend on the
order either.
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
"""Of one sign."""
NUM_BINS = 2 * NUM_OCTAVES * BINS_PER_OCTAVE

Counts = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Bins:
    """The occupied bins in rising order."""

    lows: Values
    """Zero is a bin of no width."""
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
        """σ² = Σ (x − mean)² / n."""
        mean = self.mean
        return math.sqrt(math.fsum((self.middles - mean) ** 2 * self.counts) / self.num_values)


@dataclass(frozen=True, kw_only=True, eq=False)
class ValueHistogram:
    """The counts of a tensor's values."""

    octaves: Mapping[int, Counts] = field(default_factory=dict)
    """By sign and exponent (negative values start at 256)."""
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
        # Images are often full of their extremes, and nothing lies beyond them in their bins.
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
        if not isinstance(other, ValueHistogram) or self.octaves.keys() != other.octaves.keys():
            return False
        same = all(np.array_equal(counts, other.octaves[octave]) for octave, counts in self.octaves.items())
        return same and (self.least, self.largest) == (other.least, other.largest)

    __hash__ = None  # type: ignore[assignment]


def count_values(values: torch.Tensor) -> ValueHistogram:
    """The counts of finite float32 values."""
    if values.numel() == 0:
        return ValueHistogram()
    # Adding zero turns −0 into 0; it would be a bin of its own.
    flat = values.detach().to("cpu", torch.float32).flatten() + 0.0
    keys = (flat.view(torch.int32) >> SHIFT) & (NUM_BINS - 1)
    counts = torch.bincount(keys, minlength=NUM_BINS).reshape(-1, BINS_PER_OCTAVE)
    occupied = counts.any(dim=1).nonzero().flatten().tolist()
    octaves = {octave: counts[octave].numpy().copy() for octave in occupied}
    return ValueHistogram(octaves=octaves, least=float(flat.min()), largest=float(flat.max()))


def merge_histograms(histograms: Iterable[ValueHistogram]) -> ValueHistogram:
    """The sum of all counts."""
    octaves: dict[int, Counts] = {}
    least, largest = math.inf, -math.inf
    for histogram in histograms:
        for octave, counts in histogram.octaves.items():
            octaves[octave] = octaves[octave] + counts if octave in octaves else counts
        least, largest = min(least, histogram.least), max(largest, histogram.largest)
    return ValueHistogram(octaves=octaves, least=least, largest=largest)


def list_counts(octaves: Mapping[int, Counts]) -> tuple[npt.NDArray[np.int64], Counts]:
    """Keys and counts of the occupied bins."""
    if not octaves:
        nothing = np.zeros(0, np.int64)
        return nothing, nothing
    inside = {octave: np.flatnonzero(counts) for octave, counts in octaves.items()}
    keys = [octave * BINS_PER_OCTAVE + places for octave, places in inside.items()]
    return np.concatenate(keys), np.concatenate([octaves[octave][places] for octave, places in inside.items()])


def rebin(bins: Bins, edges: Values) -> Values:
    """Counts between rising `edges`; a bin cut by an edge is split by width."""
    counts = np.diff(share_below(bins, edges))
    is_point = (bins.highs == bins.lows) & (bins.lows >= edges[0]) & (bins.lows <= edges[-1])
    places = np.searchsorted(edges, bins.lows[is_point], side="right") - 1
    np.add.at(counts, np.clip(places, 0, len(counts) - 1), bins.counts[is_point])
    return counts


def share_below(bins: Bins, edges: Values) -> Values:
    """Counts below each edge, without bins of no width."""
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
