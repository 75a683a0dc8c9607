"""zarr version 3: a directory with one array per column, in chunks of whole samples, one file each.

`zarr.json` describes an array, `c.0.0` is a chunk. Read and written without the zarr library, whose event loop and
thread pool cost more than a chunk and do not survive a fork. Our files always have a checksum (zstd's, gzip's or
crc32c) and every chunk, so a lost one is refused; in other files a missing chunk means the fill value.

Codecs: `bytes`, then `zstd` or `gzip` or neither, with `crc32c` around or inside. A chunk must decode to exactly the
bytes of its shape.
"""

from __future__ import annotations

import itertools
import json
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numcodecs  # type: ignore[import-untyped, unused-ignore]
import numpy as np

from scalelab.data.formats.columns import (
    Array,
    Arrays,
    Opened,
    SampleField,
    Settings,
    StorageFormat,
    check_found,
    refuse_options,
)
from scalelab.data.formats.decoded import ChunkedColumn, choose_chunk_samples, choose_compression, make_cache
from scalelab.errors import DataUnreadable

Codec = dict[str, Any]
Bytes = bytes | bytearray
CRC_BYTES = 4
GZIP = 31
"""zlib's code for a gzip stream."""
MOST_CHUNKS = 1 << 24
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
ZSTD_HEADER_BYTES = 9
"""Frame header and first block header."""

LITTLE_ENDIAN: Codec = {"name": "bytes", "configuration": {"endian": "little"}}
CODECS: dict[str, list[Codec]] = {
    "zstd": [{"name": "zstd", "configuration": {"level": 3, "checksum": True}}],
    "gzip": [{"name": "gzip", "configuration": {"level": 5}}],
    "none": [{"name": "crc32c"}],
}
"""What follows `bytes`, by compression."""


def name_chunk(place: tuple[int, ...], separator: str) -> str:
    return separator.join(["c", *map(str, place)])


def encode(chunk: Array, codecs: list[Codec]) -> bytes:
    data = chunk.tobytes()
    for codec in codecs:
        if codec["name"] == "zstd":
            data = bytes(numcodecs.Zstd(**codec["configuration"]).encode(data))
        elif codec["name"] == "gzip":
            packer = zlib.compressobj(codec["configuration"]["level"], wbits=GZIP)
            data = packer.compress(data) + packer.flush()
        else:
            data += _sum(data)
    return data


def _sum(data: Bytes) -> bytes:
    return int(google_crc32c.value(bytes(data))).to_bytes(CRC_BYTES, "little")


def _decode_zstd(data: Bytes, num_bytes: int) -> Bytes:
    told = _read_zstd_size(data)
    if told != num_bytes:
        raise ValueError(f"it has {told} bytes, expected {num_bytes}")
    out = bytearray(num_bytes)
    numcodecs.Zstd().decode(data, out)
    return out


def _read_zstd_size(data: Bytes) -> int | None:
    """The content size in a frame header (RFC 8878, section 3.1.1.1); a short frame would leave garbage."""
    if len(data) < ZSTD_HEADER_BYTES or data[:4] != ZSTD_MAGIC:
        raise ValueError("it is not a zstd frame")
    flags = data[4]
    is_single = bool(flags & 0x20)
    begin = 5 + (not is_single) + (0, 1, 2, 4)[flags & 3]
    size = (int(is_single), 2, 4, 8)[flags >> 6]
    told = int.from_bytes(data[begin : begin + size], "little")
    return told + 256 * (size == 2) if size else None


def _decode_gzip(data: Bytes, num_bytes: int) -> Bytes:
    unpacker = zlib.decompressobj(wbits=GZIP)
    found = unpacker.decompress(data, num_bytes + 1)
    if not unpacker.eof:
        raise ValueError("it does not end where it should")
    return found


def _check_sum(data: Bytes, _: int) -> Bytes:
    content, told = data[:-CRC_BYTES], data[-CRC_BYTES:]
    if _sum(content) != told:
        raise ValueError("it does not match its checksum")
    return content


DECODERS: dict[str, Callable[[Bytes, int], Bytes]] = {
    "zstd": _decode_zstd,
    "gzip": _decode_gzip,
    "crc32c": _check_sum,
}
"""From a chunk's bytes and the expected size."""


@dataclass(frozen=True, kw_only=True)
class ChunkStore:
    """The chunks of one array."""

    field: SampleField
    stored_dtype: np.dtype[Any]
    folder: Path
    num_samples: int
    chunk_shape: tuple[int, ...]
    separator: str
    codecs: tuple[str, ...]
    fill_value: Any
    is_complete: bool
    """Whether every chunk has a file."""

    def find_starts(self) -> list[int]:
        """The first sample of every row of chunks, then the number of samples."""
        return [*range(0, self.num_samples, self.chunk_shape[0]), self.num_samples]

    def check_number_of_chunks(self) -> None:
        """A corrupt shape would ask for absurdly many chunks."""
        shape = (self.num_samples, *self.field.shape)
        expected = math.prod(-(-size // cut) for size, cut in zip(shape, self.chunk_shape, strict=True))
        most = MOST_CHUNKS
        if self.is_complete and self.separator == ".":
            most = sum(1 for _ in self.folder.iterdir()) - 1
        if expected > most:
            raise DataUnreadable(f"{self.folder} is damaged: expected {expected} chunks, found {most}")

    def decode(self, number: int) -> Array:
        """The samples of one row of chunks."""
        length = min(self.chunk_shape[0], self.num_samples - number * self.chunk_shape[0])
        counts = [-(-size // cut) for size, cut in zip(self.field.shape, self.chunk_shape[1:], strict=True)]
        if self.chunk_shape[1:] == self.field.shape:
            return self._read((number, *(0 for _ in counts)))[:length]
        samples = np.empty((length, *self.field.shape), self.field.dtype)
        for place in itertools.product(*map(range, counts)):
            cuts = [slice(at * cut, (at + 1) * cut) for at, cut in zip(place, self.chunk_shape[1:], strict=True)]
            part = samples[:, *cuts]
            part[...] = self._read((number, *place))[tuple(slice(size) for size in part.shape)]
        return samples

    def _read(self, place: tuple[int, ...]) -> Array:
        file = self.folder / name_chunk(place, self.separator)
        num_bytes = math.prod(self.chunk_shape) * self.stored_dtype.itemsize
        try:
            data: Bytes = file.read_bytes()
            for number, name in reversed(list(enumerate(self.codecs))):
                data = DECODERS[name](data, num_bytes + CRC_BYTES * self.codecs[:number].count("crc32c"))
            found = np.frombuffer(data, self.stored_dtype).reshape(self.chunk_shape)
            return found.astype(self.field.dtype, copy=False)
        except FileNotFoundError:
            if self.is_complete:
                raise DataUnreadable(f"{file} is missing: the dataset was complete when written") from None
            return np.full(self.chunk_shape, self.fill_value, self.field.dtype)
        except (RuntimeError, ValueError, OverflowError, zlib.error, MemoryError) as error:
            raise DataUnreadable(f"{file} is truncated or damaged: {error}") from error


METADATA = "zarr.json"
MARK = "scalelab"
"""The attribute of groups written here."""
OPEN_OPTIONS = ("cache_bytes",)


def write(path: Path, arrays: Arrays, options: Settings) -> None:
    codecs = CODECS[choose_compression(options, tuple(CODECS))]
    path.mkdir()
    for name, array in arrays.items():
        _write_array(path / name, array, choose_chunk_samples({name: array}, options), codecs)
    attributes = {MARK: {"columns": list(arrays), "complete": True}}
    told = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    (path / METADATA).write_text(json.dumps(told))


def _write_array(folder: Path, array: Array, length: int, codecs: list[Codec]) -> None:
    folder.mkdir()
    dtype = array.dtype.newbyteorder("<")
    length = min(length, len(array))
    for number, begin in enumerate(range(0, len(array), length)):
        chunk = np.zeros((length, *array.shape[1:]), dtype)  # the last one is padded
        chunk[: len(array) - begin] = array[begin : begin + length]
        place = (number, *(0 for _ in array.shape[1:]))
        (folder / name_chunk(place, ".")).write_bytes(encode(chunk, codecs))
    told = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": array.shape,
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": (length, *array.shape[1:])}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": False if dtype.kind == "b" else 0,
        "codecs": [LITTLE_ENDIAN, *codecs],
        "attributes": {},
    }
    (folder / METADATA).write_text(json.dumps(told))


def open_set(path: Path, options: Settings) -> Opened:
    refuse_options("zarr", options, OPEN_OPTIONS)
    cache = make_cache(options)
    group = _read_metadata(path)
    mark = (group.get("attributes") or {}).get(MARK) or {}
    if group.get("node_type") == "array":
        folders = {path.stem: path}
    else:
        found = mark.get("columns") or sorted(file.parent.name for file in path.glob(f"*/{METADATA}"))
        folders = {str(name): path / str(name) for name in found}
        if any("/" in name or name in ("", ".", "..") for name in folders):
            raise DataUnreadable(f"{path} is damaged: its columns would be {found}")
    stores = [_read_store(name, folder, bool(mark.get("complete"))) for name, folder in folders.items()]
    columns = tuple(ChunkedColumn(store.field, store.find_starts(), store.decode, cache) for store in stores)
    watched = dict.fromkeys(folder / METADATA for folder in (path, *folders.values()))
    return Opened(columns=columns, watched=tuple(watched), survives_fork=True)


def _read_metadata(folder: Path) -> dict[str, Any]:
    told = json.loads((folder / METADATA).read_bytes())
    if not isinstance(told, dict) or told.get("zarr_format") != 3:
        raise DataUnreadable(f"{folder} is damaged or not zarr version 3, the only one supported")
    return told


def _read_store(name: str, folder: Path, is_complete: bool) -> ChunkStore:
    told = _read_metadata(folder)
    _check_kinds(folder, told)
    shape, chunk_shape = told["shape"], told["chunk_grid"]["configuration"]["chunk_shape"]
    sizes = [*shape, *chunk_shape]
    if not shape or len(shape) != len(chunk_shape) or not all(type(size) is int and size > 0 for size in sizes):
        raise DataUnreadable(f"{folder} is not an array of samples: shape {shape} in chunks of {chunk_shape}")
    dtype = np.dtype(str(told["data_type"]))
    check_found(folder, name, dtype, shape)
    first, *codecs = told["codecs"]
    is_big = (first.get("configuration") or {}).get("endian") == "big"
    store = ChunkStore(
        field=SampleField(name, dtype, tuple(shape[1:])),
        stored_dtype=dtype.newbyteorder(">" if is_big else "<"),
        folder=folder,
        num_samples=shape[0],
        chunk_shape=tuple(chunk_shape),
        separator=(told["chunk_key_encoding"].get("configuration") or {}).get("separator", "/"),
        codecs=tuple(codec["name"] for codec in codecs),
        fill_value=told["fill_value"],
        is_complete=is_complete,
    )
    store.check_number_of_chunks()
    return store


def _check_kinds(folder: Path, told: dict[str, Any]) -> None:
    """Reject parts of the specification that this reader does not support."""
    first, *others = [codec["name"] for codec in told["codecs"]]
    unknown = [name for name in others if name not in DECODERS]
    if first != "bytes" or unknown or len([name for name in others if name != "crc32c"]) > 1:
        listed = " or ".join(f"bytes, {name}" for name in DECODERS)
        raise DataUnreadable(f"{folder} uses the codecs {', '.join([first, *others])}: only {listed} are supported")
    grid, encoding = told["chunk_grid"]["name"], told["chunk_key_encoding"]
    separator = (encoding.get("configuration") or {}).get("separator", "/")
    if grid != "regular" or encoding["name"] != "default" or separator not in ("/", "."):
        raise DataUnreadable(f"{folder} has a {grid} chunk grid with {encoding} keys: only the default is supported")


FORMATS = {
    "zarr": StorageFormat(
        name="zarr",
        write=write,
        open=open_set,
        write_options=("compression", "chunk_samples"),
        open_options=OPEN_OPTIONS,
    )
}
