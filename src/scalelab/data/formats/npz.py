"""`.npz`: `.npy` arrays in a zip file.

Stored members are memory-mapped: their data begin after the local header, whose length the central directory does not
give. We write them aligned; NumPy's `savez` does not, and such columns are gathered as bytes.

Deflated members have no random access, so a column is inflated once per process on first use and stays in memory.
`scalelab data convert` makes a file that can be read by sample. Eager readers check a member's CRC-32; lazy readers of
stored members cannot.
"""

from __future__ import annotations

import io
import math
import zipfile
import zlib
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
    StoredColumn,
    check_found,
    check_memory,
    make_array_column,
    map_file,
    read_count,
    refuse_options,
)
from scalelab.data.formats.decoded import MOST_RATIO, inflate_member
from scalelab.errors import DataUnreadable

LOCAL_HEADER_BYTES = 30
LOCAL_MAGIC = b"PK\x03\x04"
ZIP64_BYTES = 20
"""The field that `force_zip64` adds to the local header."""
PADDING_ID = 0xD935
"""A header field that only pads, as in Android's zipalign."""
ALIGNMENT = 64
MOST_HEADER_BYTES = 10_000
"""Of an array; NumPy's own limit."""
ENCRYPTED = 0x1


def write_stored(path: Path, arrays: Arrays, _: Settings) -> None:
    _write(path, arrays, zipfile.ZIP_STORED, None)


def write_compressed(path: Path, arrays: Arrays, options: Settings) -> None:
    _write(path, arrays, zipfile.ZIP_DEFLATED, read_count(options, "level", 6, most=9))


def _write(path: Path, arrays: Arrays, method: int, level: int | None) -> None:
    with path.open("wb") as file, zipfile.ZipFile(file, "w", method, compresslevel=level) as archive:
        for name, array in arrays.items():
            info = zipfile.ZipInfo(f"{name}.npy")
            info.compress_type = method
            info.extra = _make_padding(file.tell(), len(info.filename.encode()))
            with archive.open(info, "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.ascontiguousarray(array), allow_pickle=False)


def _make_padding(begin: int, name_bytes: int) -> bytes:
    """A header field that aligns the member's data to 64 bytes."""
    used = begin + LOCAL_HEADER_BYTES + name_bytes + ZIP64_BYTES + 4
    missing = -used % ALIGNMENT
    return PADDING_ID.to_bytes(2, "little") + missing.to_bytes(2, "little") + bytes(missing)


def open_set(path: Path, options: Settings) -> Opened:
    refuse_options("npz", options, ())
    with zipfile.ZipFile(path) as archive:
        members = [info for info in archive.infolist() if info.filename.endswith(".npy")]
    names = [info.filename for info in members]
    if len(set(names)) < len(names):
        raise DataUnreadable(f"{path} is damaged: two of its members have the same name")
    data = map_file(path)
    columns = tuple(_open_member(path, data, info) for info in members)
    return Opened(columns=columns, watched=(path,), survives_fork=True)


def _open_member(path: Path, data: Array, info: zipfile.ZipInfo) -> StoredColumn:
    name = info.filename.removesuffix(".npy")
    if info.flag_bits & ENCRYPTED or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise DataUnreadable(
            f"{path} stores {name!r} encrypted or with method {info.compress_type}: only stored and deflated are"
            " supported"
        )
    raw = _find_data(path, data, info)
    if info.compress_type == zipfile.ZIP_STORED:
        layout = _read_layout(path, info, raw[:MOST_HEADER_BYTES].tobytes())
        return CheckedColumn(path, make_array_column(name, layout.see(raw)), raw, info.CRC)
    if info.file_size > MOST_RATIO * info.compress_size:
        raise DataUnreadable(f"{path} is damaged: {name!r} cannot hold {info.file_size} bytes in {info.compress_size}")
    with zipfile.ZipFile(path) as archive, archive.open(info) as member:
        layout = _read_layout(path, info, member.read(MOST_HEADER_BYTES))
    return InflatedColumn(path, SampleField(name, layout.dtype.newbyteorder("="), layout.shape[1:]), layout, raw, info)


def _find_data(path: Path, data: Array, info: zipfile.ZipInfo) -> Array:
    """The raw bytes of a member."""
    header = data[info.header_offset : info.header_offset + LOCAL_HEADER_BYTES].tobytes()
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    begin = info.header_offset + LOCAL_HEADER_BYTES + lengths
    if header[:4] != LOCAL_MAGIC or begin + info.compress_size > len(data):
        raise DataUnreadable(f"{path} is truncated or damaged: {info.filename} is not where the directory lists it")
    return data[begin : begin + info.compress_size]


@dataclass(frozen=True, kw_only=True)
class MemberLayout:
    """An array's header."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_fortran: bool
    begin: int
    """Where its values begin in the member."""

    def see(self, member: Array) -> Array:
        """The member's bytes as an array."""
        order: Any = "F" if self.is_fortran else "C"
        return np.ndarray(self.shape, self.dtype, buffer=member.data, offset=self.begin, order=order)


def _read_layout(path: Path, info: zipfile.ZipInfo, start: bytes) -> MemberLayout:
    """Read a member's first bytes; raises unless it is an array of samples of its stated size."""
    name, stream = info.filename.removesuffix(".npy"), io.BytesIO(start)
    version = np.lib.format.read_magic(stream)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise DataUnreadable(f"{path} stores {name!r} in .npy version {version}: only (1, 0) and (2, 0) are supported")
    shape, is_fortran, dtype = readers[version](stream)
    check_found(path, name, dtype, shape)
    begin = stream.tell()
    if begin + math.prod(shape) * dtype.itemsize != info.file_size:
        raise DataUnreadable(
            f"{path} is damaged: {name!r} has {info.file_size - begin} bytes, which are not {dtype} {shape}"
        )
    return MemberLayout(dtype=dtype, shape=shape, is_fortran=is_fortran, begin=begin)


@dataclass(frozen=True)
class CheckedColumn:
    """A mapped column; a full load checks its CRC-32."""

    path: Path
    column: StoredColumn
    member: Array
    checksum: int

    @property
    def field(self) -> SampleField:
        return self.column.field

    def __len__(self) -> int:
        return len(self.column)

    def take(self, indices: Indices) -> Array:
        return self.column.take(indices)

    def load(self) -> Array:
        if zlib.crc32(self.member.data) != self.checksum:
            raise DataUnreadable(f"{self.path} is damaged: the checksum of {self.field.name!r} does not match")
        return self.column.load()


class InflatedColumn:
    """A column that is inflated on first access and stays in memory."""

    def __init__(self, path: Path, field: SampleField, layout: MemberLayout, raw: Array, info: zipfile.ZipInfo) -> None:
        self.field = field
        self._path, self._layout, self._raw, self._info = path, layout, raw, info
        self._column: StoredColumn | None = None

    def __len__(self) -> int:
        return self._layout.shape[0]

    def take(self, indices: Indices) -> Array:
        if self._column is None:
            self._column = make_array_column(self.field.name, self._inflate())
        return self._column.take(indices)

    def load(self) -> Array:
        return np.ascontiguousarray(self._inflate(), dtype=self.field.dtype)

    def _inflate(self) -> Array:
        check_memory(self._path, self._info.file_size)
        member = np.empty(self._info.file_size, np.uint8)
        inflate_member(self._raw.data, member.data, self._info.CRC)
        return self._layout.see(member)


FORMATS = {
    "npz": StorageFormat(name="npz", write=write_stored, open=open_set),
    "npz-compressed": StorageFormat(
        name="npz-compressed", write=write_compressed, open=open_set, write_options=("level",)
    ),
}
