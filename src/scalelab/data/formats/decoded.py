"""Columns in chunks of whole samples, and the cache of decoded chunks.

A batch decodes every chunk it touches once. Decoded chunks stay until newer ones need the room: in order each chunk is
decoded once per epoch, and shuffled too while the dataset fits the cache.

Deflated bytes are inflated to exactly the expected size, by ISA-L where installed (`scalelab[data]`), about twice as
fast as zlib, with the same bytes and checksums. Output of another size is refused as soon as it is known, so a few
bytes cannot expand to gigabytes. The caller names the file.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from scalelab.data.formats.columns import Array, Arrays, Indices, SampleField, Settings, count_sample_bytes, read_count
from scalelab.errors import UsageError
from scalelab.records.environment import count_cores, read_available_memory

CHUNK_BYTES = 1 << 20
"""Default chunk size when writing, approximately."""


class ChunkCache:
    """An LRU cache of decoded chunks; the newest is kept however large it is."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._chunks: OrderedDict[tuple[str, int], Array] = OrderedDict()

    def find(self, name: str, number: int, decode: Callable[[int], Array]) -> Array:
        """A chunk of a column, decoded if not cached."""
        key = (name, number)
        if key in self._chunks:
            self._chunks.move_to_end(key)
            return self._chunks[key]
        chunk = decode(number)
        self._chunks[key] = chunk
        self._num_bytes += chunk.nbytes
        while self._num_bytes > self._most_bytes and len(self._chunks) > 1:
            self._num_bytes -= self._chunks.popitem(last=False)[1].nbytes
        return chunk


class ChunkedColumn:
    """A column in chunks; `starts`: the first sample of each, then the number of samples."""

    def __init__(
        self, field: SampleField, starts: Sequence[int], decode: Callable[[int], Array], cache: ChunkCache
    ) -> None:
        self.field = field
        self._starts = np.array(starts, dtype=np.intp)
        self._decode = decode
        self._cache = cache

    def __len__(self) -> int:
        return int(self._starts[-1])

    def take(self, indices: Indices) -> Array:
        found = np.empty((len(indices), *self.field.shape), self.field.dtype)
        if not len(indices):
            return found
        owners = self._starts.searchsorted(indices, side="right") - 1
        order = owners.argsort(kind="stable")
        numbers, begins = np.unique(owners[order], return_index=True)
        for number, places in zip(numbers.tolist(), np.split(order, begins[1:]), strict=True):
            chunk = self._cache.find(self.field.name, number, self._decode)
            found[places] = chunk[indices[places] - self._starts[number]]
        return found

    def load(self) -> Array:
        return np.concatenate([self._decode(number) for number in range(len(self._starts) - 1)])


def choose_chunk_samples(arrays: Arrays, options: Settings) -> int:
    """Samples per chunk: from the options, or about a megabyte of the largest column."""
    sample_bytes = max(count_sample_bytes(array) for array in arrays.values())
    return read_count(options, "chunk_samples", max(1, CHUNK_BYTES // max(sample_bytes, 1)), least=1)


def make_cache(options: Settings) -> ChunkCache:
    return ChunkCache(read_cache_bytes(options))


def read_cache_bytes(options: Settings) -> int:
    """Bytes of decoded samples a process keeps: from the options, or `find_cache_bytes`."""
    return read_count(options, "cache_bytes", find_cache_bytes())


def find_cache_bytes() -> int:
    """A quarter of the available memory divided by the cores: as many processes may read at once."""
    return read_available_memory() // (4 * count_cores())


def choose_compression(options: Settings, known: Sequence[str]) -> str:
    """The compression in the options; by default the first known one."""
    asked = options.get("compression", known[0])
    if asked not in known:
        raise UsageError(f"compression must be one of {', '.join(known)}, got {asked}")
    return str(asked)


try:
    from isal import isal_zlib
except ModuleNotFoundError:
    CODEC: Any = zlib
else:
    CODEC = isal_zlib

MOST_RATIO = 1032
"""Most bytes that one deflated byte can expand to (zlib's technical notes)."""
MOST_OVERHEAD = 64
"""Allowed expansion by compression, besides a thousandth."""
PIECE_BYTES = 1 << 18
SMALL_BYTES = 1 << 18
"""Inflated in one call, which saves a copy."""
RAW_STREAM = -15
"""zlib's code for a stream without header and checksum, as in zip files."""


def inflate(data: memoryview, num_bytes: int) -> bytes:
    """Inflate a zlib stream of known size."""
    if len(data) > num_bytes + num_bytes // 1000 + MOST_OVERHEAD:
        raise ValueError(f"its compressed data are damaged: {len(data)} bytes are too many for {num_bytes}")
    try:
        found, is_whole = _inflate_at_once(data, num_bytes) if num_bytes <= SMALL_BYTES else _inflate(data, num_bytes)
    except CODEC.error as error:
        raise ValueError(f"its compressed data are damaged: {error}") from error
    if len(found) != num_bytes or not is_whole:
        raise ValueError(f"its compressed data are damaged: {len(data)} bytes should expand to {num_bytes}")
    return found


def _inflate_at_once(data: memoryview, num_bytes: int) -> tuple[bytes, bool]:
    """Into one buffer; a longer stream expands to at most `MOST_RATIO` times its few bytes."""
    return CODEC.decompress(data, bufsize=max(1, num_bytes)), True


def _inflate(data: memoryview, num_bytes: int) -> tuple[bytes, bool]:
    stream = CODEC.decompressobj()
    found: bytes = stream.decompress(data, num_bytes + 1)
    return found, stream.eof


def inflate_member(data: memoryview, into: memoryview, checksum: int) -> None:
    """Inflate a zip member in place, in pieces, and check its CRC-32."""
    stream = CODEC.decompressobj(wbits=RAW_STREAM)
    begin, found_sum = 0, 0
    for first in range(0, len(data), PIECE_BYTES):
        piece: Any = data[first : first + PIECE_BYTES]
        while len(piece) and not stream.eof:
            try:
                found = stream.decompress(piece, min(4 * PIECE_BYTES, len(into) - begin + 1))
            except CODEC.error as error:
                raise ValueError(f"its compressed data are damaged: {error}") from error
            if begin + len(found) > len(into):
                raise ValueError(
                    f"its compressed data are damaged: they expand to more than the expected {len(into)} bytes"
                )
            into[begin : begin + len(found)] = found
            begin, found_sum, piece = begin + len(found), CODEC.crc32(found, found_sum), stream.unconsumed_tail
    if begin != len(into) or not stream.eof or found_sum != checksum:
        raise ValueError(f"its compressed data are damaged: {begin} of {len(into)} bytes, or a wrong checksum")
