"""Inflations are those of HDF5 itself, for any shape of chunks and any cache."""

from __future__ import annotations

import random

import pytest

from scalelab.data.chunk_cache import CacheSize, ChunkGrid, Walk, count_in_order, count_shuffled
from tests.data.counting import count_chunks_read, make_file


def draw_case(seed: int) -> tuple[ChunkGrid, CacheSize]:
    """A small array in any chunks, and a cache of about their size."""
    draw = random.Random(seed)
    shape = (draw.randint(2, 40), *(draw.randint(1, 12) for _ in range(draw.choice([1, 2, 3]))))
    grid = ChunkGrid(shape=shape, chunk=tuple(draw.randint(1, size) for size in shape), item_bytes=2)
    kept = draw.choice([0, 1, draw.randint(2, 20), grid.row_length, max(0, grid.row_length + draw.randint(-2, 2)), 999])
    num_bytes = max(0, kept * grid.chunk_bytes - draw.choice([0, 0, 1]))
    slots, w0 = draw.choice([1, 2, 3, 7, 13, 101, 521, 8191]), draw.choice([0.0, 0.25, 0.5, 0.75, 1.0])
    return grid, CacheSize(num_bytes=num_bytes, num_slots=slots, w0=w0)


@pytest.mark.parametrize("block", range(2))
def test_inflations_are_those_of_hdf5_on_a_grid_of_chunks_and_caches(block: int) -> None:
    for seed in range(40 * block, 40 * (block + 1)):
        grid, size = draw_case(seed)
        data = make_file(grid.shape, grid.chunk, compression="gzip", compression_opts=1)
        order = list(range(grid.shape[0]))
        counted = count_in_order(grid, size)
        assert counted.is_exact
        assert counted.number == count_chunks_read(data, order, size), (grid, size)
        random.Random(seed).shuffle(order)
        walk = Walk(grid, size)
        assert sum(map(walk.read, order)) == count_chunks_read(data, order, size), (grid, size)


def test_without_a_cache_every_sample_inflates_all_of_its_chunks() -> None:
    grid = ChunkGrid(shape=(100, 6, 4), chunk=(10, 2, 3), item_bytes=1)
    nothing = CacheSize(num_bytes=0, num_slots=521)
    assert count_in_order(grid, nothing).number == count_shuffled(grid, nothing).number == 100 * 3 * 2


def test_a_cache_for_a_row_of_chunks_inflates_each_once_in_order_and_one_for_all_in_any_order() -> None:
    grid = ChunkGrid(shape=(100, 6, 4), chunk=(10, 2, 4), item_bytes=1)
    row = CacheSize(num_bytes=3 * grid.chunk_bytes, num_slots=10_007)
    whole = CacheSize(num_bytes=30 * grid.chunk_bytes, num_slots=10_007)
    assert count_in_order(grid, row).number == 30
    assert count_shuffled(grid, row).number > 200
    assert count_shuffled(grid, whole).number == 30


def test_two_chunks_of_the_same_slot_drive_each_other_out() -> None:
    grid = ChunkGrid(shape=(8, 2), chunk=(8, 1), item_bytes=1)
    assert count_in_order(grid, CacheSize(num_bytes=1000, num_slots=2)).number == 2
    assert count_in_order(grid, CacheSize(num_bytes=1000, num_slots=1)).number == 16


def test_a_long_epoch_is_counted_without_following_all_of_it() -> None:
    grid = ChunkGrid(shape=(50_000, 3, 32, 32), chunk=(6250, 1, 4, 4), item_bytes=1)
    counted = count_in_order(grid, CacheSize(num_bytes=2**20, num_slots=521))
    assert counted.is_exact
    assert counted.number == 50_000 * 192


def test_a_count_that_was_cut_short_says_so_and_is_near() -> None:
    grid = ChunkGrid(shape=(4000, 8), chunk=(8, 1), item_bytes=1)
    size = CacheSize(num_bytes=7 * 8, num_slots=521)
    whole, short = count_in_order(grid, size), count_in_order(grid, size, most_visits=4000)
    assert whole.is_exact
    assert not short.is_exact
    assert short.number == pytest.approx(whole.number, rel=0.02)
    followed, guessed = count_shuffled(grid, size), count_shuffled(grid, size, most_visits=8000)
    assert guessed.number == pytest.approx(followed.number, rel=0.02)
