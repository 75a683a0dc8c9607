"""What formats share: columns of samples, their checks, options and mapped bytes.

A format has two functions: `write(path, arrays, options)`, and `open(path, options)`, which returns an `Opened` dataset
whose columns fetch samples by index. `stored.py` opens lazily and handles forks, changed files and wrong indices;
`writing.py` makes writing atomic.

Bytes at any offsets are gathered through a view in which every byte of the file starts a row, so NumPy copies whole
rows without a loop over samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from scalelab.errors import DataUnreadable, UsageError
from scalelab.records.environment import read_available_memory
from scalelab.units import format_bytes

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]
"""Columns by name; the first axis is the sample."""
Indices = npt.NDArray[np.intp]
Setting = bool | int | float | str | tuple[int, ...]
Settings = Mapping[str, Setting]
"""A format's options by name."""


@dataclass(frozen=True)
class SampleField:
    """One column of a sample."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of one sample."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def words(self) -> str:
        return f"{self.name}: {self.dtype} {self.shape}"


class StoredColumn(Protocol):
    """One column of an open dataset."""

    @property
    def field(self) -> SampleField: ...

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def take(self, indices: Indices) -> Array:
        """A new array of these samples, in this order. Indices are in range and may repeat."""
        ...

    def load(self) -> Array:
        """All samples in memory, the fastest way."""
        ...


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A dataset open in this process."""

    columns: tuple[StoredColumn, ...]
    watched: tuple[Path, ...] = ()
    """Files that must not change while read; few, since each costs a system call per batch."""
    survives_fork: bool = False
    """Whether a forked process can keep using it."""
    left_out: tuple[str, ...] = ()
    """What else the file contains, in words."""
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True, kw_only=True)
class StorageFormat:
    """How a dataset is written and opened."""

    name: str
    write: Callable[[Path, Arrays, Settings], None]
    """Write to a new path; the caller moves it into place."""
    open: Callable[[Path, Settings], Opened]
    write_options: tuple[str, ...] = ()
    open_options: tuple[str, ...] = ()


@dataclass(frozen=True)
class ArrayColumn:
    """An array in memory or mapped."""

    field: SampleField
    array: Array

    def __len__(self) -> int:
        return len(self.array)

    def take(self, indices: Indices) -> Array:
        return self.array.take(indices, axis=0)

    def load(self) -> Array:
        return np.array(self.array)


@dataclass(frozen=True)
class OddColumn:
    """An array that NumPy's `take` would copy whole for every batch: unaligned, not contiguous, or in another byte
    order. Samples are returned in native byte order."""

    field: SampleField
    array: Array

    def __len__(self) -> int:
        return len(self.array)

    def take(self, indices: Indices) -> Array:
        if self.array.flags.c_contiguous and self.field.num_bytes:
            rows = self.array.reshape(-1).view(np.uint8).reshape(len(self.array), self.field.num_bytes)
            found = rows.take(indices, axis=0).view(self.array.dtype).reshape(len(indices), *self.field.shape)
        else:
            found = self.array[indices]
        return found.astype(self.field.dtype, copy=False)

    def load(self) -> Array:
        return np.array(self.array, dtype=self.field.dtype, order="C")


def make_array_column(name: str, array: Array) -> ArrayColumn | OddColumn:
    """The column of an array; a memmap is viewed as a plain array, which indexes far faster."""
    plain = array.view(np.ndarray)
    field = SampleField(name, plain.dtype.newbyteorder("="), plain.shape[1:])
    if plain.flags.c_contiguous and plain.flags.aligned and plain.dtype.isnative:
        return ArrayColumn(field, plain)
    return OddColumn(field, plain)


def check_arrays(arrays: Arrays) -> int:
    """Reject what cannot be stored as columns; returns the number of samples."""
    if not arrays:
        raise UsageError("nothing to store: pass at least one array")
    for name, array in arrays.items():
        check_name(name)
        if array.ndim < 1:
            raise UsageError(f"{name} is a scalar, not an array of samples: add a first axis")
        check_dtype(name, array.dtype)
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise UsageError(f"columns have different numbers of samples ({told}): make them equal")
    if not next(iter(lengths.values())):
        raise UsageError("nothing to store: the arrays have no samples")
    return next(iter(lengths.values()))


def check_name(name: str) -> None:
    if not name or name.startswith(".") or any(character in name for character in '/\\\0:"') or len(name) > 100:
        raise UsageError(f"{name!r} is not a valid column name: use letters, digits, '_' and '-'")


def check_dtype(name: str, dtype: np.dtype[Any]) -> None:
    """Fixed-size numbers only: anything else would have to be unpickled."""
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise UsageError(f"{name} is {dtype}: only booleans, integers and floats of up to 8 bytes are supported")


def count_sample_bytes(array: Array) -> int:
    return math.prod(array.shape[1:]) * array.dtype.itemsize


def check_found(path: Path, name: str, dtype: np.dtype[Any], shape: Sequence[int]) -> None:
    """Raise an error for contents that are not a column."""
    try:
        check_dtype(repr(name), dtype)
    except UsageError as error:
        raise DataUnreadable(f"{path} cannot be read: {error}") from error
    if not len(shape):
        raise DataUnreadable(f"{path} has a scalar in {name!r}, not an array of samples")


def check_columns(path: Path, columns: Iterable[StoredColumn]) -> int:
    """Reject columns that do not fit together; returns the number of samples."""
    lengths = {column.field.name: len(column) for column in columns}
    if not lengths:
        raise DataUnreadable(f"{path} contains no arrays: use `scalelab data convert` to write a file that does")
    for name in lengths:
        if not name.isprintable():
            raise DataUnreadable(f"{path} is damaged: {name!r} is not a valid column name")
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise DataUnreadable(f"{path} is not a dataset: its columns have different lengths ({told})")
    return next(iter(lengths.values()))


def check_memory(path: Path, num_bytes: int) -> None:
    """Refuse to load more than fits in memory."""
    available = read_available_memory()
    if num_bytes > available:
        raise DataUnreadable(
            f"{path} needs {format_bytes(num_bytes)} of memory, but only {format_bytes(available)} are available:"
            " convert it to a format that can be read lazily (`scalelab data convert`)"
        )


def refuse_options(name: str, options: Settings, known: Sequence[str]) -> None:
    """A misspelt option would silently be the default."""
    for option in options:
        if option not in known:
            listed = ", ".join(known) or "none"
            raise UsageError(f"{option}={options[option]} is not an option of {name}: it has {listed}")


def read_count(options: Settings, name: str, default: int, *, least: int = 0, most: int | None = None) -> int:
    """An integer option."""
    value = options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"{least} to {most}"
        raise UsageError(f"{name} must be an integer, {bounds}, got {value}")
    return value


def read_flag(options: Settings, name: str, default: bool) -> bool:
    value = options.get(name, default)
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be true or false, got {value}")
    return value


def map_file(path: Path) -> Array:
    """The bytes of a file, read-only; the file is closed."""
    return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)


def make_little_endian(array: Array) -> Array:
    """The same values, contiguous and little-endian, as files have them."""
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))


def gather(data: Array, offsets: Indices, num_bytes: int) -> Array:
    """`num_bytes` bytes from each offset; all must lie within the data."""
    return _see_rows(data, num_bytes)[offsets]


def _see_rows(data: Array, num_bytes: int) -> Array:
    return as_strided(data, (len(data) - num_bytes + 1, num_bytes), (1, 1), writeable=False)


class ScatteredColumn:
    """Samples at arbitrary offsets of a file, returned in native byte order."""

    def __init__(self, field: SampleField, data: Array, offsets: Indices) -> None:
        self.field = replace(field, dtype=field.dtype.newbyteorder("="))
        self._stored = field.dtype
        self._offsets = offsets
        self._rows = _see_rows(data, field.num_bytes)

    def __len__(self) -> int:
        return len(self._offsets)

    def take(self, indices: Indices) -> Array:
        found = self._rows[self._offsets[indices]].view(self._stored).reshape(len(indices), *self.field.shape)
        return found.astype(self.field.dtype, copy=False)

    def load(self) -> Array:
        return self.take(np.arange(len(self)))
