"""Histograms as a report draws them: of weights and results, in a hundred bins of equal width, with the chosen range.

What calibration counts has bins that are narrow near zero; here they are shared out over equal ones, which is exact but
for the counts of a bin that an edge cuts. A layer's range for its results is that of its grid; for its weights, that of
its largest scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from scalelab.quantize.calibrate import Calibration
from scalelab.quantize.histogram import Histogram as Counted
from scalelab.quantize.histogram import Values, count_values, rebin
from scalelab.quantize.network import QuantizedLayer, QuantizedNetwork
from scalelab.records.quantized import Histogram, HistogramKind

NUM_BINS = 100
WEIGHT_LIMIT = 127


def list_histograms(quantized: QuantizedNetwork, calibration: Calibration) -> tuple[Histogram, ...]:
    """Of the weights of every layer that has some, and of the results that were counted."""
    return tuple(one for layer in quantized.layers for one in _list_layer(layer, calibration))


def _list_layer(layer: QuantizedLayer, calibration: Calibration) -> Iterator[Histogram]:
    weight = layer.layer.weight
    if weight is not None:
        scale = None if layer.weight_scale is None else float(layer.weight_scale.max())
        limit = None if scale is None else WEIGHT_LIMIT * scale
        yield draw(layer.name, "weights", count_values(weight), None if limit is None else -limit, limit)
    counted = calibration.histograms.get(layer.name)
    if counted is not None:
        chosen = (None, None) if layer.is_unrounded else layer.output.range
        yield draw(layer.name, "after", counted, *chosen)


def draw(
    name: str, kind: HistogramKind, counted: Counted, chosen_low: float | None, chosen_high: float | None
) -> Histogram:
    """Equal bins from the least to the largest number; one that is always the same gets a bin around it."""
    low, high = counted.least, counted.largest
    if not low < high:
        half = max(abs(low) / 2, 0.5)
        low, high = low - half, high + half
    edges = np.linspace(low, high, NUM_BINS + 1)
    shares = rebin(counted.list_bins(), edges)
    return Histogram(
        layer=name,
        kind=kind,
        low=float(low),
        high=float(high),
        counts=_make_whole(shares, counted.num_values),
        least=counted.least,
        largest=counted.largest,
        mean=counted.mean,
        deviation=counted.deviation,
        chosen_low=chosen_low,
        chosen_high=chosen_high,
    )


def _make_whole(shares: Values, total: int) -> tuple[int, ...]:
    """Whole counts that add up to all: sums are rounded, not bins."""
    sums = [0, *(min(total, math.floor(value + 0.5)) for value in np.cumsum(shares))]
    sums[-1] = total
    return tuple(max(0, after - before) for before, after in pairwise(sums))
