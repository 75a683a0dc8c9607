"""WebDataset: a tar with a member `KEY.COLUMN.npy` per sample and column, memory-mapped.

On opening, the headers are read once for the offset of every array. Samples are in key order. All arrays of a column
must have the same header. Nothing is extracted, so no name in a tar leads anywhere, and anything but `.npy` is refused.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scalelab.data.formats.columns import (
    Array,
    Arrays,
    Indices,
    Opened,
    SampleField,
    ScatteredColumn,
    Settings,
    StorageFormat,
    StoredColumn,
    check_arrays,
    check_found,
    gather,
    map_file,
    refuse_options,
)
from scalelab.errors import DataUnreadable, UsageError

BLOCK = 512
"""Everything in a tar starts at a multiple."""
RECORD = 20 * BLOCK
"""The size of a tar is a multiple."""
SUFFIX = ".npy"
MOST_NAME_BYTES = 100
MOST_HEADER_BYTES = 4096
"""Of a .npy; ours is 128 bytes."""
REGULAR, PAX, PAX_GLOBAL, DIRECTORY = b"0\0", b"x", b"g", b"5"
BLOCKS_AT_ONCE = 4096
"""Headers compared at once."""


@dataclass(frozen=True)
class Member:
    """A file in a tar."""

    name: str
    offset: int
    num_bytes: int


def write(path: Path, arrays: Arrays, _: Settings) -> None:
    num_samples = check_arrays(arrays)
    width = max(8, len(str(num_samples - 1)))
    columns = [(name, make_npy_header(array), array) for name, array in arrays.items()]
    for name in arrays:
        if len(f"{name}{SUFFIX}".encode()) + width + 1 > MOST_NAME_BYTES:
            raise UsageError(f"{name} is too long for a tar member: choose a shorter name")
    with path.open("wb") as file:
        for number in range(num_samples):
            for name, header, array in columns:
                content = header + array[number].tobytes()
                file.write(make_tar_header(f"{number:0{width}d}.{name}{SUFFIX}", len(content)))
                file.write(content + bytes(-len(content) % BLOCK))
        file.write(bytes(2 * BLOCK))
        file.write(bytes(-file.tell() % RECORD))


def make_npy_header(array: Array) -> bytes:
    """The bytes before the values of a sample."""
    header = io.BytesIO()
    told = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape[1:]}
    np.lib.format.write_array_header_1_0(header, told)
    return header.getvalue()


def make_tar_header(name: str, num_bytes: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = num_bytes
    return member.tobuf(tarfile.USTAR_FORMAT, "utf-8")


def open_set(path: Path, options: Settings) -> Opened:
    refuse_options("webdataset", options, ())
    data = map_file(path)
    members: dict[str, dict[str, Member]] = {}
    for member in read_members(path, data):
        key, column = split_name(path, member.name)
        if key in members.setdefault(column, {}):
            raise DataUnreadable(f"{path} is damaged: it has {member.name!r} twice")
        members[column][key] = member
    keys = sorted(next(iter(members.values()), {}))
    for column, found in members.items():
        if len(found) != len(keys) or any(key not in found for key in keys):
            lacking = sorted(set(found) ^ set(keys))[0]
            raise DataUnreadable(f"{path} is not a dataset: some samples lack {column!r}, such as {lacking!r}")
    columns = tuple(_open_column(path, data, name, [found[key] for key in keys]) for name, found in members.items())
    return Opened(columns=columns, watched=(path,), survives_fork=True)


def split_name(path: Path, name: str) -> tuple[str, str]:
    """Key and column: split at the first dot, as WebDataset does."""
    folder, slash, file = name.rpartition("/")
    key, dot, column = file.partition(".")
    if not (dot and file.endswith(SUFFIX)):
        raise DataUnreadable(f"{path} contains {name!r}: only members that end in {SUFFIX} are supported")
    return folder + slash + key, column.removesuffix(SUFFIX)


def read_members(path: Path, data: Array) -> Iterator[Member]:
    """The files in a tar, which must be complete up to its closing empty block."""
    view, position, told = data.data, 0, dict[str, str]()
    headers = []
    while True:
        header = bytes(view[position : position + BLOCK])
        if len(header) < BLOCK:
            raise DataUnreadable(
                f"{path} is truncated or not a tar: it ends at byte {len(data)} without an empty block"
            )
        if not any(header):
            break
        headers.append(position)
        kind = header[156:157]
        name, num_bytes = _read_name(header), _read_number(path, header[124:136])
        begin = position + BLOCK
        if kind == PAX:
            told = _read_pax(path, bytes(view[begin : begin + num_bytes]))
        elif kind in REGULAR:
            num_bytes = int(told.get("size", num_bytes))
            if num_bytes < 0 or begin + num_bytes > len(data):
                raise DataUnreadable(f"{path} is truncated or damaged: {name!r} would end beyond the file")
            yield Member(told.get("path", name), begin, num_bytes)
            told = {}
        elif kind not in (PAX_GLOBAL, DIRECTORY):
            raise DataUnreadable(f"{path} contains {name!r}, which is not a regular file: only those are supported")
        position = begin + num_bytes + -num_bytes % BLOCK
    _check_sums(path, data, np.array(headers, dtype=np.intp))


def _read_name(header: bytes) -> str:
    name, prefix = (part.split(b"\0", 1)[0] for part in (header[:100], header[345:500]))
    whole = prefix + b"/" + name if prefix and header[257:262] == b"ustar" else name
    return whole.decode("utf-8", "backslashreplace")


def _read_number(path: Path, text: bytes) -> int:
    digits = text.strip(b" \0")
    if not digits.isdigit() or digits.strip(b"01234567"):
        raise DataUnreadable(f"{path} is damaged or not a tar: {text[:12]!r} is not a number in its header")
    return int(digits, 8)


def _read_pax(path: Path, records: bytes) -> dict[str, str]:
    """A pax header's records, `LENGTH KEY=VALUE` per line."""
    told = {}
    while records:
        length = records.split(b" ", 1)[0]
        if not length.isdigit() or not len(length) < int(length) <= len(records):
            raise DataUnreadable(f"{path} is damaged: an extended header cannot be read")
        key, _, value = records[len(length) + 1 : int(length) - 1].decode().partition("=")
        told[key] = value
        records = records[int(length) :]
    return told


def _check_sums(path: Path, data: Array, positions: Indices) -> None:
    """Check every header: the sum of its bytes, with the checksum as spaces."""
    for begin in range(0, len(positions), BLOCKS_AT_ONCE):
        some = positions[begin : begin + BLOCKS_AT_ONCE]
        headers = gather(data, some, BLOCK)
        told = [_read_number(path, field.tobytes()) for field in headers[:, 148:156]]
        sums = headers.sum(axis=1, dtype=np.int64) - headers[:, 148:156].sum(axis=1, dtype=np.int64) + 8 * ord(" ")
        if (sums != told).any():
            wrong = int(some[np.flatnonzero(sums != told)[0]])
            raise DataUnreadable(f"{path} is damaged: the header at byte {wrong} does not match its checksum")


def _open_column(path: Path, data: Array, name: str, members: list[Member]) -> StoredColumn:
    first = members[0]
    header, field = _read_npy_header(path, name, data[first.offset : first.offset + first.num_bytes])
    num_bytes = len(header) + field.num_bytes
    offsets = np.array([member.offset for member in members], dtype=np.intp)
    sizes = np.array([member.num_bytes for member in members], dtype=np.int64)
    for begin in range(0, len(offsets), BLOCKS_AT_ONCE):
        some = offsets[begin : begin + BLOCKS_AT_ONCE]
        fits = sizes[begin : begin + BLOCKS_AT_ONCE] == num_bytes
        if fits.all():
            fits = (gather(data, some, len(header)) == header).all(axis=1)
        if not fits.all():
            other = members[begin + int(np.flatnonzero(~fits)[0])]
            raise DataUnreadable(f"{path} stores {other.name!r} in a different type or shape than {first.name!r}")
    return ScatteredColumn(field, data, offsets + len(header))


def _read_npy_header(path: Path, name: str, content: Array) -> tuple[Array, SampleField]:
    """The header bytes of a sample, and its field."""
    file = io.BytesIO(content[:MOST_HEADER_BYTES].tobytes())
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(file)
    check_found(path, name, dtype, (1, *shape))
    if is_fortran and len(shape) > 1:
        raise DataUnreadable(f"{path} stores {name!r} in column-major order: only row-major arrays are supported")
    if any(size < 1 for size in shape):
        raise DataUnreadable(f"{path} is damaged: {name!r} has shape {shape}")
    return content[: file.tell()], SampleField(name, dtype, shape)


FORMATS = {"webdataset": StorageFormat(name="webdataset", write=write, open=open_set)}
