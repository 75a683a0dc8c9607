"""scikit-learn's bundled digits in the shape of CIFAR-10: real images that need no download.

1797 handwritten digits of 8 × 8 pixels with values from 0 to 16 (a part of the UCI set Optical Recognition of
Handwritten Digits, E. Alpaydin and C. Kaynak, 1998). Every value v becomes the byte 255·v/16, rounded, every pixel a
square of 4 × 4, and the three channels are equal, so that whatever trains on CIFAR-10 trains on them.

Every fifth image of each class, counted in the order of the set, is a test image: 1442 to train on, 355 to test.
There is nothing random in it, so that no version of any library changes the split.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np

from scalelab.data.images import NUM_CHANNELS, SIDE, ImageSet
from scalelab.errors import UsageError

MOST_VALUE = 16
NUM_CLASSES = 10
TEST_EVERY = 5
ENLARGEMENT = SIDE // 8

MEAN = (0.3052,) * NUM_CHANNELS
STD = (0.3760,) * NUM_CHANNELS
"""Of the training images, to four digits."""


def load_digits(split: Literal["train", "test"]) -> ImageSet:
    """The training or the test images."""
    small, labels = read_small_digits()
    wanted = is_test_image(labels) == (split == "test")
    values = np.rint(small[wanted] * 255 / MOST_VALUE).astype(np.uint8).reshape(-1, 1, 8, 8)
    large = values.repeat(ENLARGEMENT, axis=2).repeat(ENLARGEMENT, axis=3)
    return ImageSet(
        images=large.repeat(NUM_CHANNELS, axis=1),
        labels=labels[wanted].astype(np.int64),
        mean=MEAN,
        std=STD,
    )


def read_small_digits() -> tuple[np.ndarray[Any, np.dtype[np.float64]], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Images of 64 values each, and their classes, from the file that scikit-learn brings.

    The library itself is left alone where that works: loading it takes a second, and every trial is a fresh process.
    """
    found = find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise UsageError("the digits come with scikit-learn, which is missing: pip install 'scalelab[torch]'")
    file = Path(found.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    if file.is_file():
        values = np.loadtxt(file, delimiter=",")
        return values[:, :-1], values[:, -1].astype(np.int64)
    from sklearn.datasets import load_digits as load_small  # type: ignore[import-untyped]

    small, labels = load_small(return_X_y=True)
    return small, labels


def is_test_image(labels: np.ndarray[tuple[int], np.dtype[np.int64]]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """For every image, whether it is among those that are tested on."""
    chosen = np.zeros(len(labels), dtype=np.bool_)
    for label in range(NUM_CLASSES):
        chosen[np.flatnonzero(labels == label)[TEST_EVERY - 1 :: TEST_EVERY]] = True
    return chosen
