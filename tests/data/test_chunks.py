"""The chunks of a file are those that were written, in every format."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest

from scalelab.data.chunks import describe_chunks
from scalelab.data.formats.catalogue import ENTRIES
from scalelab.data.formats.columns import Settings
from scalelab.data.formats.writing import write_set
from scalelab.errors import DataUnreadable

FLOATS = np.arange(60 * 4 * 5, dtype=np.float32).reshape(60, 4, 5)


@pytest.mark.parametrize(
    ("name", "options", "chunk", "amplification"),
    [
        ("npy", {}, None, 1),
        ("npz", {}, None, 1),
        ("npz-compressed", {}, (60, 4, 5), 60),
        ("hdf5", {}, None, 1),
        ("hdf5-gzip", {"chunk_samples": 8}, (8, 4, 5), 8),
        ("hdf5-lzf", {"chunks": (6, 2, 5)}, (6, 2, 5), 6),
        ("hdf5-blosc2", {"chunk_samples": 1}, (1, 4, 5), 1),
        ("zarr", {"chunk_samples": 16}, (16, 4, 5), 16),
        ("parquet", {"chunk_samples": 20}, (20, 4, 5), 20),
        ("arrow", {}, None, 1),
        ("safetensors", {}, None, 1),
        ("files", {}, None, 1),
    ],
)
def test_a_column_is_described(
    tmp_path: Path, name: str, options: Settings, chunk: tuple[int, ...] | None, amplification: float
) -> None:
    path = tmp_path / f"set{ENTRIES[name].suffix}"
    write_set(path, {"x": FLOATS}, format=name, options=options)
    (column,) = describe_chunks(path)
    assert column.shape == FLOATS.shape
    assert column.sample_bytes == 80
    assert column.chunk == chunk
    assert column.amplification == amplification
    assert column.chunk_samples == (chunk[0] if chunk else 1)


def test_offsets_of_mapped_columns_are_where_the_samples_begin(tmp_path: Path) -> None:
    arrays = {"x": FLOATS, "labels": np.arange(60, dtype=np.int64)}
    for name, suffix in (("hdf5", ".h5"), ("npz", ".npz")):
        path = tmp_path / f"set{suffix}"
        write_set(path, arrays, format=name)
        for column in describe_chunks(path):
            assert column.offset is not None
            wanted = arrays[column.name].tobytes()
            assert path.read_bytes()[column.offset : column.offset + len(wanted)] == wanted


def test_what_is_no_set_of_arrays_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("readme.txt", "no array")
    (tmp_path / "x.npy").write_bytes(b"no array")
    for name in ("x.h5", "x.npz", "x.npy"):
        with pytest.raises(DataUnreadable, match=name) as caught:
            describe_chunks(tmp_path / name)
        assert "\n" not in str(caught.value)
