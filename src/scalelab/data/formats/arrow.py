"""Arrow IPC: a column of fixed-size lists in one record batch, memory-mapped.

A sample of several numbers is a fixed-size list, a single number a plain value. The field's metadata holds what Arrow
types cannot: the shape, and booleans stored as bytes. A file of one record batch is one array per column; several
batches, as other programs write them, are pieces, and compressed ones are decoded on opening.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]

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
    make_little_endian,
    map_file,
    refuse_options,
)
from scalelab.data.formats.decoded import ChunkCache, ChunkedColumn, choose_chunk_samples
from scalelab.errors import DataUnreadable

METADATA_KEY = b"scalelab"
"""The metadata key."""


def write(path: Path, arrays: Arrays, options: Settings) -> None:
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


def open_set(path: Path, options: Settings) -> Opened:
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
    columns = tuple(_open_column(path, found, number, batches) for number, found in enumerate(reader.schema))
    return Opened(columns=columns, watched=(path,), survives_fork=True)


def _open_column(path: Path, found: Any, number: int, batches: list[Any]) -> StoredColumn:
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


FORMATS = {"arrow": StorageFormat(name="arrow", write=write, open=open_set, write_options=("chunk_samples",))}
