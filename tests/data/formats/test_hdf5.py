"""HDF5: mapped where it lies in one piece, decoded chunk by chunk elsewhere, always what was written."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scalelab.data.formats import hdf5
from scalelab.data.formats import hdf5 as hdf5_sources
from scalelab.data.formats.columns import ArrayColumn, OddColumn
from scalelab.data.formats.hdf5 import unshuffle
from scalelab.data.formats.hdf5_chunks import BlockColumn, share_budget
from scalelab.data.formats.stored import StoredSet
from scalelab.data.formats.writing import write_set
from scalelab.errors import DataUnreadable, UsageError

NUMBERS = np.random.default_rng(0).random((40, 5, 6)).astype(np.float32)
ORDER = [7, 0, 39, 7, 12]
FILTERS: list[dict[str, Any]] = [
    {},
    {"compression": "gzip"},
    {"compression": "gzip", "shuffle": True},
    {"shuffle": True},
    {"compression": "lzf"},
    {"compression": "gzip", "fletcher32": True},
]


def write_dataset(path: Path, array: Any, **settings: Any) -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=array, **settings)
    return path


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_samples_of_any_chunks_come_as_they_were_written(tmp_path: Path, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    chunks = tuple(data.draw(st.integers(1, size)) for size in shape)
    dtype = np.dtype(data.draw(st.sampled_from(["?", "u1", "<i2", ">f4", "<f8", "<f2"])))
    source = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, 2**8, shape).astype(dtype)
    path = write_dataset(tmp_path / "a.h5", source, chunks=chunks, **data.draw(st.sampled_from(FILTERS)))
    budget = data.draw(st.sampled_from([0, source.nbytes // 3, source.nbytes - 1, source.nbytes]))
    with StoredSet(path, options={"cache_bytes": budget}) as stored:
        for _ in range(3):
            numbers = data.draw(st.lists(st.integers(0, shape[0] - 1), max_size=12))
            assert np.array_equal(stored.__getitems__(numbers)[0], source[numbers])
    assert np.array_equal(StoredSet(path, eager=True).__getitems__(range(shape[0]))[0], source)


@pytest.mark.parametrize("userblock", [0, 512])
@pytest.mark.parametrize("dtype", ["<f4", ">f4", "?", "<f2"])
def test_one_piece_is_mapped_where_it_lies(tmp_path: Path, userblock: int, dtype: str) -> None:
    path, source = tmp_path / "a.h5", (NUMBERS * 100).astype(dtype)
    with h5py.File(path, "w", userblock_size=userblock) as file:
        file["other"] = np.arange(40)
        file["x"] = source
        file["gzip"] = source[:, 0, 0]
    opened = hdf5.open_set(path, {})
    assert all(isinstance(column, ArrayColumn | OddColumn) for column in opened.columns)
    assert not any(column.array.flags.owndata for column in opened.columns)  # type: ignore[attr-defined]
    found = {column.field.name: column for column in opened.columns}["x"].take(np.array(ORDER))
    assert np.array_equal(found, source[ORDER])
    assert found.dtype.isnative


def test_chunks_in_a_file_with_something_in_front_are_found(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=1024) as file:
        file.create_dataset("x", data=NUMBERS, chunks=(4, 5, 6), compression="gzip")
    with StoredSet(tmp_path / "a.h5") as stored:
        assert np.array_equal(stored.__getitems__(ORDER)[0], NUMBERS[ORDER])


def test_a_map_and_our_own_inflating_need_no_open_file(tmp_path: Path) -> None:
    for name, survives in (("hdf5", True), ("hdf5-gzip", True), ("hdf5-lzf", False), ("hdf5-blosc2", False)):
        write_set(tmp_path / f"{name}.h5", {"x": NUMBERS}, format=name)
        opened = hdf5.open_set(tmp_path / f"{name}.h5", {})
        assert opened.survives_fork is survives
        opened.close()


@pytest.mark.parametrize("filters", FILTERS[:2] + FILTERS[4:5])
@pytest.mark.parametrize("budget", [10**9, NUMBERS.nbytes - 1, 0])
def test_a_batch_decodes_every_chunk_that_it_touches_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filters: dict[str, Any], budget: int
) -> None:
    path = write_dataset(tmp_path / "a.h5", NUMBERS, chunks=(8, 2, 3), **filters)
    touched: list[int] = []
    for source in (hdf5_sources.MappedChunks, hdf5_sources.LibraryChunks):
        for way in ("read_block", "pick"):
            real = getattr(source, way)

            def count(self: Any, first: int, rest: Any, real: Any = real) -> Any:
                touched.append(first)
                return real(self, first, rest)

            monkeypatch.setattr(source, way, count)
    with StoredSet(path, options={"cache_bytes": budget}) as stored:
        stored.__getitems__([0, 1, 39, 7, 38, 0])
        assert touched == [0, 32]
        for first in range(0, 40, 8):
            stored.__getitems__(range(first, first + 8))
    whole_epoch = {10**9: 5, NUMBERS.nbytes - 1: 6, 0: 7}[budget]  # of five rows one does not fit, or none does
    assert len(touched) == whole_epoch


def test_rows_that_were_used_longest_ago_make_room(tmp_path: Path) -> None:
    class Source:
        def __init__(self) -> None:
            self.read: list[int] = []

        def read_block(self, first: int, into: Any) -> None:
            self.read.append(first)
            into[:] = np.arange(first, first + len(into))

    source = Source()
    field = hdf5.SampleField("x", np.dtype(np.int64), ())
    column = BlockColumn(field, 10, 2, source, 2 * 16)  # type: ignore[arg-type]
    for numbers, expected in ([0, 2], [0, 2]), ([1], [0, 2]), ([4], [0, 2, 4]), ([0], [0, 2, 4]), ([3], [0, 2, 4, 2]):
        assert column.take(np.array(numbers)).tolist() == numbers
        assert source.read == expected


def test_small_columns_keep_all_of_theirs() -> None:
    assert share_budget(100, {"large": 500, "small": 10, "middle": 60}) == {"small": 10, "middle": 45, "large": 45}
    assert share_budget(1000, {"a": 500, "b": 10}) == {"a": 500, "b": 10}
    assert share_budget(0, {"a": 500}) == {"a": 0}


def test_chunks_hold_whole_samples_unless_told(tmp_path: Path) -> None:
    arrays = {"x": np.zeros((1000, 3, 32, 32), np.uint8), "y": np.arange(1000)}
    shapes = {}
    for number, options in enumerate([{}, {"chunk_samples": 5}, {"chunks": "auto"}]):
        write_set(tmp_path / f"{number}.h5", arrays, format="hdf5-gzip", options=options)
        with h5py.File(tmp_path / f"{number}.h5") as file:
            shapes[number] = file["x"].chunks, file["y"].chunks
    assert shapes[0] == ((21, 3, 32, 32), (1000,))
    assert shapes[1] == ((5, 3, 32, 32), (5,))
    assert math.prod(shapes[2][0]) < 2**20
    write_set(tmp_path / "own.h5", {"x": arrays["x"]}, format="hdf5-lzf", options={"chunks": (7, 1, 32, 99)})
    with h5py.File(tmp_path / "own.h5") as file:
        assert file["x"].chunks == (7, 1, 32, 32)


def test_level_and_shuffle_reach_the_file(tmp_path: Path) -> None:
    write_set(tmp_path / "a.h5", {"x": NUMBERS}, format="hdf5-gzip", options={"level": 9, "shuffle": True})
    with h5py.File(tmp_path / "a.h5") as file:
        assert (file["x"].compression_opts, file["x"].shuffle) == (9, True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"level": 10}, "level must be an integer, 0 to 9, got 10"),
        ({"shuffle": 2}, "shuffle must be true or false, got 2"),
        ({"chunk_samples": 0}, "chunk_samples must be an integer, .*got 0"),
        ({"chunks": (1, 2)}, r"chunks=\(1, 2\) does not match \(40, 5, 6\)"),
        ({"chunks": (0, 5, 6)}, r"chunks=\(0, 5, 6\) does not match"),
        ({"chunks": "most"}, "chunks=most does not match"),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        write_set(tmp_path / "a.h5", {"x": NUMBERS}, format="hdf5-gzip", options=options)
    assert not list(tmp_path.iterdir())


def test_arrays_in_groups_are_columns_and_what_is_no_array_is_left_out(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["train/x"] = NUMBERS
        file["names"] = ["a"] * 40
        file["version"] = 3
        file["elsewhere"] = h5py.ExternalLink("other.h5", "x")
    with StoredSet(tmp_path / "a.h5") as stored:
        assert [field.name for field in stored.fields] == ["train/x"]
        assert stored.left_out == ("names (text)", "version (no array)")


@pytest.mark.parametrize("num_samples", [1, 39, 40])
def test_contiguous_arrays_begin_where_numpy_gathers_fastest(tmp_path: Path, num_samples: int) -> None:
    numbers = NUMBERS[:num_samples]
    arrays = {"flags": (numbers[:, 0, 0] > 0).astype(np.uint8), "x": numbers, "y": numbers[:, 1]}
    write_set(tmp_path / "a.h5", arrays, format="hdf5")
    with h5py.File(tmp_path / "a.h5") as file:
        assert [file[name].id.get_offset() % 64 for name in ("flags", "x", "y")] == [0, 0, 0]
    opened = hdf5.open_set(tmp_path / "a.h5", {})
    assert all(isinstance(column, ArrayColumn) for column in opened.columns)


def test_columns_keep_the_order_of_writing_and_an_array_with_two_names_comes_once(tmp_path: Path) -> None:
    write_set(tmp_path / "a.h5", {"x": NUMBERS, "labels": NUMBERS[:, 0], "a": NUMBERS[:, 1]}, format="hdf5-gzip")
    with StoredSet(tmp_path / "a.h5") as stored:
        assert [field.name for field in stored.fields] == ["x", "labels", "a"]
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["x"] = NUMBERS
        file["again"] = file["x"]
        file["group/loop"] = file["/"]
    with StoredSet(tmp_path / "b.h5") as stored:
        assert len(stored.fields) == 1


def test_chunks_that_were_never_written_are_not_read_as_zeros(tmp_path: Path) -> None:
    for compression in (None, "gzip", "lzf"):
        with h5py.File(tmp_path / "a.h5", "w") as file:
            made = file.create_dataset("x", (10**12,), "f4", chunks=(1000,), compression=compression)
            made[:1000] = 1
        with pytest.raises(DataUnreadable, match=r"x has 1 of 1000000000 chunks"):
            len(StoredSet(tmp_path / "a.h5"))


def test_arrays_in_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(NUMBERS.tobytes())
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", NUMBERS.shape, "f4", external=[(str(tmp_path / "raw"), 0, NUMBERS.nbytes)])
    with pytest.raises(DataUnreadable, match="stores x in external files"):
        len(StoredSet(tmp_path / "a.h5"))


def test_numbers_that_numpy_does_not_have_go_through_the_library(tmp_path: Path) -> None:
    """A type of 12 bits in two bytes lies in the file otherwise than in memory."""
    kind = h5py.h5t.NATIVE_INT16.copy()
    kind.set_precision(12)
    kind.set_offset(4)
    source = np.arange(40, dtype=np.int16) - 20
    with h5py.File(tmp_path / "a.h5", "w") as file:
        made = h5py.h5d.create(file.id, b"x", kind, h5py.h5s.create_simple((40,)))
        made.write(h5py.h5s.ALL, h5py.h5s.ALL, source)
    with StoredSet(tmp_path / "a.h5") as stored:
        assert np.array_equal(stored.__getitems__(ORDER)[0], source[ORDER])


def test_a_damaged_chunk_is_refused(tmp_path: Path) -> None:
    path = write_dataset(tmp_path / "a.h5", NUMBERS, chunks=(40, 5, 6), compression="gzip")
    with h5py.File(path) as file:
        info = file["x"].id.get_chunk_info(0)
    data = bytearray(path.read_bytes())
    data[info.byte_offset + info.size // 2] ^= 0x10
    path.write_bytes(data)
    with StoredSet(path) as stored, pytest.raises(DataUnreadable, match=r"a.h5 cannot be read: .*damaged"):
        stored.__getitems__([0])


@pytest.mark.parametrize("num_bytes", [0, 7, 64])
@pytest.mark.parametrize("item", [1, 2, 4, 8])
def test_unshuffle_undoes_hdf5s_shuffle(num_bytes: int, item: int) -> None:
    data = np.random.default_rng(0).bytes(num_bytes)
    whole = num_bytes // item * item
    planes = [data[byte:whole:item] for byte in range(item)]
    assert unshuffle(b"".join(planes) + data[whole:], item) == data
