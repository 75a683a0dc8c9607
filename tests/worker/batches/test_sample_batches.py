"""Batches in memory depend neither on the ranks, nor on accumulation, nor on workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalelab.data.order import FullShuffle, Sequential
from scalelab.errors import UsageError
from scalelab.worker.batches.drawn import Partition, SampleBatches, draw_words

Batches = list[tuple[torch.Tensor, ...]]


def fetch_indices(indices: torch.Tensor, words: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return indices, words


def make_batches(num_samples: int = 40, **fields: Any) -> SampleBatches:
    defaults: dict[str, Any] = {"batch_size": 4, "rank": 0, "num_ranks": 1, "seed": 0}
    return SampleBatches(fetch_indices, num_samples, **(defaults | fields))


@contextmanager
def closing(batches: SampleBatches) -> Iterator[SampleBatches]:
    try:
        yield batches
    finally:
        batches.close()


def is_equal(left: Batches, right: Batches) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a, b) for one, other in zip(left, right, strict=True) for a, b in zip(one, other, strict=True)
    )


def read_steps(num_samples: int, batch: int, num_ranks: int, accumulation: int, epoch: int = 0) -> Batches:
    """What every step trains on, all ranks and batches of it one after the other."""
    ranks = []
    for rank in range(num_ranks):
        batches = make_batches(
            num_samples, batch_size=batch, rank=rank, num_ranks=num_ranks, accumulation=accumulation, seed=3
        )
        batches.set_epoch(epoch)
        ranks.append(list(batches))
    every = [
        torch.cat(parts) for index in range(len(ranks[0])) for parts in zip(*(own[index] for own in ranks), strict=True)
    ]
    pairs = [(every[i], every[i + 1]) for i in range(0, len(every), 2)]
    return [
        tuple(torch.cat([pair[part] for pair in pairs[first : first + accumulation]]) for part in range(2))
        for first in range(0, len(pairs), accumulation)
    ]


sizes = st.integers(1, 4)


@given(base=sizes, num_ranks=sizes, accumulation=sizes, extra=st.integers(0, 100), epoch=st.integers(0, 3))
def test_ranks_and_accumulation_change_neither_the_samples_of_a_step_nor_their_randomness(
    base: int, num_ranks: int, accumulation: int, extra: int, epoch: int
) -> None:
    whole = base * num_ranks * accumulation
    alone = read_steps(whole + extra, whole, 1, 1, epoch)
    assert len(alone) == (whole + extra) // whole
    assert is_equal(read_steps(whole + extra, base * accumulation, num_ranks, 1, epoch), alone)
    assert is_equal(read_steps(whole + extra, base * num_ranks, 1, accumulation, epoch), alone)
    assert is_equal(read_steps(whole + extra, base, num_ranks, accumulation, epoch), alone)
    indices = torch.cat([step[0] for step in alone])
    assert len(indices.unique()) == len(indices)


@given(num_samples=st.integers(1, 60), batch=st.integers(1, 5), num_ranks=st.integers(1, 5))
def test_a_test_leaves_no_sample_out_and_no_rank_without(num_samples: int, batch: int, num_ranks: int) -> None:
    if num_samples < num_ranks:
        with pytest.raises(UsageError, match="too few"):
            make_batches(num_samples, batch_size=batch, num_ranks=num_ranks, is_test=True)
        return
    ranks = [
        list(
            make_batches(
                num_samples, batch_size=batch, rank=rank, num_ranks=num_ranks, is_test=True, order=Sequential()
            )
        )
        for rank in range(num_ranks)
    ]
    assert len({len(own) for own in ranks}) == 1
    found = [[indices.tolist() for indices, _ in own] for own in ranks]
    assert all(1 <= len(indices) <= batch + 1 for own in found for indices in own)
    in_order = [index for batches in zip(*found, strict=True) for indices in batches for index in indices]
    assert in_order == list(range(num_samples))


def test_a_rest_too_small_for_all_ranks_joins_the_batch_before() -> None:
    partition = Partition(num_samples=9, batch_size=2, rank=1, num_ranks=2, is_test=True)
    assert partition.num_batches == 2
    assert [partition.bounds(index) for index in range(2)] == [(2, 4), (6, 9)]


def test_every_epoch_has_an_order_and_a_randomness_of_its_own_which_come_again() -> None:
    batches = make_batches(order=FullShuffle())
    epochs = []
    for epoch in (0, 1, 0):
        batches.set_epoch(epoch)
        epochs.append(list(batches))
    assert is_equal(epochs[0], epochs[2])
    for part in range(2):
        assert not torch.equal(epochs[0][0][part], epochs[1][0][part])


def test_without_shuffling_the_samples_keep_their_order() -> None:
    indices = torch.cat([batch[0] for batch in make_batches(order=Sequential())])
    assert indices.tolist() == list(range(40))


def test_the_seed_decides() -> None:
    first, other, negative = (list(make_batches(seed=seed)) for seed in (0, 1, -1))
    assert not is_equal(first, other)
    assert not is_equal(first, negative)


def test_words_belong_to_a_position_and_are_uniform() -> None:
    words = draw_words(5, 2, 0, 4000)
    assert torch.equal(draw_words(5, 2, 1234, 2345), words[1234:2345])
    assert words.shape == (4000, 4)
    assert words.min() >= 0
    assert len(words.unique()) == words.numel()
    for bit in (0, 31, 62):
        ones = (words >> bit & 1).double().mean(dim=0)
        assert ones.sub(0.5).abs().max() < 0.04


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_give_the_same_batches_in_the_same_order(workers: int) -> None:
    alone = make_batches(rank=1, num_ranks=2)
    with closing(make_batches(rank=1, num_ranks=2, workers=workers)) as helped:
        for epoch in (0, 1, 5):
            alone.set_epoch(epoch)
            helped.set_epoch(epoch)
            assert is_equal(list(helped), list(alone))
        alone.seek(3)
        helped.seek(3)
        assert is_equal(list(helped), list(alone))
        iterator = iter(helped)
        next(iterator)
        assert is_equal(list(helped), list(alone))
        del iterator


def test_workers_leave_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    with closing(make_batches(workers=1)) as batches:
        list(batches)
        list(batches)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("index", [0, 4, 10])
def test_a_resumed_epoch_goes_on_with_the_same_batches_and_only_once(index: int) -> None:
    batches = make_batches()
    every = list(batches)
    assert len(every) == len(batches) == 10
    batches.seek(index)
    assert is_equal(list(batches), every[index:])
    assert is_equal(list(batches), every)


def test_seeking_fetches_nothing_of_what_went_before() -> None:
    fetched: list[int] = []

    def fetch(indices: torch.Tensor, words: torch.Tensor) -> tuple[torch.Tensor, ...]:
        fetched.extend(indices.tolist())
        return (indices,)

    batches = SampleBatches(fetch, 40, batch_size=4, rank=0, num_ranks=1, seed=0, order=Sequential())
    batches.seek(8)
    list(batches)
    assert fetched == list(range(32, 40))


@pytest.mark.parametrize("index", [-1, 11])
def test_a_batch_beyond_the_epoch_cannot_be_sought(index: int) -> None:
    with pytest.raises(UsageError, match=f"batch {index} is out of range for an epoch of 10: use 0 to 10"):
        make_batches().seek(index)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_samples": 7, "num_ranks": 2}, "7 samples are too few: 2 ranks × 4 samples each need 8"),
        ({"num_samples": 15, "num_ranks": 2, "accumulation": 2}, "2 ranks × 4 samples each × 2 batches need 16"),
        ({"batch_size": 0}, "--batch-size must be"),
        ({"workers": -1}, "--workers must be"),
    ],
)
def test_what_cannot_make_a_step_is_refused(fields: dict[str, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_batches(**fields)
