"""The formats by name: module, file suffix and required package.

A format is imported when used: its library may be missing, and that of `.pt` is torch.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

from scalelab.data.formats.columns import StorageFormat
from scalelab.errors import DataUnreadable, UnknownName, UsageError


@dataclass(frozen=True, kw_only=True)
class FormatEntry:
    """What is known of a format before it is loaded."""

    sentence: str
    suffix: str
    """Of its files; a directory has none."""
    module: str
    """Relative to this package; has `FORMATS` by name."""
    extra: str = ""
    """The extra of scalelab that it needs; empty: none."""
    marker: str = ""
    """The file that identifies a directory of this format."""


ENTRIES: dict[str, FormatEntry] = {
    "npy": FormatEntry(sentence="NumPy's format, memory-mapped", suffix=".npy", module=".npy"),
    "npz": FormatEntry(sentence="several .npy in an uncompressed zip, memory-mapped", suffix=".npz", module=".npz"),
    "npz-compressed": FormatEntry(sentence="the same, deflated", suffix=".npz", module=".npz"),
    "pt": FormatEntry(
        sentence="torch.save, memory-mapped", suffix=".pt", module="scalelab.worker.batches.pt", extra="torch"
    ),
    "hdf5": FormatEntry(sentence="contiguous HDF5, memory-mapped", suffix=".h5", module=".hdf5", extra="data"),
    "hdf5-gzip": FormatEntry(sentence="chunked HDF5, gzip", suffix=".h5", module=".hdf5", extra="data"),
    "hdf5-lzf": FormatEntry(sentence="chunked HDF5, LZF", suffix=".h5", module=".hdf5", extra="data"),
    "hdf5-blosc2": FormatEntry(sentence="chunked HDF5, Blosc2", suffix=".h5", module=".hdf5", extra="formats"),
    "files": FormatEntry(sentence="one file per sample", suffix="", module=".files", marker="samples.json"),
    "tokens": FormatEntry(sentence="a token shard, memory-mapped", suffix=".bin", module=".tokens"),
    "safetensors": FormatEntry(sentence="safetensors, memory-mapped", suffix=".safetensors", module=".safetensors"),
    "zarr": FormatEntry(sentence="zarr in chunks", suffix=".zarr", module=".zarr", extra="formats"),
    "arrow": FormatEntry(sentence="Arrow IPC, memory-mapped", suffix=".arrow", module=".arrow", extra="formats"),
    "parquet": FormatEntry(sentence="Parquet in row groups", suffix=".parquet", module=".arrow", extra="formats"),
    "lmdb": FormatEntry(sentence="LMDB, one record per sample", suffix=".lmdb", module=".lmdb", extra="formats"),
    "webdataset": FormatEntry(sentence="a tar of samples, WebDataset layout", suffix=".tar", module=".webdataset"),
}


def load_format(name: str) -> StorageFormat:
    """A format by name; raises an error that says what to install."""
    entry = find_entry(name)
    try:
        module = importlib.import_module(entry.module, __package__)
    except ModuleNotFoundError as error:
        if not entry.extra or (error.name or "").startswith("scalelab"):
            raise
        raise UsageError(
            f"format {name} needs {error.name}, which is not installed: pip install 'scalelab[{entry.extra}]'"
        ) from error
    found: StorageFormat = module.FORMATS[name]
    return found


def find_entry(name: str) -> FormatEntry:
    if name not in ENTRIES:
        raise UnknownName("format", name, ENTRIES, "See scalelab data doctor --help.")
    return ENTRIES[name]


def find_format(path: Path) -> str:
    """The format of a path, by suffix; formats that share one have the same reader."""
    if not path.exists():
        raise DataUnreadable(f"{path} cannot be read: no such file or directory")
    for name, entry in ENTRIES.items():
        if (entry.suffix and path.suffix == entry.suffix) or (entry.marker and (path / entry.marker).is_file()):
            return name
    aliases = {".hdf5": "hdf5", ".hdf": "hdf5", ".pth": "pt", ".raw": "tokens"}
    if path.suffix in aliases:
        return aliases[path.suffix]
    if path.is_dir() and any(path.glob("*.npy")):
        return "npy"
    known = ", ".join(dict.fromkeys(entry.suffix for entry in ENTRIES.values() if entry.suffix))
    raise UsageError(f"{path} has an unknown suffix: use {known}, or set --format")
