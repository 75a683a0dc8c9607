"""Orders: every sample once, the same on any number of ranks, resumed anywhere; blocks inflate every chunk once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from multiprocessing import resource_tracker
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelab.data.formats.stored import StoredSet
from scalelab.data.formats.writing import write_set
from scalelab.data.order import BlockShuffle, FullShuffle, Order, Sequential, choose_order, draw_order
from scalelab.errors import UsageError
from scalelab.worker.batches.drawn import SampleBatches, StartMethod
from scalelab.worker.models.transformer import StoredFetch, fetch_columns

blocks = st.builds(BlockShuffle, chunk_samples=st.integers(1, 9), window_chunks=st.integers(1, 6))
orders: st.SearchStrategy[Order] = st.one_of(st.just(Sequential()), st.just(FullShuffle()), blocks)
seeds = st.integers(0, 2**64 - 1)
epochs = st.integers(0, 5)


def fetch_numbers(indices: torch.Tensor, words: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return indices, words


def make_ranks(num_ranks: int, order: Order, num_samples: int = 53, global_batch: int = 12) -> list[SampleBatches]:
    return [
        SampleBatches(
            fetch_numbers,
            num_samples,
            batch_size=global_batch // num_ranks,
            rank=rank,
            num_ranks=num_ranks,
            seed=3,
            order=order,
        )
        for rank in range(num_ranks)
    ]


def read_global_batches(ranks: list[SampleBatches], epoch: int, start: int = 0) -> list[list[int]]:
    """The samples of every batch of all ranks, one rank's after the other's."""
    for batches in ranks:
        batches.set_epoch(epoch)
        batches.seek(start)
    return [torch.cat([batch[0] for batch in parts]).tolist() for parts in zip(*ranks, strict=True)]


def count_inflations(chunks: Iterable[int], slots: int) -> int:
    """How often a cache that forgets what was not used for longest has to inflate a chunk."""
    cache: OrderedDict[int, None] = OrderedDict()
    inflations = 0
    for chunk in chunks:
        inflations += chunk not in cache
        cache[chunk] = None
        cache.move_to_end(chunk)
        if len(cache) > slots:
            cache.popitem(last=False)
    return inflations


@given(order=orders, num_samples=st.integers(1, 200), seed=seeds, epoch=epochs)
def test_every_order_holds_each_sample_once_and_comes_again(
    order: Order, num_samples: int, seed: int, epoch: int
) -> None:
    drawn = order.draw(seed, epoch, num_samples)
    assert sorted(drawn) == list(range(num_samples))
    assert drawn.dtype == np.int64
    assert np.array_equal(order.draw(seed, epoch, num_samples), drawn)


@given(order=orders, num_samples=st.integers(12, 90), epoch=epochs)
@settings(deadline=None)
def test_ranks_are_disjoint_and_any_number_of_them_reads_the_same_order(
    order: Order, num_samples: int, epoch: int
) -> None:
    alone = read_global_batches(make_ranks(1, order, num_samples), epoch)
    whole = num_samples // 12 * 12
    assert [number for batch in alone for number in batch] == order.draw(3, epoch, num_samples)[:whole].tolist()
    for num_ranks in (2, 3, 4):
        assert read_global_batches(make_ranks(num_ranks, order, num_samples), epoch) == alone


@given(order=orders, epoch=epochs, start=st.integers(0, 4), before=st.sampled_from([1, 2, 3, 4]), data=st.data())
@settings(deadline=None)
def test_a_resume_anywhere_goes_on_with_the_same_bits_also_on_another_number_of_ranks(
    order: Order, epoch: int, start: int, before: int, data: st.DataObject
) -> None:
    after = data.draw(st.sampled_from([1, 2, 3, 4]))
    whole = read_global_batches(make_ranks(before, order), epoch)
    assert read_global_batches(make_ranks(after, order), epoch, start) == whole[start:]


@given(order=blocks, num_samples=st.integers(1, 200), seed=seeds, epoch=epochs)
def test_blocks_inflate_each_chunk_once_with_room_for_one_window(
    order: BlockShuffle, num_samples: int, seed: int, epoch: int
) -> None:
    chunks = (order.draw(seed, epoch, num_samples) // order.chunk_samples).tolist()
    assert count_inflations(chunks, order.window_chunks) == len(set(chunks))


@given(order=blocks, num_samples=st.integers(1, 200), epoch=epochs, data=st.data())
def test_four_windows_are_room_enough_for_a_reader_that_sorts_its_batches(
    order: BlockShuffle, num_samples: int, epoch: int, data: st.DataObject
) -> None:
    batch = data.draw(st.integers(1, order.window_chunks * order.chunk_samples))
    drawn = order.draw(0, epoch, num_samples) // order.chunk_samples
    asked = [chunk for first in range(0, num_samples, batch) for chunk in np.unique(drawn[first : first + batch])]
    assert count_inflations(asked, 4 * order.window_chunks) == len(set(asked))


@pytest.mark.parametrize(("chunk", "window", "batch"), [(100, 20, 32), (100, 20, 128), (500, 4, 32), (10, 100, 64)])
def test_two_windows_do_where_batches_are_small_beside_them(chunk: int, window: int, batch: int) -> None:
    drawn = BlockShuffle(chunk_samples=chunk, window_chunks=window).draw(0, 0, 20_000) // chunk
    asked = [number for first in range(0, 20_000, batch) for number in np.unique(drawn[first : first + batch])]
    assert count_inflations(asked, 2 * window) == len(set(asked))
    assert count_inflations(asked, window) > len(set(asked))


def test_a_full_shuffle_inflates_nearly_for_every_sample() -> None:
    chunks = (FullShuffle().draw(0, 0, 10_000) // 100).tolist()
    assert count_inflations(chunks, slots=4) > 9_000
    assert count_inflations((BlockShuffle(chunk_samples=100, window_chunks=4).draw(0, 0, 10_000) // 100), 4) == 100


@given(order=blocks, num_samples=st.integers(60, 200))
def test_epochs_differ(order: BlockShuffle, num_samples: int) -> None:
    drawn = [order.draw(1, epoch, num_samples).tolist() for epoch in range(6)]
    assert any(other != drawn[0] for other in drawn[1:])


def test_a_window_as_large_as_the_set_is_a_full_shuffle() -> None:
    """Every order of four samples comes up, and as often as the others: 24 orders, 100 times each on average."""
    order = BlockShuffle(chunk_samples=2, window_chunks=2)
    counts: dict[tuple[int, ...], int] = {}
    for epoch in range(2400):
        drawn = tuple(order.draw(0, epoch, 4).tolist())
        counts[drawn] = counts.get(drawn, 0) + 1
    assert len(counts) == 24
    chi_squared = sum((count - 100) ** 2 / 100 for count in counts.values())
    assert chi_squared < 49.7  # 1 in 1000 would be above, with 23 degrees of freedom; the seed is fixed


def test_blocks_are_chosen_where_single_samples_cost_more_than_twice_their_bytes() -> None:
    assert choose_order(amplification=2.0, chunk_samples=2, chunk_bytes=80) == FullShuffle()
    chosen = choose_order(amplification=2.5, chunk_samples=100, chunk_bytes=1000, buffer_bytes=33_900)
    assert chosen == BlockShuffle(chunk_samples=100, window_chunks=16)
    tight = choose_order(amplification=128.0, chunk_samples=100, chunk_bytes=1000, buffer_bytes=10)
    assert tight == BlockShuffle(chunk_samples=100, window_chunks=1)


def test_what_cannot_be_a_block_is_refused() -> None:
    with pytest.raises(UsageError, match="--chunk-samples must be"):
        BlockShuffle(chunk_samples=0, window_chunks=1)
    with pytest.raises(UsageError, match="--window-chunks must be"):
        BlockShuffle(chunk_samples=1, window_chunks=-1)


def test_the_order_of_an_epoch_is_drawn_once_and_cannot_be_written_to() -> None:
    drawn = draw_order(FullShuffle(), 0, 0, 10)
    assert draw_order(FullShuffle(), 0, 0, 10) is drawn
    with pytest.raises(ValueError, match="read-only"):
        drawn[0] = 1


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    images = np.arange(48 * 6, dtype=np.uint8).reshape(48, 2, 3)
    write_set(tmp_path / "set", {"images": images, "labels": np.arange(48)}, format="npy")
    return tmp_path / "set"


def make_stored_batches(path: Path, workers: int = 0, start_method: StartMethod = "fork") -> SampleBatches:
    return SampleBatches(
        StoredFetch(StoredSet(path)),
        48,
        batch_size=5,
        rank=1,
        num_ranks=2,
        seed=7,
        order=BlockShuffle(chunk_samples=6, window_chunks=3),
        workers=workers,
        start_method=start_method,
    )


def test_a_stored_set_is_fetched_by_number(stored: Path) -> None:
    numbers = torch.tensor([40, 2, 2])
    images, labels = StoredFetch(StoredSet(stored))(numbers, torch.zeros(3, 4))
    assert torch.equal(labels, numbers)
    assert images.shape == (3, 2, 3)
    assert images[0].flatten().tolist() == [(40 * 6 + offset) % 256 for offset in range(6)]
    swapped = fetch_columns(StoredSet(stored), ["labels", "images"])(numbers, torch.zeros(3, 4))
    assert torch.equal(swapped[0], labels)
    with pytest.raises(UsageError, match=r"no column 'classes': it has images, labels"):
        fetch_columns(StoredSet(stored), ["classes"])


@pytest.fixture(scope="module")
def _resource_tracker() -> None:
    """Python's own process beside those that are spawned. It stays for good, and others may have given it semaphores to
    look after: it is started before anybody counts processes, and never stopped."""
    resource_tracker.ensure_running()


@pytest.mark.usefixtures("_resource_tracker")
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_workers_of_a_stored_set_go_on_in_mid_epoch_with_the_same_bits(stored: Path, start_method: StartMethod) -> None:
    alone = make_stored_batches(stored)
    helped = make_stored_batches(stored, workers=1 if start_method == "spawn" else 2, start_method=start_method)
    try:
        for epoch, start in ((0, 0), (2, 3)):
            parts = []
            for batches in (alone, helped):
                batches.set_epoch(epoch)
                batches.seek(start)
                parts.append(list(batches))
            assert len(parts[0]) == len(parts[1]) == 4 - start
            for one, other in zip(*parts, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    finally:
        helped.close()
