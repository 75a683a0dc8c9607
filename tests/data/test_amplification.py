"""Read amplification is arithmetic, and the arithmetic is right."""

from __future__ import annotations

from pathlib import Path

import h5py  # type: ignore[import-untyped, unused-ignore]
import pytest

from scalelab.data.chunk_cache import CacheSize
from scalelab.data.chunks import ColumnChunks, describe_chunks
from tests.data.counting import count_chunks_read, make_file


@pytest.mark.parametrize(
    ("shape", "dtype", "chunk", "amplification"),
    [
        ((2048, 20, 512), "float32", (128, 2, 64), 128),
        ((50_000, 3, 32, 32), "uint8", (6250, 1, 4, 4), 6250),
    ],
)
def test_gzip_with_automatic_chunks_inflates_as_many_samples_as_lie_in_a_chunk(
    tmp_path: Path, shape: tuple[int, ...], dtype: str, chunk: tuple[int, ...], amplification: float
) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", shape, dtype, compression="gzip")  # no chunk is written: only the layout is asked for
    (column,) = describe_chunks(tmp_path / "x.h5")
    assert column.chunk == chunk
    assert column.amplification == amplification
    assert column.filters == ("gzip",)


@pytest.mark.parametrize("chunk", [(1, 5, 7), (4, 5, 7), (4, 2, 3), (10, 5, 1), (7, 3, 7), (3, 1, 1)])
def test_amplification_is_what_hdf5_reads_for_each_sample(chunk: tuple[int, ...]) -> None:
    column = ColumnChunks(name="x", shape=(10, 5, 7), item_bytes=2, chunk=chunk, filters=("gzip",))
    data = make_file(column.shape, chunk, compression="gzip")
    nothing = CacheSize(num_bytes=0, num_slots=1)
    for sample in range(10):
        assert count_chunks_read(data, [sample], nothing) * column.chunk_bytes == column.inflated_bytes
    assert column.amplification == column.inflated_bytes / (5 * 7 * 2)


def test_padding_at_the_edges_counts() -> None:
    column = ColumnChunks(name="x", shape=(10, 5), item_bytes=4, chunk=(2, 3), filters=("gzip",))
    assert column.chunks_per_sample == 2
    assert column.amplification == pytest.approx(2 * 6 / 5)


def test_chunks_without_filter_are_read_in_part_only_where_they_do_not_fit_the_cache() -> None:
    small, large = (CacheSize(num_bytes=number, num_slots=521) for number in (10, 1000))
    shapes = {"name": "x", "shape": (100, 4), "item_bytes": 1, "chunk": (25, 4)}
    assert ColumnChunks(**shapes, cache=small).amplification == 1
    assert ColumnChunks(**shapes, cache=large).amplification == 25
    assert ColumnChunks(**shapes, cache=small, filters=("lzf",)).amplification == 25


def test_unequal_row_groups_count_by_the_samples_in_them() -> None:
    column = ColumnChunks(name="x", shape=(10, 2), item_bytes=1, chunk=(8, 2), groups=(8, 2), filters=("snappy",))
    assert column.amplification == pytest.approx((8 * 8 + 2 * 2) / 10)


def test_samples_that_are_mapped_cost_whole_pages() -> None:
    aligned = ColumnChunks(name="x", shape=(64, 1024), item_bytes=4, offset=0)
    assert aligned.amplification == aligned.page_amplification == 1
    shifted = ColumnChunks(name="x", shape=(64, 1024), item_bytes=4, offset=128)
    assert shifted.page_amplification == 2
    labels = ColumnChunks(name="x", shape=(64,), item_bytes=1, offset=0)
    assert labels.page_amplification == 4096
    images = ColumnChunks(name="x", shape=(50_000, 3072), item_bytes=1, offset=0)
    pages = [(3072 * sample + 3071) // 4096 - 3072 * sample // 4096 + 1 for sample in range(50_000)]
    assert images.page_amplification == pytest.approx(sum(pages) / 50_000 * 4096 / 3072)
