"""Columns in chunks of whole samples, and the cache of decoded chunks.

A batch decodes every chunk it touches once. Decoded chunks stay until newer ones need the room: in order each chunk is
decoded once per epoch, and shuffled too while the dataset fits the cache.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from scalelab.data.formats.columns import Array, Arrays, Indices, SampleField, Settings, read_count
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
    sample_bytes = max(math.prod(array.shape[1:]) * array.dtype.itemsize for array in arrays.values())
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
