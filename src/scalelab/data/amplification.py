"""Read amplification: how many bytes must be read, or inflated, to deliver a sample, for each byte of it.

A column of shape (N, s1, s2, …) in chunks of (c0, c1, c2, …) is cut into ⌈s1/c1⌉ · ⌈s2/c2⌉ · … chunks side by side,
and a sample lies in all of them. Chunks are stored and inflated whole, those at the edges too: their padding counts.
So one sample costs

    inflated bytes   = ⌈s1/c1⌉ · ⌈s2/c2⌉ · … · (c0 · c1 · c2 · … · bytes of an element)
    amplification    = inflated bytes / (s1 · s2 · … · bytes of an element)

and in the usual case, where chunks fit evenly, this is c0: the samples that lie in a chunk. It is what a reader pays
that keeps nothing; one that keeps chunks pays less, by how much is counted in `chunk_cache.py`. What a file's chunks
are is read by `chunks.describe_chunks`.

Chunks without a filter need not be inflated. HDF5 still reads all of one that fits into its cache, and only the bytes
asked for of one that does not (H5Dchunk.c, `H5D__chunk_cacheable`).

A file that is mapped is read by pages, so a small sample costs those that it lies in, unless they are in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scalelab.data.chunk_cache import CacheSize
from scalelab.data.order import MOST_AMPLIFICATION

PAGE_BYTES = 4096
TOLERATED = MOST_AMPLIFICATION
"""Beyond this amplification, an order that goes along with the chunks is worth being less random."""


@dataclass(frozen=True, kw_only=True)
class ColumnChunks:
    """The layout of one column in a file."""

    name: str
    shape: tuple[int, ...]
    """The number of samples, then the shape of one."""
    item_bytes: int
    """Of one element."""
    chunk: tuple[int, ...] | None = None
    """What is stored and inflated as one; None: any byte can be read alone."""
    groups: tuple[int, ...] = ()
    """The samples of every chunk, where they are not alike, as in Parquet's row groups."""
    filters: tuple[str, ...] = ()
    """What was done to a chunk, in the order of writing: shuffle, gzip …"""
    stored_bytes: int | None = None
    """On disk; None if unknown."""
    cache: CacheSize | None = None
    """The library's default cache for this column; None: none."""
    offset: int | None = None
    """Where the samples begin in the file, if they lie there as they are."""

    @property
    def num_samples(self) -> int:
        return self.shape[0]

    @property
    def sample_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.item_bytes

    @property
    def chunk_samples(self) -> int:
        """Samples in a chunk; 1 where any can be read alone."""
        return self.chunk[0] if self.chunk else 1

    @property
    def chunk_bytes(self) -> int:
        """Of one chunk, inflated."""
        return math.prod(self.chunk) * self.item_bytes if self.chunk else self.sample_bytes

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of chunks along every axis."""
        return tuple(
            -(-size // step) for size, step in zip(self.shape, self.chunk or (1, *self.shape[1:]), strict=True)
        )

    @property
    def chunks_per_sample(self) -> int:
        """Those that one sample lies in."""
        return math.prod(self.grid[1:]) if self.chunk else 1

    @property
    def num_chunks(self) -> int:
        return math.prod(self.grid)

    @property
    def is_read_in_part(self) -> bool:
        """Whether nothing has to be read but the sample itself."""
        if self.chunk is None:
            return True
        return not self.filters and self.cache is not None and self.chunk_bytes > self.cache.num_bytes

    @property
    def inflated_bytes(self) -> float:
        """What one sample costs a reader that keeps nothing; the mean over all samples where chunks differ."""
        if self.is_read_in_part:
            return float(self.sample_bytes)
        if self.groups:
            return sum(size**2 for size in self.groups) / self.num_samples * self.sample_bytes
        return float(self.chunks_per_sample * self.chunk_bytes)

    @property
    def amplification(self) -> float:
        """Bytes inflated for every byte that is delivered, nothing kept; 1 is the least."""
        return self.inflated_bytes / self.sample_bytes if self.sample_bytes else 1.0

    @property
    def row_bytes(self) -> int:
        """Of all chunks that the samples of one chunk lie in: what must be kept to inflate each once in order."""
        return self.chunks_per_sample * self.chunk_bytes

    @property
    def page_amplification(self) -> float | None:
        """Bytes of the pages that a sample lies in for each of its bytes, the mean; None where nothing is mapped."""
        if self.chunk is not None or self.offset is None or not self.sample_bytes:
            return None
        period = PAGE_BYTES // math.gcd(self.sample_bytes, PAGE_BYTES)
        starts = self.offset + np.arange(min(period, self.num_samples), dtype=np.int64) * self.sample_bytes
        pages = (starts + self.sample_bytes - 1) // PAGE_BYTES - starts // PAGE_BYTES + 1
        return float(pages.mean()) * PAGE_BYTES / self.sample_bytes


def amplify(columns: Sequence[ColumnChunks]) -> float:
    """Of a whole sample: a small column in large chunks, such as labels, counts for as little as it costs."""
    return sum(column.inflated_bytes for column in columns) / max(1, sum(column.sample_bytes for column in columns))
