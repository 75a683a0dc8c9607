"""`.npy`: NumPy's own format, one array per file, memory-mapped.

A dataset of one column is a file; of several, a directory of files with their order in `columns.json` (otherwise by
name). NumPy refuses pickled objects; we refuse a truncated file, whose map would end in SIGBUS.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from scalelab.data.formats.columns import (
    Array,
    Arrays,
    Opened,
    Settings,
    StorageFormat,
    StoredColumn,
    check_found,
    make_array_column,
    refuse_options,
)
from scalelab.errors import DataUnreadable

ORDER_FILE = "columns.json"


def write(path: Path, arrays: Arrays, _: Settings) -> None:
    if len(arrays) == 1:
        _write_one(path, *arrays.values())
        return
    path.mkdir()
    for name, array in arrays.items():
        _write_one(path / f"{name}.npy", array)
    (path / ORDER_FILE).write_text(json.dumps(list(arrays)) + "\n", encoding="utf-8")


def _write_one(path: Path, array: Array) -> None:
    with path.open("wb") as file:  # np.save would add a suffix and hide why writing failed
        whole = np.ascontiguousarray(array)
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(whole))
        file.write(whole.data)


def open_set(path: Path, options: Settings) -> Opened:
    refuse_options("npy", options, ())
    files = list_columns(path) if path.is_dir() else [path]
    return Opened(columns=tuple(map(_map, files)), watched=tuple(files), survives_fork=True)


def list_columns(folder: Path) -> list[Path]:
    """The files of a directory in column order."""
    files = {file.stem: file for file in sorted(folder.glob("*.npy"))}
    order_file = folder / ORDER_FILE
    if not order_file.exists():
        return list(files.values())
    names = json.loads(order_file.read_text(encoding="utf-8"))
    if not isinstance(names, list) or sorted(map(str, names)) != sorted(files):
        raise DataUnreadable(
            f"{folder} contains {', '.join(files)}, but {ORDER_FILE} lists {names}: write the dataset again"
        )
    return [files[str(name)] for name in names]


def _map(path: Path) -> StoredColumn:
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    check_found(path, path.stem, array.dtype, array.shape)
    return make_array_column(path.stem, array)


FORMATS = {"npy": StorageFormat(name="npy", write=write, open=open_set)}
