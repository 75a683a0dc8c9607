"""zarr: exchanged with the library, codecs, chunks that are missing, damaged or lie."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelab.data.formats.stored import StoredSet
from scalelab.data.formats.writing import write_set
from scalelab.errors import DataUnreadable, UsageError
from tests.data.formats.sets import make_set, make_source

pytest.importorskip("zarr")

LIBRARY = """
import sys, warnings
warnings.simplefilter("ignore")
import numpy as np, zarr
from pathlib import Path
from zarr.codecs import BytesCodec, Crc32cCodec, GzipCodec, ZstdCodec
from benchmarks.format_fuzz import make_source

folder, source = Path(sys.argv[1]), make_source("zarr")
for path in sorted(folder.glob("ours-*.zarr")):
    group = zarr.open_group(path, mode="r")
    for name, array in source.items():
        assert group[name].dtype == array.dtype and np.array_equal(group[name][:], array), (path, name)
big = BytesCodec(endian="big")
chains = {"default": {}, "big": dict(serializer=big, compressors=None), "gzip": dict(compressors=GzipCodec(level=1))}
chains["sums"] = dict(compressors=[Crc32cCodec(), ZstdCodec(level=1), Crc32cCodec()])
for name, chain in chains.items():
    group = zarr.open_group(folder / f"theirs-{name}.zarr", mode="w", zarr_format=3)
    for column, array in source.items():
        chunks = (8, *(max(1, size // 2) for size in array.shape[1:]))
        group.create_array(column, data=array, chunks=chunks, **chain)
group = zarr.open_group(folder / "shards.zarr", mode="w", zarr_format=3)
group.create_array("x", data=np.arange(16), chunks=(4,), shards=(8,))
group = zarr.open_group(folder / "empty.zarr", mode="w", zarr_format=3)
group.create_array("x", data=np.arange(16) // 8, chunks=(8,), fill_value=0)
group.create_array("y", data=np.arange(16) // 8 + 5, chunks=(8,), fill_value=5)
"""


def test_the_library_and_this_reader_understand_each_other(tmp_path: Path) -> None:
    """In its own process: the library leaves threads behind."""
    source = make_source("zarr")
    for compression in ("zstd", "gzip", "none"):
        options = {"compression": compression, "chunk_samples": 8}
        write_set(tmp_path / f"ours-{compression}.zarr", source, format="zarr", options=options)
    command = [sys.executable, "-c", LIBRARY, str(tmp_path)]
    root = Path(__file__).parents[3]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    assert ended.returncode == 0, ended.stderr
    paths = sorted(tmp_path.glob("theirs-*.zarr"))
    assert len(paths) == 4
    for path in paths:
        found = StoredSet(path)
        for field, array in zip(found.fields, found.__getitems__([36, 7, 8, 8]), strict=True):
            assert array.dtype == source[field.name].dtype
            assert np.array_equal(array, source[field.name][[36, 7, 8, 8]]), path
    with pytest.raises(DataUnreadable, match="sharding_indexed"):
        len(StoredSet(tmp_path / "shards.zarr"))
    assert not (tmp_path / "empty.zarr" / "x" / "c" / "0").exists()
    assert [array.tolist() for array in StoredSet(tmp_path / "empty.zarr").__getitems__([0, 15])] == [[0, 1], [5, 6]]


def test_chunks_hold_about_a_megabyte_unless_told(tmp_path: Path) -> None:
    array = np.zeros((600, 5000), np.uint8)
    write_set(tmp_path / "a.zarr", {"x": array, "label": np.arange(600)}, format="zarr")
    assert sorted(file.name for file in (tmp_path / "a.zarr" / "x").iterdir()) == [
        "c.0.0",
        "c.1.0",
        "c.2.0",
        "zarr.json",
    ]
    assert sorted(file.name for file in (tmp_path / "a.zarr" / "label").iterdir()) == ["c.0", "zarr.json"]
    with pytest.raises(UsageError, match="compression must be one of zstd, gzip, none, got lzma"):
        write_set(tmp_path / "b.zarr", {"x": array}, format="zarr", options={"compression": "lzma"})


@pytest.mark.parametrize("compression", ["zstd", "gzip", "none"])
def test_a_chunk_that_was_changed_or_lost_is_refused(tmp_path: Path, compression: str) -> None:
    path, array = tmp_path / "a.zarr", np.arange(4000).reshape(40, 100)
    write_set(path, {"x": array}, format="zarr", options={"compression": compression, "chunk_samples": 10})
    chunk = path / "x" / "c.2.0"
    whole = bytearray(chunk.read_bytes())
    for place in range(len(whole) // 2, len(whole), 97):
        chunk.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(DataUnreadable, match=r"x/c\.2\.0 is truncated or damaged"):
            StoredSet(path).__getitems__([25])
    assert StoredSet(path).__getitems__([19])[0].tolist() == [array[19].tolist()]
    chunk.unlink()
    with pytest.raises(DataUnreadable, match="found 3"):
        len(StoredSet(path))
    (path / "x" / "unrelated").touch()
    with pytest.raises(DataUnreadable, match=r"c\.2\.0 is missing"):
        StoredSet(path).__getitems__([25])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shape": [10**15, 11]}, "chunks, found"),
        ({"shape": [37, 10**12]}, "chunks, found"),
        ({"shape": [37, 0]}, "not an array of samples"),
        ({"shape": [37]}, "not an array of samples"),
        ({"shape": [37.0, 11]}, "not an array of samples"),
        ({"shape": [-37, 11]}, "not an array of samples"),
        ({"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2**40, 2**20]}}}, "truncated or damaged"),
        ({"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0, 11]}}}, "not an array of samples"),
        ({"chunk_grid": {"name": "rectangular", "configuration": {"chunk_shape": [8, 11]}}}, "rectangular chunk grid"),
        ({"data_type": "float64"}, "truncated or damaged"),
        ({"data_type": "object"}, "only booleans, integers and floats"),
        ({"data_type": "complex128"}, "only booleans, integers and floats"),
        ({"codecs": [{"name": "bytes"}, {"name": "blosc"}]}, "the codecs bytes, blosc"),
        ({"codecs": [{"name": "bytes"}, {"name": "zstd"}, {"name": "gzip"}]}, "the codecs bytes, zstd, gzip"),
        ({"codecs": []}, "cannot be read"),
        ({"zarr_format": 2}, "not zarr version 3"),
    ],
)
def test_metadata_that_lie_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = make_set(tmp_path, "zarr")
    file = path / "signal" / "zarr.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(DataUnreadable, match=words) as refused:
        StoredSet(path).__getitems__([0, 20])
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("name", ["../other", "..", "", "a/b"])
def test_columns_lie_inside_of_their_set(tmp_path: Path, name: str) -> None:
    path = make_set(tmp_path, "zarr")
    file = path / "zarr.json"
    told = json.loads(file.read_text())
    told["attributes"]["scalelab"]["columns"] = [name]
    file.write_text(json.dumps(told))
    with pytest.raises(DataUnreadable, match="its columns would be"):
        len(StoredSet(path))
