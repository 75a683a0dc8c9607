"""Augmenting a batch at once gives what augmenting image by image gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scalelab.data.images import ImageSet
from scalelab.worker.batches.drawn import (
    Changes,
    ImageFetch,
    SampleBatches,
    draw_words,
    flip_and_crop,
    normalise,
    read_changes,
)

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


def make_images(num_images: int = 64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (num_images, 3, 32, 32), dtype=torch.uint8, generator=generator)


def augment_one(image: torch.Tensor, flip: bool, top: int, left: int) -> torch.Tensor:
    """One image by the book: pad, cut, mirror, scale, normalise."""
    padded = torch.nn.functional.pad(image, (4, 4, 4, 4))
    cut = padded[:, top : top + 32, left : left + 32]
    if flip:
        cut = cut.flip(2)
    return (cut.float() / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def test_a_batch_is_bit_equal_to_its_images_one_by_one() -> None:
    images, changes = make_images(), read_changes(draw_words(0, 0, 0, 64))
    together = normalise(flip_and_crop(images, changes), MEAN, STD)
    alone = [
        augment_one(image, bool(flip), int(top), int(left))
        for image, flip, top, left in zip(images, *changes, strict=True)
    ]
    assert together.dtype == torch.float32
    assert torch.equal(together, torch.stack(alone))


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize(("top", "left"), [(0, 0), (0, 8), (8, 0), (8, 8), (4, 4)])
def test_the_corners_are_cut_right(flip: bool, top: int, left: int) -> None:
    images = make_images(1)
    changes = Changes(torch.tensor([flip]), torch.tensor([top]), torch.tensor([left]))
    found = normalise(flip_and_crop(images, changes), MEAN, STD)
    assert torch.equal(found[0], augment_one(images[0], flip, top, left))


def test_the_middle_cut_is_the_image_itself() -> None:
    images = make_images(5)
    middle = torch.full((5,), 4)
    assert torch.equal(flip_and_crop(images, Changes(torch.zeros(5, dtype=torch.bool), middle, middle)), images)


def test_normalising_alone_changes_only_the_scale() -> None:
    images = make_images(3)
    found = normalise(images, MEAN, STD)
    assert torch.equal(found, torch.stack([augment_one(image, False, 4, 4) for image in images]))
    assert images.dtype == torch.uint8


def test_half_are_mirrored_and_every_place_of_the_cut_is_as_likely() -> None:
    changes = read_changes(draw_words(1, 0, 0, 9000))
    assert changes.flip.double().mean().item() == pytest.approx(0.5, abs=0.02)
    for offsets in (changes.top, changes.left):
        assert offsets.bincount(minlength=9).sub(1000).abs().max() < 150
    assert not torch.equal(changes.top, changes.left)


@pytest.mark.parametrize("augment", [False, True])
def test_images_are_fetched_with_their_labels(augment: bool) -> None:
    images, labels = make_images().numpy(), np.arange(64, dtype=np.int64)
    fetch = ImageFetch(ImageSet(images, labels, MEAN, STD), augment=augment)
    indices, words = torch.tensor([5, 3]), draw_words(0, 0, 0, 2)
    found, classes = fetch(indices, words)
    changes = read_changes(words) if augment else Changes(torch.zeros(2), torch.full((2,), 4), torch.full((2,), 4))
    for row, index in enumerate([5, 3]):
        flip, top, left = (part[row].item() for part in changes)
        assert torch.equal(found[row], augment_one(torch.from_numpy(images[index]), bool(flip), int(top), int(left)))
    assert classes.tolist() == [5, 3]


def test_augmented_images_do_not_depend_on_ranks_or_workers() -> None:
    fetch = ImageFetch(ImageSet(make_images().numpy(), np.arange(64), MEAN, STD), augment=True)
    make = lambda **fields: SampleBatches(fetch, 64, seed=0, **fields)  # noqa: E731
    whole = list(make(batch_size=16, rank=0, num_ranks=1))
    halves = [make(batch_size=8, rank=rank, num_ranks=2, workers=rank) for rank in range(2)]
    for number, (left, right) in enumerate(zip(*halves, strict=True)):
        for part in range(2):
            assert torch.equal(torch.cat([left[part], right[part]]), whole[number][part])
    for half in halves:
        half.close()
