"""HDF5: every numeric array in a file is a column, in groups under its path; everything else is left out and named.

Columns are in creation order if the file tracks it, as ours do, otherwise by name. Contiguous arrays are memory-mapped
at the offset that the library reports. Chunks (`hdf5_chunks.py`) are decoded from a map of the file where the filters
are deflate, shuffle or none: no copy, no lock, and nothing to reopen after a fork. Everything else (LZF, Blosc2,
checksums, type conversion) goes through the library. An array with missing chunks would read as zeros and is refused.

    writing   chunk_samples   samples per chunk; default: 64 KB of them
              chunks          the whole chunk shape instead, or "auto" for h5py's choice
              level           of gzip and Blosc2
              shuffle         group the first bytes of all numbers, then the second ones, …
    reading   cache_bytes     decoded samples that a process keeps; default: a quarter of the available memory divided
                              by the cores
              cache_slots     of the library's own cache, where not even one row of chunks fits
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py  # type: ignore[import-untyped, unused-ignore]
import numpy as np

from scalelab.data.formats.columns import (
    Array,
    Arrays,
    Indices,
    Opened,
    SampleField,
    Settings,
    StorageFormat,
    StoredColumn,
    count_sample_bytes,
    make_array_column,
    map_file,
    read_count,
    read_flag,
    refuse_options,
)
from scalelab.data.formats.decoded import inflate, read_cache_bytes
from scalelab.data.formats.hdf5_chunks import BlockColumn, share_budget
from scalelab.data.formats.writing import remembering_errors
from scalelab.errors import DataUnreadable, UsageError

Box = tuple[slice, ...]
"""Samples, and a part of each."""

DEFLATE, SHUFFLE = 1, 2
"""HDF5's filter numbers."""


def list_filters(dataset: Any) -> list[int]:
    plan = dataset.id.get_create_plist()
    return [plan.get_filter(number)[0] for number in range(plan.get_nfilters())]


def is_stored_as_is(dataset: Any) -> bool:
    """Whether values are stored as NumPy has them."""
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
        """Offset, size and skipped filters of every chunk, in grid order."""
        found: list[Any] = []
        dataset.id.chunk_iter(found.append)
        strides = [math.prod(self._grid[axis + 1 :]) for axis in range(len(self._grid))]
        offsets = np.array([info.chunk_offset for info in found], dtype=np.int64).reshape(-1, len(strides))
        rest = [(info.byte_offset, info.size, info.filter_mask) for info in found]
        places = offsets // np.array(self._chunk) @ np.array(strides, dtype=np.int64)
        table = np.column_stack([places, np.array(rest, dtype=np.int64).reshape(-1, 3)])[places.argsort(kind="stable")]
        if len(table) != math.prod(self._grid) or not np.array_equal(table[:, 0], np.arange(len(table))):
            raise DataUnreadable(
                f"{self._path} is incomplete: {self._name} has {len(table)} of {math.prod(self._grid)} chunks"
            )
        begins, sizes, masks = table[:, 1], table[:, 2], table[:, 3]
        if len(table) and (begins.min() < 0 or (begins + sizes).max() > len(self._data)):
            raise DataUnreadable(f"{self._path} is truncated: chunks of {self._name} lie beyond its end")
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
        """For every chunk of a row: its place in samples, and the part of it inside them."""
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
    """Undo HDF5's shuffle; bytes beyond the last whole number are stored as they are."""
    rows = np.frombuffer(data, np.uint8)
    num_items = len(rows) // item_bytes
    whole = rows[: num_items * item_bytes].reshape(item_bytes, num_items).T.tobytes()
    return whole + rows[num_items * item_bytes :].tobytes()


class LibraryChunks:
    """Chunks decoded by the library, each once per block."""

    def __init__(self, dataset: Any, field: SampleField, block_samples: int) -> None:
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


CHUNK_BYTES = 1 << 16
"""Default chunk size when writing, approximately: little wasted decoding at a small overhead."""
BLOCK_BYTES = 1 << 20
"""Read at once where there are no chunks and no map."""
ALIGNMENT = 64
"""Alignment of contiguous arrays: unaligned maps are gathered more slowly."""
OPEN_OPTIONS = ("cache_bytes", "cache_slots")
DEFAULT_SLOTS = 8191


def write_contiguous(path: Path, arrays: Arrays, _: Settings) -> None:
    alignment = {"alignment_threshold": 1, "alignment_interval": ALIGNMENT}
    _write(path, arrays, {name: {} for name in arrays}, alignment)


def write_gzip(path: Path, arrays: Arrays, options: Settings) -> None:
    level = read_count(options, "level", 4, most=9)
    _write_chunked(path, arrays, options, {"compression": "gzip", "compression_opts": level})


def write_lzf(path: Path, arrays: Arrays, options: Settings) -> None:
    _write_chunked(path, arrays, options, {"compression": "lzf"})


def write_blosc2(path: Path, arrays: Arrays, options: Settings) -> None:
    plugin = load_plugin(f"{path} by Blosc2")
    level = read_count(options, "level", 5, most=9)
    filters = plugin.Blosc2.SHUFFLE if read_flag(options, "shuffle", True) else plugin.Blosc2.NOFILTER
    _write_chunked(
        path, arrays, {**options, "shuffle": False}, {"compression": plugin.Blosc2(clevel=level, filters=filters)}
    )


def _write_chunked(path: Path, arrays: Arrays, options: Settings, settings: dict[str, Any]) -> None:
    settings = {"shuffle": read_flag(options, "shuffle", False), **settings}
    _write(
        path, arrays, {name: {**settings, "chunks": _choose_chunk(array, options)} for name, array in arrays.items()}
    )


def _write(
    path: Path, arrays: Arrays, settings: dict[str, dict[str, Any]], alignment: dict[str, int] | None = None
) -> None:
    with remembering_errors(path) as room, h5py.File(room, "w", track_order=True, **(alignment or {})) as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array, **settings[name])


def _choose_chunk(array: Array, options: Settings) -> tuple[int, ...] | bool:
    """A chunk's shape; True: h5py's choice."""
    asked = options.get("chunks")
    if asked is None:
        length = read_count(options, "chunk_samples", max(1, CHUNK_BYTES // max(1, count_sample_bytes(array))), least=1)
        return (min(length, len(array)), *(max(1, size) for size in array.shape[1:]))
    if asked == "auto":
        return True
    if not isinstance(asked, tuple) or len(asked) != array.ndim or min(asked) < 1:
        raise UsageError(f'chunks={asked} does not match {array.shape}: give one number ≥ 1 per axis, or "auto"')
    return tuple(min(length, max(1, size)) for length, size in zip(asked, array.shape, strict=True))


def load_plugin(what: str) -> Any:
    try:
        import hdf5plugin  # type: ignore[import-untyped, unused-ignore]
    except ModuleNotFoundError as error:
        raise UsageError(f"{what} needs hdf5plugin, which is not installed: pip install 'scalelab[formats]'") from error
    return hdf5plugin


def open_set(path: Path, options: Settings) -> Opened:
    refuse_options("hdf5", options, OPEN_OPTIONS)
    budget = read_cache_bytes(options)
    slots = read_count(options, "cache_slots", DEFAULT_SLOTS, least=1)
    file = h5py.File(path, "r")
    try:
        datasets, left_out = list_datasets(file), list_left_out(file)
        data = map_file(path)
        sizes = {name: found.nbytes for name, found in datasets.items() if not is_mapped(found)}
        shares = share_budget(budget, sizes)
        columns = tuple(
            _open_blocks(path, name, found, data, shares[name], slots) if name in shares
            else _map_dataset(path, name, found, data)
            for name, found in datasets.items()
        )  # fmt: skip
        needs_library = any(name in shares and not is_decoded_here(found) for name, found in datasets.items())
    except BaseException:
        file.close()
        raise
    if not needs_library:
        file.close()
    return Opened(
        columns=columns, watched=(path,), survives_fork=not needs_library, left_out=left_out, close=file.close
    )


def list_datasets(file: Any) -> dict[str, Any]:
    """Numeric arrays by path."""
    return {name: item for name, item in walk_datasets(file) if is_column(item)}


def list_left_out(file: Any) -> tuple[str, ...]:
    """What else is stored, in words."""
    others = ((name, item) for name, item in walk_datasets(file) if not is_column(item))
    return tuple(f"{name} ({name_kind(item)})" for name, item in others)


def name_kind(item: Any) -> str:
    if h5py.check_string_dtype(item.dtype) is not None:
        return "text"
    return str(item.dtype) if item.shape else "no array"


def is_column(item: Any) -> bool:
    return bool(item.shape) and item.dtype.kind in "biuf" and item.dtype.itemsize <= 8


def walk_datasets(group: Any, path: str = "", seen: set[Any] | None = None) -> Iterator[tuple[str, Any]]:
    """Everything below a group, once and by path; soft and external links are not followed."""
    seen = {h5py.h5o.get_info(group.id).addr} if seen is None else seen
    for name in group:
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            continue
        item = group[name]
        address = h5py.h5o.get_info(item.id).addr
        if address in seen:
            continue
        seen.add(address)
        if isinstance(item, h5py.Group):
            yield from walk_datasets(item, f"{path}{name}/", seen)
        elif isinstance(item, h5py.Dataset):
            yield f"{path}{name}", item


def is_mapped(dataset: Any) -> bool:
    """Whether its samples lie contiguously in this file, as NumPy has them."""
    return dataset.id.get_offset() is not None and not dataset.external and is_stored_as_is(dataset)


def is_decoded_here(dataset: Any) -> bool:
    return bool(dataset.chunks) and is_stored_as_is(dataset) and set(list_filters(dataset)) <= {DEFLATE, SHUFFLE}


def _map_dataset(path: Path, name: str, dataset: Any, data: Array) -> StoredColumn:
    begin = dataset.id.get_offset()
    if begin + dataset.nbytes > len(data):
        raise DataUnreadable(f"{path} is truncated: {name} ends at byte {begin + dataset.nbytes} of {len(data)}")
    return make_array_column(name, np.ndarray(dataset.shape, dataset.dtype, buffer=data.data, offset=begin))


def _open_blocks(path: Path, name: str, dataset: Any, data: Array, budget: int, slots: int) -> StoredColumn:
    field = SampleField(name, dataset.dtype.newbyteorder("="), dataset.shape[1:])
    if is_decoded_here(dataset):
        return BlockColumn(field, len(dataset), dataset.chunks[0], MappedChunks(path, dataset, data), budget)
    check_readable(path, name, dataset)
    block_samples = dataset.chunks[0] if dataset.chunks else max(1, BLOCK_BYTES // max(1, field.num_bytes))
    is_kept_here = budget >= min(block_samples, len(dataset)) * field.num_bytes
    access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
    access.set_chunk_cache(slots, 0 if is_kept_here else budget, 0.75)
    own = h5py.Dataset(h5py.h5d.open(dataset.file.id, name.encode(), access))
    return BlockColumn(field, len(own), block_samples, LibraryChunks(own, field, block_samples), budget)


def check_readable(path: Path, name: str, dataset: Any) -> None:
    """Refuse what the library would read as zeros, or cannot decode."""
    if dataset.external or dataset.is_virtual:
        raise DataUnreadable(f"{path} stores {name} in external files, which are not supported")
    for number in list_filters(dataset):
        if not h5py.h5z.filter_avail(number):
            load_plugin(f"{path} is compressed with filter {number}, which")
        if not h5py.h5z.filter_avail(number):
            raise DataUnreadable(f"{path} is compressed with filter {number}, which this HDF5 does not have")
    if dataset.chunks:
        grid = (-(-size // length) for size, length in zip(dataset.shape, dataset.chunks, strict=True))
        expected = math.prod(grid)
        if dataset.id.get_num_chunks() != expected:
            raise DataUnreadable(f"{path} is incomplete: {name} has {dataset.id.get_num_chunks()} of {expected} chunks")


FORMATS = {
    "hdf5": StorageFormat(name="hdf5", write=write_contiguous, open=open_set, open_options=OPEN_OPTIONS),
    "hdf5-gzip": StorageFormat(
        name="hdf5-gzip",
        write=write_gzip,
        open=open_set,
        write_options=("chunk_samples", "chunks", "level", "shuffle"),
        open_options=OPEN_OPTIONS,
    ),
    "hdf5-lzf": StorageFormat(
        name="hdf5-lzf",
        write=write_lzf,
        open=open_set,
        write_options=("chunk_samples", "chunks", "shuffle"),
        open_options=OPEN_OPTIONS,
    ),
    "hdf5-blosc2": StorageFormat(
        name="hdf5-blosc2",
        write=write_blosc2,
        open=open_set,
        write_options=("chunk_samples", "chunks", "level", "shuffle"),
        open_options=OPEN_OPTIONS,
    ),
}
