"""Arrow IPC and Parquet, both by pyarrow.

Arrow: a column of fixed-size lists in one record batch, memory-mapped. A single number per sample is a plain value. The
field's metadata holds what Arrow types cannot: the shape, and booleans stored as bytes. A file of one record batch is
one array per column; several batches, as other programs write them, are pieces, and compressed ones are decoded on
opening.

Parquet: samples as fixed-size binary values, in row groups that are read whole. Lists would store a level per number;
fixed-size binary values are copied as they are. Only the row groups and columns of a batch are read. Parquet's page
checksums omit the headers, and verifying them takes longer than decoding. So the file also stores the CRC-32 of every
decoded row group of a column; files without it use Parquet's. `verify=False` skips both.
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

from scalelab.data.formats.columns import (
    Array,
    ArrayColumn,
    Arrays,
    Opened,
    SampleField,
    Settings,
    StorageFormat,
    StoredColumn,
    check_arrays,
    check_found,
    count_sample_bytes,
    make_little_endian,
    map_file,
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

METADATA_KEY = b"scalelab"
"""The metadata key."""
COMPRESSIONS = ("snappy", "none", "zstd", "lz4", "gzip")
OPEN_OPTIONS = ("cache_bytes", "verify")


def write_arrow(path: Path, arrays: Arrays, options: Settings) -> None:
    num_samples = check_arrays(arrays)
    length = choose_chunk_samples(arrays, options) if "chunk_samples" in options else num_samples
    schema = pa.schema([make_list_field(name, array) for name, array in arrays.items()])
    with path.open("wb") as file, pa.ipc.new_file(file, schema) as writer:
        for begin in range(0, num_samples, length):
            pieces = [make_list_array(array[begin : begin + length]) for array in arrays.values()]
            writer.write_batch(pa.record_batch(pieces, schema=schema))


def make_list_field(name: str, array: Array) -> Any:
    plain = pa.from_numpy_dtype(find_stored_dtype(array.dtype))
    kind = pa.list_(pa.field("item", plain, nullable=False), math.prod(array.shape[1:])) if array.ndim > 1 else plain
    return pa.field(name, kind, nullable=False, metadata=make_metadata(array))


def make_metadata(array: Array) -> dict[bytes, bytes]:
    told = {"dtype": array.dtype.newbyteorder("<").str, "shape": array.shape[1:]}
    return {METADATA_KEY: json.dumps(told).encode()}


def make_list_array(array: Array) -> Any:
    flat = make_little_endian(array).reshape(-1)
    values = pa.array(flat.view(find_stored_dtype(array.dtype)))
    if array.ndim == 1:
        return values
    kind = pa.list_(pa.field("item", values.type, nullable=False), math.prod(array.shape[1:]))
    return pa.FixedSizeListArray.from_arrays(values, type=kind)


def find_stored_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Arrow packs eight booleans into a byte, which cannot be mapped."""
    return np.dtype("u1") if dtype.kind == "b" else dtype.newbyteorder("<")


def open_arrow(path: Path, options: Settings) -> Opened:
    refuse_options("arrow", options, ())
    try:
        reader = pa.ipc.open_file(pa.py_buffer(map_file(path)))
        batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        for batch in batches:
            batch.validate(full=True)
    except MemoryError as error:  # from a corrupt header
        raise DataUnreadable(f"{path} is damaged: {error}") from error
    if not batches:
        raise DataUnreadable(f"{path} contains no samples: it has no record batch")
    columns = tuple(_open_batches(path, found, number, batches) for number, found in enumerate(reader.schema))
    return Opened(columns=columns, watched=(path,), survives_fork=True)


def _open_batches(path: Path, found: Any, number: int, batches: list[Any]) -> StoredColumn:
    field = read_field(path, found)
    pieces = [extract_samples(path, field, batch.column(number)) for batch in batches]
    if len(pieces) == 1:
        return ArrayColumn(field, pieces[0])
    starts = np.cumsum([0, *map(len, pieces)]).tolist()
    return ChunkedColumn(field, starts, pieces.__getitem__, ChunkCache(0))


def read_field(path: Path, found: Any) -> SampleField:
    """A column's dtype and shape, from its Arrow type and metadata."""
    kind, size = found.type, tuple[int, ...]()
    if pa.types.is_fixed_size_list(kind):
        kind, size = kind.value_type, (kind.list_size,)
    if pa.types.is_fixed_size_binary(kind):
        dtype, size = np.dtype("u1"), (kind.byte_width,)
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        dtype = np.dtype(kind.to_pandas_dtype())
    else:
        raise DataUnreadable(
            f"{path} stores {found.name!r} as {found.type}: only numbers and fixed-size lists are supported"
        )
    told = (found.metadata or {}).get(METADATA_KEY)
    if told is None:
        return SampleField(found.name, dtype, size)
    return _read_metadata(path, found.name, told, math.prod(size) * dtype.itemsize)


def _read_metadata(path: Path, name: str, told: bytes, num_bytes: int) -> SampleField:
    """From the metadata; sample sizes must agree with the Arrow type."""
    data = json.loads(told)
    shape = data["shape"]
    field = SampleField(name, np.dtype(str(data["dtype"])), tuple(shape))
    check_found(path, name, field.dtype, (1, *shape))
    if not all(type(size) is int and size > 0 for size in shape) or field.num_bytes != num_bytes:
        raise DataUnreadable(f"{path} is damaged: {field.words} does not match samples of {num_bytes} bytes")
    return field


def extract_samples(path: Path, field: SampleField, column: Any) -> Array:
    """The array of an Arrow column, without a copy if possible."""
    if column.null_count:
        raise DataUnreadable(f"{path} has {column.null_count} nulls in {field.name!r}: every sample needs a value")
    if pa.types.is_boolean(column.type):
        return np.asarray(column.to_numpy(zero_copy_only=False))
    begin, end = column.offset, column.offset + len(column)
    while pa.types.is_fixed_size_list(column.type):
        begin, end = begin * column.type.list_size, end * column.type.list_size
        column = column.values
        begin, end = begin + column.offset, end + column.offset
    width = column.type.bit_width // 8
    flat = np.frombuffer(column.buffers()[1], np.uint8)[begin * width : end * width]
    return flat.view(field.dtype).reshape(-1, *field.shape)


def write_parquet(path: Path, arrays: Arrays, options: Settings) -> None:
    num_samples = check_arrays(arrays)
    length = choose_chunk_samples(arrays, options)
    compression = choose_compression(options, COMPRESSIONS)
    schema = pa.schema([_make_binary_field(name, array) for name, array in arrays.items()])
    settings = {"compression": compression, "use_dictionary": False, "write_page_checksum": True}
    settings["write_statistics"] = False  # it would store whole images as minimum and maximum of every row group
    sums: dict[str, list[int]] = {name: [] for name in arrays}
    with path.open("wb") as file, pq.ParquetWriter(file, schema, **settings) as writer:
        for begin in range(0, num_samples, length):
            pieces = {name: make_little_endian(array[begin : begin + length]) for name, array in arrays.items()}
            batch = pa.record_batch([_make_binary_array(piece) for piece in pieces.values()], schema=schema)
            writer.write_batch(batch, row_group_size=length)
            for name, piece in pieces.items():
                sums[name].append(zlib.crc32(piece.data))
        writer.add_key_value_metadata({METADATA_KEY: json.dumps({"crc32": sums})})


def _make_binary_field(name: str, array: Array) -> Any:
    if array.ndim == 1:
        return make_list_field(name, array)
    return pa.field(name, pa.binary(count_sample_bytes(array)), nullable=False, metadata=make_metadata(array))


def _make_binary_array(array: Array) -> Any:
    if array.ndim == 1:
        return make_list_array(array)
    kind = pa.binary(count_sample_bytes(array))
    return pa.FixedSizeBinaryArray.from_buffers(kind, len(array), [None, pa.py_buffer(array)])


def open_parquet(path: Path, options: Settings) -> Opened:
    refuse_options("parquet", options, OPEN_OPTIONS)
    cache, is_verified = make_cache(options), read_flag(options, "verify", True)
    sums = _read_sums(path) if is_verified else {}
    file = pq.ParquetFile(path, page_checksum_verification=is_verified and not sums, pre_buffer=False)
    try:
        columns = _open_row_groups(path, file, sums, cache)
    except BaseException:
        file.close(force=True)
        raise
    return Opened(columns=columns, watched=(path,), close=lambda: file.close(force=True))


def _read_sums(path: Path) -> dict[str, list[int]]:
    """Checksums of every column's row groups, if present."""
    told = (pq.read_metadata(path).metadata or {}).get(METADATA_KEY)
    return {} if told is None else dict(json.loads(told)["crc32"])


def _open_row_groups(path: Path, file: Any, sums: dict[str, list[int]], cache: ChunkCache) -> tuple[StoredColumn, ...]:
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
    "arrow": StorageFormat(name="arrow", write=write_arrow, open=open_arrow, write_options=("chunk_samples",)),
    "parquet": StorageFormat(
        name="parquet",
        write=write_parquet,
        open=open_parquet,
        write_options=("compression", "chunk_samples"),
        open_options=OPEN_OPTIONS,
    ),
}
