"""The stored set of a trial: made or taken from the user's file, written by rank 0, opened by all.

Random numbers come from the trial's seed. Those of a training run are the ones that it would have had in memory, so
that it learns the same thing from every format. What was written is read back before anything is timed: first, last
and middle sample must be the source's, byte by byte.

What of a file the kernel has in memory: asked for, read in, forgotten.

Forgetting is a request (`posix_fadvise` with `POSIX_FADV_DONTNEED`). The kernel refuses it for pages that are not yet
on the disk or that a process has mapped, and some file systems ignore it. So the file is forced to the disk first, must
be closed by all ranks, and is looked at afterwards with `mincore(2)`. Since Linux 5.2 that is true only for
processes that own the file or may write to it; to others it says that all of it is in memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Protocol

import numpy as np

from scalelab.data.chunks import amplify, describe_chunks
from scalelab.data.formats.catalogue import find_entry, find_format, load_format
from scalelab.data.formats.columns import Array, Arrays, SampleField
from scalelab.data.formats.stored import NaiveHdf5, StoredSet
from scalelab.data.formats.writing import count_bytes, write_set
from scalelab.data.stored_order import StoredOrder, choose_stored_order
from scalelab.errors import ScalelabError, UsageError
from scalelab.launch.agreement import scratch_directory
from scalelab.records.environment import read_available_memory
from scalelab.records.observations import ReadingReport
from scalelab.records.tasks import MEMORY, Dataset
from scalelab.records.trial import Option, Trial
from scalelab.units import format_bytes
from scalelab.worker.group import wait_for_all
from scalelab.worker.models.transformer import draw_sequences
from scalelab.workloads.catalogue import TransformerOptions

LARGEST_SHARE = 0.5
"""What of the memory that is free the samples may take: the writer holds them, and perhaps a copy."""


class Samples(Protocol):
    """An open dataset of any reader."""

    @property
    def fields(self) -> tuple[SampleField, ...]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> tuple[Array, ...]: ...
    def __getitems__(self, indices: Iterable[int]) -> tuple[Array, ...]: ...
    def close(self) -> None: ...


class InMemory:
    """Arrays that were never stored."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = dict(arrays)

    @property
    def fields(self) -> tuple[SampleField, ...]:
        return tuple(SampleField(name, array.dtype, array.shape[1:]) for name, array in self._arrays.items())

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def __getitem__(self, index: int) -> tuple[Array, ...]:
        return tuple(array[index] for array in self._arrays.values())

    def __getitems__(self, indices: Iterable[int]) -> tuple[Array, ...]:
        numbers = np.asarray(indices)
        return tuple(array.take(numbers, axis=0) for array in self._arrays.values())

    def close(self) -> None:
        """There is nothing to give back."""


@dataclass(frozen=True, kw_only=True)
class StoredPlace:
    """Where a trial's set is, and what writing it took."""

    dataset: Dataset
    path: Path
    write_seconds: float | None = None
    arrays: Arrays | None = None
    """Where it is in memory instead."""

    def open(self) -> Samples:
        """The set, open: with eager reading all of it is loaded."""
        if self.arrays is not None:
            return InMemory(self.arrays)
        if self.dataset.mode == "naive":
            found: Samples = NaiveHdf5(self.path)
        else:
            found = StoredSet(self.path, format=self.format, eager=self.dataset.mode == "eager")
        len(found)
        return found

    @cached_property
    def blocks(self) -> StoredOrder | None:
        """How training shuffles the dataset if by blocks of chunks, because it is too large to cache."""
        if self.arrays is not None or self.dataset.mode != "lazy":
            return None
        found = choose_stored_order(self.path, format=self.format)
        return found if found.is_by_blocks else None

    @property
    def format(self) -> str:
        return find_format(self.path) if self.dataset.is_as_it_is else self.dataset.format

    def describe(self, samples: Samples, seed: int, global_batch: int) -> ReadingReport:
        """What is known of the set before it is read."""
        report = ReadingReport(
            num_samples=len(samples),
            sample_bytes=sum(one.num_bytes for one in samples.fields),
            write_seconds=self.write_seconds,
        )
        if self.arrays is not None:
            return report
        columns = describe_chunks(self.path, self.format)
        worst = max(columns, key=lambda one: (one.inflated_bytes, one.amplification))
        chunks = f"{worst.name} in chunks of {worst.chunk}, {' and '.join(worst.filters) or 'uncompressed'}"
        return replace(
            report,
            file_bytes=count_bytes(self.path),
            amplification=amplify(columns),
            chunks=chunks if worst.chunk else "",
            shuffle=self.blocks.describe(seed, len(samples), global_batch) if self.blocks else "",
        )


def prepare_set(trial: Trial, dataset: Dataset, rank: int, directory: Path) -> StoredPlace:
    """Rank 0 writes the set, the others wait; in memory every rank has all of it."""
    if dataset.format == MEMORY:
        return StoredPlace(dataset=dataset, path=directory, arrays=make_arrays(trial, dataset))
    if dataset.is_as_it_is:
        return StoredPlace(dataset=dataset, path=Path(dataset.source))
    place = StoredPlace(dataset=dataset, path=name_set(dataset, directory))
    if rank == 0:
        arrays = make_arrays(trial, dataset)
        seconds = write_timed(place, arrays)
        place = replace(place, write_seconds=seconds)
        check_written(place, arrays)
    wait_for_all()
    return place


def read_from_set(trial: Trial, dataset: Dataset, rank: int, directory: Path) -> Trial:
    """The trial with its dataset written, for training on it."""
    place = prepare_set(trial, dataset, rank, directory)
    stored: dict[str, Option] = {"stored": str(place.path), "reader": dataset.mode, "workers": dataset.workers}
    return replace(trial, options={**trial.options, **stored})


def name_set(dataset: Dataset, directory: Path) -> Path:
    return scratch_directory(directory) / f"samples{find_entry(dataset.format).suffix}"


def make_arrays(trial: Trial, dataset: Dataset) -> dict[str, Array]:
    """The columns to store: the user's, the workload's, or random numbers."""
    if dataset.source:
        return load_source(Path(dataset.source))
    check_room(dataset.num_samples * dataset.sample_bytes, "these samples are")
    if trial.workload:
        sequences = draw_sequences(TransformerOptions(**trial.options), trial.seed)  # type: ignore[arg-type]
        return dict(zip(("src", "tgt"), (tensor.numpy() for tensor in sequences), strict=True))
    generator = np.random.default_rng(trial.seed)
    return {one.name: draw(generator, (dataset.num_samples, *one.shape), one.dtype) for one in dataset.fields}


def draw(generator: np.random.Generator, shape: tuple[int, ...], name: str) -> Array:
    """Uniform numbers: from 0 to 1 for floats, of the whole range for the rest."""
    dtype = np.dtype(name)
    if dtype == np.float64 or dtype == np.float32:
        return generator.random(shape, dtype=dtype.type)
    if dtype.kind == "f":
        return generator.random(shape, dtype=np.float32).astype(dtype)
    if dtype.kind == "b":
        return generator.random(shape, dtype=np.float32) < 0.5
    limits = np.iinfo(dtype)
    return generator.integers(limits.min, limits.max, size=shape, dtype=dtype.type, endpoint=True)


def load_source(path: Path) -> dict[str, Array]:
    with StoredSet(path) as stored:
        check_room(len(stored) * sum(one.num_bytes for one in stored.fields), f"--data {path} is")
    with StoredSet(path, eager=True) as loaded:
        columns = loaded.__getitems__(np.arange(len(loaded)))
        return dict(zip((one.name for one in loaded.fields), columns, strict=True))


def check_room(num_bytes: int, what: str) -> None:
    free = read_available_memory()
    if num_bytes > LARGEST_SHARE * free:
        raise UsageError(
            f"{what} {format_bytes(num_bytes)}, but only {format_bytes(free)} of memory are free, and the comparison"
            " writes from memory: use fewer --samples or part of the file"
        )


def write_timed(place: StoredPlace, arrays: Arrays) -> float:
    """The seconds until the set was on the disk."""
    name = place.dataset.format
    is_automatic = place.dataset.automatic_chunks and "chunks" in load_format(name).write_options
    start = perf_counter()
    write_set(place.path, arrays, format=name, options={"chunks": "auto"} if is_automatic else {}, overwrite=True)
    return perf_counter() - start


def check_written(place: StoredPlace, arrays: Arrays) -> None:
    """Read a few samples back; raises where they are not what was written."""
    samples = place.open()
    try:
        numbers = np.array(sorted({0, len(samples) // 2, len(samples) - 1}))
        is_only = len(arrays) == 1  # some formats name an only column after its file
        names = list(arrays) if is_only else [one.name for one in samples.fields]
        found = dict(zip(names, samples.__getitems__(numbers), strict=True))
    finally:
        samples.close()
    for name, array in arrays.items():
        expected = array[numbers]
        if name not in found or found[name].dtype != expected.dtype or found[name].tobytes() != expected.tobytes():
            raise ScalelabError(
                f"{place.dataset.format} returned different samples than were written, in column {name!r}"
            )


BLOCK_BYTES = 1 << 20
FAILED = ctypes.c_void_p(-1).value
"""What mmap(2) gives where there is no map."""


def list_files(path: Path) -> list[Path]:
    """A file, or all files of a directory."""
    return [path] if path.is_file() else sorted(found for found in path.rglob("*") if found.is_file())


def can_forget() -> bool:
    """Whether this system has the call (Linux, some BSDs)."""
    return hasattr(os, "posix_fadvise")


def forget_files(files: Iterable[Path]) -> None:
    """Ask the kernel to drop what it has of these files from memory."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def read_in(files: Iterable[Path]) -> None:
    """Load these files into the page cache, as far as there is room."""
    room = read_available_memory()
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while room > 0 and (block := opened.read(BLOCK_BYTES)):
                room -= len(block)


def measure_resident(files: Iterable[Path]) -> float | None:
    """The share of these files' pages in the page cache; None if the system does not report it."""
    num_pages = num_resident = 0
    for file in files:
        found = _look_at(file)
        if found is None:
            return None
        num_pages += len(found)
        num_resident += int(np.count_nonzero(found & 1))
    return num_resident / num_pages if num_pages else 0.0


def _look_at(file: Path) -> np.ndarray[tuple[int], np.dtype[np.uint8]] | None:
    """One byte per page; the lowest bit means that it is in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mincore"):
        return None
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    descriptor = os.open(file, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        pages = np.zeros(-(-size // mmap.PAGESIZE), dtype=np.uint8)
        if not size:
            return pages
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address == FAILED:
            return None
        try:
            return None if libc.mincore(address, size, pages.ctypes.data) else pages
        finally:
            libc.munmap(address, size)
    finally:
        os.close(descriptor)
