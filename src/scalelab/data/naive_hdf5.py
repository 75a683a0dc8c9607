"""HDF5 as most scripts use it: written in the chunks that h5py chooses, read by `dataset[i]`, sample by sample.

It stands beside the readers of `formats/` to show what they avoid. With a filter, a sample is delivered by inflating
every chunk that it lies in, and h5py keeps a megabyte of them: shuffled, hardly ever the one that comes next.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from scalelab.data.formats.catalogue import load_format
from scalelab.data.formats.columns import Array, Arrays, Field, check_arrays
from scalelab.data.formats.stored import reading_errors
from scalelab.data.formats.writing import count_bytes, taking_place

FILTERS: dict[str, str | None] = {"hdf5": None, "hdf5-gzip": "gzip", "hdf5-lzf": "lzf"}
"""What h5py is told about compression, by format."""


def write_automatic(path: Path, arrays: Arrays, format: str) -> int:  # noqa: A002 - it is what it is called everywhere
    """Write columns in chunks of h5py's own choice, or in none without a filter; gives the bytes on disk."""
    check_arrays(arrays)
    load_format(format)  # says what to install where h5py is missing
    import h5py  # type: ignore[import-untyped, unused-ignore]

    with taking_place(path) as scratch, h5py.File(scratch, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array, compression=FILTERS[format])
        file.flush()
    return count_bytes(path)


class NaiveHdf5:
    """Samples of an HDF5 file, one by one; every process opens the file for itself."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: Any = None
        self._datasets: tuple[Any, ...] = ()
        self._pid = 0

    @property
    def fields(self) -> tuple[Field, ...]:
        return tuple(Field(one.name.lstrip("/"), one.dtype, one.shape[1:]) for one in self._open())

    def __len__(self) -> int:
        return len(self._open()[0])

    def __getitem__(self, index: int) -> tuple[Array, ...]:
        with reading_errors(self.path):
            return tuple(np.asarray(one[int(index)]) for one in self._open())

    def __getitems__(self, indices: Iterable[int]) -> tuple[Array, ...]:
        """A batch, as a loader's default makes it of samples."""
        samples = [self[index] for index in indices]
        return tuple(np.stack(column) for column in zip(*samples, strict=True))

    def close(self) -> None:
        if self._file is not None and self._pid == os.getpid():
            self._file.close()
        self._file = None

    def _open(self) -> tuple[Any, ...]:
        if self._file is None or self._pid != os.getpid():
            import h5py

            with reading_errors(self.path):
                self._file = h5py.File(self.path, "r")
                self._datasets = tuple(self._file[name] for name in self._file)
            self._pid = os.getpid()
        return self._datasets

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_file": None, "_datasets": (), "_pid": 0}
