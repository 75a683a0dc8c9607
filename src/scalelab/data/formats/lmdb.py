"""LMDB: one record per sample with all its columns, memory-mapped.

Keys are 8-byte sample numbers; the record `columns` describes a sample. LMDB writes the file. On opening, its tree is
walked once for the offset of every record; batches are then gathered without LMDB, also in forked processes.

LMDB trusts every number in its pages, so a damaged file crashes the process. This walk checks each one and raises
`DataUnreadable`. Little-endian:

    page     number u64, pad u16, flags u16, lower u16, upper u16, then the places of its nodes u16
    node     low u16, high u16, flags u16, key size u16, key, then data, or the page u64 that holds them
    meta     page header, magic u32, version u32, address u64, map size u64, two trees, last page u64, transaction u64
    tree     pad u32 (the first's is the page size), flags u16, depth u16, page counts 3 u64, entries u64, root u64

A leaf node has `low + 2¹⁶ high` data bytes; a branch node leads to page `low + 2¹⁶ high + 2³² flags`. Of the two meta
pages, the one of the later transaction is valid.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
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
    check_arrays,
    check_found,
    gather,
    make_little_endian,
    map_file,
    refuse_options,
)
from scalelab.errors import DataUnreadable

MAGIC, VERSION = 0xBEEFC0DE, 1
META = struct.Struct("<16x I I 16x I 44x I H H 24x Q Q 8x Q")
"""Magic, version, page size; pad, flags, depth, entries and root of the main tree; transaction."""
BRANCH, LEAF, OVERFLOW = 1, 2, 4
PAGE_HEADER = 16
NODE_HEADER = 8
ON_OTHER_PAGES = 1
"""Flag of a node whose data lie on other pages."""
MOST_PAGE_BYTES = 1 << 16


@dataclass(frozen=True)
class Leaf:
    """The nodes of one leaf: offsets and sizes of their keys and data."""

    key_offsets: Indices
    key_sizes: Indices
    data_offsets: Indices
    data_sizes: Indices


@dataclass(frozen=True)
class Tree:
    """The main tree of a file."""

    path: Path
    data: Array
    page_bytes: int
    root: int
    num_entries: int

    def walk(self) -> Iterator[Leaf]:
        """Its leaves in key order."""
        waiting, seen = [self.root], set[int]()
        while waiting:
            number = waiting.pop()
            if number in seen:
                raise DataUnreadable(f"{self.path} is damaged: its tree visits page {number} twice")
            seen.add(number)
            flags, places, nodes = self._read_page(number)
            low, high, upper, key_sizes = nodes.T
            if flags & BRANCH:
                waiting += (low + (high << 16) + (upper << 32))[::-1].tolist()
            else:
                yield self._read_leaf(number, places, low + (high << 16), upper, key_sizes)

    def _read_page(self, number: int) -> tuple[int, Indices, Indices]:
        """Its flags, the places of its nodes, and their headers."""
        begin = number * self.page_bytes
        page = self.data[begin : begin + self.page_bytes]
        if len(page) < self.page_bytes:
            raise DataUnreadable(f"{self.path} is truncated: page {number} of its tree lies beyond its end")
        own_number, _, flags, lower, upper = struct.unpack("<QHHHH", page[:PAGE_HEADER].tobytes())
        fits = PAGE_HEADER < lower <= upper <= self.page_bytes and lower % 2 == 0
        if own_number != number or flags not in (BRANCH, LEAF) or not fits:
            raise self._damaged(number)
        places = page[PAGE_HEADER:lower].view("<u2").astype(np.intp)
        if places.min() < upper or places.max() + NODE_HEADER > self.page_bytes:
            raise self._damaged(number)
        nodes = gather(page, places, NODE_HEADER).view("<u2").astype(np.intp)
        return flags, places, nodes

    def _read_leaf(self, number: int, places: Indices, sizes: Indices, flags: Indices, key_sizes: Indices) -> Leaf:
        begin = number * self.page_bytes
        keys = places + NODE_HEADER
        found = keys + key_sizes
        elsewhere = flags == ON_OTHER_PAGES
        stored = np.where(elsewhere, NODE_HEADER, sizes)  # only the page number is in the leaf
        if (flags & ~ON_OTHER_PAGES).any() or (found + stored > self.page_bytes).any():
            raise self._damaged(number)
        offsets = begin + found
        if elsewhere.any():
            numbers = gather(self.data, offsets[elsewhere], 8).view("<u8").ravel()
            if numbers.max() >= len(self.data) // self.page_bytes:
                raise self._damaged(number)
            offsets[elsewhere] = numbers.astype(np.intp) * self.page_bytes + PAGE_HEADER
            if (offsets + sizes).max() > len(self.data):
                raise self._damaged(number)
        return Leaf(begin + keys, key_sizes, offsets, sizes)

    def _damaged(self, number: int) -> DataUnreadable:
        return DataUnreadable(f"{self.path} is damaged: page {number} of its tree is invalid")


def read_tree(path: Path, data: Array) -> Tree:
    """The main tree, from the meta page of the later transaction."""
    if len(data) < META.size:
        raise DataUnreadable(f"{path} is truncated or not an LMDB file: it has {len(data)} bytes")
    first = META.unpack(data[: META.size].tobytes())
    page_bytes = first[2]
    if first[:2] != (MAGIC, VERSION) or not 512 <= page_bytes <= MOST_PAGE_BYTES or len(data) < 2 * page_bytes:
        raise DataUnreadable(f"{path} is truncated or not an LMDB file: its first page is invalid")
    second = META.unpack(data[page_bytes : page_bytes + META.size].tobytes())
    if second[:3] != first[:3]:
        raise DataUnreadable(f"{path} is damaged: its second page is invalid")
    _, _, _, _, flags, _, num_entries, root, _ = max(first, second, key=lambda meta: meta[-1])
    if flags or root >= len(data) // page_bytes:
        raise DataUnreadable(f"{path} has no plain records: its tree has flags {flags} and starts on page {root}")
    return Tree(path, data, page_bytes, root, num_entries)


COLUMNS_KEY = b"columns"
KEY_BYTES = 8
DATA_FILE = "data.mdb"
"""The file in LMDB's directory form."""
PAGE_BYTES = 4096
SPARE_BYTES = 64 << 20
"""Slack of the map size; the file takes only what is used."""
COMMIT_BYTES = 64 << 20
"""Written per commit: uncommitted pages stay in memory."""
CAUSES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS)


def write(path: Path, arrays: Arrays, _: Settings) -> None:
    num_samples = check_arrays(arrays)
    columns = {name: make_little_endian(array) for name, array in arrays.items()}
    told = [{"name": name, "dtype": array.dtype.str, "shape": array.shape[1:]} for name, array in columns.items()]
    rows = [array.reshape(num_samples, -1).view(np.uint8) for array in columns.values()]
    sample_bytes = sum(row.shape[1] for row in rows)
    map_bytes = 2 * num_samples * (sample_bytes + PAGE_BYTES) + SPARE_BYTES
    try:
        with lmdb.open(str(path), map_size=map_bytes, subdir=False, lock=False, sync=False) as environment:
            _write_records(environment, rows, max(1, COMMIT_BYTES // sample_bytes))
            with environment.begin(write=True) as transaction:
                transaction.put(COLUMNS_KEY, json.dumps({"columns": told}).encode())
    except lmdb.Error as error:
        raise _find_cause(path, error) from error


def _write_records(environment: Any, rows: list[Array], commit_samples: int) -> None:
    num_samples = len(rows[0])
    for begin in range(0, num_samples, commit_samples):
        with environment.begin(write=True) as transaction:
            for number in range(begin, min(begin + commit_samples, num_samples)):
                record = b"".join([row[number].tobytes() for row in rows])
                transaction.put(number.to_bytes(KEY_BYTES, "big"), record, append=True)


def _find_cause(path: Path, error: Exception) -> OSError:
    """The OS error that LMDB wraps in its own; a half-written page has none."""
    if shutil.disk_usage(path.parent).free < PAGE_BYTES:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for code in CAUSES:
        if os.strerror(code) in str(error):
            return OSError(code, os.strerror(code))
    return OSError(errno.EIO, str(error))


def open_set(path: Path, options: Settings) -> Opened:
    refuse_options("lmdb", options, ())
    file = path / DATA_FILE if path.is_dir() else path
    data = map_file(file)
    tree = read_tree(path, data)
    leaves = list(tree.walk())
    merged = Leaf(*(np.concatenate(parts) for parts in zip(*(vars(leaf).values() for leaf in leaves), strict=True)))
    if len(merged.key_sizes) != tree.num_entries:
        raise DataUnreadable(f"{path} is damaged: {len(merged.key_sizes)} of {tree.num_entries} records found")
    fields = _read_fields(path, data, merged)
    offsets = _find_samples(path, data, merged, sum(field.num_bytes for field in fields))
    columns = []
    for field in fields:
        columns.append(ScatteredColumn(field, data, offsets))
        offsets = offsets + field.num_bytes
    return Opened(columns=tuple(columns), watched=(file,), survives_fork=True)


def _read_fields(path: Path, data: Array, records: Leaf) -> list[SampleField]:
    """The fields of a sample, from the describing record."""
    for place in np.flatnonzero(records.key_sizes == len(COLUMNS_KEY)).tolist():
        begin, size = int(records.data_offsets[place]), int(records.data_sizes[place])
        key = int(records.key_offsets[place])
        if data[key : key + len(COLUMNS_KEY)].tobytes() == COLUMNS_KEY:
            told = json.loads(data[begin : begin + size].tobytes())["columns"]
            return [_read_field(path, column) for column in told]
    raise DataUnreadable(f"{path} does not describe its records: use `scalelab data convert` to write a file that does")


def _read_field(path: Path, told: dict[str, Any]) -> SampleField:
    field = SampleField(str(told["name"]), np.dtype(str(told["dtype"])), tuple(told["shape"]))
    check_found(path, field.name, field.dtype, (1, *field.shape))
    if not all(type(size) is int and size > 0 for size in field.shape):
        raise DataUnreadable(f"{path} is damaged: {field.words} is not a valid sample shape")
    return field


def _find_samples(path: Path, data: Array, records: Leaf, sample_bytes: int) -> Indices:
    """The offset of every sample: numbered without gaps, of the right size, not overlapping."""
    is_sample = records.key_sizes == KEY_BYTES
    keys = gather(data, records.key_offsets[is_sample], KEY_BYTES).view(">u8").ravel()
    offsets: Indices = records.data_offsets[is_sample]
    sizes = records.data_sizes[is_sample]
    if not np.array_equal(keys, np.arange(len(keys), dtype=np.uint64)):
        raise DataUnreadable(f"{path} is damaged: its samples are not numbered from 0 without gaps")
    if (sizes != sample_bytes).any():
        number = int(np.flatnonzero(sizes != sample_bytes)[0])
        raise DataUnreadable(f"{path} is damaged: sample {number} has {sizes[number]} bytes, not {sample_bytes}")
    if (np.diff(np.sort(offsets)) < sample_bytes).any():
        raise DataUnreadable(f"{path} is damaged: two of its samples overlap")
    return offsets


FORMATS = {"lmdb": StorageFormat(name="lmdb", write=write, open=open_set)}
