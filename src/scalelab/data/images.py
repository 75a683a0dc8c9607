"""`ImageSet`: labelled images in memory, as bytes, a quarter of the size of floats; and scikit-learn's digits.

The digits need no download: 1797 handwritten digits of 8 × 8 pixels with values from 0 to 16 (part of the UCI set
Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, 1998), in CIFAR-10's shape: a value v becomes the
byte 255·v/16, rounded, a pixel a square of 4 × 4, and the three channels are equal.

Every fifth image of each class is a test image: 1442 to train on, 355 to test. The split is not random, so no library
version changes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from scalelab.errors import UsageError

NUM_CHANNELS = 3
SIDE = 32
"""Height and width of an image."""


@dataclass(frozen=True)
class ImageSet:
    """Images of 3 × 32 × 32 bytes, their classes, and mean and std per channel in [0, 1]."""

    images: npt.NDArray[np.uint8]
    """(samples, 3, 32, 32)"""
    labels: npt.NDArray[np.int64]
    """(samples,)"""
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        shape = (len(self.labels), NUM_CHANNELS, SIDE, SIDE)
        if self.images.dtype != np.uint8 or self.images.shape != shape:
            raise ValueError(f"images are {self.images.dtype} {self.images.shape}, not uint8 {shape}")
        if self.labels.dtype != np.int64 or self.labels.ndim != 1:
            raise ValueError(f"labels are {self.labels.dtype} {self.labels.shape}, not int64 ({len(self.labels)},)")
        if {len(self.mean), len(self.std)} != {NUM_CHANNELS}:
            raise ValueError(f"mean and std need {NUM_CHANNELS} numbers: {self.mean}, {self.std}")

    def __len__(self) -> int:
        return len(self.labels)


MOST_VALUE = 16
NUM_CLASSES = 10
TEST_EVERY = 5
ENLARGEMENT = SIDE // 8

MEAN = (0.3052,) * NUM_CHANNELS
STD = (0.3760,) * NUM_CHANNELS
"""Of the training images."""


def load_digits(split: Literal["train", "test"]) -> ImageSet:
    """The training or test images."""
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
    """Images of 64 values and their classes, from the file that scikit-learn ships.

    Importing scikit-learn takes a second, and every trial is a fresh process, so it is the fallback.
    """
    found = find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise UsageError("the digits dataset needs scikit-learn, which is not installed: pip install 'scalelab[torch]'")
    file = Path(found.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    if file.is_file():
        values = np.loadtxt(file, delimiter=",")
        return values[:, :-1], values[:, -1].astype(np.int64)
    from sklearn.datasets import load_digits as load_small  # type: ignore[import-untyped]

    small, labels = load_small(return_X_y=True)
    return small, labels


def is_test_image(labels: np.ndarray[tuple[int], np.dtype[np.int64]]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Whether each image is a test image."""
    chosen = np.zeros(len(labels), dtype=np.bool_)
    for label in range(NUM_CLASSES):
        chosen[np.flatnonzero(labels == label)[TEST_EVERY - 1 :: TEST_EVERY]] = True
    return chosen
