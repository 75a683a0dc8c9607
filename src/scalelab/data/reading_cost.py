"""Predict the seconds of an epoch: count the bytes inflated, measure what an item and a byte cost.

**Counting.** Two readers. The format's own library, one sample at a time: HDF5's chunk cache is simulated
(`chunk_cache.py`), other libraries keep nothing. scalelab's, batch by batch: it inflates a row of chunks once for all
samples of a batch in it, and keeps the most recently used rows.

**Measuring.** Each reader is tried on items (samples or batches) in order and shuffled, in a few interleaved parts. A
part is read twice: first to warm the page cache and see how much fits the time, then timed.

    seconds of an item = item_seconds + byte_seconds · bytes inflated for it

Both are medians of CPU time, so other processes do not count.

**The plain readers** follow the tutorials: HDF5 with its default cache; zarr, without one; a compressed `.npz`,
inflated for every access; Parquet by row group; anything else through `StoredSet`, one sample at a time.
"""

from __future__ import annotations

import importlib
import random
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from scalelab.data.chunk_cache import (
    MOST_VISITS,
    CacheSize,
    ChunkGrid,
    Inflations,
    Walk,
    count_in_order,
    count_shuffled,
)
from scalelab.data.chunks import ColumnChunks
from scalelab.data.formats.decoded import find_cache_bytes
from scalelab.data.formats.hdf5_chunks import share_budget
from scalelab.data.formats.stored import StoredSet, reading_errors

Columns = Sequence[ColumnChunks]
Count = Callable[[Sequence[int]], int]
"""Bytes inflated to read these samples, given all read before."""


@dataclass(frozen=True)
class EpochBytes:
    """Bytes inflated in an epoch."""

    in_order: float
    shuffled: float
    is_exact: bool
    """Whether the in-order number is a count, not an extrapolation."""


def make_grid(column: ColumnChunks) -> ChunkGrid:
    return ChunkGrid(shape=column.shape, chunk=column.chunk or column.shape, item_bytes=column.item_bytes)


def list_inflated(columns: Columns) -> list[ColumnChunks]:
    """Columns of which more than the sample must be read."""
    return [column for column in columns if not column.is_read_in_part]


def count_plain_epoch(columns: Columns, cache: CacheSize | None = None) -> EpochBytes:
    """One sample at a time; `cache` replaces the library's default."""
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
    """scalelab's reader, which keeps so many rows of each column."""
    kept: list[OrderedDict[int, None]] = [OrderedDict() for _ in columns]

    def count(samples: Sequence[int]) -> int:
        return sum(
            visit_rows({sample // column.chunk_samples for sample in samples}, own, room) * column.row_bytes
            for column, own, room in zip(columns, kept, rooms, strict=True)
            if column.chunk
        )

    return count


def visit_rows(rows: set[int], kept: OrderedDict[int, None], room: int) -> int:
    """Rows to inflate; the least recently used are evicted."""
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
    """Rows of chunks that scalelab's reader keeps per column by default."""
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
    """scalelab's reader; shuffled, `MOST_VISITS` bounds the batches simulated."""
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
    """Rows touched by batches in order, counted per batch."""
    parts = make_batches(range(num_samples), batch)
    return sum(part[-1] // chunk_samples - part[0] // chunk_samples + 1 for part in parts)


def draw_order(num_samples: int, number: int, seed: int = 0) -> list[int]:
    """Distinct random samples."""
    return random.Random(seed).sample(range(num_samples), min(number, num_samples))


def make_batches(order: Sequence[int], batch: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(order), batch):
        yield order[start : start + batch]


Item = Sequence[int]
"""Samples read at once."""
TimedRead = Callable[[Item], object]
MOST_ITEMS = 300
"""Per part."""
FEW = 4
"""Items read even if they take longer: in order, the second shows what is not inflated again."""
MOST_DELAY = 10
"""Allowed wall time, relative to CPU time, on a busy machine or a slow disk."""
ENOUGH = 10
"""Items of one order needed for a median."""
T = TypeVar("T")


@dataclass(frozen=True)
class Costs:
    item_seconds: float
    byte_seconds: float

    def predict(self, num_items: float, inflated_bytes: float) -> float:
        return self.item_seconds * num_items + self.byte_seconds * inflated_bytes


@dataclass(frozen=True)
class ItemTiming:
    """Time of one item and the bytes inflated for it."""

    seconds: float
    inflated: int


@dataclass(frozen=True)
class TriedReader:
    """How to open a reader, and the model of what it keeps."""

    open: Callable[[], AbstractContextManager[TimedRead]]
    make_count: Callable[[], Count]


@dataclass(frozen=True)
class OrderCosts:
    in_order: Costs
    shuffled: Costs


def measure_costs(
    trial: TriedReader, in_order: Sequence[Sequence[Item]], shuffled: Sequence[Sequence[Item]], seconds: float
) -> OrderCosts:
    """Try a reader on parts of both orders in turn, for about so many seconds."""
    share = seconds / (2 * (len(in_order) + len(shuffled)))
    timings: tuple[list[ItemTiming], list[ItemTiming]] = ([], [])
    for parts in zip(in_order, shuffled, strict=True):
        for own, part in zip(timings, parts, strict=True):
            length = _rehearse(trial, part[:MOST_ITEMS], share)
            own += _measure(trial, part[:length])
    pooled = timings[0] + timings[1]
    return OrderCosts(fit_costs(timings[0], pooled), fit_costs(timings[1], pooled))


def _rehearse(trial: TriedReader, items: Sequence[Item], seconds: float) -> int:
    """Items that fit the time; at least a few."""
    start, begin = time.process_time(), time.perf_counter()
    with trial.open() as read:
        for number, item in enumerate(items, start=1):
            read(item)
            used = time.process_time() - start
            if time.perf_counter() - begin > MOST_DELAY * seconds or used > (1 if number >= FEW else 4) * seconds:
                return number
    return len(items)


def _measure(trial: TriedReader, items: Sequence[Item]) -> list[ItemTiming]:
    """Time every item; inflated bytes are counted afterwards."""
    times, count = [], trial.make_count()
    with trial.open() as read:
        for item in items:
            start = time.process_time()
            read(item)
            times.append(time.process_time() - start)
    return [ItemTiming(seconds, count(item)) for seconds, item in zip(times, items, strict=True)]


def fit_costs(timings: Sequence[ItemTiming], pooled: Sequence[ItemTiming]) -> Costs:
    """Items that inflate nothing give `item_seconds`, the others `byte_seconds`.

    `pooled`: items of both orders, used where one order has too few.
    """
    free = _choose(
        [one.seconds for one in timings if not one.inflated], [one.seconds for one in pooled if not one.inflated]
    )
    item_seconds = statistics.median(free) if free else 0.0
    paid = _choose([one for one in timings if one.inflated], [one for one in pooled if one.inflated])
    if not paid:
        return Costs(item_seconds, 0.0)
    rates = [(one.seconds - item_seconds) / one.inflated for one in paid]
    return Costs(item_seconds, max(0.0, statistics.median(rates)))


def _choose(own: list[T], pooled: list[T]) -> list[T]:
    return own if len(own) >= ENOUGH else pooled


Read = Callable[[int], object]
"""Reads one sample of one column."""


@contextmanager
def open_plain(path: Path, family: str, names: Sequence[str], cache: CacheSize | None = None) -> Iterator[list[Read]]:
    """One reader per column, or one for all columns where the format has no such library.

    `cache`: replaces HDF5's default.
    """
    with ExitStack() as stack, reading_errors(path):
        if family == "hdf5" and cache is not None:
            yield open_hdf5(path, names, stack, cache)
            return
        yield OPENERS.get(family, open_stored)(path, names, stack)


def open_hdf5(path: Path, names: Sequence[str], stack: ExitStack, cache: CacheSize | None = None) -> list[Read]:
    told = {"rdcc_nbytes": cache.num_bytes, "rdcc_nslots": cache.num_slots, "rdcc_w0": cache.w0} if cache else {}
    file: Any = stack.enter_context(importlib.import_module("h5py").File(path, "r", **told))
    return [file[name].__getitem__ for name in names]


def open_zarr(path: Path, names: Sequence[str], _: ExitStack) -> list[Read]:
    opened: Any = importlib.import_module("zarr").open(str(path), mode="r")
    return [(opened if hasattr(opened, "chunks") else opened[name]).__getitem__ for name in names]


def open_npz(path: Path, names: Sequence[str], stack: ExitStack) -> list[Read]:
    archive = stack.enter_context(np.load(path, allow_pickle=False))
    return [lambda sample, name=name: archive[name][sample] for name in names]  # type: ignore[misc]


def open_npy(path: Path, names: Sequence[str], _: ExitStack) -> list[Read]:
    files = [path / f"{name}.npy" for name in names] if path.is_dir() else [path]
    arrays = [np.load(file, mmap_mode="r", allow_pickle=False) for file in files]
    return [lambda sample, array=array: np.array(array[sample]) for array in arrays]  # type: ignore[misc]


def open_parquet(path: Path, names: Sequence[str], stack: ExitStack) -> list[Read]:
    file: Any = stack.enter_context(importlib.import_module("pyarrow.parquet").ParquetFile(path))
    sizes = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
    ends = np.cumsum(sizes)

    def read(sample: int, name: str) -> object:
        group = int(ends.searchsorted(sample, side="right"))
        table = file.read_row_group(group, columns=[name], use_threads=False)
        return table.column(0)[sample - int(ends[group]) + sizes[group]].as_py()

    return [lambda sample, name=name: read(sample, name) for name in names]  # type: ignore[misc]


def open_stored(path: Path, _: Sequence[str], stack: ExitStack) -> list[Read]:
    return [stack.enter_context(StoredSet(path)).__getitem__]


OPENERS: dict[str, Callable[[Path, Sequence[str], ExitStack], list[Read]]] = {
    "hdf5": open_hdf5,
    "zarr": open_zarr,
    "npz": open_npz,
    "npy": open_npy,
    "parquet": open_parquet,
}
