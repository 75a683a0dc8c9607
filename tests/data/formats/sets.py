"""Sets in every format, and how to look at what they deliver."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.format_fuzz import WRITE_OPTIONS, find_files, make_source
from scalelab.data.formats.catalogue import ENTRIES
from scalelab.data.formats.columns import Array
from scalelab.data.formats.stored import StoredSet
from scalelab.data.formats.writing import write_set

NAMES = list(ENTRIES)

__all__ = [
    "NAMES",
    "AllSets",
    "count_open",
    "find_files",
    "hash_columns",
    "keep",
    "make_set",
    "make_source",
    "read_epoch",
]


def make_set(folder: Path, name: str, arrays: Mapping[str, Array] | None = None, *, overwrite: bool = False) -> Path:
    """Write a set in a format, in several chunks where it has any."""
    path = folder / f"{name}{ENTRIES[name].suffix}"
    write_set(path, arrays or make_source(name), format=name, options=WRITE_OPTIONS.get(name), overwrite=overwrite)
    return path


def read_epoch(found: StoredSet, seed: int, batch: int) -> dict[str, Array]:
    """All samples, fetched in batches in a random order, put back to where they belong."""
    order = list(range(len(found)))
    random.Random(seed).shuffle(order)
    arrays = {field.name: np.zeros((len(found), *field.shape), field.dtype) for field in found.fields}
    for begin in range(0, len(order), batch):
        numbers = order[begin : begin + batch]
        for array, samples in zip(arrays.values(), found.__getitems__(numbers), strict=True):
            array[numbers] = samples
    return arrays


def hash_columns(arrays: Mapping[str, Array]) -> str:
    """Of names, types, shapes and bytes."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        found.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
        found.update(arrays[name].tobytes())
    return found.hexdigest()


def count_open() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def keep(batch: Any) -> Any:
    """For a loader that is not to make tensors."""
    return batch


class AllSets:
    """Sets of the same length as one, for a loader: a batch is that of each, by name."""

    def __init__(self, sets: dict[str, StoredSet]) -> None:
        self.sets = sets

    def __len__(self) -> int:
        return len(next(iter(self.sets.values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: found[index] for name, found in self.sets.items()}

    def __getitems__(self, indices: list[int]) -> dict[str, Any]:
        return {name: found.__getitems__(indices) for name, found in self.sets.items()}

    def close(self) -> None:
        for found in self.sets.values():
            found.close()
