"""What the chunks of a data file are, whichever format it has; no sample is read for it."""

from __future__ import annotations

import importlib
import json
import math
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from scalelab.data.amplification import ColumnChunks
from scalelab.data.chunk_cache import CacheSize
from scalelab.data.formats.catalogue import find_format, load_format
from scalelab.data.formats.npy import list_columns
from scalelab.data.formats.stored import StoredSet, reading_errors
from scalelab.errors import DataUnreadable

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
    """hdf5 for hdf5-gzip: formats that are read alike."""
    return name.partition("-")[0]


def describe_columns(path: Path, name: str) -> tuple[ColumnChunks, ...]:
    """Those of a format whose samples can each be read alone."""
    with StoredSet(path, format=name) as stored:
        return tuple(
            ColumnChunks(name=field.name, shape=(len(stored), *field.shape), item_bytes=field.dtype.itemsize)
            for field in stored.fields
        )


def describe_hdf5(path: Path) -> tuple[ColumnChunks, ...]:
    """The arrays at the top of a file, and those in groups below: the columns that its reader finds."""
    hdf5: Any = importlib.import_module("scalelab.data.formats.hdf5")
    with hdf5.h5py.File(path, "r") as file:
        return tuple(_describe_dataset(name, item) for name, item in hdf5.list_datasets(file).items())


FILTER_NAMES = {1: "gzip", 2: "shuffle", 3: "fletcher32", 4: "szip", 5: "nbit", 6: "scaleoffset"}
FILTER_NAMES |= {32000: "lzf", 32001: "blosc", 32004: "lz4", 32008: "bitshuffle", 32015: "zstd", 32026: "blosc2"}
"""By the numbers under which they are registered with the HDF Group."""


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
    """The arrays of a zarr group, or the one array that it is, as `zarr.json` tells. The library keeps no chunk."""
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
    """Members of a zip: one that is deflated has to be inflated from its beginning, whichever sample is asked for."""
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
    """Where the numbers of a stored array begin: behind the header in front of it, whose length only itself tells."""
    with Path(str(archive.filename)).open("rb") as file:
        file.seek(info.header_offset + 26)
        lengths: tuple[int, int] = struct.unpack("<HH", file.read(4))
    return info.header_offset + 30 + sum(lengths) + info.file_size - num_bytes


def describe_npy(path: Path) -> tuple[ColumnChunks, ...]:
    """One file per column, each read by memory map."""
    files = list_columns(path) if path.is_dir() else [path]
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
