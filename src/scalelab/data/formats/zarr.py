"""zarr, version 3: a directory with an array for every column, in chunks of whole samples, a file each.

The files are plain: `zarr.json` tells an array, `c.0.0` is a chunk. Here they are written and read without the zarr
library, whose answer to a question goes through an event loop and a pool of threads that cost more than a chunk and
do not survive a fork. What is written here always carries a checksum (zstd's own, gzip's, or crc32c) and stores every
chunk, so that a lost one is refused; elsewhere a chunk that is not there means the fill value.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from scalelab.data.formats.columns import Array, Arrays, Field, Format, Opened, Settings, check_found, refuse_options
from scalelab.data.formats.decoded import ChunkedColumn, choose_chunk_samples, choose_compression, make_cache
from scalelab.data.formats.zarr_chunks import CODECS, DECODERS, LITTLE_ENDIAN, ChunkStore, Codec, encode, name_chunk
from scalelab.errors import DataUnreadable

METADATA = "zarr.json"
MARK = "scalelab"
"""Of the attributes of a group that was written here."""
OPEN_OPTIONS = ("cache_bytes",)


def write(path: Path, arrays: Arrays, options: Settings) -> None:
    codecs = CODECS[choose_compression(options, tuple(CODECS))]
    path.mkdir()
    for name, array in arrays.items():
        _write_array(path / name, array, choose_chunk_samples({name: array}, options), codecs)
    attributes = {MARK: {"columns": list(arrays), "complete": True}}
    told = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    (path / METADATA).write_text(json.dumps(told))


def _write_array(folder: Path, array: Array, length: int, codecs: list[Codec]) -> None:
    folder.mkdir()
    dtype = array.dtype.newbyteorder("<")
    length = min(length, len(array))
    for number, begin in enumerate(range(0, len(array), length)):
        chunk = np.zeros((length, *array.shape[1:]), dtype)  # the last one is as large as all
        chunk[: len(array) - begin] = array[begin : begin + length]
        place = (number, *(0 for _ in array.shape[1:]))
        (folder / name_chunk(place, ".")).write_bytes(encode(chunk, codecs))
    told = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": array.shape,
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": (length, *array.shape[1:])}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": False if dtype.kind == "b" else 0,
        "codecs": [LITTLE_ENDIAN, *codecs],
        "attributes": {},
    }
    (folder / METADATA).write_text(json.dumps(told))


def open_set(path: Path, options: Settings) -> Opened:
    refuse_options("zarr", options, OPEN_OPTIONS)
    cache = make_cache(options)
    group = _read_metadata(path)
    mark = (group.get("attributes") or {}).get(MARK) or {}
    if group.get("node_type") == "array":
        folders = {path.stem: path}
    else:
        found = mark.get("columns") or sorted(file.parent.name for file in path.glob(f"*/{METADATA}"))
        folders = {str(name): path / str(name) for name in found}
        if any("/" in name or name in ("", ".", "..") for name in folders):
            raise DataUnreadable(f"{path} is damaged: its columns would be {found}")
    stores = [_read_store(name, folder, bool(mark.get("complete"))) for name, folder in folders.items()]
    columns = tuple(ChunkedColumn(store.field, store.find_starts(), store.decode, cache) for store in stores)
    watched = dict.fromkeys(folder / METADATA for folder in (path, *folders.values()))
    return Opened(columns=columns, watched=tuple(watched), survives_fork=True)


def _read_metadata(folder: Path) -> dict[str, Any]:
    told = json.loads((folder / METADATA).read_bytes())
    if not isinstance(told, dict) or told.get("zarr_format") != 3:
        raise DataUnreadable(f"{folder} is damaged or of another version of zarr: only version 3 is read")
    return told


def _read_store(name: str, folder: Path, is_complete: bool) -> ChunkStore:
    told = _read_metadata(folder)
    _check_kinds(folder, told)
    shape, chunk_shape = told["shape"], told["chunk_grid"]["configuration"]["chunk_shape"]
    sizes = [*shape, *chunk_shape]
    if not shape or len(shape) != len(chunk_shape) or not all(type(size) is int and size > 0 for size in sizes):
        raise DataUnreadable(f"{folder} is no array of samples: shape {shape} in chunks of {chunk_shape}")
    dtype = np.dtype(str(told["data_type"]))
    check_found(folder, name, dtype, shape)
    first, *codecs = told["codecs"]
    is_big = (first.get("configuration") or {}).get("endian") == "big"
    store = ChunkStore(
        field=Field(name, dtype, tuple(shape[1:])),
        stored_dtype=dtype.newbyteorder(">" if is_big else "<"),
        folder=folder,
        num_samples=shape[0],
        chunk_shape=tuple(chunk_shape),
        separator=(told["chunk_key_encoding"].get("configuration") or {}).get("separator", "/"),
        codecs=tuple(codec["name"] for codec in codecs),
        fill_value=told["fill_value"],
        is_complete=is_complete,
    )
    store.check_number_of_chunks()
    return store


def _check_kinds(folder: Path, told: dict[str, Any]) -> None:
    """Refuse what the specification knows and this reader does not."""
    first, *others = [codec["name"] for codec in told["codecs"]]
    unknown = [name for name in others if name not in DECODERS]
    if first != "bytes" or unknown or len([name for name in others if name != "crc32c"]) > 1:
        listed = " or ".join(f"bytes, {name}" for name in DECODERS)
        raise DataUnreadable(f"{folder} is stored by {', '.join([first, *others])}: {listed} can be read")
    grid, encoding = told["chunk_grid"]["name"], told["chunk_key_encoding"]
    separator = (encoding.get("configuration") or {}).get("separator", "/")
    if grid != "regular" or encoding["name"] != "default" or separator not in ("/", "."):
        raise DataUnreadable(f"{folder} has a {grid} grid of chunks named by {encoding}: only the default is read")


FORMATS = {
    "zarr": Format(
        name="zarr",
        write=write,
        open=open_set,
        write_options=("compression", "chunk_samples"),
        open_options=OPEN_OPTIONS,
    )
}
