"""One file per sample, as image datasets often are: the worst case for file systems.

    samples.json          columns with their types and shapes, and the number of samples
    000/000000.bin …      the bytes of all columns of a sample, a thousand files per directory

A batch opens, reads and closes one file per sample. Little-endian. A file of the wrong size is refused when read.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scalelab.data.formats.columns import (
    Array,
    Arrays,
    Indices,
    Opened,
    SampleField,
    Settings,
    StorageFormat,
    check_arrays,
    check_found,
    refuse_options,
)
from scalelab.errors import DataUnreadable

MARKER = "samples.json"
FILES_PER_DIRECTORY = 1000
MOST_MARKER_BYTES = 1 << 20


def write(path: Path, arrays: Arrays, _: Settings) -> None:
    num_samples = check_arrays(arrays)
    path.mkdir()
    fields = [
        {"name": name, "dtype": array.dtype.newbyteorder("<").str, "shape": array.shape[1:]}
        for name, array in arrays.items()
    ]
    for number in range(num_samples):
        file = name_sample(path, number)
        if number % FILES_PER_DIRECTORY == 0:
            file.parent.mkdir()
        samples = (array[number] for array in arrays.values())
        file.write_bytes(b"".join(sample.astype(sample.dtype.newbyteorder("<")).tobytes() for sample in samples))
    (path / MARKER).write_text(json.dumps({"columns": fields, "samples": num_samples}) + "\n", encoding="utf-8")


def name_sample(path: Path, number: int) -> Path:
    return path / f"{number // FILES_PER_DIRECTORY:03}" / f"{number:06}.bin"


def open_set(path: Path, options: Settings) -> Opened:
    refuse_options("files", options, ())
    marker = path / MARKER
    fields, num_samples = _read_marker(marker)
    ends = np.cumsum([field.num_bytes for field in fields]).tolist()
    record_bytes = ends[-1] if ends else 0
    first = name_sample(path, 0)
    if num_samples and fields and first.stat().st_size != record_bytes:  # before a batch allocates room for it
        raise DataUnreadable(f"{first} has {first.stat().st_size} bytes, but {MARKER} lists {record_bytes}")
    records = Records(path, record_bytes, len(fields))
    columns = tuple(
        FileColumn(field, records, num_samples, end - field.num_bytes) for field, end in zip(fields, ends, strict=True)
    )
    return Opened(columns=columns, watched=(marker,), survives_fork=True)


def _read_marker(marker: Path) -> tuple[list[SampleField], int]:
    """The validated marker file."""
    if marker.stat().st_size > MOST_MARKER_BYTES:
        raise DataUnreadable(f"{marker} is damaged: it has {marker.stat().st_size} bytes")
    told: Any = json.loads(marker.read_text(encoding="utf-8"))
    if not isinstance(told, dict) or not isinstance(told.get("columns"), list) or not is_size(told.get("samples")):
        raise DataUnreadable(f"{marker} is damaged: it does not list columns and samples")
    return [_read_field(marker, column) for column in told["columns"]], told["samples"]


def _read_field(marker: Path, told: Any) -> SampleField:
    if not isinstance(told, dict) or not isinstance(told.get("name"), str) or not isinstance(told.get("dtype"), str):
        raise DataUnreadable(f"{marker} is damaged: a column has no name or type")
    shape = told.get("shape")
    if not isinstance(shape, list) or not all(map(is_size, shape)):
        raise DataUnreadable(f"{marker} is damaged: the shape of {told['name']!r} is {shape}")
    dtype = np.dtype(told["dtype"])
    check_found(marker, told["name"], dtype, (1, *shape))
    return SampleField(told["name"], dtype, tuple(shape))


def is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


class Records:
    """The files of a batch, each read once for all columns."""

    def __init__(self, path: Path, record_bytes: int, num_columns: int) -> None:
        self._path, self._record_bytes, self._num_columns = str(path), record_bytes, num_columns
        self._rows: Array = np.empty((0, record_bytes), np.uint8)
        self._key = b""
        self._num_users = 0

    def read(self, indices: Indices) -> Array:
        """A row of bytes per sample; kept until every column has used it."""
        key = indices.tobytes()
        if key != self._key or not 0 < self._num_users < self._num_columns:
            rows = np.empty((len(indices), self._record_bytes), np.uint8)
            for row, number in zip(rows, indices.tolist(), strict=True):
                self._read_one(number, row)
            self._rows, self._key, self._num_users = rows, key, 0
        rows = self._rows
        self._num_users += 1
        if self._num_users == self._num_columns:
            self._rows, self._key = rows[:0], b""
        return rows

    def _read_one(self, number: int, into: Array) -> None:
        name = f"{self._path}/{number // FILES_PER_DIRECTORY:03}/{number:06}.bin"
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DataUnreadable(f"{name} cannot be read: {error.strerror}") from error
        try:
            num_bytes = os.readv(descriptor, [into.data])
            size = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        if num_bytes != len(into) or size != len(into):
            raise DataUnreadable(f"{name} is truncated or damaged: {size} bytes, expected {len(into)}")


@dataclass(frozen=True)
class FileColumn:
    """A column whose samples are parts of separate files."""

    field: SampleField
    records: Records
    num_samples: int
    begin: int
    """Where its bytes begin in a file."""

    def __len__(self) -> int:
        return self.num_samples

    def take(self, indices: Indices) -> Array:
        rows = self.records.read(indices)[:, self.begin : self.begin + self.field.num_bytes]
        return np.ascontiguousarray(rows).view(self.field.dtype).reshape(len(indices), *self.field.shape)

    def load(self) -> Array:
        found = np.empty((self.num_samples, *self.field.shape), self.field.dtype)
        for first in range(0, self.num_samples, FILES_PER_DIRECTORY):
            part = found[first : first + FILES_PER_DIRECTORY]
            part[:] = self.take(np.arange(first, first + len(part)))
        return found


FORMATS = {"files": StorageFormat(name="files", write=write, open=open_set)}
