"""A file for every sample: read once for all columns, and refused when it is not what it should be."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelab.data.formats import files
from scalelab.data.formats.stored import StoredSet
from scalelab.data.formats.writing import write_set
from scalelab.errors import DataUnreadable

NUMBERS = np.arange(24 * 3, dtype=np.float32).reshape(24, 3)
LABELS = np.arange(24, dtype=np.uint8) % 10
ORDER = [21, 3, 21, 0]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(files, "FILES_PER_DIRECTORY", 10)
    found = tmp_path / "samples"
    write_set(found, {"x": NUMBERS, "y": LABELS}, format="files")
    return found


def test_a_file_holds_all_columns_of_a_sample(path: Path) -> None:
    assert len(list(path.glob("*/*.bin"))) == 24
    assert (path / "002" / "000021.bin").read_bytes() == NUMBERS[21].tobytes() + LABELS[21].tobytes()


def test_a_batch_opens_every_file_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    real = os.open
    with StoredSet(path) as stored:
        len(stored)
        monkeypatch.setattr(os, "open", lambda name, *rest: names.append(name) or real(name, *rest))
        for _ in range(2):
            x, y = stored.__getitems__(ORDER)
            assert np.array_equal(x, NUMBERS[ORDER])
            assert np.array_equal(y, LABELS[ORDER])
    assert len(names) == 2 * len(ORDER)


def test_a_file_that_has_changed_between_batches_is_read_again(path: Path) -> None:
    with StoredSet(path) as stored:
        stored.__getitems__([3])
        (path / "000" / "000003.bin").write_bytes(NUMBERS[7].tobytes() + b"\x09")
        x, y = stored.__getitems__([3])
    assert np.array_equal(x[0], NUMBERS[7])
    assert y[0] == 9


@pytest.mark.parametrize(("change", "words"), [(b"", "0 bytes, expected 13"), (bytes(14), "14 bytes, expected 13")])
def test_a_file_of_another_size_is_refused_by_name(path: Path, change: bytes, words: str) -> None:
    (path / "000" / "000003.bin").write_bytes(change)
    with (
        StoredSet(path) as stored,
        pytest.raises(DataUnreadable, match=rf"000003.bin is truncated or damaged: {words}"),
    ):
        stored.__getitems__([2, 3])


def test_a_file_that_is_missing_is_named(path: Path) -> None:
    (path / "000" / "000003.bin").unlink()
    with StoredSet(path) as stored, pytest.raises(DataUnreadable, match=r"000003.bin cannot be read: No such file"):
        stored.__getitems__([3])


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ([], "does not list columns and samples"),
        ({"columns": [], "samples": -1}, "does not list columns and samples"),
        ({"columns": [], "samples": 4}, "contains no arrays"),
        ({"columns": [{"name": "x", "dtype": "<f4"}], "samples": 4}, "the shape of 'x' is None"),
        ({"columns": [{"name": "x", "dtype": "O", "shape": [3]}], "samples": 4}, "'x' is object"),
        ({"columns": [{"name": "x", "dtype": "nonsense", "shape": [3]}], "samples": 4}, "cannot be read"),
        ({"columns": [{"name": "x", "dtype": "<f4", "shape": [-3]}], "samples": 4}, r"shape of 'x' is \[-3\]"),
        ({"columns": [{"dtype": "<f4", "shape": [3]}], "samples": 4}, "no name or type"),
    ],
)
def test_a_description_that_cannot_be_is_refused(path: Path, told: Any, words: str) -> None:
    (path / files.MARKER).write_text(json.dumps(told))
    with pytest.raises(DataUnreadable, match=words):
        len(StoredSet(path))


def test_a_shape_of_terabytes_does_not_become_memory(path: Path) -> None:
    told = {"columns": [{"name": "x", "dtype": "<f4", "shape": [10**13]}], "samples": 4}
    (path / files.MARKER).write_text(json.dumps(told))
    with pytest.raises(DataUnreadable, match=r"000000.bin has 13 bytes, but samples.json lists 40000000000000"):
        StoredSet(path).__getitems__([0])
