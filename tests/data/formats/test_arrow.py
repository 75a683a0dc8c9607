"""Arrow IPC and Parquet: exchanged with pyarrow, mapped without a copy, read by row group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelab.data.formats.columns import ArrayColumn
from scalelab.data.formats.decoded import ChunkedColumn
from scalelab.data.formats.stored import StoredSet
from scalelab.data.formats.writing import write_set
from scalelab.errors import DataUnreadable, UsageError
from tests.data.formats.sets import make_set, make_source

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def test_pyarrow_reads_what_is_written(tmp_path: Path) -> None:
    source = make_source("arrow")
    with pa.memory_map(str(make_set(tmp_path, "arrow"))) as file:
        table = pa.ipc.open_file(file).read_all()
        assert table.column("label").to_pylist() == source["label"].tolist()
        assert table.column("signal").to_pylist() == source["signal"].tolist()
    table = pq.read_table(make_set(tmp_path, "parquet"))
    assert table.column("label").to_pylist() == source["label"].tolist()
    assert table.column("image").to_pylist() == [image.tobytes() for image in source["image"]]


def write_arrow(path: Path, table: Any) -> None:
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def write_compressed_arrow(path: Path, table: Any) -> None:
    with pa.ipc.new_file(str(path), table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table, max_chunksize=2)


def write_parquet(path: Path, table: Any) -> None:
    pq.write_table(table, path, row_group_size=2)


WRITERS = [("arrow", write_arrow), ("arrow", write_compressed_arrow), ("parquet", write_parquet)]


@pytest.mark.parametrize(("name", "write"), WRITERS)
def test_what_pyarrow_writes_is_read(tmp_path: Path, name: str, write: Callable[[Path, Any], None]) -> None:
    """Values, booleans by the bit, lists and binaries of a fixed size, in several batches, some of them cut out."""
    table = pa.table(
        {
            "x": pa.array(np.arange(9, dtype=np.int16)),
            "flag": pa.array([True, False, False, True, True, False, True, False, True]),
            "row": pa.array([[i, i + 0.5] for i in range(9)], pa.list_(pa.float32(), 2)),
            "raw": pa.array([bytes([i, i]) for i in range(9)], pa.binary(2)),
        }
    ).slice(2, 7)
    path = tmp_path / f"a.{name}"
    write(path, table)
    with StoredSet(path) as found:
        assert [field.shape for field in found.fields] == [(), (), (2,), (2,)]
        x, flag, row, raw = found.__getitems__([6, 0, 3, 6])
    assert x.tolist() == [8, 2, 5, 8]
    assert flag.tolist() == [True, False, False, True]
    assert row.tolist() == [[i, i + 0.5] for i in (8, 2, 5, 8)]
    assert raw.tolist() == [[i, i] for i in (8, 2, 5, 8)]


@pytest.mark.parametrize(("name", "write"), WRITERS)
@pytest.mark.parametrize(
    ("column", "words"),
    [
        (["a", "b"], "'x' as string"),
        ([[1], [1, 2]], "'x' as list"),
        ([1, None], "nulls in 'x'"),
        ([{"y": 1}, {"y": 2}], "'x' as struct"),
    ],
)
def test_columns_that_are_no_arrays_are_refused(
    tmp_path: Path, name: str, write: Callable[[Path, Any], None], column: list[Any], words: str
) -> None:
    path = tmp_path / f"a.{name}"
    write(path, pa.table({"x": column}))
    with pytest.raises(DataUnreadable, match=words) as refused, StoredSet(path) as found:
        found.__getitems__([0])
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("told", [b'{"dtype": "<f8", "shape": []}', b'{"dtype": "O", "shape": []}', b"{}", b"no JSON"])
@pytest.mark.parametrize(("name", "write"), WRITERS)
def test_metadata_that_lie_are_refused(
    tmp_path: Path, name: str, write: Callable[[Path, Any], None], told: bytes
) -> None:
    path = tmp_path / f"a.{name}"
    field = pa.field("x", pa.float32(), metadata={b"scalelab": told})
    write(path, pa.table([pa.array([1, 2, 3], pa.float32())], schema=pa.schema([field])))
    with pytest.raises(DataUnreadable, match=r"cannot be read|does not match"):
        len(StoredSet(path))


def test_one_batch_is_mapped_and_several_are_pieces(tmp_path: Path) -> None:
    source = make_source("arrow")
    found = StoredSet(make_set(tmp_path, "arrow"))
    assert all(isinstance(column, ArrayColumn) for column in found._open().columns)
    assert not any(column.array.flags.writeable for column in found._open().columns)  # type: ignore[attr-defined]
    write_set(tmp_path / "b.arrow", source, format="arrow", options={"chunk_samples": 10})
    pieces = StoredSet(tmp_path / "b.arrow")
    assert all(isinstance(column, ChunkedColumn) for column in pieces._open().columns)
    for array, original in zip(pieces.__getitems__([36, 9, 10]), source.values(), strict=True):
        assert np.array_equal(array, original[[36, 9, 10]])


@pytest.mark.parametrize("compression", ["snappy", "none", "zstd", "lz4", "gzip"])
def test_row_groups_are_compressed_as_asked(tmp_path: Path, compression: str) -> None:
    path = tmp_path / "a.parquet"
    array = np.zeros((40, 1000), np.float32)
    write_set(path, {"x": array}, format="parquet", options={"compression": compression, "chunk_samples": 16})
    told = pq.read_metadata(path)
    assert [told.row_group(number).num_rows for number in range(told.num_row_groups)] == [16, 16, 8]
    assert (path.stat().st_size > array.nbytes) == (compression == "none")
    with StoredSet(path) as found:
        assert np.array_equal(found.__getitems__(range(40))[0], array)


def test_only_the_row_groups_that_are_needed_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    whole = pq.ParquetFile.read_row_group

    def note(self: Any, number: int, **settings: Any) -> Any:
        read.append(number)
        return whole(self, number, **settings)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", note)
    write_set(tmp_path / "a.parquet", {"x": np.arange(40)}, format="parquet", options={"chunk_samples": 10})
    with StoredSet(tmp_path / "a.parquet") as found:
        found.__getitems__([35, 2, 31, 3])
        found.__getitems__([39, 0])
        assert read == [0, 3]
    with StoredSet(tmp_path / "a.parquet", options={"cache_bytes": 0}) as found:
        found.__getitems__([0])
        found.__getitems__([11])
        found.__getitems__([1])
    assert read == [0, 3, 0, 1, 0]


def test_a_page_that_was_changed_is_refused_unless_nobody_verifies(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_set(path, {"x": np.full((40, 100), 7, np.uint8)}, format="parquet", options={"compression": "none"})
    data = bytearray(path.read_bytes())
    data[data.index(bytes([7] * 4000)) + 50] = 9
    path.write_bytes(data)
    with pytest.raises(DataUnreadable, match="checksum of row group 0 of x does not match"), StoredSet(path) as found:
        found.__getitems__([5])
    with StoredSet(path, options={"verify": False}) as found:
        assert found.__getitems__(range(40))[0].max() == 9


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"compression": "rar"}, "compression must be one of snappy, none.*got rar"),
        ({"chunk_samples": 0}, "chunk_samples must be an integer.*got 0"),
        ({"chunk_samples": "many"}, "chunk_samples must be an integer.*got many"),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path: Path, option: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        write_set(tmp_path / "a.parquet", {"x": np.arange(3)}, format="parquet", options=option)
    assert not list(tmp_path.iterdir())
