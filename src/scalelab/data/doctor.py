"""Diagnose the layout of a data file: what an epoch costs, and what would be better.

Inflated bytes are counted, their cost is measured for about a second on the file itself (`reading_cost.py`), and the
product is the prediction. Conversions are measured on the first samples, really converted.
"""

from __future__ import annotations

import math
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from scalelab.data.chunk_cache import CacheSize
from scalelab.data.chunks import ColumnChunks, amplify, describe_chunks, find_family
from scalelab.data.convert import name_column
from scalelab.data.formats.catalogue import find_format
from scalelab.data.formats.columns import Settings
from scalelab.data.formats.stored import StoredSet
from scalelab.data.formats.writing import write_set
from scalelab.data.order import BlockShuffle
from scalelab.data.reading_cost import (
    EpochBytes,
    Item,
    OrderCosts,
    TimedRead,
    TriedReader,
    count_batched_epoch,
    count_plain_epoch,
    draw_order,
    find_rooms,
    follow_batches,
    follow_plain,
    make_batches,
    measure_costs,
    open_plain,
)
from scalelab.data.stored_order import choose_stored_order
from scalelab.records.environment import read_available_memory

NUM_PARTS = 3
NUM_AGAIN = 20
WINDOW_BATCHES = 8
"""Batches of a shuffled trial that lie in neighbouring chunks."""
TRIAL_BYTES = 8 * 2**20
"""Samples to convert for a trial."""
LEAST_CHUNK_BYTES = 8192
"""Smallest chunk to recommend: smaller ones cost more to find than to inflate."""
ONE_BY_ONE = "one at a time"
BY_BATCHES = "scalelab"
BY_BLOCKS = "scalelab, blocks"
WORTH_FILTERING = 2.0
"""Compression ratio from which a filter is worth keeping."""


@dataclass(frozen=True)
class Epoch:
    """Seconds."""

    in_order: float
    shuffled: float


@dataclass(frozen=True, kw_only=True)
class WayToRead:
    """One way to read the samples, and its epoch."""

    name: str
    epoch: Epoch
    inflated: EpochBytes
    disk_bytes: float | None = None
    """After the conversion."""
    format: str = ""
    """The format to convert to; empty: no conversion."""
    options: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class FileDiagnosis:
    """Everything found about a file."""

    path: Path
    format: str
    batch: int
    columns: tuple[ColumnChunks, ...]
    ways: tuple[WayToRead, ...]
    """The first is the library, one sample at a time."""
    cache: CacheSize | None
    """The HDF5 cache, per column, that inflates each chunk once in order."""
    blocks: BlockShuffle | None = None
    """The order in which scalelab's reader inflates each chunk once, if it cannot keep them all."""
    left_out: tuple[str, ...] = ()
    """What else the file contains, in words."""

    @property
    def num_samples(self) -> int:
        return self.columns[0].num_samples

    @property
    def sample_bytes(self) -> int:
        return sum(column.sample_bytes for column in self.columns)

    @property
    def amplification(self) -> float:
        """Of a whole sample."""
        return amplify(self.columns)

    @property
    def advised(self) -> WayToRead | None:
        """The recommended conversion; None if the file is fine."""
        converted = [way for way in self.ways if way.format]
        if not converted:
            return None
        aligned, mapped = converted[0], converted[-1]
        is_worth_filtering = (aligned.disk_bytes or math.inf) * WORTH_FILTERING <= (mapped.disk_bytes or 0)
        return aligned if is_worth_filtering else mapped


def examine(path: Path, *, format: str = "", batch: int = 32, seconds: float = 1.0) -> FileDiagnosis:  # noqa: A002
    """Examine a file, try it for about so many seconds, and predict an epoch."""
    name = format or find_format(path)
    columns = describe_chunks(path, name)
    with StoredSet(path, format=name) as stored:
        left_out = stored.left_out  # raises if unreadable
    cache = choose_cache(columns)
    ways = [
        *predict_plain(path, name, columns, cache, seconds * 0.4),
        *predict_batched(path, name, columns, batch, seconds * 0.3),
    ]
    if any(column.chunk for column in columns):
        ways += try_conversions(path, name, columns, batch, seconds * 0.15)
    return FileDiagnosis(
        path=path,
        format=name,
        batch=batch,
        columns=columns,
        ways=tuple(ways),
        cache=cache,
        blocks=choose_blocks(path, name) if any(way.name == BY_BLOCKS for way in ways) else None,
        left_out=left_out,
    )


def choose_blocks(path: Path, name: str) -> BlockShuffle | None:
    order = choose_stored_order(path, format=name, kept_bytes=0).order
    return order if isinstance(order, BlockShuffle) else None


def predict_plain(
    path: Path, name: str, columns: Sequence[ColumnChunks], cache: CacheSize | None, seconds: float
) -> list[WayToRead]:
    """The format's own library, with its default cache and with one that fits."""
    num_samples, inflated = columns[0].num_samples, count_plain_epoch(columns)
    costs = calibrate_plain(path, find_family(name), columns, seconds)
    ways = [WayToRead(name=ONE_BY_ONE, epoch=predict(costs, num_samples, inflated), inflated=inflated)]
    if cache is not None:
        better = count_plain_epoch(columns, cache)
        kept = measure_kept(path, find_family(name), columns, cache)
        again = [replace(cost, item_seconds=kept) for cost in (costs.in_order, costs.shuffled)]
        epoch = predict(OrderCosts(*again), num_samples, better)
        ways.append(WayToRead(name="larger cache", epoch=epoch, inflated=better))
    return ways


def predict_batched(
    path: Path, name: str, columns: Sequence[ColumnChunks], batch: int, seconds: float
) -> list[WayToRead]:
    """scalelab's reader, fully shuffled and by blocks."""
    rooms = find_rooms(columns, find_family(name))
    num_batches, inflated = columns[0].num_samples / batch, count_batched_epoch(columns, rooms, batch)
    costs = calibrate_batched(path, name, columns, rooms, batch, seconds)
    ways = [WayToRead(name=BY_BATCHES, epoch=predict(costs, num_batches, inflated), inflated=inflated)]
    if inflated.shuffled > inflated.in_order:
        blocks = EpochBytes(inflated.in_order, inflated.in_order, inflated.is_exact)
        ways.append(WayToRead(name=BY_BLOCKS, epoch=predict(costs, num_batches, blocks), inflated=blocks))
    return ways


def predict(calibration: OrderCosts, num_items: float, inflated: EpochBytes) -> Epoch:
    return Epoch(
        calibration.in_order.predict(num_items, inflated.in_order),
        calibration.shuffled.predict(num_items, inflated.shuffled),
    )


def calibrate_plain(path: Path, family: str, columns: Sequence[ColumnChunks], seconds: float) -> OrderCosts:
    names = [column.name for column in columns]

    @contextmanager
    def open_reader() -> Iterator[TimedRead]:
        with open_plain(path, family, names) as readers:
            yield lambda item: [read(item[0]) for read in readers]

    num_samples = columns[0].num_samples
    in_order = [[(sample,) for sample in part] for part in pick_runs(num_samples, 1)]
    shuffled = [[(sample,) for sample in draw_order(num_samples, 1000, seed)] for seed in range(NUM_PARTS)]
    return measure_costs(TriedReader(open_reader, lambda: follow_plain(columns)), in_order, shuffled, seconds)


def calibrate_batched(
    path: Path,
    name: str,
    columns: Sequence[ColumnChunks],
    rooms: Sequence[int],
    batch: int,
    seconds: float,
) -> OrderCosts:

    @contextmanager
    def open_reader() -> Iterator[TimedRead]:
        with StoredSet(path, format=name) as stored:
            len(stored)
            yield lambda item: stored.__getitems__(np.asarray(item))

    in_order = [list(make_batches(run, batch)) for run in pick_runs(columns[0].num_samples, batch)]
    shuffled = [list(make_batches(pick_window(columns, batch, seed), batch)) for seed in range(NUM_PARTS)]
    return measure_costs(TriedReader(open_reader, lambda: follow_batches(columns, rooms)), in_order, shuffled, seconds)


def measure_kept(path: Path, family: str, columns: Sequence[ColumnChunks], cache: CacheSize) -> float:
    """Seconds of a sample whose chunks are all cached: only the first row of chunks is read."""
    seconds, draw = [], random.Random(0)
    length = min(columns[0].num_samples, min(column.chunk_samples for column in columns if column.chunk))
    with open_plain(path, family, [column.name for column in columns], cache) as readers:
        for _ in range(NUM_AGAIN + 1):
            sample = draw.randrange(length)
            start = time.process_time()
            for read in readers:
                read(sample)
            seconds.append(time.process_time() - start)
    return statistics.median(seconds[1:])


def measure_plain_shuffled(path: Path, name: str, columns: Sequence[ColumnChunks], seconds: float) -> float:
    """Mean seconds per random sample with the format's own library, within the time."""
    order = draw_order(columns[0].num_samples, 2000)
    with open_plain(path, find_family(name), [column.name for column in columns]) as readers:
        end = time.perf_counter() + seconds
        start = time.process_time()
        for done, sample in enumerate(order, start=1):
            for read in readers:
                read(sample)
            if time.perf_counter() > end or done == len(order):
                return (time.process_time() - start) / done
    return 0.0


def pick_runs(num_samples: int, batch: int) -> list[range]:
    """Runs of samples in order."""
    length = max(batch, num_samples // NUM_PARTS)
    starts = [number * num_samples // NUM_PARTS for number in range(NUM_PARTS)]
    return [range(start, min(start + length, num_samples)) for start in starts]


def pick_window(columns: Sequence[ColumnChunks], batch: int, seed: int) -> Item:
    """Shuffled samples from a few neighbouring chunks; from anywhere if there are no chunks.

    One-off work of the operating system, such as clearing pages, is then shared by as many samples as in an epoch.
    """
    num_samples = columns[0].num_samples
    length = max(column.chunk_samples for column in columns)
    if all(column.chunk is None for column in columns) or length >= num_samples:
        return draw_order(num_samples, 300 * batch, seed)
    num_rows = max(2, WINDOW_BATCHES * batch // length)
    start = random.Random(seed).randrange(max(1, -(-num_samples // length) - num_rows + 1)) * length
    found = list(range(start, min(start + num_rows * length, num_samples)))
    random.Random(seed).shuffle(found)
    return found


def choose_cache(columns: Sequence[ColumnChunks]) -> CacheSize | None:
    """HDF5's cache for the whole file, or else for a row of chunks; None if there is nothing to keep.

    The slots are a prime, 100 times the number of chunks, as the HDF Group advises.
    """
    kept = [column for column in columns if column.cache and not column.is_read_in_part]
    if not kept:
        return None
    whole = max(column.num_chunks * column.chunk_bytes for column in kept)
    fits = whole * len(kept) <= read_available_memory() // 4
    num_bytes = whole if fits else max(column.row_bytes for column in kept)
    num_chunks = max(column.num_chunks if fits else column.chunks_per_sample for column in kept)
    return CacheSize(num_bytes=num_bytes, num_slots=find_prime(100 * num_chunks))


def find_prime(least: int) -> int:
    """The smallest prime not below `least`."""
    number = max(2, least)
    while any(number % divisor == 0 for divisor in range(2, math.isqrt(number) + 1)):
        number += 1
    return number


def try_conversions(
    path: Path, name: str, columns: Sequence[ColumnChunks], batch: int, seconds: float
) -> Iterator[WayToRead]:
    """Convert the first samples and predict an epoch of the result."""
    num_samples = columns[0].num_samples
    sample_bytes = sum(column.sample_bytes for column in columns)
    number = min(num_samples, max(2 * batch, TRIAL_BYTES // max(1, sample_bytes)))
    with StoredSet(path, format=name) as stored:
        names = [name_column(field.name) for field in stored.fields]
        arrays = dict(zip(names, stored.__getitems__(np.arange(number)), strict=True))
    for words, form, options in list_conversions(name, columns):
        with tempfile.TemporaryDirectory(prefix="scalelab-") as place:
            trial = Path(place) / "trial"
            num_bytes = write_set(trial, arrays, format=form, options=options)
            found = describe_chunks(trial, form)
            rooms = [number for _ in found]
            costs = calibrate_batched(trial, form, found, rooms, batch, seconds)
        whole = [replace(column, shape=(num_samples, *column.shape[1:])) for column in found]
        inflated = count_batched_epoch(whole, find_rooms(whole, find_family(form)), batch)
        yield WayToRead(
            name=words,
            epoch=predict(costs, num_samples / batch, inflated),
            inflated=inflated,
            disk_bytes=num_bytes * num_samples / number,
            format=form,
            options=tuple((key, value) for key, value in options.items() if isinstance(value, int)),
        )


def list_conversions(name: str, columns: Sequence[ColumnChunks]) -> list[tuple[str, str, Settings]]:
    """Conversions of a chunked file: chunks of few whole samples, and no chunks."""
    family = find_family(name)
    sample_bytes = max(column.sample_bytes for column in columns)
    chunk_samples = max(1, LEAST_CHUNK_BYTES // max(1, sample_bytes))
    filters = {one for column in columns for one in column.filters}
    if family == "hdf5":
        aligned = next((f"hdf5-{one}" for one in ("gzip", "lzf", "blosc2") if one in filters), "hdf5-lzf")
    else:
        aligned = "zarr" if family == "zarr" else "hdf5-gzip"
    mapped = {"hdf5": "hdf5", "npz": "npz"}.get(family, "npy")
    return [(f"as {aligned}", aligned, {"chunk_samples": chunk_samples}), (f"as {mapped}", mapped, {})]
