"""`ImageSet`: labelled images in memory, as bytes, with what they are normalised by.

Bytes and not floats: a quarter of the memory, and the copy that a training batch needs is made anyway when it is
augmented and normalised.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NUM_CHANNELS = 3
SIDE = 32
"""Pixels of an image in each direction."""


@dataclass(frozen=True)
class ImageSet:
    """Images of 3 × 32 × 32 bytes, their classes, and mean and standard deviation of each channel in [0, 1]."""

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
