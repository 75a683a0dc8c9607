"""Parquet: samples as fixed-size binary values, in row groups that are read whole.

Lists would store a level per number; fixed-size binary values are copied as they are. A single number per sample is a
plain value. Only the row groups and columns of a batch are read.

Parquet's page checksums omit the headers, and verifying them takes longer than decoding. So the file also stores the
CRC-32 of every decoded row group of a column; files without it use Parquet's. `verify=False` skips both.
"""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]
import pyarrow.parquet as pq  # type: ignore[import-untyped, unused-ignore]

from scalelab.data.formats.arrow import (
    METADATA_KEY,
    extract_samples,
    make_list_array,
    make_list_field,
    make_metadata,
    read_field,
)
from scalelab.data.formats.columns import (
    Array,
    Arrays,
    Opened,
    SampleField,
    Settings,
    StorageFormat,
    StoredColumn,
    check_arrays,
    make_little_endian,
    read_flag,
    refuse_options,
)
from scalelab.data.formats.decoded import (
    ChunkCache,
    ChunkedColumn,
    choose_chunk_samples,
    choose_compression,
    make_cache,
)
from scalelab.errors import DataUnreadable

COMPRESSIONS = ("snappy", "none", "zstd", "lz4", "gzip")
OPEN_OPTIONS = ("cache_bytes", "verify")


def write(path: Path, arrays: Arrays, options: Settings) -> None:
    num_samples = check_arrays(arrays)
    length = choose_chunk_samples(arrays, options)
    compression = choose_compression(options, COMPRESSIONS)
    schema = pa.schema([_make_field(name, array) for name, array in arrays.items()])
    settings = {"compression": compression, "use_dictionary": False, "write_page_checksum": True}
    settings["write_statistics"] = False  # it would store whole images as minimum and maximum of every row group
    sums: dict[str, list[int]] = {name: [] for name in arrays}
    with path.open("wb") as file, pq.ParquetWriter(file, schema, **settings) as writer:
        for begin in range(0, num_samples, length):
            pieces = {name: make_little_endian(array[begin : begin + length]) for name, array in arrays.items()}
            batch = pa.record_batch([_make_array(piece) for piece in pieces.values()], schema=schema)
            writer.write_batch(batch, row_group_size=length)
            for name, piece in pieces.items():
                sums[name].append(zlib.crc32(piece.data))
        writer.add_key_value_metadata({METADATA_KEY: json.dumps({"crc32": sums})})


def _make_field(name: str, array: Array) -> Any:
    if array.ndim == 1:
        return make_list_field(name, array)
    return pa.field(name, pa.binary(_count_sample_bytes(array)), nullable=False, metadata=make_metadata(array))


def _make_array(array: Array) -> Any:
    if array.ndim == 1:
        return make_list_array(array)
    kind = pa.binary(_count_sample_bytes(array))
    return pa.FixedSizeBinaryArray.from_buffers(kind, len(array), [None, pa.py_buffer(array)])


def _count_sample_bytes(array: Array) -> int:
    return math.prod(array.shape[1:]) * array.dtype.itemsize


def open_set(path: Path, options: Settings) -> Opened:
    refuse_options("parquet", options, OPEN_OPTIONS)
    cache, is_verified = make_cache(options), read_flag(options, "verify", True)
    sums = _read_sums(path) if is_verified else {}
    file = pq.ParquetFile(path, page_checksum_verification=is_verified and not sums, pre_buffer=False)
    try:
        columns = _open_columns(path, file, sums, cache)
    except BaseException:
        file.close(force=True)
        raise
    return Opened(columns=columns, watched=(path,), close=lambda: file.close(force=True))


def _read_sums(path: Path) -> dict[str, list[int]]:
    """Checksums of every column's row groups, if present."""
    told = (pq.read_metadata(path).metadata or {}).get(METADATA_KEY)
    return {} if told is None else dict(json.loads(told)["crc32"])


def _open_columns(path: Path, file: Any, sums: dict[str, list[int]], cache: ChunkCache) -> tuple[StoredColumn, ...]:
    lengths = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
    if not lengths or min(lengths) < 1:
        raise DataUnreadable(f"{path} contains no samples: it has no row groups, or empty ones")
    fields = [read_field(path, found) for found in file.schema_arrow]
    if sums and {name: len(told) for name, told in sums.items()} != {field.name: len(lengths) for field in fields}:
        raise DataUnreadable(f"{path} is damaged: checksums of some row groups are missing")
    starts = np.cumsum([0, *lengths]).tolist()
    readers = [RowGroups(path, file, field, lengths, sums.get(field.name)) for field in fields]
    return tuple(ChunkedColumn(reader.field, starts, reader.decode, cache) for reader in readers)


@dataclass(frozen=True)
class RowGroups:
    """One column of an open file."""

    path: Path
    file: Any
    field: SampleField
    lengths: list[int]
    sums: list[int] | None

    def decode(self, number: int) -> Array:
        """The samples of one row group."""
        try:
            table = self.file.read_row_group(number, columns=[self.field.name], use_threads=False)
            table.validate(full=True)
        except MemoryError as error:  # from a corrupt header
            raise DataUnreadable(f"{self.path} is damaged: {error}") from error
        pieces = [extract_samples(self.path, self.field, piece) for piece in table.column(self.field.name).chunks]
        samples = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        if len(samples) != self.lengths[number]:
            raise DataUnreadable(f"{self.path} is damaged: {len(samples)} of {self.lengths[number]} samples found")
        if self.sums is not None and zlib.crc32(np.ascontiguousarray(samples).data) != self.sums[number]:
            raise DataUnreadable(
                f"{self.path} is damaged: the checksum of row group {number} of {self.field.name} does not match"
            )
        return samples


FORMATS = {
    "parquet": StorageFormat(
        name="parquet",
        write=write,
        open=open_set,
        write_options=("compression", "chunk_samples"),
        open_options=OPEN_OPTIONS,
    )
}
