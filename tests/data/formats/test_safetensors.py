"""safetensors: exchanged with the library, and headers that lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelab.data.formats.stored import StoredSet
from scalelab.errors import DataUnreadable
from tests.data.formats.sets import make_set, make_source

library = pytest.importorskip("safetensors.numpy")


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    found = library.load_file(make_set(tmp_path, "safetensors"))
    for name, array in make_source("safetensors").items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array)


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    source = make_source("safetensors")
    library.save_file(source, tmp_path / "a.safetensors", metadata={"made": "elsewhere"})
    found = StoredSet(tmp_path / "a.safetensors")
    arrays = dict(zip([field.name for field in found.fields], found.__getitems__([7, 0]), strict=True))
    assert arrays.keys() == source.keys()
    assert all(np.array_equal(arrays[name], source[name][[7, 0]]) for name in source)


def test_columns_keep_their_order_and_are_aligned(tmp_path: Path) -> None:
    source = make_source("safetensors")
    found = StoredSet(make_set(tmp_path, "safetensors"))
    assert [field.name for field in found.fields] == list(source)
    assert all(column.array.flags.aligned for column in found._open().columns)  # type: ignore[attr-defined]


def write_header(path: Path, header: Any, data: bytes = bytes(12)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def tell(shape: Any, begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"x": tell([3], 0, 12), "y": tell([3], 0, 12)}, "starts at byte 0, expected 12"),
        ({"x": tell([2], 0, 8)}, "its tensors take 8 bytes, but it has 12"),
        ({"x": tell([4], 0, 16)}, "its tensors take 16 bytes, but it has 12"),
        ({"x": tell([2**62, 4], 0, 12)}, "has 12 bytes, which are not"),
        ({"x": tell([3, 2**40], 0, 12)}, "has 12 bytes, which are not"),
        ({"x": tell([], 0, 12)}, "has a scalar"),
        ({"x": tell([-3], 0, 12)}, "lacks the shape or offsets"),
        ({"x": tell([3.0], 0, 12)}, "lacks the shape or offsets"),
        ({"x": tell([True], 0, 12)}, "lacks the shape or offsets"),
        ({"x": tell(["3"], 0, 12)}, "lacks the shape or offsets"),
        ({"x": [1, 2]}, "lacks the shape or offsets"),
        ({"x": tell([6], 0, 12, "BF16")}, "as BF16"),
        ({"x\n": tell([3], 0, 12)}, "is not a valid column name"),
        ({"x": tell([1], 0, 4), "y": tell([2], 4, 12)}, "different lengths"),
        ({}, "its tensors take 0 bytes"),
        ([], "not a JSON object"),
        (b'{"x": ', "cannot be read"),
        (b"[" * 5000, "cannot be read"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: Any, words: str) -> None:
    path = write_header(tmp_path / "a.safetensors", header)
    with pytest.raises(DataUnreadable, match=words) as refused:
        len(StoredSet(path))
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_header_of_many_gigabytes_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes((2**63).to_bytes(8, "little") + b"{}")
    with pytest.raises(DataUnreadable, match="its header would be 9223372036854775808 bytes"):
        len(StoredSet(path))
