"""safetensors: a JSON header, then the bytes of every tensor, memory-mapped.

Eight bytes of header length, the header, and the tensors without gaps. Columns keep the header's order; their bytes are
sorted by item size, largest first, so all are aligned. The format has no checksums, but tensors must cover the file
exactly.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from scalelab.data.formats.columns import (
    Array,
    Arrays,
    Opened,
    Settings,
    StorageFormat,
    StoredColumn,
    check_found,
    make_array_column,
    make_little_endian,
    map_file,
    refuse_options,
)
from scalelab.errors import DataUnreadable

DTYPES = {
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "U16": "<u2",
    "I16": "<i2",
    "U32": "<u4",
    "I32": "<i4",
    "U64": "<u8",
    "I64": "<i8",
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
}
NAMES = {np.dtype(code): name for name, code in DTYPES.items()}
LENGTH_BYTES = 8
MOST_HEADER_BYTES = 100_000_000
"""The limit of safetensors' own reader."""


def write(path: Path, arrays: Arrays, _: Settings) -> None:
    header: dict[str, Any] = {name: {} for name in arrays}
    by_size = sorted(arrays, key=lambda name: -arrays[name].dtype.itemsize)
    end = 0
    for name in by_size:
        array = arrays[name]
        begin, end = end, end + array.nbytes
        header[name] = {
            "dtype": NAMES[array.dtype.newbyteorder("<")],
            "shape": array.shape,
            "data_offsets": (begin, end),
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for name in by_size:
            file.write(make_little_endian(arrays[name]).data)


def open_set(path: Path, options: Settings) -> Opened:
    refuse_options("safetensors", options, ())
    data = map_file(path)
    begin, header = _read_header(path, data)
    _check_cover(path, header, len(data) - begin)
    columns = tuple(_open_column(path, name, told, data, begin) for name, told in header.items())
    return Opened(columns=columns, watched=(path,), survives_fork=True)


def _read_header(path: Path, data: Array) -> tuple[int, dict[str, dict[str, Any]]]:
    """The offset of the tensors, and their validated header entries."""
    num_bytes = int.from_bytes(data[:LENGTH_BYTES].tobytes(), "little")
    begin = LENGTH_BYTES + num_bytes
    if len(data) < LENGTH_BYTES or begin > len(data) or num_bytes > MOST_HEADER_BYTES:
        raise DataUnreadable(
            f"{path} is truncated or not a safetensors file: its header would be {num_bytes} bytes long"
        )
    header = json.loads(data[LENGTH_BYTES:begin].tobytes())
    if not isinstance(header, dict):
        raise DataUnreadable(f"{path} is damaged: its header is not a JSON object")
    header.pop("__metadata__", None)
    for name, told in header.items():
        if not (isinstance(told, dict) and _is_sizes(told.get("shape")) and _is_sizes(told.get("data_offsets"), 2)):
            raise DataUnreadable(f"{path} is damaged: its header lacks the shape or offsets of {name!r}")
        if told.get("dtype") not in DTYPES:
            raise DataUnreadable(
                f"{path} stores {name!r} as {told.get('dtype')}: only {', '.join(DTYPES)} are supported"
            )
    return begin, header


def _is_sizes(value: Any, length: int | None = None) -> bool:
    if not isinstance(value, list) or (length is not None and len(value) != length):
        return False
    return all(type(size) is int and size >= 0 for size in value)


def _check_cover(path: Path, header: dict[str, dict[str, Any]], num_bytes: int) -> None:
    """Tensors have no gaps and end with the file."""
    end = 0
    for first, last in sorted(told["data_offsets"] for told in header.values()):
        if first != end or last < first:
            raise DataUnreadable(f"{path} is damaged: a tensor starts at byte {first}, expected {end}")
        end = last
    if end != num_bytes:
        raise DataUnreadable(f"{path} is truncated or damaged: its tensors take {end} bytes, but it has {num_bytes}")


def _open_column(path: Path, name: str, told: dict[str, Any], data: Array, begin: int) -> StoredColumn:
    dtype, shape = np.dtype(DTYPES[told["dtype"]]), told["shape"]
    first, last = told["data_offsets"]
    check_found(path, name, dtype, shape)
    if math.prod(shape) * dtype.itemsize != last - first:
        raise DataUnreadable(f"{path} is damaged: {name!r} has {last - first} bytes, which are not {dtype} {shape}")
    return make_array_column(name, data[begin + first : begin + last].view(dtype).reshape(shape))


FORMATS = {"safetensors": StorageFormat(name="safetensors", write=write, open=open_set)}
