"""`.npy` directories: columns in the order in which they were written, and none of them lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scalelab.data.chunks import describe_chunks
from scalelab.data.formats.npy import ORDER_FILE
from scalelab.data.formats.stored import StoredSet
from scalelab.data.formats.writing import write_set
from scalelab.errors import DataUnreadable

ARRAYS = {"x": np.arange(12.0).reshape(6, 2), "labels": np.arange(6), "a": np.ones(6, dtype=np.uint8)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_set(tmp_path / "set.npy", ARRAYS, format="npy")
    return tmp_path / "set.npy"


def list_names(path: Path) -> list[str]:
    with StoredSet(path) as stored:
        return [field.name for field in stored.fields]


def test_columns_are_in_the_order_of_writing(path: Path) -> None:
    assert list_names(path) == list(ARRAYS)
    assert [column.name for column in describe_chunks(path)] == list(ARRAYS)
    with StoredSet(path) as stored:
        assert all(map(np.array_equal, stored.__getitems__([4, 1]), [array[[4, 1]] for array in ARRAYS.values()]))


def test_a_directory_of_other_programs_is_read_by_name(path: Path) -> None:
    (path / ORDER_FILE).unlink()
    assert list_names(path) == sorted(ARRAYS)


@pytest.mark.parametrize("told", ['["x", "labels"]', '{"x": 1}', "3", "no json"])
def test_an_order_that_does_not_fit_is_refused(path: Path, told: str) -> None:
    (path / ORDER_FILE).write_text(told)
    with pytest.raises(DataUnreadable, match=r"set\.npy"):
        list_names(path)


def test_a_lost_column_is_refused(path: Path) -> None:
    (path / "labels.npy").unlink()
    with pytest.raises(DataUnreadable, match=r"contains a, x, but columns\.json lists"):
        list_names(path)
