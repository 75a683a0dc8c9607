"""Randomness of orders: 0 as stored, 1 for a full shuffle, and what theory says of blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelab.data.order import BlockShuffle, FullShuffle, Order, Sequential
from scalelab.data.stored_order import Randomness, measure_randomness

NUM_SAMPLES = 20_000
CHUNK = 100
BATCH = 50


def measure(order: Order, num_samples: int = NUM_SAMPLES) -> Randomness:
    return measure_randomness(order.draw(0, 0, num_samples), chunk_samples=CHUNK, batch_size=BATCH)


@given(num_samples=st.integers(3, 300), chunk=st.integers(1, 20), batch=st.integers(2, 20))
def test_stored_order_has_none(num_samples: int, chunk: int, batch: int) -> None:
    found = measure_randomness(np.arange(num_samples), chunk_samples=chunk, batch_size=batch)
    assert found.displacement == 0
    assert found.separation == 0
    assert found.correlation == 1


def test_in_stored_order_a_batch_inside_a_chunk_is_all_of_one() -> None:
    assert measure(Sequential()).same_chunk_share == 1


def test_a_full_shuffle_is_one() -> None:
    found = measure(FullShuffle())
    assert found.displacement == pytest.approx(1, abs=0.03)
    assert found.separation == pytest.approx(1, abs=0.03)
    assert found.correlation == pytest.approx(0, abs=0.03)
    assert found.shuffled_same_chunk_share == pytest.approx((CHUNK - 1) / (NUM_SAMPLES - 1))
    assert found.same_chunk_share == pytest.approx(found.shuffled_same_chunk_share, rel=0.1)


def test_over_all_orders_of_a_few_samples_a_full_shuffle_is_one_exactly() -> None:
    """The mean over many draws comes to the expectation that is divided by."""
    drawn = [measure_randomness(FullShuffle().draw(0, e, 6), chunk_samples=2, batch_size=3) for e in range(4000)]
    assert np.mean([found.displacement for found in drawn]) == pytest.approx(1, abs=0.02)
    assert np.mean([found.separation for found in drawn]) == pytest.approx(1, abs=0.02)
    assert np.mean([found.same_chunk_share for found in drawn]) == pytest.approx(1 / 5, abs=0.02)
    assert drawn[0].shuffled_same_chunk_share == pytest.approx(1 / 5)


@pytest.mark.parametrize("window", [1, 4, 20])
def test_blocks_separate_neighbours_by_their_window_though_chunks_move_far(window: int) -> None:
    found = measure(BlockShuffle(chunk_samples=CHUNK, window_chunks=window))
    size = window * CHUNK
    inside = (size + 1) / 3
    across = (NUM_SAMPLES + 1) / 3
    expected = (((CHUNK - 1) * inside + across) / CHUNK - 1) * 3 / (NUM_SAMPLES - 2)
    assert found.separation == pytest.approx(expected, rel=0.15)
    assert found.displacement == pytest.approx(1, abs=0.15)
    assert found.same_chunk_share == pytest.approx((CHUNK - 1) / (size - 1), rel=0.05)


def test_a_window_as_large_as_the_set_is_as_random_as_a_full_shuffle() -> None:
    found = measure(BlockShuffle(chunk_samples=CHUNK, window_chunks=NUM_SAMPLES // CHUNK))
    assert found.separation == pytest.approx(1, abs=0.03)
    assert found.same_chunk_share == pytest.approx(found.shuffled_same_chunk_share, rel=0.1)


def test_a_reversed_order_moves_samples_further_than_chance_and_separates_none() -> None:
    found = measure_randomness(np.arange(1000)[::-1], chunk_samples=10, batch_size=10)
    assert found.displacement == pytest.approx(1.5, rel=1e-3)
    assert found.separation == 0
    assert found.correlation == pytest.approx(-1)


def test_pairs_are_counted_inside_batches_and_the_short_last_chunk_is_seen() -> None:
    order = np.array([0, 1, 4, 2, 3, 5, 6])  # chunks 0 0 2 | 1 1 2 | (3 is left over)
    found = measure_randomness(order, chunk_samples=2, batch_size=3)
    assert found.same_chunk_share == pytest.approx(2 / 6)
    assert found.shuffled_same_chunk_share == pytest.approx(3 / 21)


def test_too_few_samples_say_nothing() -> None:
    found = measure_randomness(np.array([0]), chunk_samples=2, batch_size=3)
    assert found == Randomness(
        displacement=None, separation=None, correlation=None, same_chunk_share=None, shuffled_same_chunk_share=None
    )
    assert found.words.count("–") == 3


def test_the_numbers_have_words() -> None:
    words = measure(BlockShuffle(chunk_samples=CHUNK, window_chunks=4)).words
    assert words == (
        "stored neighbours end up 2.9 % as far apart as in a full shuffle; 25 % of the pairs in a batch share a chunk"
        " (0.5 % in a full shuffle)"
    )
