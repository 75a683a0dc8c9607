"""A disk that fills up while a set is written, in every format: an error that says so, and nothing half-written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from scalelab.data.formats.stored import StoredSet
from scalelab.data.formats.writing import write_set
from scalelab.errors import StorageFull
from tests.data.formats.sets import NAMES, count_open, hash_columns, make_set, make_source, read_epoch

DISK_BYTES = 1 << 20


@pytest.mark.parametrize("name", NAMES)
def test_a_full_disk_leaves_the_older_set_and_nothing_else(make_small_disk: Callable[[int], Path], name: str) -> None:
    disk = make_small_disk(DISK_BYTES)
    path = make_set(disk, name)
    files = sorted(disk.rglob("*"))
    with StoredSet(path, format=name) as found:
        before = hash_columns(read_epoch(found, 0, 10))
    num_open = count_open()
    large = np.random.default_rng(0).integers(0, 60_000, (800, 1000)).astype(np.uint16)
    with pytest.raises(StorageFull, match=path.name):
        write_set(path, {"x": large[:, 0].repeat(1000) if name == "tokens" else large}, format=name, overwrite=True)
    assert sorted(disk.rglob("*")) == files
    assert count_open() <= num_open
    with StoredSet(path, format=name) as found:
        assert hash_columns(read_epoch(found, 0, 10)) == before
        assert len(found) == len(next(iter(make_source(name).values())))
