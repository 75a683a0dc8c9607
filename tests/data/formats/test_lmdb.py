"""LMDB: exchanged with the library, small records and large ones, trees that lead astray."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from scalelab.data.formats.stored import StoredSet
from scalelab.data.formats.writing import write_set
from scalelab.errors import DataUnreadable
from tests.data.formats.sets import make_set, make_source

lmdb = pytest.importorskip("lmdb")

PAGE = 4096


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    source = make_source("lmdb")
    path = make_set(tmp_path, "lmdb")
    with lmdb.open(str(path), subdir=False, readonly=True, lock=False) as file, file.begin() as records:
        assert file.stat()["entries"] == 38
        for number in (0, 36):
            record = b"".join(array[number].tobytes() for array in source.values())
            assert records.get(number.to_bytes(8, "big")) == record
        assert [told["name"] for told in json.loads(records.get(b"columns"))["columns"]] == list(source)
    assert [file.name for file in tmp_path.iterdir()] == ["lmdb.lmdb"]


@pytest.mark.parametrize(
    ("num_samples", "width"), [(1, 1), (5000, 1), (3000, 100), (300, 2000), (60, 5000), (3, 400_000)]
)
def test_records_of_any_size_are_found(tmp_path: Path, num_samples: int, width: int) -> None:
    """Many to a page, few to a page, on their own pages; trees of one to three levels."""
    array = np.random.default_rng(0).integers(0, 255, (num_samples, width)).astype(np.uint8)
    write_set(tmp_path / "a.lmdb", {"x": array, "y": np.arange(num_samples)}, format="lmdb")
    x, y = StoredSet(tmp_path / "a.lmdb").__getitems__(np.arange(num_samples)[::-1])
    assert np.array_equal(x, array[::-1])
    assert np.array_equal(y, np.arange(num_samples)[::-1])


def test_a_directory_and_records_in_any_order_of_writing_are_read(tmp_path: Path) -> None:
    """As other programs write them: pages are split, some are left over, and the lock has its own file."""
    numbers = np.random.default_rng(1).permutation(2000)
    with lmdb.open(str(tmp_path / "a.lmdb"), map_size=1 << 24) as file:
        for part in np.split(numbers, 10):
            with file.begin(write=True) as records:
                for number in part.tolist():
                    records.put(number.to_bytes(8, "big"), bytes([number % 251]) * 30)
        told = {"columns": [{"name": "x", "dtype": "|u1", "shape": [30]}]}
        with file.begin(write=True) as records:
            records.put(b"columns", json.dumps(told).encode())
    (found,) = StoredSet(tmp_path / "a.lmdb").__getitems__(range(2000))
    assert np.array_equal(found, np.repeat(np.arange(2000)[:, None] % 251, 30, axis=1))


def test_sets_of_others_are_refused_with_words(tmp_path: Path) -> None:
    path = tmp_path / "a.lmdb"
    with lmdb.open(str(path), map_size=1 << 20, subdir=False, lock=False) as file, file.begin(write=True) as records:
        records.put(b"image-000001", b"a jpeg")
    with pytest.raises(DataUnreadable, match="does not describe its records"):
        len(StoredSet(path))


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ({0: b"abcd", 2: b"abcd"}, "not numbered from 0 without gaps"),
        ({0: b"abcd", 1: b"abc"}, "sample 1 has 3 bytes, not 4"),
    ],
)
def test_records_that_do_not_fit_are_refused(tmp_path: Path, records: dict[int, bytes], words: str) -> None:
    path = tmp_path / "a.lmdb"
    with lmdb.open(str(path), map_size=1 << 20, subdir=False, lock=False) as file, file.begin(write=True) as written:
        for number, record in records.items():
            written.put(number.to_bytes(8, "big"), record)
        written.put(b"columns", b'{"columns": [{"name": "x", "dtype": "<i4", "shape": []}]}')
    with pytest.raises(DataUnreadable, match=words):
        len(StoredSet(path))


def find_root(data: bytearray) -> int:
    """The page at which the main tree begins, by the later of the two first pages."""
    later = max((0, PAGE), key=lambda begin: struct.unpack_from("<Q", data, begin + 144)[0])
    return int(struct.unpack_from("<Q", data, later + 128)[0])


def test_a_tree_that_leads_back_or_outside_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.lmdb"
    write_set(path, {"x": np.zeros((300, 2000), np.uint8)}, format="lmdb")
    whole = bytearray(path.read_bytes())
    root = find_root(whole) * PAGE
    first_node = root + struct.unpack_from("<H", whole, root + 16)[0]
    second_node = root + struct.unpack_from("<H", whole, root + 18)[0]
    for page, words in ((root // PAGE, "twice"), (2**31, "truncated"), (0, "page 0 of its tree is invalid")):
        data = bytearray(whole)
        struct.pack_into("<I", data, first_node, page)
        path.write_bytes(data)
        with pytest.raises(DataUnreadable, match=words):
            len(StoredSet(path))
    data = bytearray(whole)
    data[first_node : first_node + 6] = data[second_node : second_node + 6]
    path.write_bytes(data)
    with pytest.raises(DataUnreadable, match="twice"):
        len(StoredSet(path))
