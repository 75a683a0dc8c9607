"""A stored set: opened late, pickled closed, refused when it changes, and asked by number."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelab.data.formats import stored as stored_module
from scalelab.data.formats.columns import SampleField, make_array_column
from scalelab.data.formats.stored import StoredSet
from scalelab.data.formats.writing import write_set
from scalelab.errors import DataUnreadable, UnknownName, UsageError

NUMBERS = np.arange(60, dtype=np.float32).reshape(20, 3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_set(tmp_path / "x.npy", {"x": NUMBERS}, format="npy")
    return tmp_path / "x.npy"


def test_nothing_is_opened_before_it_is_asked_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    real = stored_module.load_format
    monkeypatch.setattr(stored_module, "load_format", lambda name: calls.append(name) or real(name))
    stored = StoredSet(path)
    assert not calls
    assert len(stored) == 20
    stored[3]
    stored.__getitems__([1, 2])
    assert calls == ["npy"]
    stored.close()
    assert np.array_equal(stored[3][0], NUMBERS[3])
    assert calls == ["npy", "npy"]


def test_a_pickled_set_is_closed_and_opens_again(path: Path) -> None:
    with StoredSet(path) as stored:
        before = len(pickle.dumps(StoredSet(path)))
        stored.__getitems__(range(20))
        data = pickle.dumps(stored)
    assert len(data) <= before + 50
    with pickle.loads(data) as found:
        assert np.array_equal(found.__getitems__([19, 0])[0], NUMBERS[[19, 0]])


def read_in_child(stored: StoredSet, pipe: Any) -> None:
    pipe.send((stored.__getitems__([19, 0])[0], stored._pid == os.getpid()))
    pipe.close()


@pytest.mark.parametrize(("name", "opens_again"), [("hdf5-lzf", True), ("hdf5-gzip", False)])
def test_a_forked_process_opens_for_itself_only_what_it_must(tmp_path: Path, name: str, opens_again: bool) -> None:
    write_set(tmp_path / "a.h5", {"x": NUMBERS}, format=name, options={"chunk_samples": 4})
    with StoredSet(tmp_path / "a.h5") as stored:
        stored.__getitems__([5])
        ours, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=read_in_child, args=(stored, theirs))
        child.start()
        found, opened = ours.recv()
        child.join()
        ours.close(), theirs.close()
        assert child.exitcode == 0
        assert opened is opens_again
        assert np.array_equal(found, NUMBERS[[19, 0]])
        assert np.array_equal(stored.__getitems__([19, 0])[0], NUMBERS[[19, 0]])


@pytest.mark.parametrize("numbers", [[20], [-1], [0, 19, 25], [3, -21], np.array([2**63], dtype=np.uint64)])
@pytest.mark.parametrize("eager", [False, True])
def test_numbers_outside_are_refused(path: Path, numbers: Any, eager: bool) -> None:
    with StoredSet(path, eager=eager) as stored:
        with pytest.raises(IndexError, match=r"sample -?\d+ is out of range for .*x.npy: it has 20"):
            stored.__getitems__(numbers)
        with pytest.raises(IndexError, match="sample 20 is out of range"):
            stored[20]


@pytest.mark.parametrize("numbers", [[0.5], [[0], [1]], ["a"], np.array([True, False])])
def test_what_is_no_row_of_whole_numbers_is_refused(path: Path, numbers: Any) -> None:
    with StoredSet(path) as stored, pytest.raises(TypeError, match="must be a 1-D integer array"):
        stored.__getitems__(numbers)


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.int64, np.uint64])
def test_numbers_of_any_integer_type_are_taken(path: Path, dtype: Any) -> None:
    with StoredSet(path) as stored:
        assert np.array_equal(stored.__getitems__(np.array([7, 0], dtype))[0], NUMBERS[[7, 0]])
        assert stored.__getitems__([])[0].shape == (0, 3)


def test_samples_may_be_written_to(path: Path) -> None:
    with StoredSet(path) as stored:
        stored[3][0][:] = 0
        stored.__getitems__([3])[0][:] = 0
        assert np.array_equal(stored[3][0], NUMBERS[3])


@pytest.mark.parametrize("change", ["cut", "replaced", "touched", "gone"])
def test_a_set_that_has_changed_is_refused(path: Path, change: str) -> None:
    with StoredSet(path) as stored:
        stored.__getitems__([0])
        if change == "cut":
            os.truncate(path, 10)
        elif change == "replaced":
            write_set(path, {"x": NUMBERS + 1}, format="npy", overwrite=True)
        elif change == "touched":
            os.utime(path, ns=(1, 1))
        else:
            path.unlink()
        with pytest.raises(DataUnreadable, match=r"changed while being read|disappeared while being read"):
            stored.__getitems__([0])


def test_eager_reads_no_file_again(path: Path) -> None:
    with StoredSet(path, eager=True) as stored:
        len(stored)
        path.unlink()
        assert np.array_equal(stored.__getitems__([4])[0], NUMBERS[[4]])


def test_more_than_there_is_memory_for_is_not_loaded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scalelab.data.formats.columns.read_available_memory", lambda: 239)
    with pytest.raises(DataUnreadable, match=r"needs 240 B of memory, but only 239 B are available: convert it"):
        len(StoredSet(path, eager=True))


def test_other_types_than_expected_are_refused(path: Path) -> None:
    good = SampleField("x", np.dtype(np.float32), (3,))
    assert StoredSet(path, expected=[good]).fields == (good,)
    for wrong in (SampleField("x", np.dtype(np.float64), (3,)), SampleField("x", np.dtype(np.float32), (4,))):
        with pytest.raises(DataUnreadable, match=r"stores x: float32 \(3,\), expected x: float"):
            len(StoredSet(path, expected=[wrong]))
    with pytest.raises(DataUnreadable, match="has no column 'y': it has x"):
        len(StoredSet(path, expected=[SampleField("y", np.dtype(np.float32), (3,))]))


def test_unknown_names_are_refused(tmp_path: Path, path: Path) -> None:
    with pytest.raises(UnknownName, match=r"unknown format 'npyy'.*Did you mean 'npy'"):
        len(StoredSet(path, format="npyy"))
    with pytest.raises(UsageError, match=r"speed=1 is not an option of npy: it has none"):
        len(StoredSet(path, options={"speed": 1}))
    with pytest.raises(DataUnreadable, match="no such file"):
        StoredSet(tmp_path / "absent.npy")


@pytest.mark.parametrize("array", [NUMBERS.astype(">f4"), NUMBERS[::2], np.asfortranarray(NUMBERS), NUMBERS[:, :0]])
def test_arrays_that_lie_oddly_give_the_same_samples(array: Any) -> None:
    raw = bytearray(1) + array.tobytes()
    unaligned = np.frombuffer(raw, array.dtype, array.size, offset=1).reshape(array.shape)
    for odd in (array, unaligned):
        column = make_array_column("x", odd)
        found = column.take(np.array([9, 0, 9]))
        assert np.array_equal(found, array[[9, 0, 9]])
        assert found.dtype.isnative
        assert found.dtype == column.field.dtype == column.load().dtype
        assert np.array_equal(column.load(), array)
