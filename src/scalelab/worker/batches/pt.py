"""`.pt`: tensors as `torch.save` writes them, read by memory map.

A file holds a dict of tensors by column, a list or tuple of them (columns `0`, `1`, …) or a single one (column
`tensor`). Only tensors are unpickled (`weights_only`): whatever else a pickle may do is refused. Columns are NumPy's
views of the mapped tensors, so types that NumPy does not know, such as bfloat16, are refused by name.
"""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

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
from scalelab.data.formats.writing import remembering_errors
from scalelab.errors import DataUnreadable


def write(path: Path, arrays: Arrays, _: Settings) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for name, array in arrays.items():
        tensor = _make_tensor(array)
        is_shared = any(tensor.data_ptr() == other.data_ptr() for other in tensors.values())
        tensors[name] = tensor.clone() if is_shared else tensor  # one memory cannot be saved as two types
    with remembering_errors(path) as file:
        torch.save(tensors, file)  # type: ignore[arg-type]


def _make_tensor(array: Array) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(np.ascontiguousarray(array))


def open_set(path: Path, options: Settings) -> Opened:
    refuse_options("pt", options, ())
    columns = tuple(_open_column(path, name, value) for name, value in _read(path).items())
    return Opened(columns=columns, watched=(path,), survives_fork=True)


def _read(path: Path) -> dict[str, Any]:
    """Whatever is in a file by column."""
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise DataUnreadable(
            f"{path} cannot be read: it contains more than tensors, and pickled code is not executed"
        ) from error
    if isinstance(found, torch.Tensor):
        return {"tensor": found}
    if isinstance(found, (list, tuple)):
        return {str(number): value for number, value in enumerate(found)}
    if isinstance(found, dict):
        return {str(name): value for name, value in found.items()}
    raise DataUnreadable(f"{path} contains a {type(found).__name__}, expected a dict of tensors by column")


def _open_column(path: Path, name: str, value: Any) -> StoredColumn:
    if not isinstance(value, torch.Tensor):
        raise DataUnreadable(f"{path} contains a {type(value).__name__} in {name!r}, expected a tensor")
    if value.layout is not torch.strided or value.is_quantized or value.device.type != "cpu":
        raise DataUnreadable(f"{path} stores {name!r} as a {value.layout} tensor: only dense tensors are supported")
    try:
        array = value.detach().resolve_conj().resolve_neg().numpy()
    except TypeError as error:
        raise DataUnreadable(
            f"{path} stores {name!r} as {value.dtype}, which NumPy does not have: save it as float32 or float16"
        ) from error
    check_found(path, name, array.dtype, array.shape)
    array.flags.writeable = False
    return make_array_column(name, array)


FORMATS = {"pt": StorageFormat(name="pt", write=write, open=open_set)}
