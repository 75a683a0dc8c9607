"""How a format is read one sample at a time by its own library, as its tutorials do: what a doctor's advice is held to.

HDF5 is opened once and indexed with its default cache; zarr likewise, which keeps nothing; a member of a compressed
`.npz` is inflated anew for every access; Parquet is read by row group. What has no library that indexes samples is read
one at a time through `StoredSet`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from scalelab.data.chunk_cache import CacheSize
from scalelab.data.formats.stored import StoredSet, reading_errors

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
