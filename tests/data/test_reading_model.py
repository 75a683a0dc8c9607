"""What readers inflate in an epoch is what they really do."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelab.data.chunks import ColumnChunks, describe_chunks
from scalelab.data.formats import hdf5 as hdf5_sources
from scalelab.data.formats.stored import StoredSet
from scalelab.data.formats.writing import write_set
from scalelab.data.reading_cost import count_batched_epoch, count_plain_epoch, find_rooms, follow_batches, make_batches

ARRAY = np.arange(96 * 8, dtype=np.int32).reshape(96, 8)


def make_column(**changes: Any) -> ColumnChunks:
    return ColumnChunks(
        **{"name": "x", "shape": (96, 8), "item_bytes": 4, "chunk": (6, 4), "filters": ("gzip",)} | changes
    )


@pytest.mark.parametrize(("kept_rows", "is_shuffled"), [(0, False), (0, True), (3, False), (3, True), (16, True)])
def test_rows_that_scalelab_inflates_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_rows: int, is_shuffled: bool
) -> None:
    path = tmp_path / "x.h5"
    write_set(path, {"x": ARRAY}, format="hdf5-gzip", options={"chunks": (6, 4)})
    decoded: list[int] = []
    decode = hdf5_sources.MappedChunks._decode
    monkeypatch.setattr(
        hdf5_sources.MappedChunks, "_decode", lambda self, place: decoded.append(place) or decode(self, place)
    )
    order: Sequence[int] = random.Random(1).sample(range(96), 96) if is_shuffled else range(96)
    columns = describe_chunks(path)
    count = follow_batches(columns, [kept_rows])
    with StoredSet(path, options={"cache_bytes": kept_rows * 6 * 8 * 4}) as stored:
        for batch in make_batches(order, 10):
            decoded.clear()
            stored.__getitems__(np.array(batch))
            assert len(decoded) * columns[0].chunk_bytes == count(batch)


def test_in_order_each_row_is_inflated_once_if_one_is_kept_and_else_once_for_every_batch() -> None:
    column = make_column()
    assert count_batched_epoch([column], [1], 4).in_order == 16 * column.row_bytes
    assert count_batched_epoch([column], [0], 4).in_order == 32 * column.row_bytes
    assert count_batched_epoch([column], [96], 4).shuffled == 16 * column.row_bytes


def test_a_library_that_keeps_nothing_pays_the_amplification_for_every_sample() -> None:
    column = make_column()
    found = count_plain_epoch([column])
    assert found.in_order == found.shuffled == 96 * column.inflated_bytes == 96 * 32 * column.amplification


def test_what_is_not_in_chunks_inflates_nothing() -> None:
    column = make_column(chunk=None, filters=())
    assert count_plain_epoch([column]).shuffled == count_batched_epoch([column], [0], 4).shuffled == 0


def test_small_files_are_kept_whole() -> None:
    column = make_column()
    assert find_rooms([column], "hdf5") == [96]
    assert find_rooms([column], "zarr") == [96]
    huge = make_column(shape=(10**9, 8))
    assert 1 < find_rooms([huge], "zarr")[0] < 10**9 // 6
