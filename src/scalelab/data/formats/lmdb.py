"""LMDB: a record for every sample, with all its columns in a row, read by memory map.

Keys are the samples' numbers in eight bytes; one more record, `columns`, tells what a sample is made of. LMDB writes
the file. When it is opened, the tree is gone through once (`lmdb_pages.py`); what remains is the place of every record,
from which batches are gathered without asking LMDB, and which a forked process may go on using.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from scalelab.data.formats.columns import (
    Array,
    Arrays,
    Field,
    Format,
    Indices,
    Opened,
    Settings,
    check_arrays,
    check_found,
    refuse_options,
)
from scalelab.data.formats.lmdb_pages import Leaf, read_tree
from scalelab.data.formats.mapped import ScatteredColumn, gather, make_little_endian, map_file
from scalelab.errors import DataUnreadable

COLUMNS_KEY = b"columns"
KEY_BYTES = 8
DATA_FILE = "data.mdb"
"""In a directory, which is LMDB's other form."""
PAGE_BYTES = 4096
SPARE_BYTES = 64 << 20
"""That a map is larger than its samples may need; the file takes only what is used."""
COMMIT_BYTES = 64 << 20
"""Written between two commits: pages that were not, stay in memory."""
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
    """What the operating system said, which LMDB repeats in an error of its own; a half-written page it does not."""
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
        raise DataUnreadable(f"{path} is damaged: {len(merged.key_sizes)} of {tree.num_entries} records were found")
    fields = _read_fields(path, data, merged)
    offsets = _find_samples(path, data, merged, sum(field.num_bytes for field in fields))
    columns = []
    for field in fields:
        columns.append(ScatteredColumn(field, data, offsets))
        offsets = offsets + field.num_bytes
    return Opened(columns=tuple(columns), watched=(file,), survives_fork=True)


def _read_fields(path: Path, data: Array, records: Leaf) -> list[Field]:
    """What a sample is made of, by the record that tells it."""
    for place in np.flatnonzero(records.key_sizes == len(COLUMNS_KEY)).tolist():
        begin, size = int(records.data_offsets[place]), int(records.data_sizes[place])
        key = int(records.key_offsets[place])
        if data[key : key + len(COLUMNS_KEY)].tobytes() == COLUMNS_KEY:
            told = json.loads(data[begin : begin + size].tobytes())["columns"]
            return [_read_field(path, column) for column in told]
    raise DataUnreadable(f"{path} does not tell what its records are: scalelab data convert writes files that do")


def _read_field(path: Path, told: dict[str, Any]) -> Field:
    field = Field(str(told["name"]), np.dtype(str(told["dtype"])), tuple(told["shape"]))
    check_found(path, field.name, field.dtype, (1, *field.shape))
    if not all(type(size) is int and size > 0 for size in field.shape):
        raise DataUnreadable(f"{path} is damaged: {field.words} is no shape of a sample")
    return field


def _find_samples(path: Path, data: Array, records: Leaf, sample_bytes: int) -> Indices:
    """Where every sample begins; each number must be there once, of the size of a sample, and none in another."""
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
        raise DataUnreadable(f"{path} is damaged: two of its samples lie in the same place")
    return offsets


FORMATS = {"lmdb": Format(name="lmdb", write=write, open=open_set)}
