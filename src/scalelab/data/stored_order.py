"""How a stored set is shuffled: fully where a reader can keep it, otherwise by blocks of its chunks.

A set in chunks is read at the speed of memory once all of it is decoded and kept. One that is too large for that
costs, fully shuffled, a chunk for nearly every sample, and in the order of a `BlockShuffle` (`order.py`) each chunk
once. Which of the two it is follows from the file and from two constants, never from the memory that happens to be
free: all ranks must come to the same order, and so must a training that goes on tomorrow on another machine.

What the reader has to keep for that is told to it, so that it does not depend on the memory either. Small columns are
kept whole and do not count: the labels of images may lie in one chunk, and blocks of that would be no shuffle at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from scalelab.data.amplification import ColumnChunks, amplify
from scalelab.data.chunks import describe_chunks
from scalelab.data.formats.catalogue import find_format, load_format
from scalelab.data.formats.columns import Settings
from scalelab.data.order import BUFFER_BYTES, BlockShuffle, FullShuffle, Order, choose_order
from scalelab.data.randomness import measure_randomness
from scalelab.errors import UsageError
from scalelab.units import format_quantity

KEPT_BYTES = 256 * 2**20
"""Of decoded samples that a process keeps for a full shuffle: what every machine that trains can spare."""
ShuffleKind = Literal["auto", "full", "blocks"]


@dataclass(frozen=True, kw_only=True)
class StoredOrder:
    """An order, and what the reader is told so that it can follow it."""

    order: Order = field(default_factory=FullShuffle)
    options: Settings = field(default_factory=dict)
    amplification: float = 1.0
    """Of a sample that is read alone, in the columns that are not kept whole."""

    @property
    def is_by_blocks(self) -> bool:
        return isinstance(self.order, BlockShuffle)

    def describe(self, seed: int, num_samples: int, batch_size: int) -> str:
        """In words, with the randomness of the first epoch as it was measured; nothing of a full shuffle."""
        if not isinstance(self.order, BlockShuffle):
            return ""
        length, window = self.order.chunk_samples, self.order.window_chunks
        drawn = self.order.draw(seed, 0, num_samples)
        randomness = measure_randomness(drawn, chunk_samples=length, batch_size=batch_size)
        times = format_quantity("number", self.amplification)
        return (
            f"shuffled by blocks of {window} chunk{'s'[: window != 1]} of {length} samples, since one that is read"
            f" alone inflates {times} times its bytes; {randomness.words}"
        )


def choose_stored_order(
    path: Path,
    *,
    format: str = "",  # noqa: A002 - it is what it is called everywhere
    kind: ShuffleKind = "auto",
    kept_bytes: int | None = None,
    buffer_bytes: int = BUFFER_BYTES,
) -> StoredOrder:
    """How to shuffle a set so that no process inflates much more than it reads.

    full and blocks leave no choice; what has no chunks cannot be shuffled by them. `kept_bytes` is `KEPT_BYTES` unless
    it is given.
    """
    name = format or find_format(path)
    chunked = [column for column in describe_chunks(path, name) if column.chunk]
    can_keep_some = "cache_bytes" in load_format(name).open_options
    if kind == "blocks" and not (chunked and can_keep_some):
        raise UsageError(f"--shuffle blocks: {path} is not read by chunks: use --shuffle full")
    if not chunked or not can_keep_some or kind == "full":
        return StoredOrder()
    limit = KEPT_BYTES if kept_bytes is None else kept_bytes
    whole = sum(map(count_bytes, chunked))
    if kind == "auto" and whole <= limit:
        return StoredOrder(options={"cache_bytes": limit}, amplification=amplify(chunked))
    return order_by_blocks(chunked, buffer_bytes, is_forced=kind == "blocks")


def order_by_blocks(chunked: list[ColumnChunks], buffer_bytes: int, *, is_forced: bool) -> StoredOrder:
    """Blocks along the largest chunks of those columns that are not small enough to be kept whole beside them."""
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
    # Readers may cut what they are told into equal parts, and each column needs room for its two windows.
    room = sum(map(count_bytes, small)) + len(large) * max(buffer_bytes, 2 * chunk_bytes)
    return StoredOrder(order=order, options={"cache_bytes": room}, amplification=amplification)


def count_bytes(column: ColumnChunks) -> int:
    """Of all its samples, decoded."""
    return column.num_samples * column.sample_bytes
