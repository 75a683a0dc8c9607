"""Two ways to decode chunks of HDF5: from a map of the file, or by the library.

Where all filters are ours to undo (deflate, shuffle, or none at all) the library is asked only where chunks lie. Their
bytes are then inflated straight from the map: no copy, no lock, and nothing that a forked process would have to open
again. Everything else (LZF, Blosc2, checksums, numbers that must be converted) goes through the library.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import h5py  # type: ignore[import-untyped, unused-ignore]
import numpy as np

from scalelab.data.formats.columns import Array, Field, Indices
from scalelab.data.formats.inflate import inflate
from scalelab.errors import DataUnreadable

Box = tuple[slice, ...]
"""Samples, and a part of each."""

DEFLATE, SHUFFLE = 1, 2
"""Numbers of filters, as HDF5 registers them."""


def list_filters(dataset: Any) -> list[int]:
    plan = dataset.id.get_create_plist()
    return [plan.get_filter(number)[0] for number in range(plan.get_nfilters())]


def is_stored_as_is(dataset: Any) -> bool:
    """Whether its numbers lie in the file just as NumPy has them."""
    return bool(h5py.h5t.py_create(dataset.dtype, logical=True).equal(dataset.id.get_type()))


class MappedChunks:
    """Chunks decoded from a map of the file."""

    def __init__(self, path: Path, dataset: Any, data: Array) -> None:
        self._path, self._name, self._data = path, dataset.name, data.data
        self._dtype, self._shape, self._chunk = dataset.dtype, dataset.shape, dataset.chunks
        self._filters = list_filters(dataset)
        self._grid = tuple(-(-size // length) for size, length in zip(self._shape, self._chunk, strict=True))
        self._chunk_bytes = math.prod(self._chunk) * self._dtype.itemsize
        self._boxes = self._list_boxes()
        self._begins, self._sizes, self._masks = self._list_chunks(dataset)

    def _list_chunks(self, dataset: Any) -> tuple[Indices, Indices, Indices]:
        """Where every chunk lies, how many bytes it has and which filters were left out, along the grid."""
        found: list[tuple[int, int, int, int]] = []
        strides = [math.prod(self._grid[axis + 1 :]) for axis in range(len(self._grid))]

        def note(info: Any) -> None:
            steps = (at // length for at, length in zip(info.chunk_offset, self._chunk, strict=True))
            place = sum(step * stride for step, stride in zip(steps, strides, strict=True))
            found.append((place, info.byte_offset, info.size, info.filter_mask))

        dataset.id.chunk_iter(note)
        table = np.array(sorted(found), dtype=np.int64).reshape(-1, 4)
        if len(table) != math.prod(self._grid) or not np.array_equal(table[:, 0], np.arange(len(table))):
            raise DataUnreadable(
                f"{self._path} is not complete: {self._name} has {len(table)} of {math.prod(self._grid)} chunks"
            )
        begins, sizes, masks = table[:, 1], table[:, 2], table[:, 3]
        if len(table) and (begins.min() < 0 or (begins + sizes).max() > len(self._data)):
            raise DataUnreadable(f"{self._path} is truncated: chunks of {self._name} lie behind its end")
        return begins, sizes, masks

    def read_block(self, first: int, into: Array) -> None:
        place = first // self._chunk[0] * len(self._boxes)
        for number, (box, inside) in enumerate(self._boxes):
            into[box] = self._decode(place + number)[inside][: len(into)]

    def pick(self, first: int, numbers: Indices) -> Array:
        found = np.empty((len(numbers), *self._shape[1:]), self._dtype)
        place = first // self._chunk[0] * len(self._boxes)
        for number, (box, inside) in enumerate(self._boxes):
            found[box] = self._decode(place + number)[inside][numbers]
        return found

    def _list_boxes(self) -> list[tuple[Box, Box]]:
        """For every chunk of a row of the grid: its place in samples, and the part of it that lies inside of them."""
        starts = (range(0, size, length) for size, length in zip(self._shape[1:], self._chunk[1:], strict=True))
        boxes: list[tuple[Box, Box]] = []
        for begins in itertools.product(*starts):
            edges = zip(begins, self._chunk[1:], self._shape[1:], strict=True)
            box = tuple(slice(begin, min(begin + length, size)) for begin, length, size in edges)
            inside = tuple(slice(0, part.stop - part.start) for part in box)
            boxes.append(((slice(None), *box), (slice(None), *inside)))
        return boxes

    def _decode(self, place: int) -> Array:
        begin, size, mask = int(self._begins[place]), int(self._sizes[place]), int(self._masks[place])
        raw: Any = self._data[begin : begin + size]
        for number in reversed(range(len(self._filters))):
            if mask >> number & 1:
                continue
            if self._filters[number] == DEFLATE:
                raw = inflate(raw, self._chunk_bytes)
            else:
                raw = unshuffle(raw, self._dtype.itemsize)
        if len(raw) != self._chunk_bytes:
            raise DataUnreadable(
                f"{self._path} is damaged: a chunk of {self._name} has {len(raw)} of {self._chunk_bytes} bytes"
            )
        return np.frombuffer(raw, self._dtype).reshape(self._chunk)


def unshuffle(data: Any, item_bytes: int) -> Any:
    """Undo HDF5's shuffle: all first bytes of the numbers, then all second ones, and what is no whole number as is."""
    rows = np.frombuffer(data, np.uint8)
    num_items = len(rows) // item_bytes
    whole = rows[: num_items * item_bytes].reshape(item_bytes, num_items).T.tobytes()
    return whole + rows[num_items * item_bytes :].tobytes()


class LibraryChunks:
    """Chunks decoded by the library, each once for every block that is read."""

    def __init__(self, dataset: Any, field: Field, block_samples: int) -> None:
        self._dataset, self._field, self._block_samples = dataset, field, block_samples
        self._space = dataset.id.get_space()
        self._kind = h5py.h5t.py_create(field.dtype, logical=True)

    def read_block(self, first: int, into: Array) -> None:
        shape = (len(into), *self._field.shape)
        self._space.select_hyperslab((first, *(0 for _ in self._field.shape)), shape)
        self._dataset.id.read(h5py.h5s.create_simple(shape), self._space, into, self._kind)

    def pick(self, first: int, numbers: Indices) -> Array:
        wanted, places = np.unique(numbers, return_inverse=True)
        found: Array = self._dataset[first + wanted]
        return found[places].astype(self._field.dtype, copy=False)
