"""The tree of an LMDB file, gone through page by page, with nothing believed before it is checked.

LMDB believes every number in its pages, so that a damaged file ends the process that reads it. Here whatever points
outside is a `DataUnreadable`. All numbers are little-endian:

    page     number u64, pad u16, flags u16, lower u16, upper u16, then the places of its nodes u16
    node     low u16, high u16, flags u16, key's size u16, key, then data, or the page u64 on which they lie
    meta     page header, magic u32, version u32, address u64, map size u64, two trees, last page u64, transaction u64
    tree     pad u32 (the first's is the page size), flags u16, depth u16, counts of pages 3 u64, entries u64, root u64

The data of a leaf's node have `low + 2¹⁶ high` bytes; a branch's node leads to page `low + 2¹⁶ high + 2³² flags`. Of
the two meta pages, the one of the later transaction holds.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scalelab.data.formats.columns import Array, Indices
from scalelab.data.formats.mapped import gather
from scalelab.errors import DataUnreadable

MAGIC, VERSION = 0xBEEFC0DE, 1
META = struct.Struct("<16x I I 16x I 44x I H H 24x Q Q 8x Q")
"""Magic, version, page size; pad, flags, depth, entries and root of the main tree; transaction."""
BRANCH, LEAF, OVERFLOW = 1, 2, 4
PAGE_HEADER = 16
NODE_HEADER = 8
ON_OTHER_PAGES = 1
"""Flag of a node whose data are too large for its page."""
MOST_PAGE_BYTES = 1 << 16


@dataclass(frozen=True)
class Leaf:
    """The nodes of one leaf: where their keys and data begin in the file, and how large they are."""

    key_offsets: Indices
    key_sizes: Indices
    data_offsets: Indices
    data_sizes: Indices


@dataclass(frozen=True)
class Tree:
    """The main tree of a file."""

    path: Path
    data: Array
    page_bytes: int
    root: int
    num_entries: int

    def walk(self) -> Iterator[Leaf]:
        """Its leaves in the order of their keys."""
        waiting, seen = [self.root], set[int]()
        while waiting:
            number = waiting.pop()
            if number in seen:
                raise DataUnreadable(f"{self.path} is damaged: its tree comes to page {number} twice")
            seen.add(number)
            flags, places, nodes = self._read_page(number)
            low, high, upper, key_sizes = nodes.T
            if flags & BRANCH:
                waiting += (low + (high << 16) + (upper << 32))[::-1].tolist()
            else:
                yield self._read_leaf(number, places, low + (high << 16), upper, key_sizes)

    def _read_page(self, number: int) -> tuple[int, Indices, Indices]:
        """Its flags, the places of its nodes, and what stands at the beginning of each."""
        begin = number * self.page_bytes
        page = self.data[begin : begin + self.page_bytes]
        if len(page) < self.page_bytes:
            raise DataUnreadable(f"{self.path} is truncated: page {number} of its tree lies behind its end")
        own_number, _, flags, lower, upper = struct.unpack("<QHHHH", page[:PAGE_HEADER].tobytes())
        fits = PAGE_HEADER < lower <= upper <= self.page_bytes and lower % 2 == 0
        if own_number != number or flags not in (BRANCH, LEAF) or not fits:
            raise self._damaged(number)
        places = page[PAGE_HEADER:lower].view("<u2").astype(np.intp)
        if places.min() < upper or places.max() + NODE_HEADER > self.page_bytes:
            raise self._damaged(number)
        nodes = gather(page, places, NODE_HEADER).view("<u2").astype(np.intp)
        return flags, places, nodes

    def _read_leaf(self, number: int, places: Indices, sizes: Indices, flags: Indices, key_sizes: Indices) -> Leaf:
        begin = number * self.page_bytes
        keys = places + NODE_HEADER
        found = keys + key_sizes
        elsewhere = flags == ON_OTHER_PAGES
        stored = np.where(elsewhere, NODE_HEADER, sizes)  # there, only the number of the page lies in the leaf
        if (flags & ~ON_OTHER_PAGES).any() or (found + stored > self.page_bytes).any():
            raise self._damaged(number)
        offsets = begin + found
        if elsewhere.any():
            numbers = gather(self.data, offsets[elsewhere], 8).view("<u8").ravel()
            if numbers.max() >= len(self.data) // self.page_bytes:
                raise self._damaged(number)
            offsets[elsewhere] = numbers.astype(np.intp) * self.page_bytes + PAGE_HEADER
            if (offsets + sizes).max() > len(self.data):
                raise self._damaged(number)
        return Leaf(begin + keys, key_sizes, offsets, sizes)

    def _damaged(self, number: int) -> DataUnreadable:
        return DataUnreadable(f"{self.path} is damaged: page {number} of its tree is not what it should be")


def read_tree(path: Path, data: Array) -> Tree:
    """The main tree by the meta page of the later transaction."""
    if len(data) < META.size:
        raise DataUnreadable(f"{path} is truncated or no LMDB file: it has {len(data)} bytes")
    first = META.unpack(data[: META.size].tobytes())
    page_bytes = first[2]
    if first[:2] != (MAGIC, VERSION) or not 512 <= page_bytes <= MOST_PAGE_BYTES or len(data) < 2 * page_bytes:
        raise DataUnreadable(f"{path} is truncated or no LMDB file: its first page is not what it should be")
    second = META.unpack(data[page_bytes : page_bytes + META.size].tobytes())
    if second[:3] != first[:3]:
        raise DataUnreadable(f"{path} is damaged: its second page is not what it should be")
    _, _, _, _, flags, _, num_entries, root, _ = max(first, second, key=lambda meta: meta[-1])
    if flags or root >= len(data) // page_bytes:
        raise DataUnreadable(f"{path} holds no plain records: its tree has the flags {flags} and begins on page {root}")
    return Tree(path, data, page_bytes, root, num_entries)
