"""The chunks of a data file, in any format, and their read amplification: bytes inflated per byte delivered.

A column of shape (N, s1, s2, …) in chunks of (c0, c1, c2, …) has ⌈s1/c1⌉ · ⌈s2/c2⌉ · … chunks side by side, and a
sample lies in all of them. Chunks are stored and inflated whole, padding at the edges included. So one sample costs

    inflated bytes   = ⌈s1/c1⌉ · ⌈s2/c2⌉ · … · (c0 · c1 · c2 · … · item bytes)
    amplification    = inflated bytes / (s1 · s2 · … · item bytes)

where chunks fit evenly, that is c0, the samples per chunk. It holds for a reader without a cache; `chunk_cache.py`
counts what a cache saves.

Unfiltered chunks need no inflating. HDF5 reads all of one that fits its cache, otherwise only the bytes asked for
(H5Dchunk.c, `H5D__chunk_cacheable`). A memory-mapped file is read by pages.
"""

from __future__ import annotations

import importlib
import json
import math
import struct
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scalelab.data.chunk_cache import CacheSize
from scalelab.data.formats.catalogue import find_format, load_format
from scalelab.data.formats.stored import StoredSet, reading_errors
from scalelab.data.order import MOST_AMPLIFICATION
from scalelab.errors import DataUnreadable

PAGE_BYTES = 4096
TOLERATED = MOST_AMPLIFICATION
"""Above this, a block shuffle is worth its lower randomness."""


@dataclass(frozen=True, kw_only=True)
class ColumnChunks:
    """The layout of one column."""

    name: str
    shape: tuple[int, ...]
    """Number of samples, then the shape of one."""
    item_bytes: int
    """Of one element."""
    chunk: tuple[int, ...] | None = None
    """The chunk shape; None: any byte can be read alone."""
    groups: tuple[int, ...] = ()
    """Samples of each chunk if they differ, as in Parquet's row groups."""
    filters: tuple[str, ...] = ()
    """In writing order: shuffle, gzip …"""
    stored_bytes: int | None = None
    """On disk; None if unknown."""
    cache: CacheSize | None = None
    """The library's default cache; None: none."""
    offset: int | None = None
    """Where uncompressed, contiguous samples begin in the file."""

    @property
    def num_samples(self) -> int:
        return self.shape[0]

    @property
    def sample_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.item_bytes

    @property
    def chunk_samples(self) -> int:
        """1 if any sample can be read alone."""
        return self.chunk[0] if self.chunk else 1

    @property
    def chunk_bytes(self) -> int:
        """Inflated."""
        return math.prod(self.chunk) * self.item_bytes if self.chunk else self.sample_bytes

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along every axis."""
        return tuple(
            -(-size // step) for size, step in zip(self.shape, self.chunk or (1, *self.shape[1:]), strict=True)
        )

    @property
    def chunks_per_sample(self) -> int:
        """Chunks that one sample lies in."""
        return math.prod(self.grid[1:]) if self.chunk else 1

    @property
    def num_chunks(self) -> int:
        return math.prod(self.grid)

    @property
    def is_read_in_part(self) -> bool:
        """Whether a sample can be read without anything else."""
        if self.chunk is None:
            return True
        return not self.filters and self.cache is not None and self.chunk_bytes > self.cache.num_bytes

    @property
    def inflated_bytes(self) -> float:
        """Bytes inflated for one sample without a cache; the mean if chunks differ."""
        if self.is_read_in_part:
            return float(self.sample_bytes)
        if self.groups:
            return sum(size**2 for size in self.groups) / self.num_samples * self.sample_bytes
        return float(self.chunks_per_sample * self.chunk_bytes)

    @property
    def amplification(self) -> float:
        """Bytes inflated per byte delivered without a cache; at least 1."""
        return self.inflated_bytes / self.sample_bytes if self.sample_bytes else 1.0

    @property
    def row_bytes(self) -> int:
        """All chunks side by side: what must be kept to inflate each once in order."""
        return self.chunks_per_sample * self.chunk_bytes

    @property
    def page_amplification(self) -> float | None:
        """Mean bytes of the pages a sample touches per byte of it; None if not mapped."""
        if self.chunk is not None or self.offset is None or not self.sample_bytes:
            return None
        period = PAGE_BYTES // math.gcd(self.sample_bytes, PAGE_BYTES)
        starts = self.offset + np.arange(min(period, self.num_samples), dtype=np.int64) * self.sample_bytes
        pages = (starts + self.sample_bytes - 1) // PAGE_BYTES - starts // PAGE_BYTES + 1
        return float(pages.mean()) * PAGE_BYTES / self.sample_bytes


def amplify(columns: Sequence[ColumnChunks]) -> float:
    """Of a whole sample, so small columns in large chunks, such as labels, count for little."""
    return sum(column.inflated_bytes for column in columns) / max(1, sum(column.sample_bytes for column in columns))


ZARR_METADATA = "zarr.json"


def describe_chunks(path: Path, format: str = "") -> tuple[ColumnChunks, ...]:  # noqa: A002
    """The layout of every column in a file."""
    name = format or find_format(path)
    family = find_family(name)
    if family in DESCRIBERS:
        load_format(name)
        with reading_errors(path):
            columns = DESCRIBERS[family](path)
    else:
        columns = describe_columns(path, name)
    if not columns:
        raise DataUnreadable(f"{path} contains no arrays: use `scalelab data convert` to write a file that does")
    return columns


def find_family(name: str) -> str:
    """hdf5 for hdf5-gzip: formats with one reader."""
    return name.partition("-")[0]


def describe_columns(path: Path, name: str) -> tuple[ColumnChunks, ...]:
    """For formats whose samples can be read alone."""
    with StoredSet(path, format=name) as stored:
        return tuple(
            ColumnChunks(name=field.name, shape=(len(stored), *field.shape), item_bytes=field.dtype.itemsize)
            for field in stored.fields
        )


def describe_hdf5(path: Path) -> tuple[ColumnChunks, ...]:
    """All numeric arrays, in groups too."""
    hdf5: Any = importlib.import_module("scalelab.data.formats.hdf5")
    with hdf5.h5py.File(path, "r") as file:
        return tuple(_describe_dataset(name, item) for name, item in hdf5.list_datasets(file).items())


FILTER_NAMES = {1: "gzip", 2: "shuffle", 3: "fletcher32", 4: "szip", 5: "nbit", 6: "scaleoffset"}
FILTER_NAMES |= {32000: "lzf", 32001: "blosc", 32004: "lz4", 32008: "bitshuffle", 32015: "zstd", 32026: "blosc2"}
"""By their number in the HDF Group's registry."""


def _describe_dataset(name: str, item: Any) -> ColumnChunks:
    plan = item.id.get_create_plist()
    numbers = [plan.get_filter(number)[0] for number in range(plan.get_nfilters())]
    slots, num_bytes, w0 = item.id.get_access_plist().get_chunk_cache()
    return ColumnChunks(
        name=name,
        shape=tuple(item.shape),
        item_bytes=item.dtype.itemsize,
        chunk=tuple(item.chunks) if item.chunks else None,
        filters=tuple(FILTER_NAMES.get(number, f"filter {number}") for number in numbers),
        stored_bytes=item.id.get_storage_size(),
        cache=CacheSize(num_bytes=num_bytes, num_slots=slots, w0=w0) if item.chunks else None,
        offset=item.id.get_offset() if not item.chunks else None,
    )


def describe_zarr(path: Path) -> tuple[ColumnChunks, ...]:
    """The arrays of a zarr group, or a single array. The library has no cache."""
    folders = [path, *sorted(found for found in path.iterdir() if found.is_dir())]
    told = {folder: json.loads((folder / ZARR_METADATA).read_text()) for folder in folders if has_metadata(folder)}
    arrays = {folder: one for folder, one in told.items() if one.get("node_type") == "array"}
    return tuple(_describe_zarr_array(folder, one) for folder, one in arrays.items())


def has_metadata(folder: Path) -> bool:
    return (folder / ZARR_METADATA).is_file()


def _describe_zarr_array(folder: Path, told: dict[str, Any]) -> ColumnChunks:
    codecs = [codec["name"] for codec in told["codecs"]]
    return ColumnChunks(
        name=folder.stem,
        shape=tuple(told["shape"]),
        item_bytes=np.dtype(told["data_type"]).itemsize,
        chunk=tuple(told["chunk_grid"]["configuration"]["chunk_shape"]),
        filters=tuple(name for name in codecs if name != "bytes"),
        stored_bytes=sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
    )


def describe_parquet(path: Path) -> tuple[ColumnChunks, ...]:
    """Row groups: each is inflated whole, and they may differ."""
    parquet: Any = importlib.import_module("pyarrow.parquet")
    with parquet.ParquetFile(path) as file:
        groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        rows = tuple(group.num_rows for group in groups)
        stored: dict[str, int] = {}
        filters: dict[str, str] = {}
        for group in groups:
            for number in range(group.num_columns):
                column = group.column(number)
                name = column.path_in_schema.partition(".")[0]
                stored[name] = stored.get(name, 0) + column.total_compressed_size
                filters[name] = column.compression.lower()
    most = max(rows, default=1)
    return tuple(
        ColumnChunks(
            name=plain.name,
            shape=plain.shape,
            item_bytes=plain.item_bytes,
            chunk=(most, *plain.shape[1:]),
            groups=rows,
            filters=() if filters.get(plain.name, "") == "uncompressed" else (filters.get(plain.name, "parquet"),),
            stored_bytes=stored.get(plain.name),
        )
        for plain in describe_columns(path, "parquet")
    )


def describe_npz(path: Path) -> tuple[ColumnChunks, ...]:
    """Zip members: a deflated one is inflated from its beginning for any sample."""
    with zipfile.ZipFile(path) as archive:
        return tuple(_describe_member(archive, info) for info in archive.infolist() if info.filename.endswith(".npy"))


def _describe_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> ColumnChunks:
    with archive.open(info) as member:
        version = np.lib.format.read_magic(member)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(member)
    if not shape:
        raise DataUnreadable(f"{archive.filename} has a scalar in {info.filename}, not an array of samples")
    is_stored = info.compress_type == zipfile.ZIP_STORED
    names = {zipfile.ZIP_DEFLATED: "deflate", zipfile.ZIP_BZIP2: "bzip2", zipfile.ZIP_LZMA: "lzma"}
    return ColumnChunks(
        name=info.filename.removesuffix(".npy"),
        shape=shape,
        item_bytes=dtype.itemsize,
        chunk=None if is_stored else shape,
        filters=() if is_stored else (names.get(info.compress_type, f"method {info.compress_type}"),),
        stored_bytes=info.compress_size,
        offset=_find_offset(archive, info, math.prod(shape) * dtype.itemsize) if is_stored else None,
    )


def _find_offset(archive: zipfile.ZipFile, info: zipfile.ZipInfo, num_bytes: int) -> int:
    """Where a stored array's values begin: only the local header says so."""
    with Path(str(archive.filename)).open("rb") as file:
        file.seek(info.header_offset + 26)
        lengths: tuple[int, int] = struct.unpack("<HH", file.read(4))
    return info.header_offset + 30 + sum(lengths) + info.file_size - num_bytes


def describe_npy(path: Path) -> tuple[ColumnChunks, ...]:
    """One memory-mapped file per column."""
    files = load_format("npy").open(path, {}).watched
    arrays = {file: np.load(file, mmap_mode="r", allow_pickle=False) for file in files}
    return tuple(
        ColumnChunks(
            name=file.stem,
            shape=array.shape,
            item_bytes=array.dtype.itemsize,
            stored_bytes=file.stat().st_size,
            offset=array.offset,
        )
        for file, array in arrays.items()
    )


DESCRIBERS = {
    "hdf5": describe_hdf5,
    "zarr": describe_zarr,
    "parquet": describe_parquet,
    "npz": describe_npz,
    "npy": describe_npy,
}
