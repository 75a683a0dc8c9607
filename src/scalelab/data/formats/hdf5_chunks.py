"""Chunked HDF5 columns: every chunk a batch touches is decoded once, and kept while there is room.

A chunk may cover only part of a sample. All chunks of a sample form a row of the chunk grid, so a row is decoded and
kept: `block_samples` whole samples. The budget decides how much:

    all        the column fits: one array, filled row by row. An epoch decodes each chunk once in any order, later ones
               run at memory speed
    some       the least recently used rows are evicted. Shuffled, nearly every sample decodes a row; in a block
               shuffle's order each row is decoded once
    none       not even one row fits: only the wanted samples of each chunk are kept

HDF5's own cache holds 1 MB (8 MB since HDF5 2.0). A row of automatic chunks is larger, so each sample decodes all
chunks of its row again: that is why compressed HDF5 is known to be slow.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from scalelab.data.formats.columns import Array, Indices, SampleField


class ChunkSource(Protocol):
    """Decodes chunks."""

    def read_block(self, first: int, into: Array) -> None:
        """Read samples from `first`, the start of a row of chunks, up to at most its end."""
        ...

    def pick(self, first: int, numbers: Indices) -> Array:
        """Samples of the row of chunks that starts at `first`, by their offset."""
        ...


class BlockColumn:
    """A column decoded in blocks; `budget`: bytes to keep."""

    def __init__(
        self, field: SampleField, num_samples: int, block_samples: int, source: ChunkSource, budget: int
    ) -> None:
        self.field = field
        self._num_samples, self._block_samples, self._source = num_samples, block_samples, source
        self._num_blocks = -(-num_samples // block_samples)
        block_bytes = block_samples * field.num_bytes
        self._keeps_all = num_samples * field.num_bytes <= budget
        self._most_blocks = budget // max(1, block_bytes)
        self._all: Array | None = None
        self._is_here = np.zeros(self._num_blocks, dtype=bool)
        self._num_here = 0
        self._kept: OrderedDict[int, Array] = OrderedDict()

    def __len__(self) -> int:
        return self._num_samples

    def take(self, indices: Indices) -> Array:
        if self._keeps_all:
            return self._fill(indices).take(indices, axis=0)
        found = np.empty((len(indices), *self.field.shape), self.field.dtype)
        for block, places in self._group(indices):
            numbers = indices[places] - block * self._block_samples
            if self._most_blocks:
                found[places] = self._find_block(block)[numbers]
            else:
                found[places] = self._source.pick(block * self._block_samples, numbers)
        return found

    def load(self) -> Array:
        found = np.empty((self._num_samples, *self.field.shape), self.field.dtype)
        for block in range(self._num_blocks):
            self._read_into(block, found)
        return found

    def _fill(self, indices: Indices) -> Array:
        """The array of all samples, with at least these decoded."""
        if self._all is None:
            self._all = np.empty((self._num_samples, *self.field.shape), self.field.dtype)
        if self._num_here < self._num_blocks:
            blocks = indices // self._block_samples
            for block in np.unique(blocks[~self._is_here[blocks]]).tolist():
                self._read_into(block, self._all)
                self._is_here[block] = True
                self._num_here += 1
        return self._all

    def _read_into(self, block: int, samples: Array) -> None:
        first = block * self._block_samples
        self._source.read_block(first, samples[first : first + self._block_samples])

    def _group(self, indices: Indices) -> Iterator[tuple[int, Indices]]:
        """The blocks of these samples, with the positions of their samples."""
        blocks = indices // self._block_samples
        order = blocks.argsort(kind="stable")
        numbers, begins = np.unique(blocks[order], return_index=True)
        yield from zip(numbers.tolist(), np.split(order, begins[1:]), strict=True)

    def _find_block(self, block: int) -> Array:
        """A block, decoded if not cached; the least recently used is evicted."""
        if block in self._kept:
            self._kept.move_to_end(block)
            return self._kept[block]
        while len(self._kept) >= self._most_blocks:
            self._kept.popitem(last=False)
        first = block * self._block_samples
        length = min(self._block_samples, self._num_samples - first)
        samples = np.empty((length, *self.field.shape), self.field.dtype)
        self._source.read_block(first, samples)
        self._kept[block] = samples
        return samples


def share_budget(budget: int, sizes: dict[str, int]) -> dict[str, int]:
    """Bytes each column may keep: small ones all of theirs, the others equal parts of the rest."""
    shares: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: sizes[name]):
        shares[name] = min(sizes[name], budget // (len(sizes) - len(shares)))
        budget -= shares[name]
    return shares
