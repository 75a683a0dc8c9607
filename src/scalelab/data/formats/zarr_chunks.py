"""The chunks of a zarr array: how they are called, encoded and decoded.

Codecs are those of the specification: `bytes`, then `zstd` or `gzip` or neither, with `crc32c` around or inside. A
chunk decodes to exactly the bytes that its shape has, so that a damaged one cannot ask for more.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numcodecs  # type: ignore[import-untyped, unused-ignore]
import numpy as np

from scalelab.data.formats.columns import Array, Field
from scalelab.errors import DataUnreadable

Codec = dict[str, Any]
Bytes = bytes | bytearray
CRC_BYTES = 4
GZIP = 31
"""zlib's number for a stream with gzip's header."""
MOST_CHUNKS = 1 << 24
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
ZSTD_HEADER_BYTES = 9
"""That every frame has, with its first block's own."""

LITTLE_ENDIAN: Codec = {"name": "bytes", "configuration": {"endian": "little"}}
CODECS: dict[str, list[Codec]] = {
    "zstd": [{"name": "zstd", "configuration": {"level": 3, "checksum": True}}],
    "gzip": [{"name": "gzip", "configuration": {"level": 5}}],
    "none": [{"name": "crc32c"}],
}
"""What follows `bytes`, by the name of the compression."""


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
        raise ValueError(f"it holds {told} bytes, and {num_bytes} are expected")
    out = bytearray(num_bytes)
    numcodecs.Zstd().decode(data, out)
    return out


def _read_zstd_size(data: Bytes) -> int | None:
    """What a frame says it holds (RFC 8878, section 3.1.1.1); the codec would leave the rest of its room as it was."""
    if len(data) < ZSTD_HEADER_BYTES or data[:4] != ZSTD_MAGIC:
        raise ValueError("it is no frame of zstd")
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
"""From the bytes of a chunk, and how many they are to become."""


@dataclass(frozen=True, kw_only=True)
class ChunkStore:
    """The chunks of one array, and what is in them."""

    field: Field
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
        """The first sample of every row of chunks, and the number of samples."""
        return [*range(0, self.num_samples, self.chunk_shape[0]), self.num_samples]

    def check_number_of_chunks(self) -> None:
        """A shape that lies would ask for more chunks than there can be."""
        shape = (self.num_samples, *self.field.shape)
        expected = math.prod(-(-size // cut) for size, cut in zip(shape, self.chunk_shape, strict=True))
        most = MOST_CHUNKS
        if self.is_complete and self.separator == ".":
            most = sum(1 for _ in self.folder.iterdir()) - 1
        if expected > most:
            raise DataUnreadable(f"{self.folder} is damaged: {expected} chunks are expected, and {most} are there")

    def decode(self, number: int) -> Array:
        """The samples of one row of chunks, from as many files as they are cut into."""
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
                raise DataUnreadable(f"{file} is missing: the set was whole when it was written") from None
            return np.full(self.chunk_shape, self.fill_value, self.field.dtype)
        except (RuntimeError, ValueError, OverflowError, zlib.error, MemoryError) as error:
            raise DataUnreadable(f"{file} is truncated or damaged: {error}") from error
