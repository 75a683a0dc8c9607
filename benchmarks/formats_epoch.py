"""One epoch of the published comparison of formats, by our readers and by the naive one.

Published (P6): 2,048 pairs of 1 × 512 and 20 × 512 float32 in seven formats, on four ranks for five epochs, batches
of 32. HDF5 with gzip took 59.90 s, everything else about 3 s. The files here are the same, gzip in the chunks that h5py
chooses by itself. Each epoch below is all samples, shuffled, by one process that has the file newly opened: opening,
inflating and fetching are in it. The bar: at most one second.

The naive reader is the published one: `dataset[number]` for every sample, with the library's own cache of chunks. One
rank of four reads 512 samples in each of five epochs; some are timed here and counted up to 2,560. It waits for nothing
but the processor, so it is timed by the processor's clock, which does not count what else the machine does. The bar:
within a factor of two of 59.90 s. Its cause is named: the bytes that are inflated for one byte of a sample.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import h5py
import numpy as np
from rich.console import Console
from rich.table import Table

from scalelab.data.chunks import describe_chunks
from scalelab.data.formats.catalogue import ENTRIES
from scalelab.data.formats.columns import Arrays, Settings, make_array_column
from scalelab.data.formats.stored import StoredSet
from scalelab.data.formats.writing import write_set
from scalelab.recipes.polaris.published import FORMAT_EPOCHS, FORMAT_SECONDS, NUM_RANKS
from scalelab.units import format_bytes, format_seconds

NUM_SAMPLES = 2048
BATCH = 32
NUM_ROUNDS = 5
NAIVE_SAMPLES = 64
MOST_SECONDS = 1.0
MOST_FACTOR = 2.0

FILES: dict[str, tuple[str, Settings]] = {
    "HDF5 gzip": ("hdf5-gzip", {"chunks": "auto"}),
    "HDF5 plain": ("hdf5", {}),
    ".pt": ("pt", {}),
    ".npz compressed": ("npz-compressed", {}),
    ".npz": ("npz", {}),
    ".npy": ("npy", {}),
}
"""The published names, and what they are here."""


def make_arrays() -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    random = np.random.default_rng(0)
    shapes = {"src": (NUM_SAMPLES, 1, 512), "tgt": (NUM_SAMPLES, 20, 512)}
    return {name: random.random(shape, dtype=np.float32) for name, shape in shapes.items()}


def make_order(seed: int) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    return np.random.default_rng(seed).permutation(NUM_SAMPLES)


def time_memory(arrays: Arrays, seed: int) -> float:
    columns = [make_array_column(name, array) for name, array in arrays.items()]
    order, start = make_order(seed), time.perf_counter()
    for first in range(0, NUM_SAMPLES, BATCH):
        for column in columns:
            column.take(order[first : first + BATCH])
    return time.perf_counter() - start


def time_stored(path: Path, name: str, seed: int, *, eager: bool) -> float:
    """Opening and one epoch."""
    order, start = make_order(seed), time.perf_counter()
    with StoredSet(path, format=name, eager=eager) as stored:
        for first in range(0, NUM_SAMPLES, BATCH):
            stored.__getitems__(order[first : first + BATCH])
    return time.perf_counter() - start


def time_naive(path: Path, seed: int) -> float:
    """Seconds that one rank reads in all epochs, counted up from some samples."""
    with h5py.File(path) as file:
        columns = [file["src"], file["tgt"]]
        start = time.process_time()
        for number in make_order(seed)[:NAIVE_SAMPLES].tolist():
            for column in columns:
                column[number]
        seconds = time.process_time() - start
    return seconds / NAIVE_SAMPLES * NUM_SAMPLES / NUM_RANKS * FORMAT_EPOCHS


def measure(place: Path) -> tuple[Table, float, float]:
    """The table, the slowest lazy epoch, and the naive reader's seconds."""
    arrays = make_arrays()
    paths = {
        shown: place / f"{number}{ENTRIES[name].suffix}" for number, (shown, (name, _)) in enumerate(FILES.items())
    }
    sizes = {
        shown: write_set(paths[shown], arrays, format=name, options=options) for shown, (name, options) in FILES.items()
    }
    lazy: dict[str, list[float]] = {"in memory": [], **{shown: [] for shown in FILES}}
    eager: dict[str, list[float]] = {shown: [] for shown in FILES}
    naive: list[float] = []
    for round_number in range(NUM_ROUNDS):
        lazy["in memory"].append(time_memory(arrays, round_number))
        for shown, (name, _) in FILES.items():
            lazy[shown].append(time_stored(paths[shown], name, round_number, eager=False))
            eager[shown].append(time_stored(paths[shown], name, round_number, eager=True))
        naive.append(time_naive(paths["HDF5 gzip"], round_number))
    table = Table("format", "on disk", "lazy epoch", "eager epoch", f"published, {FORMAT_EPOCHS} epochs", box=None)
    for shown, times in lazy.items():
        whole = format_seconds(statistics.median(eager[shown])) if shown in eager else "–"
        size = format_bytes(sizes[shown]) if shown in sizes else "–"
        table.add_row(
            shown, size, format_seconds(statistics.median(times)), whole, format_seconds(FORMAT_SECONDS[shown])
        )
    print_cause(paths["HDF5 gzip"])
    return table, max(map(statistics.median, lazy.values())), statistics.median(naive)


def print_cause(path: Path) -> None:
    for column in describe_chunks(path):
        print(f"{column.name}: chunks of {column.chunk}, {column.amplification:g} bytes inflated for one of a sample")


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        table, slowest, naive = measure(Path(directory))
    Console(width=120).print(table)
    published = FORMAT_SECONDS["HDF5 gzip"]
    factor = max(naive / published, published / naive)
    print(
        f"\nnaive reader of HDF5 gzip: {naive:.1f} s per rank, {published:.2f} s published ({factor:.2f} times apart)"
    )
    print(
        f"formats_epoch: {slowest:.2f} s for the slowest epoch (bar ≤ {MOST_SECONDS:g} s);"
        f" naive {factor:.2f} times apart (bar ≤ {MOST_FACTOR:g})"
    )
    return 0 if slowest <= MOST_SECONDS and factor <= MOST_FACTOR else 1


if __name__ == "__main__":
    sys.exit(main())
