"""HDF5 as most scripts read it: `dataset[i]`, sample by sample.

The baseline that the readers of `formats/` improve on. With h5py's automatic chunks and a filter, every sample inflates
all chunks it lies in, and h5py caches 1 MB of them (8 since HDF5 2.0): shuffled, hardly ever the next one.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scalelab.data.formats.catalogue import load_format
from scalelab.data.formats.columns import Array, SampleField
from scalelab.data.formats.stored import reading_errors
from scalelab.errors import DataUnreadable


class NaiveHdf5:
    """Samples of an HDF5 file, one by one; every process opens it for itself.

    `names`: the columns to read, in this order; empty: all numeric arrays.
    """

    def __init__(self, path: Path, names: Sequence[str] = ()) -> None:
        self.path = path
        self._names = tuple(names)
        self._file: Any = None
        self._datasets: dict[str, Any] = {}
        self._pid = 0

    @property
    def fields(self) -> tuple[SampleField, ...]:
        return tuple(SampleField(name, one.dtype, one.shape[1:]) for name, one in self._open().items())

    def __len__(self) -> int:
        return len(next(iter(self._open().values())))

    def __getitem__(self, index: int) -> tuple[Array, ...]:
        with reading_errors(self.path):
            return tuple(np.asarray(one[int(index)]) for one in self._open().values())

    def __getitems__(self, indices: Iterable[int]) -> tuple[Array, ...]:
        """A batch as a DataLoader's default collation makes it."""
        samples = [self[index] for index in indices]
        return tuple(np.stack(column) for column in zip(*samples, strict=True))

    def close(self) -> None:
        if self._file is not None and self._pid == os.getpid():
            self._file.close()
        self._file = None

    def _open(self) -> dict[str, Any]:
        if self._file is None or self._pid != os.getpid():
            load_format("hdf5")  # raises if h5py is missing
            hdf5: Any = importlib.import_module("scalelab.data.formats.hdf5")
            with reading_errors(self.path):
                file = hdf5.h5py.File(self.path, "r")
                try:
                    self._datasets = self._choose(hdf5.list_datasets(file))
                except BaseException:
                    file.close()
                    raise
            self._file, self._pid = file, os.getpid()
        return self._datasets

    def _choose(self, found: dict[str, Any]) -> dict[str, Any]:
        if not found:
            raise DataUnreadable(f"{self.path} contains no numeric arrays")
        for name in self._names:
            if name not in found:
                raise DataUnreadable(f"{self.path} has no column {name!r}: it has {', '.join(found)}")
        return {name: found[name] for name in self._names or found}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None, "_datasets": {}, "_pid": 0}
