"""What reading costs on this machine: so much for every item, so much more for every byte that is inflated for it.

A reader is tried on items (samples, or batches of them) in order and in random order, in a few parts that take turns.
Every part is gone through twice: first to bring the file into memory and to see how much fits into the time, then
measured. How many bytes an item made the reader inflate is counted by a model of what it keeps, so that two numbers
explain all times:

    seconds of an item = item_seconds + byte_seconds · bytes inflated for it

Both are medians. Times are the processor's: what other processes do on the same cores is not part of them, and a file
that lies in memory is not waited for.

How a format is read one sample at a time by its own library, as its tutorials do: what a doctor's advice is held to.

HDF5 is opened once and indexed with its default cache; zarr likewise, which keeps nothing; a member of a compressed
`.npz` is inflated anew for every access; Parquet is read by row group. What has no library that indexes samples is read
one at a time through `StoredSet`.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from scalelab.data.chunk_cache import CacheSize
from scalelab.data.formats.stored import StoredSet, reading_errors
from scalelab.data.reading_model import Count

Item = Sequence[int]
"""Numbers of samples that are read at once."""
TimedRead = Callable[[Item], object]
MOST_ITEMS = 300
"""Of a part."""
FEW = 4
"""Items that are read of a part even if that takes longer: in order, the second shows what is not inflated again."""
MOST_DELAY = 10
"""How many times as long it may take where the processor is shared with others, or a disk has to be waited for."""
ENOUGH = 10
"""Items of one order for a median."""
T = TypeVar("T")


@dataclass(frozen=True)
class Costs:
    """What reading costs."""

    item_seconds: float
    byte_seconds: float

    def predict(self, num_items: float, inflated_bytes: float) -> float:
        return self.item_seconds * num_items + self.byte_seconds * inflated_bytes


@dataclass(frozen=True)
class ItemTiming:
    """What one item took, and what was inflated for it."""

    seconds: float
    inflated: int


@dataclass(frozen=True)
class TriedReader:
    """A reader that is tried: how it is opened, and the model of what it keeps."""

    open: Callable[[], AbstractContextManager[TimedRead]]
    make_count: Callable[[], Count]


@dataclass(frozen=True)
class OrderCosts:
    """What reading costs in order, and shuffled."""

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
    """How many items can be read in the time; a few more where the time is not exceeded by far."""
    start, begin = time.process_time(), time.perf_counter()
    with trial.open() as read:
        for number, item in enumerate(items, start=1):
            read(item)
            used = time.process_time() - start
            if time.perf_counter() - begin > MOST_DELAY * seconds or used > (1 if number >= FEW else 4) * seconds:
                return number
    return len(items)


def _measure(trial: TriedReader, items: Sequence[Item]) -> list[ItemTiming]:
    """Time every item; decompressed bytes are counted afterwards, so counting does not disturb."""
    times, count = [], trial.make_count()
    with trial.open() as read:
        for item in items:
            start = time.process_time()
            read(item)
            times.append(time.process_time() - start)
    return [ItemTiming(seconds, count(item)) for seconds, item in zip(times, items, strict=True)]


def fit_costs(timings: Sequence[ItemTiming], pooled: Sequence[ItemTiming]) -> Costs:
    """Items that inflate nothing tell the one number, what others take beyond it the other.

    `pooled` are those of all orders: they tell what those of one order are too few for.
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
    """A reader for each of the columns; for formats without an own way, one for all of them together.

    `cache`: what HDF5 is told to keep instead of its default.
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
