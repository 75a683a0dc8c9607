"""Bytes of files: as they are written, mapped, and gathered from anywhere.

Bytes are gathered from any places by a view in which every position of the file begins a row: NumPy then copies whole
rows, without a loop over samples.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import as_strided

from scalelab.data.formats.columns import Array, Indices, SampleField


def map_file(path: Path) -> Array:
    """The bytes of a file, read-only; no file stays open."""
    return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)


def make_little_endian(array: Array) -> Array:
    """The same numbers in one piece, in the order of bytes that files have."""
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))


def gather(data: Array, offsets: Indices, num_bytes: int) -> Array:
    """A row of so many bytes from each place; all of them must lie within the data."""
    return _see_rows(data, num_bytes)[offsets]


def _see_rows(data: Array, num_bytes: int) -> Array:
    return as_strided(data, (len(data) - num_bytes + 1, num_bytes), (1, 1), writeable=False)


class ScatteredColumn:
    """A column whose samples begin at any bytes of a file; they are given in this machine's order of bytes."""

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
