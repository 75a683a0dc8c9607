"""Choose how a dataset is shuffled: fully if a reader can keep it, otherwise by blocks of chunks.

A chunked dataset that is too large to cache costs, fully shuffled, a chunk for nearly every sample; in the order of a
`BlockShuffle` each chunk once. The choice depends on the file and two constants, never on free memory: all ranks must
agree, and so must a run resumed on another machine. The reader's cache size follows from it. Small columns are kept
whole and do not count: labels may lie in a single chunk.

**Randomness** of an order is 1 for a full shuffle and 0 for stored order. With n samples, p(i) the position of sample
i, and means over all i:

    displacement    mean |p(i) − i|  /  (n² − 1) / 3n            how far samples move
    separation      (mean |p(i+1) − p(i)| − 1)  /  (n − 2) / 3    how far stored neighbours move apart

The divisors are the means of a full shuffle. Displacement does not see that blocks move as a whole; separation does:
chunks mixed w samples at a time give about w / n.

Training feels how alike the samples of a batch are. The share of pairs in a batch from one chunk of c samples is 1 in
stored order (chunk ≥ batch), (c − 1) / (w − 1) in windows of w samples, and (c − 1) / (n − 1) in a full shuffle. Where
chunks differ, in a file sorted by class or day, the variance of a batch mean grows by 1 + (b − 1)·share.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from scalelab.checks import check_at_least
from scalelab.data.chunks import ColumnChunks, amplify, describe_chunks
from scalelab.data.formats.catalogue import find_format, load_format
from scalelab.data.formats.columns import Settings
from scalelab.data.order import BUFFER_BYTES, BlockShuffle, FullShuffle, Numbers, Order, choose_order
from scalelab.errors import UsageError
from scalelab.units import format_quantity, format_share


@dataclass(frozen=True, kw_only=True)
class Randomness:
    """Measured on one order; None with too few samples."""

    displacement: float | None
    separation: float | None
    correlation: float | None
    """Spearman correlation of position and index: 1 in stored order, about 0 in a full shuffle."""
    same_chunk_share: float | None
    """The share of pairs in a batch from one chunk."""
    shuffled_same_chunk_share: float | None
    """The same in a full shuffle, on average."""

    @property
    def words(self) -> str:
        return (
            f"stored neighbours end up {format_share(self.separation)} as far apart as in a full shuffle;"
            f" {format_share(self.same_chunk_share)} of the pairs in a batch share a chunk"
            f" ({format_share(self.shuffled_same_chunk_share)} in a full shuffle)"
        )


def measure_randomness(order: Numbers, *, chunk_samples: int, batch_size: int) -> Randomness:
    """`order`: every index once."""
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
    """Spearman: 1 − 6·Σd² / n(n² − 1)."""
    n = len(places)
    squares = float(np.square(places - np.arange(n), dtype=np.float64).sum())
    return 1 - 6 * squares / (n * (n**2 - 1))


def share_same_chunk(order: Numbers, chunk_samples: int, batch_size: int) -> float | None:
    """The share of pairs from one chunk, over the full batches of the epoch."""
    num_batches = len(order) // batch_size
    if num_batches == 0 or batch_size < 2:
        return None
    chunks = np.sort((order // chunk_samples)[: num_batches * batch_size].reshape(num_batches, batch_size), axis=1)
    starts = np.ones(chunks.shape, dtype=np.bool_)
    starts[:, 1:] = chunks[:, 1:] != chunks[:, :-1]
    runs = np.diff(np.append(np.flatnonzero(starts), chunks.size))
    return float((runs * (runs - 1)).sum() / (num_batches * batch_size * (batch_size - 1)))


def share_of_pairs(num_samples: int, chunk_samples: int) -> float | None:
    """The share of pairs from one chunk among all samples; the last chunk may be short."""
    if num_samples < 2:
        return None
    whole, rest = divmod(num_samples, chunk_samples)
    pairs = whole * chunk_samples * (chunk_samples - 1) + rest * (rest - 1)
    return pairs / (num_samples * (num_samples - 1))


KEPT_BYTES = 256 * 2**20
"""Decoded samples a process may keep for a full shuffle: affordable on any training machine."""
ShuffleKind = Literal["auto", "full", "blocks"]


@dataclass(frozen=True, kw_only=True)
class StoredOrder:
    """An order, and the reader options for it."""

    order: Order = field(default_factory=FullShuffle)
    options: Settings = field(default_factory=dict)
    amplification: float = 1.0
    """Of a sample read alone, in the columns that are not kept whole."""

    @property
    def is_by_blocks(self) -> bool:
        return isinstance(self.order, BlockShuffle)

    def describe(self, seed: int, num_samples: int, batch_size: int) -> str:
        """A sentence with the randomness measured on the first epoch; empty for a full shuffle."""
        if not isinstance(self.order, BlockShuffle):
            return ""
        length, window = self.order.chunk_samples, self.order.window_chunks
        drawn = self.order.draw(seed, 0, num_samples)
        randomness = measure_randomness(drawn, chunk_samples=length, batch_size=batch_size)
        times = format_quantity("number", self.amplification)
        return (
            f"shuffled by blocks of {window} chunk{'s'[: window != 1]} of {length} samples, because reading one"
            f" sample decompresses {times} times its bytes; {randomness.words}"
        )


def choose_stored_order(
    path: Path,
    *,
    format: str = "",  # noqa: A002 - it is what it is called everywhere
    kind: ShuffleKind = "auto",
    kept_bytes: int | None = None,
    buffer_bytes: int = BUFFER_BYTES,
) -> StoredOrder:
    """How to shuffle a dataset without inflating much more than is read.

    `kind` full or blocks forces the choice; blocks needs chunks. `kept_bytes`: default `KEPT_BYTES`.
    """
    name = format or find_format(path)
    chunked = [column for column in describe_chunks(path, name) if column.chunk]
    can_keep_some = "cache_bytes" in load_format(name).open_options
    if kind == "blocks" and not (chunked and can_keep_some):
        raise UsageError(f"--shuffle blocks needs a chunked format, and {path} is not chunked: use --shuffle full")
    if not chunked or not can_keep_some or kind == "full":
        return StoredOrder()
    limit = KEPT_BYTES if kept_bytes is None else kept_bytes
    whole = sum(map(count_bytes, chunked))
    if kind == "auto" and whole <= limit:
        return StoredOrder(options={"cache_bytes": limit}, amplification=amplify(chunked))
    return order_by_blocks(chunked, buffer_bytes, is_forced=kind == "blocks")


def order_by_blocks(chunked: list[ColumnChunks], buffer_bytes: int, *, is_forced: bool) -> StoredOrder:
    """Blocks of the largest chunks among columns too large to keep whole."""
    small = [column for column in chunked if count_bytes(column) <= buffer_bytes]
    large = [column for column in chunked if column not in small] or [max(chunked, key=count_bytes)]
    longest = max(large, key=lambda column: column.chunk_samples)
    chunk_bytes = max(1, longest.chunk_samples * sum(column.sample_bytes for column in large))
    amplification = amplify(large)
    order = choose_order(
        amplification=float("inf") if is_forced else amplification,
        chunk_samples=longest.chunk_samples,
        chunk_bytes=chunk_bytes,
        buffer_bytes=buffer_bytes,
    )
    if isinstance(order, BlockShuffle):
        order = replace(order, window_chunks=min(order.window_chunks, longest.grid[0]))
    # Readers may split the cache evenly, and each column needs room for two windows.
    room = sum(map(count_bytes, small)) + len(large) * max(buffer_bytes, 2 * chunk_bytes)
    return StoredOrder(order=order, options={"cache_bytes": room}, amplification=amplification)


def count_bytes(column: ColumnChunks) -> int:
    """Of all its samples, decoded."""
    return column.num_samples * column.sample_bytes
