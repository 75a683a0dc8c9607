"""A conversion keeps every bit, or leaves nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py  # type: ignore[import-untyped, unused-ignore]
import numpy as np
import pytest

from scalelab.data import convert as converting
from scalelab.data.convert import convert, name_format
from scalelab.data.formats.catalogue import ENTRIES
from scalelab.data.formats.columns import Array
from scalelab.data.formats.stored import StoredSet
from scalelab.data.formats.writing import write_set
from scalelab.errors import DataUnreadable, UsageError

ARRAYS = {
    "x": np.random.default_rng(0).standard_normal((50, 3, 7)).astype(np.float32),
    "labels": np.arange(50, dtype=np.int64),
}


def make_source(directory: Path, name: str = "hdf5-gzip") -> Path:
    path = directory / f"source{ENTRIES[name].suffix}"
    write_set(path, ARRAYS, format=name)
    return path


@pytest.mark.parametrize("name", [name for name in ENTRIES if name not in ("tokens", "pt")])
def test_every_format_is_converted_from_and_to(name: str, tmp_path: Path) -> None:
    there = tmp_path / f"there{ENTRIES[name].suffix}"
    back = tmp_path / "back.h5"
    first = convert(make_source(tmp_path), there, format=name)
    second = convert(there, back, source_format=name, format="hdf5-lzf", options={"chunk_samples": 3})
    assert first.num_samples == second.num_samples == 50
    with StoredSet(back) as stored:
        found = dict(zip((field.name for field in stored.fields), stored.__getitems__(range(50)), strict=True))
    assert all(np.array_equal(found[column], ARRAYS[column]) for column in ARRAYS)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({"source.h5", there.name, back.name})


def test_parts_that_are_smaller_than_a_chunk_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_source(tmp_path)
    whole = convert(source, tmp_path / "a.npy")
    monkeypatch.setattr(converting, "PART_BYTES", 300)
    assert convert(source, tmp_path / "b.npy").digest == whole.digest


def test_arrays_in_groups_get_names_that_every_format_can_store(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["train/x"] = ARRAYS["x"]
        file["train/y"] = ARRAYS["labels"]
    convert(tmp_path / "x.h5", tmp_path / "x.npz")
    with StoredSet(tmp_path / "x.npz") as stored:
        assert [field.name for field in stored.fields] == ["train-x", "train-y"]


def test_what_is_no_array_of_numbers_is_named(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"], file["names"] = ARRAYS["x"], ["a"] * len(ARRAYS["x"])
    assert convert(tmp_path / "x.h5", tmp_path / "x.npz").left_out == ("names (text)",)


def test_what_reads_back_otherwise_does_not_take_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = make_source(tmp_path), tmp_path / "out.npz"
    out.write_bytes(b"older")

    spool = converting.spool_columns

    def spoil(*arguments: Any) -> list[Array]:
        arrays = spool(*arguments)
        arrays[0][17] += 1
        return arrays

    monkeypatch.setattr(converting, "spool_columns", spoil)
    with pytest.raises(DataUnreadable, match="differs from"):
        convert(source, out, overwrite=True)
    assert out.read_bytes() == b"older"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.npz", "source.h5"]


def test_a_damaged_source_leaves_nothing(tmp_path: Path) -> None:
    source = make_source(tmp_path)
    data = bytearray(source.read_bytes())
    data[-40:] = bytes(40)
    source.write_bytes(data[:-100])
    with pytest.raises(DataUnreadable, match=r"source\.h5"):
        convert(source, tmp_path / "out.npy")
    assert [path.name for path in tmp_path.iterdir()] == ["source.h5"]


def test_places_that_are_taken_are_refused(tmp_path: Path) -> None:
    source = make_source(tmp_path)
    with pytest.raises(UsageError, match="is the input file"):
        convert(source, source, overwrite=True)
    (tmp_path / "out.npz").touch()
    with pytest.raises(UsageError, match="--overwrite"):
        convert(source, tmp_path / "out.npz")
    with pytest.raises(UsageError, match="chunk_samples=3 is not an option of npz"):
        convert(source, tmp_path / "new.npz", options={"chunk_samples": 3})


def test_a_name_stands_for_a_format_and_an_unknown_one_lists_them() -> None:
    assert name_format(Path("x.h5")) == "hdf5"
    assert name_format(Path("x.npz")) == "npz"
    with pytest.raises(UsageError, match=r"x\.foo has an unknown suffix.*\.npy.*--format"):
        name_format(Path("x.foo"))
