"""How random an order is, in numbers that are 1 for a full shuffle and 0 for the order in which samples are stored.

With n samples, p(i) the position of sample i, and means over all i:

    displacement    mean |p(i) − i|  /  (n² − 1) / 3n            how far samples come from their place
    separation      (mean |p(i+1) − p(i)| − 1)  /  (n − 2) / 3    how far stored neighbours come apart

Two positions that are drawn at random lie (n² − 1) / 3n apart when they may be equal and (n + 1) / 3 when they may not:
these are what a full shuffle gives on average. Displacement alone does not see that blocks move as a whole. Separation
does: chunks that are mixed w samples at a time give about w / n.

What a training feels of it is how alike the samples of a batch are. The share of pairs in a batch that come from one
chunk is 1 in stored order where a chunk is at least a batch, (c − 1) / (w − 1) inside windows of w samples, and
(c − 1) / (n − 1) in a full shuffle, for chunks of c. Where chunks differ, because a file is sorted by class or day, the
mean over a batch of b scatters as if it had 1 + (b − 1)·share times the variance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scalelab.checks import check_at_least
from scalelab.data.order import Numbers
from scalelab.units import format_share


@dataclass(frozen=True, kw_only=True)
class Randomness:
    """What was measured of one order; None where there are too few samples to say."""

    displacement: float | None
    separation: float | None
    correlation: float | None
    """Of position with number (Spearman): 1 in stored order, about 0 in a full shuffle."""
    same_chunk_share: float | None
    """Of all pairs of samples in a batch, those from one chunk."""
    shuffled_same_chunk_share: float | None
    """The same as a full shuffle gives it on average."""

    @property
    def words(self) -> str:
        return (
            f"stored neighbours come {format_share(self.separation)} as far apart as in a full shuffle;"
            f" {format_share(self.same_chunk_share)} of the pairs in a batch share a chunk"
            f" ({format_share(self.shuffled_same_chunk_share)} in a full shuffle)"
        )


def measure_randomness(order: Numbers, *, chunk_samples: int, batch_size: int) -> Randomness:
    """Of the order of one epoch, which holds every number once."""
    check_at_least("chunk_samples", chunk_samples, 1)
    check_at_least("batch_size", batch_size, 1)
    n = len(order)
    places = np.empty(n, dtype=np.int64)
    places[order] = np.arange(n)
    return Randomness(
        displacement=float(np.abs(places - np.arange(n)).mean() * 3 * n / (n**2 - 1)) if n > 1 else None,
        separation=float((np.abs(np.diff(places)).mean() - 1) * 3 / (n - 2)) if n > 2 else None,
        correlation=correlate(places) if n > 1 else None,
        same_chunk_share=share_same_chunk(order, chunk_samples, batch_size),
        shuffled_same_chunk_share=share_of_pairs(n, chunk_samples),
    )


def correlate(places: Numbers) -> float:
    """Spearman's, which is 1 − 6·Σd² / n(n² − 1) where every rank comes once."""
    n = len(places)
    squares = float(np.square(places - np.arange(n), dtype=np.float64).sum())
    return 1 - 6 * squares / (n * (n**2 - 1))


def share_same_chunk(order: Numbers, chunk_samples: int, batch_size: int) -> float | None:
    """Pairs from one chunk among all pairs of samples in a batch, over the whole batches of the epoch."""
    num_batches = len(order) // batch_size
    if num_batches == 0 or batch_size < 2:
        return None
    chunks = np.sort((order // chunk_samples)[: num_batches * batch_size].reshape(num_batches, batch_size), axis=1)
    starts = np.ones(chunks.shape, dtype=np.bool_)
    starts[:, 1:] = chunks[:, 1:] != chunks[:, :-1]
    runs = np.diff(np.append(np.flatnonzero(starts), chunks.size))
    return float((runs * (runs - 1)).sum() / (num_batches * batch_size * (batch_size - 1)))


def share_of_pairs(num_samples: int, chunk_samples: int) -> float | None:
    """Pairs from one chunk among all pairs of samples there are; the last chunk may be short."""
    if num_samples < 2:
        return None
    whole, rest = divmod(num_samples, chunk_samples)
    pairs = whole * chunk_samples * (chunk_samples - 1) + rest * (rest - 1)
    return pairs / (num_samples * (num_samples - 1))
