"""`StoredSet`: samples on disk by index, in any format; `NaiveHdf5`, the baseline that it improves on.

A dataset is opened by the process that first uses it. It is pickled closed, and a forked process reopens it unless the
format can do without, so every data loader worker has its own. Eager loads every column once.

Before each batch the files are checked: a changed size, time or inode is refused. A map of a truncated file would end
in SIGBUS.

The baseline is HDF5 as most scripts read it: `dataset[i]`, sample by sample. With h5py's automatic chunks and a filter,
every sample inflates all chunks it lies in, and h5py caches 1 MB of them (8 since HDF5 2.0): shuffled, hardly ever the
next one.
"""

from __future__ import annotations

import importlib
import operator
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scalelab.data.formats.catalogue import find_format, load_format
from scalelab.data.formats.columns import (
    Array,
    Indices,
    Opened,
    SampleField,
    Settings,
    check_columns,
    check_memory,
    make_array_column,
)
from scalelab.errors import DataUnreadable, ScalelabError

INDEX_DTYPE = np.dtype(np.intp)
Signature = tuple[int, int, int]
"""Inode, size and modification time."""


class StoredSet:
    """`set[i]` is a sample, `set.__getitems__(indices)` a batch, one array per column."""

    def __init__(
        self,
        path: Path,
        *,
        format: str = "",  # noqa: A002 - it is what it is called everywhere
        eager: bool = False,
        options: Settings | None = None,
        expected: Sequence[SampleField] = (),
    ) -> None:
        self.path = path
        self.format = format or find_format(path)
        self.eager = eager
        self._options = dict(options or {})
        self._expected = tuple(expected)
        self._opened: Opened | None = None
        self._signatures: tuple[tuple[str, Signature], ...] = ()
        self._num_samples = 0
        self._pid = 0

    @property
    def fields(self) -> tuple[SampleField, ...]:
        return tuple(column.field for column in self._open().columns)

    @property
    def left_out(self) -> tuple[str, ...]:
        """What else the file contains, in words."""
        return self._open().left_out

    def __len__(self) -> int:
        self._open()
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[Array, ...]:
        number = operator.index(index)
        opened = self._open()
        if not 0 <= number < self._num_samples:
            raise IndexError(f"sample {number} is out of range for {self.path}: it has {self._num_samples}")
        numbers = np.array([number], dtype=np.intp)
        return tuple(array[0] for array in self._take(opened, numbers))

    def __getitems__(self, indices: Iterable[int]) -> tuple[Array, ...]:
        numbers = make_numbers(indices)
        opened = self._open()
        if not len(numbers):
            return tuple(np.empty((0, *field.shape), field.dtype) for field in self.fields)
        # Viewed as unsigned, negative indices are too large as well: one check instead of two.
        places = numbers.view(np.uintp)
        most = places.item(places.argmax())
        if most >= self._num_samples:
            wrong = numbers[places == most][0]
            raise IndexError(f"sample {wrong} is out of range for {self.path}: it has {self._num_samples}")
        return self._take(opened, numbers)

    def close(self) -> None:
        """Close the files; the next access reopens them."""
        if self._opened is not None and self._pid == os.getpid():
            self._opened.close()
        self._opened = None

    def __enter__(self) -> StoredSet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None, "_signatures": (), "_pid": 0}

    def _take(self, opened: Opened, numbers: Indices) -> tuple[Array, ...]:
        self._check_unchanged()
        try:
            return tuple([column.take(numbers) for column in opened.columns])
        except Exception as error:
            refuse_error(self.path, error)
            raise

    def _open(self) -> Opened:
        if self._opened is not None and (self._opened.survives_fork or self._pid == os.getpid()):
            return self._opened
        self._opened = None
        with reading_errors(self.path):
            opened = load_format(self.format).open(self.path, self._options)
            try:
                self._signatures = tuple((str(path), read_signature(path)) for path in opened.watched)
                self._num_samples = check_columns(self.path, opened.columns)
                self._check_expected(opened)
                if self.eager:
                    opened = self._load(opened)
            except BaseException:
                opened.close()
                raise
        self._opened, self._pid = opened, os.getpid()
        return opened

    def _load(self, opened: Opened) -> Opened:
        check_memory(self.path, sum(column.field.num_bytes for column in opened.columns) * self._num_samples)
        columns = [make_array_column(column.field.name, column.load()) for column in opened.columns]
        self._check_unchanged()
        opened.close()
        self._signatures = ()
        return Opened(columns=tuple(columns), survives_fork=True, left_out=opened.left_out)

    def _check_expected(self, opened: Opened) -> None:
        """Raise an error for columns of another type or shape than expected."""
        found = {column.field.name: column.field for column in opened.columns}
        for field in self._expected:
            if field.name not in found:
                raise DataUnreadable(f"{self.path} has no column {field.name!r}: it has {', '.join(found)}")
            if found[field.name] != field:
                raise DataUnreadable(f"{self.path} stores {found[field.name].words}, expected {field.words}")

    def _check_unchanged(self) -> None:
        for path, before in self._signatures:
            if read_signature(path) != before:
                raise DataUnreadable(f"{path} changed while being read: the samples may mix both versions")


def make_numbers(indices: Iterable[int]) -> Indices:
    """Indices as an array; a fraction would silently become another sample."""
    if type(indices) is np.ndarray and indices.dtype is INDEX_DTYPE and indices.ndim == 1:
        return indices
    numbers = np.asarray(indices)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise TypeError(f"sample indices must be a 1-D integer array, got {numbers.dtype} {numbers.shape}")
    return numbers.astype(np.intp, copy=False)


def read_signature(path: Path | str) -> Signature:
    try:
        status = os.stat(path)  # noqa: PTH116 - a string is looked up in half the time, before every batch
    except OSError as error:
        raise DataUnreadable(f"{path} disappeared while being read: {error.strerror}") from error
    return status.st_ino, status.st_size, status.st_mtime_ns


class reading_errors:  # noqa: N801 - it is used as a statement
    """Turn a library's error about a file into one sentence that names it; ours pass."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, Exception):
            refuse_error(self._path, error)


def refuse_error(path: Path, error: Exception) -> None:
    """Raise a library's error as ours; ours pass."""
    if isinstance(error, (ScalelabError, IndexError, MemoryError)):
        return
    words = str(error).strip().splitlines()
    what = words[0] if words else type(error).__name__
    raise DataUnreadable(f"{path} cannot be read: {what}") from error


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
