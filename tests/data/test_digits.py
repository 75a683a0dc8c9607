"""The digits: real images that are always there."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits as load_small

from scalelab.data.images import MEAN, STD, load_digits, read_small_digits
from scalelab.errors import UsageError


def test_training_and_test_images_are_all_images_once() -> None:
    train, test = load_digits("train"), load_digits("test")
    assert (len(train), len(test)) == (1442, 355)
    small, labels = load_small(return_X_y=True)
    both = np.concatenate([train.images, test.images])[:, 0, ::4, ::4].reshape(1797, 64)
    assert sorted(map(bytes, both)) == sorted(map(bytes, np.rint(small * 255 / 16).astype(np.uint8)))
    assert sorted([*train.labels, *test.labels]) == sorted(labels)


def test_the_library_gives_the_same_where_its_file_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = read_small_digits()
    monkeypatch.setattr(Path, "is_file", lambda _: False)
    others, other_labels = read_small_digits()
    assert np.array_equal(images, others)
    assert np.array_equal(labels, other_labels)


def test_every_class_has_its_share_of_the_test_images() -> None:
    train, test = (np.bincount(load_digits(split).labels) for split in ("train", "test"))
    assert np.all(np.abs(test / (train + test) - 0.2) < 0.01)


def test_a_pixel_is_a_square_in_three_equal_channels() -> None:
    images = load_digits("test").images
    assert images.max() == 255
    assert images.min() == 0
    assert np.array_equal(images[:, 0], images[:, 2])
    blocks = images[:, 0].reshape(-1, 8, 4, 8, 4)
    assert np.array_equal(blocks.min(axis=(2, 4)), blocks.max(axis=(2, 4)))


def test_the_split_is_always_the_same() -> None:
    first, again = load_digits("test"), load_digits("test")
    assert np.array_equal(first.images, again.images)


def test_mean_and_deviation_are_those_of_the_training_images() -> None:
    images = load_digits("train").images / 255
    assert images.mean() == pytest.approx(MEAN[0], abs=5e-5)
    assert images.std() == pytest.approx(STD[0], abs=5e-5)


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(UsageError, match=r"pip install 'scalelab\[torch\]'"):
        load_digits("train")
