"""How many bytes are inflated in an epoch, by whom and in which order: the count behind every predicted second.

Two readers are told apart. One reads a sample at a time by the format's own library: HDF5's chunk cache is followed
step by step (`chunk_cache.py`), other libraries keep nothing. The other is scalelab's, batch by batch: it inflates a
row of chunks once for all samples of a batch that lie in it, and keeps the rows used last.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from scalelab.data.amplification import ColumnChunks
from scalelab.data.chunk_cache import (
    MOST_VISITS,
    CacheSize,
    ChunkGrid,
    Inflations,
    Walk,
    count_in_order,
    count_shuffled,
)
from scalelab.data.formats.decoded import find_cache_bytes
from scalelab.data.formats.hdf5_chunks import share_budget

Columns = Sequence[ColumnChunks]
Count = Callable[[Sequence[int]], int]
"""Bytes that are inflated to read samples, after all that were read before."""


@dataclass(frozen=True)
class EpochBytes:
    """Bytes inflated in an epoch, in order and shuffled."""

    in_order: float
    shuffled: float
    is_exact: bool
    """Whether the number in order is a count and not an extrapolation."""


def make_grid(column: ColumnChunks) -> ChunkGrid:
    return ChunkGrid(shape=column.shape, chunk=column.chunk or column.shape, item_bytes=column.item_bytes)


def list_inflated(columns: Columns) -> list[ColumnChunks]:
    """Those of which more than the sample itself must be read."""
    return [column for column in columns if not column.is_read_in_part]


def count_plain_epoch(columns: Columns, cache: CacheSize | None = None) -> EpochBytes:
    """Of a reader of one sample at a time; `cache`: instead of what the library keeps by default."""
    in_order = shuffled = 0.0
    is_exact = True
    for column in list_inflated(columns):
        size = cache or column.cache
        if size is None:
            whole = column.inflated_bytes * column.num_samples
            found = [Inflations(whole / column.chunk_bytes, is_exact=True)] * 2
        else:
            found = [count(make_grid(column), size) for count in (count_in_order, count_shuffled)]
        in_order += found[0].number * column.chunk_bytes
        shuffled += found[1].number * column.chunk_bytes
        is_exact &= found[0].is_exact
    return EpochBytes(in_order, shuffled, is_exact)


def follow_plain(columns: Columns) -> Count:
    """The same, sample by sample."""
    walks = [
        (Walk(make_grid(column), column.cache) if column.cache else None, column) for column in list_inflated(columns)
    ]

    def count(samples: Sequence[int]) -> int:
        return sum(
            walk.read(sample) * column.chunk_bytes if walk else int(column.inflated_bytes)
            for sample in samples
            for walk, column in walks
        )

    return count


def follow_batches(columns: Columns, rooms: Sequence[int]) -> Count:
    """Of scalelab's reader, which keeps so many rows of each column."""
    kept: list[OrderedDict[int, None]] = [OrderedDict() for _ in columns]

    def count(samples: Sequence[int]) -> int:
        return sum(
            visit_rows({sample // column.chunk_samples for sample in samples}, own, room) * column.row_bytes
            for column, own, room in zip(columns, kept, rooms, strict=True)
            if column.chunk
        )

    return count


def visit_rows(rows: set[int], kept: OrderedDict[int, None], room: int) -> int:
    """Rows that are not kept and have to be inflated; those used longest ago make room."""
    number = 0
    for row in sorted(rows):
        if row in kept:
            kept.move_to_end(row)
            continue
        number += 1
        if room:
            kept[row] = None
            if len(kept) > room:
                kept.popitem(last=False)
    return number


def find_rooms(columns: Columns, family: str) -> list[int]:
    """Rows of chunks that scalelab's reader keeps of every column, by default."""
    if family == "npz":
        return [1 for _ in columns]
    num_bytes = {column.name: column.num_samples * column.sample_bytes for column in columns if column.chunk}
    if family == "hdf5":
        shares = share_budget(find_cache_bytes(), num_bytes)
    else:
        total, budget = max(1, sum(num_bytes.values())), find_cache_bytes()
        shares = {name: budget * size // total for name, size in num_bytes.items()}
    return [_count_room(column, shares.get(column.name, 0)) for column in columns]


def _count_room(column: ColumnChunks, share: int) -> int:
    if share >= column.num_samples * column.sample_bytes:
        return column.num_samples
    return share // max(1, column.chunk_samples * column.sample_bytes)


def count_batched_epoch(columns: Columns, rooms: Sequence[int], batch: int) -> EpochBytes:
    """Of scalelab's reader; shuffled, as many batches are followed as `MOST_VISITS` allows."""
    if not any(column.chunk for column in columns):
        return EpochBytes(0.0, 0.0, is_exact=True)
    num_samples = columns[0].num_samples
    in_order = sum(
        column.row_bytes * (column.grid[0] if room else _count_touched(num_samples, column.chunk_samples, batch))
        for column, room in zip(columns, rooms, strict=True)
        if column.chunk
    )
    followed = min(num_samples, MOST_VISITS // len(columns))
    count = follow_batches(columns, rooms)
    counts = [count(part) for part in make_batches(draw_order(num_samples, followed), batch)]
    late = counts[len(counts) // 2 :]
    rest = (num_samples - followed) / batch * sum(late) / len(late)
    return EpochBytes(in_order, sum(counts) + rest, is_exact=True)


def _count_touched(num_samples: int, chunk_samples: int, batch: int) -> int:
    """Rows that batches in order lie in, counted anew for every batch."""
    parts = make_batches(range(num_samples), batch)
    return sum(part[-1] // chunk_samples - part[0] // chunk_samples + 1 for part in parts)


def draw_order(num_samples: int, number: int, seed: int = 0) -> list[int]:
    """So many different samples, at random."""
    return random.Random(seed).sample(range(num_samples), min(number, num_samples))


def make_batches(order: Sequence[int], batch: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(order), batch):
        yield order[start : start + batch]
