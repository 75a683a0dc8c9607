"""How fast stored samples are read, beside `np.memmap`, a loop by hand, and the usual ways to read them.

Two sets of a column each: 2,048 float32 samples of 20 × 512, and 50,000 uint8 images of 3 × 32 × 32. Every reader gives
shuffled batches of 32 from files that are in the page cache, in one process. It is checked first that they give what
was written. A reader and what it is held against take turns by batch, in random order, never with the same one; medians
are compared. So a busy machine disturbs both alike, and an interrupted batch counts as one. What takes a whole epoch
takes turns by epoch, and the median of the ratios counts.

    memory map      np.memmap[numbers]. Held against it: every reader that maps, and stored .npz
    by hand         a bare loop of h5py, the codec in use (ISA-L where it is installed) and NumPy: list the chunks,
                    inflate those that a batch is the first to touch into one array, index it. Held against it: one
                    epoch of chunks of whole samples, newly opened, so that each is inflated once
    the codec       decompress of the very chunks, nothing else. Shown, not held: the codec alone throws away what it
                    gives and inflates into the same warm megabyte again, while samples that come back in later batches
                    have to be kept in new memory and copied out. The loop by hand, shown beside it, pays for that too
    naive           h5py's dataset[number], sample by sample with the library's own cache, from gzip in automatic
                    chunks; a few samples of it. Against it: one epoch of the same file, newly opened
    per item        set[number] and np.stack. Against it: the same set's batches
    WebDataset      its own loader on a tar: shuffled in a buffer, decoded, batched. Against it: a map of the same
                    samples, and of the same tar
"""

from __future__ import annotations

import itertools
import random
import resource
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from rich.console import Console
from rich.table import Table

from scalelab.data.formats.catalogue import ENTRIES
from scalelab.data.formats.columns import map_file
from scalelab.data.formats.decoded import CODEC
from scalelab.data.formats.stored import StoredSet
from scalelab.data.formats.writing import write_set
from scalelab.errors import UsageError
from scalelab.units import format_bytes, format_seconds

BATCH = 32
NUM_BATCHES = 400
"""That quick readers take turns with, where there are as many."""
NUM_TURNS = 3000
NUM_ROUNDS = 5
"""Of what takes a second."""
NAIVE_SAMPLES = 32
TAR_BATCHES = 32
SHUFFLE_BUFFER = 1000
"""Of WebDataset, as its own examples have it."""

MAPPED = {"npy": 0.90, "pt": 0.90, "hdf5": 0.90, "safetensors": 0.90, "arrow": 0.90, "npz": 0.80}
"""Formats that are read by a map, and the bars."""
LEAST_OF_HAND = 0.9
LEAST_OF_NAIVE = 60.0
LEAST_OF_ITEMS = {"float32": 2.5, "uint8": 4.0}
LEAST_OF_WEBDATASET = 15.0

Numbers = np.ndarray[Any, np.dtype[np.intp]]
Fetch = Callable[[Numbers], object]
Run = Callable[[], int]
"""Reads something; gives the number of samples."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One line of the table."""

    what: str
    beside: str
    seconds: float
    """Per batch."""
    ratio: float
    bar: float | None = None
    """None: only shown."""

    @property
    def holds(self) -> bool:
        return self.bar is None or self.ratio >= self.bar


def make_arrays() -> dict[str, np.ndarray[Any, Any]]:
    source = np.random.default_rng(0)
    noise = source.standard_normal((50_000, 3, 32, 32), dtype=np.float32)
    images = np.clip(128 + 20 * noise, 0, 255).astype(np.uint8)
    return {"float32": source.random((2048, 20, 512), dtype=np.float32), "uint8": images}


def make_batches(num_samples: int) -> list[Numbers]:
    """One shuffled epoch."""
    order = np.random.default_rng(1).permutation(num_samples)
    return [order[first : first + BATCH] for first in range(0, num_samples, BATCH)]


def compare_epochs(ours: Run, theirs: Run) -> tuple[float, float]:
    """Seconds per batch of ours, and how many times as fast as theirs it is."""
    ours()
    seconds, ratios = [], []
    for _ in range(NUM_ROUNDS):
        own, other = measure(ours), measure(theirs)
        seconds.append(own * BATCH)
        ratios.append(other / own)
    return statistics.median(seconds), statistics.median(ratios)


def compare_batches(ours: Fetch, theirs: Fetch, batches: list[Numbers]) -> tuple[float, float]:
    """The same of what is quick; a batch that one has just read would be in the processor's caches for the other."""
    some = batches[:NUM_BATCHES]
    shuffler = random.Random(0)
    times: list[tuple[Fetch, list[float]]] = [(ours, []), (theirs, [])]
    order = times.copy()
    for turn in range(NUM_TURNS):
        shuffler.shuffle(order)
        for place, (fetch, seconds) in enumerate(order):
            numbers = some[(7 * turn + 13 * place) % len(some)]
            start = time.perf_counter()
            fetch(numbers)
            seconds.append(time.perf_counter() - start)
    own, other = (statistics.median(seconds) for _, seconds in times)
    return own, other / own


def measure(run: Run) -> float:
    """Seconds per sample."""
    start = time.perf_counter()
    num_samples = run()
    return (time.perf_counter() - start) / num_samples


def read_batches(stored: StoredSet, batches: list[Numbers]) -> int:
    for numbers in batches:
        stored.__getitems__(numbers)
    return sum(map(len, batches))


def read_new_epoch(path: Path, batches: list[Numbers]) -> int:
    """An epoch by a reader that has decoded nothing yet."""
    with StoredSet(path) as stored:
        return read_batches(stored, batches)


def check_bytes(stored: StoredSet, array: np.ndarray[Any, Any], batches: list[Numbers]) -> None:
    for numbers in batches:
        if not np.array_equal(stored.__getitems__(numbers)[0], array[numbers]):
            raise SystemExit(f"{stored.path} does not give what was written")


def compare_maps(place: Path, array: np.ndarray[Any, Any], batches: list[Numbers]) -> Iterator[Result]:
    """Every format that is read by a map, beside NumPy's own."""
    write_set(place / "samples.npy", {"samples": array}, format="npy")
    mapped = np.load(place / "samples.npy", mmap_mode="r")
    for name, bar in MAPPED.items():
        path = place / f"samples{ENTRIES[name].suffix}"
        try:
            if name != "npy":
                write_set(path, {"samples": array}, format=name)
        except UsageError as error:
            print(f"left out: {error}")
            continue
        with StoredSet(path, format=name) as stored:
            check_bytes(stored, array, batches)
            seconds, ratio = compare_batches(stored.__getitems__, mapped.__getitem__, batches)
        yield Result(what=name, beside="np.memmap", seconds=seconds, ratio=ratio, bar=bar)


def compare_items(place: Path, bar: float, batches: list[Numbers]) -> Iterator[Result]:
    with StoredSet(place / "samples.npy") as stored:

        def read_items(numbers: Numbers) -> object:
            return np.stack([stored[number][0] for number in numbers.tolist()])

        seconds, ratio = compare_batches(stored.__getitems__, read_items, batches)
    yield Result(what="npy, by batch", beside="by item", seconds=seconds, ratio=ratio, bar=bar)


def compare_codec(place: Path, array: np.ndarray[Any, Any], batches: list[Numbers]) -> Iterator[Result]:
    """Chunks of whole samples, beside their codec."""
    path = place / "aligned.h5"
    write_set(path, {"samples": array}, format="hdf5-gzip")
    with StoredSet(path) as stored:
        check_bytes(stored, array, batches)
    chunks, chunk_bytes = list_chunks(path)
    codecs = {"the codec alone": CODEC} if CODEC is zlib else {"zlib alone": zlib, "ISA-L alone": CODEC}
    for name, codec in codecs.items():

        def inflate_all(codec: Any = codec) -> int:
            for chunk in chunks:
                codec.decompress(chunk, bufsize=chunk_bytes)
            return len(array)

        seconds, ratio = compare_epochs(lambda: read_new_epoch(path, batches), inflate_all)
        yield Result(what="hdf5-gzip, whole samples", beside=name, seconds=seconds, ratio=ratio)

    def read_by_hand() -> int:
        return inflate_by_hand(path, array.shape, batches)

    seconds, ratio = compare_epochs(read_by_hand, inflate_all)
    yield Result(what="by hand", beside=name, seconds=seconds, ratio=ratio)
    seconds, ratio = compare_epochs(lambda: read_new_epoch(path, batches), read_by_hand)
    yield Result(what="hdf5-gzip, whole samples", beside="by hand", seconds=seconds, ratio=ratio, bar=LEAST_OF_HAND)


def inflate_by_hand(path: Path, shape: tuple[int, ...], batches: list[Numbers]) -> int:
    """What a reader cannot do without: find, inflate, keep and index; no checks of damaged files, no budget."""
    chunks, chunk_bytes = list_chunks(path)
    with h5py.File(path) as file:
        dtype, per_chunk = file["samples"].dtype, file["samples"].chunks[0]
    kept = np.empty(len(chunks) * chunk_bytes, np.uint8)
    samples = kept.view(dtype).reshape(-1, *shape[1:])
    is_here = np.zeros(len(chunks), dtype=bool)
    for numbers in batches:
        touched = np.unique(numbers // per_chunk)
        for place in touched[~is_here[touched]].tolist():
            found = CODEC.decompress(chunks[place], bufsize=chunk_bytes)
            kept[place * chunk_bytes : (place + 1) * chunk_bytes] = np.frombuffer(found, np.uint8)
            is_here[place] = True
        samples.take(numbers, axis=0)
    return shape[0]


def list_chunks(path: Path) -> tuple[list[memoryview], int]:
    """The chunks of a file as they lie in it, and what each inflates to."""
    data, found = map_file(path).data, []
    with h5py.File(path) as file:
        samples = file["samples"]
        samples.id.chunk_iter(found.append)
        found.sort(key=lambda info: info.chunk_offset)
        chunk_bytes = int(np.prod(samples.chunks)) * samples.dtype.itemsize
    return [data[info.byte_offset : info.byte_offset + info.size] for info in found], chunk_bytes


def compare_naive(place: Path, array: np.ndarray[Any, Any], batches: list[Numbers]) -> Iterator[Result]:
    """gzip in h5py's automatic chunks, beside reading it sample by sample."""
    path = place / "automatic.h5"
    write_set(path, {"samples": array}, format="hdf5-gzip", options={"chunks": "auto"})
    with StoredSet(path) as stored:
        check_bytes(stored, array, batches)
    with h5py.File(path) as file:
        samples = file["samples"]
        numbers = itertools.cycle(np.concatenate(batches).tolist())

        def read_naively() -> int:
            for number in itertools.islice(numbers, NAIVE_SAMPLES):
                samples[number]
            return NAIVE_SAMPLES

        seconds, ratio = compare_epochs(lambda: read_new_epoch(path, batches), read_naively)
        what = f"hdf5-gzip, automatic {samples.chunks}"
    yield Result(what=what, beside="naive", seconds=seconds, ratio=ratio, bar=LEAST_OF_NAIVE)


def compare_webdataset(place: Path, array: np.ndarray[Any, Any], batches: list[Numbers]) -> Iterator[Result]:
    """Maps, beside WebDataset's own loader on a tar of the same samples."""
    try:
        import webdataset
    except ModuleNotFoundError:
        print("left out: webdataset is not installed: pip install 'scalelab[formats]'")
        return
    path = place / "samples.tar"
    write_set(path, {"samples": array}, format="webdataset")

    loader = webdataset.WebDataset(str(path), shardshuffle=False).shuffle(SHUFFLE_BUFFER).decode()
    loader = loader.to_tuple("samples.npy").batched(BATCH, collation_fn=lambda found: np.stack([x for (x,) in found]))
    epochs = (batch for _ in itertools.count() for batch in loader)
    next(epochs)  # fills the shuffle buffer; from here on a batch costs as many samples as it has

    def read_tar() -> int:
        return sum(len(batch) for batch in itertools.islice(epochs, TAR_BATCHES))

    for name, suffix, bar in (("npy", ".npy", LEAST_OF_WEBDATASET), ("webdataset", ".tar", None)):
        with StoredSet(place / f"samples{suffix}", format=name) as stored:
            check_bytes(stored, array, batches)
            seconds, ratio = compare_epochs(lambda stored=stored: read_batches(stored, batches), read_tar)
        yield Result(what=name, beside="WebDataset's loader", seconds=seconds, ratio=ratio, bar=bar)


def main() -> int:
    table = Table("set", "reader", "one batch", "beside", "times as fast", "bar", box=None)
    results: list[Result] = []
    for name, array in make_arrays().items():
        batches = make_batches(len(array))
        with tempfile.TemporaryDirectory() as directory:
            place = Path(directory)
            found = [
                *compare_maps(place, array, batches),
                *compare_items(place, LEAST_OF_ITEMS[name], batches),
                *compare_codec(place, array, batches),
                *compare_naive(place, array, batches),
                *compare_webdataset(place, array, batches),
            ]
        for one in found:
            bar = "–" if one.bar is None else f"≥ {one.bar:g}" + ("" if one.holds else ", missed")
            table.add_row(name, one.what, format_seconds(one.seconds), one.beside, f"{one.ratio:.2f}", bar)
        results += found
    Console(width=130).print(table)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    held = [one for one in results if one.bar is not None]
    kept = sum(one.holds for one in held)
    print(f"\npeak memory {format_bytes(peak)}, with both sets in memory to compare with")
    print(f"readers: {kept} of {len(held)} ratios reach their bars (bar all)")
    return 0 if kept == len(held) else 1


if __name__ == "__main__":
    sys.exit(main())
