"""Test samples: the same in every pass, or an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from scalelab.errors import UsageError
from scalelab.quantize.held_out import HeldOut, split_batch


class Shuffled:
    """Gives other classes in every pass."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        yield torch.zeros(3, 2), torch.arange(3).roll(self.passes)


def test_predictions_are_in_the_order_of_the_samples() -> None:
    batches = [(torch.eye(4)[:3], torch.tensor([0, 1, 2])), (torch.eye(4)[3:], torch.tensor([3]))]
    held = HeldOut(batches)
    assert held.labels == (0, 1, 2, 3)
    assert held.predict(lambda images: images) == (0, 1, 2, 3)


def test_chosen_samples_are_spread_over_the_whole_set() -> None:
    images = torch.arange(10.0).reshape(10, 1)
    held = HeldOut([(images[:4], torch.arange(4)), (images[4:], torch.arange(4, 10))])
    chosen, labels = held.choose(5)
    assert chosen.flatten().tolist() == [0, 2, 4, 6, 8]
    assert labels is not None
    assert labels.tolist() == [0, 2, 4, 6, 8]
    assert len(held.choose(99)[0]) == 10


def test_a_loader_that_shuffles_its_test_data_is_refused() -> None:
    held = HeldOut(Shuffled())
    with pytest.raises(UsageError, match="do not shuffle"):
        held.predict(lambda images: images)


def test_samples_without_classes_are_counted() -> None:
    held = HeldOut([torch.zeros(3, 2), torch.zeros(2, 2)], told="training samples")
    assert (held.labels, held.num_samples, held.choose(2)[1]) == ((), 5, None)


def test_nothing_to_test_on_is_an_error() -> None:
    with pytest.raises(UsageError, match="there are no test samples"):
        HeldOut([])


@pytest.mark.parametrize(("value", "words"), [(float("nan"), "NaN"), (float("inf"), "infinite numbers")])
def test_test_samples_that_are_no_numbers_are_refused(value: float, words: str) -> None:
    with pytest.raises(UsageError, match=f"test batch 1 has {words}"):
        HeldOut([torch.zeros(3, 2), torch.full((2, 2), value)])


def test_classes_of_some_samples_only_are_refused() -> None:
    with pytest.raises(UsageError, match="3 of 5 test samples have labels"):
        HeldOut([(torch.zeros(3, 2), torch.arange(3)), torch.zeros(2, 2)])


def test_data_that_ends_early_in_a_later_pass_is_refused() -> None:
    held = HeldOut(batches := [torch.zeros(3, 2), torch.zeros(2, 2)])
    batches.pop()
    with pytest.raises(UsageError, match="5 samples at first and 3 later"):
        list(held.images())


@pytest.mark.parametrize("batch", [torch.zeros(2, 3, dtype=torch.int64), "images", [], {"x": 1}])
def test_batches_that_are_no_images_are_named(batch: object) -> None:
    with pytest.raises(UsageError, match="batch 7 starts with a"):
        split_batch(batch, 7)


def test_targets_that_are_no_classes_are_not_taken_for_some() -> None:
    assert split_batch((torch.zeros(2, 3), torch.zeros(2)))[1] == []
    assert split_batch((torch.zeros(2, 3), torch.zeros(2, 4, dtype=torch.int64)))[1] == []
    assert split_batch((torch.zeros(2, 3), torch.tensor([4, 1])))[1] == [4, 1]
